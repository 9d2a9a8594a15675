//! Several exchanges as one operation.
//!
//! Each exchange has a number of its own, as every operation of a group, so all ranks must go through as many of them,
//! also where one rank fails in between. The rule: an exchange that fails on some rank is followed by one that is *refused*
//! ([`Why::is_before`]), and the chain ends there for all.
//!
//! - A rank that cannot go on before an exchange enters that exchange and cancels it, with the reason.
//! - A rank in whose eyes an exchange has failed refuses the next one, unless the failed one was the last, or was itself
//!   refused. Ranks that had finished the failed one are in the next, or come to it, and hear the reason there.
//! - The first verdict of an exchange counts for all ranks. So all see the same one as refused. Nobody finishes an exchange
//!   that a rank refuses: every exchange of a chain needs all ranks.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tensorwire_device::{Abort, Deadline, DeviceId, Dtype, Queue, Span};

use super::Collectives;
use super::buffer::Buffer;
use super::cancel::{driver_failed, on_gpu};
use super::exec::Executor;
use super::lines::Stop;
use super::operation::Operation;
use super::plan::Counts;
use crate::error::{Error, PeerFaultKind, Result};
use crate::ranks::Ranks;
use crate::shm::control::Why;
use crate::shm::cores::Thread;
use crate::shm::kind::Kind;

/// What a rank does in a chain, and what its first exchange says of it.
pub(crate) trait Chained: fmt::Debug + Send + Sync {
    /// Goes through the exchanges, of which the first one is `operation`. Where it gives an error, the chain ends for all ranks.
    fn run(&self, chain: &mut Chain<'_>, operation: &Operation) -> Result<()>;

    /// Elements that it is about.
    fn elements(&self) -> u64;

    /// Bytes that this rank brings.
    fn bytes(&self) -> usize;

    /// The GPU on which lies what it works on. All ranks have theirs on a GPU, or none has.
    fn gpu(&self) -> Option<&DeviceId> {
        None
    }

    /// What else must be the same on all ranks, as numbers.
    fn agreed(&self) -> Vec<u64> {
        Vec::new()
    }

    /// That in words: " of shape [10, 4]".
    fn words(&self) -> String {
        String::new()
    }
}

impl Executor {
    /// Runs a chain.
    pub(super) fn run_chain(
        &mut self,
        group: &Arc<Collectives>,
        operation: &Operation,
        job: &dyn Chained,
        time: (Instant, Deadline),
        thread: Thread,
    ) -> Result<()> {
        let mut chain = Chain::new(self, group, operation.late, time, thread);
        // An exchange of it may be one on the host.
        job.run(&mut chain, operation).map_err(|error| on_gpu(&group.ranks, job.gpu(), chain.end(error)))
    }
}

/// One rank's way through a chain.
pub(crate) struct Chain<'a> {
    pub(super) executor: &'a mut Executor,
    group: &'a Arc<Collectives>,
    pub(crate) ranks: &'a Ranks,
    thread: Thread,
    late: Why,
    /// When the first exchange began; later ones begin when they do.
    start: Option<Instant>,
    begun: Instant,
    deadline: Deadline,
    /// How many exchanges come; nothing until that is known.
    left: Option<usize>,
    /// Whether the last exchange failed.
    failed: bool,
    /// Whether the error of this rank may only follow from another rank's.
    follows: bool,
    /// Whether it was ended.
    ended: bool,
}

impl<'a> Chain<'a> {
    fn new(
        executor: &'a mut Executor,
        group: &'a Arc<Collectives>,
        late: Why,
        (start, deadline): (Instant, Deadline),
        thread: Thread,
    ) -> Self {
        Self {
            executor,
            group,
            ranks: &group.ranks,
            thread,
            late,
            start: Some(start),
            begun: start,
            deadline,
            left: None,
            failed: false,
            follows: false,
            ended: false,
        }
    }

    /// So many exchanges come from here on.
    pub(crate) fn expect(&mut self, left: usize) {
        self.left = Some(left);
    }

    /// The next exchange.
    pub(crate) fn exchange(&mut self, mut operation: Operation) -> Result<()> {
        operation.late = self.late;
        operation.check(self.executor.lines.world)?;
        let start = self.start.take().unwrap_or_else(Instant::now);
        self.run(&operation, (start, self.deadline))
    }

    /// The next exchange is an all_gather: gives the bytes of all ranks, one after the other. All have as many.
    pub(crate) fn gather(&mut self, mut operation: Operation, own: &[u8]) -> Result<Vec<u8>> {
        let (len, world) = (own.len(), self.executor.lines.world);
        let room = Span::whole(tensorwire_device::host::private(len * (world + 1))?);
        room.write(0, own)?;
        operation.counts = Counts::Even(len);
        operation.input = Buffer::one(room.slice(0..len)?);
        let output = room.slice(len..len * (world + 1))?;
        operation.output = Buffer::one(output.clone());
        self.exchange(operation)?;
        Ok(output.to_vec()?)
    }

    /// The same for numbers.
    pub(crate) fn gather_numbers(&mut self, operation: Operation, own: &[u64]) -> Result<Vec<u64>> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.gather(operation, &own)?;
        Ok(all.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// Has a queue of this rank work between two exchanges, and waits for the end: one of a GPU, or the host's.
    pub(crate) fn work(
        &mut self,
        gpu: Option<&DeviceId>,
        work: impl FnOnce(&mut dyn Queue) -> tensorwire_device::Result<()>,
    ) -> Result<()> {
        let Some(gpu) = gpu else { return Ok(work(self.executor.runner.queue())?) };
        // What others make of the exchange before does not matter: its memory is not theirs any more.
        let (ranks, stop) = (self.ranks, &self.ranks.control.abort);
        let queue = self.executor.queue_on(ranks, gpu)?;
        let worked = queue.begin(None).and_then(|()| work(queue));
        // What was queued must be over before the memory that it works on goes.
        let ended = worked.and(queue.finish(stop, self.deadline));
        ended
            .map_err(|error| ranks.failure().unwrap_or_else(|| driver_failed(ranks, Some(gpu), error.into())))
    }

    /// What a rank of this chain did wrong, by its place.
    #[cold]
    pub(super) fn misbehaved(&self, what: Kind, place: usize, detail: &str) -> Error {
        let rank = self.ranks.control.ranks().get(place).copied();
        let who = self.ranks.who(place);
        Error::peer(PeerFaultKind::Misbehaved, who, rank, format!("in {what}: {detail}"))
    }

    /// What this rank needed of another one was not there. If that rank has given up, its reason is the one to tell.
    pub(crate) fn missed(&mut self) {
        self.follows = true;
    }

    /// The words that end the waits of the last exchange, and the moment at which all of them must be over.
    pub(crate) fn stop(&self) -> (&Abort, Deadline) {
        (self.executor.lines.stop(), self.deadline)
    }

    /// Ends the chain for all ranks after an error of this one; gives the error. Done by itself when the job is over; one that has
    /// something that others ask for until then does so before.
    pub(super) fn end(&mut self, mut error: Error) -> Error {
        if std::mem::replace(&mut self.ended, true) {
            return error;
        }
        if !self.failed && self.left != Some(0) {
            self.refuse(Stop::Own(error.clone()));
            let lines = &self.executor.lines;
            if self.follows
                && lines.ended_by().is_some_and(|place| place != lines.me)
                && self.ranks.failure().is_none()
            {
                let doing = format!("exchange #{} of group {:?}", lines.number, self.ranks.name);
                error = lines.cancelled(self.ranks, &doing, self.begun);
            }
        }
        while self.left != Some(0)
            && self.ranks.failure().is_none()
            && !self.executor.lines.why().is_some_and(Why::is_before)
        {
            self.refuse(Stop::Before(error.clone()));
        }
        error
    }

    /// Enters the next exchange and cancels it. Nobody looks at what it would have been.
    fn refuse(&mut self, stop: Stop) {
        let mut operation = Operation::new(Kind::Sizes, Dtype::I64);
        operation.late = self.late;
        self.executor.refuse_next(stop);
        let now = Instant::now();
        let _ = self.run(&operation, (now, Deadline::at(now)));
    }

    fn run(&mut self, operation: &Operation, time: (Instant, Deadline)) -> Result<()> {
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(1);
        }
        let ended = match operation.gpu() {
            None => self.executor.next(self.ranks, operation, time),
            Some(_) => self.executor.queue_and_wait(self.group, operation.clone(), time, self.thread),
        };
        self.failed = ended.is_err();
        ended
    }
}
