//! A barrier made of counters, for stores whose servers have none that can be used again.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use super::{Request, Store};
use crate::error::{Error, Result};
use crate::interrupt::{self, is_interrupt};

/// How long after its deadline a caller may take to leave. A caller that cannot leave spoils the barrier for good, so a server
/// that is only slow gets its time; one that is gone closes the connection.
const GRACE: Duration = Duration::from_secs(5);

/// Waits until `world` callers are inside.
///
/// `key/inside` counts arrivals. Each `world` arrivals make a round. The last caller of a round sets `key/round/N`,
/// and the others wait for this key. A caller that gives up takes its arrival back, unless the round is complete.
/// In that case the caller has passed the barrier. The key of a round is removed when the second round after it is
/// complete. If the same callers always meet, none of them can still be waiting for it.
pub fn by_counters(store: &dyn Store, key: &str, world: u64, deadline: Deadline) -> Result<()> {
    let started = Instant::now();
    let size = i64::try_from(world).ok().filter(|size| *size > 0);
    let size = size.ok_or_else(|| Error::misuse(format!("barrier {key:?}: {world} callers cannot meet")))?;
    let inside = format!("{key}/inside");
    let round_key = |round: i64| format!("{key}/round/{round}");
    let soon = || Ord::max(deadline, Deadline::after(GRACE));

    let arrivals = super::number(store.call(Request::Add(inside.clone(), 1), soon())?)?;
    let round = (arrivals - 1).div_euclid(size);
    if arrivals % size == 0 {
        store.call(Request::Set(round_key(round), b"1".to_vec()), soon())?;
        if round >= 2 {
            store.call(Request::Delete(round_key(round - 2)), soon())?;
        }
        return Ok(());
    }
    let failure = match store.call(Request::Wait(vec![round_key(round)]), deadline) {
        Ok(_) => return Ok(()),
        Err(error) => error,
    };
    if is_interrupt(&failure) {
        let _ = interrupt::without(|| leave(store, &inside, (round + 1) * size));
    }
    if !failure.is_timeout() {
        return Err(failure);
    }
    match leave(store, &inside, (round + 1) * size)? {
        None => Ok(()),
        Some(count) => {
            let missing = format!("{} of {world} were inside", count - round * size);
            let doing = super::purpose(&Request::Barrier { key: key.into(), world });
            Err(Error::timed_out(doing, started.elapsed(), missing))
        }
    }
}

/// Takes an arrival back and gives how many there were, or `None` if `complete` were reached.
///
/// A compare-and-set that fails because another left at the same time looks like one that succeeded: both find the
/// same count. So they leave one after the other.
fn leave(store: &dyn Store, inside: &str, complete: i64) -> Result<Option<i64>> {
    let grace = Deadline::after(GRACE);
    let lock = format!("{inside}/leaving");
    let mine = format!("{:016x}", RandomState::new().hash_one(std::process::id())).into_bytes();
    let claim = || Request::CompareSet { key: lock.clone(), expected: Vec::new(), desired: mine.clone() };
    while super::value(store.call(claim(), grace)?)? != mine {
        if grace.passed() {
            // Somebody died while leaving. The barrier has one arrival too many from now on.
            tracing::warn!(key = inside, "an arrival at a store's barrier could not be taken back");
            return count(store, inside, grace).map(|count| (count < complete).then_some(count));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let left = loop {
        let now = count(store, inside, grace)?;
        if now >= complete {
            break None;
        }
        let less = (now - 1).to_string().into_bytes();
        let request = Request::CompareSet {
            key: inside.into(),
            expected: now.to_string().into_bytes(),
            desired: less.clone(),
        };
        if super::value(store.call(request, grace)?)? == less {
            break Some(now);
        }
    };
    store.call(Request::Delete(lock), grace)?;
    Ok(left)
}

fn count(store: &dyn Store, inside: &str, deadline: Deadline) -> Result<i64> {
    // Adding nothing reads the number as every kind writes it.
    super::number(store.call(Request::Add(inside.into(), 0), deadline)?)
}
