//! What goes over a connection between two hosts, as pure data.
//!
//! | what | bytes |
//! |---|---|
//! | head: version, kind, nothing (2), check (4), tag, bytes, number, type | 40 |
//! | piece: how many bytes of the payload follow (4), the same inverted (4) | 8 |
//! | the bytes of the piece | |
//!
//! A message is a head, as many pieces as its bytes need, and the head of a piece that is none: [`WHOLE`], or [`GIVEN_UP`]. That one may come before all bytes have. Then what has come does not count, and the next head follows. A
//! connection that ends well ends with a head of kind [`Head::Goodbye`]. Numbers are little-endian.

use tensorwire_device::secret::digest;

use super::Header;

/// Bytes of a head.
pub(crate) const HEAD: usize = 40;
/// Bytes before a piece.
pub(crate) const PIECE_HEAD: usize = 8;
/// The longest piece. A message that is given up ends behind a piece, so a piece does not last long.
pub(crate) const PIECE: usize = 1 << 20;

/// Behind the last piece of a message.
pub(crate) const WHOLE: usize = u32::MAX as usize;
/// Behind the last piece of a message that the sender has given up.
pub(crate) const GIVEN_UP: usize = 0;

const VERSION: u8 = 1;
const MESSAGE: u8 = 1;
const GOODBYE: u8 = 2;

/// What a head says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// A message follows.
    Message(Header),
    /// Nothing follows.
    Goodbye,
}

impl Head {
    pub(crate) fn to_bytes(self) -> [u8; HEAD] {
        let (kind, words) = match self {
            Self::Message(header) => (MESSAGE, header.words()),
            Self::Goodbye => (GOODBYE, [0; 4]),
        };
        let mut bytes = [0; HEAD];
        (bytes[0], bytes[1]) = (VERSION, kind);
        for (at, word) in words.into_iter().enumerate() {
            bytes[8 + at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let check = check(&bytes);
        bytes[4..8].copy_from_slice(&check);
        bytes
    }

    /// Nothing, if no sender of ours wrote it, or if a byte was changed on its way.
    pub(crate) fn from_bytes(bytes: &[u8; HEAD]) -> Option<Self> {
        if bytes[0] != VERSION || bytes[2..4] != [0, 0] || bytes[4..8] != check(bytes) {
            return None;
        }
        let mut words = [0; 4];
        for (at, word) in words.iter_mut().enumerate() {
            *word = u64::from_le_bytes(*bytes[8 + at * 8..].first_chunk()?);
        }
        match bytes[1] {
            MESSAGE => Header::from_words(words).map(Self::Message),
            GOODBYE if words == [0; 4] => Some(Self::Goodbye),
            _ => None,
        }
    }
}

/// A check of all of a head but the check itself.
fn check(bytes: &[u8; HEAD]) -> [u8; 4] {
    let mut without = *bytes;
    without[4..8].fill(0);
    check_of(&without)
}

/// By what a change on the way is seen, where nothing is sealed.
pub(crate) fn check_of(bytes: &[u8]) -> [u8; 4] {
    let digest = digest(bytes);
    std::array::from_fn(|at| digest.0[at])
}

/// What stands before a piece of so many bytes, or behind the last one.
pub(crate) fn piece(len: usize) -> [u8; PIECE_HEAD] {
    let len = len as u32;
    let mut bytes = [0; PIECE_HEAD];
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes[4..].copy_from_slice(&(!len).to_le_bytes());
    bytes
}

/// The length that [`piece`] has written; nothing if a byte was changed on its way.
pub(crate) fn len_of(bytes: &[u8; PIECE_HEAD]) -> Option<usize> {
    let word = |at: usize| bytes[at..].first_chunk().copied().map(u32::from_le_bytes);
    let (len, inverted) = (word(0)?, word(4)?);
    (len == !inverted).then_some(len as usize)
}

/// The bytes of the next piece of a message of which `rest` bytes are missing, or how it has ended; nothing if that cannot be.
pub(crate) fn piece_of(bytes: &[u8; PIECE_HEAD], rest: u64) -> Option<usize> {
    len_of(bytes).filter(|&len| match len {
        WHOLE => rest == 0,
        len => len <= PIECE && len as u64 <= rest,
    })
}

/// What arrives is understood or refused, and a head is what it was made from.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    if let Some(head) = data.first_chunk::<HEAD>()
        && let Some(understood) = Head::from_bytes(head)
    {
        assert_eq!(understood.to_bytes(), *head);
    }
    if let Some(bytes) = data.first_chunk::<PIECE_HEAD>()
        && let Some(len) = piece_of(bytes, u64::MAX)
    {
        assert!(len <= PIECE);
        assert_eq!(piece(len), *bytes);
        assert_eq!(piece_of(bytes, 0).is_some(), len == GIVEN_UP);
    }
}
