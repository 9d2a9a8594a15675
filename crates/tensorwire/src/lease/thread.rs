//! The thread of leases: hears of releases and of lenders that die, and lets memory go.
//!
//! It is neither the watcher nor the thread that answers for memory: dropping memory may take long, and may need locks of its
//! maker (Python's, say).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorwire_device::sync::Ordering;

use super::Inner;
use super::holder::Lender;

/// The longest sleep. Tokens that live longer are granted without waking the thread: it sees them in time.
pub(super) const NAP: Duration = Duration::from_secs(60);

/// How often devices are looked at that are not done with what was released.
const SETTLE: Duration = Duration::from_millis(1);

/// The life of the thread.
pub(super) fn run(inner: &Inner) {
    while !inner.stop.load(Ordering::Acquire) {
        let lenders: Vec<Arc<Lender>> = inner.holding().lenders().cloned().collect();
        wait(inner, &lenders);
        inner.book.hear();
        for lender in lenders.iter().filter(|lender| lender.is_gone()) {
            lender.end();
        }
        inner.look(Instant::now());
        // Lenders that are gone are forgotten here once their mappings are.
        for lender in lenders.iter().filter(|lender| lender.ended.load(Ordering::Relaxed)) {
            inner.holding().remove(lender);
        }
    }
    inner.close();
}

/// Sleeps until something is ready or due.
fn wait(inner: &Inner, lenders: &[Arc<Lender>]) {
    let mut fds = vec![PollFd::new(&*inner.bell, PollFlags::IN)];
    let connections = lenders.iter().filter_map(|lender| lender.connection.as_ref());
    for connection in connections {
        fds.push(PollFd::from_borrowed_fd(connection.peer().pidfd.as_fd(), PollFlags::IN));
        // Hung up, whatever is asked for.
        fds.push(PollFd::from_borrowed_fd(connection.socket(), PollFlags::empty()));
    }
    let now = Instant::now();
    let (due, settling) = inner.owner().next();
    let due = [due, settling.then(|| now + SETTLE), inner.share.next_to_give_up()];
    let due = due.into_iter().flatten().fold(now + NAP, Instant::min);
    let left = due.saturating_duration_since(now);
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut fds, Some(&left)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => {
            tracing::error!("the lease thread cannot poll: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    if !fds[0].revents().is_empty() {
        let _ = rustix::io::read(&*inner.bell, &mut [0; 8]);
    }
}
