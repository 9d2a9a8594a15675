//! Runs the plans of all ranks against each other, in any order, and watches.
//!
//! Counters have their real values in their real lines: `number << 20 | tick` in line `number % 4`, compared cyclically. A
//! signal releases what its rank has done and a wait acquires it, from the signal that it waits for and not from a later
//! one that may be there already: what is ordered here is ordered in every run.

use std::collections::HashMap;

use tensorwire_device::flag::reached;

use super::memory::{Clock, Memory, join};
use super::ops::{Case, Op, Value};
use crate::collective::plan::shape::PAYLOAD;
use crate::collective::plan::{LINE, Part, PartPlace, Plan, Step, Who};
use crate::shm::kind::{Kind, Path};

/// What is wrong with plans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nobody can go on.
    Deadlock(String),
    /// Two accesses that nothing orders.
    Race(String),
    /// Another result than the model's, or memory changed that should not be.
    Wrong(String),
    /// Bytes outside of their place, or in a place that the rank may not write.
    Outside(String),
    /// Counters that do not count as agreed.
    Ticks(String),
    /// A rank is further ahead of another than its lines allow.
    Ahead(String),
}

type Result<T> = std::result::Result<T, Fault>;

const LINES: usize = 4;
const HEADER: std::ops::Range<usize> = 8..32;
const PAYLOAD_AT: usize = 32;

/// Who runs next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    /// Anybody who can, at every step.
    Random,
    /// One rank for as long as it can, then another.
    Runs,
    /// The first in a random order of ranks who can: the others fall as far behind as possible.
    Ranked,
}

pub(super) struct Sim<'a> {
    case: &'a Case,
    /// By operation and rank.
    plans: &'a [Vec<Plan>],
    ranks: Vec<Rank>,
    /// Counters, by rank and line.
    lines: Vec<u32>,
    /// What a rank knew when it signalled a tick of an operation.
    signals: HashMap<(usize, usize, u32), Clock>,
    /// Slots, lines, and what ranks give and get.
    memory: Vec<Memory>,
    /// The time at which each rank began each operation.
    begun: HashMap<(usize, usize), u32>,
    /// Bytes that a rank gives and gets, by operation and rank.
    lens: Vec<(usize, usize)>,
}

/// Where a rank is.
struct Rank {
    op: usize,
    step: usize,
    inside: bool,
    clock: Clock,
}

impl<'a> Sim<'a> {
    pub(super) fn new(case: &'a Case, plans: &'a [Vec<Plan>]) -> Self {
        let world = case.world;
        let rank = |me: usize| {
            let mut clock = vec![0; world];
            clock[me] = 1;
            Rank { op: 0, step: 0, inside: false, clock }
        };
        // As if the operations before had signalled nothing but their numbers.
        let before = |line: usize| {
            let back =
                (1..=LINES as u32).find(|back| case.first.wrapping_sub(*back) as usize % LINES == line);
            case.first.wrapping_sub(back.unwrap_or(0)) << 20
        };
        let slots = (0..2 * world).map(|_| Memory::new(case.half));
        let lines = (0..LINES * world).map(|_| Memory::new(LINE));
        let each = || case.ops.iter().flat_map(|op| (0..world).map(move |rank| (op, rank)));
        let lens: Vec<_> =
            each().map(|(op, rank)| (op.input(rank, world), op.expected(0, rank, world).len())).collect();
        let users =
            each().zip(&lens).flat_map(|((op, rank), &(input, output))| match op.shared(rank, world) {
                Some(_) => [Memory::new(input.max(output)), Memory::default()],
                None => [Memory::new(input), Memory::new(output)],
            });
        Self {
            case,
            plans,
            ranks: (0..world).map(rank).collect(),
            lines: (0..LINES * world).map(|index| before(index % LINES)).collect(),
            signals: HashMap::new(),
            memory: slots.chain(lines).chain(users).collect(),
            begun: HashMap::new(),
            lens,
        }
    }

    /// Runs everything to its end.
    pub(super) fn run(&mut self, order: Order, mut seed: u64) -> Result<()> {
        let mut next = move |n: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 16) as usize % n
        };
        let world = self.case.world;
        let mut queue: Vec<usize> = (0..world).collect();
        (0..world).for_each(|index| queue.swap(index, next(world)));
        let mut last = 0;
        while self.ranks.iter().any(|rank| rank.op < self.case.ops.len()) {
            let start = match order {
                Order::Random => next(world),
                Order::Runs => last,
                Order::Ranked => 0,
            };
            let mut ran = false;
            for index in (start..world).chain(0..start) {
                if self.ranks[queue[index]].op < self.case.ops.len() && self.advance(queue[index])? {
                    (ran, last) = (true, index);
                    break;
                }
            }
            if !ran {
                return Err(Fault::Deadlock(self.positions()));
            }
        }
        Ok(())
    }

    /// Does the next thing of a rank, if it need not wait.
    fn advance(&mut self, me: usize) -> Result<bool> {
        if !self.ranks[me].inside {
            self.begin(me)?;
            return Ok(true);
        }
        let plan = &self.plans[self.ranks[me].op][me];
        let Some(step) = plan.steps.get(self.ranks[me].step) else {
            self.end(me)?;
            return Ok(true);
        };
        match step {
            Step::Copy { into, from, .. } => self.copy(me, into, from)?,
            Step::Reduce { inputs, outputs, .. } => {
                self.reduce(me, plan.parts(inputs), plan.parts(outputs))?
            }
            Step::Signal(tick) => self.signal(me, *tick)?,
            Step::Wait(who, tick) => {
                if !self.wait(me, *who, *tick)? {
                    return Ok(false);
                }
            }
        }
        self.ranks[me].step += 1;
        Ok(true)
    }

    /// The user has written the input; the rank says what it came for, at once.
    fn begin(&mut self, me: usize) -> Result<()> {
        let index = self.ranks[me].op;
        if let Some(other) = (0..self.case.world).find(|&other| self.ranks[other].op + 2 < index) {
            return Err(Fault::Ahead(format!("rank {me} of rank {other}: {}", self.positions())));
        }
        let values: Vec<Value> = (0..self.lens[index * self.case.world + me].0)
            .map(|at| Value::Input { op: index as u16, rank: me as u16, at: at as u32 })
            .collect();
        self.write(me, &Part::new(PartPlace::Input, 0..values.len()), &values)?;
        let line = self.line(me, index);
        let number = self.number(index);
        self.touch(me, line, HEADER, true)?;
        self.memory[line].values[HEADER].fill(Value::Header(number));
        // Where ranks announce themselves, they also say whether others may reach into their memory.
        if self.offers(index) {
            self.touch(me, line, PAYLOAD_AT..LINE, true)?;
        }
        self.begun.insert((me, index), self.ranks[me].clock[me]);
        self.ranks[me].inside = true;
        Ok(())
    }

    /// The user looks at the output and uses the input for something else.
    fn end(&mut self, me: usize) -> Result<()> {
        let (op, index) = (self.op(me), self.ranks[me].op);
        let world = self.case.world;
        let expected = op.expected(index, me, world);
        let got = self.read(me, &Part::new(PartPlace::Output, 0..expected.len()))?;
        if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at]) {
            let text =
                format!("rank {me}, operation {index}, byte {at}: {:?}, not {:?}", got[at], expected[at]);
            return Err(Fault::Wrong(text));
        }
        let input = Part::new(PartPlace::Input, 0..self.lens[index * world + me].0);
        let given = self.read(me, &input)?;
        let kept = |(at, value): (usize, &Value)| {
            *value == Value::Input { op: index as u16, rank: me as u16, at: at as u32 }
        };
        if op.shared(me, world).is_none() && !given.iter().enumerate().all(kept) {
            return Err(Fault::Wrong(format!("rank {me}, operation {index}: the input has changed")));
        }
        self.write(me, &input, &vec![Value::Junk; input.len])?;
        self.write(me, &Part::new(PartPlace::Output, 0..expected.len()), &vec![Value::Junk; expected.len()])?;
        if op.kind == Kind::Barrier {
            let come = |other: &usize| {
                self.begun.get(&(*other, index)).is_some_and(|&at| self.ranks[me].clock[*other] >= at)
            };
            if let Some(other) = (0..world).find(|other| !come(other)) {
                return Err(Fault::Wrong(format!("rank {me} left barrier {index} before rank {other} came")));
            }
        }
        let rank = &mut self.ranks[me];
        (rank.op, rank.step, rank.inside) = (index + 1, 0, false);
        Ok(())
    }

    fn copy(&mut self, me: usize, into: &Part, from: &Part) -> Result<()> {
        if into.len != from.len {
            return Err(Fault::Outside(format!("rank {me} copies {from} to {into}")));
        }
        // A tensor that is its own result is not copied.
        if self.locate(me, into)? != self.locate(me, from)? {
            let values = self.read(me, from)?;
            self.write(me, into, &values)?;
        }
        Ok(())
    }

    fn reduce(&mut self, me: usize, inputs: &[Part], outputs: &[Part]) -> Result<()> {
        let len = inputs.first().map_or(0, |part| part.len);
        if inputs.iter().chain(outputs).any(|part| part.len != len) {
            return Err(Fault::Outside(format!("rank {me} reduces parts of several sizes")));
        }
        let values = inputs.iter().map(|part| self.read(me, part)).collect::<Result<Vec<_>>>()?;
        let result: Vec<_> = (0..len).map(|at| Value::reduced(values.iter().map(|list| list[at]))).collect();
        outputs.iter().try_for_each(|part| self.write(me, part, &result))
    }

    fn signal(&mut self, me: usize, tick: u32) -> Result<()> {
        let index = self.ranks[me].op;
        let value = self.value(index, tick);
        let counter =
            &mut self.lines[me * LINES + self.case.first.wrapping_add(index as u32) as usize % LINES];
        if reached(*counter, value) {
            return Err(Fault::Ticks(format!("rank {me} signals tick {tick} of operation {index} again")));
        }
        *counter = value;
        self.signals.insert((me, index, tick), self.ranks[me].clock.clone());
        self.ranks[me].clock[me] += 1;
        Ok(())
    }

    /// Whether a wait is over.
    fn wait(&mut self, me: usize, who: Who, tick: u32) -> Result<bool> {
        let others: Vec<usize> = match who {
            Who::All => (0..self.case.world).filter(|&other| other != me).collect(),
            Who::One(other) => vec![other],
        };
        // Tick 0 is the last one of the operation before.
        let now = self.ranks[me].op;
        let (of, tick) = match (now.checked_sub(1), tick) {
            (None, 0) => return Ok(true),
            (Some(before), 0) => (before, self.plans[before][me].ticks),
            (_, tick) => (now, tick),
        };
        let number = self.number(of);
        let there = |other: &usize| {
            reached(self.lines[other * LINES + number as usize % LINES], self.value(of, tick))
        };
        if !others.iter().all(there) {
            return Ok(false);
        }
        for other in others {
            if self.lines[other * LINES + number as usize % LINES] >> 20 != number & 0xfff {
                return Err(Fault::Ahead(format!("rank {other} of rank {me}: {}", self.positions())));
            }
            let Some(known) = self.signals.get(&(other, of, tick)) else {
                return Err(Fault::Ticks(format!("rank {other} skips tick {tick} of operation {of}")));
            };
            join(&mut self.ranks[me].clock, known);
            // Whoever waits also looks at what the other came for.
            let line = self.line(other, of);
            self.touch(me, line, HEADER, false)?;
            if self.memory[line].values[HEADER.start] != Value::Header(number) {
                return Err(Fault::Wrong(format!("rank {me} reads another header of rank {other}")));
            }
            if of == now && self.offers(of) {
                self.touch(me, line, PAYLOAD_AT..LINE, false)?;
            }
        }
        Ok(true)
    }

    fn read(&mut self, me: usize, part: &Part) -> Result<Vec<Value>> {
        let (memory, start) = self.locate(me, part)?;
        self.touch(me, memory, start..start + part.len, false)?;
        Ok(self.memory[memory].values[start..start + part.len].to_vec())
    }

    fn write(&mut self, me: usize, part: &Part, values: &[Value]) -> Result<()> {
        if let PartPlace::Slot(rank, _) | PartPlace::Line(rank) = part.place
            && rank != me
        {
            return Err(Fault::Outside(format!("rank {me} writes {part}")));
        }
        let (memory, start) = self.locate(me, part)?;
        self.touch(me, memory, start..start + part.len, true)?;
        self.memory[memory].values[start..start + part.len].copy_from_slice(values);
        Ok(())
    }

    fn touch(&mut self, me: usize, memory: usize, range: std::ops::Range<usize>, write: bool) -> Result<()> {
        match self.memory[memory].touch(range.clone(), me, &self.ranks[me].clock, write) {
            None => Ok(()),
            Some(other) => {
                let does = if write { "writes" } else { "reads" };
                let text = format!("rank {me} {does} bytes {range:?} of memory {memory} beside rank {other}");
                Err(Fault::Race(format!("{text}: {}", self.positions())))
            }
        }
    }

    /// The memory of a part, and where it begins there.
    fn locate(&self, me: usize, part: &Part) -> Result<(usize, usize)> {
        let (world, index) = (self.case.world, self.ranks[me].op);
        let op = &self.case.ops[index];
        let user = |rank: usize| 2 * world + LINES * world + 2 * (index * world + rank);
        let input = |rank: usize| {
            let start = op.shared(rank, world).map_or(0, |start| start.max(0));
            (user(rank), start as usize, self.lens[index * world + rank].0)
        };
        let output = |rank: usize| {
            let len = self.lens[index * world + rank].1;
            match op.shared(rank, world) {
                Some(start) => (user(rank), (-start).max(0) as usize, len),
                None => (user(rank) + 1, 0, len),
            }
        };
        let (memory, start, len) = match part.place {
            PartPlace::Input => input(me),
            PartPlace::Output => output(me),
            PartPlace::PeerInput(rank) => input(rank),
            PartPlace::PeerOutput(rank) => output(rank),
            PartPlace::Slot(rank, round) => {
                let half = (self.number(index) as usize + usize::from(round)) % 2;
                (2 * rank + half, 0, self.case.half)
            }
            PartPlace::Line(rank) => (self.line(rank, index), PAYLOAD_AT, PAYLOAD),
        };
        if part.at + part.len > len {
            return Err(Fault::Outside(format!("rank {me}, operation {index}: {part} of {len}")));
        }
        Ok((memory, start + part.at))
    }

    /// The memory of a rank's line for an operation.
    fn line(&self, rank: usize, index: usize) -> usize {
        2 * self.case.world + rank * LINES + self.number(index) as usize % LINES
    }

    fn number(&self, index: usize) -> u32 {
        self.case.first.wrapping_add(index as u32)
    }

    fn value(&self, index: usize, tick: u32) -> u32 {
        self.number(index) << 20 | tick
    }

    fn op(&self, me: usize) -> &'a Op {
        &self.case.ops[self.ranks[me].op]
    }

    fn offers(&self, index: usize) -> bool {
        let op = &self.case.ops[index];
        op.path == Path::Direct || op.announced && op.path != Path::Inline
    }

    /// Where everybody is, for messages.
    fn positions(&self) -> String {
        let position = |(me, rank): (usize, &Rank)| {
            let step = self.plans.get(rank.op).and_then(|plans| plans[me].steps.get(rank.step));
            format!("rank {me} in operation {} at {step:?}", rank.op)
        };
        self.ranks.iter().enumerate().map(position).collect::<Vec<_>>().join("; ")
    }
}
