//! A way for tests to stop, delay or kill a rank at a numbered step inside an operation. Not in ordinary builds.

use std::sync::{Arc, OnceLock, RwLock};

use tensorwire_device::sync::{AtomicUsize, Ordering};

use crate::shm::kind::Kind;

/// Where a rank is inside an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Point {
    /// The rank, by its place on its host.
    pub place: usize,
    /// What the operation does.
    pub kind: Kind,
    /// Its number in the group.
    pub number: u32,
    /// 0 before anything, then before each step of the plan, and at last behind all of them.
    pub step: usize,
}

type Hook = Arc<dyn Fn(Point) + Send + Sync>;

fn slot() -> &'static RwLock<Option<Hook>> {
    static HOOK: OnceLock<RwLock<Option<Hook>>> = OnceLock::new();
    HOOK.get_or_init(RwLock::default)
}

/// Calls `hook` at every point of every operation of this process, on the thread that runs it.
pub fn set(hook: impl Fn(Point) + Send + Sync + 'static) {
    if let Ok(mut slot) = slot().write() {
        *slot = Some(Arc::new(hook));
    }
}

/// Calls nothing any more.
pub fn clear() {
    if let Ok(mut slot) = slot().write() {
        *slot = None;
    }
}

/// How many operations ranks of this process have given up so far, all together.
pub fn given_up() -> usize {
    GIVEN_UP.load(Ordering::Acquire)
}

static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

pub(super) fn gives_up() {
    GIVEN_UP.fetch_add(1, Ordering::AcqRel);
}

/// Has every executor that begins from now on use so many threads for large operations, whatever cores there are.
pub fn set_threads(threads: Option<usize>) {
    if let Ok(mut slot) = forced().write() {
        *slot = threads;
    }
}

fn forced() -> &'static RwLock<Option<usize>> {
    static THREADS: RwLock<Option<usize>> = RwLock::new(None);
    &THREADS
}

pub(super) fn threads() -> Option<usize> {
    forced().read().ok().and_then(|slot| *slot)
}

pub(super) fn at(point: Point) {
    let hook = slot().read().ok().and_then(|slot| slot.clone());
    if let Some(hook) = hook {
        hook(point);
    }
}
