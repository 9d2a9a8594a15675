//! House rules that no lint keeps: seen by reading the sources.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

/// All Rust sources under `crates`, with their paths from there.
fn sources() -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut found, mut folders) = (Vec::new(), vec![crates.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let skipped = |name: &str| path.file_name().is_some_and(|file| file == name);
            if path.is_dir() && !skipped("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push((name(crates, &path), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.iter().any(|(name, _)| name == "device/src/sync.rs"), "{found:?}");
    found.sort();
    found
}

fn name(crates: &Path, path: &Path) -> String {
    path.strip_prefix(crates).unwrap().to_str().unwrap().into()
}

/// Lines with the word, without comments and strings of one line.
fn uses<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.lines()
        .filter(|line| {
            let code = line.split("//").next().unwrap_or_default();
            let code: String = code.split('"').step_by(2).collect();
            code.match_indices(word).any(|(at, _)| {
                !code[..at].ends_with(is_part) && !code[at + word.len()..].starts_with(is_part)
            })
        })
        .collect()
}

/// Where code is wrong, with its lines.
fn offenders(word: &str, allowed: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let mut offenders = Vec::new();
    for (name, text) in sources().iter().filter(|(name, _)| !allowed(name)) {
        offenders.extend(uses(text, word).into_iter().map(|line| (name.clone(), line.trim().to_string())));
    }
    offenders
}

/// loom can only check code that uses its atomics. No lint of clippy can see to it: `disallowed-types` knows the type,
/// whichever path names it.
#[test]
fn one_file_names_the_atomics() {
    let shim = ["device/src/sync.rs", "device/src/fork.rs"];
    let allowed = |name: &str| !name.contains("/src/") || shim.contains(&name);
    assert_eq!(offenders("atomic", allowed), []);
    assert_eq!(offenders("core::sync", allowed), []);
}

#[test]
fn unsafe_code_lives_in_one_crate() {
    // Tests that fork cannot do so without it.
    let forks =
        ["ranks/fork", "lease_trouble", "memory", "shrink"].map(|name| format!("tensorwire/tests/{name}.rs"));
    let allowed = |name: &str| {
        name.starts_with("device/") || name.starts_with("python/") || forks.iter().any(|fork| fork == name)
    };
    assert_eq!(offenders("unsafe", allowed), []);
    let (_, library) = sources().into_iter().find(|(name, _)| name == "tensorwire/src/lib.rs").unwrap();
    assert!(library.contains("#![forbid(unsafe_code)]"));
}

/// One file for each library of the driver, with a `Result` layer over it.
#[test]
fn one_file_names_the_bindings_of_nvml() {
    assert_eq!(offenders("nvml_wrapper_sys", |name| name == "device/src/nvml.rs"), []);
}

/// One folder for the other library of the driver. (Tests of kernels load what they compiled.)
#[test]
fn one_folder_names_the_bindings_of_cuda() {
    let allowed = |name: &str| {
        name.starts_with("device/src/cuda/driver/") || name == "device/src/cuda/kernels/tests/machine.rs"
    };
    assert_eq!(offenders("cudarc", allowed), []);
    let allowed = |name: &str| allowed(name) || name.starts_with("device/src/ucx/");
    assert_eq!(offenders("libloading", allowed), []);
}

/// One folder for the library of UCX. (Tests of links let its functions fail by name.)
#[test]
fn one_folder_names_the_functions_of_ucx() {
    let allowed = |name: &str| name.starts_with("device/src/ucx/") || name.contains("/tests");
    for (name, text) in sources().iter().filter(|(name, _)| !allowed(name)) {
        assert_eq!(text.lines().find(|line| line.contains("ucp_")), None, "{name}");
    }
}

/// What is special about a device is hidden behind the traits.
#[test]
fn the_library_does_not_know_cuda() {
    for (name, text) in sources().iter().filter(|(name, _)| name.starts_with("tensorwire/src/")) {
        let line = text.lines().find(|line| line.to_lowercase().contains("cuda"));
        assert_eq!(line, None, "{name}");
    }
}

/// The rules themselves see what they should.
#[test]
fn words_are_found_in_code_only() {
    assert_eq!(
        uses("unsafe { x }\n// unsafe\nlet a = \"unsafe\";\nunsafe_op();\n(unsafe fn)", "unsafe").len(),
        2
    );
}
