//! Every variable of tensorwire with its current value. A wrong variable is shown with the others.

use tensorwire::Config;
use tensorwire::config::is_secret;

use super::report::{Finding, State};

pub(super) fn probe() -> Vec<Finding> {
    let mut given: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| name.starts_with("TENSORWIRE_"))
        .collect();
    given.sort();
    let mut findings = Vec::new();
    // Each beside the right ones before it: one may have no meaning without another.
    let mut config = Config::default();
    let mut right: Vec<(String, String)> = Vec::new();
    for (name, value) in given {
        right.push((name.clone(), value.clone()));
        match Config::from_vars(right.clone()) {
            Ok(read) => config = read,
            Err(error) => {
                right.pop();
                let shown = if is_secret(&name) { "(not shown)" } else { &value };
                findings.push(Finding::fail(&name, shown).because(error));
            }
        }
    }
    for setting in config.settings() {
        let value = if setting.value.is_empty() { "(unset)" } else { &setting.value };
        let state = if setting.set { State::Ok } else { State::Fact };
        let origin = if setting.set { " (set)" } else { "" };
        findings.push(Finding::new(setting.name, state, format!("{value}{origin}")).because(setting.doc));
    }
    findings
}
