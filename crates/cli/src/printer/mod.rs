//! The only place that prints.
//!
//! Results go to stdout, everything else goes to stderr. Lines fit 80 columns. Colour is used only on a terminal,
//! and never with NO_COLOR. Errors of writing are returned, so that a broken pipe can end the command.

mod queue;

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub(crate) use queue::{OutputQueue, Stream};

/// The widest line of a table.
pub(crate) const WIDTH: usize = 80;

/// Writes results, notes and errors.
#[derive(Debug)]
pub(crate) struct Printer {
    color_out: bool,
    color_err: bool,
}

/// What a word on the screen means; its colour follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    Heading,
    Good,
    Warning,
    Bad,
    Quiet,
}

impl Printer {
    pub(crate) fn new() -> Self {
        Self { color_out: wants_color(&io::stdout()), color_err: wants_color(&io::stderr()) }
    }

    /// One line of a result.
    pub(crate) fn line(&self, text: &str) -> io::Result<()> {
        self.bytes(format!("{text}\n").as_bytes())
    }

    /// Bytes as they are.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// One JSON value on a line of its own.
    pub(crate) fn json(&self, value: &impl Serialize) -> io::Result<()> {
        self.line(&serde_json::to_string(value)?)
    }

    /// The text in its tone, for a line of a result.
    pub(crate) fn tint(&self, tone: Tone, text: &str) -> String {
        if self.color_out { paint(tone, text) } else { text.into() }
    }

    /// Something worth knowing that is not a result.
    pub(crate) fn note(&self, text: &str) {
        self.report(&self.noted(text));
    }

    /// Why the command failed.
    pub(crate) fn error(&self, text: &str) {
        self.report(&self.wrong(text));
    }

    /// A note as a line for stderr, without its end.
    pub(crate) fn noted(&self, text: &str) -> String {
        format!("{}: {text}", self.label(Tone::Quiet, "tensorwire"))
    }

    /// An error as a line for stderr, without its end.
    pub(crate) fn wrong(&self, text: &str) -> String {
        format!("{}: {text}", self.label(Tone::Bad, "error"))
    }

    /// A bar on stderr while something takes `steps` steps; nothing where stderr is no terminal.
    pub(crate) fn progress(&self, steps: usize) -> ProgressBar {
        let bar =
            if io::stderr().is_terminal() { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} {wide_msg}");
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }

    fn label(&self, tone: Tone, text: &str) -> String {
        if self.color_err { paint(tone, text) } else { text.into() }
    }

    fn report(&self, line: &str) {
        // Nowhere to report that stderr is closed.
        let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
    }
}

/// Whether a stream gets colour.
pub(crate) fn wants_color(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    stream.is_terminal() && !refused && !dumb
}

/// Breaks text into lines of at most `width` characters, between words where there are any.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        loop {
            let last = lines.len() - 1;
            let used = lines[last].chars().count();
            let gap = usize::from(used > 0);
            if used + gap + word.len() <= width {
                lines[last].extend(std::iter::repeat_n(' ', gap).chain(word));
                break;
            }
            if used > 0 {
                lines.push(String::new());
            } else {
                let rest = word.split_off(width);
                lines[last].extend(word);
                lines.push(String::new());
                word = rest;
            }
        }
    }
    lines
}

/// A table with a heading line: the first column to the left, the others to the right.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let format = |row: &mut dyn Iterator<Item = &str>| {
        let cells = row.zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![format(&mut head.iter().copied())];
    lines.extend(rows.iter().map(|row| format(&mut row.iter().map(String::as_str))));
    lines
}

fn paint(tone: Tone, text: &str) -> String {
    let code = match tone {
        Tone::Heading => "1",
        Tone::Good => "32",
        Tone::Warning => "33",
        Tone::Bad => "1;31",
        Tone::Quiet => "2",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_between_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
    }

    #[test]
    fn wraps_a_word_that_is_too_long() {
        assert_eq!(wrap("ab cdefghij", 4), ["ab", "cdef", "ghij"]);
    }

    #[test]
    fn nothing_is_one_empty_line() {
        assert_eq!(wrap("", 10), [""]);
    }

    #[test]
    fn a_table_lines_up() {
        let rows = vec![vec!["set".into(), "5".into()], vec!["multi".into(), "1000".into()]];
        assert_eq!(table(&["op", "ops/s"], &rows), ["op     ops/s", "set        5", "multi   1000"]);
    }
}
