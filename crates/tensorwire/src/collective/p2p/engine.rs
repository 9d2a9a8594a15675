//! Which thread moves messages forward, and how threads wait for that.
//!
//! Every thread may do what can be done now, under the lock. A thread that waits for its operation spins for a
//! short while and then sleeps. One thread at a time is the *listener*. It sleeps on this rank's bell, which peers
//! ring. The other threads sleep until the listener has an answer for them or hands its task on. No thread may be
//! waiting for an operation. Then a thread in the background takes care of it and listens when no other thread
//! does.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, DeviceId, Mark, Queue, sync::spin_loop};

use super::RecvAny;
use super::freight::{Course, Freight, Moving, Unload};
use super::operation::{Arrival, End, Hearer, OnGpu};
use super::peers::Peers;
use super::porter::{Job, Porter};
use super::started::Started;
use super::state::State;
use crate::collective::flight::Flights;
use crate::collective::tensor::Tensor;
use crate::collective::work::{Work, call_all};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::interrupt::{Pace, is_interrupt};
use crate::shm::control::Control;
use crate::shm::cores::{Room, Thread};
use crate::shm::record::Recorder;

/// The longest that the thread in the background looks before it sleeps, because its rank may compute meanwhile: some times
/// what it costs to be woken on a machine that is awake (6 us between two processes).
const SPIN: Duration = Duration::from_micros(20);
/// How long the thread in the background stays where there is nothing to do: many groups may be at rest, such as pipes.
const STAY: Duration = Duration::from_secs(1);
/// Longer than the thread in the background ever sleeps.
const FAR: Duration = Duration::from_secs(3600);

/// Sends and receives of one rank to and from all others, which it knows by their places.
#[derive(Debug)]
pub(crate) struct Engine {
    control: Arc<Control>,
    /// All ranks by their places.
    ranks: Vec<usize>,
    /// How long a caller looks before it sleeps, and how long the thread in the background does.
    spin: Duration,
    background_spin: Duration,
    shared: Mutex<Shared>,
    /// For threads that sleep while another one listens.
    turn: Condvar,
    /// For the thread in the background.
    task: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// For messages of GPUs.
    porter: Arc<Porter>,
    flights: Arc<Flights>,
    timeout: Duration,
}

/// A message that was received, and that can be given back until this is dropped.
pub(crate) struct Taken {
    engine: Arc<Engine>,
    arrival: Arrival,
}

impl Taken {
    /// The next receive that asks for it gets it, before those that came later.
    pub(crate) fn give_back(self) {
        self.engine.with(|shared| {
            shared.state.put_back(&self.arrival);
            self.engine.hand_on(shared);
        });
    }
}

/// A started send that can be withdrawn.
pub(crate) struct Revocable {
    engine: Arc<Engine>,
    pub(crate) work: Work,
    number: u64,
}

impl Revocable {
    /// Withdraws it: afterwards it is over. If it was too late, it has gone well.
    pub(crate) fn revoke(&self) {
        self.engine.with(|shared| {
            shared.state.revoke(self.number);
            // What is left of it is to be put.
            self.engine.hand_on(shared);
        });
    }
}

#[derive(Debug)]
struct Shared {
    state: State,
    listener: Listener,
    /// How many threads sleep on `turn`.
    parked: usize,
    /// Whether there is a thread in the background.
    started: bool,
    /// How many threads are about to give it something to do.
    coming: usize,
    closing: bool,
}

impl Shared {
    /// Fails if the group has been closed by another of its handles.
    fn check(&self) -> Result<()> {
        match self.closing {
            true => Err(crate::ranks::closed()),
            false => Ok(()),
        }
    }
}

/// Whether messages of a tensor need a GPU.
fn is_on_gpu(tensor: &Tensor) -> bool {
    tensor.span().device() != DeviceId::Host && !tensor.is_empty()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listener {
    Nobody,
    Background,
    /// The thread that waits for this operation.
    Thread(u64),
}

impl Engine {
    /// Costs no shared memory until the first message. The group has formed: all ranks have said where they may run.
    pub(crate) fn new(
        peers: Peers,
        context: &Arc<Context>,
        (flights, timeout): (&Arc<Flights>, Duration),
    ) -> Result<Self> {
        let peers = Arc::new(peers);
        let control = &peers.control.clone();
        let ranks = peers.ranks().to_vec();
        let porter = Porter::new(Freight::new(context, &peers));
        let state = State::new(peers, context.device(&DeviceId::Host)?)?;
        let room = Room::new(control);
        let shared = Shared {
            state,
            listener: Listener::Nobody,
            parked: 0,
            started: false,
            coming: 0,
            closing: false,
        };
        Ok(Self {
            control: control.clone(),
            ranks,
            spin: room.spin(Thread::Caller),
            background_spin: room.spin(Thread::Worker).min(SPIN),
            shared: Mutex::new(shared),
            turn: Condvar::new(),
            task: Condvar::new(),
            thread: Mutex::default(),
            porter,
            flights: flights.clone(),
            timeout,
        })
    }

    /// The rank at a place.
    pub(crate) fn rank(&self, place: usize) -> usize {
        self.ranks.get(place).copied().unwrap_or(place)
    }

    /// The place of a rank.
    pub(crate) fn place_of(&self, rank: usize) -> Option<usize> {
        match self.ranks.get(rank) {
            Some(there) if *there == rank => Some(rank),
            _ => self.ranks.iter().position(|&other| other == rank),
        }
    }

    /// Records every message from now on.
    pub(crate) fn recorded_by(self, recorder: &Arc<Recorder>) -> Self {
        self.lock().state.recorder = Some(recorder.clone());
        self
    }

    /// Sends a tensor; returns once it may be changed. A small one does not need the receiver for that.
    pub(crate) fn send(
        self: &Arc<Self>,
        tensor: &Tensor,
        to: usize,
        tag: u64,
        deadline: Deadline,
    ) -> Result<()> {
        if is_on_gpu(tensor) {
            return self.start_send(tensor, to, tag, Course::Own(None), deadline)?.wait();
        }
        self.run(deadline, |state, how| state.send((tensor, None), to, tag, how).map(|_| ())).map(|_| ())
    }

    /// Receives into a tensor, from one rank or from any; gives the place of the sender.
    pub(crate) fn recv(
        self: &Arc<Self>,
        tensor: &Tensor,
        from: Option<usize>,
        tag: u64,
        deadline: Deadline,
    ) -> Result<usize> {
        let gpu = self.on_gpu(tensor, None)?;
        let mut arrival = self.receive((tensor, gpu), from, tag, deadline)?;
        if let Some(unload) = arrival.unload.take() {
            let moving = self.unload(&arrival, &unload, Course::Own(None))?;
            self.porter.freight.bring_on(moving, &unload)?;
        }
        Ok(arrival.from)
    }

    /// Receives into a tensor of a GPU on a queue: returns when the copy is on it.
    pub(crate) fn recv_on(
        self: &Arc<Self>,
        tensor: &Tensor,
        from: Option<usize>,
        tag: u64,
        queue: &mut dyn Queue,
        deadline: Deadline,
    ) -> Result<RecvAny> {
        let since = Instant::now();
        let gpu = self.on_gpu(tensor, None)?;
        let mut arrival = self.receive((tensor, gpu), from, tag, deadline)?;
        // An error is the caller's: there is no work yet that could tell it once more.
        let moving = match arrival.unload.take() {
            Some(unload) => {
                let moving = self.unload(&arrival, &unload, Course::On(queue))?;
                match unload.apart.as_ref().is_some_and(|apart| apart.gpu.is_some()) {
                    true => Some((moving, unload)),
                    // A tensor of the host has its bytes when this returns.
                    false => self.porter.freight.bring_on(moving, &unload).map(|()| None)?,
                }
            }
            None => None,
        };
        let (work, completion) = Work::message(format!("recv with tag {tag}"), None, &self.flights);
        let started = Started::new(self);
        started.takes(arrival.from);
        match moving {
            Some((moving, unload)) => {
                completion.on_queue(&moving.mark);
                self.porter.push(Job::Watch(completion, moving, unload, since));
            }
            None => completion.finish(Ok(()), Some(since.elapsed())),
        }
        Ok(RecvAny { work, started, ranks: self.ranks.clone() })
    }

    /// Starts to send a tensor, which must not be changed until the work is done.
    pub(crate) fn start_send(
        self: &Arc<Self>,
        tensor: &Tensor,
        to: usize,
        tag: u64,
        course: Course<'_>,
        deadline: Deadline,
    ) -> Result<Work> {
        let what = format!("send with tag {tag}");
        if !is_on_gpu(tensor) {
            let (work, completion) = Work::pending(what);
            let to_whom = Hearer::Work(completion, None);
            self.start(deadline, to_whom, |state, how| state.send((tensor, None), to, tag, how).map(|_| ()))?;
            return Ok(work);
        }
        let parcel = self.porter.freight.pack(tensor, to, course, deadline)?;
        let token = parcel.lent.then(|| parcel.payload.clone());
        let (work, completion) = Work::message(what, None, &self.flights);
        parcel.copied.iter().for_each(|mark| completion.on_queue(mark));
        let to_whom = Hearer::Work(completion, None);
        let begun = self.start(deadline, to_whom, |state, how| {
            state.send((tensor, Some(parcel)), to, tag, how).map(|_| ())
        });
        if let (Err(_), Some(token)) = (&begun, token.and_then(|token| token.to_vec().ok())) {
            work.set_told();
            self.porter.push(Job::Discard(token));
        }
        begun.map(|()| work)
    }

    /// Starts to receive into a tensor, which must not be touched until the work is done.
    pub(crate) fn start_recv(
        self: &Arc<Self>,
        tensor: &Tensor,
        from: usize,
        tag: u64,
        after: Option<Mark>,
        deadline: Deadline,
    ) -> Result<Work> {
        Ok(self.start_receive(tensor, Some(from), tag, after, deadline)?.0)
    }

    /// Starts to receive a message of any rank.
    pub(crate) fn start_recv_any(
        self: &Arc<Self>,
        tensor: &Tensor,
        tag: u64,
        after: Option<Mark>,
        deadline: Deadline,
    ) -> Result<RecvAny> {
        let (work, started) = self.start_receive(tensor, None, tag, after, deadline)?;
        Ok(RecvAny { work, started, ranks: self.ranks.clone() })
    }

    /// Receives into a tensor of the host, and keeps what it takes to give the message back.
    pub(crate) fn recv_kept(
        self: &Arc<Self>,
        tensor: &Tensor,
        from: usize,
        tag: u64,
        deadline: Deadline,
    ) -> Result<Taken> {
        let arrival = self.receive((tensor, None), Some(from), tag, deadline)?;
        Ok(Taken { engine: self.clone(), arrival })
    }

    /// Starts to send a tensor of the host, and can withdraw that.
    pub(crate) fn start_revocable(
        self: &Arc<Self>,
        tensor: &Tensor,
        to: usize,
        tag: u64,
        deadline: Deadline,
    ) -> Result<Revocable> {
        let (work, completion) = Work::pending(format!("send with tag {tag}"));
        let mut number = 0;
        self.start(deadline, Hearer::Work(completion, None), |state, how| {
            number = state.send((tensor, None), to, tag, how)?;
            Ok(())
        })?;
        Ok(Revocable { engine: self.clone(), work, number })
    }

    /// Has the next message from a rank with this tag be dropped as it comes. Nobody waits for that.
    pub(crate) fn discard(self: &Arc<Self>, from: usize, tag: u64) -> Result<()> {
        let (work, completion) = Work::pending(format!("a drop with tag {tag}"));
        let none = Tensor::private::<u8>(&[])?;
        let far = Deadline::after(Duration::MAX);
        self.start(far, Hearer::Work(completion, None), |state, (_, to_whom)| {
            state.discard(&none, from, tag, to_whom)
        })?;
        work.detach();
        Ok(())
    }

    /// Withdraws a started receive, if nobody was told that it has ended; gives whether it was.
    pub(super) fn withdraw(&self, started: &Started) -> bool {
        let withdrawn = self.with(|shared| {
            let withdrawn = (!shared.closing).then(|| shared.state.withdraw(started)).flatten();
            // The rest of its message is to be taken.
            self.hand_on(shared);
            withdrawn
        });
        // Here, because whoever is called may come back, and the end of a tensor may take time.
        withdrawn.map(call_all).is_some()
    }

    /// Does something while no other thread does anything here.
    pub(super) fn alone<T>(&self, act: impl FnOnce() -> T) -> T {
        let _shared = self.lock();
        act()
    }

    /// Gives up what is pending, also what threads wait for, and ends the thread. Nothing can be called afterwards.
    pub(crate) fn close(&self) {
        self.with(|shared| {
            shared.closing = true;
            shared.state.close();
        });
        self.task.notify_all();
        self.control.bell(self.control.me()).ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A callback of that thread may be who closes the group.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id())
            && thread.join().is_err()
        {
            tracing::warn!("the thread that carries messages has failed");
        }
        self.porter.close();
    }

    /// How messages of GPUs have gone, as a few lines.
    pub(crate) fn explain(&self) -> String {
        self.porter.freight.explain()
    }

    /// This rank has left the group: waits a moment for those that have not taken what it has sent from a GPU.
    pub(crate) fn linger(&self) {
        self.porter.freight.linger(self.timeout);
    }

    /// How many messages nobody has received, and their bytes.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        self.lock().state.kept()
    }

    /// An operation that this thread waits for.
    fn run(
        self: &Arc<Self>,
        deadline: Deadline,
        post: impl FnOnce(&mut State, (Deadline, Hearer)) -> Result<()>,
    ) -> Result<Option<Arrival>> {
        let (number, answer) = self.with(|shared| {
            shared.check()?;
            let number = shared.state.number();
            post(&mut shared.state, (deadline, Hearer::Waiter(number)))?;
            Ok::<_, Error>((number, shared.state.answer(number)))
        })?;
        let answer = answer.unwrap_or_else(|| self.wait(number, deadline));
        // The rest of a message that nobody gets must be taken all the same: its sender waits.
        if answer.is_err() && self.lock().state.has_works() {
            match self.start_thread() {
                // The thread may have been there, asleep.
                Ok(()) => self.with(|shared| {
                    shared.coming -= 1;
                    self.hand_on(shared);
                }),
                Err(error) => tracing::warn!("{error}: what is left of a message blocks those behind it"),
            }
        }
        answer.map_err(|error| *error)
    }

    fn start_receive(
        self: &Arc<Self>,
        tensor: &Tensor,
        from: Option<usize>,
        tag: u64,
        after: Option<Mark>,
        deadline: Deadline,
    ) -> Result<(Work, Arc<Started>)> {
        self.porter.home.get_or_init(|| Arc::downgrade(self));
        let gpu = self.on_gpu(tensor, after)?;
        let started = Started::new(self);
        let what = format!("recv with tag {tag}");
        let (work, completion) = match gpu {
            Some(_) => Work::message(what, Some(started.clone()), &self.flights),
            None => Work::receive(what, started.clone()),
        };
        let hearer = Hearer::Work(completion, Some(started.clone()));
        let begun = self.start(deadline, hearer, |state, how| state.receive((tensor, gpu), from, tag, how));
        begun.inspect_err(|_| work.set_told())?;
        Ok((work, started))
    }

    /// A receive that this thread waits for. What it has got may have to be brought to its tensor.
    fn receive(
        self: &Arc<Self>,
        (tensor, gpu): (&Tensor, Option<OnGpu>),
        from: Option<usize>,
        tag: u64,
        deadline: Deadline,
    ) -> Result<Arrival> {
        let arrival = self.run(deadline, |state, how| state.receive((tensor, gpu), from, tag, how))?;
        arrival.ok_or_else(|| Error::Bug("a receive ended without a message".into()))
    }

    /// Has a message brought to its tensor. One whose sender does not answer is there for the next receive.
    fn unload(&self, arrival: &Arrival, unload: &Unload, course: Course<'_>) -> Result<Moving> {
        self.porter.freight.unload(arrival, unload, course).inspect_err(|error| {
            if error.is_timeout() || is_interrupt(error) {
                self.put_back(arrival);
            } else {
                self.porter.drop_message(arrival);
            }
        })
    }

    /// A message is there again for the next receive.
    pub(super) fn put_back(&self, arrival: &Arrival) {
        self.with(|shared| shared.state.put_back(arrival));
    }

    /// What a receive into a tensor of a GPU needs.
    fn on_gpu(&self, tensor: &Tensor, after: Option<Mark>) -> Result<Option<OnGpu>> {
        let pool = is_on_gpu(tensor).then(|| self.porter.freight.host_pool()).transpose()?;
        Ok(pool.map(|pool| (pool, after)))
    }

    /// An operation that nobody waits for here.
    fn start(
        self: &Arc<Self>,
        deadline: Deadline,
        hearer: Hearer,
        post: impl FnOnce(&mut State, (Deadline, Hearer)) -> Result<()>,
    ) -> Result<()> {
        self.start_thread()?;
        let sooner = self.with(|shared| {
            shared.coming -= 1;
            shared.check()?;
            let before = shared.state.soonest();
            post(&mut shared.state, (deadline, hearer))?;
            // Whoever listens sleeps, perhaps, and does not know that this is to be heard, too.
            if shared.listener != Listener::Nobody {
                shared.state.arm();
            }
            self.hand_on(shared);
            Ok::<_, Error>(before.is_none_or(|before| deadline.instant() < before))
        })?;
        if sooner {
            // Whoever listens shall not sleep longer than this.
            self.control.bell(self.control.me()).ring();
        }
        Ok(())
    }

    fn wait(&self, number: u64, deadline: Deadline) -> End {
        let (mut rested, mut idle) = (false, Instant::now());
        let mut pace = Pace::since(idle);
        let answer = loop {
            let (answer, moved) = self.with(|shared| {
                let moved = self.progress(shared, Listener::Thread(number));
                (shared.state.answer(number), moved)
            });
            if let Some(answer) = answer {
                break answer;
            }
            let now = Instant::now();
            if let Err(error) = pace.look(now) {
                // It may have ended meanwhile; that it was interrupted is what the caller has to hear.
                self.with(|shared| shared.state.interrupt(number));
                break Err(Box::new(error));
            }
            if moved {
                idle = now;
            }
            if now.saturating_duration_since(idle) < self.spin {
                spin_loop();
                continue;
            }
            rested = true;
            self.rest(number, pace.until(deadline));
        };
        if rested {
            self.with(|shared| {
                if shared.listener == Listener::Thread(number) {
                    shared.listener = Listener::Nobody;
                }
                self.hand_on(shared);
            });
        }
        answer
    }

    /// Sleeps until something has happened that may concern this operation, or a moment has come.
    fn rest(&self, number: u64, until: Deadline) {
        let mut shared = self.lock();
        if shared.state.has_answer(number) {
            return;
        }
        match shared.listener {
            Listener::Thread(other) if other != number => {
                shared.state.arm();
                shared.parked += 1;
                let left = until.remaining().unwrap_or_default();
                let mut shared =
                    self.turn.wait_timeout(shared, left).unwrap_or_else(PoisonError::into_inner).0;
                shared.parked -= 1;
                return;
            }
            _ => shared.listener = Listener::Thread(number),
        }
        drop(shared);
        self.listen(Listener::Thread(number), until, |shared| shared.state.has_answer(number));
    }

    /// Does what can be done now, for a thread that may be the listener.
    fn progress(&self, shared: &mut Shared, me: Listener) -> bool {
        let moved = shared.state.progress();
        // Whoever is told that a work is over may wait for a message in turn, on this very thread. It must not wait for a listener
        // that waits for it. The thread in the background has its task taken by whoever wants it.
        if me != Listener::Background && shared.listener == me && shared.state.has_finished() {
            shared.listener = Listener::Nobody;
            self.hand_on(shared);
        }
        moved
    }

    /// Sleeps on the bell until a moment at the latest, unless there is something to do.
    fn listen(&self, me: Listener, until: Deadline, over: impl FnOnce(&Shared) -> bool) {
        self.control.bell(self.control.me()).sleep(&self.control.abort, || {
            self.with(|shared| {
                let moved = self.progress(shared, me);
                (!moved && !over(shared)).then(|| {
                    shared.state.arm();
                    shared.state.until().min(until)
                })
            })
        });
    }

    /// If no thread listens, wakes one that has a reason to.
    fn hand_on(&self, shared: &Shared) {
        match shared.listener {
            Listener::Nobody if shared.parked > 0 => self.turn.notify_all(),
            Listener::Nobody if shared.state.has_works() => self.task.notify_one(),
            _ => {}
        }
    }

    /// Sees to it that there is a thread in the background, and that it stays until it has been given something to do: `coming`
    /// counts down then.
    fn start_thread(self: &Arc<Self>) -> Result<()> {
        let stays = |shared: &mut Shared| {
            shared.coming += usize::from(shared.started);
            shared.started
        };
        if stays(&mut self.lock()) {
            return Ok(());
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shared = self.lock();
        if stays(&mut shared) {
            return Ok(());
        }
        let engine = self.clone();
        let builder = std::thread::Builder::new().name("tensorwire-p2p".into());
        let serve = move || {
            tensorwire_device::gpu::background();
            engine.serve();
        };
        let started = builder.spawn(serve);
        *thread = Some(started.map_err(|e| Error::io("starting a thread that carries messages", e))?);
        (shared.started, shared.coming) = (true, shared.coming + 1);
        Ok(())
    }

    /// The thread in the background.
    fn serve(&self) {
        loop {
            let mut shared = self.lock();
            let wanted = |shared: &Shared| shared.listener == Listener::Nobody && shared.state.has_works();
            let mut idle = Instant::now();
            while !shared.closing && !wanted(&shared) {
                if shared.coming > 0 || shared.state.has_works() {
                    idle = Instant::now();
                }
                if idle.elapsed() >= STAY {
                    shared.started = false;
                    drop(shared);
                    return self.part_with_this_thread();
                }
                shared = self.task.wait_timeout(shared, STAY).unwrap_or_else(PoisonError::into_inner).0;
            }
            if shared.closing {
                return;
            }
            shared.listener = Listener::Background;
            drop(shared);
            self.serve_works();
        }
    }

    /// Nobody joins a thread that has gone by itself.
    fn part_with_this_thread(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // Another one may have come after it.
        if thread.as_ref().is_some_and(|thread| thread.thread().id() == std::thread::current().id()) {
            *thread = None;
        }
    }

    /// Listens until there is nothing to do, or another thread does.
    fn serve_works(&self) {
        let over = |shared: &Shared| {
            shared.closing || shared.listener != Listener::Background || !shared.state.has_works()
        };
        let mut idle = Instant::now();
        loop {
            let (moved, over_now) = self.with(|shared| {
                let moved = shared.state.progress();
                let over = over(shared);
                if over && shared.listener == Listener::Background {
                    shared.listener = Listener::Nobody;
                    self.hand_on(shared);
                }
                (moved, over)
            });
            if over_now {
                return;
            }
            let now = Instant::now();
            if moved {
                idle = now;
            }
            if now.saturating_duration_since(idle) < self.background_spin {
                spin_loop();
            } else {
                self.listen(Listener::Background, Deadline::after(FAR), over);
            }
        }
    }

    /// Does something under the lock. Afterwards tells the threads and works that are concerned.
    fn with<T>(&self, act: impl FnOnce(&mut Shared) -> T) -> T {
        let mut shared = self.lock();
        let value = act(&mut shared);
        let (finished, jobs) = (shared.state.finished(), shared.state.jobs());
        // A thread that waits sleeps on one of the two.
        let (parked, listening) = match shared.state.has_answers() {
            true => (shared.parked > 0, shared.listener != Listener::Nobody),
            false => (false, false),
        };
        drop(shared);
        if parked {
            self.turn.notify_all();
        }
        if listening {
            self.control.bell(self.control.me()).ring();
        }
        for (completion, result, duration, memory) in finished {
            drop(memory);
            completion.finish(result, duration);
        }
        jobs.into_iter().for_each(|job| self.porter.push(job));
        value
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
