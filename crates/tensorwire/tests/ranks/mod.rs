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

pub mod random;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tensorwire::config::{Key, LinkKind};
use tensorwire::store::{FileStore, MemoryStore, Store, TcpServer, TcpStore};
use tensorwire::{Config, Context, Error, Group};

/// What nothing in a test may take longer than; far more than anything needs, even on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

const RANK: &str = "TEST_OF_RANKS_RANK";
const WORLD: &str = "TEST_OF_RANKS_WORLD";
/// The port of their store.
pub const PORT: &str = "TEST_OF_RANKS_PORT";
/// Set by tests whose ranks cannot reach the TCP store: the file to use instead.
pub const FILE: &str = "TEST_OF_RANKS_FILE";

/// On which hosts the ranks of a test are. Hosts are labels: their ranks share no memory and talk over loopback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// All on one host, without a label.
    Together,
    /// Each on a host of its own.
    Apart,
    /// Two on each host.
    Pairs,
    /// Each on a host of its own, and what they say is sealed.
    Sealed,
    /// Each on a host of its own, and messages go by UCX.
    Ucx,
}

/// A key of those who have one.
pub const KEY: &str = "what the ranks of a test know and nobody else";

impl Placement {
    /// The label of a rank's host.
    pub fn label(self, rank: usize) -> Option<String> {
        match self {
            Self::Together => None,
            Self::Apart | Self::Sealed | Self::Ucx => Some(format!("alone{rank}")),
            Self::Pairs => Some(format!("pair{}", rank / 2)),
        }
    }

    /// A context of a rank that is a thread.
    pub fn context(self, rank: usize) -> Arc<Context> {
        let Some(label) = self.label(rank) else { return context() };
        let mut config = config_on(&label);
        config.key = (self == Self::Sealed).then(|| Key::new(KEY).unwrap());
        if self == Self::Ucx {
            config.link = LinkKind::Ucx;
        }
        Context::new(config).unwrap()
    }

    /// The command of a rank that is a process. No test here is about beats, so none may be missed on a busy machine.
    pub fn command(self, rank: usize, mut command: Command) -> Command {
        if let Some(label) = self.label(rank) {
            command.env("TENSORWIRE_HOST", label).env("TENSORWIRE_HEARTBEAT", "30");
        }
        if self == Self::Sealed {
            command.env("TENSORWIRE_KEY", KEY);
        }
        if self == Self::Ucx {
            command.env("TENSORWIRE_LINK", "ucx");
        }
        command
    }

    /// Whether a test can run there. It says why if not.
    pub fn is_there(self) -> bool {
        let here = if self == Self::Ucx { tensorwire::ucx_library().map(drop) } else { Ok(()) };
        here.inspect_err(|error| println!("skipped: {error}")).is_ok()
    }
}

/// Whether a rank of a group is on another host.
pub fn is_far(group: &Group, rank: usize) -> bool {
    !group.hosts().iter().any(|ranks| ranks.contains(&rank) && ranks.contains(&group.rank()))
}

/// Whether a group has ranks on other hosts.
pub fn spans_hosts(group: &Group) -> bool {
    group.hosts().len() > 1
}

/// Runs `body` on every rank of a group of `world`, as threads.
pub fn as_threads(world: usize, body: fn(&Group)) {
    as_threads_on(Placement::Together, world, body);
}

/// The same, on these hosts.
pub fn as_threads_on(hosts: Placement, world: usize, body: fn(&Group)) {
    if !hosts.is_there() {
        return;
    }
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..world {
            let store = store.clone();
            scope.spawn(move || {
                let builder = Group::builder().context(&hosts.context(rank)).timeout(LONG);
                body(&builder.from_store(store, rank, world).unwrap());
            });
        }
    });
}

/// Runs `body` on every rank of a group of `world`, as processes. `test` is the name of the test that calls this.
pub fn as_processes(test: &str, world: usize, body: fn(&Group)) {
    as_processes_on(Placement::Together, test, world, body);
}

/// The same, on these hosts.
pub fn as_processes_on(hosts: Placement, test: &str, world: usize, body: fn(&Group)) {
    if let Some(rank) = Rank::of_this_process() {
        body(&rank.group());
        return;
    }
    if !hosts.is_there() {
        return;
    }
    let ranks = Ranks::start_with(test, world, |rank, command| hosts.command(rank, command));
    all_succeed(ranks.ranks);
}

/// Waits for the end of all ranks and wants all to be good. If one does not come, says where each of them is.
pub fn all_succeed(mut ranks: Vec<Process>) {
    ranks.iter_mut().for_each(Process::let_go);
    let end = Instant::now() + LONG;
    while ranks.iter_mut().any(|rank| rank.child.try_wait().unwrap().is_none()) {
        // A little before the ranks' own time-outs, so that they are still there.
        if Instant::now() + LONG / 20 > end {
            let stacks: Vec<String> =
                ranks.iter().map(|rank| format!("rank {}: {}", rank.rank, rank.stacks())).collect();
            panic!("not all have ended: {}", stacks.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks.into_iter().for_each(Process::expect_success);
}

/// Runs `body` once for each rank, each in a thread, and gives what they gave in the order of the ranks.
pub fn on_threads<T: Send>(world: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let body = &body;
                scope.spawn(move || body(rank))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A context with a host label.
pub fn context_on(host: &str) -> Arc<Context> {
    Context::new(config_on(host)).unwrap()
}

fn config_on(host: &str) -> Config {
    let mut config = Config::default();
    config.host = Some(host.to_owned());
    config.heartbeat = Duration::from_secs(30);
    config
}

/// A context with the defaults, whatever the environment says.
pub fn context() -> Arc<Context> {
    Context::new(Config::default()).unwrap()
}

/// An error in one line: its kind, the rank that it names, and its text.
pub fn describe(error: &Error) -> String {
    let kind = match error {
        Error::Peer(fault) => match fault.rank {
            Some(rank) => format!("{:?} {rank}", fault.kind),
            None => format!("{:?} ?", fault.kind),
        },
        Error::TimedOut { .. } => "TimedOut".into(),
        Error::Aborted(_) => "Aborted".into(),
        Error::Misuse(_) => "Misuse".into(),
        Error::Unsupported { .. } => "Unsupported".into(),
        Error::Io { .. } => "Io".into(),
        _ => "Other".into(),
    };
    format!("{kind} | {error}")
}

/// A result in one line.
pub fn outcome<T>(result: &Result<T, Error>) -> String {
    result.as_ref().map_or_else(describe, |_| "ok".into())
}

/// The command behind another one, such as `unshare --net`.
pub fn behind(wrapper: &[&str], command: &Command) -> Command {
    let mut wrapped = Command::new(wrapper[0]);
    wrapped.args(&wrapper[1..]).arg(command.get_program()).args(command.get_args());
    wrapped
}

/// Whether this program can be started behind another one.
pub fn works(wrapper: &[&str]) -> bool {
    let list = Command::new(std::env::current_exe().unwrap());
    let output = behind(wrapper, &list).arg("--list").output();
    output.is_ok_and(|output| output.status.success())
}

/// Prints a reason why a test cannot run here.
pub fn skip(reason: &str) {
    println!("skipped: {reason}");
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
        let store: Arc<dyn Store> = match std::env::var_os(FILE) {
            Some(path) => Arc::new(FileStore::open(path).unwrap()),
            None => Arc::new(TcpStore::connect("127.0.0.1", port as u16, LONG).unwrap()),
        };
        Some(Self { rank: number(RANK)?, world: number(WORLD)?, store })
    }

    /// Its group, formed with the others.
    pub fn group(&self) -> Group {
        self.try_group(LONG).unwrap()
    }

    pub fn try_group(&self, timeout: Duration) -> Result<Group, Error> {
        Group::builder().timeout(timeout).from_store(self.store.clone(), self.rank, self.world)
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

/// Whether the ranks of this test are threads of one process.
pub fn are_threads() -> bool {
    Rank::of_this_process().is_none()
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
                panic!("nothing more was said, or not for {timeout:?}; {}", self.take_errors());
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Closes its input and waits for its end, however that is.
    pub fn finish(&mut self) -> std::process::ExitStatus {
        self.let_go();
        let end = Instant::now() + LONG;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None => assert!(Instant::now() < end, "rank {} did not end", self.rank),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills it as `kill -9` does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Where its threads are, if there is a debugger here that can tell.
    fn stacks(&self) -> String {
        let pid = self.pid().to_string();
        let words = ["--batch", "-ex", "thread apply all bt 16", "-p", &pid];
        let said = Command::new("gdb").args(words).stdin(Stdio::null()).stderr(Stdio::null()).output();
        said.map_or_else(|_| String::new(), |said| String::from_utf8_lossy(&said.stdout).into_owned())
    }

    /// Closes its input, which ends `await_parent` there.
    pub fn let_go(&mut self) {
        drop(self.child.stdin.take());
    }

    /// What it has said that nobody has heard; call it once it has ended.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.lines.iter().collect()
    }

    /// Waits for its end and wants it to be a good one.
    pub fn expect_success(mut self) {
        self.end_well();
    }

    /// The same of one that may be asked afterwards what it has said.
    pub fn end_well(&mut self) {
        self.let_go();
        let end = Instant::now() + LONG;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    let stacks = self.stacks();
                    let _ = self.child.kill();
                    panic!("it did not end; {}{stacks}", self.take_errors());
                }
            }
        };
        assert!(status.success(), "{status}; {}", self.take_errors());
    }

    /// What it wrote to its standard error; call it once it has ended.
    pub fn take_errors(&mut self) -> String {
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

/// Makes tests of one body on all placements: `name::threads` and `name::processes` on one host, and the same in
/// `name::apart` and `name::pairs`. Two ranks are no two pairs, so that worlds of up to two have no `pairs`.
#[macro_export]
macro_rules! on_hosts {
    ($name:ident, 1, $body:expr) => { $crate::on_hosts!(@ $name, 1, $body, apart Apart); };
    ($name:ident, 2, $body:expr) => { $crate::on_hosts!(@ $name, 2, $body, apart Apart, sealed Sealed); };
    ($name:ident, $world:expr, $body:expr) => {
        $crate::on_hosts!(@ $name, $world, $body, apart Apart, pairs Pairs, sealed Sealed);
    };
    (@ $name:ident, $world:expr, $body:expr, $($place:ident $hosts:ident),+) => {
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

            $(mod $place {
                #[allow(unused_imports)]
                use super::*;

                #[test]
                fn threads() {
                    ranks::as_threads_on(ranks::Placement::$hosts, $world, $body);
                }

                #[test]
                fn processes() {
                    let test = concat!(stringify!($name), "::", stringify!($place), "::processes");
                    ranks::as_processes_on(ranks::Placement::$hosts, test, $world, $body);
                }
            })+
        }
    };
}

/// The same, and with messages by UCX where there is a libucp.
#[macro_export]
macro_rules! on_links {
    ($name:ident, 1, $body:expr) => { $crate::on_hosts!($name, 1, $body); };
    ($name:ident, 2, $body:expr) => {
        $crate::on_hosts!(@ $name, 2, $body, apart Apart, sealed Sealed, ucx Ucx);
    };
    ($name:ident, $world:expr, $body:expr) => {
        $crate::on_hosts!(@ $name, $world, $body, apart Apart, pairs Pairs, sealed Sealed, ucx Ucx);
    };
}

/// Makes a test for each named placement of a function that takes the test's name and the placement.
#[macro_export]
macro_rules! in_places {
    ($name:ident, $run:expr, $($place:ident $hosts:ident),+) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            $(#[test]
            fn $place() {
                if ranks::Placement::$hosts.is_there() {
                    $run(concat!(stringify!($name), "::", stringify!($place)), ranks::Placement::$hosts);
                }
            })+
        }
    };
}
