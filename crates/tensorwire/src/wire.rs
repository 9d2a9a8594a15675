//! Frames between our own processes: fixed order, little-endian, every length checked before it is believed.

use crate::error::{Error, PeerFaultKind, Result};

/// The version of all frames and shared layouts. Ranks of one group must have the same.
pub const PROTOCOL: u32 = 9;

/// Longest string or byte string in a frame.
const MAX_BYTES: usize = 1 << 20;

/// Builds a frame.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty frame.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a byte.
    #[must_use]
    pub fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    /// Appends a number.
    #[must_use]
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a number.
    #[must_use]
    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends bytes whose number both sides know.
    #[must_use]
    pub fn fixed(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Appends bytes with their number; what is too long is cut.
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
        self.u32(bytes.len() as u32).fixed(bytes)
    }

    /// Appends a list of numbers.
    #[must_use]
    pub fn numbers(self, numbers: &[usize]) -> Self {
        let to = self.u32(numbers.len() as u32);
        numbers.iter().fold(to, |to, &number| to.u64(number as u64))
    }

    /// The frame.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes a frame apart. Every call fails on a frame that is too short.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Begins at the start of a frame.
    pub fn new(frame: &'a [u8]) -> Self {
        Self(frame)
    }

    /// Takes a byte.
    pub fn u8(&mut self) -> Result<u8> {
        self.array().map(|[byte]| byte)
    }

    /// Takes a number.
    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Takes a number.
    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Takes a count of things that are at least `least` bytes each, so that no frame can promise more than it
    /// holds.
    pub fn count(&mut self, least: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        if count > self.0.len() / least.max(1) { Err(short()) } else { Ok(count) }
    }

    /// Takes bytes whose number both sides know.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(short)?;
        self.0 = rest;
        Ok(*head)
    }

    /// Takes bytes with their number.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > MAX_BYTES || len > self.0.len() {
            return Err(short());
        }
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(head)
    }

    /// Takes text.
    pub fn text(&mut self) -> Result<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| bad("text that is not UTF-8"))
    }

    /// Takes a list of numbers.
    pub fn numbers(&mut self) -> Result<Vec<usize>> {
        let count = self.count(8)?;
        (0..count).map(|_| Ok(usize::try_from(self.u64()?).unwrap_or(usize::MAX))).collect()
    }

    /// How many bytes are left.
    pub fn left(&self) -> usize {
        self.0.len()
    }

    /// Fails if anything is left.
    pub fn end(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(bad("bytes after its end")) }
    }
}

fn short() -> Error {
    bad("fewer bytes than it promises")
}

/// The fault of whoever sent a frame with this in it.
pub(crate) fn bad(what: &str) -> Error {
    Error::peer(PeerFaultKind::Misbehaved, "another process", None, format!("sent a frame with {what}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn frames_come_back(a in any::<u8>(), b in any::<u32>(), c in any::<u64>(), d in any::<[u8; 5]>(), e in ".*") {
            let frame = Writer::new().u8(a).u32(b).u64(c).fixed(&d).bytes(e.as_bytes()).finish();
            let mut reader = Reader::new(&frame);
            prop_assert_eq!((reader.u8()?, reader.u32()?, reader.u64()?), (a, b, c));
            prop_assert_eq!((reader.array::<5>()?, reader.text()?), (d, e));
            reader.end()?;
        }

        /// Whatever is asked of whatever bytes, nothing panics and nothing is taken that is not there.
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), calls in proptest::collection::vec(0..7u8, 0..20)) {
            let mut reader = Reader::new(&bytes);
            for call in calls {
                match call {
                    0 => drop(reader.u8()),
                    1 => drop(reader.u32()),
                    2 => drop(reader.u64()),
                    3 => drop(reader.array::<16>()),
                    4 => if let Ok(text) = reader.text() { prop_assert!(text.len() <= bytes.len()) },
                    5 => if let Ok(count) = reader.count(4) { prop_assert!(count * 4 <= bytes.len()) },
                    _ => if let Ok(part) = reader.bytes() { prop_assert!(part.len() <= bytes.len()) },
                }
            }
        }
    }

    #[test]
    fn what_is_too_long_is_cut() {
        let long = vec![7; MAX_BYTES + 1];
        let frame = Writer::new().bytes(&long).finish();
        assert_eq!(Reader::new(&frame).bytes().unwrap().len(), MAX_BYTES);
        let promise = Writer::new().u32(MAX_BYTES as u32 + 1).fixed(&long).finish();
        assert!(Reader::new(&promise).bytes().is_err());
    }
}
