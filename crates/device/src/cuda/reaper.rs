//! What nobody shall wait for: calls that block while any stream waits, and what work needs until it is done. A thread
//! makes the calls when no stream waits, and lets go what work is done with.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::driver::{Address, Context, Driver};
use super::gpu::Entered;
use super::queue::Holds;
use super::registered::HostMemory;
use super::waits::Waits;

/// How often the thread looks what is done, and whether no stream waits.
const LOOK: Duration = Duration::from_millis(2);
/// How long it stays when there is nothing to do.
const LINGER: Duration = Duration::from_secs(2);
/// How long waste may lie because streams wait. After that no other stream may wait until it is gone.
const PATIENCE: Duration = Duration::from_millis(50);

/// What is to be given back.
pub(super) enum Waste {
    /// An allocation of another process that was opened by a legacy handle.
    Legacy(Address),
    /// Memory of our own in the old way.
    Plain(Address),
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
    /// Since when something lies that only goes while no stream waits.
    since: Option<Instant>,
    /// Streams with work that may not be done.
    holds: Vec<Arc<Holds>>,
    /// What may be dropped anywhere but where it was given away.
    gone: Vec<Box<dyn Any + Send>>,
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

    /// Looks after the work of a stream from now on.
    pub(super) fn note(self: &Arc<Self>, holds: Arc<Holds>) {
        let mut pile = self.pile();
        pile.holds.push(holds);
        self.attend(&mut pile);
    }

    /// Drops it on the thread: for who may not call the driver, or wait.
    pub(super) fn drop_later(self: &Arc<Self>, what: Box<dyn Any + Send>) {
        let mut pile = self.pile();
        pile.gone.push(what);
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
        let gone = std::mem::take(&mut self.pile().gone);
        drop(gone);
        // Without anything to do the driver is not called: the process may be at its end.
        if self.is_clean() {
            return false;
        }
        let Ok(_entered) = Entered::into(self.driver, self.context) else { return true };
        let (mut waste, holds) = {
            let mut pile = self.pile();
            (std::mem::take(&mut pile.waste), std::mem::take(&mut pile.holds))
        };
        let (mut busy, done): (Vec<_>, Vec<_>) = holds.into_iter().partition(Holds::look);
        let mut gone = Vec::new();
        if waste.is_empty() && self.hosts.is_swept() {
            self.want_nothing();
        } else {
            let since = *self.pile().since.get_or_insert_with(Instant::now);
            self.waits.want(since.elapsed() > PATIENCE);
            self.waits.while_none(|| {
                waste.drain(..).for_each(|waste| self.give_back(&waste));
                // SAFETY: the thread is in the context, and no stream waits.
                gone = unsafe { self.hosts.sweep(self.driver) };
                self.pile().since = None;
            });
        }
        let mut pile = self.pile();
        pile.waste.append(&mut waste);
        pile.holds.append(&mut busy);
        drop(pile);
        drop((gone, done));
        !self.is_clean()
    }

    /// Whether there is nothing to do.
    fn is_clean(&self) -> bool {
        let clean = {
            let pile = self.pile();
            pile.waste.is_empty() && pile.holds.is_empty()
        };
        let clean = clean && self.hosts.is_swept();
        if clean {
            self.want_nothing();
        }
        clean
    }

    /// Streams may wait: nothing lies that only goes while none does.
    fn want_nothing(&self) {
        self.waits.want(false);
        self.pile().since = None;
    }

    fn give_back(&self, waste: &Waste) {
        // SAFETY: whoever put it on the pile uses it no more.
        let given_back = unsafe {
            match waste {
                Waste::Legacy(address) => self.driver.close_legacy(*address),
                Waste::Plain(address) => self.driver.free_legacy(*address),
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
    let mut busy = Instant::now();
    while let Some(reaper) = reaper.upgrade() {
        if reaper.work() {
            busy = Instant::now();
        } else if busy.elapsed() > LINGER {
            let mut pile = reaper.pile();
            if pile.waste.is_empty() && pile.holds.is_empty() && pile.gone.is_empty() {
                pile.attended = false;
                return;
            }
        }
        drop(reaper);
        std::thread::sleep(LOOK);
    }
}
