//! What stands before the caller's own metadata in the messages of calls, as pure data.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `rpc1` |
//! | 4 | 1: a call; 2: an answer; 3: an answer that is an error; 4: a call is not wanted any more |
//! | then | of a call: nanoseconds that are left for it, the length of its name, the name |
//! | | of an error: its kind, the length of its text, the text |
//! | | of what is not wanted: the number of the message that called |
//! | then | metadata of the caller, or of who answers |

use crate::error::Result;
use crate::wire::{Reader, Writer, bad};

const MARK: [u8; 4] = *b"rpc1";
/// The longest name of a call.
pub(super) const NAME: usize = 256;
/// The longest text of an error; a longer one is cut.
const TEXT: usize = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Header {
    Call { left: u64, name: String },
    Answer,
    Error(Failure, String),
    Unwanted(u64),
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// What was called has failed.
    Failed,
    /// There is nothing of that name; the text says what there is.
    Unknown,
    /// Too many calls wait.
    Busy,
    /// The caller has given it up.
    Unwanted,
}

impl Failure {
    const ALL: [Self; 4] = [Self::Failed, Self::Unknown, Self::Busy, Self::Unwanted];
}

impl Header {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let out = Writer::new().fixed(&MARK);
        let out = match self {
            Self::Call { left, name } => out.u8(1).u64(*left).bytes(name.as_bytes()),
            Self::Answer => out.u8(2),
            Self::Error(failure, text) => {
                let end = (0..=TEXT.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
                out.u8(3).u8(*failure as u8).bytes(&text.as_bytes()[..end.unwrap_or_default()])
            }
            Self::Unwanted(serial) => out.u8(4).u64(*serial),
        };
        out.finish()
    }

    /// The header of some metadata, and how long it is.
    pub(super) fn begin(metadata: &[u8]) -> Result<(Self, usize)> {
        let mut from = Reader::new(metadata);
        if from.array()? != MARK {
            return Err(bad("a message that is no call: both ends of the pipe must use rpc"));
        }
        let header = match from.u8()? {
            1 => Self::Call { left: from.u64()?, name: from.text()? },
            2 => Self::Answer,
            3 => {
                let failure = Failure::ALL.get(usize::from(from.u8()?));
                let failure = *failure.ok_or_else(|| bad("an unknown kind of failure of a call"))?;
                Self::Error(failure, from.text()?)
            }
            4 => Self::Unwanted(from.u64()?),
            _ => return Err(bad("an unknown kind of message of a call")),
        };
        match &header {
            Self::Call { name, .. } if name.len() > NAME => Err(bad("a call with a name that is too long")),
            Self::Error(_, text) if text.len() > TEXT => Err(bad("a failure that says too much")),
            _ => Ok((header, metadata.len() - from.left())),
        }
    }
}

/// Any bytes as a header: what is understood comes out again as it was.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(data: &[u8]) {
    if let Ok((header, len)) = Header::begin(data) {
        assert_eq!(header.to_bytes(), data[..len]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples() -> Vec<Header> {
        let failures = Failure::ALL.map(|failure| Header::Error(failure, "no apples left".into()));
        let mut all = vec![
            Header::Call { left: 5_000_000, name: "add".into() },
            Header::Call { left: u64::MAX, name: String::new() },
            Header::Answer,
            Header::Unwanted(77),
        ];
        all.extend(failures);
        all
    }

    #[test]
    fn headers_come_back() {
        for header in samples() {
            let mut bytes = header.to_bytes();
            let len = bytes.len();
            for cut in 0..len {
                assert!(Header::begin(&bytes[..cut]).is_err(), "{header:?} {cut}");
            }
            bytes.extend(b"metadata");
            assert_eq!(Header::begin(&bytes).unwrap(), (header, len));
        }
    }

    #[test]
    fn what_no_call_says_is_refused() {
        let long = |len: usize| Header::Call { left: 0, name: "a".repeat(len) }.to_bytes();
        Header::begin(&long(NAME)).unwrap();
        let said = |bytes: &[u8], text: &str| {
            let error = Header::begin(bytes).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        said(&long(NAME + 1), "too long");
        said(b"rpc2\x02", "must use rpc");
        said(b"rpc1\x05", "unknown kind of message");
        said(b"rpc1\x03\x09\0\0\0\0", "unknown kind of failure");
        let text = [&b"rpc1\x03\0"[..], &(TEXT as u32 + 1).to_le_bytes(), &vec![b'a'; TEXT + 1]].concat();
        said(&text, "says too much");
    }

    /// A text that is too long is cut between two letters.
    #[test]
    fn long_texts_are_cut() {
        let header = Header::Error(Failure::Failed, format!("a{}", "ä".repeat(TEXT)));
        let (Header::Error(_, text), _) = Header::begin(&header.to_bytes()).unwrap() else { panic!() };
        assert_eq!((text.len(), text.chars().next_back()), (TEXT - 1, Some('ä')));
    }

    #[test]
    fn corpus() {
        crate::store::fuzz::tests::replay("pipe_calls", fuzz);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            fuzz(&bytes);
            fuzz(&[&MARK[..], &bytes].concat());
        }
    }
}
