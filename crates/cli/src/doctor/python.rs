//! Python, torch, and whether both know tensorwire. The Python is asked that `run` and `bench` would use.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::report::Finding;
use crate::python::python;

/// The oldest Python, and the oldest and newest torch that we test with. pyproject.toml, scripts/test and the docs say
/// the same; a test compares them.
const OLDEST_PYTHON: (u32, u32) = (3, 11);
const OLDEST_TORCH: (u32, u32) = (2, 11);
const NEWEST_TORCH: (u32, u32) = (2, 15);

/// How long Python may take: the first import of torch reads gigabytes.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most that is read of what it prints.
const MOST: u64 = 1 << 16;

const PROBE: &str = include_str!("probe.py");

pub(super) fn probe() -> Vec<Finding> {
    let heard = ask(&python(), PATIENCE);
    let mut findings = match &heard {
        Ok(answers) => vec![of_python(answers), package(answers), torch(answers), backend(answers)],
        Err(why) => vec![
            Finding::off("Python", python().display())
                .because(format!("{why}; only programs in Python need it; PYTHON names another one")),
        ],
    };
    let ((py, thon), (to, rch), (new, est)) = (OLDEST_PYTHON, OLDEST_TORCH, NEWEST_TORCH);
    findings.push(Finding::fact(
        "supported versions",
        format!("Python {py}.{thon} and newer; torch {to}.{rch} to {new}.{est}"),
    ));
    findings
}

/// What the probe said, by its keys.
#[derive(Debug, Default)]
struct Answers {
    said: HashMap<String, String>,
    /// Why there may be no more of them.
    ended: String,
}

impl Answers {
    fn get(&self, key: &str) -> Option<&str> {
        self.said.get(key).map(String::as_str)
    }

    fn read(output: &[u8], ended: String) -> Self {
        let text = String::from_utf8_lossy(output);
        let lines = text.lines().filter_map(|line| line.strip_prefix("tensorwire-doctor "));
        let pairs = lines.map(|line| line.split_once(' ').unwrap_or((line, "")));
        let plain = |text: &str| text.chars().filter(|c| !c.is_control()).take(400).collect::<String>();
        Self { said: pairs.map(|(key, value)| (key.to_owned(), plain(value))).collect(), ended }
    }
}

/// Runs the probe. What it said before it failed or took too long counts, too.
fn ask(python: &OsStr, patience: Duration) -> Result<Answers, String> {
    let deadline = Instant::now() + patience;
    let mut command = Command::new(python);
    command.args(["-c", PROBE, &(patience.as_secs() + 1).to_string()]).env("PYTHONDONTWRITEBYTECODE", "1");
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("cannot start it: {error}"))?;
    let pipe = child.stdout.take().ok_or("it has no output")?;
    let (sender, parts) = channel();
    // If the pipe stays open (a child of Python may hold it), this thread stays, too, until the command ends.
    std::thread::spawn(move || {
        let mut pipe = pipe.take(MOST);
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut part) {
            if sender.send(part[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut output = Vec::new();
    let complete = loop {
        match parts.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(part) => output.extend(part),
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => break false,
        }
    };
    // It has closed its output, or is too late: it has nothing more to do.
    let ended = child.try_wait().ok().flatten();
    let _ = child.kill();
    let ended = ended.or_else(|| child.wait().ok());
    let ended = match (complete, ended) {
        (false, _) => format!("it took more than {} s", patience.as_secs()),
        (true, Some(status)) => format!("it ended early, {status}"),
        (true, None) => "it ended early".into(),
    };
    let answers = Answers::read(&output, ended);
    if answers.get("python").is_none() {
        return Err(format!("it does not answer as Python does: {}", answers.ended));
    }
    Ok(answers)
}

fn of_python(answers: &Answers) -> Finding {
    let version = answers.get("python").unwrap_or_default();
    let path = answers.get("executable").filter(|path| !path.is_empty());
    let value = path.map_or_else(|| version.to_owned(), |path| format!("{version}, {path}"));
    match numbers(version) {
        Some(found) if found >= OLDEST_PYTHON => Finding::ok("Python", value),
        _ => Finding::warn("Python", value).because(format!(
            "tensorwire's package needs Python {}.{} or newer; PYTHON names another one",
            OLDEST_PYTHON.0, OLDEST_PYTHON.1
        )),
    }
}

fn package(answers: &Answers) -> Finding {
    let (name, own) = ("Python package", env!("CARGO_PKG_VERSION"));
    match (answers.get("package"), answers.get("no-package"), answers.get("broken-package")) {
        (Some(version), ..) if version == own => Finding::ok(name, format!("tensorwire {version}")),
        (Some(version), ..) => Finding::warn(name, format!("tensorwire {version}")).because(format!(
            "this command is {own}; ranks of both cannot be in one group: install the same version of both"
        )),
        (None, Some(_), _) => Finding::off(name, "tensorwire is not installed in this Python")
            .because("install it there with pip, or name another Python with PYTHON"),
        (None, None, Some(why)) => Finding::warn(name, "tensorwire cannot be imported").because(why),
        (None, None, None) => Finding::warn(name, "not known").because(&answers.ended),
    }
}

fn torch(answers: &Answers) -> Finding {
    let name = "torch";
    match (answers.get("torch"), answers.get("no-torch"), answers.get("broken-torch")) {
        (Some(version), ..) => match numbers(version) {
            Some(found) if found > NEWEST_TORCH => Finding::warn(name, version).because(format!(
                "newer than {}.{}, the newest that was tested",
                NEWEST_TORCH.0, NEWEST_TORCH.1
            )),
            Some(found) if found >= OLDEST_TORCH => Finding::ok(name, version),
            _ => Finding::warn(name, version).because(format!(
                "older than {}.{}: the backend may not work",
                OLDEST_TORCH.0, OLDEST_TORCH.1
            )),
        },
        (None, Some(_), _) => {
            Finding::off(name, "not installed in this Python").because("only programs that use torch need it")
        }
        (None, None, Some(why)) => Finding::warn(name, "it cannot be imported").because(why),
        (None, None, None) => Finding::warn(name, "not known").because(&answers.ended),
    }
}

/// Doctor makes a group of one rank with it.
fn backend(answers: &Answers) -> Finding {
    let name = "torch backend";
    match (answers.get("backend"), answers.get("no-backend"), answers.get("torch")) {
        (Some(_), ..) => Finding::ok(name, "init_process_group(\"tensorwire\") works"),
        (None, Some(_), _) if answers.get("no-package").is_some() => {
            Finding::off(name, "not registered").because("tensorwire is not installed in this Python")
        }
        (None, Some(why), _) => Finding::warn(name, "init_process_group(\"tensorwire\") fails").because(why),
        (None, None, Some(_)) => Finding::warn(name, "not known").because(&answers.ended),
        (None, None, None) => Finding::off(name, "not registered").because("it needs torch"),
    }
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::report::State;
    use super::*;

    fn states(output: &str) -> [State; 4] {
        let answers = Answers::read(output.as_bytes(), "it took more than 60 s".into());
        [of_python(&answers), package(&answers), torch(&answers), backend(&answers)]
            .map(|finding| finding.state)
    }

    #[test]
    fn versions_are_judged() {
        let own = env!("CARGO_PKG_VERSION");
        let said = |python: &str, package: &str, torch: &str, backend: &str| {
            format!(
                "a site that talks\ntensorwire-doctor python {python}\ntensorwire-doctor {package}\n\
                 tensorwire-doctor {torch}\ntensorwire-doctor {backend}\n"
            )
        };
        use State::{Off, Ok, Warn};
        let package = format!("package {own}");
        assert_eq!(states(&said("3.11.0", &package, "torch 2.15.0+cu132", "backend tensorwire")), [Ok; 4]);
        assert_eq!(states(&said("3.10.9", "package 9.9.9", "torch 2.10.1", "no-backend x")), [Warn; 4]);
        assert_eq!(states(&said("3.14.0", &package, "torch 2.16.0a0", "backend x")), [Ok, Ok, Warn, Ok]);
        let none = said("3.12.1", "no-package x", "no-torch x", "end");
        assert_eq!(states(&none), [Ok, Off, Off, Off]);
        assert_eq!(states("tensorwire-doctor python 3.13.2"), [Ok, Warn, Warn, Off]);
        assert_eq!(states("tensorwire-doctor python\ntensorwire-doctor"), [Warn, Warn, Warn, Off]);
    }

    #[test]
    fn one_that_never_ends_is_left() {
        let name = format!("tensorwire-doctor-{}", std::process::id());
        let script = std::env::temp_dir().join(name);
        // Another process writes it: see `Folder::script` of the tests.
        let write = "printf '#!/bin/sh\necho tensorwire-doctor python 3.12.1\nexec sleep 1000\n' > \"$0\"; chmod +x \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&script).status().unwrap().success());
        // What it said before may be heard or not, on a busy machine.
        let ended = match ask(script.as_os_str(), Duration::from_secs(1)) {
            Ok(answers) => answers.ended,
            Err(why) => why,
        };
        std::fs::remove_file(&script).unwrap();
        assert!(ended.ends_with("it took more than 1 s"), "{ended}");
    }
}
