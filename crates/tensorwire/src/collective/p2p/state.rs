//! All messages of one rank: what its threads share under one lock. Nothing here waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, Device, Queue};

use super::freight::Parcel;
use super::incoming::Incoming;
use super::operation::{Arrival, End, Ended, Hearer, Leftovers, OnGpu, Receiving, Sending, Ticket, copied};
use super::outgoing::Outgoing;
use super::peers::Peers;
use super::porter::Job;
use super::started::Started;
use crate::collective::tensor::Tensor;
use crate::collective::work::{Callback, Completion, withdrawn};
use crate::error::{Error, Result};
use crate::shm::kind::Kind;
use crate::shm::record::{Entry, Recorder, State as Outcome};

#[derive(Debug)]
pub(super) struct State {
    pub(super) peers: Arc<Peers>,
    host: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    outgoing: Vec<Outgoing>,
    /// Those that are not idle, and perhaps others: most ranks never talk to each other.
    sending: Vec<usize>,
    incoming: Incoming,
    /// No operation ends by its deadline before this.
    soonest: Option<Instant>,
    /// How many operations are pending that have a work.
    works: usize,
    tickets: u64,
    pub(super) recorder: Option<Arc<Recorder>>,
    /// How many messages this rank has sent to itself.
    looped: u64,
    /// How many messages have been recorded.
    messages: u64,
    /// Operations that are over, before they are sorted into the two below.
    ended: Vec<Ended>,
    /// For threads that wait.
    answers: Vec<(u64, End)>,
    /// For works: told once the lock is free, because callbacks may come back here.
    finished: Vec<Finished>,
    /// For the thread that brings messages of GPUs.
    jobs: Vec<Job>,
}

/// A work that is over, how it ended, after how long, and what is to be dropped before that is told.
pub(super) type Finished = (Completion, Result<()>, Option<Duration>, Leftovers);

impl State {
    pub(super) fn new(peers: Arc<Peers>, host: Arc<dyn Device>) -> Result<Self> {
        Ok(Self {
            queue: host.queue()?,
            host,
            outgoing: (0..peers.len()).map(Outgoing::new).collect(),
            sending: Vec::new(),
            incoming: Incoming::new(peers.len()),
            soonest: None,
            works: 0,
            tickets: 0,
            recorder: None,
            looped: 0,
            messages: 0,
            ended: Vec::new(),
            answers: Vec::new(),
            finished: Vec::new(),
            jobs: Vec::new(),
            peers,
        })
    }

    /// A number for a thread that will wait.
    pub(super) fn number(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Takes a message to send, and sends what can be sent at once.
    pub(super) fn send(
        &mut self,
        (tensor, parcel): (&Tensor, Option<Parcel>),
        to: usize,
        tag: u64,
        (deadline, to_whom): (Deadline, Hearer),
    ) -> Result<u64> {
        let number = self.number();
        let ticket = Ticket { number, ..Ticket::new(deadline, to_whom) };
        let mut message = Sending::new(tensor, parcel, tag, ticket, (&*self.host, &mut *self.queue))?;
        self.begun(&mut message.ticket, Kind::Send, tensor, Some(to), tag);
        let (peers, queue, ended) = (&self.peers, &mut *self.queue, &mut self.ended);
        if to == peers.me() {
            self.looped += 1;
            let header = message.header(self.looped);
            let copied = message.payload.to_vec();
            let result =
                copied.map(|bytes| self.incoming.bring((to, header, false), Ok(bytes), peers, queue, ended));
            self.ended.push(message.end(result.map_err(Error::from)));
        } else if let Some(outgoing) = self.outgoing.get_mut(to) {
            outgoing.push(message);
            outgoing.progress(peers, queue, ended);
            if !outgoing.is_idle() && !self.sending.contains(&to) {
                self.sending.push(to);
            }
        }
        self.sort();
        Ok(number)
    }

    /// Takes a receive, and gives it what has come.
    pub(super) fn receive(
        &mut self,
        (tensor, gpu): (&Tensor, Option<OnGpu>),
        from: Option<usize>,
        tag: u64,
        (deadline, to_whom): (Deadline, Hearer),
    ) -> Result<()> {
        let ticket = Ticket::new(deadline, to_whom);
        let receive = Receiving::new(tensor, gpu, (from, tag), ticket, &*self.host)?;
        self.post(receive, tensor);
        Ok(())
    }

    /// The next message from a rank with this tag is dropped as it comes. `none` is a tensor without elements.
    pub(super) fn discard(&mut self, none: &Tensor, from: usize, tag: u64, to_whom: Hearer) -> Result<()> {
        let ticket = Ticket::new(Deadline::after(Duration::MAX), to_whom);
        let mut receive = Receiving::new(none, None, (Some(from), tag), ticket, &*self.host)?;
        receive.drops = true;
        self.post(receive, none);
        Ok(())
    }

    fn post(&mut self, mut receive: Receiving, tensor: &Tensor) {
        let (from, tag) = (receive.from, receive.tag);
        self.begun(&mut receive.ticket, Kind::Recv, tensor, from, tag);
        let (peers, queue, ended) = (&self.peers, &mut *self.queue, &mut self.ended);
        self.incoming.post(receive, peers, queue, ended);
        if !self.incoming.is_idle() {
            self.incoming.progress(peers, queue, ended);
        }
        self.sort();
    }

    /// Does what can be done now; gives whether anything moved.
    pub(super) fn progress(&mut self) -> bool {
        let (peers, queue, ended) = (&self.peers, &mut *self.queue, &mut self.ended);
        let mut moved = self.incoming.welcome(peers, ended);
        // What has arrived counts, even if the group has failed meanwhile.
        let failed = peers.control.abort.is_set();
        let mut lost = None;
        self.sending.retain(|&to| {
            let outgoing = &mut self.outgoing[to];
            if !outgoing.is_idle() {
                moved |= outgoing.progress(peers, queue, ended);
                lost = lost.into_iter().chain(outgoing.lost_until()).min();
            }
            !outgoing.is_idle()
        });
        moved |= self.incoming.progress(peers, queue, ended);
        if let Some(until) = lost.into_iter().chain(self.incoming.lost_until()).min() {
            self.soonest = Some(self.soonest.map_or(until, |soonest| soonest.min(until)));
        }
        if failed {
            let error = peers.failure().unwrap_or_else(|| Error::Aborted("the group has failed".into()));
            self.fail(&error);
        } else if let Some(soonest) = self.soonest {
            let now = Instant::now();
            if soonest <= now {
                self.expire(now);
            }
        }
        moved |= !self.ended.is_empty();
        self.sort();
        moved
    }

    /// Ends everything that is pending.
    pub(super) fn fail(&mut self, error: &Error) {
        for outgoing in &mut self.outgoing {
            outgoing.fail(error, &mut self.ended);
        }
        self.incoming.fail(error, &mut self.ended);
    }

    /// Everything that is pending is given up, because the group is being closed.
    pub(super) fn close(&mut self) {
        let (count, bytes) = self.incoming.kept();
        if count > 0 {
            tracing::info!("closing a group with {count} messages ({bytes} bytes) that were never received");
        }
        self.fail(&Error::Aborted("given up: its group is being closed".into()));
        // In a group that has failed a farewell would come before the reason.
        let polite = !self.peers.control.abort.is_set();
        self.outgoing.iter_mut().for_each(|outgoing| outgoing.close(polite));
        self.sort();
        self.jobs.extend(self.incoming.take_tokens().into_iter().map(Job::Discard));
        self.incoming = Incoming::new(self.peers.len());
    }

    /// Ends the operation that a thread waits for: a send as if its time were over, a receive by withdrawing it. If that has
    /// ended meanwhile, its message is put back.
    pub(super) fn interrupt(&mut self, number: u64) {
        let now = Instant::now();
        self.outgoing.iter_mut().for_each(|outgoing| outgoing.hasten(number, now));
        self.expire(now);
        self.sort();
        self.take_out(|to| to.is_waiter(number));
        if let Some(Ok(Some(arrival))) = self.answer(number) {
            self.put_back(&arrival);
        }
    }

    /// Withdraws a started send by its number, as if its time were over. If it is too late for that, it ends well.
    pub(super) fn revoke(&mut self, number: u64) {
        let now = Instant::now();
        self.outgoing.iter_mut().for_each(|outgoing| outgoing.hasten_numbered(number, now));
        self.expire(now);
        self.sort();
    }

    /// Withdraws a started receive. Gives what is to be called then, or nothing if its end stands.
    pub(super) fn withdraw(&mut self, started: &Started) -> Option<Vec<Callback>> {
        if self.take_out(|to| to.is_work(started)) {
            return Some(Vec::new());
        }
        let arrival = started.take_back()?;
        self.put_back(&arrival);
        let mut callbacks = started.left();
        // The memory is let go with the others.
        callbacks.push(Box::new(move || drop(arrival)));
        Some(callbacks)
    }

    /// A message that was received is there again, before those that came later.
    pub(super) fn put_back(&mut self, arrival: &Arrival) {
        let (peers, queue, ended) = (&self.peers, &mut *self.queue, &mut self.ended);
        let payload = copied(&arrival.payload, arrival.payload.len());
        self.incoming.bring((arrival.from, arrival.header, true), payload, peers, queue, ended);
        self.sort();
    }

    /// Takes a receive out that has not ended; gives whether there was one.
    fn take_out(&mut self, which: impl Fn(&Hearer) -> bool) -> bool {
        let (peers, ended) = (&self.peers, &mut self.ended);
        let Some(mut receive) = self.incoming.withdraw(which, peers, ended) else { return false };
        if let (Some(recorder), Some(record)) = (&self.recorder, receive.ticket.record.take()) {
            recorder.end(&record, Outcome::Cancelled, recorder.nanos(Instant::now()));
        }
        let error = withdrawn(&format!("recv with tag {}", receive.tag));
        ended.push(receive.fail(error));
        self.sort();
        true
    }

    /// How a thread's operation ended, if it has.
    pub(super) fn answer(&mut self, number: u64) -> Option<End> {
        let index = self.answers.iter().position(|(other, _)| *other == number)?;
        Some(self.answers.swap_remove(index).1)
    }

    pub(super) fn has_answer(&self, number: u64) -> bool {
        self.answers.iter().any(|(other, _)| *other == number)
    }

    /// Whether there are answers that their threads have not taken.
    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Whether works are over of which nobody has been told.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Works that are over.
    pub(super) fn finished(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.finished)
    }

    /// What is to be done with messages of GPUs.
    pub(super) fn jobs(&mut self) -> Vec<Job> {
        std::mem::take(&mut self.jobs)
    }

    /// Whether there is something to do that no thread waits for.
    pub(super) fn has_works(&self) -> bool {
        // Nobody waits for what is left of a message in a group that has failed.
        let unsettled = || {
            let any = self.sending.iter().any(|&to| !self.outgoing[to].is_settled());
            any && !self.peers.control.abort.is_set()
        };
        self.works > 0 || self.incoming.has_leftovers() || unsettled()
    }

    /// Has the bell rung when there is something to do.
    pub(super) fn arm(&self) {
        self.sending.iter().for_each(|&to| self.outgoing[to].arm());
        self.incoming.arm();
    }

    /// When to look again if nothing happens; far away if nothing ends by itself.
    pub(super) fn until(&self) -> Deadline {
        let left = self.soonest.map(|soonest| soonest.saturating_duration_since(Instant::now()));
        Deadline::after(left.unwrap_or(Duration::from_secs(3600)))
    }

    pub(super) fn soonest(&self) -> Option<Instant> {
        self.soonest
    }

    /// How many messages nobody has received, and their bytes.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        self.incoming.kept()
    }

    fn expire(&mut self, now: Instant) {
        let (peers, ended) = (&self.peers, &mut self.ended);
        for outgoing in &mut self.outgoing {
            outgoing.expire(now, peers, ended);
        }
        self.incoming.expire(now, peers, ended);
        let sends = self.outgoing.iter().filter_map(Outgoing::soonest).min();
        self.soonest = sends.into_iter().chain(self.incoming.soonest()).min();
    }

    /// An operation begins.
    fn begun(&mut self, ticket: &mut Ticket, kind: Kind, tensor: &Tensor, peer: Option<usize>, tag: u64) {
        let instant = ticket.deadline.instant();
        self.soonest = Some(self.soonest.map_or(instant, |soonest| soonest.min(instant)));
        self.works += usize::from(matches!(ticket.to, Hearer::Work(..)));
        if let Some(recorder) = &self.recorder {
            self.messages += 1;
            ticket.record = Some(recorder.begin(Entry {
                number: self.messages,
                kind,
                dtype: Some(tensor.dtype()),
                op: None,
                root_or_peer: peer.map(|place| self.peers.rank(place)),
                tag,
                bytes: tensor.byte_len() as u64,
                path: None,
                now: recorder.nanos(ticket.since),
            }));
        }
    }

    /// Says how operations ended.
    fn sort(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        let now = Instant::now();
        for (Ticket { since, deadline, to, record, copied, .. }, result, mut memory) in self.ended.drain(..) {
            self.jobs.extend(memory.2.take().map(Job::Discard));
            if let (Some(recorder), Some(record)) = (&self.recorder, record) {
                recorder.end(&record, outcome(&result), recorder.nanos(now));
            }
            match to {
                // Its thread has the tensor, so this is not the last reference.
                Hearer::Waiter(number) => self.answers.push((number, result)),
                Hearer::Work(completion, started) => {
                    self.works -= 1;
                    let result = match (result, copied) {
                        (Ok(Some(arrival)), _) if arrival.unload.is_some() => {
                            started.inspect(|started| started.takes(arrival.from));
                            self.jobs.push(Job::Unload(completion, arrival, since));
                            continue;
                        }
                        (Ok(None), Some(mark)) => {
                            self.jobs.push(Job::Sent(completion, mark, (since, deadline)));
                            continue;
                        }
                        (result, _) => result,
                    };
                    let result = result.map_err(|error| *error).map(|arrival| {
                        if let (Some(started), Some(arrival)) = (started, arrival) {
                            started.arrived(arrival);
                        }
                    });
                    let duration = now.saturating_duration_since(since);
                    self.finished.push((completion, result, Some(duration), memory));
                }
            }
        }
    }
}

/// How the flight recorder calls an end.
fn outcome(end: &End) -> Outcome {
    match end.as_ref().map_err(|error| &**error) {
        Ok(_) => Outcome::Done,
        Err(Error::TimedOut { .. }) => Outcome::TimedOut,
        Err(_) => Outcome::Failed,
    }
}
