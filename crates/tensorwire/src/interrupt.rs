//! Waits that their caller can end.
//!
//! A wait of the library that runs on the caller's thread looks up a few times in 100 ms and asks the hook that the
//! thread has installed with [`with_interrupt`], if there is one, whether to go on: Python's signal handlers, for instance, run
//! only when the interpreter is asked for them. A wait that is over sooner does not ask.
//!
//! What becomes of the thing that was waited for is what a time-out at the same moment would make of it: a collective is
//! cancelled on all ranks, a receive is withdrawn, work that was started goes on.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use crate::error::{Error, Result};

/// How long a wait goes on before it asks. An answer may need two: that of the caller's thread, and that of a thread
/// which runs its operation.
pub(crate) const SLICE: Duration = Duration::from_millis(25);

/// Whether to go on; the error ends the wait.
type Look = Rc<dyn Fn() -> Result<()>>;

thread_local! {
    static LOOK: RefCell<Option<Look>> = const { RefCell::new(None) };
}

/// Runs `body`; while it waits on this thread, `look` is called at least every 50 ms. An error that it gives ends the
/// wait and comes back as [`Error::Interrupted`] from the call that waited. The hook must not wait for anything of the
/// library itself. A hook inside another takes its place until it is over.
///
/// ```
/// use std::rc::Rc;
/// use std::time::{Duration, Instant};
/// use tensorwire::store::{MemoryStore, Store};
/// use tensorwire::{Error, interrupt};
///
/// let end = Instant::now() + Duration::from_millis(60);
/// let look = Rc::new(move || match Instant::now() < end {
///     true => Ok(()),
///     false => Err(Error::Interrupted("enough".into())),
/// });
/// let waited = interrupt::with_interrupt(look, || MemoryStore::new().get("a key that nobody sets"));
/// assert!(matches!(waited, Err(Error::Interrupted(_))));
/// ```
pub fn with_interrupt<T>(look: Rc<dyn Fn() -> Result<()>>, body: impl FnOnce() -> T) -> T {
    let _outer = Outer(LOOK.with(|slot| slot.replace(Some(look))));
    body()
}

/// Runs `body` with one more hook, which is asked before the one that is there.
pub(crate) fn with_another<T>(look: impl Fn() -> Result<()> + 'static, body: impl FnOnce() -> T) -> T {
    let outer = LOOK.with(|slot| slot.borrow().clone());
    let both = move || look().and_then(|()| outer.as_ref().map_or(Ok(()), |outer| outer()));
    with_interrupt(Rc::new(both), body)
}

/// Runs `body` without the hook, for a wait whose end is near.
pub(crate) fn without<T>(body: impl FnOnce() -> T) -> T {
    let _outer = Outer(LOOK.with(|slot| slot.replace(None)));
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

/// Whether this thread has a hook.
pub(crate) fn is_looked_for() -> bool {
    LOOK.with(|slot| slot.borrow().is_some())
}

/// Asks the hook of this thread, if it has one. This is for a wait of your own, as in a [`Store`](crate::store::Store) that
/// you implement: ask every 50 ms, and end the wait with the error.
pub fn check() -> Result<()> {
    let look = LOOK.with(|slot| slot.borrow().clone());
    // A hook is the caller's code. What we do around a wait must not be left half done when it panics.
    let looked = look.map_or(Ok(Ok(())), |look| catch_unwind(AssertUnwindSafe(|| look())));
    match looked.unwrap_or_else(|_| Err(Error::Interrupted("the hook panicked".into()))) {
        // Whatever it is, it must not be taken for an error of the thing that was waited for.
        Err(error) if !is_interrupt(&error) => Err(Error::Interrupted(error.to_string())),
        other => other,
    }
}

pub(crate) fn is_interrupt(error: &Error) -> bool {
    matches!(error, Error::Interrupted(_))
}

/// Sleeps, unless the hook says no.
pub(crate) fn sleep(duration: Duration) -> Result<()> {
    let deadline = Deadline::after(duration);
    let mut pace = Pace::new();
    while let Some(left) = pace.until(deadline).remaining() {
        std::thread::sleep(left);
        pace.look(Instant::now())?;
    }
    Ok(())
}

/// Waits for something of a device until the deadline, in slices, and asks the hook between them. The outer error is the hook's,
/// the inner one that of the wait.
pub(crate) fn in_slices(
    deadline: Deadline,
    wait: impl Fn(Deadline) -> tensorwire_device::Result<()>,
) -> Result<tensorwire_device::Result<()>> {
    let mut pace = Pace::since(Instant::now());
    loop {
        let slice = pace.until(deadline);
        match wait(slice) {
            Err(tensorwire_device::Error::TimedOut) if slice < deadline => pace.look(Instant::now())?,
            over => return Ok(over),
        }
    }
}

/// What the hook has said in a wait that can only be told to end.
#[derive(Debug, Default)]
pub(crate) struct Asked(RefCell<Option<Error>>);

impl Asked {
    /// Asks the hook, unless it has said no.
    pub(crate) fn goes_on(&self) -> bool {
        if self.0.borrow().is_none()
            && let Err(error) = check()
        {
            self.0.replace(Some(error));
        }
        self.0.borrow().is_none()
    }

    /// Behind the wait: the hook's error, if it gave one.
    pub(crate) fn end(&self) -> Result<()> {
        self.0.take().map_or(Ok(()), Err)
    }
}

/// The slices of one wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// When this slice is over; nothing if nobody is asked.
    next: Option<Instant>,
}

impl Pace {
    /// For a wait that begins now.
    pub(crate) fn new() -> Self {
        Self { next: is_looked_for().then(|| Instant::now() + SLICE) }
    }

    /// For a wait that began at a moment, without a look at the clock or at the hook: that comes with the end of the
    /// first slice.
    pub(crate) fn since(start: Instant) -> Self {
        Self { next: Some(start + SLICE) }
    }

    /// The end of this slice, or the deadline if that is sooner.
    pub(crate) fn until(&self, deadline: Deadline) -> Deadline {
        match self.next {
            Some(next) if next < deadline.instant() => Deadline::at(next),
            _ => deadline,
        }
    }

    /// Asks the hook if this slice is over, and begins the next one.
    pub(crate) fn look(&mut self, now: Instant) -> Result<()> {
        if self.next.is_some_and(|next| next <= now) {
            check()?;
            // A thread that waits cannot install a hook meanwhile.
            self.next = is_looked_for().then(|| Instant::now() + SLICE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn counting(count: &Rc<Cell<u32>>) -> Look {
        let count = count.clone();
        Rc::new(move || {
            count.set(count.get() + 1);
            Ok(())
        })
    }

    #[test]
    fn a_hook_inside_another_takes_its_place_for_a_while() {
        let (outer, inner) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        assert!(check().is_ok() && !is_looked_for());
        with_interrupt(counting(&outer), || {
            let _ = check();
            with_interrupt(counting(&inner), || {
                let _ = (check(), check());
            });
            let _ = check();
        });
        assert_eq!((outer.get(), inner.get()), (2, 2));
        assert!(!is_looked_for());
    }

    #[test]
    fn a_hook_before_another_lets_that_be_asked() {
        let (outer, inner) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let (count, refuse) = (inner.clone(), Rc::new(Cell::new(false)));
        let refuses = refuse.clone();
        let look = move || {
            count.set(count.get() + 1);
            if refuses.get() { Err(Error::Interrupted("inner".into())) } else { Ok(()) }
        };
        with_interrupt(counting(&outer), || {
            with_another(look, || {
                assert!(check().is_ok());
                refuse.set(true);
                assert!(matches!(check(), Err(Error::Interrupted(text)) if text == "inner"));
            });
            assert!(check().is_ok());
        });
        assert_eq!((outer.get(), inner.get()), (2, 2));
    }

    #[test]
    fn a_hook_goes_with_a_panic() {
        let _ = std::panic::catch_unwind(|| {
            with_interrupt(Rc::new(|| Ok(())), || std::panic::resume_unwind(Box::new(())))
        });
        assert!(!is_looked_for());
    }

    #[test]
    fn a_hook_that_panics_interrupts() {
        let error = with_interrupt(Rc::new(|| panic!("as a test wants it")), check);
        assert!(matches!(error, Err(Error::Interrupted(text)) if text.contains("panicked")));
    }

    #[test]
    fn an_error_of_any_kind_is_an_interruption() {
        let error = with_interrupt(Rc::new(|| Err(Error::timed_out("a", Duration::ZERO, "b"))), check);
        assert!(matches!(error, Err(Error::Interrupted(text)) if text.contains("timed out")));
        let error = with_interrupt(Rc::new(|| Err(Error::Interrupted("x".into()))), check);
        assert!(matches!(error, Err(Error::Interrupted(text)) if text == "x"));
    }

    #[test]
    fn only_a_wait_that_takes_long_asks() {
        let count = Rc::new(Cell::new(0));
        with_interrupt(counting(&count), || {
            let (start, far) = (Instant::now(), Deadline::after(Duration::from_secs(60)));
            let mut pace = Pace::since(start);
            assert!(pace.until(far) < far);
            assert!(pace.look(start).is_ok() && pace.look(start + SLICE / 2).is_ok());
            assert_eq!(count.get(), 0);
            assert!(pace.look(start + SLICE).is_ok());
            assert_eq!(count.get(), 1);
        });
        // Without a hook there are no slices after the first.
        let (start, far) = (Instant::now(), Deadline::after(Duration::from_secs(60)));
        let mut pace = Pace::since(start);
        assert!(pace.look(start + SLICE).is_ok());
        assert_eq!(pace.until(far), far);
    }
}
