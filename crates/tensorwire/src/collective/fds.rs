//! Descriptors that all ranks of a host give each other.
//!
//! Each rank offers its descriptors under a number (`ranks::descriptors`). The exchange is a chain of two steps: all ranks
//! tell each other their numbers, and at the end that they have all descriptors. In between, each rank asks those that have
//! some for it, over the connections by which memory is shared. So nobody waits for a rank that is not there, and either all
//! ranks have all descriptors, or all hear which rank failed.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensorwire_device::fd::{Fd, MAX_FDS};
use tensorwire_device::{Deadline, Dtype};

use super::Collectives;
use super::call::Call;
use super::chain::{Chain, Chained};
use super::operation::Operation;
use crate::error::{Error, Result};
use crate::ranks::descriptors::{Offered, copies};
use crate::shm::kind::Kind;

/// An exchange of descriptors that has not begun.
#[must_use = "a call does nothing until it is waited for"]
pub struct FdsCall<'a> {
    call: Call<'a>,
    job: Arc<FdsJob>,
}

impl<'a> FdsCall<'a> {
    /// What this rank gives is its own; that it cannot give anything is told to all ranks.
    pub(crate) fn new(
        group: &'a Arc<Collectives>,
        kind: Kind,
        root: Result<usize>,
        given: Result<Vec<Fd>>,
    ) -> Self {
        let most = if kind == Kind::AllGatherFds { 1 } else { MAX_FDS };
        let given = given.and_then(|fds| match fds.len() {
            count if count <= most => Ok(fds),
            count => Err(Error::misuse(format!("{kind} of {count} descriptors; it takes at most {most}"))),
        });
        let job = Arc::new(FdsJob { given: Mutex::new(Some(given)), got: Mutex::default() });
        let call = Call::new(group, || {
            let mut operation = Operation::new(kind, Dtype::I64);
            operation.root = root?;
            operation.set_chained(job.clone());
            Ok(operation)
        });
        Self { call, job }
    }

    /// Sets when the exchange must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.call = self.call.deadline(deadline);
        self
    }

    /// Runs the exchange on this thread, behind operations that were started before. Gives the descriptors; they are closed
    /// by `exec`.
    pub fn wait(self) -> Result<Vec<OwnedFd>> {
        self.call.wait()?;
        let got = lock(&self.job.got).take();
        let got = got.ok_or_else(|| Error::bug("an exchange of descriptors without a result"))?;
        Ok(got.into_iter().map(Fd::into_owned).collect::<tensorwire_device::Result<_>>()?)
    }
}

impl fmt::Debug for FdsCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FdsCall({:?})", self.call)
    }
}

/// What one rank gives and gets.
#[derive(Debug)]
pub(crate) struct FdsJob {
    given: Mutex<Option<Result<Vec<Fd>>>>,
    got: Mutex<Option<Vec<Fd>>>,
}

impl Chained for FdsJob {
    fn run(&self, chain: &mut Chain<'_>, operation: &Operation) -> Result<()> {
        let given = lock(&self.given).take();
        let given = given.unwrap_or_else(|| Err(Error::bug("an exchange of descriptors that runs twice")))?;
        let offered = Offered::to_all(&chain.ranks.memory, given);
        // It is there until others have heard how this ends: they must not take its absence for the reason.
        let got = exchange(chain, operation, &offered).map_err(|error| chain.end(error))?;
        *lock(&self.got) = Some(got);
        Ok(())
    }

    fn elements(&self) -> u64 {
        0
    }

    fn bytes(&self) -> usize {
        0
    }
}

fn exchange(chain: &mut Chain<'_>, operation: &Operation, offered: &Offered<'_>) -> Result<Vec<Fd>> {
    let (ranks, kind, deadline) = (chain.ranks, operation.kind, chain.stop().1);
    let (me, world) = (chain.executor.lines.me, chain.executor.lines.world);
    let told = chain.gather_numbers(operation.clone(), &[offered.number(), offered.fds().len() as u64])?;
    chain.expect(1);
    let givers = match kind {
        Kind::AllGatherFds => 0..world,
        _ => operation.root..operation.root + 1,
    };
    let mut got = Vec::new();
    for place in givers {
        // Tests kill ranks before each of them.
        chain.executor.lines.point(kind, place);
        let [number, count] = [told[2 * place], told[2 * place + 1]];
        let wrong = if kind == Kind::AllGatherFds { count != 1 } else { count > MAX_FDS as u64 };
        if wrong {
            return Err(chain.misbehaved(kind, place, &format!("it gives {count} descriptors")));
        }
        if place == me {
            got.extend(copies(offered.fds())?);
        } else if count > 0 {
            let taken = ranks.memory.take_fds(place, number, count as usize, deadline);
            got.extend(taken.inspect_err(|_| chain.missed())?);
        }
    }
    chain.executor.lines.point(kind, world);
    chain.gather_numbers(operation.clone(), &[got.len() as u64])?;
    Ok(got)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
