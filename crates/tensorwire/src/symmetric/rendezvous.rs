//! How the ranks of a group get each other's memory: a chain of two exchanges.
//!
//! 1. Each rank takes a pad, a book for signals and words for meetings, and tells all ranks where these and its memory are. All
//!    compare the sizes.
//! 2. Each rank maps what it needs of the others. Then all tell each other that they have it, and whether work of their queues
//!    can meet.
//!
//! If a rank cannot do its part, it ends the chain for all ranks, with the reason. What the others have mapped goes with their
//! handles, which nobody gets. All ranks may try again.

use std::sync::{Arc, OnceLock};

use tensorwire_device::gpu::Access;
use tensorwire_device::{Deadline, DeviceId, Dtype, Span, meeting};

use super::book::{self, Book, CHANNELS};
use super::record::{self, Record, Whereabouts};
use super::signals::Signals;
use super::together::{Hindrance, Together};
use super::{Books, Gone, Inner, Peer, Symmetric};
use crate::collective::Collectives;
use crate::collective::call::{Call, Until};
use crate::collective::chain::{Chain, Chained};
use crate::collective::operation::Operation;
use crate::error::{Error, PeerFaultKind, Result};
use crate::ranks::Ranks;
use crate::shm::kind::Kind;

/// A rendezvous that has not begun.
#[must_use = "a call does nothing until it is waited for"]
#[derive(Debug)]
pub struct SymmetricCall<'a> {
    group: &'a Arc<Collectives>,
    books: &'a Arc<Books>,
    memory: Span,
    until: Until,
}

impl<'a> SymmetricCall<'a> {
    pub(crate) fn new(group: &'a Arc<Collectives>, books: &'a Arc<Books>, memory: &Span) -> Self {
        Self { group, books, memory: memory.clone(), until: Until::Group }
    }

    /// Sets when the rendezvous must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self { until: Until::Call(deadline), ..self }
    }

    /// The same for a wrapper that keeps the time-out of the group itself: errors say that it was the group's.
    #[doc(hidden)]
    pub fn deadline_of_group(self, deadline: Deadline) -> Self {
        Self { until: Until::GroupAt(deadline), ..self }
    }

    /// Meets the other ranks and gives the handle. All ranks get one, or an error.
    pub fn wait(self) -> Result<Symmetric> {
        let result = Arc::new(OnceLock::new());
        let job =
            Arc::new(Rendezvous { memory: self.memory, books: self.books.clone(), result: result.clone() });
        let call = Call::new(self.group, || {
            let mut operation = Operation::new(Kind::Symmetric, Dtype::U8);
            operation.set_chained(job);
            Ok(operation)
        });
        self.until.of(call).wait()?;
        let parts = Arc::into_inner(result).and_then(OnceLock::into_inner);
        let Parts { own, peers, signals, together } =
            parts.ok_or_else(|| Error::bug("a rendezvous without a result"))?;
        Ok(Symmetric(Arc::new(Inner {
            group: self.group.clone(),
            len: own.len(),
            own,
            peers,
            signals: Some(signals),
            together,
            buffers: OnceLock::new(),
            pads: OnceLock::new(),
        })))
    }
}

/// One rank's part.
#[derive(Debug)]
struct Rendezvous {
    memory: Span,
    books: Arc<Books>,
    result: Arc<OnceLock<Parts>>,
}

/// What a handle is made of.
#[derive(Debug)]
struct Parts {
    own: Span,
    peers: Vec<Peer>,
    signals: Signals,
    together: Together,
}

impl Chained for Rendezvous {
    fn run(&self, chain: &mut Chain<'_>, operation: &Operation) -> Result<()> {
        chain.expect(2);
        let ranks = chain.ranks;
        let (me, world) = (ranks.rank, ranks.world());
        ranks.context.share().settle();

        // What this rank brings.
        let device = self.memory.device();
        let zeros = |bytes: usize| -> Result<Span> {
            let span = Span::whole(ranks.context.pool(&device)?.alloc(bytes)?).slice(0..bytes)?;
            span.write(0, &vec![0; bytes])?;
            Ok(span)
        };
        let (pad_bytes, word_bytes) = (4 * CHANNELS * world, meeting::size(world));
        let (pad, words) = (zeros(pad_bytes)?, zeros(word_bytes)?);
        let own = self.books.take(ranks)?;
        let mine = Record {
            device: device.clone(),
            len: self.memory.len() as u64,
            buffer: whereabouts(ranks, &self.memory)?,
            pad: whereabouts(ranks, &pad)?,
            signals: whereabouts(ranks, own.book.span())?,
            words: whereabouts(ranks, &words)?,
            blocks: ranks.context.device(&device)?.blocks() as u64,
        };
        let all = chain.gather(operation.clone(), &mine.encode())?;
        let mut records = Vec::with_capacity(world);
        for (rank, bytes) in all.chunks_exact(record::LEN).enumerate() {
            records.push(Record::decode(bytes).map_err(|text| misbehaved(ranks, rank, &text))?);
        }
        same_sizes(ranks, &records)?;

        // What it has of the others.
        let (mut peers, mut books) = (Vec::with_capacity(world), Vec::with_capacity(world));
        let mut all_words = Vec::with_capacity(world);
        for (rank, record) in records.iter().enumerate() {
            if rank == me {
                let (buffer, pad) = (Some(self.memory.clone()), Some(pad.clone()));
                let offset = record.buffer.offset;
                peers.push(Peer { device: device.clone(), access: Access::Yes, offset, buffer, pad });
                books.push(own.book.clone());
                all_words.push(words.clone());
                continue;
            }
            let mut fetch = |what: &str, place: Whereabouts, len: usize| {
                fetch(chain, rank, place, len).map_err(|error| {
                    chain.missed();
                    mapping(ranks, rank, what, error)
                })
            };
            let access = access(ranks, &device, &record.device);
            let (mut buffer, mut near) = (None, None);
            if access.reason().is_none() {
                buffer = Some(fetch("memory", record.buffer, self.memory.len())?);
                near = Some(fetch("pad", record.pad, pad_bytes)?);
                all_words.push(fetch("words", record.words, word_bytes)?);
            }
            let signals = fetch("signals", record.signals, book::size(world))?;
            let (device, offset) = (record.device.clone(), record.buffer.offset);
            peers.push(Peer { device, access, offset, buffer, pad: near });
            books.push(Book::new(signals, world)?);
        }
        let places: Vec<&DeviceId> = records.iter().map(|record| &record.device).collect();
        let signals = Signals::new(ranks, own, books, &places)?;

        // All have it.
        let (hindrance, at_work) = Hindrance::of(ranks, &places, all_words.len() == world);
        let known = match chain.gather(Operation::new(Kind::Symmetric, Dtype::U8), &[hindrance as u8]) {
            Ok(known) => known,
            Err(error) => {
                // Some ranks may have a handle, and write to the words.
                drop(all_words);
                Gone::linger(ranks, signals, Some(words), vec![pad]);
                return Err(error);
            }
        };
        drop(words);
        let blocks: Vec<u64> = records.iter().map(|record| record.blocks).collect();
        let together = Together::new(all_words, &known, at_work, &places, &blocks);
        let _ = self.result.set(Parts { own: self.memory.clone(), peers, signals, together });
        Ok(())
    }

    /// Sizes are compared in the exchange: ranks that differ in them may try again.
    fn elements(&self) -> u64 {
        0
    }

    fn bytes(&self) -> usize {
        self.memory.len()
    }
}

/// How others name this memory.
fn whereabouts(ranks: &Ranks, span: &Span) -> Result<Whereabouts> {
    let (number, offset) = ranks.memory.find(span)?.ok_or_else(|| {
        Error::misuse(
            "other ranks cannot map this memory: take it from alloc() of the group or the context, or from Context::pool",
        )
    })?;
    Ok(Whereabouts { number, offset: offset as u64 })
}

/// Maps memory of another rank.
fn fetch(chain: &Chain<'_>, rank: usize, at: Whereabouts, len: usize) -> Result<Span> {
    let ranks = chain.ranks;
    let place = ranks.place_of(rank).unwrap_or(rank);
    let (stop, deadline) = chain.stop();
    let region = ranks.memory.peer(place, at.number, stop, deadline)?;
    let start = usize::try_from(at.offset).unwrap_or(usize::MAX);
    Ok(Span::new(region, start..start.saturating_add(len))?)
}

/// Whether memory on a device is reached from another.
fn access(ranks: &Ranks, from: &DeviceId, to: &DeviceId) -> Access {
    let opened = || -> Result<Access> {
        if *to != DeviceId::Host {
            ranks.context.device(to)?;
        }
        if from == to || *from == DeviceId::Host || *to == DeviceId::Host {
            return Ok(Access::Yes);
        }
        let answers = ranks.context.access()?;
        Ok(answers.open_peer(answers.index(from)?, answers.index(to)?)?.clone())
    };
    opened().unwrap_or_else(|error| Access::no(error.to_string()))
}

/// All ranks find the same, and say the same.
fn same_sizes(ranks: &Ranks, records: &[Record]) -> Result<()> {
    let Some(first) = records.first() else { return Ok(()) };
    if records.iter().all(|record| record.len == first.len) {
        return Ok(());
    }
    // The size that most ranks have; of two, that of the lowest rank.
    let votes = |len: u64| records.iter().filter(|record| record.len == len).count();
    let most = records.iter().map(|record| votes(record.len)).max().unwrap_or(0);
    let usual = records.iter().map(|record| record.len).find(|&len| votes(len) == most).unwrap_or(0);
    let tie = records.iter().any(|record| record.len != usual && votes(record.len) == most);
    let others: Vec<usize> = (0..records.len()).filter(|&rank| records[rank].len != usual).collect();
    let sizes: Vec<String> = records
        .iter()
        .enumerate()
        .map(|(rank, record)| format!("rank {rank}: {} bytes", record.len))
        .collect();
    let detail = format!("symmetric memory has one size on all ranks; {}", sizes.join("; "));
    let blamed = others.first().copied().filter(|_| !tie);
    let who = blamed.map_or_else(|| "the ranks".to_owned(), |rank| ranks.who(rank));
    let error = Error::peer(PeerFaultKind::Mismatch, who, blamed, detail);
    Err(if tie { error } else { error.about(others) })
}

#[cold]
fn misbehaved(ranks: &Ranks, rank: usize, text: &str) -> Error {
    Error::peer(PeerFaultKind::Misbehaved, ranks.who(rank), Some(rank), format!("in symmetric: {text}"))
}

/// Says what could not be mapped.
#[cold]
fn mapping(ranks: &Ranks, rank: usize, what: &str, error: Error) -> Error {
    let doing = format!("mapping the {what} of {}", ranks.who(rank));
    match error {
        Error::Unsupported { what, need, have } => {
            Error::Unsupported { what: format!("{doing}: {what}"), need, have }
        }
        Error::Io { doing: inner, source } => Error::Io { doing: format!("{doing}: {inner}"), source },
        Error::Device { text, code, name } => Error::Device { text: format!("{doing}: {text}"), code, name },
        Error::Aborted(_) => ranks.failure().unwrap_or(error),
        other => other,
    }
}
