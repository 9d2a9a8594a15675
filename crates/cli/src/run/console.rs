//! What the ranks print, put together line by line. No I/O here: bytes in, bytes out.
//!
//! A line is held back until it is complete, so that lines of two ranks never mix. A line that stays incomplete for
//! [`PAUSE`] is shown as it is, because it may be a question or a progress bar. The next rank that prints begins a
//! new line. A line of more than [`LONGEST`] bytes is cut.

use std::time::{Duration, Instant};

use crate::printer::Stream;

/// How long an incomplete line is held back.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest line that is held back.
const LONGEST: usize = 1 << 20;

/// One colour for each rank, in turn.
const COLORS: [&str; 6] = ["36", "32", "33", "35", "34", "31"];

/// The lines of all ranks.
#[derive(Debug)]
pub(crate) struct Console {
    sources: Vec<[Source; 2]>,
    screens: [Screen; 2],
    /// Both streams are one terminal: what is open on one is open on the other.
    one_terminal: bool,
}

/// What a rank printed to one stream and was not shown yet.
#[derive(Debug)]
struct Source {
    prefix: Vec<u8>,
    held: Vec<u8>,
    since: Option<Instant>,
}

/// Where the cursor is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Screen {
    /// At the start of an empty line.
    #[default]
    Fresh,
    /// At the start of a line that this rank may write over: it ended with a carriage return.
    Returned(usize),
    /// Behind an incomplete line of this rank.
    Inside(usize),
}

/// How the console looks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub(crate) ranks: usize,
    pub(crate) prefix: bool,
    pub(crate) color: [bool; 2],
    pub(crate) terminal: [bool; 2],
}

impl Console {
    pub(crate) fn new(look: Look) -> Self {
        let source =
            |rank, stream| Source { prefix: prefix(look, rank, stream), held: Vec::new(), since: None };
        let sources = (0..look.ranks).map(|rank| Stream::BOTH.map(|stream| source(rank, stream))).collect();
        Self { sources, screens: [Screen::Fresh; 2], one_terminal: look.terminal == [true; 2] }
    }

    /// Takes what a rank printed; gives what can be shown of it.
    pub(crate) fn take(&mut self, rank: usize, stream: Stream, bytes: &[u8], now: Instant) -> Vec<u8> {
        let mut held = std::mem::take(&mut self.sources[rank][stream as usize].held);
        held.extend_from_slice(bytes);
        let mut shown = Vec::new();
        let mut start = 0;
        while let Some(len) = end_of_line(&held[start..]) {
            self.show(rank, stream, &held[start..start + len], &mut shown);
            start += len;
        }
        held.drain(..start);
        if held.len() >= LONGEST {
            held.push(b'\n');
            self.show(rank, stream, &held, &mut shown);
            held.clear();
        }
        let source = &mut self.sources[rank][stream as usize];
        source.since = (!held.is_empty()).then_some(now);
        source.held = held;
        shown
    }

    /// Incomplete lines that were held back for long enough.
    pub(crate) fn idle(&mut self, now: Instant) -> Vec<(Stream, Vec<u8>)> {
        let waited = |since: Instant| now.saturating_duration_since(since) >= PAUSE;
        self.flush(|source| source.since.is_some_and(waited))
    }

    /// Everything that is still held back.
    pub(crate) fn rest(&mut self) -> Vec<(Stream, Vec<u8>)> {
        self.flush(|_| true)
    }

    /// When [`Self::idle`] will have something, if nothing happens until then.
    pub(crate) fn next_idle(&self) -> Option<Instant> {
        self.sources.iter().flatten().filter_map(|source| source.since).min().map(|since| since + PAUSE)
    }

    /// A line of the launcher's own, for stderr.
    pub(crate) fn note(&mut self, text: &str) -> Vec<u8> {
        let screen = self.screen(Stream::Err);
        let gap = if *screen == Screen::Fresh { "" } else { "\n" };
        *screen = Screen::Fresh;
        format!("{gap}{text}\n").into_bytes()
    }

    fn flush(&mut self, due: impl Fn(&Source) -> bool) -> Vec<(Stream, Vec<u8>)> {
        let mut shown = Vec::new();
        for rank in 0..self.sources.len() {
            for stream in Stream::BOTH {
                let source = &mut self.sources[rank][stream as usize];
                if !source.held.is_empty() && due(source) {
                    source.since = None;
                    let line = std::mem::take(&mut source.held);
                    let mut bytes = Vec::new();
                    self.show(rank, stream, &line, &mut bytes);
                    shown.push((stream, bytes));
                }
            }
        }
        shown
    }

    /// Shows a line, complete or not, where the cursor is.
    fn show(&mut self, rank: usize, stream: Stream, line: &[u8], into: &mut Vec<u8>) {
        let screen = *self.screen(stream);
        let goes_on = screen == Screen::Inside(rank);
        if !matches!(screen, Screen::Fresh) && !goes_on && screen != Screen::Returned(rank) {
            into.push(b'\n');
        }
        if !goes_on {
            into.extend_from_slice(&self.sources[rank][stream as usize].prefix);
        }
        into.extend_from_slice(line);
        *self.screen(stream) = match line.last() {
            Some(b'\n') => Screen::Fresh,
            Some(b'\r') => Screen::Returned(rank),
            _ => Screen::Inside(rank),
        };
    }

    fn screen(&mut self, stream: Stream) -> &mut Screen {
        &mut self.screens[if self.one_terminal { 0 } else { stream as usize }]
    }
}

/// Where the first line ends: behind a newline, or behind a carriage return that is no part of one.
fn end_of_line(bytes: &[u8]) -> Option<usize> {
    let at = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
    match (bytes[at], bytes.get(at + 1)) {
        (b'\n', _) => Some(at + 1),
        (_, Some(b'\n')) => Some(at + 2),
        (_, Some(_)) => Some(at + 1),
        (_, None) => None,
    }
}

fn prefix(look: Look, rank: usize, stream: Stream) -> Vec<u8> {
    let digits = (look.ranks - 1).to_string().len();
    match (look.prefix, look.color[stream as usize]) {
        (false, _) => Vec::new(),
        (true, false) => format!("[rank {rank:>digits$}] ").into_bytes(),
        (true, true) => {
            format!("\x1b[{}m[rank {rank:>digits$}]\x1b[0m ", COLORS[rank % COLORS.len()]).into_bytes()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(ranks: usize) -> Console {
        Console::new(Look { ranks, prefix: true, color: [false; 2], terminal: [true; 2] })
    }

    fn take(console: &mut Console, rank: usize, text: &str) -> String {
        String::from_utf8(console.take(rank, Stream::Out, text.as_bytes(), Instant::now())).unwrap()
    }

    fn idle(console: &mut Console) -> String {
        let shown = console.idle(Instant::now() + PAUSE);
        shown.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn holds_a_line_back_until_it_is_complete() {
        let mut console = console(2);
        assert_eq!(take(&mut console, 0, "one "), "");
        assert_eq!(take(&mut console, 1, "other\n"), "[rank 1] other\n");
        assert_eq!(take(&mut console, 0, "line\nand"), "[rank 0] one line\n");
    }

    #[test]
    fn shows_an_incomplete_line_after_a_pause() {
        let mut console = console(2);
        assert_eq!(take(&mut console, 0, "loading "), "");
        assert!(console.next_idle().is_some());
        assert_eq!(idle(&mut console), "[rank 0] loading ");
        assert_eq!(console.next_idle(), None);
        assert_eq!(take(&mut console, 0, "done\n"), "done\n");
    }

    #[test]
    fn another_rank_begins_a_new_line() {
        let mut console = console(2);
        take(&mut console, 0, "loading ");
        idle(&mut console);
        assert_eq!(take(&mut console, 1, "hello\n"), "\n[rank 1] hello\n");
        assert_eq!(take(&mut console, 0, "done\n"), "[rank 0] done\n");
        take(&mut console, 0, "x");
        idle(&mut console);
        assert_eq!(console.note("tensorwire: note"), b"\ntensorwire: note\n");
    }

    #[test]
    fn progress_bars_write_over_themselves() {
        let mut console = console(2);
        assert_eq!(take(&mut console, 0, "10%\r20%\r"), "[rank 0] 10%\r");
        assert_eq!(take(&mut console, 0, "30%\r\n"), "[rank 0] 20%\r[rank 0] 30%\r\n");
        assert_eq!(take(&mut console, 0, "a\r\nb\n"), "[rank 0] a\r\n[rank 0] b\n");
    }

    #[test]
    fn a_line_without_end_is_cut() {
        let mut console = console(1);
        let shown = console.take(0, Stream::Out, &vec![b'x'; LONGEST], Instant::now());
        assert_eq!(shown.len(), "[rank 0] ".len() + LONGEST + 1);
    }

    #[test]
    fn bytes_stay_as_they_are() {
        let mut console =
            Console::new(Look { ranks: 1, prefix: false, color: [false; 2], terminal: [false; 2] });
        let bytes: Vec<u8> = (0..=255).chain([b'\n']).collect();
        assert_eq!(console.take(0, Stream::Out, &bytes, Instant::now()), bytes);
    }

    #[test]
    fn the_rest_is_shown_at_the_end() {
        let mut console = console(12);
        take(&mut console, 3, "no newline");
        let shown = console.rest();
        assert_eq!(shown, [(Stream::Out, b"[rank  3] no newline".to_vec())]);
    }
}
