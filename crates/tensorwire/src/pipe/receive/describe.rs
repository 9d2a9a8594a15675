//! Receiving the description of a message. The group has the order: who asks first gets the first. A receive that is given up gives its
//! head back.

use std::sync::{Arc, PoisonError};

use tensorwire_device::Deadline;

use super::Incoming;
use super::open::{Open, Parked};
use crate::collective::p2p::Taken;
use crate::collective::{Tensor, Work};
use crate::error::{Error, PeerFaultKind, Result};
use crate::pipe::descriptor::{self, Begins, HEAD, begins, rest_of, tag};
use crate::pipe::pending::{How, Outcome, Pending, now, over};
use crate::pipe::{End, HEADS, step};

const RECEIVING: &str = "receiving a message from the other end of a pipe";

/// A receive of the next description that has not begun.
#[derive(Debug)]
#[must_use = "nothing is received until it is waited for or started"]
pub struct Next<'a> {
    pub(super) end: &'a Arc<End>,
    pub(super) deadline: Option<Deadline>,
}

impl<'a> Next<'a> {
    pub(in crate::pipe) fn new(end: &'a Arc<End>) -> Self {
        Self { end, deadline: None }
    }

    /// Sets when there must be one at the latest. Otherwise the time-out of the configuration counts.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Waits for it. Gives nothing if the other end sends no more, or has closed the pipe. A time-out loses no message.
    pub fn wait(self) -> Result<Option<Incoming>> {
        now(describe(self.end.clone(), HEADS, self.end.by(self.deadline), How::Wait))?.tell()
    }

    /// Starts it and returns at once. Receives get their messages in the order in which they were started, however they are waited for.
    pub fn start(self) -> Result<Pending<Option<Incoming>>> {
        Pending::start("next", describe(self.end.clone(), HEADS, self.end.by(self.deadline), How::Start))
    }
}

/// A head that was received. Until it is kept, it is given back when this is dropped.
struct Claim {
    end: Arc<End>,
    head: Tensor,
    held: Option<Held>,
    /// Its tag.
    lane: u64,
    /// Bytes of its message that have come unasked, and all of them.
    cost: u64,
    bytes: u64,
}

enum Held {
    Taken(Taken),
    Work(Work),
}

impl Claim {
    /// Receives the next head; nothing if the other end has closed the pipe.
    async fn take(end: &Arc<End>, lane: u64, by: Deadline, how: How) -> Result<Option<Self>> {
        let head = end.head(&[0; HEAD])?;
        let call = end.group.recv(&head, end.other()).tag(lane).deadline(by);
        let held = match how {
            How::Wait => call.wait_kept().map(Held::Taken),
            How::Start => {
                let work = call.start()?;
                over(&work).await;
                // Somebody is told only of a failure: it can still be given back.
                match work.has_failed() {
                    true => work.wait().map(|()| Held::Work(work)),
                    false => Ok(Held::Work(work)),
                }
            }
        };
        match held {
            Ok(held) => Ok(Some(Self { end: end.clone(), head, held: Some(held), lane, cost: 0, bytes: 0 })),
            Err(Error::Peer(fault)) if fault.kind == PeerFaultKind::Left => Ok(None),
            // Heads have one size.
            Err(error) if is_misfit(&error) => Err(end.misbehaved(&error)),
            Err(error) => Err(end.during(RECEIVING, error)),
        }
    }

    /// Nobody else gets it any more.
    fn keep(mut self) -> Result<()> {
        if let Some(Held::Work(work)) = self.held.take() {
            work.wait().map_err(|error| self.end.own(error))?;
        }
        self.end.keep(self.head.clone());
        self.end.took(self.cost);
        if self.lane == HEADS {
            self.end.traffic.took(self.bytes);
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match self.held.take() {
            Some(Held::Taken(taken)) => taken.give_back(),
            Some(Held::Work(work)) => {
                work.withdraw();
            }
            None => {}
        }
    }
}

/// A message whose description is here. Until it is kept, it goes to the next receive when this is dropped.
pub(in crate::pipe) struct Described {
    claim: Option<Claim>,
    pub(super) open: Arc<Open>,
}

impl Described {
    /// Nobody else gets it any more.
    pub(in crate::pipe) fn keep(mut self) -> Result<Incoming> {
        self.claim.take().map_or(Ok(()), Claim::keep)?;
        Ok(Incoming(self.open.clone()))
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        // Before its head is there again.
        if self.claim.is_some() {
            self.open.park();
        }
    }
}

impl Outcome for Option<Described> {
    type Told = Option<Incoming>;
    const GOES_ON: bool = false;

    fn tell(self) -> Result<Option<Incoming>> {
        self.map(Described::keep).transpose()
    }
}

/// The description of the next message whose head has this tag; nothing if there is none any more.
pub(in crate::pipe) async fn describe(
    end: Arc<End>,
    lane: u64,
    by: Deadline,
    how: How,
) -> Result<Option<Described>> {
    // In a forked child nobody gives a head back.
    end.context().birth().check("the pipe")?;
    loop {
        let Some(mut claim) = Claim::take(&end, lane, by, how).await? else { return Ok(None) };
        step("receive: a head");
        let mut head = [0; HEAD];
        claim.head.read(&mut head)?;
        let (serial, len, first) = match begins(&head).map_err(|error| end.misbehaved(&error))? {
            (Begins::Message(message), first) => {
                (claim.cost, claim.bytes) = (message.cost, message.bytes);
                (message.serial, message.descriptor, first)
            }
            // It goes back: others hear of it, too.
            (Begins::End, _) => return Ok(None),
        };
        let open = match end.take_parked(serial) {
            Some(parked) => Open::again(&end, parked),
            None => {
                let rest = rest(&end, serial, len, by, how).await;
                match rest.map_err(|error| end.during(RECEIVING, error))? {
                    Some(rest) => Open::new(&end, serial, &[first, &rest].concat())?,
                    // It was taken back.
                    None => {
                        claim.keep()?;
                        continue;
                    }
                }
            }
        };
        return Ok(Some(Described { claim: Some(claim), open: Arc::new(open) }));
    }
}

/// What of a descriptor does not fit its head; nothing if the message was taken back.
async fn rest(end: &Arc<End>, serial: u64, len: usize, by: Deadline, how: How) -> Result<Option<Vec<u8>>> {
    if rest_of(len) == 0 {
        return Ok(Some(Vec::new()));
    }
    let rest = Tensor::private(&vec![0_u8; rest_of(len)])?;
    match end.receive(&rest, tag(serial, descriptor::Part::Rest), by, how).await {
        Ok(()) => Ok(Some(rest.to_vec::<u8>()?)),
        Err(error) if is_misfit(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

impl End {
    /// Receives a part of a message.
    pub(in crate::pipe) async fn receive(
        &self,
        into: &Tensor,
        tag: u64,
        by: Deadline,
        how: How,
    ) -> Result<()> {
        let call = self.group.recv(into, self.other()).tag(tag).deadline(by);
        match how {
            How::Wait => call.wait(),
            How::Start => {
                let work = call.start()?;
                over(&work).await;
                work.wait()
            }
        }
    }

    fn take_parked(&self, serial: u64) -> Option<Parked> {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let at = parked.iter().position(|parked| parked.serial == serial)?;
        Some(parked.swap_remove(at))
    }
}

/// Whether what came was no such part: the sender has taken it back.
pub(super) fn is_misfit(error: &Error) -> bool {
    matches!(error, Error::Peer(fault) if fault.kind == PeerFaultKind::Mismatch)
}
