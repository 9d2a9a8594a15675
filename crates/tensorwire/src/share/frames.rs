//! The frames of the protocol; see the table in [`super`]. No sockets here.

use tensorwire_device::fd::{Fd, MAX_FDS, MAX_MESSAGE};
use tensorwire_device::secret::{Id, Secret, Side};

use crate::error::{Error, Result};
use crate::wire::{self, PROTOCOL, Reader, Writer};

const MEMORY: u8 = b'M';
const HELLO: u8 = b'H';
const DESCRIPTORS: u8 = b'D';
const TAKEN: u8 = b'T';
const ANSWER: u8 = b'a';
const MORE: u8 = b'f';
const REFUSAL: u8 = b'n';
const LAST: u8 = b'x';

/// The fewest bytes of a handle that stand for one descriptor: an allocation has a number, a size and a kind.
const LEAST: usize = 17;

/// The most frames of one answer, with a refusal at its end.
pub(super) const MOST: usize = 2 + (1 + MAX_MESSAGE / LEAST) / MAX_FDS;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question<'a> {
    /// Memory by its number, and what gives the right to it where the domain wants more than its secret.
    Memory(u64, &'a [u8]),
    /// To be known in the domain; descriptors travel beside it.
    Hello(&'a [u8]),
    /// Descriptors by their number.
    Descriptors(u64),
    /// Nothing more: it has the descriptors of this number.
    Taken(u64),
}

/// Why there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// No such memory: it is gone, or was never offered to the one who asks.
    Gone,
    /// No such domain any more or yet, or the secret is wrong.
    Closed,
    /// Something is in the way.
    Failed,
}

/// A request of a process, which has proved before who it is.
pub(super) struct Request<'a> {
    pub(super) serial: u64,
    pub(super) domain: Id,
    proof: [u8; 32],
    pub(super) question: Question<'a>,
}

/// What both sides prove the knowledge of a domain's secret with: it is good for one pair of processes only.
fn transcript(domain: Id, asker: Id, owner: Id) -> [u8; 48] {
    let mut bytes = [0; 48];
    for (at, id) in [domain, asker, owner].into_iter().enumerate() {
        bytes[at * 16..][..16].copy_from_slice(&id.0);
    }
    bytes
}

/// A request of `asker` to `owner`.
pub(super) fn request(
    serial: u64,
    (domain, secret): (Id, &Secret),
    (asker, owner): (Id, Id),
    question: Question<'_>,
) -> Vec<u8> {
    let kind = match question {
        Question::Memory(..) => MEMORY,
        Question::Hello(_) => HELLO,
        Question::Descriptors(_) => DESCRIPTORS,
        Question::Taken(_) => TAKEN,
    };
    let proof = secret.proof(Side::Caller, &transcript(domain, asker, owner));
    let head = Writer::new().u8(kind).u32(PROTOCOL).u64(serial).fixed(&domain.0).fixed(&proof);
    match question {
        Question::Memory(number, pass) => head.u64(number).bytes(pass).finish(),
        Question::Hello(hello) => head.bytes(hello).finish(),
        Question::Descriptors(number) | Question::Taken(number) => head.u64(number).finish(),
    }
}

impl<'a> Request<'a> {
    pub(super) fn read(frame: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(frame);
        let (kind, version) = (reader.u8()?, reader.u32()?);
        if !matches!(kind, MEMORY | HELLO | DESCRIPTORS | TAKEN) {
            return Err(wire::bad(&format!("a request of unknown kind {kind}")));
        }
        if version != PROTOCOL {
            return Err(wire::bad(&format!(
                "version {version} of the protocol, and this process speaks {PROTOCOL}"
            )));
        }
        let (serial, domain, proof) = (reader.u64()?, Id(reader.array()?), reader.array()?);
        let question = match kind {
            MEMORY => Question::Memory(reader.u64()?, reader.bytes()?),
            DESCRIPTORS => Question::Descriptors(reader.u64()?),
            TAKEN => Question::Taken(reader.u64()?),
            _ => Question::Hello(reader.bytes()?),
        };
        reader.end()?;
        Ok(Self { serial, domain, proof, question })
    }

    /// Whether `asker` knows the secret of the domain.
    pub(super) fn is_proved(&self, secret: &Secret, asker: Id, owner: Id) -> bool {
        secret.verify(Side::Caller, &transcript(self.domain, asker, owner), &self.proof)
    }
}

/// The frames of an answer with its descriptors, in their order.
pub(super) fn answer<F>(serial: u64, body: &[u8], fds: Vec<F>) -> Vec<(Vec<u8>, Vec<F>)> {
    let head = Writer::new().u8(ANSWER).u64(serial).u32(fds.len() as u32).bytes(body).finish();
    let mut frames = vec![(head, Vec::new())];
    for fd in fds {
        if let Some((_, beside)) = frames.last_mut().filter(|(_, beside)| beside.len() < MAX_FDS) {
            beside.push(fd);
        } else {
            frames.push((Writer::new().u8(MORE).u64(serial).finish(), vec![fd]));
        }
    }
    frames
}

pub(super) fn refusal(serial: u64, reason: Reason, why: &str) -> Vec<u8> {
    Writer::new().u8(REFUSAL).u64(serial).u8(reason as u8).bytes(why.as_bytes()).finish()
}

/// The last frame of a connection.
pub(super) fn last(why: &str) -> Vec<u8> {
    Writer::new().u8(LAST).bytes(why.as_bytes()).finish()
}

/// Which request a frame answers.
pub(super) fn serial_of(frame: &[u8]) -> Option<u64> {
    let mut reader = Reader::new(frame);
    reader.u8().ok().filter(|kind| *kind != LAST)?;
    reader.u64().ok()
}

/// An answer, as far as it has arrived.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) serial: u64,
    pub(super) result: Result<Vec<u8>, (Reason, String)>,
    pub(super) fds: Vec<Fd>,
    /// How many descriptors it has.
    count: usize,
}

impl Answer {
    /// Goes on with a frame; gives the answer as it is now. What came before it is in `half`.
    pub(super) fn read(half: Option<Self>, frame: &[u8], fds: Vec<Fd>) -> Result<Self, Nonsense> {
        match (half, Self::begin(frame, fds)?) {
            (None, Part::First(answer)) => Ok(answer),
            (Some(mut half), Part::More(serial, fds)) => {
                if serial != half.serial || fds.is_empty() || half.fds.len() + fds.len() > half.count {
                    return Err(Nonsense::Frame("descriptors that nobody asked for".into()));
                }
                half.fds.extend(fds);
                Ok(half)
            }
            // The rest of it could not be sent.
            (Some(half), Part::First(refusal))
                if refusal.result.is_err() && refusal.serial == half.serial =>
            {
                Ok(refusal)
            }
            _ => Err(Nonsense::Frame("a part of another answer".into())),
        }
    }

    /// Whether all of it is there.
    pub(super) fn is_whole(&self) -> bool {
        self.fds.len() == self.count
    }

    fn begin(frame: &[u8], fds: Vec<Fd>) -> Result<Part, Nonsense> {
        let mut reader = Reader::new(frame);
        match reader.u8()? {
            ANSWER => {
                let (serial, count) = (reader.u64()?, reader.u32()? as usize);
                let body = reader.bytes()?.to_vec();
                reader.end()?;
                // Its word is not taken for how many it sends: each is one that this process must have room for.
                let most = fds.len().max(1 + body.len() / LEAST);
                if count < fds.len() || count > most {
                    let text = format!("{count} descriptors for a handle of {} bytes", body.len());
                    return Err(Nonsense::Frame(text));
                }
                Ok(Part::First(Self { serial, result: Ok(body), fds, count }))
            }
            MORE => {
                let serial = reader.u64()?;
                reader.end()?;
                Ok(Part::More(serial, fds))
            }
            REFUSAL => {
                let serial = reader.u64()?;
                let reason = match reader.u8()? {
                    0 => Reason::Gone,
                    1 => Reason::Closed,
                    _ => Reason::Failed,
                };
                let why = reader.text()?;
                reader.end()?;
                Ok(Part::First(Self { serial, result: Err((reason, why)), fds: Vec::new(), count: 0 }))
            }
            LAST => Err(Nonsense::Closed(reader.text().unwrap_or_default())),
            kind => Err(Nonsense::Frame(format!("an answer of unknown kind {kind}"))),
        }
    }
}

enum Part {
    First(Answer),
    More(u64, Vec<Fd>),
}

/// What is no answer.
#[derive(Debug)]
pub(super) enum Nonsense {
    /// The other side says why it closes the connection.
    Closed(String),
    /// It breaks the protocol.
    Frame(String),
}

impl From<Error> for Nonsense {
    fn from(error: Error) -> Self {
        Self::Frame(error.to_string())
    }
}

/// Any bytes as a request, and as an answer that came without its descriptors: none promises more than it can need.
#[cfg(any(test, fuzzing))]
pub fn fuzz(data: &[u8]) {
    if let Ok(Request { serial, domain, question, .. }) = Request::read(data) {
        let (secret, nobody) = (Secret::from_bytes([0; 32]), Id([0; 16]));
        let again = request(serial, (domain, &secret), (nobody, nobody), question);
        // All but the proof.
        assert_eq!((&again[..29], &again[61..]), (&data[..29], &data[61..]));
    }
    if let Ok(answer) = Answer::read(None, data, Vec::new()) {
        assert!(answer.count <= 1 + data.len() / LEAST);
        assert_eq!(serial_of(data), Some(answer.serial));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fds(count: usize) -> Vec<Fd> {
        (0..count).map(|_| Fd::new(std::fs::File::open("/dev/null").unwrap().into())).collect()
    }

    #[test]
    fn requests_come_back() {
        let (domain, asker, owner) = (Id([1; 16]), Id([2; 16]), Id([3; 16]));
        let secret = Secret::random().unwrap();
        let questions = [
            Question::Memory(7, b"pass"),
            Question::Hello(b"hello"),
            Question::Descriptors(7),
            Question::Taken(u64::MAX),
        ];
        for question in questions {
            let frame = request(9, (domain, &secret), (asker, owner), question);
            let read = Request::read(&frame).unwrap();
            assert_eq!((read.serial, read.domain, read.question), (9, domain, question));
            assert!(read.is_proved(&secret, asker, owner));
            // It is good for this pair, and for this secret.
            assert!(!read.is_proved(&secret, owner, asker) && !read.is_proved(&secret, asker, asker));
            assert!(!read.is_proved(&Secret::random().unwrap(), asker, owner));
            for len in 0..frame.len() {
                assert!(Request::read(&frame[..len]).is_err());
            }
        }
    }

    #[test]
    fn answers_come_in_parts() {
        for count in [0, 1, MAX_FDS, MAX_FDS + 1, 2 * MAX_FDS + 3] {
            let body = vec![0; count * LEAST];
            let mut half = None;
            let frames = answer(5, &body, fds(count));
            assert_eq!(frames.len(), count.div_ceil(MAX_FDS).max(1));
            for (index, (frame, beside)) in frames.into_iter().enumerate() {
                let now = Answer::read(half.take(), &frame, beside).unwrap();
                assert_eq!(now.is_whole(), now.fds.len() == count, "{index}");
                half = Some(now);
            }
            let whole = half.unwrap();
            assert!(whole.is_whole() && whole.result.unwrap() == body && whole.serial == 5);
        }
    }

    /// A promise of more descriptors than the handle can need is not waited for.
    #[test]
    fn a_count_is_not_believed() {
        let memfd = [0; 9];
        for (count, beside, believed) in
            [(1, 1, true), (1, 0, true), (0, 1, false), (2, 1, false), (u32::MAX, 1, false), (250, 0, false)]
        {
            let frame = Writer::new().u8(ANSWER).u64(1).u32(count).bytes(&memfd).finish();
            let read = Answer::read(None, &frame, fds(beside));
            assert_eq!(read.is_ok(), believed, "{count} {beside}");
        }
        // Nor are more sent than were promised.
        let frame = Writer::new().u8(ANSWER).u64(1).u32(1).bytes(&memfd).finish();
        let more = Writer::new().u8(MORE).u64(1).finish();
        let half = || Some(Answer::read(None, &frame, vec![]).unwrap());
        assert!(Answer::read(half(), &more, fds(2)).is_err() && Answer::read(half(), &more, vec![]).is_err());
        assert!(Answer::read(half(), &more, fds(1)).unwrap().is_whole());
        assert!(Answer::read(None, &more, fds(1)).is_err());
        let refused = |serial| Answer::read(half(), &refusal(serial, Reason::Failed, "no"), vec![]);
        assert!(refused(2).is_err() && refused(1).unwrap().result.is_err());
        let other = Writer::new().u8(MORE).u64(2).finish();
        assert!(Answer::read(half(), &other, fds(1)).is_err());
    }

    #[test]
    fn refusals_say_why() {
        for reason in [Reason::Gone, Reason::Closed, Reason::Failed] {
            let read = Answer::read(None, &refusal(3, reason, "because"), vec![]).unwrap();
            assert_eq!((read.result, read.serial), (Err((reason, "because".into())), 3));
        }
        let closed = Answer::read(None, &last("because"), vec![]);
        assert!(matches!(closed, Err(Nonsense::Closed(why)) if why == "because"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_safe(frame in proptest::collection::vec(any::<u8>(), 0..100), beside in 0..3usize) {
            fuzz(&frame);
            let _ = Answer::read(None, &frame, fds(beside));
        }
    }

    #[test]
    fn corpus_of_frames() {
        crate::store::fuzz::tests::replay("share_frames", fuzz);
    }
}
