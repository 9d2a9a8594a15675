//! A process that lends and borrows as it is told to, wherever its memory lives, and that dies at a step of a lease.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};
use tensorwire::device::fd::Connection;
use tensorwire::lease::hooks;
use tensorwire::{Context, Deadline, DeviceId, Lease, Loan, Span, Terms, Token};

use crate::lease_model::{byte, context, settles, soon, usage_of};
use crate::process::{self, Child, Home};

/// Where memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    /// Shareable memory of the first GPU.
    Gpu,
    /// Memory of the first GPU as other allocators hand it out.
    Plain,
}

impl Place {
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
        let span = match self {
            Self::Host => context.alloc(bytes).unwrap(),
            Self::Gpu => {
                Span::whole(context.device(&Self::gpu(context)).unwrap().alloc(bytes.max(1)).unwrap())
            }
            Self::Plain => Span::whole(open_gpu(context).plain(bytes.max(1)).unwrap()),
        };
        span.write(0, &[first]).unwrap();
        span
    }
}

/// The first GPU with what only it can do.
fn open_gpu(context: &Context) -> tensorwire::device::cuda::Gpu {
    let DeviceId::Gpu(uuid) = Place::gpu(context) else { panic!("the second device is no GPU") };
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

/// What a process has: descriptors, mappings of our memory, threads, allocations on the GPU.
pub type Has = (usize, usize, usize, String);

/// The other process, as its parent sees it.
pub struct Peer {
    pub child: Child,
    connection: Connection,
}

impl Peer {
    pub fn start(place: Place) -> Self {
        Self::start_with(&mut process::command(&place.role()), None)
    }

    /// With a say in how it is started, and where it calls.
    pub fn start_with(command: &mut std::process::Command, dir: Option<&std::path::Path>) -> Self {
        let home = Home::open_in(dir);
        let child = Child::start(home.invite(command));
        let connection = home.answer().unwrap();
        Self { child, connection }
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
    pub fn onward(&self) -> Result<Token, Trouble> {
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

    /// Releases what it redeemed last.
    pub fn release(&self) -> Result<(), Trouble> {
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
        (fds, maps, threads, String::from_utf8(gpu).unwrap())
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

/// Allows this process so much more of something than it has now; the most again with nothing.
pub fn limit(resource: Resource, more: Option<u64>) {
    let limit = getrlimit(resource);
    let current = more.map_or(limit.maximum, |more| {
        let now = match resource {
            Resource::Nofile => highest_fd() + 1,
            _ => address_space(),
        };
        Some(now + more)
    });
    setrlimit(resource, Rlimit { current, ..limit }).unwrap();
}

fn highest_fd() -> u64 {
    let names = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let open: Vec<u64> = names.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
    // The one that lists them is gone again. Gaps would be room.
    let open: Vec<u64> = open.into_iter().filter(|fd| is_open(*fd)).collect();
    open.into_iter().max().unwrap()
}

fn is_open(fd: u64) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|to| !to.starts_with("/proc"))
}

fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Files that take all numbers below the limit.
pub fn fill_descriptors() -> Vec<std::fs::File> {
    std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect()
}

/// What the other process does, if this is one.
pub fn run(role: &str) {
    if let Some(place) = Place::of_role(role) {
        serve(&context(), place);
    }
}

/// The life of the other process.
pub fn serve(context: &Context, place: Place) {
    let home = process::call_home().unwrap();
    // Everything that starts with the first use has started, so that usage can be compared.
    let first = context.grant(&place.alloc(context, 1, 0), &Terms::default()).unwrap();
    drop(context.redeem(first.token(), soon()).unwrap());
    drop(first);
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
                let first = byte(loan.span());
                loans.push(loan);
                vec![first]
            }),
            b'x' => {
                Token::from_bytes(bytes).and_then(|token| context.discard(&token, soon())).map(|()| vec![])
            }
            b'b' => Ok(loans.iter().map(|loan| byte(loan.span())).collect()),
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
                Place::Host => String::new(),
                _ => {
                    let usage = open_gpu(context).usage();
                    format!("{} allocations, {} bytes", usage.allocations, usage.mapped)
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

/// Takes all descriptors but a few.
pub fn fill_descriptors_but(few: u8) -> Vec<std::fs::File> {
    limit(Resource::Nofile, Some(u64::from(few)));
    let mut files = fill_descriptors();
    files.truncate(files.len().saturating_sub(usize::from(few)));
    files
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
