//! A started receive. It is withdrawn when nobody wants it any more, and no message is lost by that.
//!
//! A receive that has not ended is taken out of the engine's lists. One that has ended well may be withdrawn, too, as long
//! as nobody was told: its message is copied out of its tensor and put back in front of those that came later. So a
//! message counts as received when somebody was told, and not when its last byte came. Otherwise a program that gives up
//! a receive just as it ends would lose the message and not know it.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use tensorwire_device::fork::Birth;
use tensorwire_device::sync::{Mutex, MutexGuard, unpoisoned};

use super::engine::Engine;
use super::operation::Arrival;
use crate::collective::work::{Callback, Withdraw, call_all};

/// A started receive, as both its work and the engine know it.
pub(super) struct Started {
    engine: Weak<Engine>,
    /// The place of the rank that its message came from.
    source: OnceLock<usize>,
    stage: Mutex<Stage>,
    /// A forked child has a copy that is its parent's.
    birth: Birth,
}

enum Stage {
    /// In flight, or over with nobody told: then with its message. And what waits for the end of this stage.
    Open(Option<Arrival>, Vec<Callback>),
    /// Its message is being copied into its tensor, or is there. It cannot be withdrawn any more.
    Taking(Vec<Callback>),
    /// Withdrawn after its end, and its message is still being copied out of its tensor.
    Leaving(Vec<Callback>),
    /// Somebody was told, or it has failed.
    Told,
    Withdrawn,
}

impl Started {
    pub(super) fn new(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::downgrade(engine),
            source: OnceLock::new(),
            stage: Mutex::new(Stage::Open(None, Vec::new())),
            birth: Birth::now(),
        })
    }

    /// It has its message. The engine says so, under its lock.
    pub(super) fn arrived(&self, arrival: Arrival) {
        let _ = self.source.set(arrival.from);
        if let Stage::Open(message, _) = &mut *self.lock() {
            *message = Some(arrival);
        }
    }

    /// It has a message that is yet to be brought to its tensor. The engine says so, under its lock.
    pub(super) fn takes(&self, from: usize) {
        let _ = self.source.set(from);
        let mut now = self.lock();
        if let Stage::Open(_, callbacks) = &mut *now {
            *now = Stage::Taking(std::mem::take(callbacks));
        }
    }

    /// Whether it has a message that cannot be withdrawn any more.
    pub(super) fn is_taken(&self) -> bool {
        matches!(*self.lock(), Stage::Taking(_) | Stage::Told)
    }

    /// The place of the rank that its message came from.
    pub(super) fn source(&self) -> Option<usize> {
        self.source.get().copied()
    }

    /// Withdraws it after its end, if nobody was told. Gives its message. Its tensor is in use until it has [`left`](Self::left).
    pub(super) fn take_back(&self) -> Option<Arrival> {
        let mut now = self.lock();
        let Stage::Open(arrival, callbacks) = &mut *now else { return None };
        let arrival = arrival.take()?;
        *now = Stage::Leaving(std::mem::take(callbacks));
        Some(arrival)
    }

    /// Its message was copied out of its tensor. Gives what is to be called now.
    pub(super) fn left(&self) -> Vec<Callback> {
        let mut now = self.lock();
        match &mut *now {
            Stage::Leaving(callbacks) => {
                let callbacks = std::mem::take(callbacks);
                *now = Stage::Withdrawn;
                callbacks
            }
            _ => Vec::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        unpoisoned(self.stage.lock())
    }
}

impl Withdraw for Started {
    fn claim(&self) -> bool {
        let mut now = self.lock();
        match std::mem::replace(&mut *now, Stage::Told) {
            Stage::Open(message, callbacks) => {
                drop(now);
                // The end of a tensor may take time.
                drop(message);
                call_all(callbacks);
                true
            }
            Stage::Taking(callbacks) => {
                drop(now);
                call_all(callbacks);
                true
            }
            Stage::Told => true,
            withdrawn => {
                let leaving = matches!(withdrawn, Stage::Leaving(_));
                *now = withdrawn;
                drop(now);
                // Whoever hears of it may write to the tensor at once: not while its message is being copied.
                if let Some(engine) = leaving.then(|| self.engine.upgrade()).flatten() {
                    engine.alone(|| ());
                }
                false
            }
        }
    }

    fn withdraw(&self) -> bool {
        // Most works are settled when they are dropped. Then nobody is kept waiting.
        if !self.birth.is_ours() || self.is_settled() {
            return false;
        }
        match self.engine.upgrade() {
            Some(engine) => engine.withdraw(self),
            None => false,
        }
    }

    fn abandon(&self) {
        // A child has a copy: it calls nobody. If it cannot be withdrawn, its group is closed or it has just failed.
        if self.birth.is_ours() && !self.is_settled() && !self.withdraw() {
            self.claim();
        }
    }

    fn fail(&self) {
        self.claim();
    }

    fn is_settled(&self) -> bool {
        !matches!(*self.lock(), Stage::Open(..) | Stage::Taking(_) | Stage::Leaving(_))
    }

    fn on_settled(&self, callback: Callback) -> Option<Callback> {
        match &mut *self.lock() {
            Stage::Open(_, callbacks) | Stage::Taking(callbacks) | Stage::Leaving(callbacks) => {
                callbacks.push(callback);
                None
            }
            _ => Some(callback),
        }
    }
}

impl fmt::Debug for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Started({:?})", self.source)
    }
}
