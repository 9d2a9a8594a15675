//! A barrier over all hosts. The ranks of a host meet in its control region, and the leaders meet through the watcher's
//! star. A group uses it once when it forms, and later where collectives do not reach all ranks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, Flag};

use super::Ranks;
use crate::error::{Error, Result};
use crate::interrupt::Pace;
use crate::shm::control::Cause;
use crate::shm::sentence::{DESCRIBED, all_of};

/// The barriers of one rank; its threads take turns.
#[derive(Default)]
pub(crate) struct Barriers {
    state: Mutex<State>,
    /// Signalled when a thread comes out of a barrier.
    turn: Condvar,
}

#[derive(Default)]
struct State {
    /// How many are over.
    over: u32,
    /// Whether a thread is in one.
    busy: bool,
}

impl Barriers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ranks {
    /// Waits until every rank of every host has come here. After a time-out it can be called again: this rank has still
    /// come.
    pub(crate) fn barrier(&self, deadline: Deadline) -> Result<()> {
        let start = Instant::now();
        let next = self.enter(deadline)?.wrapping_add(1);
        // Behind `enter`: whoever closes the group looks whether a thread is in a barrier after it has said so.
        let result = self.check_open().and_then(|()| self.come_to(next, deadline, start));
        let mut state = self.barriers.lock();
        state.busy = false;
        if result.is_ok() {
            state.over = next;
        }
        self.barriers.turn.notify_one();
        result
    }

    /// Waits for this rank's other threads; gives how many barriers are over.
    fn enter(&self, deadline: Deadline) -> Result<u32> {
        let start = Instant::now();
        let mut pace = Pace::since(start);
        let mut state = self.barriers.lock();
        while state.busy {
            if deadline.passed() {
                let doing = format!("barrier of group {:?}", self.name);
                let text = "another thread of this rank is in a barrier of the same group";
                return Err(Error::timed_out(doing, start.elapsed(), text));
            }
            let left = pace.until(deadline).remaining().unwrap_or_default();
            let turn = &self.barriers.turn;
            state = turn.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            // Without the lock: the hook may take long. What happens meanwhile is seen before the next sleep.
            drop(state);
            // A turn that was this thread's is another's now.
            pace.look(Instant::now()).inspect_err(|_| self.barriers.turn.notify_one())?;
            state = self.barriers.lock();
        }
        state.busy = true;
        Ok(state.over)
    }

    fn come_to(&self, next: u32, deadline: Deadline, start: Instant) -> Result<()> {
        let mut pace = Pace::since(start);
        let mut wait = |flag: &Flag| self.await_flag(flag, next, deadline, (start, &mut pace));
        self.control.come(next);
        if self.control.leads() {
            for flag in self.control.arrive() {
                wait(flag)?;
            }
            self.check_left()?;
            if !self.context.watcher().arrive(self.id, next)? {
                self.control.release().signal(next);
            }
        }
        wait(self.control.release())?;
        if !self.control.is_over(next) {
            self.check_left()?;
        }
        Ok(())
    }

    fn await_flag(
        &self,
        flag: &Flag,
        next: u32,
        deadline: Deadline,
        (start, pace): (Instant, &mut Pace),
    ) -> Result<()> {
        loop {
            let slice = pace.until(deadline);
            match flag.wait(next, &self.control.abort, slice) {
                Err(tensorwire_device::Error::TimedOut) if slice < deadline => pace.look(Instant::now())?,
                other => return other.map_err(|error| self.ended(error, next, start.elapsed())),
            }
        }
    }

    /// A rank that left makes the barrier impossible for everyone.
    fn check_left(&self) -> Result<()> {
        let Some(rank) = self.control.who_left() else { return Ok(()) };
        Err(self.fail(Cause::Left, rank, ""))
    }

    /// What the end of a wait means.
    fn ended(&self, error: tensorwire_device::Error, count: u32, after: Duration) -> Error {
        match error {
            tensorwire_device::Error::Aborted => {
                self.failure().unwrap_or_else(|| Error::Aborted("the group has failed".into()))
            }
            tensorwire_device::Error::TimedOut => {
                let here = self.control.ranks().iter().zip(self.control.arrive());
                let absent = here.filter(|(_, flag)| !flag.reached(count)).map(|(rank, _)| *rank);
                let absent: Vec<usize> = absent.chain(self.context.watcher().absent(self.id)).collect();
                let missing = if absent.is_empty() {
                    self.nobody_absent()
                } else {
                    let described = absent.iter().take(DESCRIBED).map(|&rank| match self.place_of(rank) {
                        Some(place) => self.described(&[place]),
                        None => self.members[rank].to_string(),
                    });
                    let described: Vec<String> = described.collect();
                    format!("it waited for {}", all_of(&described, absent.len()))
                };
                // The first one is a part of forming the group.
                let doing = match count.wrapping_sub(1) {
                    0 => format!("forming the group {:?}", self.name),
                    count => format!("barrier #{count} of group {:?}", self.name),
                };
                Error::timed_out(doing, after, missing).about(absent)
            }
            other => other.into(),
        }
    }

    /// Why a barrier is not over though all ranks that this one can see have come: they wait for other hosts, or their
    /// leader, which ends it, has given up before the last one came.
    fn nobody_absent(&self) -> String {
        let leader = self.control.ranks().first().map_or(self.rank, |&rank| rank);
        let gave_up =
            format!("{} no longer waits for it; it must call barrier() again", self.members[leader]);
        match (self.control.leads(), self.hosts.len()) {
            (true, _) => "all ranks of this host are here; other hosts are not".into(),
            (false, 1) => format!("all ranks have come, but {gave_up}"),
            (false, _) => format!("all ranks of this host are here; other hosts are not, or {gave_up}"),
        }
    }
}
