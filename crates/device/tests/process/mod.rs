//! Other processes of a test: this binary again, told by a variable which part to play.
//!
//! A test file has one `#[test] fn child()` that calls [`role`] and returns at once where there is none.

#![allow(dead_code, unreachable_pub)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tensorwire_device::fd::{self, Address, Connection, Handshake, HandshakeStep, Listener};
use tensorwire_device::{Deadline, Id, Result, Secret};

const ROLE: &str = "TENSORWIRE_TEST_ROLE";
const HOME: &str = "TENSORWIRE_TEST_HOME";

/// The group of every test that does not say otherwise.
pub const GROUP: Id = Id([7; 16]);

/// Long enough for a busy machine, short enough to end a hung test.
pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The part that this process plays, if it is a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// This binary's test `child` in a new process, in the given role.
pub fn command(role: &str) -> Command {
    command_under(&[], role)
}

/// The same, started through another program (`unshare --net`, say).
pub fn command_under(wrapper: &[&str], role: &str) -> Command {
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        [] => Command::new(me),
        [program, args @ ..] => {
            let mut command = Command::new(program);
            command.args(args).arg(me);
            command
        }
    };
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// A child that does not outlive its test.
#[derive(Debug)]
pub struct Child(std::process::Child);

impl Child {
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// kill -9, and the end of it.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// kill -9, and nobody waits for the end of it: for one that may hang in the driver.
    pub fn abandon(mut self) {
        let _ = self.0.kill();
        std::mem::forget(self);
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = soon();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(!deadline.passed(), "the child does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for its end and sees that all its assertions held.
    pub fn succeed(&mut self) {
        let status = self.wait();
        assert!(status.success(), "the child failed: {status}, signal {:?}", status.signal());
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where children call: a listener, and what they must know to be let in.
#[derive(Debug)]
pub struct Home {
    pub listener: Listener,
    pub secret: Secret,
    pub identity: Id,
}

impl Home {
    pub fn open() -> Self {
        Self::open_in(None)
    }

    pub fn open_in(dir: Option<&Path>) -> Self {
        let listener = Listener::bind(dir).unwrap();
        Self { listener, secret: Secret::random().unwrap(), identity: Id::random().unwrap() }
    }

    /// Tells a child how to reach us.
    pub fn invite<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.invite_with(command, &self.secret)
    }

    /// The same with another secret.
    pub fn invite_with<'a>(&self, command: &'a mut Command, secret: &Secret) -> &'a mut Command {
        let secret: String = secret.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        command.env(HOME, format!("{secret} {}", self.listener.address()))
    }

    /// Lets the next child in, or says why not.
    pub fn answer(&self) -> Result<Connection> {
        let handshake = self.next_caller();
        finish(handshake, self.identity, &|group| (group == GROUP).then_some(self.secret))
    }

    /// The next connection, not trusted yet.
    pub fn next_caller(&self) -> Handshake {
        loop {
            readable(&self.listener);
            if let Some(handshake) = Handshake::accept(&self.listener).unwrap() {
                return handshake;
            }
        }
    }
}

/// Goes through a handshake to its end.
pub fn finish(
    mut handshake: Handshake,
    identity: Id,
    secret_of: &dyn Fn(Id) -> Option<Secret>,
) -> Result<Connection> {
    loop {
        readable(&handshake);
        match handshake.step(identity, secret_of)? {
            HandshakeStep::More(more) => handshake = more,
            HandshakeStep::Done(_, connection) => return Ok(connection),
        }
    }
}

/// In a child: connects to the process that started it.
pub fn call_home() -> Result<Connection> {
    let home = std::env::var(HOME).unwrap();
    let (secret, address) = home.split_once(' ').unwrap();
    let byte = |index: usize| u8::from_str_radix(&secret[2 * index..2 * index + 2], 16).unwrap();
    let secret = Secret::from_bytes(std::array::from_fn(byte));
    fd::connect(&address.parse().unwrap(), GROUP, Id::random()?, &secret, soon())
}

/// In a child: where the process that started it listens.
pub fn home_address() -> Address {
    std::env::var(HOME).unwrap().split_once(' ').unwrap().1.parse().unwrap()
}

/// Waits until a descriptor is readable, or its other side is gone.
pub fn readable(fd: &impl AsFd) {
    loop {
        let left = soon().remaining().unwrap();
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left)) {
            Ok(0) => panic!("nothing became readable"),
            Ok(_) => return,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{}", io::Error::from(error)),
        }
    }
}

/// Never comes back: for a child that is to be killed.
pub fn sleep_until_killed() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Prints why a test did not run here.
pub fn skip(reason: impl std::fmt::Display) {
    eprintln!("skipped: {reason}");
}

/// A directory that is removed at the end.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("tw{}", &Id::random().unwrap().to_string()[..12]));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn open_to_all() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = Self::new();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        dir
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn sockets(&self) -> Vec<PathBuf> {
        use std::os::unix::fs::FileTypeExt;
        let entries = std::fs::read_dir(&self.0).unwrap().map(std::io::Result::unwrap);
        entries.filter(|entry| entry.file_type().unwrap().is_socket()).map(|entry| entry.path()).collect()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
