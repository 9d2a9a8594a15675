//! `tensorwire store`: serve, get, set, list, bench, and the store of `run`.
#![allow(clippy::unwrap_used, reason = "tests, which clippy does not see")]

mod tool;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use tool::{Ended, ended, finished, signal, tensorwire};

/// A store of the real binary's.
struct Served {
    process: Child,
    at: String,
}

impl Served {
    fn start() -> Self {
        let mut command = tensorwire(&["store", "serve", "--host", "127.0.0.1", "--port", "0", "--json"]);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let serving: serde_json::Value = serde_json::from_str(&line).unwrap();
        Self { process, at: serving["address"].as_str().unwrap().to_owned() }
    }

    fn run(&self, args: &[&str]) -> Ended {
        tensorwire(&["store"]).args(args).args(["--at", &self.at]).output().unwrap().into()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn what_is_set_can_be_read_and_listed() {
    let store = Served::start();
    assert_eq!(store.run(&["set", "model", "ready"]).code, Some(0));
    assert_eq!(store.run(&["set", "also", "x"]).code, Some(0));
    assert_eq!(store.run(&["get", "model"]).out, "ready\n");
    assert_eq!(store.run(&["get", "model", "--raw"]).out, "ready");
    assert_eq!(store.run(&["get", "model", "--json"]).out, "{\"key\":\"model\",\"value\":\"ready\"}\n");
    assert_eq!(store.run(&["list"]).out, "also\nmodel\n");
    assert_eq!(store.run(&["list", "--json"]).out, "[\"also\",\"model\"]\n");
}

#[test]
fn bytes_come_from_stdin_and_go_to_stdout() {
    let store = Served::start();
    let bytes: Vec<u8> = (0..=255).collect();
    let mut set =
        tensorwire(&["store", "set", "bytes", "-", "--at", &store.at]).stdin(Stdio::piped()).spawn().unwrap();
    set.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert_eq!(ended(set).code, Some(0));
    let get = tensorwire(&["store", "get", "bytes", "--raw", "--at", &store.at]).output().unwrap();
    assert_eq!(get.stdout, bytes);
}

#[test]
fn a_missing_key_and_a_missing_store_are_errors_in_time() {
    let store = Served::start();
    let missing = store.run(&["get", "nothing", "--timeout", "0.2"]);
    assert_eq!((missing.code, missing.out.as_str(), missing.err.lines().count()), (Some(1), "", 1));
    assert!(missing.err.contains("nothing"), "{}", missing.err);
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let nobody = finished(&["store", "list", "--at", &nobody, "--timeout", "0.2"]);
    assert_eq!((nobody.code, nobody.err.lines().count()), (Some(1), 1), "{}", nobody.err);
}

#[test]
fn a_wrong_address_is_wrong_usage() {
    for at in ["here", "here:port", "here:70000"] {
        let ended = finished(&["store", "list", "--at", at]);
        assert_eq!((ended.code, ended.err.lines().count()), (Some(2), 1), "{}", ended.err);
    }
}

#[test]
fn serving_ends_by_a_signal_and_a_taken_port_is_named() {
    let mut store = Served::start();
    let port = store.at.rsplit_once(':').unwrap().1;
    let second = finished(&["store", "serve", "--host", "127.0.0.1", "--port", port]);
    assert_eq!(second.code, Some(1));
    assert!(second.err.contains(port), "{}", second.err);
    signal(store.process.id() as i32, "TERM");
    let mut code = None;
    tool::eventually("the server ends", || {
        code = store.process.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
}

#[test]
fn ranks_of_a_run_meet_at_its_store() {
    let this = env!("CARGO_BIN_EXE_tensorwire");
    let script = format!(
        "at=$MASTER_ADDR:$MASTER_PORT; {this} store set rank$RANK hello$RANK --at $at && \
         {this} store get rank$(( (RANK + 1) % 2 )) --at $at"
    );
    let ended = finished(&["run", "-n", "2", "--", "sh", "-c", &script]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(
        ended.out.contains("[rank 0] hello1\n") && ended.out.contains("[rank 1] hello0\n"),
        "{}",
        ended.out
    );
}

#[test]
fn the_bench_prints_a_line_for_each_measurement() {
    let ended =
        finished(&["store", "bench", "--clients", "1,5", "--seconds", "0.01", "--rounds", "1", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 10);
    assert!(rows.iter().all(|row| row["ops_per_s"].as_f64().unwrap() > 0.0), "{}", ended.out);
    let text = finished(&["store", "bench", "--clients", "2", "--seconds", "0.01", "--rounds", "1"]);
    assert!(text.out.lines().all(|line| line.len() <= 80) && text.out.lines().count() == 6, "{}", text.out);
}

#[test]
fn a_python_without_torch_is_one_clear_failure() {
    let ended = finished(&["store", "bench", "--against", "torch", "--python", "/no/such/python"]);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.err.starts_with("error: /no/such/python with torch's TCPStore did not start"),
        "{}",
        ended.err
    );
}
