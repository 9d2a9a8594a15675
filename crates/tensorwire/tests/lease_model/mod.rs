//! Another process that redeems, holds, hands on and releases what it is told to.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire::device::fd::Connection;
use tensorwire::{Config, Context, Deadline, Lease, Loan, Span, Terms, Token};

use crate::process::{self, Child, Home};

/// Long enough for a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

pub fn soon() -> Deadline {
    Deadline::after(LONG)
}

pub fn context() -> Arc<Context> {
    Context::new(Config::default()).unwrap()
}

/// Memory that begins with a byte.
pub fn memory(context: &Context, bytes: usize, first: u8) -> Span {
    let span = context.alloc(bytes).unwrap();
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

/// The other process, as its parent sees it.
pub struct Other {
    pub child: Child,
    connection: Connection,
}

impl Other {
    pub fn start() -> Self {
        Self::start_as("other")
    }

    pub fn start_as(role: &str) -> Self {
        let home = Home::open();
        let child = Child::start(home.invite(&mut process::command(role)));
        let connection = home.answer().unwrap();
        Self { child, connection }
    }

    pub fn say(&self, order: u8, bytes: &[u8]) {
        self.connection.send(&[&[order], bytes].concat(), &[], soon()).unwrap();
    }

    pub fn hear(&self) -> Result<Vec<u8>, String> {
        let (frame, _) = self.connection.recv(soon()).unwrap();
        match frame.split_first() {
            Some((b'+', rest)) => Ok(rest.to_vec()),
            Some((_, rest)) => Err(String::from_utf8_lossy(rest).into_owned()),
            None => Err("gone".into()),
        }
    }

    pub fn ask(&self, order: u8, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.say(order, bytes);
        self.hear()
    }

    /// Redeems a token; gives the first byte of the memory.
    pub fn redeem(&self, token: &Token) -> Result<u8, String> {
        self.ask(b'r', &token.to_bytes()).map(|bytes| bytes.first().copied().unwrap_or(0))
    }

    /// Releases what it redeemed first.
    pub fn release(&self) {
        self.ask(b'd', &[]).unwrap();
    }

    /// The first byte of what it redeemed first.
    pub fn read(&self) -> u8 {
        self.ask(b'b', &[]).unwrap()[0]
    }

    /// Grants what it redeemed first onward.
    pub fn onward(&self) -> Token {
        Token::from_bytes(&self.ask(b'g', &[]).unwrap()).unwrap()
    }

    /// Grants memory of its own that begins with 77.
    pub fn grants(&self) -> Token {
        Token::from_bytes(&self.ask(b'o', &[]).unwrap()).unwrap()
    }
}

/// What the other process does.
pub fn other(context: &Context) {
    let home = process::call_home().unwrap();
    let (mut loans, mut leases): (Vec<Loan>, Vec<Lease>) = (Vec::new(), Vec::new());
    loop {
        let Ok((frame, _)) = home.recv(Deadline::after(Duration::from_secs(600))) else { return };
        let Some((order, bytes)) = frame.split_first() else { return };
        let answer = match order {
            b'r' => Token::from_bytes(bytes).and_then(|token| context.redeem(&token, soon())).map(|loan| {
                let first = if loan.span().is_empty() { 0 } else { byte(loan.span()) };
                loans.push(loan);
                vec![first]
            }),
            b'd' => {
                drop(loans.remove(0));
                Ok(vec![])
            }
            b'b' => Ok(vec![byte(loans[0].span())]),
            b'g' => context.grant(loans[0].span(), &Terms::default()).map(|lease| {
                let token = lease.token().to_bytes();
                leases.push(lease);
                token
            }),
            b'o' => context.grant(&memory(context, 5000, 77), &Terms::default()).map(|lease| {
                let token = lease.token().to_bytes();
                leases.push(lease);
                token
            }),
            // Memory of the first GPU.
            b'G' => {
                let device = context.all_devices().pop().unwrap();
                let span = Span::whole(device.alloc(5000).unwrap());
                span.write(0, &[77]).unwrap();
                context.grant(&span, &Terms::default()).map(|lease| {
                    let token = lease.token().to_bytes();
                    leases.push(lease);
                    token
                })
            }
            b'l' => {
                leases.clear();
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
