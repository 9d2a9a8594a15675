//! Identities of processes, and the secret that members of a group know.

use std::fmt;

use crate::error::{Error, Result};

/// A random 128-bit name of a process, a group or a region. Never a pid: pids are reused and differ between
/// namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// A new one.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What the members of a group know and nobody else does. It never travels over a connection: each side proves
/// that it has it.
#[derive(Clone, Copy)]
pub struct Secret([u8; 32]);

/// Which side of a connection makes a proof, so that neither can send the other's proof back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The one that connected.
    Caller,
    /// The one that accepted.
    Listener,
}

impl Secret {
    /// A new one.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }

    /// From its bytes, as they came through the group's store.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes, for the group's store.
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// From the words or random bytes that people hand round: the same for the same bytes, on every machine.
    pub fn from_words(words: &[u8]) -> Self {
        Self(blake3::derive_key("tensorwire 2026-11-18 the key of a job", words))
    }

    /// Another secret, for one purpose. It tells nothing of this one.
    #[must_use]
    pub fn derive(&self, purpose: &str, parts: &[&[u8]]) -> Self {
        Self(self.keyed(purpose, parts).into())
    }

    /// A few bytes by which people can tell secrets apart.
    pub fn fingerprint(&self) -> [u8; 8] {
        let hash = self.keyed("fingerprint", &[]);
        std::array::from_fn(|index| hash.as_bytes()[index])
    }

    /// A proof that whoever made it knows the secret, over some parts in their order.
    pub fn prove(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        self.keyed(purpose, parts).into()
    }

    /// Whether a proof over these parts is right; compared in constant time.
    pub fn proves(&self, purpose: &str, parts: &[&[u8]], proof: &[u8; 32]) -> bool {
        self.keyed(purpose, parts) == blake3::Hash::from_bytes(*proof)
    }

    /// Each part stands behind its length, so that no two lists of parts give the same bytes.
    fn keyed(&self, purpose: &str, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(b"tensorwire parts 1");
        for part in [purpose.as_bytes()].iter().chain(parts) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.finalize()
    }

    /// The proof that `side` knows the secret, for one conversation.
    pub fn proof(&self, side: Side, transcript: &[u8]) -> [u8; 32] {
        self.hash(side, transcript).into()
    }

    /// Whether `proof` is right; compared in constant time.
    pub fn verify(&self, side: Side, transcript: &[u8], proof: &[u8; 32]) -> bool {
        // blake3::Hash compares in constant time.
        self.hash(side, transcript) == blake3::Hash::from_bytes(*proof)
    }

    fn hash(&self, side: Side, transcript: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(match side {
            Side::Caller => b"tensorwire caller 1",
            Side::Listener => b"tensorwire listen 1",
        });
        hasher.update(transcript);
        hasher.finalize()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[filled..], flags) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("asking the kernel for random bytes", error)),
        }
    }
    Ok(bytes)
}

/// A name for some bytes that is the same in every process.
pub fn digest(bytes: &[u8]) -> Id {
    let hash = blake3::hash(bytes);
    Id(std::array::from_fn(|index| hash.as_bytes()[index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_are_of_one_purpose_and_of_parts_in_their_places() {
        let secret = Secret::from_words(b"words");
        let proof = secret.prove("a", &[b"bc", b"d"]);
        assert!(secret.proves("a", &[b"bc", b"d"], &proof));
        assert!(!Secret::from_words(b"other words").proves("a", &[b"bc", b"d"], &proof));
        for (purpose, parts) in [
            ("b", &[&b"bc"[..], b"d"][..]),
            ("a", &[b"b", b"cd"]),
            ("a", &[b"bcd"]),
            ("ab", &[b"c", b"d"]),
            ("a", &[]),
        ] {
            assert!(!secret.proves(purpose, parts, &proof), "{purpose} {parts:?}");
        }
    }

    #[test]
    fn secrets_for_other_purposes_are_others() {
        let secret = Secret::from_words(b"words");
        assert_eq!(secret, Secret::from_words(b"words"));
        assert_ne!(secret, secret.derive("a", &[]));
        assert_ne!(secret.derive("a", &[]), secret.derive("b", &[]));
        assert_ne!(secret.fingerprint(), Secret::from_words(b"word").fingerprint());
        assert!(!secret.to_bytes().starts_with(&secret.fingerprint()));
    }
}
