//! `tensorwire topo`: here, and for machines that are files.

mod tool;

use serde_json::Value;
use tool::{Ended, Folder, finished, tensorwire};

const MACHINES: [&str; 5] = ["nvswitch-8-gpus", "pcie-4-gpus-2-sockets", "laptop", "vm-1-gpu", "vm-no-gpu"];

fn path(machine: &str) -> String {
    format!("{}/../tensorwire/tests/machines/{machine}.json", env!("CARGO_MANIFEST_DIR"))
}

fn shown(machine: &str) -> String {
    let ended = finished(&["topo", "--from", &path(machine)]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{machine}");
    ended.out
}

#[test]
fn this_machine_is_shown_whatever_it_has() {
    let ended = finished(&["topo"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.contains("NUMA node "), "{}", ended.out);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    // Either there is one, or it is said that there is none, and who could not be asked.
    let explained = ended.out.contains("No GPU was found.") && ended.out.contains("  NVML: ");
    assert!(ended.out.contains("GPU0") || explained, "{}", ended.out);
}

#[test]
fn every_machine_fits_a_terminal_and_has_no_colour_in_a_pipe() {
    for machine in MACHINES {
        let out = shown(machine);
        assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
        assert!(!out.contains('\x1b'), "{out}");
    }
}

#[test]
fn the_matrix_is_that_of_nvidia_smi() {
    let out = shown("nvswitch-8-gpus");
    for line in [
        "        GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7",
        "GPU1    NV18     X  NV18  NV18  NV18  NV18  NV18  NV18",
        "GPU0     PIX  NODE  NODE  NODE   SYS   SYS   SYS   SYS  NODE",
    ] {
        assert!(out.lines().any(|found| found == line), "{line} is missing in\n{out}");
    }
    assert!(out.contains("NV# over this many NVLinks"), "{out}");
    assert!(out.contains("GPU7    NIC7 mlx5_7 (PIX)"), "{out}");
    let out = shown("pcie-4-gpus-2-sockets");
    assert!(out.contains("GPU0       X   NV3   SYS   SYS"), "{out}");
}

/// Every "no" has a number, and every number its reason.
#[test]
fn every_no_has_its_reason() {
    for machine in MACHINES {
        let out = shown(machine);
        for number in 1..9 {
            let cell = format!("no {number}");
            let is_used = out.lines().any(|line| !line.starts_with("no ") && line.contains(&cell));
            let is_explained = out.lines().any(|line| line.starts_with(&format!("no {number}: ")));
            assert!(!is_used || is_explained, "{cell} in {machine}:\n{out}");
        }
    }
    let out = shown("pcie-4-gpus-2-sockets");
    assert!(out.contains("not NIC1 mlx5_1: port 1 is DOWN (Disabled)"), "{out}");
    assert!(out.contains("no usable GID"), "{out}");
    assert!(shown("vm-1-gpu").contains("CUDA_ERROR_NOT_PERMITTED"));
    let none = shown("vm-no-gpu");
    assert!(none.contains("No GPU was found.") && none.contains("needs libnvidia-ml.so.1"), "{none}");
}

#[test]
fn json_can_be_shown_again() {
    let folder = Folder::new();
    let saved = folder.join("here.json");
    let ended = finished(&["topo", "--json"]);
    assert_eq!(ended.code, Some(0));
    let report: Value = serde_json::from_str(&ended.out).unwrap();
    for key in ["tensorwire", "date", "system", "machine", "ways", "affinity"] {
        assert!(!report[key].is_null(), "{key} is missing in {report}");
    }
    std::fs::write(&saved, &ended.out).unwrap();
    let again = finished(&["topo", "--from", saved.to_str().unwrap()]);
    let direct = finished(&["topo"]);
    assert_eq!((again.code, again.out), (Some(0), direct.out));
    let twice = finished(&["topo", "--json", "--from", saved.to_str().unwrap()]);
    assert_eq!(twice.out, ended.out);
}

#[test]
fn the_way_to_a_nic_is_in_json_too() {
    let ended = finished(&["topo", "--json", "--from", &path("pcie-4-gpus-2-sockets")]);
    let report: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(report["ways"]["names"][4], "NIC0");
    assert_eq!(report["ways"]["links"][0][1], "NV3");
    let last = &report["affinity"][3];
    assert_eq!((&last["nic"], &last["link"], &last["passed"][0]), (&0.into(), &"SYS".into(), &1.into()));
}

#[test]
fn measuring_gives_figures() {
    let folder = Folder::new();
    let page = folder.join("page.html");
    let ended = finished(&["topo", "--measure", "--json", "--html", page.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let report: Value = serde_json::from_str(&ended.out).unwrap();
    let measured = &report["measured"];
    let places = measured["places"].as_array().unwrap().len();
    assert!(places >= 1);
    for row in measured["cells"].as_array().unwrap() {
        assert_eq!(row.as_array().unwrap().len(), places);
        for cell in row.as_array().unwrap() {
            let figures = cell["gbs"].is_number() && cell["micros"].is_number();
            assert!(figures || cell["why"].is_string(), "{cell}");
        }
    }
    let html = std::fs::read_to_string(page).unwrap();
    // A map of several places; of one alone, its figures.
    let shown = if places > 1 { "class=\"heat\"" } else { "<dt>Inside host memory, by one thread</dt><dd>" };
    assert!(html.contains(shown), "{html}");
    let saved = folder.join("saved.json");
    std::fs::write(&saved, &ended.out).unwrap();
    let text = finished(&["topo", "--from", saved.to_str().unwrap()]).out;
    assert!(text.contains("GB/s copied") && text.contains("Microseconds"), "{text}");
}

#[test]
fn pages_need_nothing_and_are_whole() {
    let folder = Folder::new();
    for machine in MACHINES {
        let page = folder.join(&format!("{machine}.html"));
        let ended = finished(&["topo", "--from", &path(machine), "--html", page.to_str().unwrap()]);
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let html = std::fs::read_to_string(page).unwrap();
        assert!(!html.contains("http") && !html.contains("NaN") && !html.contains("inf%"), "{html}");
        assert!(html.contains("<svg class=\"tree\"") && html.ends_with("</html>\n"));
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path(machine)).unwrap()).unwrap();
        let count = |kind: &str| file["machine"][kind].as_array().unwrap().len();
        assert_eq!(html.matches("<g class=\"gpu\">").count(), count("gpus"), "{machine}");
        assert_eq!(html.matches("<g class=\"nic").count(), count("nics"), "{machine}");
    }
}

/// Also where there is no GPU.
#[test]
fn a_page_says_what_the_machine_is_and_what_copies_reach() {
    let folder = Folder::new();
    let page = folder.join("here.html");
    // No --measure: a page needs what copies reach.
    let ended = finished(&["topo", "--html", page.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let html = std::fs::read_to_string(page).unwrap();
    for fact in ["Date", "Host", "Processor", "NUMA nodes", "Memory", "GPUs", "Kernel", "Version"] {
        assert!(html.contains(&format!("<dt>{fact}</dt><dd>")), "{fact} is missing in {html}");
    }
    assert!(html.contains("<h2>What copies reach</h2>") && !html.contains("Not measured"), "{html}");
    assert!(ended.out.contains("GB/s copied"), "{}", ended.out);
    // Of a saved machine its own facts are shown, and none of the machine that shows it.
    let page = folder.join("saved.html");
    let ended = finished(&["topo", "--from", &path("vm-no-gpu"), "--html", page.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("Not measured: the file of this machine has no figures."), "{html}");
    assert!(html.contains("<dt>Memory</dt><dd>24 GiB</dd>") && !html.contains("<dt>Kernel</dt>"), "{html}");
}

#[test]
fn a_saved_machine_keeps_its_date_and_its_processor() {
    let folder = Folder::new();
    let (saved, page) = (folder.join("saved.json"), folder.join("page.html"));
    let text = std::fs::read_to_string(path("vm-no-gpu")).unwrap();
    let mut report: Value = serde_json::from_str(&text).unwrap();
    report["date"] = "2001-02-03 04:05 UTC".into();
    report["tensorwire"] = "9.9.9".into();
    report["system"] = serde_json::json!({ "host": "far", "processor": "a slide rule", "cores": 3 });
    std::fs::write(&saved, report.to_string()).unwrap();
    let words = ["topo", "--json", "--from", saved.to_str().unwrap(), "--html", page.to_str().unwrap()];
    let ended = finished(&words);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let again: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!((&again["date"], &again["system"]["host"]), (&report["date"], &"far".into()), "{again}");
    let html = std::fs::read_to_string(page).unwrap();
    for text in ["2001-02-03 04:05 UTC", "tensorwire 9.9.9", "<dd>far</dd>", "a slide rule, 3 cores"] {
        assert!(html.contains(text), "{text} is missing in {html}");
    }
}

#[test]
fn text_of_others_is_no_markup() {
    let folder = Folder::new();
    let (file, page) = (folder.join("evil.json"), folder.join("evil.html"));
    let evil = "<script>alert(1)</script>";
    let machine = serde_json::json!({ "date": evil, "system": { "host": evil, "processor": evil }, "machine": {
        "name": evil, "notes": [evil], "peers": [["yes"]],
        "gpus": [{ "name": evil, "pci": evil, "fabric_access": { "no": evil } }],
        "nics": [{ "name": evil, "up": { "no": evil } }],
    }});
    std::fs::write(&file, machine.to_string()).unwrap();
    let ended = finished(&["topo", "--from", file.to_str().unwrap(), "--html", page.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(!std::fs::read_to_string(page).unwrap().contains("<script"));
}

#[test]
fn configured_nics_are_checked() {
    let mut command = tensorwire(&["topo", "--json"]);
    let ended: Ended = command.env("TENSORWIRE_NICS", "no-such-nic").output().unwrap().into();
    let none = serde_json::from_str::<Value>(&ended.out)
        .is_ok_and(|report| report["machine"]["gpus"].as_array().is_some_and(Vec::is_empty));
    assert!(none || (ended.code == Some(2) && ended.err.contains("no-such-nic")), "{}", ended.err);
    // Those of a saved machine are its own.
    let folder = Folder::new();
    let file = folder.join("configured.json");
    let text = std::fs::read_to_string(path("nvswitch-8-gpus")).unwrap();
    let mut saved: Value = serde_json::from_str(&text).unwrap();
    saved["configured"] = serde_json::json!(["eno1"]);
    std::fs::write(&file, saved.to_string()).unwrap();
    let mut command = tensorwire(&["topo", "--from", file.to_str().unwrap()]);
    let ended: Ended = command.env("TENSORWIRE_NICS", "no-such-nic").output().unwrap().into();
    assert!(
        ended.out.contains("GPU3    NIC8 eno1 (NODE), as TENSORWIRE_NICS says"),
        "{}{}",
        ended.out,
        ended.err
    );
}

#[test]
fn what_is_no_machine_is_said() {
    let folder = Folder::new();
    let file = folder.join("wrong.json");
    let wrong = |text: &str, words: &str| {
        std::fs::write(&file, text).unwrap();
        let ended = finished(&["topo", "--from", file.to_str().unwrap()]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{text}");
        assert!(ended.err.contains("wrong.json") && ended.err.contains(words), "{}", ended.err);
    };
    wrong("", "EOF");
    wrong("{}", "missing field `machine`");
    let gpu = r#"{"name": "x", "pci": "0000:17:00.0"}"#;
    wrong(&format!(r#"{{"machine": {{"name": "x", "gpus": [{gpu}]}}}}"#), "1 rows of 1 answers");
    wrong(
        r#"{"machine": {"name": "x"}, "measured": {"bytes": 1, "places": ["a"], "cells": []}}"#,
        "`measured`",
    );
    wrong(r#"{"machine": {"name": "x"}, "configured": ["eth9"], "measured": 3}"#, "invalid type");
    let ended = finished(&["topo", "--from", "/no/such/file"]);
    assert!(ended.code == Some(1) && ended.err.contains("/no/such/file cannot be read"), "{}", ended.err);
    let ended = finished(&["topo", "--html", "/no/such/folder/page.html"]);
    assert!(ended.code == Some(1) && ended.err.contains("cannot be written"), "{}", ended.err);
    assert_eq!(finished(&["topo", "--measure", "--from", "x"]).code, Some(2));
}
