//! Where memory goes from one thread to another in this process: the sender puts it here under a random number, and who hears that number
//! takes it. A context knows nothing of other contexts of its process, so this belongs to the process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tensorwire_device::fork::PerProcess;
use tensorwire_device::secret::Id;
use tensorwire_device::subregion::keeping;
use tensorwire_device::{Deadline, Mark, Queue, Span};

use super::lanes;
use crate::error::{Error, PeerFaultKind, Result};

static DESK: PerProcess<Desk> = PerProcess::new(Desk::default);

#[derive(Default)]
struct Desk {
    name: OnceLock<Id>,
    waiting: Mutex<BTreeMap<Id, Weak<Parcel>>>,
}

impl Desk {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<Id, Weak<Parcel>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that is handed over.
#[derive(Debug)]
struct Parcel {
    span: Span,
    /// Behind these it is ready.
    ready: Vec<Mark>,
    /// Behind these it is free.
    used: Mutex<Vec<Mark>>,
}

/// The random name of this process, by which two ends know that they are in one. A forked child has another one.
pub(super) fn process() -> Option<[u8; 16]> {
    let desk = DESK.get();
    if desk.name.get().is_none() {
        let _ = desk.name.set(Id::random().ok()?);
    }
    desk.name.get().map(|name| name.0)
}

/// What the sender has of memory that it hands over. Nobody takes it any more when this is dropped.
#[derive(Debug)]
pub(super) struct Ticket {
    key: Id,
    parcel: Arc<Parcel>,
}

/// What the reader has of it, until this and the last user of its span are gone.
#[derive(Debug)]
pub(super) struct Handed {
    span: Span,
    parcel: Arc<Parcel>,
}

/// Hands memory over that is ready behind these marks.
pub(super) fn put(span: &Span, ready: Vec<Mark>) -> Result<Ticket> {
    let parcel = Arc::new(Parcel { span: span.clone(), ready, used: Mutex::default() });
    let key = Id::random()?;
    DESK.get().waiting().insert(key, Arc::downgrade(&parcel));
    Ok(Ticket { key, parcel })
}

/// Takes memory whose number was heard, once.
pub(super) fn take(token: &[u8]) -> Result<Handed> {
    let waiting = |token: &[u8; 16]| DESK.get().waiting().remove(&Id(*token));
    let parcel = token.try_into().ok().and_then(waiting).and_then(|parcel| parcel.upgrade());
    let Some(parcel) = parcel else {
        let text = "it has taken memory back that it had handed over";
        return Err(Error::peer(PeerFaultKind::Refused, "the other end", None, text));
    };
    let span = &parcel.span;
    let range = span.offset()..span.offset() + span.len();
    let span = Span::whole(keeping(span.region().clone(), range, Box::new(parcel.clone()))?);
    Ok(Handed { span, parcel })
}

impl Ticket {
    /// The number.
    pub(super) fn token(&self) -> [u8; 16] {
        self.key.0
    }

    /// Whether a reader has it.
    pub(super) fn is_held(&self) -> bool {
        Arc::strong_count(&self.parcel) > 1
    }

    /// Nobody takes it from now on.
    pub(super) fn take_back(&self) {
        DESK.get().waiting().remove(&self.key);
    }

    /// Waits until queues of the reader have done what they do with it.
    pub(super) fn wait(&self, doing: &str, by: Deadline) -> Result<()> {
        let used = self.parcel.used.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lanes::pass(&used, doing, by)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.take_back();
    }
}

impl Handed {
    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    pub(super) fn ready(&self) -> &[Mark] {
        &self.parcel.ready
    }

    /// Notes that what is on a queue so far uses it.
    pub(super) fn used_by(&self, queue: &mut dyn Queue) -> Result<()> {
        let mark = queue.mark()?;
        self.parcel.used.lock().unwrap_or_else(PoisonError::into_inner).push(mark);
        Ok(())
    }
}
