//! A TCP proxy that delays, stalls, cuts and flips.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::ranks::LONG;

/// What is forwarded where.
pub struct Forward {
    pub listener: TcpListener,
    pub to: SocketAddr,
}

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From who has connected.
    There,
    /// To who has connected.
    Back,
}

/// Forwards connections. It ends when this is dropped, and all connections with it.
pub struct Proxy(Arc<Shared>, Option<JoinHandle<()>>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ended: bool,
    stalled: bool,
    delay: Duration,
    /// Bytes that have passed, of all connections together, in each direction.
    passed: [u64; 2],
    cut: [Option<u64>; 2],
    flip: [Option<u64>; 2],
    /// How many connections were cut, and how many bytes flipped.
    hurt: usize,
    /// All that has passed, one direction of a connection after the other, if it is kept.
    kept: Option<Vec<Vec<u8>>>,
    sockets: Vec<TcpStream>,
}

impl Proxy {
    pub fn start(forwards: Vec<Forward>) -> Self {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let own = shared.clone();
        let thread = std::thread::spawn(move || accept(&own, &forwards));
        Self(shared, Some(thread))
    }

    /// Has every piece of at most 64 KiB arrive so much later.
    pub fn delay(&self, delay: Duration) {
        self.0.lock().delay = delay;
    }

    /// Forwards nothing more; connections stay open.
    pub fn stall(&self) {
        self.0.lock().stalled = true;
    }

    /// Forwards again.
    pub fn go_on(&self) {
        self.0.lock().stalled = false;
        self.0.changed.notify_all();
    }

    /// Cuts the connection in which byte `at` of a direction would pass; those before it pass.
    pub fn cut_at(&self, way: Way, at: u64) {
        self.0.lock().cut[way as usize] = Some(at);
    }

    /// Flips a bit in byte `at` of a direction.
    pub fn flip_at(&self, way: Way, at: u64) {
        self.0.lock().flip[way as usize] = Some(at);
    }

    /// From now on it keeps what passes on new connections.
    pub fn keep(&self) {
        self.0.lock().kept = Some(Vec::new());
    }

    /// Whether these bytes have passed one after the other in what it keeps.
    pub fn has_seen(&self, bytes: &[u8]) -> bool {
        let state = self.0.lock();
        let kept = state.kept.as_ref().unwrap();
        kept.iter().any(|kept| kept.windows(bytes.len()).any(|window| window == bytes))
    }

    /// How many bytes have passed.
    pub fn passed(&self, way: Way) -> u64 {
        self.0.lock().passed[way as usize]
    }

    /// Waits until it has cut or flipped.
    pub fn await_hurt(&self) {
        self.wait(|state| state.hurt > 0);
    }

    /// Waits until so many bytes have passed, in both directions together.
    pub fn await_passed(&self, count: u64) {
        self.wait(|state| state.passed.iter().sum::<u64>() >= count);
    }

    fn wait(&self, done: impl Fn(&State) -> bool) {
        let end = Instant::now() + LONG;
        let mut state = self.0.lock();
        while !done(&state) {
            assert!(Instant::now() < end, "only {:?} bytes have passed", state.passed);
            let slice = Duration::from_millis(100);
            state = self.0.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        state.sockets.iter().for_each(close);
        drop(state);
        self.0.changed.notify_all();
        // Its ports are free afterwards.
        let _ = self.1.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides about a piece, and changes it: how many bytes of it pass, and whether the connection ends behind them.
    fn judge(&self, way: Way, piece: &mut [u8]) -> (usize, bool) {
        let mut state = self.lock();
        if !state.delay.is_zero() {
            let delay = state.delay;
            drop(state);
            std::thread::sleep(delay);
            state = self.lock();
        }
        while state.stalled && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (from, count) = (state.passed[way as usize], piece.len() as u64);
        let within = |at: u64| (from..from + count).contains(&at).then(|| (at - from) as usize);
        if let Some(at) = state.flip[way as usize].and_then(within) {
            piece[at] ^= 0x10;
            state.hurt += 1;
        }
        let cut = state.cut[way as usize].and_then(within);
        let passes = cut.unwrap_or(piece.len());
        if cut.is_some() {
            state.cut[way as usize] = None;
            state.hurt += 1;
        }
        state.passed[way as usize] += passes as u64;
        let ends = cut.is_some() || state.ended;
        drop(state);
        self.changed.notify_all();
        (passes, ends)
    }
}

fn accept(shared: &Arc<Shared>, forwards: &[Forward]) {
    while !shared.lock().ended {
        let mut fds: Vec<_> =
            forwards.iter().map(|forward| PollFd::new(&forward.listener, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
        let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect();
        for (forward, _) in forwards.iter().zip(ready).filter(|(_, ready)| *ready) {
            if let Ok((caller, _)) = forward.listener.accept() {
                let (shared, to) = (shared.clone(), forward.to);
                std::thread::spawn(move || forward_one(&shared, caller, to));
            }
        }
    }
}

fn forward_one(shared: &Arc<Shared>, caller: TcpStream, to: SocketAddr) {
    // Whoever is not there is not there for the caller either.
    let Ok(called) = TcpStream::connect(to) else { return };
    let _ = (caller.set_nodelay(true), called.set_nodelay(true));
    let copies = [&caller, &called].map(|socket| socket.try_clone().unwrap());
    shared.lock().sockets.extend(copies);
    std::thread::scope(|scope| {
        scope.spawn(|| pump(shared, Way::There, &caller, &called));
        pump(shared, Way::Back, &called, &caller);
    });
}

/// Carries bytes in one direction until the connection ends.
fn pump(shared: &Shared, way: Way, mut from: &TcpStream, mut to: &TcpStream) {
    let mut bytes = vec![0; 64 << 10];
    let own = shared.lock().kept.as_mut().map(|kept| {
        kept.push(Vec::new());
        kept.len() - 1
    });
    loop {
        let count = match from.read(&mut bytes) {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(count) => count,
            Err(_) => break,
        };
        if let (Some(own), Some(kept)) = (own, &mut shared.lock().kept) {
            kept[own].extend(&bytes[..count]);
        }
        let (passes, ends) = shared.judge(way, &mut bytes[..count]);
        if to.write_all(&bytes[..passes]).is_err() || ends {
            break;
        }
    }
    close(from);
    close(to);
}

fn close(socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Both);
}
