//! A process that lends and borrows as it is told to, wherever its memory lives, and that dies at a step of a lease.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

mod limits;
mod looks;

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Resource, Signal, getpid, kill_process};
use tensorwire::device::fd::Connection;
use tensorwire::lease::hooks;
use tensorwire::{Context, Deadline, DeviceId, Lease, Loan, Span, Terms, Token};

pub use limits::*;
pub use looks::*;

use crate::process::{self, Child, Home};

/// Where memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    Host,
    /// Shareable memory of the first GPU.
    Gpu,
    /// Memory of the first GPU as other allocators hand it out.
    Plain,
}

impl MemoryKind {
    const ALL: [Self; 3] = [Self::Host, Self::Gpu, Self::Plain];

    /// The role of a process whose memory lives there.
    pub fn role(self) -> String {
        format!("peer {self:?}")
    }

    pub fn of_role(role: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|place| place.role() == role)
    }

    /// The first GPU of this process.
    pub fn gpu(context: &Context) -> DeviceId {
        let devices = context.all_devices();
        devices.get(1).unwrap_or_else(|| panic!("no GPU can be opened")).id()
    }

    /// New memory that begins with a byte.
    pub fn alloc(self, context: &Context, bytes: usize, first: u8) -> Span {
        let region = match self {
            Self::Host => return memory(context, bytes, first),
            Self::Gpu => context.device(&Self::gpu(context)).unwrap().alloc(bytes).unwrap(),
            Self::Plain => open_gpu(context).plain(bytes).unwrap(),
        };
        begins_with(Span::whole(region), first)
    }
}

/// The first GPU with what only it can do.
fn open_gpu(context: &Context) -> tensorwire::device::cuda::Gpu {
    let DeviceId::Gpu(uuid) = MemoryKind::gpu(context) else { panic!("the second device is no GPU") };
    tensorwire::device::cuda::Gpu::open_uuid(uuid).unwrap()
}

/// Why a process did not answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It has ended.
    Gone,
    /// It could not do it.
    Error(String),
}

impl Trouble {
    pub fn text(self) -> String {
        match self {
            Self::Gone => panic!("the other process is gone"),
            Self::Error(text) => text,
        }
    }
}

/// How much a process has of what can leak: descriptors, mappings of our memory, threads; on a GPU, allocations and the
/// bytes that are mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Has(Vec<usize>);

impl Has {
    /// Whether it has no more of anything.
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(now, before)| now <= before)
    }
}

/// The other process, as its parent sees it.
pub struct Peer {
    pub child: Child,
    pub connection: Connection,
}

impl Peer {
    /// One that has done nothing yet: what a first use starts is started by what it is told.
    pub fn start(place: MemoryKind) -> Self {
        Self::start_as(&place.role())
    }

    /// In another role of this binary.
    pub fn start_as(role: &str) -> Self {
        Self::start_with(&mut process::command(role), None)
    }

    /// With a say in how it is started, and where it calls.
    pub fn start_with(command: &mut std::process::Command, dir: Option<&std::path::Path>) -> Self {
        let home = Home::open_in(dir);
        let child = Child::start(home.invite(command));
        let connection = home.answer().unwrap();
        Self { child, connection }
    }

    /// After it has lent and borrowed once: everything that starts with the first use has started, so that what it has can
    /// be compared.
    pub fn warm(self) -> Self {
        self.ask(b'w', &[]).unwrap();
        self
    }

    pub fn say(&self, order: u8, bytes: &[u8]) -> Result<(), Trouble> {
        self.connection.send(&[&[order], bytes].concat(), &[], soon()).map_err(|_| Trouble::Gone)
    }

    pub fn hear(&self) -> Result<Vec<u8>, Trouble> {
        match self.connection.recv(soon()) {
            Ok((frame, _)) if frame.is_empty() => Err(Trouble::Gone),
            Ok((frame, _)) if frame[0] == b'+' => Ok(frame[1..].to_vec()),
            Ok((frame, _)) => Err(Trouble::Error(String::from_utf8_lossy(&frame[1..]).into_owned())),
            Err(error) => panic!("process {} does not answer: {error}", self.child.pid()),
        }
    }

    pub fn ask(&self, order: u8, bytes: &[u8]) -> Result<Vec<u8>, Trouble> {
        self.say(order, bytes)?;
        self.hear()
    }

    /// Grants new memory of so many bytes that begins with `first`; keeps the lease.
    pub fn grants(&self, bytes: u32, first: u8) -> Result<Token, Trouble> {
        let answer = self.ask(b'o', &[&bytes.to_le_bytes()[..], &[first]].concat())?;
        Ok(Token::from_bytes(&answer).unwrap())
    }

    /// Grants again what it granted last.
    pub fn grants_again(&self) -> Result<Token, Trouble> {
        Ok(Token::from_bytes(&self.ask(b'a', &[])?).unwrap())
    }

    /// Grants onward what it redeemed last; keeps the lease.
    pub fn lends_last_onward(&self) -> Result<Token, Trouble> {
        Ok(Token::from_bytes(&self.ask(b'g', &[])?).unwrap())
    }

    /// Redeems a token; gives the first byte of the memory.
    pub fn redeem(&self, token: &Token) -> Result<u8, Trouble> {
        self.ask(b'r', &token.to_bytes()).map(|bytes| bytes[0])
    }

    /// Uses a token up, if that is possible.
    pub fn discard(&self, token: &Token) {
        let _ = self.ask(b'x', &token.to_bytes());
    }

    /// The first bytes of all that it holds.
    pub fn bytes(&self) -> Result<Vec<u8>, Trouble> {
        self.ask(b'b', &[])
    }

    /// So many bytes at an offset of what it redeemed last.
    pub fn look(&self, offset: usize, len: u8) -> Result<Vec<u8>, Trouble> {
        self.ask(b'v', &[&(offset as u64).to_le_bytes()[..], &[len]].concat())
    }

    /// Releases what it redeemed last.
    pub fn release_last(&self) -> Result<(), Trouble> {
        self.ask(b'd', &[]).map(drop)
    }

    /// Releases everything, and drops all leases.
    pub fn drop_all(&self) -> Result<(), Trouble> {
        self.ask(b'D', &[])?;
        self.drop_leases()
    }

    pub fn drop_leases(&self) -> Result<(), Trouble> {
        self.ask(b'l', &[]).map(drop)
    }

    /// Grants that are not over, those that wait, and the processes that hold or may hold some.
    pub fn stats(&self) -> Result<(u8, u8, u8), Trouble> {
        self.ask(b's', &[]).map(|bytes| (bytes[0], bytes[1], bytes[2]))
    }

    /// It kills itself when it comes to a step for the n-th time.
    pub fn dies_at(&self, step: usize, nth: u8) -> Result<(), Trouble> {
        self.ask(b'k', &[step as u8, nth]).map(drop)
    }

    /// The same, but it is stopped there.
    pub fn stops_at(&self, step: usize) -> Result<(), Trouble> {
        self.ask(b'p', &[step as u8, 1]).map(drop)
    }

    pub fn has(&self) -> Has {
        let pid = self.child.pid().to_string();
        let gpu = self.ask(b'u', &[]).map_err(Trouble::text).unwrap();
        let (fds, maps) = usage_of(&pid);
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        let gpu = String::from_utf8(gpu).unwrap();
        let gpu = gpu.split_whitespace().map(|number| number.parse().unwrap());
        Has([fds, maps, threads].into_iter().chain(gpu).collect())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.pid() as i32).unwrap(), signal).unwrap();
    }

    /// Stops it, all of its threads: the kernel takes a moment.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        settles(|| self.is_stopped(), true);
    }

    pub fn is_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.pid())).unwrap();
        let mut stats = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap());
        stats.all(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('T'))
    }

    /// Waits for its end by kill -9.
    pub fn was_killed(&mut self) {
        assert_eq!(self.child.wait().signal(), Some(9));
    }

    /// Ends it in good order.
    pub fn leave(mut self) {
        self.say(b'q', &[]).map_err(|_| "gone").unwrap();
        self.child.succeed();
    }
}

/// What the other process does, if this is one.
pub fn run(role: &str) {
    if let Some(place) = MemoryKind::of_role(role) {
        serve(&context(), place);
    }
}

/// The life of the other process.
pub fn serve(context: &Context, place: MemoryKind) {
    let home = process::call_home().unwrap();
    let (mut loans, mut leases): (Vec<Loan>, Vec<Lease>) = (Vec::new(), Vec::new());
    let mut last: Option<Span> = None;
    let mut files = Vec::new();
    loop {
        let Ok((frame, _)) = home.recv(Deadline::after(Duration::from_secs(600))) else { return };
        let Some((order, bytes)) = frame.split_first() else { return };
        let mut lend = |span: &Span| {
            context.grant(span, &Terms::default()).map(|lease| {
                let token = lease.token().to_bytes();
                leases.push(lease);
                token
            })
        };
        let answer = match order {
            b'q' => return,
            b'w' => {
                let first = context.grant(&place.alloc(context, 1, 0), &Terms::default()).unwrap();
                context.redeem(first.token(), soon()).map(|_| vec![])
            }
            b'o' => {
                let len = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                let span = place.alloc(context, len as usize, bytes[4]);
                let token = lend(&span);
                last = Some(span);
                token
            }
            b'a' => lend(last.as_ref().unwrap()),
            b'g' => lend(loans.last().unwrap().span()),
            b'r' => Token::from_bytes(bytes).and_then(|token| context.redeem(&token, soon())).map(|loan| {
                let first = if loan.span().is_empty() { 0 } else { byte(loan.span()) };
                loans.push(loan);
                vec![first]
            }),
            b'x' => {
                Token::from_bytes(bytes).and_then(|token| context.discard(&token, soon())).map(|()| vec![])
            }
            b'b' => Ok(loans.iter().map(|loan| byte(loan.span())).collect()),
            b'v' => {
                let (offset, len) = (u64::from_le_bytes(bytes[..8].try_into().unwrap()), bytes[8]);
                let mut seen = vec![0; usize::from(len)];
                let read = loans.last().unwrap().span().read(offset as usize, &mut seen);
                read.map(|()| seen).map_err(Into::into)
            }
            b'd' => {
                drop(loans.pop());
                Ok(vec![])
            }
            b'D' => {
                loans.clear();
                Ok(vec![])
            }
            b'l' => {
                last = None;
                leases.clear();
                Ok(vec![])
            }
            b's' => context.lease_stats().map(|stats| {
                vec![stats.granted.0.min(255) as u8, stats.waiting.0.min(255) as u8, stats.holders as u8]
            }),
            b'u' => Ok(match place {
                MemoryKind::Host => String::new(),
                _ => {
                    let usage = open_gpu(context).usage();
                    format!("{} {}", usage.allocations, usage.mapped)
                }
            }
            .into_bytes()),
            b'k' | b'p' => {
                let signal = if *order == b'k' { Signal::KILL } else { Signal::STOP };
                end_at(hooks::STEPS[usize::from(bytes[0])], usize::from(bytes[1]), signal);
                Ok(vec![])
            }
            // Out of descriptors, or nearly; and not any more.
            b'n' => {
                files = fill_descriptors_but(bytes[0]);
                Ok(vec![])
            }
            b'N' => {
                files.clear();
                limit(Resource::Nofile, None);
                Ok(vec![])
            }
            other => panic!("order {other}"),
        };
        let frame = match answer {
            Ok(bytes) => [&b"+"[..], &bytes].concat(),
            Err(error) => [&b"-"[..], error.to_string().as_bytes()].concat(),
        };
        home.send(&frame, &[], soon()).unwrap();
    }
}

fn end_at(step: &'static str, nth: usize, signal: Signal) {
    let passed = AtomicUsize::new(0);
    hooks::set(move |now| {
        if now == step && passed.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            kill_process(getpid(), signal).unwrap();
            if signal == Signal::KILL {
                process::sleep_until_killed();
            }
        }
    });
}
