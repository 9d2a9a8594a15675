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
    given.retain(|(name, value)| match Config::from_vars([(name.clone(), value.clone())]) {
        Ok(_) => true,
        Err(error) => {
            let shown = if is_secret(name) { "(not shown)" } else { value };
            findings.push(Finding::fail(name, shown).because(error));
            false
        }
    });
    let config = match Config::from_vars(given) {
        Ok(config) => config,
        Err(error) => {
            findings.push(Finding::fail("TENSORWIRE_", "do not fit together").because(error));
            Config::default()
        }
    };
    for setting in config.settings() {
        let value = if setting.value.is_empty() { "(unset)" } else { &setting.value };
        let state = if setting.set { State::Ok } else { State::Fact };
        let origin = if setting.set { " (set)" } else { "" };
        findings.push(Finding::new(setting.name, state, format!("{value}{origin}")).because(setting.doc));
    }
    findings
}
