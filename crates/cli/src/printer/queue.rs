//! Output that never blocks its producer. A launcher that waits for a paused terminal could not stop its ranks.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use tensorwire::device::sync::{AtomicBool, AtomicUsize, Ordering};

/// How much may wait to be written before the producer should pause.
const ROOM: usize = 1 << 20;

/// Where bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Out = 0,
    Err = 1,
}

impl Stream {
    pub(crate) const BOTH: [Self; 2] = [Self::Out, Self::Err];
}

/// A thread that writes to stdout and stderr in the order of the calls. Its descriptor becomes readable
/// whenever it has made progress.
#[derive(Debug)]
pub(crate) struct OutputQueue {
    sender: Option<Sender<(Stream, Vec<u8>)>>,
    state: Arc<State>,
    progress: UnixStream,
}

#[derive(Debug, Default)]
struct State {
    pending: AtomicUsize,
    reader_left: AtomicBool,
    done: AtomicBool,
}

impl OutputQueue {
    pub(crate) fn start() -> io::Result<Self> {
        let (progress, signal) = UnixStream::pair()?;
        progress.set_nonblocking(true)?;
        signal.set_nonblocking(true)?;
        let (sender, receiver) = mpsc::channel();
        let state = Arc::new(State::default());
        let writer = {
            let state = state.clone();
            move || write_all(&receiver, &state, &signal)
        };
        thread::Builder::new().name("output".into()).spawn(writer)?;
        Ok(Self { sender: Some(sender), state, progress })
    }

    /// Queues bytes; nothing is lost however much there is, but see [`Self::has_room`].
    pub(crate) fn push(&self, stream: Stream, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        self.state.pending.fetch_add(bytes.len(), Ordering::Relaxed);
        if let Some(sender) = &self.sender {
            // The thread only ends after the sender is gone.
            let _ = sender.send((stream, bytes));
        }
    }

    /// Whether the producer may go on reading what it will push.
    pub(crate) fn has_room(&self) -> bool {
        self.state.pending.load(Ordering::Relaxed) < ROOM
    }

    /// Whether the reader of stdout has left, as `head` does.
    pub(crate) fn reader_left(&self) -> bool {
        self.state.reader_left.load(Ordering::Acquire)
    }

    /// Nothing more will be pushed. Once all is written, [`Self::is_done`] and the descriptor is readable.
    pub(crate) fn close(&mut self) {
        self.sender = None;
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state.done.load(Ordering::Acquire)
    }

    /// Makes the descriptor unreadable until the next progress.
    pub(crate) fn rearm(&mut self) {
        while matches!(self.progress.read(&mut [0; 64]), Ok(1..)) {}
    }
}

impl AsFd for OutputQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.progress.as_fd()
    }
}

fn write_all(receiver: &Receiver<(Stream, Vec<u8>)>, state: &State, mut signal: &UnixStream) {
    let mut open = [true; 2];
    for (stream, bytes) in receiver {
        let written = match stream {
            _ if !open[stream as usize] => Ok(()),
            Stream::Out => {
                let mut out = io::stdout().lock();
                out.write_all(&bytes).and_then(|()| out.flush())
            }
            Stream::Err => io::stderr().lock().write_all(&bytes),
        };
        if let Err(error) = written {
            open[stream as usize] = false;
            if stream == Stream::Out && error.kind() == io::ErrorKind::BrokenPipe {
                state.reader_left.store(true, Ordering::Release);
            }
        }
        state.pending.fetch_sub(bytes.len(), Ordering::Relaxed);
        // A full signal stream is readable already.
        let _ = signal.write(&[0]);
    }
    state.done.store(true, Ordering::Release);
    let _ = signal.write(&[0]);
}
