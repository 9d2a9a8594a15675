//! What nobody shall wait for: calls that block while any stream waits, and the end of work whose queue is gone. A thread
//! makes the calls when no stream waits, and lets go what work is done with.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::driver::{Address, Context, Driver, Event, Stream};
use super::gpu::Entered;
use super::queue::Marks;
use super::waits::Waits;
use crate::device::Region;

/// How often the thread looks whether no stream waits.
const LOOK: Duration = Duration::from_millis(5);

/// What is to be given back.
pub(super) enum Waste {
    /// Registered host memory, and what keeps it there until it is not.
    Registered { at: usize, _region: Arc<dyn Region> },
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
}

impl Remains {
    /// Lets go what is done; gives whether all is.
    fn is_done(&mut self, driver: &Driver) -> bool {
        while let Some((event, _)) = self.marks.front() {
            // After an error of the device nothing runs any more.
            // SAFETY: an event of the queue's, which nobody else has.
            if !unsafe { driver.is_done(*event) }.unwrap_or(true) {
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
    waste: Mutex<Pile>,
}

#[derive(Default)]
struct Pile {
    waste: Vec<Waste>,
    /// Whether the thread is there.
    attended: bool,
}

impl Reaper {
    pub(super) fn new(driver: &'static Driver, context: Context, waits: Arc<Waits>) -> Self {
        Self { driver, context, waits, waste: Mutex::default() }
    }

    /// Gives it back, now or as soon as no stream waits.
    pub(super) fn take(self: &Arc<Self>, waste: Waste) {
        let mut pile = self.pile();
        pile.waste.push(waste);
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

    /// Does what can be done now; gives whether anything is left.
    fn work(&self) -> bool {
        let Ok(_entered) = Entered::into(self.driver, self.context) else { return true };
        let mut left = std::mem::take(&mut self.pile().waste);
        left.retain_mut(|waste| match waste {
            Waste::Work(remains) => !remains.is_done(self.driver),
            Waste::Registered { .. } | Waste::Legacy(_) | Waste::Plain(_) => true,
        });
        let (work, memory): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|waste| matches!(waste, Waste::Work(_)));
        let mut left = work;
        let mut memory = Some(memory);
        self.waits.while_none(|| {
            for waste in memory.take().unwrap_or_default() {
                // SAFETY: whoever put it here uses it no more.
                let given_back = unsafe {
                    match waste {
                        Waste::Registered { at, .. } => self.driver.unregister(at),
                        Waste::Legacy(address) => self.driver.close_legacy(address),
                        Waste::Plain(address) => self.driver.free_legacy(address),
                        Waste::Work(_) => Ok(()),
                    }
                };
                if let Err(error) = given_back {
                    tracing::debug!(%error, "giving memory of a GPU back");
                }
            }
        });
        left.extend(memory.unwrap_or_default());
        let mut pile = self.pile();
        pile.waste.extend(left);
        !pile.waste.is_empty()
    }

    fn pile(&self) -> MutexGuard<'_, Pile> {
        self.waste.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        // Nobody can wait any more: queues hold the GPU, which holds this.
        self.work();
    }
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reaper")
    }
}

/// The life of the thread.
fn reap(reaper: &Weak<Reaper>) {
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
