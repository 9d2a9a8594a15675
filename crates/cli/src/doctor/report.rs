//! What was found, and how it is shown.

use std::fmt::Display;
use std::io;

use serde::Serialize;

use crate::printer::{Printer, Tone, WIDTH, wrap};

/// Everything that was found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    /// Whether tensorwire can work here.
    pub(super) works: bool,
    sections: Vec<Section>,
}

/// Findings of one kind.
#[derive(Debug, Serialize)]
pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) findings: Vec<Finding>,
}

/// One thing that is there or not.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) name: String,
    pub(super) state: State,
    pub(super) value: String,
    /// Why it is so, or what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
}

/// How it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    Fact,
    Warn,
    Off,
    Fail,
}

impl Finding {
    pub(super) fn new(name: impl Into<String>, state: State, value: impl Display) -> Self {
        Self { name: name.into(), state, value: value.to_string(), reason: None }
    }

    pub(super) fn ok(name: impl Into<String>, value: impl Display) -> Self {
        Self::new(name, State::Ok, value)
    }

    pub(super) fn fact(name: impl Into<String>, value: impl Display) -> Self {
        Self::new(name, State::Fact, value)
    }

    pub(super) fn off(name: impl Into<String>, value: impl Display) -> Self {
        Self::new(name, State::Off, value)
    }

    pub(super) fn warn(name: impl Into<String>, value: impl Display) -> Self {
        Self::new(name, State::Warn, value)
    }

    pub(super) fn fail(name: impl Into<String>, value: impl Display) -> Self {
        Self::new(name, State::Fail, value)
    }

    pub(super) fn because(mut self, reason: impl Display) -> Self {
        self.reason = Some(reason.to_string());
        self
    }
}

impl Report {
    pub(super) fn new(sections: Vec<Section>) -> Self {
        let works =
            sections.iter().flat_map(|section| &section.findings).all(|found| found.state != State::Fail);
        Self { version: env!("CARGO_PKG_VERSION"), works, sections }
    }

    pub(super) fn print(&self, printer: &Printer) -> io::Result<()> {
        printer.line(&format!("tensorwire {}", self.version))?;
        for section in &self.sections {
            printer.line(&format!("\n{}", printer.tint(Tone::Heading, section.name)))?;
            for finding in &section.findings {
                finding.print(printer)?;
            }
        }
        let count =
            |state| self.sections.iter().flat_map(|s| &s.findings).filter(|f| f.state == state).count();
        let counts = format!("{} off, {} warnings", count(State::Off), count(State::Warn));
        let verdict = match count(State::Fail) {
            0 => printer.tint(Tone::Good, "Host memory can be shared here"),
            fails => printer.tint(Tone::Bad, &format!("tensorwire cannot work like this: {fails} failed")),
        };
        printer.line(&format!("\n{verdict} ({counts})."))
    }
}

impl Finding {
    /// Mark, name and value in columns; the reason below the value.
    fn print(&self, printer: &Printer) -> io::Result<()> {
        const NAME: usize = 21;
        const INDENT: usize = 2 + 4 + 2 + NAME + 1;
        let (mark, tone) = match self.state {
            State::Ok => ("ok", Tone::Good),
            State::Fact => ("--", Tone::Quiet),
            State::Warn => ("warn", Tone::Warning),
            State::Off => ("off", Tone::Quiet),
            State::Fail => ("FAIL", Tone::Bad),
        };
        let mark = printer.tint(tone, &format!("{mark:<4}"));
        let name = if self.name.chars().count() > NAME {
            printer.line(&format!("  {mark}  {}", self.name))?;
            format!("  {:<4}  {:<NAME$}", "", "")
        } else {
            format!("  {mark}  {:<NAME$}", self.name)
        };
        let mut values = wrap(&self.value, WIDTH - INDENT).into_iter();
        printer.line(format!("{name} {}", values.next().unwrap_or_default()).trim_end())?;
        for line in values {
            printer.line(&format!("{:INDENT$}{line}", ""))?;
        }
        for line in self.reason.iter().flat_map(|reason| wrap(reason, WIDTH - INDENT)) {
            printer.line(&format!("{:INDENT$}{}", "", printer.tint(Tone::Quiet, &line)))?;
        }
        Ok(())
    }
}

/// Bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value.fract() > 0.05 && value < 100.0);
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_short() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(64 << 20), "64 MiB");
        assert_eq!(bytes(1_600_000), "1.5 MiB");
    }
}
