//! How two members of a group prove to each other that they know its secret, over any connection.
//!
//! Three frames, each with a version and of fixed size; no sockets here:
//!
//! ```text
//! caller                                              listener
//!   HELLO  group, identity, pid, nonce          ->
//!                                         <-  WELCOME  group, identity, pid, nonce, proof
//!   verifies the proof
//!   PROOF  proof                                ->
//!                                                       verifies the proof
//! ```
//!
//! A proof is a keyed hash over both sides' identities and nonces; the secret itself never travels.

use crate::error::{Error, Result};
use crate::secret::{Id, Secret, Side, random};

/// The longest frame.
pub const MAX_FRAME: usize = 6 + HELLO_LEN + 32;

/// Who is at the other end, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Its identity.
    pub identity: Id,
    /// Its pid, for people.
    pub pid: u32,
}

/// The side that connected.
#[derive(Debug)]
pub struct Caller(Hello);

impl Caller {
    /// Begins a handshake for `group`.
    pub fn new(group: Id, identity: Id) -> Result<Self> {
        Ok(Self(Hello { group, identity, pid: std::process::id(), nonce: random()? }))
    }

    /// The first frame.
    pub fn hello(&self) -> Vec<u8> {
        frame(HELLO, &[&self.0.body()])
    }

    /// Checks the answer; gives who answered and the last frame.
    pub fn prove(&self, secret: &Secret, answer: &[u8]) -> Result<(Claim, Vec<u8>)> {
        if answer.is_empty() {
            return Err(Error::refused(
                "the other process closed the connection: it does not know this group, refused this process, or has no descriptor left (see ulimit -n there)",
            ));
        }
        let both = body::<{ HELLO_LEN + 32 }>(WELCOME, answer)?;
        let welcome = Hello::from_body(&std::array::from_fn(|index| both[index]));
        let proof = std::array::from_fn(|index| both[HELLO_LEN + index]);
        let transcript = transcript(&self.0, &welcome);
        if welcome.group != self.0.group {
            return Err(Error::refused("the process at the other end answered for another group"));
        }
        if !secret.verify(Side::Listener, &transcript, &proof) {
            return Err(Error::refused("the process at the other end does not know the group's secret"));
        }
        Ok((welcome.claim(), frame(PROOF, &[&secret.proof(Side::Caller, &transcript)])))
    }
}

/// The side that accepted, after it has answered.
#[derive(Debug)]
pub struct Asked {
    group: Id,
    claim: Claim,
    secret: Secret,
    transcript: Vec<u8>,
}

impl Asked {
    /// Answers the first frame; gives the second. `secret_of` gives the secret of a group that this process
    /// belongs to.
    pub fn answer(
        identity: Id,
        secret_of: &dyn Fn(Id) -> Option<Secret>,
        hello: &[u8],
    ) -> Result<(Self, Vec<u8>)> {
        let hello = Hello::from_body(&body::<HELLO_LEN>(HELLO, hello)?);
        let group = hello.group;
        let secret =
            secret_of(group).ok_or_else(|| Error::refused(format!("no group {group} is open here")))?;
        let welcome = Hello { group, identity, pid: std::process::id(), nonce: random()? };
        let transcript = transcript(&hello, &welcome);
        let proof = secret.proof(Side::Listener, &transcript);
        let answer = frame(WELCOME, &[&welcome.body(), &proof]);
        Ok((Self { group, claim: hello.claim(), secret, transcript }, answer))
    }

    /// Checks the last frame; gives the group and who has proved to belong to it.
    pub fn accept(self, proof: &[u8]) -> Result<(Id, Claim)> {
        if !self.secret.verify(Side::Caller, &self.transcript, &body::<32>(PROOF, proof)?) {
            let pid = self.claim.pid;
            return Err(Error::refused(format!("process {pid} does not know the group's secret")));
        }
        Ok((self.group, self.claim))
    }
}

const MAGIC: [u8; 4] = *b"twfd";
const VERSION: u8 = 1;
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const PROOF: u8 = 3;
const INQUIRY: u8 = 4;
const HELLO_LEN: usize = 16 + 16 + 4 + 16;

#[derive(Debug)]
struct Hello {
    group: Id,
    identity: Id,
    pid: u32,
    nonce: [u8; 16],
}

impl Hello {
    fn body(&self) -> Vec<u8> {
        [&self.group.0[..], &self.identity.0, &self.pid.to_le_bytes(), &self.nonce].concat()
    }

    fn from_body(body: &[u8; HELLO_LEN]) -> Self {
        let part = |from: usize| std::array::from_fn(|index| body[from + index]);
        Self {
            group: Id(part(0)),
            identity: Id(part(16)),
            pid: u32::from_le_bytes(std::array::from_fn(|index| body[32 + index])),
            nonce: part(36),
        }
    }

    fn claim(&self) -> Claim {
        Claim { identity: self.identity, pid: self.pid }
    }
}

fn transcript(hello: &Hello, welcome: &Hello) -> Vec<u8> {
    [hello.body(), welcome.body()].concat()
}

/// The frame of one who does not want to join, but to know how this process stands; see `fd::Inquiry`.
pub(crate) fn inquiry() -> Vec<u8> {
    frame(INQUIRY, &[])
}

fn frame(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    [&MAGIC[..], &[VERSION, kind], &parts.concat()].concat()
}

/// The body of a frame that must be of `kind` and have exactly `N` bytes.
fn body<const N: usize>(kind: u8, bytes: &[u8]) -> Result<[u8; N]> {
    let head = bytes.get(..6).ok_or_else(|| Error::refused("a frame of the handshake is cut short"))?;
    if head[..4] != MAGIC {
        return Err(Error::refused("the other process does not speak tensorwire's protocol"));
    }
    if head[4] != VERSION {
        let theirs = head[4];
        return Err(Error::refused(format!("the other process speaks version {theirs}, this one {VERSION}")));
    }
    match bytes[6..].try_into() {
        Ok(body) if head[5] == kind => Ok(body),
        _ => Err(Error::refused("a frame of the handshake has the wrong kind or length")),
    }
}
