//! This program itself: how it is started once more, as the keeper of ranks, as a rank or as a server.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

/// The running program, even if its file was replaced meanwhile.
const SELF: &str = "/proc/self/exe";

/// The program and its first arguments, where the running program is an interpreter. Empty where it is ours alone.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// What was typed after the name of the command.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Says once what was typed after the name of the command. An interpreter has more words before it.
pub(crate) fn set_arguments(words: Vec<OsString>) {
    let _ = ARGUMENTS.set(words);
}

/// The whole command as a shell would read it.
pub(crate) fn typed() -> String {
    let words = ARGUMENTS.get().map(Vec::as_slice).unwrap_or_default();
    let words = words.iter().map(|word| quoted(&word.to_string_lossy()));
    std::iter::once("tensorwire".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "-_=+,./:@%".contains(letter);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Says once how this program is started.
pub(crate) fn set(words: Vec<OsString>) {
    // A second call in one process can only say the same.
    let _ = WORDS.set(words);
}

/// Whether the running program is an interpreter, which finds itself by the name it is started with.
pub(crate) fn is_interpreted() -> bool {
    WORDS.get().is_some_and(|words| !words.is_empty())
}

/// The interpreter that this program runs in, if it does.
pub(crate) fn interpreter() -> Option<OsString> {
    WORDS.get().and_then(|words| words.first()).cloned()
}

/// A command that starts this program; its arguments are still to be added.
pub(crate) fn command() -> Command {
    match WORDS.get().and_then(|words| words.split_first()) {
        Some((program, first)) => {
            let mut command = Command::new(program);
            command.args(first);
            command
        }
        None => Command::new(SELF),
    }
}

/// The same as words, for others to start.
pub(crate) fn words() -> io::Result<Vec<OsString>> {
    match WORDS.get() {
        Some(words) if !words.is_empty() => Ok(words.clone()),
        _ => Ok(vec![std::fs::read_link(SELF)?.into_os_string()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_a_shell() {
        assert_eq!(["1K,1M", "a b", "", "it's"].map(quoted), ["1K,1M", "'a b'", "''", "'it'\\''s'"]);
    }
}
