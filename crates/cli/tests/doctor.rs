//! `tensorwire doctor`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod tool;

use tool::{Ended, Folder, finished, tensorwire};

#[test]
fn json_has_every_probe_with_a_state() {
    let ended = finished(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(report["works"].as_bool(), Some(ended.code == Some(0)));
    let findings: Vec<&serde_json::Value> = report["sections"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|section| section["findings"].as_array().unwrap())
        .collect();
    for name in [
        "memfd",
        "fd passing",
        "pidfd",
        "futex_waitv",
        "boot id",
        "PID namespace",
        "mount namespace",
        "user namespace",
        "ptrace",
        "locked memory",
        "open files",
        "/dev/shm",
        "huge pages",
        "GPU driver",
        "NVML",
        "NCCL",
        "UCX",
        "Python",
        "supported versions",
        "TENSORWIRE_TIMEOUT",
    ] {
        assert!(findings.iter().any(|found| found["name"] == name), "{name} is missing");
    }
    for finding in findings {
        let state = finding["state"].as_str().unwrap();
        assert!(["ok", "fact", "warn", "off", "fail"].contains(&state));
        let explained = matches!(state, "ok" | "fact") || finding["reason"].is_string();
        assert!(explained, "a no without its reason: {finding}");
    }
}

#[test]
fn text_fits_a_terminal_and_has_no_colour_in_a_pipe() {
    let ended = finished(&["doctor"]);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(!ended.out.contains('\x1b'));
    assert!(ended.out.contains("Sharing host memory") && ended.out.contains("TENSORWIRE_LOG"));
}

#[test]
fn variables_are_shown_with_their_values() {
    let mut command = tensorwire(&["doctor", "--json"]);
    let ended: Ended = command.env("TENSORWIRE_TIMEOUT", "7.5").output().unwrap().into();
    assert!(
        ended.out.contains(r#"{"name":"TENSORWIRE_TIMEOUT","state":"ok","value":"7.5 (set)""#),
        "{}",
        ended.out
    );
}

#[test]
fn a_wrong_variable_is_a_line_and_not_a_crash() {
    let mut command = tensorwire(&["doctor"]);
    let command =
        command.env("TENSORWIRE_TIMEOUT", "soon").env("TENSORWIRE_TIMOUT", "3").env("TENSORWIRE_STRICT", "1");
    let ended: Ended = command.output().unwrap().into();
    assert_eq!(ended.code, Some(1));
    assert!(ended.out.contains("FAIL  TENSORWIRE_TIMOUT"), "{}", ended.out);
    assert!(ended.out.contains("FAIL  TENSORWIRE_TIMEOUT"), "{}", ended.out);
    assert!(ended.out.contains("ok    TENSORWIRE_STRICT"), "{}", ended.out);
    assert_eq!(ended.err, "");
}

#[test]
fn a_key_is_never_shown() {
    let words = "a key of more than thirty-two characters";
    for (key, wanted) in [
        (words, "fingerprint "),
        ("a key that is short", "of 19 characters is too short"),
        ("", "whoever reaches the store's port can join"),
    ] {
        let ended: Ended =
            tensorwire(&["doctor", "--json"]).env("TENSORWIRE_KEY", key).output().unwrap().into();
        let (_, line) = ended.out.split_once(r#"{"name":"TENSORWIRE_KEY""#).unwrap();
        assert!(line.contains(wanted), "{}", ended.out);
        assert!(key.is_empty() || !format!("{}{}", ended.out, ended.err).contains(key), "{}", ended.out);
    }
}

#[test]
fn what_is_sealed_is_judged_beside_the_key() {
    for (key, state) in [("a key of more than thirty-two characters", "ok"), ("", "fail")] {
        let mut command = tensorwire(&["doctor", "--json"]);
        let ended: Ended =
            command.env("TENSORWIRE_KEY", key).env("TENSORWIRE_SEAL", "control").output().unwrap().into();
        let wanted = format!(r#"{{"name":"TENSORWIRE_SEAL","state":"{state}","value":"control"#);
        assert!(ended.out.contains(&wanted), "{}", ended.out);
        assert_eq!(
            ended.out.contains("without TENSORWIRE_KEY nothing is sealed"),
            key.is_empty(),
            "{}",
            ended.out
        );
    }
}

/// Also on a machine with a driver: the loader finds files that are no libraries first.
#[test]
fn without_a_driver_doctor_and_topo_say_why() {
    let folder = Folder::new();
    for file in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
        std::fs::write(folder.join(file), "no library").unwrap();
    }
    let libraries = folder.join("");
    for (command, said) in
        [("doctor", ["libcuda.so.1", "libnvidia-ml.so.1"]), ("topo", ["libcuda.so.1", "libnvidia-ml.so.1"])]
    {
        let ended: Ended =
            tensorwire(&[command, "--json"]).env("LD_LIBRARY_PATH", &libraries).output().unwrap().into();
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{command}");
        for library in said {
            let reason = folder.join(library).display().to_string();
            assert!(
                ended.out.contains(&reason),
                "{command} does not say why {library} is not used: {}",
                ended.out
            );
        }
    }
}

/// What doctor says of Python, where a script is Python.
fn of_python(script: &str) -> Vec<(String, String, String)> {
    let folder = Folder::new();
    let python = folder.script("python", script);
    let ended: Ended = tensorwire(&["doctor", "--json"]).env("PYTHON", &python).output().unwrap().into();
    let report: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    let sections = report["sections"].as_array().unwrap();
    let section = sections.iter().find(|section| section["name"] == "Python").unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let line = |found: &serde_json::Value| {
        let value = format!("{} {}", text(&found["value"]), text(&found["reason"]));
        (text(&found["name"]), text(&found["state"]), value)
    };
    section["findings"].as_array().unwrap().iter().map(line).collect()
}

#[test]
fn python_torch_and_the_backend_are_found() {
    let own = env!("CARGO_PKG_VERSION");
    let say = |lines: &[&str]| {
        let lines: Vec<String> =
            lines.iter().map(|line| format!("echo 'tensorwire-doctor {line}'\n")).collect();
        format!("#!/bin/sh\necho welcome\n{}", lines.concat())
    };
    let found = of_python(&say(&[
        "python 3.12.1",
        "executable /opt/python",
        &format!("package {own}"),
        "torch 2.14.0",
        "backend x",
        "end",
    ]));
    let states: Vec<(&str, &str)> =
        found.iter().map(|(name, state, _)| (name.as_str(), state.as_str())).collect();
    let wanted = [("Python", "ok"), ("Python package", "ok"), ("torch", "ok"), ("torch backend", "ok")];
    assert_eq!(states[..4], wanted);
    assert!(found[0].2.contains("3.12.1, /opt/python"), "{found:?}");
    let found = of_python(&say(&["python 3.12.1", "package 0.0.7", "no-torch x"]));
    assert!(found[1].1 == "warn" && found[1].2.contains(&format!("this command is {own}")), "{found:?}");
    assert!(found[2].1 == "off" && found[3].1 == "off", "{found:?}");
}

/// Whatever PYTHON is, doctor goes on.
#[test]
fn what_is_no_python_is_a_line() {
    for script in [
        "#!/bin/sh\nexit 3\n",
        "#!/bin/sh\nprintf '\\377\\000\\033[31m'\n",
        "#!/bin/sh\nyes\n",
        "",
        "#!/no/such\n",
    ] {
        let found = of_python(script);
        assert_eq!((found[0].0.as_str(), found[0].1.as_str()), ("Python", "off"), "{script:?}: {found:?}");
        assert!(found[0].2.contains("PYTHON names another one"), "{found:?}");
        assert_eq!(found.len(), 2, "{found:?}");
    }
    let found = of_python("#!/bin/sh\necho 'tensorwire-doctor python 3.12.1'; kill -SEGV $$\n");
    assert!(found[2].1 == "warn" && found[2].2.contains("it ended early, signal: 11"), "{found:?}");
}

/// The versions stand in several files. They are the same.
#[test]
fn supported_versions_are_the_same_everywhere() {
    let found = of_python("#!/bin/sh\n");
    let (_, _, supported) = found.last().unwrap();
    let words: Vec<&str> = supported.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    let ["Python", python, "and", "newer", "torch", oldest, "to", newest] = words[..] else {
        panic!("{supported:?}")
    };
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    for (file, wanted) in [
        ("pyproject.toml", format!("requires-python = \">={python}\"")),
        ("scripts/test", format!("TORCH_NEW={newest}.0 TORCH_OLD={oldest}.0")),
        ("docs/python.md", format!("torch {oldest} to {newest}")),
        ("docs/python.md", format!("every CPython from {python} on")),
        ("README.md", format!("CPython {python} or newer")),
        ("docs/contributing.md", format!("scripts/venv .venv {newest}.0")),
    ] {
        let text = std::fs::read_to_string(format!("{root}{file}")).unwrap();
        assert!(text.contains(&wanted), "{file} does not say {wanted:?}");
    }
}

#[test]
fn the_default_time_out_stands_in_the_docs() {
    let ended = finished(&["doctor", "--json"]);
    let (_, rest) = ended.out.split_once(r#""name":"TENSORWIRE_TIMEOUT","state":"fact","value":""#).unwrap();
    let (seconds, _) = rest.split_once('"').unwrap();
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/python.md")).unwrap();
    assert!(text.contains(&format!("A group has a time-out of {seconds} seconds.")), "{seconds}");
}
