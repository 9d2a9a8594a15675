//! What the fuzzers call. Their corpora are replayed by the tests below, too.

use super::engine::Engine;
use super::wire::{Decoder, Frame};
use super::{Limits, Request, file, server};

/// Any bytes as a client's stream, in one piece and byte by byte: the same frames, or both refused.
pub fn frames(data: &[u8]) {
    let limits = Limits { request: 4096, keys_per_request: 64, ..Limits::default() };
    assert_eq!(decode(data, data.len().max(1), &limits), decode(data, 1, &limits));
}

/// Any bytes as what a client sends after its greeting. The server must not fail, and must hold no more than is allowed.
pub fn session(data: &[u8]) {
    server::fuzz_session(data);
}

/// Any bytes as the file of a store: every record moves on, and is a change that can be made.
pub fn log(data: &[u8]) {
    let mut engine = Engine::new(Limits::none());
    let mut rest = data;
    while let Ok(Some((change, len))) = file::log::next(rest) {
        assert!(len > 0 && len <= rest.len());
        if let Some(change) = change {
            assert!(!change.waits() || matches!(change, Request::Pop { .. }));
            assert!(engine.apply(0, change, &mut Vec::new()).is_some());
        }
        rest = &rest[len..];
    }
}

fn decode(data: &[u8], step: usize, limits: &Limits) -> Result<Vec<Frame>, String> {
    let (mut decoder, mut pending, mut frames) = (Decoder::default(), Vec::new(), Vec::new());
    for piece in data.chunks(step) {
        pending.extend_from_slice(piece);
        while let Some((frame, len)) = decoder.next(&pending, limits)? {
            pending.drain(..len);
            frames.push(frame);
        }
    }
    Ok(frames)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    /// Runs a target on every file of its corpus.
    pub(crate) fn replay(target: &str, run: fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
        let mut count = 0;
        for entry in std::fs::read_dir(&folder).unwrap() {
            run(&std::fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count > 0, "{} is empty", folder.display());
    }

    #[test]
    fn corpus_of_frames() {
        replay("store_frames", super::frames);
    }

    #[test]
    fn corpus_of_sessions() {
        replay("store_session", super::session);
    }

    #[test]
    fn corpus_of_logs() {
        replay("store_log", super::log);
    }
}
