//! The keeper: parent of all ranks. One loop over everything that can happen, on one thread.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGINT, SIGPIPE, SIGTSTP, SIGUSR1, SIGUSR2};
use tensorwire::device::sync::AtomicBool;
use tensorwire::store::TcpServer;

use crate::exit::{Failure, Status};
use crate::printer::{OutputQueue, Printer, Stream, wants_color};
use crate::run::console::{Console, Look};
use crate::run::outcome::{self, Outcome};
use crate::run::variables::{self, Run};
use crate::run::{Args, PASSED_ON, RANK, descendants, program};
use crate::this_program;

/// How long a process may outlive its rank without being asked to end, as helpers of Python's do.
const LINGER: Duration = Duration::from_millis(300);

/// Runs the ranks; the exit code is the whole command's.
pub(crate) fn keep(args: Args) -> Result<Status, Failure> {
    let failed = |error: io::Error| Failure::failed(format!("preparing the ranks: {error}"));
    // A session of its own: what the terminal sends goes to the first process, which passes it on.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"rank-keeper");
    descendants::adopt_orphans().map_err(|errno| failed(errno.into()))?;
    for signal in PASSED_ON {
        // A handler and not SIG_IGN, which the ranks would inherit.
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).map_err(failed)?;
    }
    let mut keeper = Keeper::new(args).map_err(failed)?;
    keeper.start_ranks()?;
    while !keeper.is_over() {
        keeper.step().map_err(|error| Failure::failed(format!("watching the ranks: {error}")))?;
    }
    keeper.finish();
    Ok(keeper.status())
}

#[derive(Debug)]
struct Keeper {
    args: Args,
    ranks: Vec<Rank>,
    printer: Printer,
    console: Console,
    output: OutputQueue,
    /// Signals to pass on, and at its end the news that the first process is gone.
    orders: File,
    child_ended: UnixStream,
    /// Serves until the last rank has ended.
    store: Option<TcpServer>,
    stop: Option<Stop>,
    /// When what the ended ranks left running is asked to end; most of it goes by itself.
    tidy_at: Option<Instant>,
    end: End,
}

#[derive(Debug)]
struct Rank {
    pid: Pid,
    outcome: Option<Outcome>,
    /// Until the rank has become its program: where it says why it could not.
    starting: Option<File>,
    pipes: [Option<Pipe>; 2],
    killed: bool,
}

#[derive(Debug)]
struct Pipe {
    from: File,
    log: Option<File>,
}

/// The ranks were asked to end, and are killed after the deadline.
#[derive(Debug, Clone, Copy)]
struct Stop {
    deadline: Instant,
    killing: bool,
}

/// What decides the exit code.
#[derive(Debug, Default)]
struct End {
    failed_first: Option<(usize, Outcome)>,
    start_failure: Option<Status>,
    asked: Option<i32>,
    /// Ranks that were still running when the stop began.
    stopped: Vec<usize>,
    /// Processes of ranks that had already ended.
    left_behind: Vec<Pid>,
    /// The first process is gone: nobody is there to read.
    abandoned: bool,
}

impl Keeper {
    fn new(args: Args) -> io::Result<Self> {
        let terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
        let color = [wants_color(&io::stdout()), wants_color(&io::stderr())];
        let look = Look { ranks: args.nproc as usize, prefix: !args.no_prefix, color, terminal };
        let (child_ended, signal) = UnixStream::pair()?;
        child_ended.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(SIGCHLD, signal)?;
        if let Some(dir) = &args.log_dir {
            std::fs::create_dir_all(dir).map_err(|error| {
                io::Error::new(error.kind(), format!("--log-dir {}: {error}", dir.display()))
            })?;
        }
        let orders = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
        rustix::io::ioctl_fionbio(&orders, true)?;
        Ok(Self {
            args,
            ranks: Vec::new(),
            printer: Printer::new(),
            console: Console::new(look),
            output: OutputQueue::start()?,
            orders: orders.into(),
            child_ended,
            store: None,
            stop: None,
            tidy_at: None,
            end: End::default(),
        })
    }

    fn start_ranks(&mut self) -> Result<(), Failure> {
        let mut id = [0; 8];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Failure::failed(format!("random numbers: {error}")))?;
        let id = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let asked = SocketAddr::from((Ipv4Addr::LOCALHOST, self.args.master_port));
        let store = TcpServer::bind(asked).map_err(|error| Failure::serving(asked, &error))?;
        let run = Run { world: self.args.nproc, port: store.local_addr().port(), id };
        self.store = Some(store);
        let defaults = variables::defaults(run.world);
        if let Some((name, value)) = defaults.iter().find(|(name, _)| *name == "OMP_NUM_THREADS") {
            self.note(&format!("{name} is unset; each rank gets {name}={value}"));
        }
        for rank in 0..run.world {
            match self.start_rank(&run, rank, &defaults) {
                Ok(rank) => self.ranks.push(rank),
                Err(error) => {
                    self.note(&format!("rank {rank} could not be started: {error}"));
                    self.end.start_failure = Some(Status::Failure);
                    self.stop_ranks(Signal::TERM);
                    break;
                }
            }
        }
        Ok(())
    }

    fn start_rank(&self, run: &Run, rank: u32, defaults: &[(&str, &str)]) -> io::Result<Rank> {
        let (starting, report) = io::pipe()?;
        let mut command = this_program::command();
        command.arg(RANK).arg(getpid().as_raw_pid().to_string()).arg("--").args(&self.args.program);
        command.envs(variables::of_rank(run, rank)).envs(defaults.iter().copied());
        command.stdin(report).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        // Without a `Child` nobody but `descendants::reap` waits for it. The parent-death signal counts from the
        // thread that starts the rank, so it is this one, which lives as long as the keeper.
        let mut child = command.spawn()?;
        let pid = Pid::from_raw(child.id() as i32).ok_or(Errno::SRCH)?;
        let starting = OwnedFd::from(starting);
        rustix::io::ioctl_fionbio(&starting, true)?;
        let log = |kind| match &self.args.log_dir {
            Some(dir) => File::create(dir.join(format!("rank-{rank}.{kind}"))).map(Some),
            None => Ok(None),
        };
        let pipe = |from: Option<OwnedFd>, kind| -> io::Result<Option<Pipe>> {
            let Some(from) = from else { return Ok(None) };
            rustix::io::ioctl_fionbio(&from, true)?;
            Ok(Some(Pipe { from: from.into(), log: log(kind)? }))
        };
        let pipes = [
            pipe(child.stdout.take().map(OwnedFd::from), "out")?,
            pipe(child.stderr.take().map(OwnedFd::from), "err")?,
        ];
        Ok(Rank { pid, outcome: None, starting: Some(starting.into()), pipes, killed: false })
    }

    /// Waits for something to happen, and acts on it.
    fn step(&mut self) -> io::Result<()> {
        self.wait()?;
        self.heed_orders();
        while matches!(self.child_ended.read(&mut [0; 64]), Ok(1..)) {}
        self.output.rearm();
        if self.output.has_room() {
            self.read_output();
        }
        for (stream, bytes) in self.console.idle(Instant::now()) {
            self.output.push(stream, bytes);
        }
        self.hear_start_failures();
        self.note_ended(&descendants::reap());
        if self.output.reader_left() && self.stop.is_none() {
            self.end.asked = Some(SIGPIPE);
            self.stop_ranks(Signal::TERM);
        }
        self.end_in_time();
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        let timeout = self.next_deadline().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout + Duration::from_millis(1)).ok());
        let mut fds =
            vec![PollFd::new(&self.child_ended, PollFlags::IN), PollFd::new(&self.output, PollFlags::IN)];
        if !self.end.abandoned {
            fds.push(PollFd::new(&self.orders, PollFlags::IN));
        }
        let room = self.output.has_room();
        for rank in &self.ranks {
            fds.extend(rank.starting.iter().map(|file| PollFd::new(file, PollFlags::IN)));
            let pipes = rank.pipes.iter().flatten().filter(|_| room);
            fds.extend(pipes.map(|pipe| PollFd::new(&pipe.from, PollFlags::IN)));
        }
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let stop = self.stop.map(|stop| match stop.killing {
            // What becomes our child when its parent dies has to be found.
            true => Instant::now() + Duration::from_millis(10),
            false => stop.deadline,
        });
        let tidy_at = self.tidy_at.filter(|at| *at > Instant::now());
        stop.into_iter().chain(tidy_at).chain(self.console.next_idle()).min()
    }

    /// Passes on the signals that the first process was sent.
    fn heed_orders(&mut self) {
        let mut signals = [0; 16];
        while !self.end.abandoned {
            match self.orders.read(&mut signals) {
                Ok(0) => {
                    self.end.abandoned = true;
                    self.kill_now();
                }
                Ok(count) => signals[..count].iter().for_each(|signal| self.pass_on(i32::from(*signal))),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn pass_on(&mut self, signal: i32) {
        let Some(named) = Signal::from_named_raw(signal) else { return };
        match signal {
            SIGTSTP => self.signal_ranks(Signal::STOP),
            SIGCONT | SIGUSR1 | SIGUSR2 => self.signal_ranks(named),
            SIGINT if self.end.asked == Some(SIGINT) => self.kill_now(),
            _ => {
                self.end.asked.get_or_insert(signal);
                self.stop_ranks(named);
            }
        }
    }

    fn read_output(&mut self) {
        let mut buffer = vec![0; 64 << 10];
        for rank in 0..self.ranks.len() {
            for stream in Stream::BOTH {
                self.read_pipe(rank, stream, &mut buffer);
            }
        }
    }

    /// Reads once from a pipe; whether there may be more.
    fn read_pipe(&mut self, rank: usize, stream: Stream, buffer: &mut [u8]) -> bool {
        let slot = &mut self.ranks[rank].pipes[stream as usize];
        let Some(pipe) = slot else { return false };
        match pipe.from.read(buffer) {
            Ok(0) => *slot = None,
            Ok(count) => {
                let bytes = &buffer[..count];
                let logged = pipe.log.as_mut().map_or(Ok(()), |log| log.write_all(bytes));
                if let Err(error) = logged {
                    pipe.log = None;
                    self.note(&format!("the log of rank {rank} ends here: {error}"));
                }
                let shown = self.console.take(rank, stream, bytes, Instant::now());
                self.output.push(stream, shown);
                return true;
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => *slot = None,
        }
        false
    }

    /// A rank that could not become its program says why; all of them would, so it is told once.
    fn hear_start_failures(&mut self) {
        for rank in 0..self.ranks.len() {
            let Some(starting) = &mut self.ranks[rank].starting else { continue };
            let mut errno = [0; 4];
            match starting.read(&mut errno) {
                Ok(4) if self.end.start_failure.is_none() => {
                    let errno = Errno::from_raw_os_error(i32::from_ne_bytes(errno));
                    let failure = program::cannot_start(&self.args.program[0], errno);
                    self.end.start_failure = Some(failure.status());
                    self.note_error(failure.text().unwrap_or_default());
                    self.stop_ranks(Signal::TERM);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                _ => {}
            }
            self.ranks[rank].starting = None;
        }
    }

    fn note_ended(&mut self, ended: &[(Pid, Outcome)]) {
        if !ended.is_empty() {
            // What it wrote before it ended is there by now.
            self.hear_start_failures();
        }
        let mut failures = Vec::new();
        for (pid, outcome) in ended {
            let Some(rank) = self.ranks.iter().position(|rank| rank.pid == *pid) else { continue };
            self.ranks[rank].outcome = Some(*outcome);
            if !outcome.succeeded() {
                failures.push((rank, *outcome));
            }
        }
        // If several ranks are found at once, one that was killed is the likelier cause.
        let first =
            failures.into_iter().min_by_key(|(rank, outcome)| (matches!(outcome, Outcome::Exited(_)), *rank));
        if let (Some((rank, outcome)), None) = (first, self.stop) {
            self.end.failed_first = Some((rank, outcome));
            let pid = self.ranks[rank].pid.as_raw_pid();
            self.note_error(&format!("rank {rank} (pid {pid}) failed first: {outcome}"));
            self.stop_ranks(Signal::TERM);
        }
    }

    /// Asks all ranks to end; only the first request starts the grace time.
    fn stop_ranks(&mut self, signal: Signal) {
        if self.stop.is_none() {
            let running = self.ranks.iter().enumerate().filter(|(_, rank)| rank.outcome.is_none());
            self.end.stopped = running.map(|(rank, _)| rank).collect();
            self.stop = Some(Stop { deadline: Instant::now() + self.args.grace, killing: false });
        }
        self.signal_ranks(signal);
        // A stopped process hears nothing but SIGKILL.
        self.signal_ranks(Signal::CONT);
    }

    fn kill_now(&mut self) {
        self.stop_ranks(Signal::KILL);
        self.stop = Some(Stop { deadline: Instant::now(), killing: false });
    }

    fn signal_ranks(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.outcome.is_none()) {
            // Its number is ours until it is reaped.
            let _ = kill_process_group(rank.pid, signal);
        }
    }

    /// Once the ranks have ended, ends what they left behind; after the deadline, kills.
    fn end_in_time(&mut self) {
        let now = Instant::now();
        let ranks_ended = self.ranks.iter().all(|rank| rank.outcome.is_some());
        let overdue = self.stop.is_some_and(|stop| now >= stop.deadline);
        if !ranks_ended && !overdue {
            return;
        }
        let tidy_at = *self.tidy_at.get_or_insert(now + LINGER);
        let stop = self.stop.get_or_insert(Stop { deadline: tidy_at + self.args.grace, killing: false });
        if overdue && !stop.killing {
            stop.killing = true;
            self.ranks.iter_mut().for_each(|rank| rank.killed = rank.outcome.is_none());
        }
        if overdue {
            self.signal_ranks(Signal::KILL);
        }
        for pid in descendants::children() {
            let known = self.end.left_behind.contains(&pid) || self.ranks.iter().any(|rank| rank.pid == pid);
            if overdue {
                let _ = kill_process(pid, Signal::KILL);
            } else if now >= tidy_at && !known {
                let _ = kill_process(pid, Signal::TERM);
                let _ = kill_process(pid, Signal::CONT);
            } else {
                continue;
            }
            if !known {
                self.end.left_behind.push(pid);
            }
        }
    }

    /// Whether nothing is left below us, or nothing can be done about it.
    fn is_over(&self) -> bool {
        let given_up = |stop: &Stop| stop.killing && stop.deadline.elapsed() > descendants::LAST_WORDS;
        self.ranks.iter().all(|rank| rank.outcome.is_some()) && descendants::children().is_empty()
            || self.stop.as_ref().is_some_and(given_up)
    }

    /// Shows what is still in the pipes, and says what was done.
    fn finish(&mut self) {
        if self.end.abandoned {
            return;
        }
        let mut buffer = vec![0; 64 << 10];
        for rank in 0..self.ranks.len() {
            for stream in Stream::BOTH {
                while self.read_pipe(rank, stream, &mut buffer) {}
            }
        }
        for (stream, bytes) in self.console.rest() {
            self.output.push(stream, bytes);
        }
        self.report();
        self.output.close();
        while !self.output.is_done() && !self.end.abandoned {
            let mut fds =
                [PollFd::new(&self.output, PollFlags::IN), PollFd::new(&self.orders, PollFlags::IN)];
            // Nothing below us is left, so only the reader decides how long this takes, or the user.
            if poll(&mut fds, None).is_err_and(|errno| errno != Errno::INTR) {
                return;
            }
            self.output.rearm();
            self.heed_orders();
            if self.stop.is_some_and(|stop| stop.deadline <= Instant::now() && self.end.asked == Some(SIGINT))
            {
                return;
            }
        }
    }

    fn report(&mut self) {
        let killed: Vec<usize> =
            self.ranks.iter().enumerate().filter(|(_, rank)| rank.killed).map(|(rank, _)| rank).collect();
        let stopped: Vec<usize> =
            self.end.stopped.iter().copied().filter(|rank| !killed.contains(rank)).collect();
        if let Some(signal) = self.end.asked.filter(|signal| *signal != SIGPIPE) {
            self.note(&format!("stopped by {}", outcome::signal_name(signal)));
        } else if !stopped.is_empty() && self.end.failed_first.is_some() {
            self.note(&format!("stopped {}", outcome::ranks(&stopped)));
        }
        if !killed.is_empty() {
            let grace = self.args.grace.as_secs_f64();
            self.note(&format!("killed {}, still running after {grace} s", outcome::ranks(&killed)));
        }
        if !self.end.left_behind.is_empty() {
            let what = descendants::list(&self.end.left_behind);
            self.note(&format!("ended what the ranks left running: {what}"));
        }
        let left = descendants::children();
        if !left.is_empty() {
            self.note_error(&format!("could not kill {}", descendants::list(&left)));
        }
    }

    fn status(&self) -> Status {
        let all_succeeded = self.ranks.iter().all(|rank| rank.outcome.is_some_and(Outcome::succeeded));
        match (&self.end, all_succeeded) {
            (End { start_failure: Some(status), .. }, _) => *status,
            (End { failed_first: Some((_, outcome)), .. }, _) => Status::Program(outcome.code()),
            (End { asked: Some(signal), .. }, false) => Status::Program(outcome::code_of_signal(*signal)),
            (_, false) => Status::Failure,
            (_, true) => Status::Success,
        }
    }

    fn note(&mut self, text: &str) {
        let line = self.console.note(&self.printer.noted(text));
        self.output.push(Stream::Err, line);
    }

    fn note_error(&mut self, text: &str) {
        let line = self.console.note(&self.printer.wrong(text));
        self.output.push(Stream::Err, line);
    }
}
