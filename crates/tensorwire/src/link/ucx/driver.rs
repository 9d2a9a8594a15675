//! The engine's thread: it makes all calls on UCX.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorwire_device::secret::Id;
use tensorwire_device::ucx::{Body, Event, Worker};
use tensorwire_device::{Deadline, Span};

use super::{BLOCK, Block, COST, Chunk, Lane, Order, SMALL, Sender, Shared, Trouble, WINDOW, lock};
use crate::error::{Error, Result};

/// How often the thread looks for what has come before it sleeps.
const LOOKS: u32 = 200;
/// How long the end of the engine waits for what is still to go.
const LAST: Duration = Duration::from_secs(2);

/// What the thread has for itself.
pub(super) struct Driver {
    shared: Arc<Shared>,
    worker: Worker,
    /// Endpoints by the address of the worker at their ends, with the number of streams that use them.
    ways: HashMap<Vec<u8>, (u64, usize)>,
    /// Who uses an endpoint: found by the address of the stream's state, which stays.
    users: HashMap<usize, (Weak<Sender>, Vec<u8>, u64)>,
    /// Calls that are under way.
    calls: HashMap<u64, Call>,
    next: u64,
}

/// What a call of UCX is for.
enum Call {
    /// Bytes go.
    Send(Arc<Sender>),
    /// So many bytes come for a place in a stream.
    Fetch(Arc<Lane>, u64, usize),
    /// A way to another worker ends.
    Close,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>, worker: Worker) -> Self {
        let (ways, users, calls) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self { shared, worker, ways, users, calls, next: 0 }
    }

    pub(super) fn run(mut self) {
        let mut idle = 0;
        loop {
            let (orders, stop) = {
                let mut state = lock(&self.shared.state);
                (std::mem::take(&mut state.orders), state.stop)
            };
            idle = if orders.is_empty() { idle + 1 } else { 0 };
            orders.into_iter().for_each(|order| self.obey(order));
            if stop {
                return self.finish();
            }
            if self.step() {
                idle = 0;
            }
            if idle >= LOOKS {
                if let Err(error) = self.sleep() {
                    return self.fail(&error.to_string());
                }
                idle = 0;
            }
        }
    }

    /// Goes on with what is under way; gives whether anything happened.
    fn step(&mut self) -> bool {
        let moved = self.worker.progress();
        let events = self.worker.events();
        let any = moved || !events.is_empty();
        events.into_iter().for_each(|event| self.hear(event));
        any
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self) -> Result<()> {
        {
            let mut state = lock(&self.shared.state);
            if !state.orders.is_empty() || state.stop {
                return Ok(());
            }
            state.asleep = true;
        }
        if self.worker.arm()? {
            // UCX looks after its connections now and then.
            let tick = Timespec { tv_sec: 1, tv_nsec: 0 };
            let tick = (!self.ways.is_empty()).then_some(&tick);
            let mut fds = [
                PollFd::from_borrowed_fd(self.worker.fd(), PollFlags::IN),
                PollFd::new(&self.shared.wake, PollFlags::IN),
            ];
            match poll(&mut fds, tick) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::io("waiting for UCX", error)),
            }
        }
        lock(&self.shared.state).asleep = false;
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        Ok(())
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Connect(sender, address) => match self.endpoint(&address) {
                Ok(endpoint) => {
                    let user = (Arc::downgrade(&sender), address, endpoint);
                    self.users.insert(key_of(&sender), user);
                }
                Err(error) => lose(&sender, &error.to_string()),
            },
            Order::Send(sender, head, chunk) => {
                if let Err(error) = self.send(&sender, &head, chunk) {
                    lose(&sender, &error.to_string());
                }
            }
            Order::End(sender) => {
                let Some((_, address, endpoint)) = self.users.remove(&key_of(&sender)) else { return };
                let Some((current, count)) = self.ways.get_mut(&address) else { return };
                if *current != endpoint {
                    return;
                }
                *count -= 1;
                if *count == 0 {
                    self.ways.remove(&address);
                    let token = self.call(Call::Close);
                    self.worker.disconnect(endpoint, false, token);
                }
            }
            Order::Unregister(number) => self.worker.unregister(number),
        }
    }

    /// The endpoint to a worker, with one user more.
    fn endpoint(&mut self, address: &[u8]) -> Result<u64> {
        if let Some((endpoint, count)) = self.ways.get_mut(address) {
            *count += 1;
            return Ok(*endpoint);
        }
        let endpoint = self.worker.connect(address)?;
        self.ways.insert(address.to_vec(), (endpoint, 1));
        Ok(endpoint)
    }

    fn send(&mut self, sender: &Arc<Sender>, head: &[u8], chunk: Chunk) -> Result<()> {
        let Some((_, _, endpoint)) = self.users.get(&key_of(sender)) else {
            // It is lost already.
            if let Chunk::Large(block, _) = chunk {
                self.shared.give(block);
            }
            return Ok(());
        };
        let endpoint = *endpoint;
        let body = match chunk {
            Chunk::Small(bytes) => Body::Bytes(bytes),
            Chunk::Large(block, len) => {
                let block = self.registered(block)?;
                Body::Part(block.span.slice(0..len)?, block.number.unwrap_or_default())
            }
        };
        let token = self.call(Call::Send(sender.clone()));
        self.worker.send(endpoint, head, body, token).inspect_err(|_| {
            self.calls.remove(&token);
        })?;
        Ok(())
    }

    fn registered(&mut self, mut block: Block) -> Result<Block> {
        if block.number.is_none() {
            block.number = Some(self.worker.register(block.span.clone())?);
        }
        Ok(block)
    }

    fn call(&mut self, call: Call) -> u64 {
        self.next += 1;
        self.calls.insert(self.next, call);
        self.next
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Came { head, bytes } => {
                if let Some((lane, number)) = self.lane_of(&head, bytes.len())
                    && claim(&lane, number, bytes.len())
                {
                    bring(&lane, number, Chunk::Small(bytes));
                }
            }
            Event::Offered { head, offer, len } => {
                let Some((lane, number)) =
                    self.lane_of(&head, len).filter(|(lane, number)| claim(lane, *number, len))
                else {
                    return self.worker.refuse(offer);
                };
                if let Err(error) = self.fetch(&lane, number, offer, len) {
                    self.worker.refuse(offer);
                    trouble(&lane, Trouble::Lost(error.to_string()));
                }
            }
            Event::Done { token, result, body } => {
                let chunk = |len| match body {
                    Some(Body::Part(span, number)) => {
                        let span = Span::whole(span.region().clone());
                        Some(Chunk::Large(Block { span, number: Some(number) }, len))
                    }
                    Some(Body::Bytes(bytes)) => Some(Chunk::Small(bytes)),
                    None => None,
                };
                let left = match (self.calls.remove(&token), result) {
                    (Some(Call::Fetch(lane, number, len)), Ok(())) => {
                        return chunk(len).into_iter().for_each(|chunk| bring(&lane, number, chunk));
                    }
                    (Some(Call::Fetch(lane, ..)), Err(why)) => {
                        trouble(&lane, Trouble::Lost(why));
                        chunk(0)
                    }
                    (Some(Call::Send(sender)), Err(why)) => {
                        lose(&sender, &why);
                        chunk(0)
                    }
                    (Some(Call::Send(_) | Call::Close) | None, _) => chunk(0),
                };
                if let Some(Chunk::Large(block, _)) = left {
                    self.shared.give(block);
                }
            }
            Event::Lost { endpoint, why } => {
                // The next stream to that worker makes a new one.
                self.ways.retain(|_, (of, _)| *of != endpoint);
                for (sender, ..) in self.users.values().filter(|(_, _, of)| *of == endpoint) {
                    if let Some(sender) = sender.upgrade() {
                        lose(&sender, &why);
                    }
                }
                let token = self.call(Call::Close);
                self.worker.disconnect(endpoint, true, token);
            }
        }
    }

    fn fetch(&mut self, lane: &Arc<Lane>, number: u64, offer: u64, len: usize) -> Result<()> {
        let body = if len <= SMALL {
            Body::Bytes(vec![0; len])
        } else {
            let block = self.shared.block()?;
            let block = self.registered(block)?;
            Body::Part(block.span.slice(0..len)?, block.number.unwrap_or_default())
        };
        let token = self.call(Call::Fetch(lane.clone(), number, len));
        Ok(self.worker.receive(offer, body, token)?)
    }

    /// The stream that a chunk belongs to, and its place there. What has no right proof is dropped.
    fn lane_of(&self, head: &[u8], len: usize) -> Option<(Arc<Lane>, u64)> {
        let (name, rest) = head.split_first_chunk::<16>()?;
        let (number, proof) = rest.split_first_chunk::<8>()?;
        let proof: &[u8; 32] = proof.try_into().ok()?;
        let lane = lock(&self.shared.state).lanes.get(&Id(*name)).cloned()?;
        let proved = lane.proof.proves("chunk", &[number], proof) && len > 0;
        proved.then(|| (lane, u64::from_le_bytes(*number)))
    }

    /// Lets what was ordered go, and what is under way end.
    fn finish(mut self) {
        for (endpoint, _) in std::mem::take(&mut self.ways).into_values() {
            let token = self.call(Call::Close);
            self.worker.disconnect(endpoint, false, token);
        }
        let deadline = Deadline::after(LAST);
        while self.worker.under_way() > 0 && !deadline.passed() {
            if !self.step() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        self.fail("the process closes its connections");
    }

    /// Nothing goes and nothing comes any more.
    fn fail(mut self, why: &str) {
        let (lanes, orders) = {
            let mut state = lock(&self.shared.state);
            state.failed = Some(why.into());
            (std::mem::take(&mut state.lanes), std::mem::take(&mut state.orders))
        };
        for order in orders {
            if let Order::Connect(sender, _) | Order::Send(sender, ..) = order {
                lose(&sender, why);
            }
        }
        for lane in lanes.into_values() {
            trouble(&lane, Trouble::Lost(why.into()));
        }
        for (sender, ..) in std::mem::take(&mut self.users).into_values() {
            if let Some(sender) = sender.upgrade() {
                lose(&sender, why);
            }
        }
    }
}

fn key_of(sender: &Arc<Sender>) -> usize {
    Arc::as_ptr(sender).addr()
}

/// Nothing more goes on a stream.
fn lose(sender: &Sender, why: &str) {
    lock(&sender.lost).get_or_insert_with(|| why.into());
    let _ = rustix::net::shutdown(&*sender.control, rustix::net::Shutdown::Write);
    sender.bell.ring();
}

/// Nothing more comes on a stream.
fn trouble(lane: &Lane, what: Trouble) {
    lock(&lane.state).fault.get_or_insert(what);
    lane.bell.ring();
}

/// Takes a place in a stream for a chunk: false if it is none that may come.
fn claim(lane: &Lane, number: u64, len: usize) -> bool {
    let cost = len as u64 + COST;
    let mut coming = lock(&lane.state);
    // What comes twice is dropped.
    if number < coming.next || coming.chunks.contains_key(&number) {
        return false;
    }
    if len > BLOCK || coming.held + cost > WINDOW || number - coming.next > WINDOW / COST {
        coming.fault = Some(Trouble::Nonsense);
        drop(coming);
        lane.bell.ring();
        return false;
    }
    coming.held += cost;
    coming.chunks.insert(number, None);
    true
}

/// A chunk is here.
fn bring(lane: &Lane, number: u64, chunk: Chunk) {
    let mut coming = lock(&lane.state);
    let is_next = number == coming.next;
    coming.chunks.insert(number, Some(chunk));
    let ring = is_next && std::mem::replace(&mut coming.armed, false);
    drop(coming);
    if ring {
        lane.bell.ring();
    }
}
