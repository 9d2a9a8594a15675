//! What travels from the owner to whoever may redeem it: bytes that go through any queue, pipe, store or file.
//!
//! A token names its owner and how to reach it, the slot of the grant, and the memory; it holds no descriptor and no
//! address of memory. Any process that has it and runs as the same user may redeem it, so it is as secret as the
//! memory. Two secrets are in it: that of the owner's leases, which opens a connection, and the key of this grant, without which nobody is given its
//! memory.

use std::fmt;

use tensorwire_device::DeviceId;
use tensorwire_device::fd::Address;
use tensorwire_device::secret::{Id, Secret, Side};

use super::book::{Point, SLOTS};
use crate::error::{Error, Result};
use crate::share::Allocation;
use crate::wire::{Reader, Writer};

const MARK: [u8; 4] = *b"twlt";
const VERSION: u8 = 2;

/// Bytes of the check at the end.
const CHECK: usize = 16;

/// The most bytes that a user may put beside a grant.
pub const MAX_NOTE: usize = 4096;

/// A grant on its way to a holder.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub(super) issuer: Issuer,
    pub(super) slot: u32,
    pub(super) generation: u32,
    pub(super) key: Key,
    pub(super) memory: Allocation,
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) ready: Point,
    pub(super) note: Vec<u8>,
}

/// The owner, and what one has to know to be let in.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Issuer {
    pub(super) owner: Id,
    pub(super) pid: u32,
    /// The domain of its leases.
    pub(super) domain: Id,
    pub(super) secret: [u8; 32],
    pub(super) address: Address,
}

/// What one has to know to be given the memory of a grant: nothing of it can be guessed from other grants.
pub(super) type Key = [u8; 16];

impl Token {
    /// The bytes that travel.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Self { issuer, memory, .. } = self;
        let body = Writer::new()
            .fixed(&MARK)
            .u8(VERSION)
            .fixed(&issuer.secret)
            .fixed(&issuer.owner.0)
            .u32(issuer.pid)
            .fixed(&issuer.domain.0)
            .bytes(&issuer.address.to_bytes())
            .u32(self.slot)
            .u32(self.generation)
            .fixed(&self.key)
            .u64(memory.number)
            .bytes(match &memory.device {
                DeviceId::Gpu(uuid) => uuid,
                _ => &[],
            })
            .u64(memory.len as u64)
            .u64(self.offset as u64)
            .u64(self.len as u64)
            .u32(self.ready.line.into())
            .u32(self.ready.value)
            .bytes(&self.note)
            .finish();
        let check = check(&issuer.secret, &body);
        [body, check.to_vec()].concat()
    }

    /// The token of these bytes. What was damaged on its way is refused.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.get(..4) != Some(&MARK[..]) {
            return Err(Error::misuse("these bytes are not a token of tensorwire"));
        }
        if bytes.get(4) != Some(&VERSION) {
            let theirs = bytes.get(4).copied().unwrap_or_default();
            return Err(Error::misuse(format!(
                "the token has version {theirs}, and this tensorwire knows version {VERSION}: use the same on both sides"
            )));
        }
        let token = Self::parse(bytes);
        token.map_err(|_| Error::misuse("the token is damaged: it was cut, or changed on its way"))
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let (body, end) = bytes.split_at(bytes.len().saturating_sub(CHECK));
        let mut reader = Reader::new(body.get(5..).unwrap_or_default());
        let secret = reader.array()?;
        if check(&secret, body) != end {
            return Err(Error::misuse("check"));
        }
        let (owner, pid, domain) = (Id(reader.array()?), reader.u32()?, Id(reader.array()?));
        let address = Address::from_bytes(reader.bytes()?)?;
        let (slot, generation) = (reader.u32()?, reader.u32()?);
        let (key, allocation) = (reader.array()?, reader.u64()?);
        let device = match reader.bytes()? {
            [] => DeviceId::Host,
            uuid => DeviceId::Gpu(uuid.try_into().map_err(|_| Error::misuse("device"))?),
        };
        let mut number =
            || reader.u64().and_then(|size| usize::try_from(size).map_err(|_| Error::misuse("size")));
        let (whole, offset, len) = (number()?, number()?, number()?);
        let line = u16::try_from(reader.u32()?).map_err(|_| Error::misuse("line"))?;
        let ready = Point { line, value: reader.u32()? };
        let note = reader.bytes()?.to_vec();
        reader.end()?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= whole && whole <= isize::MAX as usize);
        if !inside || slot as usize >= SLOTS || note.len() > MAX_NOTE {
            return Err(Error::misuse("sizes"));
        }
        let issuer = Issuer { owner, pid, domain, secret, address };
        let memory = Allocation { number: allocation, device, len: whole };
        Ok(Self { issuer, slot, generation, key, memory, offset, len, ready, note })
    }

    /// What gives the right to the memory, when it is asked for.
    pub(super) fn pass(&self) -> Vec<u8> {
        Writer::new().u32(self.slot).u32(self.generation).fixed(&self.key).finish()
    }

    /// What the owner's book must say of its grant: one who does not know the grant's key cannot make it, and it fits no other
    /// memory.
    pub(super) fn check(&self) -> u64 {
        let Self { slot, generation, memory, .. } = self;
        let body = Writer::new()
            .u32(*slot)
            .u32(*generation)
            .u64(memory.number)
            .u64(memory.len as u64)
            .u64(self.offset as u64)
            .u64(self.len as u64)
            .finish();
        let mut key = [0; 32];
        key[..16].copy_from_slice(&self.key);
        let whole = Secret::from_bytes(key).proof(Side::Listener, &body);
        u64::from_le_bytes(std::array::from_fn(|index| whole[index]))
    }

    /// Bytes of the memory that it stands for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it stands for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the memory is.
    pub fn device(&self) -> &DeviceId {
        &self.memory.device
    }

    /// Who grants it.
    pub(crate) fn owner(&self) -> Id {
        self.issuer.owner
    }

    /// The owner's pid as it sees itself; for people.
    pub fn pid(&self) -> u32 {
        self.issuer.pid
    }

    /// What the owner put beside the grant.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// Where the memory begins in its allocation: what lies in the same allocation at the same place is the same.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

/// The slot, the generation and the key of a pass.
pub(super) fn read_pass(pass: &[u8]) -> Result<(u32, u32, Key)> {
    let mut reader = Reader::new(pass);
    let read = (reader.u32()?, reader.u32()?, reader.array()?);
    reader.end()?;
    Ok(read)
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, generation, len, .. } = self;
        write!(
            f,
            "Token({len} bytes on {} of process {}, {slot}.{generation})",
            self.memory.device, self.issuer.pid
        )
    }
}

impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Issuer(process {})", self.pid)
    }
}

fn check(secret: &[u8; 32], body: &[u8]) -> [u8; CHECK] {
    let whole = Secret::from_bytes(*secret).proof(Side::Caller, body);
    std::array::from_fn(|index| whole[index])
}

/// Any bytes as a token, and as what stands before the check of a token: what is taken comes out again as it was.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    let body = [&MARK[..], &[VERSION], data].concat();
    let secret = body.get(5..37).and_then(|secret| secret.try_into().ok()).unwrap_or([0; 32]);
    let checked = [&body[..], &check(&secret, &body)].concat();
    for bytes in [data, &checked] {
        if let Ok(token) = Token::from_bytes(bytes) {
            assert_eq!(token.to_bytes(), bytes);
            assert!(token.offset().checked_add(token.len()).is_some() && token.note().len() <= MAX_NOTE);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> Token {
        Token {
            issuer: Issuer {
                owner: Id([1; 16]),
                pid: 7,
                domain: Id([2; 16]),
                secret: [3; 32],
                address: Address::Abstract("tensorwire-x".into()),
            },
            slot: 4,
            generation: 5,
            key: [6; 16],
            memory: Allocation { number: 6, device: DeviceId::Gpu([7; 16]), len: 1000 },
            offset: 10,
            len: 20,
            ready: Point { line: 8, value: 9 },
            note: b"note".to_vec(),
        }
    }

    #[test]
    fn tokens_come_back() {
        let token = token();
        let bytes = token.to_bytes();
        assert!(bytes.len() < 300, "{}", bytes.len());
        assert_eq!(Token::from_bytes(&bytes).unwrap(), token);
        let host = Token { memory: Allocation { device: DeviceId::Host, ..token.memory.clone() }, ..token };
        assert_eq!(Token::from_bytes(&host.to_bytes()).unwrap(), host);
    }

    #[test]
    fn damage_is_seen() {
        let bytes = token().to_bytes();
        for index in 5..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 1;
            let error = Token::from_bytes(&damaged).unwrap_err().to_string();
            assert!(error.contains("damaged"), "byte {index}: {error}");
            assert!(Token::from_bytes(&bytes[..index]).is_err());
        }
        assert!(Token::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
        assert!(Token::from_bytes(b"").unwrap_err().to_string().contains("not a token"));
        let mut newer = bytes;
        newer[4] = 9;
        assert!(Token::from_bytes(&newer).unwrap_err().to_string().contains("version 9"));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let token = token();
        for wrong in [
            Token { offset: 990, ..token.clone() },
            Token { slot: u32::MAX, ..token.clone() },
            Token { note: vec![0; MAX_NOTE + 1], ..token },
        ] {
            assert!(Token::from_bytes(&wrong.to_bytes()).is_err());
        }
    }

    #[test]
    fn corpus_of_tokens() {
        crate::store::fuzz::tests::replay("lease_token", fuzz);
        // And that of a token which is right.
        let bytes = token().to_bytes();
        fuzz(&bytes);
        fuzz(&bytes[5..bytes.len() - CHECK]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Right in its form, with any numbers.
        #[test]
        fn any_fields_are_safe(head in proptest::collection::vec(any::<u8>(), 68), rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let address = Address::Abstract("tensorwire-x".into()).to_bytes();
            fuzz(&[&head[..], &Writer::new().bytes(&address).finish(), &rest].concat());
        }

        #[test]
        fn any_bytes_are_safe(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Token::from_bytes(&bytes);
            let _ = Token::from_bytes(&[&MARK[..], &[VERSION], &bytes].concat());
        }
    }
}
