//! Sealing: nobody between two processes can read or change what they say. Pure data, no sockets.
//!
//! Both know the secret of a group, and have said hello. Then each sends one message of Noise (pattern NNpsk0): the keys of this
//! connection come from the secret and from numbers that both throw away, so who learns the secret later cannot read what was
//! sent before. The messages belong to the hello before them: they are of no use in another conversation.
//!
//! What follows are blocks. A block is a length (u16, little-endian) and as many bytes: what was said, and 16 bytes by which any
//! change is found. Blocks are numbered, so none can be repeated, left out or moved.

use snow::resolvers::{DefaultResolver, FallbackResolver, RingResolver};
use snow::{Builder, HandshakeState, TransportState};
use tensorwire_device::secret::Secret;

use crate::error::{Error, PeerFaultKind, Result};

/// AES-256-GCM, because processors have instructions for it: 5 times as fast as what needs none.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Bytes of each of the two messages.
pub(crate) const GREETING: usize = 48;
/// Bytes that are sealed into one block at most.
pub(crate) const MOST: usize = BLOCK - TAG;
/// Bytes of the longest block.
pub(crate) const BLOCK: usize = 65535;
/// Bytes before a block.
pub(crate) const LENGTH: usize = 2;
const TAG: usize = 16;

/// The caller's half of the greeting, until the answer has come.
#[derive(Debug)]
pub(crate) struct Greeting(Box<HandshakeState>);

impl Greeting {
    /// The first message. `hello` is what both have said before.
    pub(crate) fn call(secret: &Secret, hello: &[&[u8]]) -> Result<(Self, Vec<u8>)> {
        let mut state = with(secret, hello, |builder| builder.build_initiator())?;
        let mut message = vec![0; GREETING];
        state.write_message(&[], &mut message).map_err(bug)?;
        Ok((Self(Box::new(state)), message))
    }

    /// Takes the answer.
    pub(crate) fn finish(mut self, answer: &[u8]) -> Result<Seal> {
        self.0.read_message(answer, &mut []).map_err(|_| refused())?;
        Seal::new(*self.0)
    }

    /// Takes the first message, and gives the second one.
    pub(crate) fn answer(secret: &Secret, hello: &[&[u8]], call: &[u8]) -> Result<(Seal, Vec<u8>)> {
        let mut state = with(secret, hello, |builder| builder.build_responder())?;
        state.read_message(call, &mut []).map_err(|_| refused())?;
        let mut message = vec![0; GREETING];
        state.write_message(&[], &mut message).map_err(bug)?;
        Ok((Seal::new(state)?, message))
    }
}

/// What seals the blocks of one connection, and opens those of the other side.
#[derive(Debug)]
pub(crate) struct Seal(Box<TransportState>);

impl Seal {
    fn new(state: HandshakeState) -> Result<Self> {
        Ok(Self(Box::new(state.into_transport_mode().map_err(bug)?)))
    }

    /// Appends a block with `plain` in it, at most [`MOST`] bytes.
    pub(crate) fn seal(&mut self, plain: &[u8], blocks: &mut Vec<u8>) -> Result<()> {
        let start = blocks.len();
        blocks.extend(((plain.len() + TAG) as u16).to_le_bytes());
        blocks.resize(start + LENGTH + plain.len() + TAG, 0);
        self.0.write_message(plain, &mut blocks[start + LENGTH..]).map_err(bug)?;
        Ok(())
    }

    /// Opens the block behind a length; gives how many bytes were in it. Nothing, if it is not the next one that the other side
    /// has sealed.
    pub(crate) fn open(&mut self, block: &[u8], plain: &mut [u8]) -> Option<usize> {
        self.0.read_message(block, plain).ok()
    }
}

/// How many bytes the block has whose length this is. Nothing, if none of ours has so few.
pub(crate) fn length(bytes: [u8; LENGTH]) -> Option<usize> {
    let length = usize::from(u16::from_le_bytes(bytes));
    (length >= TAG).then_some(length)
}

fn with(
    secret: &Secret,
    hello: &[&[u8]],
    build: impl FnOnce(Builder<'_>) -> std::result::Result<HandshakeState, snow::Error>,
) -> Result<HandshakeState> {
    let resolver = FallbackResolver::new(Box::new(RingResolver), Box::new(DefaultResolver));
    let shared = secret.derive("what seals a connection", &[]).to_bytes();
    let hello = hello.concat();
    let builder = Builder::with_resolver(PATTERN.parse().map_err(bug)?, Box::new(resolver));
    builder.psk(0, &shared).and_then(|builder| builder.prologue(&hello)).and_then(build).map_err(bug)
}

fn refused() -> Error {
    Error::peer(PeerFaultKind::Refused, "the other host", None, "its greeting is not sealed as agreed")
}

fn bug(error: snow::Error) -> Error {
    Error::Bug(format!("sealing a connection: {error}"))
}

/// What is sealed is opened, and nothing else is.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    assert_eq!(sealed_and_opened(data).map_err(|error| error.to_string()), Ok(()));
}

#[cfg(any(test, fuzzing))]
fn sealed_and_opened(data: &[u8]) -> Result<()> {
    let secret = Secret::from_words(b"the secret of the fuzzer");
    assert!(Greeting::answer(&secret, &[b"hello"], data).is_err());
    let (call, first) = Greeting::call(&secret, &[b"hello"])?;
    let (mut theirs, second) = Greeting::answer(&secret, &[b"hello"], &first)?;
    let mut ours = call.finish(&second)?;
    let (mut blocks, mut plain) = (Vec::new(), vec![0; BLOCK]);
    let said = &data[..data.len().min(MOST)];
    ours.seal(said, &mut blocks)?;
    let (head, block) = blocks.split_first_chunk().ok_or_else(refused)?;
    assert_eq!(length(*head), Some(block.len()));
    if data != block {
        assert_eq!(theirs.open(data, &mut plain), None);
    }
    assert_eq!(theirs.open(block, &mut plain), Some(said.len()));
    assert_eq!(&plain[..said.len()], said);
    assert_eq!(theirs.open(block, &mut plain), None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; 32])
    }

    fn pair() -> (Seal, Seal) {
        let (call, first) = Greeting::call(&secret(1), &[b"hello", b"you"]).unwrap();
        let (theirs, second) = Greeting::answer(&secret(1), &[b"hello", b"you"], &first).unwrap();
        assert_eq!((first.len(), second.len()), (GREETING, GREETING));
        (call.finish(&second).unwrap(), theirs)
    }

    #[test]
    fn both_say_and_hear() {
        let (mut ours, mut theirs) = pair();
        let mut plain = vec![0; BLOCK];
        for len in [0, 1, 100, 4096, MOST] {
            let said: Vec<u8> = (0..len).map(|at| at as u8).collect();
            for _ in 0..2 {
                let mut blocks = Vec::new();
                ours.seal(&said, &mut blocks).unwrap();
                assert_eq!(blocks.len(), LENGTH + len + TAG);
                assert_eq!(theirs.open(&blocks[LENGTH..], &mut plain), Some(len));
                assert_eq!(plain[..len], said);
                std::mem::swap(&mut ours, &mut theirs);
            }
        }
    }

    #[test]
    fn no_other_secret_and_no_other_hello() {
        let (call, first) = Greeting::call(&secret(1), &[b"hello"]).unwrap();
        assert!(Greeting::answer(&secret(2), &[b"hello"], &first).is_err());
        assert!(Greeting::answer(&secret(1), &[b"hello again"], &first).is_err());
        let (_, second) = Greeting::answer(&secret(1), &[b"hello"], &first).unwrap();
        let mut changed = second.clone();
        changed[40] ^= 1;
        assert!(call.finish(&changed).is_err());
        // An answer is to one call.
        let (other, _) = Greeting::call(&secret(1), &[b"hello"]).unwrap();
        assert!(other.finish(&second).is_err());
    }

    #[test]
    fn blocks_are_not_changed_repeated_moved_or_sent_back() {
        let (mut ours, mut theirs) = pair();
        let mut plain = vec![0; 64];
        let block = |seal: &mut Seal, said: &[u8]| {
            let mut blocks = Vec::new();
            seal.seal(said, &mut blocks).unwrap();
            blocks.split_off(LENGTH)
        };
        let (first, second) = (block(&mut ours, b"first"), block(&mut ours, b"second"));
        assert_eq!(theirs.open(&second, &mut plain), None);
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1;
            assert_eq!(theirs.open(&changed, &mut plain), None, "byte {at}");
            assert_eq!(theirs.open(&first[..at], &mut plain), None, "{at} bytes");
        }
        assert_eq!(theirs.open(&first, &mut plain), Some(5));
        assert_eq!(theirs.open(&first, &mut plain), None);
        assert_eq!(ours.open(&second, &mut plain), None);
        assert_eq!(theirs.open(&second, &mut plain), Some(6));
    }

    #[test]
    fn any_bytes() {
        for len in [0, 1, 15, 16, 17, 48, 49, 1000, 65535, 70000] {
            fuzz(&vec![7; len]);
        }
    }
}
