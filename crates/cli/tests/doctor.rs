//! `tensorwire doctor`.

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
