//! `tensorwire bench`.
#![allow(clippy::unwrap_used, reason = "tests, which clippy does not see")]

mod tool;

use std::process::{Child, Stdio};

use serde_json::Value;
use tensorwire::collective::Detour;
use tool::{Folder, eventually, finished, signal, tensorwire};

const OPS: [&str; 10] = [
    "all-reduce",
    "reduce",
    "broadcast",
    "all-gather",
    "gather",
    "scatter",
    "reduce-scatter",
    "all-to-all",
    "send-recv",
    "barrier",
];
const KEYS: [&str; 18] = [
    "op",
    "ranks",
    "bytes",
    "dtype",
    "device",
    "memory",
    "path",
    "median_us",
    "p99_us",
    "algbw_gbs",
    "busbw_gbs",
    "wrong",
    "peer",
    "through",
    "bound",
    "ratio",
    "floor_us",
    "caveats",
];

/// The shortest measurement.
const QUICK: [&str; 2] = ["--seconds", "0.001"];

fn quick<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["bench"], args, &QUICK].concat()
}

/// With the line behind the rows.
fn rows_and_last(out: &str) -> (Vec<Value>, Value) {
    let mut rows = rows(out);
    let last = rows.pop_if(|last| last.get("summary").is_some()).unwrap_or_default();
    (rows, last)
}

fn rows(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_operation_is_measured_and_right() {
    let ended = finished(&quick(&["-n", "3", "--sizes", "8,1000,300K", "--json"]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows = rows(&ended.out);
    for row in &rows {
        let keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert!(keys.len() == KEYS.len() && KEYS.iter().all(|key| keys.contains(key)), "{row}");
        assert!(row["median_us"].as_f64() > Some(0.0) && row["p99_us"].as_f64() >= row["median_us"].as_f64());
        assert_eq!((&row["wrong"], &row["device"]), (&0.into(), &"host".into()), "{row}");
    }
    for op in OPS {
        let of_op = rows.iter().filter(|row| row["op"] == op && row["peer"] == "tensorwire");
        assert_eq!(of_op.count(), if op == "barrier" { 1 } else { 3 }, "{op}\n{}", ended.out);
    }
    let reduced: Vec<&Value> = rows.iter().filter(|row| row["op"] == "all-reduce").collect();
    assert_eq!(reduced[0]["path"], "inline", "{}", ended.out);
    let copies: Vec<&Value> = rows.iter().filter(|row| row["peer"] == "memcpy").collect();
    assert_eq!(copies.iter().map(|row| row["ranks"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
}

#[test]
fn types_reductions_and_memory_can_be_chosen() {
    for args in [
        &["all_reduce", "--dtype", "bfloat16", "--op", "MAX", "--sizes", "100..1Mx100"][..],
        &["reduce-scatter", "--dtype", "int64", "--op", "bxor", "--sizes", "64K"],
        &["all-reduce", "--memory", "shared", "--sizes", "1K,1M"],
        &["all-reduce", "--path", "staged", "--sizes", "1K"],
    ] {
        let ended = finished(&quick(&[args, &["-n", "2", "--json"]].concat()));
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.err);
        let ours: Vec<Value> =
            rows(&ended.out).into_iter().filter(|row| row["peer"] == "tensorwire").collect();
        assert!(!ours.is_empty() && ours.iter().all(|row| row["wrong"] == 0), "{args:?}: {}", ended.out);
        if args.contains(&"shared") {
            assert!(ours.iter().all(|row| row["memory"] == "shared"), "{}", ended.out);
            assert_eq!(ours[1]["path"], "direct", "{}", ended.out);
        }
        if args.contains(&"staged") {
            assert!(ours.iter().all(|row| row["path"] == "staged"), "{}", ended.out);
        }
    }
}

#[test]
fn ranks_need_not_be_bound_to_cores() {
    for (bind, bound) in [("all", true), ("ours", true), ("none", false)] {
        let ended = finished(&quick(&["barrier", "-n", "2", "--bind", bind, "--json"]));
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let rows = rows(&ended.out);
        assert!(rows.iter().all(|row| row["bound"] == bound && row["through"] == "native"), "{}", ended.out);
    }
    let ended = finished(&quick(&["barrier", "-n", "2", "--bind", "none"]));
    assert!(ended.out.contains("2 ranks, float32 sum, private memory, not bound to cores"), "{}", ended.out);
}

/// tests/python has the tests with a Python that has it.
#[test]
fn without_torch_the_reason_is_said() {
    for command in [&["bench", "barrier", "-n", "2", "--through", "torch"][..], &["bench", "ddp", "-n", "2"]]
    {
        let ended: tool::Ended =
            tensorwire(command).env("PYTHON", "/no/such/python").output().unwrap().into();
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{}", ended.err);
        assert!(ended.err.contains("/no/such/python; PYTHON names another one"), "{}", ended.err);
    }
}

#[test]
fn the_table_fits_a_terminal_and_the_page_needs_nothing() {
    let folder = Folder::new();
    let page = folder.join("figures.html");
    let ended = finished(&quick(&["-n", "2", "--sizes", "8,64K", "--html", page.to_str().unwrap()]));
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(!ended.out.contains('\x1b') && ended.out.contains("memcpy: "), "{}", ended.out);
    let html = std::fs::read_to_string(&page).unwrap();
    for op in OPS {
        assert!(ended.out.lines().any(|line| line == op), "{op} is missing in\n{}", ended.out);
        assert!(html.contains(&format!("<section id=\"{op}\">")), "{op}");
    }
    assert_eq!(
        html.matches("<svg class=\"plot\"").count(),
        2 * (OPS.len() - 1),
        "two for each but the barrier"
    );
    assert!(!html.contains("http") && !html.contains("NaN") && !html.contains("inf"), "{html}");
    assert!(html.ends_with("</html>\n"));
    // First a table of all, then what was measured, with the command once, then the operations.
    let place = |text: &str| html.find(text).unwrap();
    assert!(place("id=\"summary\"") < place("<table") && place("<table") < place("id=\"about\""));
    assert!(place("id=\"about\"") < place("<section id=\"all-reduce\">"));
    assert_eq!(html.matches("tensorwire bench").count(), 1, "{html}");
    assert!(html.contains(&format!("<dd>tensorwire bench -n 2 --sizes 8,64K --html {}", page.display())));
    for fact in ["Date", "Host", "Processor", "Memory", "Kernel", "Version", "memcpy"] {
        assert!(html.contains(&format!("<dt>{fact}</dt><dd>")), "{fact} is missing in {html}");
    }
}

#[test]
fn one_size_has_bars_and_no_empty_plot() {
    let folder = Folder::new();
    let page = folder.join("figures.html");
    let ended =
        finished(&quick(&["all-reduce", "-n", "2", "--sizes", "1K", "--html", page.to_str().unwrap()]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(!html.contains("<svg class=\"plot\"") && html.contains("<div class=\"bar c0\">"), "{html}");
}

#[test]
fn a_page_that_cannot_be_written_is_said_first() {
    let ended = finished(&quick(&["barrier", "--html", "/no/such/folder/page.html"]));
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    assert!(ended.err.contains("/no/such/folder/page.html cannot be written"), "{}", ended.err);
}

#[test]
fn wrong_usage_is_explained() {
    for (args, said) in [
        (
            &["all-reduced"][..],
            "no operation is called \"all-reduced\"; the operations are all-reduce, reduce,",
        ),
        (&["--sizes", "1..x"], "sizes are given as 8..128M"),
        (&["--dtype", "float31"], "no element type is called \"float31\""),
        (&["--op", "mean"], "no reduction is called \"mean\"; the reductions are sum,"),
        (&["--path", "scenic"], "there is no path \"scenic\"; there are inline,"),
        (&["--against", "nccl"], "gloo, mpi, impi, mpich, best, socket, ucx, sealed"),
        (&["send-recv", "-n", "2", "--hosts", "3"], "--hosts 3 cannot be used with -n 2: each host needs a"),
        (&["send-recv", "--hosts", "0"], "0 is not in 1..=1024"),
        (
            &["-n", "2", "--hosts", "2", "--device", "cuda"],
            "--device cuda: messages and collectives of GPUs are not measured yet",
        ),
        (&["-n", "2", "--hosts", "2", "--memory", "shared"], "do not reach memory of the group"),
        (&["-n", "2", "--hosts", "2", "--path", "staged"], "what goes between hosts has one path"),
        (&["-n", "2", "--hosts", "2", "--sparse", "0.1"], "sparse tensors are reduced on one host"),
        (&["-n", "2", "--hosts", "2", "--against", "mpi"], "they know no labels"),
        (&["send-recv", "--against", "socket"], "is for messages between hosts: add --hosts 2"),
        (&["send-recv", "--against", "ucx"], "is for messages between hosts: add --hosts 2"),
        (&["send-recv", "--against", "sealed"], "is for messages between hosts: add --hosts 2"),
        (&["--memory", "stolen"], "private, shared"),
        (&["all-reduce", "--op", "max", "--dtype", "complex64"], "MAX of complex64 has no meaning"),
        (&["--seconds", "0"], "--seconds needs a number above 0"),
        (&["-n", "1"], "1 is not in 2..=1024"),
        (&["--through", "gloo"], "native, torch"),
        (&["--bind", "them"], "all, ours, none"),
        (&["--through", "torch", "--path", "staged"], "--path cannot be used with --through torch"),
        (
            &["--against", "gloo", "--path", "staged"],
            "--path cannot be used with --against gloo, which calls",
        ),
        (
            &["send-recv", "--device", "cuda"],
            "--device cuda cannot be used with send-recv: messages of GPUs are not measured yet",
        ),
        (
            &["--device", "cuda:1", "--against", "mpi"],
            "cannot be used with libraries of MPI: they are measured",
        ),
        (&["--device", "cuda", "--memory", "shared"], "are in memory of the pool"),
        (&["ddp", "--size", "1K,2K"], "--size is one size"),
        (&["ddp", "--seconds", "0"], "--seconds needs a number above 0"),
    ] {
        let ended = finished(&[&["bench"], args].concat());
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{args:?}");
        assert!(ended.err.contains(said), "{args:?}: {}", ended.err);
    }
}

#[test]
fn paths_are_explained_as_json() {
    let ended = finished(&["bench", "--explain", "--json", "-n", "8"]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    let lines: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = |op: &str| lines.iter().find(|line| line["op"] == op).unwrap();
    let reduce = line("all_reduce");
    assert_eq!((reduce["ranks"].as_u64(), reduce["bytes_of"].as_str()), (Some(8), Some("rank")));
    assert_eq!(line("scatter")["bytes_of"], "pair");
    let paths = reduce["paths"].as_array().unwrap();
    assert_eq!((&paths[0]["path"], &paths[0]["from"]), (&"inline".into(), &1.into()), "{reduce}");
    let last = paths.last().unwrap();
    assert_eq!((&last["path"], last["to"].is_null()), (&"direct".into(), true), "{reduce}");
    // The reasons by the names that records have (`status --last --json`), and in words.
    let reasons = last["not_direct"].as_array().unwrap();
    let of = |why: &Detour| serde_json::json!({ "why": why.name(), "reason": why.reason() });
    let known = Detour::ALL.iter().filter(|why| **why != Detour::Dense).map(of);
    assert_eq!(*reasons, known.collect::<Vec<_>>(), "{reduce}");
    assert!(paths.iter().rev().skip(1).all(|path| path.get("not_direct").is_none()), "{reduce}");
}

#[test]
fn paths_are_explained_without_measuring() {
    let ended = finished(&["bench", "--explain", "-n", "8"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.contains("all_reduce") && ended.out.contains("one-shot"), "{}", ended.out);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
}

#[test]
fn a_peer_that_cannot_run_is_left_out_with_the_reason() {
    for (peer, strict, said) in [
        ("gloo", "0", "gloo is left out: "),
        ("gloo", "1", "error: gloo is left out: "),
        ("mpi", "0", "mpi is left out: there is no mpirun of Open MPI in .peers/mpi, "),
        ("mpi", "1", "error: mpi is left out: "),
    ] {
        let mut command = tensorwire(&quick(&["barrier", "-n", "2", "--against", peer]));
        command
            .env("PYTHON", "/no/such/python")
            .env("PATH", "/no/such/folder")
            .env_remove("VIRTUAL_ENV")
            .env_remove("CONDA_PREFIX")
            .current_dir("/")
            .env("TENSORWIRE_STRICT", strict);
        let ended: tool::Ended = command.output().unwrap().into();
        assert_eq!(ended.code, Some(if strict == "1" { 1 } else { 0 }), "{}", ended.err);
        assert!(ended.err.contains(said), "{}", ended.err);
        assert!(peer != "gloo" || ended.err.contains("/no/such/python"), "{}", ended.err);
    }
}

/// Those that are there: scripts/test installs MPICH. Of the others there is the reason.
#[test]
fn peers_are_measured_in_the_same_run() {
    let ended =
        finished(&quick(&["--sizes", "8,100K", "-n", "2", "--against", "mpi,impi,mpich,best", "--json"]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let (rows, last) = rows_and_last(&ended.out);
    let there: Vec<_> = ["mpi", "impi", "mpich"]
        .into_iter()
        .filter(|peer| !ended.err.contains(&format!("{peer} is left out: there is no ")))
        .collect();
    let mut cases = 0;
    for op in OPS {
        let of_op = |peer: &str| rows.iter().filter(|row| row["op"] == op && row["peer"] == peer).count();
        cases += of_op("tensorwire");
        for peer in &there {
            assert_eq!(of_op(peer), of_op("tensorwire"), "{op} of {peer}: {}", ended.err);
        }
    }
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{}", ended.out);
    // One of them is the best of each case.
    let best = rows.iter().filter(|row| row["best"] == true).count();
    assert_eq!(best, if there.is_empty() { 0 } else { cases });
    if !there.is_empty() {
        let count = |key: &str| last[key].as_u64().unwrap() as usize;
        assert_eq!((&last["summary"], count("rows")), (&"best".into(), cases));
        assert_eq!(count("ahead") + count("level") + count("behind"), cases);
    }
}

/// What people see of it: one column for all, whose it is, and the sum at the end.
#[test]
fn the_best_peer_is_named() {
    let args = ["all-reduce", "--sizes", "8,1K", "-n", "2", "--against", "best"];
    let ended = finished(&quick(&args));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    if ended.err.matches("is left out").count() < 3 {
        assert!(ended.out.contains("best us") && ended.out.contains("best: of 2 rows"), "{}", ended.out);
    }
}

#[test]
fn messages_between_hosts_are_measured_beside_a_bare_loop_and_sealed() {
    for (ranks, hosts) in [("2", "2"), ("3", "2"), ("4", "2"), ("4", "3")] {
        let args = ["send-recv", "-n", ranks, "--hosts", hosts, "--sizes", "8,300K,5M"];
        let ended = finished(&quick(&[&args[..], &["--against", "socket,sealed", "--json"]].concat()));
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{args:?}");
        let rows: Vec<Value> = rows(&ended.out).into_iter().filter(|row| row["op"] == "send-recv").collect();
        let of = |peer: &str| rows.iter().filter(|row| row["peer"] == peer).count();
        let counts = (of("tensorwire"), of("socket"), of("sealed"), rows.len());
        assert_eq!(counts, (3, 3, 3, 9), "{}", ended.out);
        for row in &rows {
            assert_eq!((&row["wrong"], row["hosts"].to_string()), (&0.into(), hosts.to_owned()), "{row}");
            assert!(row["median_us"].as_f64() > Some(0.0), "{row}");
            assert_eq!((&row["bound"], &row["caveats"]), (&true.into(), &Value::Array(vec![])), "{row}");
            assert_eq!(row["ratio"].is_null(), row["peer"] == "tensorwire", "{row}");
        }
    }
}

#[test]
fn collectives_between_hosts_are_measured() {
    for (ranks, hosts) in [("2", "2"), ("4", "2"), ("3", "2"), ("3", "3")] {
        let args = ["-n", ranks, "--hosts", hosts, "--sizes", "8,200K", "--op", "max", "--json"];
        let ended = finished(&quick(&args));
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{args:?}");
        let rows: Vec<Value> = rows(&ended.out).into_iter().filter(|row| row["peer"] != "memcpy").collect();
        assert_eq!(rows.len(), 2 * OPS.len() - 1, "{}", ended.out);
        for row in &rows {
            assert_eq!((&row["wrong"], row["hosts"].to_string()), (&0.into(), hosts.to_owned()), "{row}");
            assert_eq!(row["path"] == "hosts", row["op"] != "send-recv", "{row}");
        }
    }
}

#[test]
fn the_table_and_the_page_of_hosts_say_so() {
    let folder = Folder::new();
    let page = folder.join("figures.html");
    let args = ["-n", "2", "--hosts", "2", "--sizes", "8,64K", "--against", "socket", "--html"];
    let ended = finished(&quick(&[&args[..], &[page.to_str().unwrap()]].concat()));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.err.contains("socket is left out: barrier: a bare loop only sends"), "{}", ended.err);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    let said = ended.out.replace('\n', " ");
    assert!(said.contains("2 ranks on 2 hosts, float32 sum, private memory; against a bare loop"), "{said}");
    assert!(ended.out.contains("socket   ratio"), "{}", ended.out);
    let ops: Vec<&str> = ended.out.lines().filter(|line| OPS.contains(line)).collect();
    assert_eq!(ops, OPS, "{}", ended.out);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("2 ranks on 2 hosts") && html.contains("a bare loop over one TCP"), "{html}");
    assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
}

#[test]
fn the_way_between_hosts_is_explained() {
    let args = ["bench", "send-recv", "--hosts", "2", "-n", "5", "--explain"];
    let ended = finished(&args);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert!(ended.out.contains("host 0: ranks 0 to 2\nhost 1: ranks 3 to 4\n"), "{}", ended.out);
    assert!(ended.out.contains("go over TCP at every size"), "{}", ended.out);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    let ended = finished(&[&args[..], &["--json"]].concat());
    let lines = rows(&ended.out);
    let pairs: Vec<_> = lines.iter().map(|line| (line["from"].as_u64(), line["to"].as_u64())).collect();
    assert_eq!(pairs, [(Some(0), Some(3)), (Some(1), Some(4))], "{}", ended.out);
    assert!(lines.iter().all(|line| line["way"] == "tcp" && line["hosts"] == 2), "{}", ended.out);
}

#[test]
fn a_rank_that_dies_is_named() {
    let (child, rank) = busy("dies", "300");
    signal(rank, "KILL");
    let ended = tool::ended(child);
    assert_eq!(ended.code, Some(1));
    assert_eq!(ended.err, format!("error: rank 1 (pid {rank}) was killed by SIGKILL\n"));
}

#[test]
fn a_rank_that_hangs_is_named() {
    let (child, rank) = busy("hangs", "5");
    signal(rank, "STOP");
    let ended = tool::ended(child);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("rank 1 (") && ended.err.contains(&format!("pid {rank}")), "{}", ended.err);
    assert_eq!(ended.err.matches("error:").count(), 1, "{}", ended.err);
}

/// A bench that takes long, and its rank 1 once it measures.
fn busy(test: &str, timeout: &str) -> (Child, i32) {
    let mark = format!("{test}-{}", std::process::id());
    let mut command = tensorwire(&["bench", "all-reduce", "-n", "2", "--sizes", "16M", "--seconds", "60"]);
    command.env("BENCH_TEST", &mark).env("TENSORWIRE_TIMEOUT", timeout);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut found = None;
    eventually("rank 1 is there", || {
        let ranks = tool::with_variable(&format!("BENCH_TEST={mark}"));
        found = ranks.into_iter().find(|pid| tool::with_variable("RANK=1").contains(pid));
        found.is_some()
    });
    let rank = found.unwrap();
    // In the midst of the measurement, or of the start: it must be named either way.
    std::thread::sleep(std::time::Duration::from_millis(300));
    (child, rank)
}

#[test]
fn a_rank_that_fails_is_named_once() {
    for command in [&["bench", "--seconds", "0.01"][..], &["bench", "parts", "--seconds", "0.01"]] {
        let output = tensorwire(command).env("TENSORWIRE_SOCKET_DIR", "/no/such/folder").output();
        let ended: tool::Ended = output.unwrap().into();
        assert_eq!(ended.code, Some(1));
        assert!(ended.err.starts_with("error: rank "), "{}", ended.err);
        assert_eq!(ended.err.matches("error:").count(), 1, "{}", ended.err);
    }
}

#[test]
fn parts_are_measured_with_ranks_of_their_own() {
    let ended = finished(&["bench", "parts", "-n", "3", "--seconds", "0.01", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows = rows(&ended.out);
    for bench in ["store", "shared", "barrier", "kernels"] {
        assert!(rows.iter().any(|row| row["bench"] == bench), "{bench} is missing in\n{}", ended.out);
    }
    assert!(rows.iter().all(|row| row["p50_us"].as_f64().unwrap() > 0.0), "{}", ended.out);
}

#[test]
fn parts_of_a_device_that_is_not_here_are_refused_once() {
    for (device, code, text) in
        [("cuda:99", 1, ""), ("gpu", 2, "host, cuda, or cuda:N"), ("cuda:x", 2, "no number")]
    {
        for command in [
            &["bench", "parts", "--device", device][..],
            &["bench", "--device", device],
            &["bench", "all-reduce", "--device", device],
        ] {
            let ended = finished(command);
            assert_eq!((ended.code, ended.out.as_str()), (Some(code), ""), "{}", ended.err);
            assert!(ended.err.contains(text) && ended.err.matches("error:").count() == 1, "{}", ended.err);
        }
    }
}

/// On a GPU, what `parts` measures; where there is none, the reason is said.
#[test]
fn a_gpu_is_measured_by_its_parts() {
    let ended = finished(&["bench", "--device", "cuda", "--seconds", "0.01", "--json"]);
    match ended.code {
        Some(0) => {
            assert!(ended.err.contains("with an operation, collectives are measured"), "{}", ended.err);
            let rows = rows(&ended.out);
            assert!(rows.iter().any(|row| row["bench"] == "queues"), "{}", ended.out);
            assert!(rows.iter().any(|row| row["caller_waits"].is_u64()), "{}", ended.out);
        }
        code => assert!(code == Some(1) && ended.err.contains("NVIDIA driver"), "{}", ended.err),
    }
}

/// A bench whose GPUs are threads (`tensorwire::device::threads`).
fn on_thread_gpus(gpus: &str, args: &[&str]) -> tool::Ended {
    tensorwire(&quick(args)).env(tensorwire::device::threads::VARIABLE, gpus).output().unwrap().into()
}

#[test]
fn collectives_are_measured_on_gpus_and_right() {
    for (gpus, args) in [
        ("1:8", &["-n", "3", "--sizes", "8,1000,300K", "--json", "--device", "cuda"][..]),
        ("2:8", &["all-reduce", "-n", "2", "--sizes", "64K", "--json", "--device", "cuda"]),
        ("2:8", &["all-reduce", "-n", "2", "--sizes", "64K", "--json", "--device", "cuda:1"]),
    ] {
        let ended = on_thread_gpus(gpus, args);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.err);
        let rows = rows(&ended.out);
        // The floor is that of one GPU which all ranks share.
        let shared = gpus == "1:8" || args.contains(&"cuda:1");
        for row in &rows {
            let keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
            assert!(keys.len() == KEYS.len() && KEYS.iter().all(|key| keys.contains(key)), "{row}");
            assert!(row["median_us"].as_f64() > Some(0.0), "{row}");
            assert_eq!((&row["wrong"], &row["device"]), (&0.into(), &"cuda".into()), "{row}");
            assert_eq!((&row["memory"], &row["bound"]), (&"pool".into(), &false.into()), "{row}");
            let has_floor = shared && row["op"] == "all-reduce";
            assert_eq!(row["floor_us"].as_f64() > Some(0.0), has_floor, "{row}");
        }
        for op in OPS.iter().filter(|op| args[0] == "-n" || args[0] == **op) {
            let of_op: Vec<&Value> = rows.iter().filter(|row| row["op"] == *op).collect();
            let sizes = match *op {
                "send-recv" => 0,
                "barrier" => 1,
                _ if args[0] == "-n" => 3,
                _ => 1,
            };
            assert_eq!(of_op.len(), sizes, "{op}\n{}", ended.out);
            assert!(*op == "barrier" || of_op.iter().all(|row| row["path"] == "direct"), "{}", ended.out);
        }
        assert_eq!(rows.iter().filter(|row| row["peer"] == "memcpy").count(), 2, "{}", ended.out);
    }
}

#[test]
fn the_table_of_a_gpu_says_so_and_has_the_floor() {
    let folder = Folder::new();
    let page = folder.join("figures.html");
    let args =
        ["all-reduce", "-n", "2", "--sizes", "1K,1M", "--device", "cuda", "--html", page.to_str().unwrap()];
    let ended = on_thread_gpus("1:8", &args);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(ended.out.contains("2 ranks, float32 sum, all on one GPU ("), "{}", ended.out);
    assert!(ended.out.contains("floor: ") && ended.out.contains("path    floor\n"), "{}", ended.out);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("<th>floor</th>") && html.contains("all on one GPU"), "{html}");
}

#[test]
fn a_peer_without_a_gpu_is_left_out() {
    let folder = Folder::new();
    // Gloo's Python program answers as it does where torch finds no GPU.
    let python = folder.script("python", "#!/bin/sh\necho \"no torch finds no GPU for $3\"\n");
    let args =
        quick(&["all-reduce", "-n", "2", "--sizes", "1K", "--against", "gloo", "--device", "cuda", "--json"]);
    let mut command = tensorwire(&args);
    command.env(tensorwire::device::threads::VARIABLE, "1:8").env("PYTHON", python);
    let ended: tool::Ended = command.output().unwrap().into();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.err.contains("gloo is left out: torch finds no GPU for cuda"), "{}", ended.err);
    let peers: Vec<Value> = rows(&ended.out).iter().map(|row| row["peer"].clone()).collect();
    assert!(peers.contains(&"tensorwire".into()) && !peers.contains(&"gloo".into()), "{}", ended.out);
}

#[test]
fn paths_of_gpus_are_explained() {
    let ended = finished(&["bench", "--explain", "--json", "-n", "2", "--device", "cuda"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    for line in rows(&ended.out) {
        assert_eq!(
            (&line["device"], &line["paths"][0]["path"]),
            (&"cuda".into(), &"direct".into()),
            "{line}"
        );
        assert_eq!(line["paths"][0]["not_direct"][0]["why"], "private memory", "{line}");
    }
    let ended = finished(&["bench", "--explain", "--device", "cuda"]);
    assert!(ended.out.contains("direct path at every size"), "{}", ended.out);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
}

#[test]
fn the_table_of_parts_fits_a_terminal() {
    let ended = finished(&["bench", "parts", "--seconds", "0.01"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(!ended.out.contains('\x1b') && ended.err.is_empty(), "{}", ended.err);
}

#[test]
fn sparse_tensors_are_measured_and_right() {
    for (share, keys, path) in [("0.01", "zipf", "by-key"), ("1", "uniform", "dense")] {
        let args =
            ["all-reduce", "--sparse", share, "--keys", keys, "-n", "3", "--sizes", "256,1M", "--json"];
        let ended = finished(&quick(&args));
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let rows: Vec<Value> =
            rows(&ended.out).into_iter().filter(|row| row["op"] == "all-reduce-sparse").collect();
        assert_eq!(rows.len(), 2, "{}", ended.out);
        for row in &rows {
            assert_eq!((&row["wrong"], &row["keys"]), (&0.into(), &keys.into()), "{row}");
        }
        assert_eq!(rows[1]["path"], path, "{}", ended.out);
    }
    for (args, why) in [
        (&["reduce", "--sparse", "0.1"][..], "all-reduce alone"),
        (&["all-reduce", "--sparse", "0"], "more than 0"),
        (&["all-reduce", "--sparse", "0.1", "--op", "max"], "sums of float32"),
        (&["all-reduce", "--sparse", "0.1", "--against", "mpi"], "no sparse tensors"),
        (&["all-reduce", "--keys", "zipf"], "--keys is for --sparse"),
    ] {
        let ended = finished(&quick(args));
        assert!(ended.code == Some(2) && ended.err.contains(why), "{args:?}: {}", ended.err);
    }
}

/// Every way at every size that it is for, with the channel that it took, beside a bare socket.
#[test]
fn pipes_are_measured_beside_a_bare_socket() {
    let ended = finished(&quick(&["pipe", "--sizes", "4,100K,2M", "--against", "socket", "--json"]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows = rows(&ended.out);
    let channels = |bytes: u64, op: &str| -> Vec<(String, Option<String>)> {
        let rows = rows.iter().filter(|row| row["bytes"] == bytes && row["op"] == op);
        let text = |value: &Value| value.as_str().map(str::to_owned);
        rows.map(|row| (text(&row["way"]).unwrap(), text(&row["channel"]))).collect()
    };
    let ways = |list: &[(&str, &str)]| -> Vec<(String, Option<String>)> {
        list.iter().map(|&(way, channel)| (way.into(), Some(channel.to_owned()))).collect()
    };
    let socket = ("socket".to_owned(), None);
    let small = [ways(&[("private", "basic"), ("wire", "basic"), ("sealed", "basic")]), vec![socket.clone()]]
        .concat();
    assert_eq!(channels(4, "echo"), small);
    let middle =
        [ways(&[("private", "ring"), ("wire", "wire"), ("sealed", "wire")]), vec![socket.clone()]].concat();
    assert_eq!(channels(100 << 10, "echo"), middle);
    let list = [
        ("private", "ring"),
        ("shareable", "share"),
        ("view", "share"),
        ("wire", "wire"),
        ("sealed", "wire"),
    ];
    let large = [ways(&list), vec![socket]].concat();
    assert_eq!(channels(2 << 20, "echo"), large);
    for row in &rows {
        assert!(row["median_us"].as_f64().unwrap() > 0.0 && row["rounds"].as_u64() >= Some(3), "{row}");
        assert!(row["memcpys"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(row["ratio"].is_number(), row["way"] == "socket", "{row}");
    }
    assert_eq!(rows.len(), 3 + 2 * (4 + 4 + 6));
}

/// Tensors of a GPU go by channels of their own; every way is set beside a copy of the GPU.
#[test]
fn pipes_of_gpus_are_measured() {
    let ended = on_thread_gpus("1:8", &["pipe", "--device", "cuda", "--sizes", "4,2M", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows = rows(&ended.out);
    let channels = |bytes: u64| -> Vec<String> {
        let echoes = rows.iter().filter(|row| row["bytes"] == bytes && row["op"] == "echo");
        echoes.map(|row| format!("{} {}", row["way"], row["channel"]).replace('"', "")).collect()
    };
    let small = ["gpu gpu_share", "gpu wire gpu_basic", "to shared gpu_share", "to private gpu_share"];
    assert_eq!(channels(4), small);
    let large = [
        "gpu gpu_share",
        "gpu view gpu_share",
        "gpu wire gpu_basic",
        "to shared gpu_share",
        "to private gpu_share",
    ];
    assert_eq!(channels(2 << 20), large);
    assert!(rows.iter().all(|row| row["memcpys"].as_f64().unwrap() > 0.0));
    assert_eq!(rows.iter().filter(|row| row["op"] == "copy").count(), 2 * 2);
}

#[test]
fn the_table_of_pipes_fits_a_terminal() {
    let ended = finished(&quick(&["pipe", "--sizes", "4,1M,16M"]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    for line in ended.out.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(["private", "shareable", "view", "wire", "memcpy"].iter().all(|way| ended.out.contains(way)));
}

#[test]
fn torchs_rpc_that_cannot_run_is_left_out_with_the_reason() {
    let args = quick(&["pipe", "--sizes", "4", "--against", "tensorpipe"]);
    let left_out: tool::Ended = tensorwire(&args).env("PYTHON", "/no/such/python").output().unwrap().into();
    assert_eq!(left_out.code, Some(0), "{}", left_out.err);
    assert!(left_out.err.contains("tensorpipe is left out: "), "{}", left_out.err);
    let mut strict = tensorwire(&args);
    strict.env("PYTHON", "/no/such/python").env("TENSORWIRE_STRICT", "1");
    let refused: tool::Ended = strict.output().unwrap().into();
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("tensorpipe is left out: "), "{}", refused.err);
    let none = finished(&quick(&["pipe", "--sizes", "0,4"]));
    assert_eq!(none.code, Some(2), "{}", none.err);
}
