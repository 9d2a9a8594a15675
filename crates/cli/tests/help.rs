//! Help, completions, usage errors, pipes.

mod tool;

use std::process::Stdio;

use tool::{ended, finished, tensorwire};

const COMMANDS: [&[&str]; 18] = [
    &[],
    &["bench"],
    &["bench", "parts"],
    &["bench", "ddp"],
    &["bench", "lease"],
    &["bench", "pipe"],
    &["plan"],
    &["run"],
    &["doctor"],
    &["topo"],
    &["status"],
    &["completions"],
    &["store"],
    &["store", "serve"],
    &["store", "get"],
    &["store", "set"],
    &["store", "list"],
    &["store", "bench"],
];

#[test]
fn every_command_has_examples_that_fit_a_terminal() {
    for command in COMMANDS {
        let help = finished(&[command, &["--help"]].concat());
        assert_eq!(help.code, Some(0), "{command:?}");
        assert!(help.out.contains("Examples:\n"), "{command:?}: {}", help.out);
        assert!(!help.out.contains("__"), "hidden commands are hidden: {}", help.out);
        for line in help.out.lines() {
            assert!(line.chars().count() <= 80, "{command:?}: {line}");
        }
    }
}

#[test]
fn exit_codes_are_documented() {
    for command in COMMANDS.into_iter().filter(|command| !matches!(command, [] | ["completions"] | ["store"]))
    {
        assert!(finished(&[command, &["--help"]].concat()).out.contains("Exit codes:"), "{command:?}");
    }
}

#[test]
fn wrong_usage_is_2_and_goes_to_stderr() {
    for args in
        [&["no-such-command"][..], &["run", "-n", "0", "--", "true"], &["run"], &["doctor", "--no-such"]]
    {
        let ended = finished(args);
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{args:?}");
        assert_eq!(ended.err.matches("error:").count(), 1, "{args:?}: {}", ended.err);
    }
}

#[test]
fn a_wrong_variable_is_said_once() {
    let output = tensorwire(&["store", "list"]).env("TENSORWIRE_NONSENSE", "1").output().unwrap();
    let ended: tool::Ended = output.into();
    assert_eq!((ended.code, ended.err.lines().count()), (Some(2), 1), "{}", ended.err);
}

#[test]
fn completions_name_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = finished(&["completions", shell]);
        assert_eq!(script.code, Some(0));
        assert!(script.out.contains("doctor") && script.out.contains("master-port"), "{shell}");
        assert!(!script.out.contains("__keep"), "{shell} offers hidden commands");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = tensorwire(&["doctor"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let ended = ended(child);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
}
