//! `tensorwire plan`, which runs nothing.
#![allow(clippy::unwrap_used)]

mod tool;

use serde_json::Value;
use tool::finished;

const OPS: [&str; 9] = [
    "all-reduce",
    "reduce",
    "broadcast",
    "all-gather",
    "gather",
    "scatter",
    "reduce-scatter",
    "all-to-all",
    "barrier",
];

fn plan(args: &[&str]) -> Value {
    let ended = finished(&[&["plan"], args, &["--json"]].concat());
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{args:?}");
    serde_json::from_str(&ended.out).unwrap()
}

#[test]
fn every_operation_has_a_plan_that_fits_a_terminal() {
    for op in OPS {
        let args = [op, "--hosts", "512", "--ranks-per-host", "8", "--bytes", "64M"];
        let ended = finished(&[&["plan"][..], &args].concat());
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{op}");
        assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
        assert!(ended.out.starts_with(op) && ended.out.contains("512 hosts of 8 ranks"), "{}", ended.out);
        for part in ["collect", "exchange", "spread", "Times are predicted"] {
            assert!(ended.out.contains(part), "{part}: {}", ended.out);
        }
        let line = plan(&args);
        assert_eq!((&line["op"], &line["hosts"]), (&op.into(), &512.into()), "{line}");
        let times =
            ["collect", "exchange", "spread"].map(|part| line[part]["predicted_us"].as_f64().unwrap());
        assert!((line["predicted_us"].as_f64().unwrap() - times.iter().sum::<f64>()).abs() < 1e-6, "{line}");
    }
}

/// Twice the link, half the time of the bytes; a latency counts once for each step.
#[test]
fn the_model_is_what_help_says() {
    let args = ["--hosts", "2", "--bytes", "64M", "--memory", "1000"];
    let of = |more: &[&str]| plan(&[&args[..], more].concat())["exchange"]["predicted_us"].as_f64().unwrap();
    let [slow, fast] = ["1", "2"].map(|link| of(&["--link", link, "--latency", "0"]));
    let messages = 2.0 * 257.0 * 3.0;
    assert!((slow - messages - 2.0 * (fast - messages)).abs() < 1.0, "{slow} {fast}");
    let far = of(&["--link", "1", "--latency", "1000"]);
    assert!((far - slow - 2000.0).abs() < 1.0, "{slow} {far}");
}

#[test]
fn wrong_usage_is_explained() {
    for (args, said) in [
        (&["plan", "--hosts", "1"][..], "1 is not in 2..=4096"),
        (&["plan", "send-recv"], "send-recv is a message and has no plan"),
        (&["plan", "--link", "0"], "--link needs a number above 0"),
        (&["plan", "--latency=-1"], "--latency needs a number of 0 or more"),
        (&["plan", "--bytes", "much"], "sizes are given as"),
    ] {
        let ended = finished(args);
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{args:?}");
        assert!(ended.err.contains(said), "{args:?}: {}", ended.err);
    }
}
