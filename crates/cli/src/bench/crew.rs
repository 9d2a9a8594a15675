//! The ranks of one library, each a process that takes orders.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tensorwire::Deadline;
use tensorwire::store::TcpServer;

use super::fair::Side;
use super::order::{Answer, Order};
use super::spawn::Processes;

/// How long a rank that is told to end, or whose partner has failed, may take.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// How often the processes are looked at while their answers are awaited.
const LOOK: Duration = Duration::from_millis(200);

/// Ranks of one library.
#[derive(Debug)]
pub(super) struct Crew {
    /// The library, as JSON lines and columns call it.
    pub(super) peer: &'static str,
    /// The library in words, with its version.
    pub(super) about: String,
    /// Whether its ranks call it through torch.
    pub(super) torch: bool,
    /// Whether each rank has a core.
    pub(super) bound: bool,
    processes: Processes,
    seats: Vec<Seat>,
    events: Receiver<(usize, Event)>,
    patience: Duration,
    /// What the ranks need while they live.
    kept: Option<TcpServer>,
}

/// The ends of the pipes to and from one rank.
#[derive(Debug)]
pub(super) struct Pipes {
    pub(super) orders: File,
    pub(super) answers: File,
}

impl Pipes {
    /// Those of a rank that is started now. Or why it cannot be.
    pub(super) fn of(processes: &mut Processes, rank: String, mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let lost = format!("{rank} has no pipes");
        let child = processes.start(rank, &mut command);
        let child = child.map_err(|failure| failure.text().unwrap_or_default().to_owned())?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(lost);
        };
        Ok(Self { orders: OwnedFd::from(orders).into(), answers: OwnedFd::from(answers).into() })
    }
}

#[derive(Debug)]
struct Seat {
    orders: File,
    pid: Option<u32>,
}

#[derive(Debug)]
enum Event {
    Said(String),
    Gone,
}

/// What came of an order.
#[derive(Debug)]
pub(super) enum Outcome {
    /// What each rank answered.
    Done { wrong: u64, path: String, nanos: Vec<Vec<u64>> },
    /// The library cannot do it.
    No(String),
}

impl Crew {
    /// Takes processes that are starting and waits until all of them are ready.
    pub(super) fn gather(
        peer: &'static str,
        processes: Processes,
        pipes: Vec<Pipes>,
        patience: Duration,
    ) -> Result<Self, String> {
        let (sender, events) = channel();
        let listen = |(rank, pipes): (usize, Pipes)| {
            listen(rank, pipes.answers, sender.clone());
            Seat { orders: pipes.orders, pid: None }
        };
        let seats = pipes.into_iter().enumerate().map(listen).collect();
        let about = String::new();
        let (torch, bound, kept) = (false, true, None);
        let mut crew = Self { peer, about, torch, bound, processes, seats, events, patience, kept };
        for (rank, line) in crew.hear("start")?.into_iter().enumerate() {
            match line.split_once(' ') {
                Some(("ready", rest)) => {
                    let (pid, about) = rest.split_once(' ').unwrap_or((rest, ""));
                    crew.seats[rank].pid = pid.parse().ok();
                    crew.about = about.to_owned();
                }
                Some(("no", why)) => return Err(why.to_owned()),
                _ => return Err(format!("{} said {line:?}", crew.title(rank))),
            }
        }
        Ok(crew)
    }

    /// Keeps the store as long as the ranks.
    pub(super) fn keep(&mut self, store: TcpServer) {
        self.kept = Some(store);
    }

    /// Says that the ranks call it through torch, and whether each has a core.
    pub(super) fn through_torch(&mut self, bound: bool) {
        (self.torch, self.bound) = (true, bound);
    }

    /// The library in words, and how it may use the cores if not as usual.
    pub(super) fn title_of_library(&self) -> String {
        if self.bound { self.about.clone() } else { format!("{} (not bound to cores)", self.about) }
    }

    /// The library that is measured, and how it is called.
    pub(super) fn side(&self) -> Side {
        Side { library: self.peer, torch: self.torch, bound: self.bound }
    }

    /// The process of rank 0.
    pub(super) fn first_pid(&self) -> Option<u32> {
        self.seats.first().and_then(|seat| seat.pid)
    }

    /// Has an order carried out by all ranks.
    pub(super) fn carry_out(&mut self, order: &Order) -> Result<Outcome, String> {
        for seat in &mut self.seats {
            // A rank that is gone is found below.
            let _ = writeln!(seat.orders, "{order}");
        }
        let (mut all_wrong, mut taken, mut times) = (0, String::new(), Vec::new());
        let doing = format!("{} of {} bytes", order.case.op, order.case.bytes);
        for (rank, line) in self.hear(&doing)?.into_iter().enumerate() {
            let answer: Answer = line.parse().map_err(|text| format!("{} {text}", self.title(rank)))?;
            match answer {
                Answer::No(why) => return Ok(Outcome::No(why)),
                Answer::Done { nanos, .. } if nanos.len() != order.iterations => {
                    return Err(format!("{} measured {} times", self.title(rank), nanos.len()));
                }
                Answer::Done { wrong, path, nanos } => {
                    all_wrong += wrong;
                    // Rank 0 knows it for all.
                    if rank == 0 {
                        taken = path;
                    }
                    times.push(nanos);
                }
            }
        }
        Ok(Outcome::Done { wrong: all_wrong, path: taken, nanos: times })
    }

    /// One line of every rank. Names the one to blame if one dies or is silent for too long.
    fn hear(&mut self, doing: &str) -> Result<Vec<String>, String> {
        let mut lines: Vec<Option<String>> = vec![None; self.seats.len()];
        let begun = Instant::now();
        while lines.iter().any(Option::is_none) {
            match self.events.recv_timeout(LOOK) {
                Ok((rank, Event::Said(line))) => lines[rank] = Some(line),
                // One that has answered may go when its input ends, but nobody ends it now; unless it cannot take part.
                Ok((rank, Event::Gone)) => {
                    return Err(match lines[rank].as_deref().and_then(|line| line.strip_prefix("no ")) {
                        Some(why) => why.to_owned(),
                        None => self.blame(rank, doing),
                    });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.blame(0, doing)),
                Err(RecvTimeoutError::Timeout) => {
                    let silent = lines.iter().position(Option::is_none).unwrap_or(0);
                    if self.processes.any_ended() && self.events_are_over(&mut lines) {
                        return Err(self.blame(silent, doing));
                    }
                    if begun.elapsed() > self.patience {
                        let (who, time) = (self.title(silent), self.patience.as_secs_f64());
                        return Err(format!("{who} has not answered for {time} s ({doing}); is it stopped?"));
                    }
                }
            }
        }
        Ok(lines.into_iter().flatten().collect())
    }

    /// Takes what was said before a process ended; gives whether answers are still missing.
    fn events_are_over(&self, lines: &mut [Option<String>]) -> bool {
        while let Ok((rank, event)) = self.events.recv_timeout(Duration::from_millis(50)) {
            if let Event::Said(line) = event {
                lines[rank] = Some(line);
            }
        }
        lines.iter().any(Option::is_none)
    }

    /// Why the crew failed, once its ranks have had time to say so.
    fn blame(&mut self, rank: usize, doing: &str) -> String {
        let failure = self.processes.failure(Deadline::after(LAST_WORDS));
        failure.unwrap_or_else(|| format!("{} left during {doing}", self.title(rank)))
    }

    fn title(&self, rank: usize) -> String {
        let pid = self.seats.get(rank).and_then(|seat| seat.pid);
        let owner = if self.peer == super::OURS { String::new() } else { format!("{}'s ", self.peer) };
        match pid {
            Some(pid) => format!("{owner}rank {rank} (pid {pid})"),
            None => format!("{owner}rank {rank}"),
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // The end of their input is the end of their work; what is left after that is killed.
        self.seats.clear();
        let _ = self.processes.failure(Deadline::after(LAST_WORDS));
        // Before those who are killed: the store would complain about how they left.
        self.kept = None;
    }
}

fn listen(rank: usize, answers: impl Read + Send + 'static, events: Sender<(usize, Event)>) {
    std::thread::spawn(move || {
        let lines = BufReader::new(answers).lines().map_while(Result::ok);
        // Nobody may be listening any more.
        lines.map(|line| events.send((rank, Event::Said(line)))).take_while(Result::is_ok).for_each(drop);
        let _ = events.send((rank, Event::Gone));
    });
}
