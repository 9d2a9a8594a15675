//! Waits that their caller can end.
//!
//! A wait of the library that runs on the caller's thread looks up about every 50 ms and asks the hook that the thread
//! has installed with [`looking`], if there is one, whether to go on: Python's signal handlers, for instance, run only
//! when the interpreter is asked for them. A wait that is over sooner never asks.
//!
//! What becomes of the thing that was waited for is what a time-out at the same moment would make of it: a collective is
//! cancelled on all ranks, a receive is withdrawn, work that was started goes on.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use tensorwire_device::Deadline;

use crate::error::Result;

/// How often a wait asks.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Whether to go on; the error ends the wait.
type Look = Rc<dyn Fn() -> Result<()>>;

thread_local! {
    static LOOK: RefCell<Option<Look>> = const { RefCell::new(None) };
}

/// Runs `body`; while it waits on this thread, `look` is called about every 50 ms, and an error that it gives ends the
/// wait and comes back from the call that waited. The hook must not wait for anything of the library itself. A hook
/// inside another takes its place until it is over.
pub fn looking<T>(look: Rc<dyn Fn() -> Result<()>>, body: impl FnOnce() -> T) -> T {
    let _outer = Outer(LOOK.with(|slot| slot.replace(Some(look))));
    body()
}

/// Puts back what was installed before, also if `body` panics.
struct Outer(Option<Look>);

impl Drop for Outer {
    fn drop(&mut self) {
        let outer = self.0.take();
        LOOK.with(|slot| slot.replace(outer));
    }
}

/// Asks the hook of this thread, if it has one.
pub(crate) fn check() -> Result<()> {
    let look = LOOK.with(|slot| slot.borrow().clone());
    look.map_or(Ok(()), |look| look())
}

/// The end of the next slice of a wait, or its deadline if that is sooner.
pub(crate) fn slice(deadline: Deadline) -> Deadline {
    deadline.min(Deadline::after(SLICE))
}
