//! Proofs: where a job has a key, every value that a group writes into its store shows that a process with the key wrote it,
//! for this group, under this name.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `twpf` |
//! | 4 | 1, the version |
//! | 5..13 | the fingerprint of the key |
//! | 13..45 | the proof: a keyed hash over the group, the name and the value |
//! | 45.. | the value |

use std::fmt;

use tensorwire_device::secret::{Id, Secret};

const MAGIC: [u8; 5] = *b"twpf\x01";
const HEAD: usize = MAGIC.len() + 8 + 32;
const STORE: &str = "a value in the store";

/// What makes and checks the proofs of one group.
#[derive(Debug, Clone)]
pub(crate) struct Proofs {
    secret: Secret,
    print: Fingerprint,
    group: String,
}

impl Proofs {
    /// For the group of a name, whoever is in it.
    pub(crate) fn new(key: &Secret, group: &str) -> Self {
        Self { secret: *key, print: Fingerprint(key.fingerprint()), group: group.to_owned() }
    }

    /// The secret of a group of these processes, which no store has seen.
    pub(crate) fn secret_of(&self, id: Id, identities: impl Iterator<Item = Id>) -> Secret {
        let identities: Vec<u8> = identities.flat_map(|identity| identity.0).collect();
        self.secret.derive("the secret of a group", &[self.group.as_bytes(), &id.0, &identities])
    }

    /// For what the processes of a group say that have its secret: proofs of an earlier group of the same name are wrong.
    pub(crate) fn within(&self, secret: &Secret) -> Self {
        Self { secret: secret.derive("what a group says in its store", &[]), ..self.clone() }
    }

    fn parts<'a>(&'a self, name: &'a str, value: &'a [u8]) -> [&'a [u8]; 3] {
        [self.group.as_bytes(), name.as_bytes(), value]
    }
}

/// A value as it is written under a name: with a proof if there is a key.
pub(crate) fn seal(proofs: Option<&Proofs>, name: &str, value: &[u8]) -> Vec<u8> {
    let Some(proofs) = proofs else { return value.to_vec() };
    let proof = proofs.secret.prove(STORE, &proofs.parts(name, value));
    [&MAGIC[..], &proofs.print.0, &proof, value].concat()
}

/// The value that was written under a name, if its proof is right. Without a key it must have none.
pub(crate) fn open<'a>(proofs: Option<&Proofs>, name: &str, bytes: &'a [u8]) -> Result<&'a [u8], Unproved> {
    match (proofs, take_apart(bytes)) {
        (None, None) => Ok(bytes),
        (None, Some((print, ..))) => Err(Unproved::NeedsKey(print)),
        (Some(_), None) => Err(Unproved::Bare),
        (Some(proofs), Some((print, ..))) if print != proofs.print => Err(Unproved::OtherKey(print)),
        (Some(proofs), Some((_, proof, value))) => {
            match proofs.secret.proves(STORE, &proofs.parts(name, value), &proof) {
                true => Ok(value),
                false => Err(Unproved::Wrong),
            }
        }
    }
}

/// The value, whatever its proof: good only for saying who claims to have written it.
pub(crate) fn claimed(bytes: &[u8]) -> &[u8] {
    take_apart(bytes).map_or(bytes, |(_, _, value)| value)
}

fn take_apart(bytes: &[u8]) -> Option<(Fingerprint, [u8; 32], &[u8])> {
    let (head, value) = bytes.split_first_chunk::<HEAD>()?;
    let rest = head.strip_prefix(&MAGIC)?;
    let (print, proof) = rest.split_first_chunk::<8>()?;
    Some((Fingerprint(*print), *proof.first_chunk()?, value))
}

/// By what people tell keys apart.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint([u8; 8]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a value does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unproved {
    /// It has no proof.
    Bare,
    /// It has one, and this process has no key.
    NeedsKey(Fingerprint),
    /// It was made with another key.
    OtherKey(Fingerprint),
    /// The key is right and the proof is wrong.
    Wrong,
}

impl Unproved {
    /// Says so of `what`, to `reader`, whose proofs these are.
    pub(crate) fn explain(self, what: &str, reader: &str, proofs: Option<&Proofs>) -> String {
        let has = match proofs {
            Some(proofs) => format!("{reader} has the key {}", proofs.print),
            None => format!("{reader} has no key"),
        };
        let same = "give all ranks the same TENSORWIRE_KEY";
        match self {
            Self::Bare => format!("{what} has no proof: whoever wrote it has no key, and {has}; {same}"),
            Self::NeedsKey(theirs) | Self::OtherKey(theirs) => {
                format!("{what} is proved with the key {theirs}, and {has}; {same}")
            }
            Self::Wrong => format!(
                "{what} has a wrong proof: it was changed in the store, or was written for another group or under another \
                 name"
            ),
        }
    }
}

/// Any bytes as what lies in a store: nothing counts without a proof.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(data: &[u8]) {
    let proofs = Proofs::new(&Secret::from_words(b"the key of the fuzzer"), "group");
    assert!(claimed(data).len() <= data.len());
    match open(Some(&proofs), "name", data) {
        Ok(value) => assert_eq!(seal(Some(&proofs), "name", value), data),
        Err(why) => assert!(!why.explain("it", "this process", Some(&proofs)).is_empty()),
    }
    if let Ok(value) = open(None, "name", data) {
        assert_eq!(value, data);
    }
    let sealed = seal(Some(&proofs), "name", data);
    assert_eq!(open(Some(&proofs), "name", &sealed), Ok(data));
    assert_eq!(open(Some(&proofs), "name too", &sealed), Err(Unproved::Wrong));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proofs(words: &[u8], group: &str) -> Proofs {
        Proofs::new(&Secret::from_words(words), group)
    }

    #[test]
    fn a_proof_is_of_one_key_group_and_name() {
        let ours = proofs(b"ours", "world");
        let sealed = seal(Some(&ours), "map", b"value");
        assert_eq!(open(Some(&ours), "map", &sealed), Ok(&b"value"[..]));
        assert_eq!(open(Some(&ours), "hub", &sealed), Err(Unproved::Wrong));
        assert_eq!(open(Some(&proofs(b"ours", "other")), "map", &sealed), Err(Unproved::Wrong));
        assert_eq!(
            open(Some(&ours.within(&Secret::from_words(b"group"))), "map", &sealed),
            Err(Unproved::Wrong)
        );
        let theirs = open(Some(&proofs(b"theirs", "world")), "map", &sealed);
        assert_eq!(theirs, Err(Unproved::OtherKey(ours.print)));
        assert_eq!(open(None, "map", &sealed), Err(Unproved::NeedsKey(ours.print)));
        assert_eq!(open(Some(&ours), "map", b"value"), Err(Unproved::Bare));
        assert_eq!(claimed(&sealed), b"value");
        for (at, len) in (0..sealed.len()).map(|at| (at, sealed.len())) {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(open(Some(&ours), "map", &changed).is_err(), "byte {at} of {len}");
            assert!(open(Some(&ours), "map", &sealed[..at]).is_err(), "{at} bytes of {len}");
        }
    }

    #[test]
    fn the_secret_of_a_group_depends_on_all_that_it_is() {
        let of = |words: &[u8], group, id, identities: &[u8]| {
            let identities = identities.iter().map(|&byte| Id([byte; 16]));
            proofs(words, group).secret_of(Id([id; 16]), identities)
        };
        let secret = of(b"key", "group", 1, &[1, 2]);
        assert_eq!(secret, of(b"key", "group", 1, &[1, 2]));
        for other in [
            of(b"kez", "group", 1, &[1, 2]),
            of(b"key", "grouq", 1, &[1, 2]),
            of(b"key", "group", 2, &[1, 2]),
            of(b"key", "group", 1, &[2, 1]),
            of(b"key", "group", 1, &[1, 2, 3]),
        ] {
            assert_ne!(secret, other);
        }
    }

    #[test]
    fn nothing_shows_a_key() {
        let text = format!("{:?}", proofs(b"the words of the key", "world"));
        assert!(!text.contains("words") && text.contains("Secret(..)"), "{text}");
    }
}
