//! Processes that are killed at every numbered step of a lease: who survives goes on with a new partner, and in the end
//! nothing is left of all who died.
//!
//! With `TEST_GPU=1` the same on memory of the first GPU.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lease_peer::{Has, LONG, MemoryKind, Peer, Trouble, context, memory, settles, soon};
use tensorwire::lease::hooks::STEPS;
use tensorwire::{Terms, Token};

/// Deaths in `scripts/test`, and in the long test.
const CYCLES: usize = 60;
const MANY_CYCLES: usize = 1000;
/// Deaths on a GPU.
const GPU_CYCLES: usize = 304;
/// Pairs at once.
const PAIRS: usize = 4;

/// What other processes do.
#[test]
fn child() {
    if let Some(role) = process::role() {
        lease_peer::run(&role);
    }
}

#[test]
fn somebody_dies_at_every_step() {
    deaths(MemoryKind::Host, CYCLES);
}

#[test]
#[ignore = "takes minutes"]
fn somebody_dies_a_thousand_times() {
    deaths(MemoryKind::Host, MANY_CYCLES);
}

#[test]
fn somebody_dies_at_every_step_with_gpu_memory() {
    on_gpu(MemoryKind::Gpu, GPU_CYCLES);
}

#[test]
fn somebody_dies_at_every_step_with_memory_of_other_allocators() {
    on_gpu(MemoryKind::Plain, GPU_CYCLES / 4);
}

/// The dead holder's loan is over as soon as its process is.
#[test]
fn a_dead_holder_is_reclaimed() {
    let us = context();
    let mut times = Vec::new();
    for round in 0..5 {
        let mut them = Peer::start(MemoryKind::Host).warm();
        let lease = us.grant(&memory(&us, 10, round), &Terms::default()).unwrap();
        assert_eq!(them.redeem(lease.token()), Ok(round));
        let begin = Instant::now();
        them.child.kill();
        lease.wait(soon()).unwrap();
        times.push(begin.elapsed());
    }
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    times.sort_unstable();
    println!("a dead holder is reclaimed after {times:?}");
}

/// The same as `deaths`; and the GPU has as much free memory as before.
fn on_gpu(place: MemoryKind, cycles: usize) {
    if std::env::var("TEST_GPU").is_err() {
        return;
    }
    let nvml = tensorwire::device::nvml::Nvml::open().unwrap();
    // This process must not open the GPU: that would take memory of it.
    use tensorwire::device::gpu::Probe;
    let gpu = nvml.gpus().unwrap()[0].id.clone();
    let free = || nvml.free_memory(&gpu).unwrap();
    let (before, begin) = (free(), Instant::now());
    deaths(place, cycles);
    println!("{cycles} deaths with {place:?} memory in {:?}", begin.elapsed());
    // The driver frees what a dead process had a little later.
    let end = Instant::now() + LONG;
    while free() < before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(free() >= before, "{} bytes of {before} free ones are missing", before - free());
}

/// So many deaths, in several pairs at once. In half of them the one who dies is in each cycle the partner of the same
/// survivor, which lends; in the others of one that borrows; so whatever a death leaves behind adds up.
fn deaths(place: MemoryKind, cycles: usize) {
    let files = || {
        let folder = std::fs::read_dir("/dev/shm").into_iter().flatten();
        let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains("tensorwire")).collect::<Vec<_>>()
    };
    let (temp, begin) = (process::TempDir::new(), Instant::now());
    let before = files();
    let seen: Vec<(BTreeSet<String>, Duration, usize)> = std::thread::scope(|scope| {
        let pair = |index: usize| {
            let dir = temp.path();
            scope.spawn(move || Pair::new(place, dir, index).live(cycles / PAIRS))
        };
        let pairs: Vec<_> = (0..PAIRS).map(pair).collect();
        pairs.into_iter().map(|pair| pair.join().unwrap()).collect()
    });
    assert_eq!(files(), before);
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0, "files are left in the temporary folder");
    let open = sockets(None);
    for (sockets, ..) in &seen {
        assert!(!sockets.is_empty());
        assert_eq!(
            sockets.intersection(&open).collect::<Vec<_>>(),
            [""; 0],
            "sockets outlive their processes"
        );
    }
    let longest = seen.iter().map(|(_, longest, _)| *longest).max().unwrap();
    let stepped: usize = seen.iter().map(|(.., stepped)| stepped).sum();
    println!(
        "{cycles} deaths, {stepped} of them at a step, in {:?}; each was heard within {longest:?}",
        begin.elapsed()
    );
    assert!(stepped >= cycles / 2, "{stepped} of {cycles}");
}

/// The names of abstract sockets: of all, or of a process.
fn sockets(pid: Option<u32>) -> BTreeSet<String> {
    let mine: Option<BTreeSet<String>> = pid.map(|pid| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.map(|link| link.to_string_lossy().into_owned()).collect()
    });
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let lines = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (inode, name) = (words.get(6)?, words.get(7)?);
        let wanted = mine.as_ref().is_none_or(|mine| mine.contains(&format!("socket:[{inode}]")));
        (wanted && name.starts_with('@')).then(|| (*name).to_owned())
    });
    lines.collect()
}

/// One that survives, and its partner of the moment.
struct Pair<'a> {
    place: MemoryKind,
    dir: &'a std::path::Path,
    index: usize,
    random: u64,
    survivor: Peer,
    /// What the survivor had before it met anybody.
    first: Has,
    partner: Peer,
    /// Tokens of the survivor that perhaps nobody has redeemed.
    unsure: Vec<Token>,
    /// Bytes that begin what the survivor and its partner hold.
    held: [Vec<u8>; 2],
    sockets: BTreeSet<String>,
    longest: Duration,
    /// How many have died at a step.
    stepped: usize,
}

impl<'a> Pair<'a> {
    fn new(place: MemoryKind, dir: &'a std::path::Path, index: usize) -> Self {
        let survivor = start(place, dir);
        let first = survivor.has();
        let partner = start(place, dir);
        let random = 0x9e37_79b9_7f4a_7c15 ^ (index as u64 + 1) << 40 ^ u64::from(std::process::id());
        let (unsure, held, sockets) = (Vec::new(), Default::default(), BTreeSet::new());
        let (longest, stepped) = (Duration::ZERO, 0);
        Self { place, dir, index, random, survivor, first, partner, unsure, held, sockets, longest, stepped }
    }

    /// A number below `end`.
    fn roll(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % end
    }

    /// All cycles; gives the sockets that were seen, how long the longest death went unnoticed, and how many died at a
    /// step.
    fn live(mut self, cycles: usize) -> (BTreeSet<String>, Duration, usize) {
        let survivors = sockets(Some(self.survivor.child.pid()));
        self.sockets.extend(survivors);
        for cycle in 0..cycles {
            let partners = sockets(Some(self.partner.child.pid()));
            self.sockets.extend(partners);
            self.cycle((cycle * PAIRS + self.index) % (STEPS.len() + 1));
            self.recover();
        }
        self.partner.child.kill();
        settles(|| self.survivor.stats(), Ok((0, 0, 0)));
        // It may also have less: what it had opened before it met anybody may be closed by now.
        settles(|| self.survivor.has().is_within(&self.first), true);
        self.survivor.leave();
        (self.sockets, self.longest, self.stepped)
    }

    /// The two lend and borrow until the partner dies at a step; or at any moment, at the step that is none.
    fn cycle(&mut self, step: usize) {
        if step < STEPS.len() {
            let nth = 1 + self.roll(4) as u8;
            self.partner.dies_at(step, nth).unwrap();
        }
        for round in 0..60 {
            match self.act() {
                Ok(()) => {}
                // The survivor is told of the death of what it needs; the partner just ends.
                Err(Trouble::Error(text)) if text.contains("died") => break,
                Err(Trouble::Gone) => break,
                Err(trouble) => panic!("cycle with step {step}: {trouble:?}"),
            }
            if step == STEPS.len() && round == 20 {
                // While it is at work.
                let token = self.survivor.grants(3000, 1).unwrap();
                self.partner.say(b'r', &token.to_bytes()).unwrap();
                self.unsure.push(token);
                std::thread::sleep(Duration::from_micros(200));
                self.partner.child.kill();
                return;
            }
        }
        // Some steps are not always met so often: then it dies here.
        let dying = self.partner.stats().is_err();
        if !dying {
            self.partner.child.kill();
        } else {
            self.partner.was_killed();
            self.stepped += 1;
        }
    }

    /// One act of a random side.
    fn act(&mut self) -> Result<(), Trouble> {
        let first = self.roll(2) as usize;
        let (one, other) = (first, 1 - first);
        match self.roll(7) {
            0..=2 => {
                let (bytes, value) = (1 + self.roll(50_000) as u32, self.roll(256) as u8);
                let token = self.peer(one).grants(bytes, value)?;
                if self.roll(2) == 0 {
                    self.peer(one).drop_leases()?;
                }
                self.hand_over(other, token, value)
            }
            3 if !self.held[one].is_empty() => {
                let token = self.peer(one).lends_last_onward()?;
                let value = *self.held[one].last().unwrap();
                self.hand_over(other, token, value)
            }
            4 => self.peer(one).drop_leases(),
            5 => {
                let bytes = self.peer(one).bytes()?;
                assert_eq!(bytes, self.held[one]);
                Ok(())
            }
            _ if !self.held[one].is_empty() => {
                self.peer(one).release_last()?;
                self.held[one].pop();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// One side redeems a token of the other.
    fn hand_over(&mut self, to: usize, token: Token, value: u8) -> Result<(), Trouble> {
        if to == 1 {
            self.unsure.push(token.clone());
        }
        let seen = self.peer(to).redeem(&token)?;
        assert_eq!(seen, value);
        self.held[to].push(value);
        if to == 1 {
            self.unsure.pop();
        }
        Ok(())
    }

    fn peer(&self, index: usize) -> &Peer {
        if index == 0 { &self.survivor } else { &self.partner }
    }

    /// The partner is dead: the survivor has what it had, and goes on with another one.
    fn recover(&mut self) {
        let begin = Instant::now();
        settles(|| self.survivor.stats().unwrap().2, 0);
        self.longest = self.longest.max(begin.elapsed());
        assert_eq!(self.survivor.bytes(), Ok(std::mem::take(&mut self.held[0])), "views stay valid");
        self.held[1].clear();
        self.survivor.drop_all().unwrap();
        self.partner = start(self.place, self.dir);
        // What the dead one has not redeemed is still there for the next.
        for token in std::mem::take(&mut self.unsure) {
            match self.partner.redeem(&token) {
                Ok(_) => self.partner.release_last().unwrap(),
                Err(trouble) => {
                    let text = trouble.text();
                    // Memory of a dead process that only its maker could export.
                    let lost = self.place == MemoryKind::Plain;
                    assert!(lost || text.contains("the token is over"), "{text}");
                    if lost {
                        self.partner.discard(&token);
                    }
                }
            }
        }
        settles(|| self.survivor.stats().map(|(granted, waiting, _)| (granted, waiting)), Ok((0, 0)));
    }
}

/// A process whose temporary files would lie in `dir`, and that has all it needs to compare what it has later.
fn start(place: MemoryKind, dir: &std::path::Path) -> Peer {
    Peer::start_with(process::command(&place.role()).env("TMPDIR", dir), None).warm()
}
