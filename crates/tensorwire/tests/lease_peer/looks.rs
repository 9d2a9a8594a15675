//! What tests of leases have in common: memory with a known byte, what a process has, and how long they wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire::{Config, Context, Deadline, Span};

/// Long enough for a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

pub fn soon() -> Deadline {
    Deadline::after(LONG)
}

pub fn context() -> Arc<Context> {
    Context::new(Config::default()).unwrap()
}

/// Host memory that begins with a byte.
pub fn memory(context: &Context, bytes: usize, first: u8) -> Span {
    begins_with(context.alloc(bytes).unwrap(), first)
}

pub fn begins_with(span: Span, first: u8) -> Span {
    span.write(0, &[first]).unwrap();
    span
}

pub fn byte(span: &Span) -> u8 {
    let mut byte = [0];
    span.read(0, &mut byte).unwrap();
    byte[0]
}

/// Repeats a question until the answer is right.
pub fn settles<T: PartialEq + std::fmt::Debug>(mut ask: impl FnMut() -> T, wanted: T) {
    let end = Instant::now() + LONG;
    loop {
        let now = ask();
        if now == wanted {
            return;
        }
        assert!(Instant::now() < end, "{now:?} instead of {wanted:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Descriptors of this process, and mappings of our memory.
pub fn usage() -> (usize, usize) {
    usage_of("self")
}

pub fn usage_of(pid: &str) -> (usize, usize) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let maps = maps.lines().filter(|line| line.contains("memfd:tensorwire")).count();
    (std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count), maps)
}

/// `unshare` with these flags, or nothing and a printed reason where that is not permitted.
pub fn namespaces(flags: &'static [&'static str]) -> Option<Vec<&'static str>> {
    let output = std::process::Command::new("unshare").args(flags).arg("true").output();
    if output.is_ok_and(|output| output.status.success()) {
        return Some([&["unshare"], flags].concat());
    }
    crate::process::skip(format_args!("unshare {} is not permitted", flags.join(" ")));
    None
}
