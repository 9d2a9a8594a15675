//! `tensorwire run`: variables, output, exit codes.
#![allow(clippy::unwrap_used, reason = "tests")]

mod tool;

use std::process::Stdio;
use std::time::Instant;

use tool::{Ended, Folder, finished, tensorwire};

fn shell(ranks: u32, script: &str) -> tool::Ended {
    finished(&["run", "-n", &ranks.to_string(), "--", "sh", "-c", script])
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_gets_torchruns_variables() {
    let names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK \
                 ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS \
                 TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS";
    let ended = shell(2, &format!("for name in {names}; do eval echo $name=\\$$name; done"));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    for rank in 0..2 {
        for expected in [
            format!("RANK={rank}"),
            format!("LOCAL_RANK={rank}"),
            format!("ROLE_RANK={rank}"),
            "WORLD_SIZE=2".into(),
            "LOCAL_WORLD_SIZE=2".into(),
            "ROLE_WORLD_SIZE=2".into(),
            "ROLE_NAME=default".into(),
            "GROUP_RANK=0".into(),
            "GROUP_WORLD_SIZE=1".into(),
            "MASTER_ADDR=127.0.0.1".into(),
            "TORCHELASTIC_RESTART_COUNT=0".into(),
            "TORCHELASTIC_MAX_RESTARTS=0".into(),
            "TORCHELASTIC_USE_AGENT_STORE=True".into(),
            "OMP_NUM_THREADS=1".into(),
        ] {
            let line = format!("[rank {rank}] {expected}");
            assert!(ended.out.lines().any(|found| found == line), "{line} is missing in\n{}", ended.out);
        }
    }
}

#[test]
fn the_run_id_and_port_are_one_for_all_ranks() {
    let ended = finished(&[
        "run",
        "-n",
        "3",
        "--no-prefix",
        "--",
        "sh",
        "-c",
        "echo $TORCHELASTIC_RUN_ID $MASTER_PORT",
    ]);
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", ended.err);
    assert!(
        lines.iter().all(|line| *line == lines[0] && !line.starts_with(' ') && !line.ends_with(" 0")),
        "{lines:?}"
    );
}

#[test]
fn omp_threads_are_limited_unless_set_and_it_is_said_once() {
    let mut command =
        tensorwire(&["run", "-n", "2", "--no-prefix", "--", "sh", "-c", "echo $OMP_NUM_THREADS"]);
    let ended: tool::Ended = command.env_remove("OMP_NUM_THREADS").output().unwrap().into();
    assert_eq!((ended.out.as_str(), ended.err.matches("OMP_NUM_THREADS is unset").count()), ("1\n1\n", 1));
    let ended: tool::Ended = command.env("OMP_NUM_THREADS", "7").output().unwrap().into();
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("7\n7\n", ""));
}

#[test]
fn output_keeps_its_stream_and_names_its_rank() {
    let ended = shell(3, "echo out; echo err >&2");
    assert_eq!(sorted(&ended.out), ["[rank 0] out", "[rank 1] out", "[rank 2] out"]);
    assert_eq!(sorted(&ended.err), ["[rank 0] err", "[rank 1] err", "[rank 2] err"]);
    assert_eq!(ended.code, Some(0));
}

#[test]
fn lines_of_two_ranks_never_mix() {
    let ended =
        shell(4, "i=0; while [ $i -lt 300 ]; do printf a$RANK; printf 'b%s\\n' $RANK; i=$((i+1)); done");
    assert_eq!(ended.out.lines().count(), 1200);
    for line in ended.out.lines() {
        let rank = &line[6..7];
        assert_eq!(line, format!("[rank {rank}] a{rank}b{rank}"));
    }
}

#[test]
fn much_output_of_many_ranks_arrives_whole() {
    let ended = shell(4, "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end >&2");
    let longest = ended.out.lines().map(str::len).max();
    assert_eq!(ended.out.matches('x').count(), 12_000_000, "{longest:?}");
    assert_eq!(ended.err.lines().count(), 4);
}

#[test]
fn bytes_that_are_no_text_survive() {
    let bytes: Vec<u8> = (0..=255).collect();
    let folder = Folder::new();
    std::fs::write(folder.join("bytes"), &bytes).unwrap();
    let path = folder.join("bytes");
    let output =
        tensorwire(&["run", "-n", "1", "--no-prefix", "--", "cat", path.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.stdout, bytes);
}

#[test]
fn logs_are_written_beside_the_console() {
    let folder = Folder::new();
    let dir = folder.join("logs");
    let dir_text = dir.to_str().unwrap();
    let ended =
        finished(&["run", "-n", "2", "--log-dir", dir_text, "--", "sh", "-c", "echo out$RANK; echo err >&2"]);
    assert_eq!(sorted(&ended.out), ["[rank 0] out0", "[rank 1] out1"]);
    assert_eq!(std::fs::read_to_string(dir.join("rank-1.out")).unwrap(), "out1\n");
    assert_eq!(std::fs::read_to_string(dir.join("rank-0.err")).unwrap(), "err\n");
}

#[test]
fn ranks_read_nothing() {
    let ended = shell(2, "cat; echo read");
    assert_eq!(sorted(&ended.out), ["[rank 0] read", "[rank 1] read"]);
}

#[test]
fn the_first_failure_is_named_and_its_code_returned() {
    let begun = Instant::now();
    let ended = shell(3, "[ $RANK = 1 ] && exit 3; sleep 1000");
    assert_eq!(ended.code, Some(3));
    assert!(ended.err.contains("rank 1 (pid "), "{}", ended.err);
    assert!(ended.err.contains("failed first: exit code 3"), "{}", ended.err);
    assert!(ended.err.contains("stopped ranks 0, 2"), "{}", ended.err);
    assert!(begun.elapsed() < tool::PATIENCE);
}

#[test]
fn a_signal_that_killed_a_rank_is_named() {
    let ended = shell(2, "[ $RANK = 0 ] && kill -SEGV $$; sleep 1000");
    assert_eq!(ended.code, Some(128 + 11));
    assert!(ended.err.contains("failed first: killed by SIGSEGV"), "{}", ended.err);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let folder = Folder::new();
    let ready = folder.join("ready");
    let script = format!(
        "trap '' TERM; if [ $RANK = 0 ]; then until [ -e {0} ]; do sleep 0.01; done; exit 5; fi; \
         touch {0}; while :; do sleep 1; done",
        ready.display()
    );
    let ended = finished(&["run", "-n", "2", "--grace", "0.3", "--", "sh", "-c", &script]);
    assert_eq!(ended.code, Some(5));
    assert!(ended.err.contains("killed rank 1, still running after 0.3 s"), "{}", ended.err);
}

#[test]
fn a_program_that_is_not_there_is_one_error() {
    let ended = finished(&["run", "-n", "4", "--", "no-such-program"]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(127), ""));
    assert_eq!(ended.err, "error: cannot start no-such-program: not found in PATH\n");
    let ended = finished(&["run", "-n", "4", "--", "/no/such/program"]);
    assert_eq!((ended.code, ended.err.lines().count()), (Some(127), 1));
    let ended = finished(&["run", "-n", "4", "--", "/etc"]);
    assert_eq!((ended.code, ended.err.lines().count()), (Some(126), 1));
}

#[test]
fn a_script_without_its_interpreter_is_one_error() {
    let folder = Folder::new();
    let script = folder.join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let ended = finished(&["run", "-n", "4", "--", script.to_str().unwrap()]);
    assert_eq!((ended.code, ended.err.lines().count()), (Some(127), 1), "{}", ended.err);
    assert!(ended.err.contains("interpreter"), "{}", ended.err);
}

#[test]
fn a_taken_port_is_an_error_that_names_it() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let ended = finished(&["run", "--master-port", &port, "--", "true"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains(&port), "{}", ended.err);
}

#[test]
fn a_reader_that_leaves_ends_the_run() {
    let mut child = tensorwire(&["run", "-n", "2", "--", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(tool::ended(child).code, Some(128 + 13));
}

#[test]
fn a_rank_that_does_not_end_its_last_line_is_heard() {
    let ended = shell(2, "printf 'no newline'");
    assert_eq!(sorted(&ended.out), ["[rank 0] no newline", "[rank 1] no newline"]);
}

/// A folder with a program that says how it was called as Python.
fn with_python() -> Folder {
    let folder = Folder::new();
    folder.script("python", "#!/bin/sh\necho $RANK: \"$@\"\n");
    // It can be executed, and yet it is not.
    folder.script("train.py", "#!/bin/false\n");
    folder
}

fn in_folder(folder: &Folder, args: &[&str]) -> Ended {
    let mut command = tensorwire(&[&["run"], args].concat());
    command.env("PYTHON", folder.join("python")).current_dir(folder.join(""));
    command.output().unwrap().into()
}

#[test]
fn a_python_file_gets_python() {
    let folder = with_python();
    let both = |what: &str| vec![format!("[rank 0] 0: {what}"), format!("[rank 1] 1: {what}")];
    for (args, wanted) in [
        (&["-n", "2", "train.py", "-n", "3", "--epochs", "4"][..], "-u train.py -n 3 --epochs 4"),
        (&["-n", "2", "./train.py"], "-u ./train.py"),
        (&["-n", "2", "--", "train.py", "--", "x"], "-u train.py -- x"),
        (&["-n", "2", "-m", "package.train", "-m"], "-u -m package.train -m"),
    ] {
        let ended = in_folder(&folder, args);
        assert_eq!(
            (ended.code, sorted(&ended.out)),
            (Some(0), both(wanted).iter().map(String::as_str).collect())
        );
    }
    let ended = in_folder(&folder, &["-n", "1", "--no-python", "./train.py"]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{}", ended.err);
}

/// Of the active environment, where nobody asks for another one.
#[test]
fn python_is_that_of_the_environment() {
    let folder = with_python();
    std::fs::create_dir(folder.join("bin")).unwrap();
    std::fs::rename(folder.join("python"), folder.join("bin/python")).unwrap();
    let mut command = tensorwire(&["run", "-n", "1", "--no-prefix", "train.py"]);
    command.env_remove("PYTHON").env("VIRTUAL_ENV", folder.join("")).current_dir(folder.join(""));
    let ended: Ended = command.output().unwrap().into();
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "0: -u train.py\n"), "{}", ended.err);
}

#[test]
fn torchruns_spellings_are_understood() {
    let folder = with_python();
    for args in [
        &["--nproc-per-node", "2"][..],
        &["--nproc_per_node=2"],
        &["--nproc=2", "--standalone"],
        &["-n2", "--nnodes=1", "--node_rank", "0", "--master_addr=localhost", "--master_port", "0"],
        &["-n", "2", "--nnodes", "1:1", "--node-rank=0", "--master-addr", "127.0.0.1", "--max_restarts=0"],
    ] {
        let ended = in_folder(&folder, &[args, &["train.py"]].concat());
        assert_eq!((ended.code, ended.out.lines().count()), (Some(0), 2), "{args:?}: {}", ended.err);
    }
    let ended =
        in_folder(&folder, &["--nproc-per-node", "cpu", "--no-prefix", "sh", "-c", "echo $WORLD_SIZE"]);
    let cores = std::thread::available_parallelism().unwrap().to_string();
    assert!(ended.out.lines().all(|line| line == cores), "{}", ended.out);
    assert_eq!(in_folder(&folder, &["-n", "auto", "train.py"]).code, Some(0));
}

#[test]
fn what_cannot_be_says_what_to_do() {
    let folder = with_python();
    std::fs::write(folder.join("notes"), "").unwrap();
    for (args, code, wanted) in [
        (
            &["--nnodes", "2", "train.py"][..],
            2,
            "--nnodes 2: tensorwire run starts ranks on this machine only; ",
        ),
        (&["--node-rank=1", "train.py"], 2, "--node-rank 1: "),
        (&["--master_addr", "10.0.0.1", "train.py"], 2, "--master-addr 10.0.0.1: the store "),
        (&["--max-restarts=3", "train.py"], 2, "use torchrun to restart"),
        (
            &["--rdzv_endpoint=localhost:0", "train.py"],
            2,
            "torchrun's --rdzv_endpoint: tensorwire run serves ",
        ),
        (&["--nproc-per-nod", "2", "train.py"], 2, "did you mean --nproc-per-node?"),
        (
            &["--no-prefx", "train.py"],
            2,
            "--no-prefx is no option of tensorwire run; did you mean --no-prefix?",
        ),
        (
            &["--epochs", "3", "train.py"],
            2,
            "comes after the program: tensorwire run -n 2 train.py --epochs\n",
        ),
        (&["-np", "2", "train.py"], 2, "mpirun's -np is -n here"),
        (&["-n", "many", "train.py"], 2, "a number from 1 to 4096 is needed, or auto, gpu or cpu"),
        (&["-m", "--no-python", "train.py"], 2, "cannot be used with"),
        (&["4", "train.py"], 127, "cannot start 4: not found in PATH; did you mean -n 4?"),
        (
            &["trian.py"],
            127,
            "cannot start trian.py: not found in PATH; there is no such file in this folder",
        ),
        (&["./trian.py"], 127, "cannot start ./trian.py: no such file"),
        (&["package.train"], 127, "a Python module is named with -m package.train"),
        (&["notes"], 127, "there is such a file here: write ./notes"),
        (&["./notes"], 126, "make it executable (chmod +x ./notes), or name the program that reads it first"),
        (&["--", "--epochs"], 127, "come before the program"),
    ] {
        let ended = in_folder(&folder, args);
        assert_eq!((ended.code, ended.out.as_str()), (Some(code), ""), "{args:?}: {}", ended.err);
        assert!(ended.err.contains(wanted), "{args:?}: {}", ended.err);
        assert_eq!(ended.err.matches("error:").count(), 1, "{args:?}: {}", ended.err);
    }
    let mut command = tensorwire(&["run", "train.py"]);
    command.env("PYTHON", "/no/such/python").current_dir(folder.join(""));
    let ended: Ended = command.output().unwrap().into();
    assert_eq!(ended.code, Some(127));
    let wanted = "error: train.py needs Python: cannot start /no/such/python: no such file; PYTHON names another one\n";
    assert_eq!(ended.err, wanted);
}
