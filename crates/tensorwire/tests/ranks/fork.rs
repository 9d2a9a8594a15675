//! Forks of a rank.

use std::time::{Duration, Instant};

use crate::ranks::LONG;

/// Forks; the child runs `body` and ends with its result. Gives the child's pid.
pub(crate) fn fork(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only runs `body`, which these tests keep to what works after a fork in a process with
    // threads under glibc (allocation, writing to a pipe), and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let code = body();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        child => {
            assert!(child > 0, "fork failed");
            child
        }
    }
}

/// Waits for a child and gives its exit code.
pub(crate) fn code_of(child: i32) -> i32 {
    let end = Instant::now() + LONG;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if ended == child {
            return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
        }
        if Instant::now() > end {
            // SAFETY: the child is ours and not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
