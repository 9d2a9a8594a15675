//! Hardware queues: threads that run the commands of their streams, all in the order in which they were submitted.
//!
//! A thread begins with the first command and ends when the last queue of the GPU is gone and all that was submitted is done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Inner;
use super::hook::{self, Step};
use super::queue::Command;
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::flag::Abort;
use crate::host::Host;
use crate::sync::{AtomicU64, AtomicUsize, Condvar, Mutex, Ordering, unpoisoned};

/// How often someone who waits for a stream looks whether it must give up.
const LOOK: Duration = Duration::from_millis(1);

/// The hardware queues that a process has on a GPU.
#[derive(Debug)]
pub(super) struct Channels {
    channels: Vec<Channel>,
    /// Queues that are open.
    open: AtomicUsize,
    /// The number of the next stream.
    next: AtomicU64,
    /// Commands that have begun.
    begun: AtomicU64,
}

#[derive(Debug, Default)]
struct Channel {
    state: Mutex<Submitted>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Submitted {
    commands: VecDeque<(Arc<Stream>, Command)>,
    /// Whether the thread is there.
    running: bool,
}

/// What a queue and the thread that does its work share.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) number: u64,
    state: Mutex<Progress>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Commands that are not done.
    pending: usize,
    /// What went wrong first since the last finish.
    failure: Option<Error>,
}

impl Channels {
    pub(super) fn new(count: usize) -> Self {
        Self {
            channels: (0..count).map(|_| Channel::default()).collect(),
            open: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            begun: AtomicU64::new(0),
        }
    }

    /// A stream for a queue that opens.
    pub(super) fn open(&self) -> Arc<Stream> {
        self.open.fetch_add(1, Ordering::Relaxed);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Arc::new(Stream { number, state: Mutex::default(), idle: Condvar::new() })
    }

    /// A queue is gone. What it submitted runs on.
    pub(super) fn close(&self) {
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            for channel in &self.channels {
                // With the lock, so that no thread is between its look and its sleep.
                let _state = unpoisoned(channel.state.lock());
                channel.changed.notify_all();
            }
        }
    }

    /// How many commands have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// How many threads there are now.
    pub(super) fn threads(&self) -> usize {
        self.channels.iter().filter(|channel| unpoisoned(channel.state.lock()).running).count()
    }

    fn channel(&self, stream: &Stream) -> (usize, &Channel) {
        let index = (stream.number % self.channels.len() as u64) as usize;
        (index, &self.channels[index])
    }
}

/// Submits a command of a stream.
pub(super) fn submit(gpu: &Arc<Inner>, stream: &Arc<Stream>, command: Command) -> Result<()> {
    let (index, channel) = gpu.channels.channel(stream);
    let mut state = unpoisoned(channel.state.lock());
    if !state.running {
        let gpu = gpu.clone();
        std::thread::Builder::new()
            .name(format!("test-gpu-{}-{index}", gpu.number))
            .spawn(move || run(&gpu, index))
            .map_err(|e| Error::io("starting the thread of a hardware queue", e))?;
        state.running = true;
    }
    unpoisoned(stream.state.lock()).pending += 1;
    state.commands.push_back((stream.clone(), command));
    channel.changed.notify_all();
    Ok(())
}

/// The life of a hardware queue.
fn run(gpu: &Arc<Inner>, index: usize) {
    let channel = &gpu.channels.channels[index];
    let mut host = Host.queue();
    while let Some((stream, command)) = next(&gpu.channels, channel) {
        let number = gpu.channels.begun.fetch_add(1, Ordering::Relaxed);
        hook::at(Step { gpu: gpu.number, stream: stream.number, kind: command.kind(), number });
        let done = match &mut host {
            Ok(host) => command.run(&mut **host),
            Err(error) => Err(error.clone()),
        };
        // What the command held is let go before anybody hears that it is done.
        drop(command);
        stream.done(done);
    }
}

/// The next command, or nothing if there will be none.
fn next(channels: &Channels, channel: &Channel) -> Option<(Arc<Stream>, Command)> {
    let mut state = unpoisoned(channel.state.lock());
    loop {
        if let Some(next) = state.commands.pop_front() {
            return Some(next);
        }
        if channels.open.load(Ordering::Acquire) == 0 {
            state.running = false;
            return None;
        }
        state = unpoisoned(channel.changed.wait(state));
    }
}

impl Stream {
    /// Whether everything that was submitted is done.
    pub(super) fn is_idle(&self) -> bool {
        unpoisoned(self.state.lock()).pending == 0
    }

    /// Notes what went wrong, unless something has before.
    pub(super) fn fail(&self, why: Error) {
        unpoisoned(self.state.lock()).failure.get_or_insert(why);
    }

    /// What went wrong since the last call.
    pub(super) fn failure(&self) -> Option<Error> {
        unpoisoned(self.state.lock()).failure.take()
    }

    /// Waits until everything that was submitted is done.
    pub(super) fn drain(&self, abort: Option<&Abort>, deadline: Deadline) -> Result<()> {
        let mut state = unpoisoned(self.state.lock());
        while state.pending != 0 {
            if abort.is_some_and(Abort::is_set) {
                return Err(Error::Aborted);
            }
            let left = deadline.remaining().ok_or(Error::TimedOut)?;
            state = unpoisoned(self.idle.wait_timeout(state, left.min(LOOK))).0;
        }
        Ok(())
    }

    fn done(&self, done: Result<()>) {
        let mut state = unpoisoned(self.state.lock());
        if let Err(error) = done {
            state.failure.get_or_insert(error);
        }
        state.pending -= 1;
        if state.pending == 0 {
            self.idle.notify_all();
        }
    }
}

/// Looks until something is so: quickly at first, then with rests, because there may be more threads than cores.
pub(super) fn until(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        match begin.elapsed() {
            short if short < Duration::from_micros(50) => std::thread::yield_now(),
            short if short < Duration::from_millis(5) => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}
