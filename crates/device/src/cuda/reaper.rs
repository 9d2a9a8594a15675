//! What nobody shall wait for: calls that block while any stream waits, and the end of work whose queue is gone. A thread
//! makes the calls when no stream waits, and lets go what work is done with.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::driver::{Address, Context, Driver, Event, Stream};
use super::gpu::{Entered, Inner};
use super::queue::Marks;
use super::registered::HostMemory;
use super::waits::Waits;

/// How often the thread looks whether no stream waits.
const LOOK: Duration = Duration::from_millis(5);

/// What is to be given back.
pub(super) enum Waste {
    /// An allocation of another process that was opened by a legacy handle.
    Legacy(Address),
    /// Memory of our own in the old way.
    Plain(Address),
    /// What a queue has left behind.
    Work(Remains),
}

/// Work that may not be done, of a queue that is gone.
pub(super) struct Remains {
    pub(super) marks: Marks,
    pub(super) spare: Vec<Event>,
    /// The queue's own stream.
    pub(super) stream: Option<Stream>,
    /// Keeps kernels and context until the work is done.
    pub(super) gpu: Arc<Inner>,
}

impl Remains {
    /// Lets go what is done; gives whether all is.
    fn is_done(&mut self) -> bool {
        let driver = self.gpu.driver;
        while let Some((event, _)) = self.marks.front() {
            // SAFETY: an event of the queue's, which nobody else has.
            if !unsafe { driver.is_over(*event) } {
                return false;
            }
            if let Some((event, _)) = self.marks.pop_front() {
                self.spare.push(event);
            }
        }
        // SAFETY: the queue's own events and stream, used no more.
        unsafe {
            for event in self.spare.drain(..) {
                let _ = driver.destroy_event(event);
            }
            if let Some(stream) = self.stream.take() {
                let _ = driver.destroy_stream(stream);
            }
        }
        true
    }
}

/// The thread, and what it has to do.
pub(super) struct Reaper {
    driver: &'static Driver,
    context: Context,
    waits: Arc<Waits>,
    hosts: Arc<HostMemory>,
    pile: Mutex<Pile>,
}

#[derive(Default)]
struct Pile {
    waste: Vec<Waste>,
    /// Whether the thread is there.
    attended: bool,
}

impl Reaper {
    pub(super) fn new(
        driver: &'static Driver,
        context: Context,
        waits: Arc<Waits>,
        hosts: Arc<HostMemory>,
    ) -> Self {
        Self { driver, context, waits, hosts, pile: Mutex::default() }
    }

    /// Gives it back, now or as soon as no stream waits.
    pub(super) fn take(self: &Arc<Self>, waste: Waste) {
        let mut pile = self.pile();
        pile.waste.push(waste);
        self.attend(&mut pile);
    }

    /// Has a look at host memory that may not be used any more.
    pub(super) fn look(self: &Arc<Self>) {
        self.attend(&mut self.pile());
    }

    fn attend(self: &Arc<Self>, pile: &mut Pile) {
        if !pile.attended {
            let reaper = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name("tensorwire-reaper".into());
            match thread.spawn(move || reap(&reaper)) {
                Ok(_) => pile.attended = true,
                // The next piece of waste tries again.
                Err(error) => tracing::warn!(%error, "no thread to give memory of GPUs back"),
            }
        }
    }

    /// Does what can be done now; gives whether anything is left. Nothing is dropped with a lock held: what goes may be
    /// somebody's object, whose end wants locks of its own.
    fn work(&self) -> bool {
        let Ok(_entered) = Entered::into(self.driver, self.context) else { return true };
        let taken = std::mem::take(&mut self.pile().waste);
        let mut left = Vec::new();
        let (mut done, mut memory) = (Vec::new(), Vec::new());
        for waste in taken {
            match waste {
                Waste::Work(mut remains) => match remains.is_done() {
                    true => done.push(remains),
                    false => left.push(Waste::Work(remains)),
                },
                other => memory.push(other),
            }
        }
        let mut gone = Vec::new();
        let called = self.waits.while_none(|| {
            memory.drain(..).for_each(|waste| self.give_back(&waste));
            // SAFETY: the thread is in the context, and no stream waits.
            gone = unsafe { self.hosts.sweep(self.driver) };
        });
        left.append(&mut memory);
        let is_left = !left.is_empty() || !called && !self.hosts.is_swept();
        self.pile().waste.append(&mut left);
        drop(gone);
        drop(done);
        is_left
    }

    fn give_back(&self, waste: &Waste) {
        // SAFETY: whoever put it on the pile uses it no more.
        let given_back = unsafe {
            match waste {
                Waste::Legacy(address) => self.driver.close_legacy(*address),
                Waste::Plain(address) => self.driver.free_legacy(*address),
                Waste::Work(_) => Ok(()),
            }
        };
        if let Err(error) = given_back {
            tracing::debug!(%error, "giving memory of a GPU back");
        }
    }

    /// Gives everything back now. For the end of the GPU, when nothing is queued: who has work holds the GPU.
    pub(super) fn close(&self) {
        let waste = std::mem::take(&mut self.pile().waste);
        waste.iter().for_each(|waste| self.give_back(waste));
    }

    fn pile(&self) -> MutexGuard<'_, Pile> {
        self.pile.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reaper")
    }
}

/// The life of the thread.
fn reap(reaper: &Weak<Reaper>) {
    // Questions of this thread do not disturb a graph that another one captures.
    if let Some(reaper) = reaper.upgrade() {
        reaper.driver.relax_capture();
    }
    while let Some(reaper) = reaper.upgrade() {
        if !reaper.work() {
            let mut pile = reaper.pile();
            if pile.waste.is_empty() {
                pile.attended = false;
                return;
            }
        }
        drop(reaper);
        std::thread::sleep(LOOK);
    }
}
