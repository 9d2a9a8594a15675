//! `tensorwire bench`.

mod tool;

use tool::finished;

#[test]
fn measures_with_ranks_of_its_own() {
    let ended = finished(&["bench", "-n", "3", "--seconds", "0.01", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let rows: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for bench in ["store", "shared", "barrier", "kernels"] {
        assert!(rows.iter().any(|row| row["bench"] == bench), "{bench} is missing in\n{}", ended.out);
    }
    assert!(rows.iter().all(|row| row["p50_us"].as_f64().unwrap() > 0.0), "{}", ended.out);
}

#[test]
fn the_table_fits_a_terminal() {
    let ended = finished(&["bench", "--seconds", "0.01"]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.out.lines().all(|line| line.chars().count() <= 80), "{}", ended.out);
    assert!(!ended.out.contains('\x1b') && ended.err.is_empty(), "{}", ended.err);
}

#[test]
fn a_rank_that_fails_is_named_once() {
    let output = tool::tensorwire(&["bench", "--seconds", "0.01"])
        .env("TENSORWIRE_SOCKET_DIR", "/no/such/folder")
        .output();
    let ended: tool::Ended = output.unwrap().into();
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.starts_with("error: rank "), "{}", ended.err);
    assert_eq!(ended.err.matches("error:").count(), 1, "{}", ended.err);
}
