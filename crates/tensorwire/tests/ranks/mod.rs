//! Runs a test body as ranks: as threads of this process, and as real processes.
//!
//! A process rank is this test binary started again with the test's own name; the variables below tell it that it is
//! one. A thread rank has a context of its own, so the two meet in the same way.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::exit
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tensorwire::store::{MemoryStore, Store, TcpServer, TcpStore};
use tensorwire::{Config, Context, Group};

/// What nothing in a test may take longer than; far more than anything needs, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

const RANK: &str = "TEST_OF_RANKS_RANK";
const WORLD: &str = "TEST_OF_RANKS_WORLD";
const PORT: &str = "TEST_OF_RANKS_PORT";

/// Runs `body` on every rank of a group of `world`, as threads.
pub fn as_threads(world: usize, body: fn(&Group)) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..world {
            let store = store.clone();
            scope.spawn(move || {
                let context = Context::new(Config::default()).unwrap();
                let builder = Group::builder().context(&context).timeout(LONG);
                body(&builder.from_store(store, rank, world).unwrap());
            });
        }
    });
}

/// Runs `body` on every rank of a group of `world`, as processes. `test` is the name of the test that calls this.
pub fn as_processes(test: &str, world: usize, body: fn(&Group)) {
    if let Some(rank) = Rank::of_this_process() {
        body(&rank.group());
        return;
    }
    let ranks = Ranks::start(test, world);
    for rank in ranks.ranks {
        rank.expect_success();
    }
}

/// A process that is a rank.
pub struct Rank {
    pub rank: usize,
    pub world: usize,
    pub store: Arc<dyn Store>,
}

impl Rank {
    /// This process, if it was started as a rank.
    pub fn of_this_process() -> Option<Self> {
        let number = |name| std::env::var(name).ok()?.parse::<usize>().ok();
        let port = number(PORT)?;
        let store = TcpStore::connect("127.0.0.1", port as u16, LONG).unwrap();
        Some(Self { rank: number(RANK)?, world: number(WORLD)?, store: Arc::new(store) })
    }

    /// Its group, formed with the others.
    pub fn group(&self) -> Group {
        Group::builder().timeout(LONG).from_store(self.store.clone(), self.rank, self.world).unwrap()
    }
}

/// Says something to the parent. Lines start with a mark, so that the test harness's own lines do not count.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n>> {text}").unwrap();
    out.flush().unwrap();
}

/// Blocks until the parent lets this process go on by closing its input.
pub fn await_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// Processes that are ranks, and the store they meet at.
pub struct Ranks {
    pub server: TcpServer,
    pub ranks: Vec<Process>,
}

impl Ranks {
    /// Starts `world` processes of the test.
    pub fn start(test: &str, world: usize) -> Self {
        Self::start_with(test, world, |_, command| command)
    }

    /// The same, with a say in each command: other variables, `unshare` before it, ...
    pub fn start_with(test: &str, world: usize, adapt: impl Fn(usize, Command) -> Command) -> Self {
        let server = TcpServer::bind("127.0.0.1:0").unwrap();
        let ranks = (0..world).map(|rank| Process::start(test, rank, world, &server, &adapt)).collect();
        Self { server, ranks }
    }
}

/// One started process.
pub struct Process {
    pub rank: usize,
    pub child: Child,
    lines: Receiver<String>,
    errors: Option<std::thread::JoinHandle<String>>,
}

impl Process {
    pub fn start(
        test: &str,
        rank: usize,
        world: usize,
        server: &TcpServer,
        adapt: impl Fn(usize, Command) -> Command,
    ) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        let mut command = adapt(rank, command);
        command.env(RANK, rank.to_string()).env(WORLD, world.to_string());
        command.env(PORT, server.local_addr().port().to_string());
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix(">> ") {
                    let _ = sender.send(text.to_owned());
                }
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Self { rank, child, lines, errors: Some(errors) }
    }

    /// The next thing that it says.
    pub fn hear(&mut self) -> String {
        self.hear_within(LONG)
    }

    pub fn hear_within(&mut self, timeout: Duration) -> String {
        match self.lines.recv_timeout(timeout) {
            Ok(line) => line,
            Err(_) => {
                let _ = self.child.kill();
                panic!("nothing said for {timeout:?}; {}", self.take_errors());
            }
        }
    }

    /// Kills it as `kill -9` does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes its input, which ends `await_parent` there.
    pub fn let_go(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for its end and wants it to be a good one.
    pub fn expect_success(mut self) {
        self.let_go();
        let end = Instant::now() + LONG;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    let _ = self.child.kill();
                    panic!("it did not end; {}", self.take_errors());
                }
            }
        };
        assert!(status.success(), "{status}; {}", self.take_errors());
    }

    /// What it wrote to its standard error; call it once it has ended.
    fn take_errors(&mut self) -> String {
        let text = self.errors.take().map(|thread| thread.join().unwrap_or_default());
        format!("rank {}: its errors: {}", self.rank, text.unwrap_or_default())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes two tests of one body: `name::threads` and `name::processes`.
#[macro_export]
macro_rules! on_ranks {
    ($name:ident, $world:expr, $body:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn threads() {
                ranks::as_threads($world, $body);
            }

            #[test]
            fn processes() {
                ranks::as_processes(concat!(stringify!($name), "::processes"), $world, $body);
            }
        }
    };
}
