//! Runs the plans of all ranks against each other, in any order, and watches.
//!
//! Counters have their real values in their real lines: `number << 20 | tick` in line `number % 4`, compared cyclically. A
//! signal releases what its rank has done and a wait acquires it, from the signal that it waits for and not from a later
//! one that may be there already: what is ordered here is ordered in every run.
//!
//! The host of each rank runs its operations one after the other. For a queued operation it only meets the others; then the
//! steps run on one of the rank's streams, behind what is there, and the host goes on. The user's own work on the tensors is
//! on that stream as well. Nothing orders a stream and anything else, except that work begins after it was queued, and the
//! words of the operation.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

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
const HEADER: Range<usize> = 8..32;
const PAYLOAD_AT: usize = 32;

/// The steps of the host in a queued operation.
const MEETING: [Step; 2] = [Step::Signal(1), Step::Wait(Who::All, 1)];
/// Streams of each rank.
const STREAMS: usize = 2;

/// Who runs next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    /// Anybody who can, at every step.
    Random,
    /// One for as long as it can, then another.
    Runs,
    /// The first in a random order who can: the others fall as far behind as possible.
    Ranked,
}

pub(super) struct Sim<'a> {
    case: &'a Case,
    /// By operation and rank.
    plans: &'a [Vec<Plan>],
    /// By rank, what its host does in a queued operation.
    meetings: Vec<Vec<Step>>,
    /// The hosts of all ranks; where operations are queued, then the first streams of all ranks, and so on.
    actors: Vec<Actor>,
    /// Counters, by rank and line.
    lines: Vec<u32>,
    /// What a rank knew when it signalled a tick of an operation.
    signals: HashMap<(usize, usize, u32), Clock>,
    /// The same for the words of queued operations.
    words: HashMap<(usize, usize, u32), Clock>,
    /// Slots, lines, and what ranks give and get.
    memory: Vec<Memory>,
    /// Who began each operation for each rank, and when.
    begun: HashMap<(usize, usize), (usize, u32)>,
    /// Bytes that a rank gives and gets, by operation and rank.
    lens: Vec<(usize, usize)>,
    /// A fault: nobody heeds that some ranks have a tick more than others.
    is_level: bool,
}

/// A host or a stream, and where it is.
struct Actor {
    op: usize,
    step: usize,
    inside: bool,
    clock: Clock,
    /// Operations that are queued on a stream, and what the host knew then.
    queue: VecDeque<(usize, Clock)>,
}

impl<'a> Sim<'a> {
    pub(super) fn new(case: &'a Case, plans: &'a [Vec<Plan>]) -> Self {
        let world = case.world;
        let queues = case.ops.iter().any(Op::is_queued);
        let actors = if queues { (1 + STREAMS) * world } else { world };
        let actor = |me: usize| {
            let mut clock = vec![0; actors];
            clock[me] = 1;
            Actor { op: 0, step: 0, inside: false, clock, queue: VecDeque::new() }
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
            meetings: vec![MEETING.to_vec(); world],
            actors: (0..actors).map(actor).collect(),
            lines: (0..LINES * world).map(|index| before(index % LINES)).collect(),
            signals: HashMap::new(),
            words: HashMap::new(),
            memory: slots.chain(lines).chain(users).collect(),
            begun: HashMap::new(),
            lens,
            is_level: false,
        }
    }

    /// The same, where nobody heeds that some ranks have a tick more than others.
    pub(super) fn level(mut self) -> Self {
        self.is_level = true;
        self
    }

    /// The same, with another meeting of one rank.
    pub(super) fn meeting(mut self, rank: usize, steps: Vec<Step>) -> Self {
        self.meetings[rank] = steps;
        self
    }

    /// Runs everything to its end.
    pub(super) fn run(&mut self, order: Order, mut seed: u64) -> Result<()> {
        let mut next = move |n: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 16) as usize % n
        };
        let actors = self.actors.len();
        let mut turns: Vec<usize> = (0..actors).collect();
        (0..actors).for_each(|index| turns.swap(index, next(actors)));
        let mut last = 0;
        while (0..actors).any(|who| self.has_more(who)) {
            let start = match order {
                Order::Random => next(actors),
                Order::Runs => last,
                Order::Ranked => 0,
            };
            let mut ran = false;
            for index in (start..actors).chain(0..start) {
                if self.has_more(turns[index]) && self.advance(turns[index])? {
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

    fn has_more(&self, who: usize) -> bool {
        let actor = &self.actors[who];
        if self.is_stream(who) {
            return actor.inside || !actor.queue.is_empty();
        }
        actor.op < self.case.ops.len()
    }

    /// Does the next thing of a host or a stream, if it need not wait.
    fn advance(&mut self, who: usize) -> Result<bool> {
        if !self.actors[who].inside {
            self.begin(who)?;
            return Ok(true);
        }
        let (me, index) = (self.rank(who), self.actors[who].op);
        let plan = &self.plans[index][me];
        let meets = !self.is_stream(who) && self.case.ops[index].is_queued();
        let steps = if meets { &self.meetings[me] } else { &plan.steps };
        let Some(step) = steps.get(self.actors[who].step).cloned() else {
            match meets {
                true => self.queue(who)?,
                false => self.end(who)?,
            }
            return Ok(true);
        };
        match step {
            Step::Copy { into, from, .. } => self.copy(who, &into, &from)?,
            Step::Reduce { inputs, outputs, .. } => {
                self.reduce(who, plan.parts(&inputs), plan.parts(&outputs))?
            }
            Step::Signal(word) if self.is_stream(who) => self.signal_word(who, word)?,
            Step::Signal(tick) => self.signal(who, tick)?,
            Step::Wait(whom, word) if self.is_stream(who) => {
                if !self.wait_for_words(who, whom, word) {
                    return Ok(false);
                }
            }
            Step::Wait(whom, tick) => {
                if !self.wait(who, whom, tick)? {
                    return Ok(false);
                }
            }
        }
        self.actors[who].step += 1;
        Ok(true)
    }

    /// The host says what it came for, at once. Where the steps run, the user has been at the tensors.
    fn begin(&mut self, who: usize) -> Result<()> {
        let me = self.rank(who);
        if let Some((index, known)) = self.actors[who].queue.pop_front() {
            join(&mut self.actors[who].clock, &known);
            self.actors[who].op = index;
            self.give(who)?;
        } else {
            let index = self.actors[who].op;
            if let Some(other) = (0..self.case.world).find(|&other| self.actors[other].op + 2 < index) {
                return Err(Fault::Ahead(format!("rank {me} of rank {other}: {}", self.positions())));
            }
            if !self.case.ops[index].is_queued() {
                self.give(who)?;
            }
            let line = self.line(me, index);
            let number = self.number(index);
            self.touch(who, line, HEADER, true)?;
            self.memory[line].values[HEADER].fill(Value::Header(number));
            // Where ranks announce themselves, they also say whether others may reach into their memory.
            if self.offers(index) || self.case.ops[index].is_apart(me) {
                self.touch(who, line, PAYLOAD_AT..LINE, true)?;
            }
        }
        (self.actors[who].step, self.actors[who].inside) = (0, true);
        Ok(())
    }

    /// The user has written the input, and has had something else in the output.
    fn give(&mut self, who: usize) -> Result<()> {
        let (me, index) = (self.rank(who), self.actors[who].op);
        let (given, got) = self.lens[index * self.case.world + me];
        self.write(who, &Part::new(PartPlace::Output, 0..got), &vec![Value::Junk; got])?;
        let values: Vec<Value> =
            (0..given).map(|at| Value::Input { op: index as u16, rank: me as u16, at: at as u32 }).collect();
        self.write(who, &Part::new(PartPlace::Input, 0..values.len()), &values)?;
        self.begun.insert((me, index), (who, self.actors[who].clock[who]));
        Ok(())
    }

    /// The ranks have met, or law 11 is broken: the steps are queued, and the host goes on.
    fn queue(&mut self, who: usize) -> Result<()> {
        let (me, index) = (self.rank(who), self.actors[who].op);
        let known = self.actors[who].clock.clone();
        let come = |other: usize| {
            self.signals.get(&(other, index, 1)).is_some_and(|then| known[other] >= then[other])
        };
        if let Some(other) = (0..self.case.world).find(|&other| !come(other)) {
            return Err(Fault::Wrong(format!("rank {me} queues operation {index} without rank {other}")));
        }
        let stream = (1 + self.case.ops[index].stream(me) % STREAMS) * self.case.world + me;
        self.actors[stream].queue.push_back((index, known));
        let host = &mut self.actors[who];
        host.clock[who] += 1;
        (host.op, host.inside) = (index + 1, false);
        Ok(())
    }

    /// The user looks at the output and uses the input for something else.
    fn end(&mut self, who: usize) -> Result<()> {
        let (me, index) = (self.rank(who), self.actors[who].op);
        let op = &self.case.ops[index];
        let world = self.case.world;
        let expected = op.expected(index, me, world);
        let got = self.read(who, &Part::new(PartPlace::Output, 0..expected.len()))?;
        if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at]) {
            let text =
                format!("rank {me}, operation {index}, byte {at}: {:?}, not {:?}", got[at], expected[at]);
            return Err(Fault::Wrong(text));
        }
        let input = Part::new(PartPlace::Input, 0..self.lens[index * world + me].0);
        let given = self.read(who, &input)?;
        let kept = |(at, value): (usize, &Value)| {
            *value == Value::Input { op: index as u16, rank: me as u16, at: at as u32 }
        };
        if op.shared(me, world).is_none() && !given.iter().enumerate().all(kept) {
            return Err(Fault::Wrong(format!("rank {me}, operation {index}: the input has changed")));
        }
        self.write(who, &input, &vec![Value::Junk; input.len])?;
        self.write(
            who,
            &Part::new(PartPlace::Output, 0..expected.len()),
            &vec![Value::Junk; expected.len()],
        )?;
        if op.kind == Kind::Barrier {
            let come = |other: &usize| {
                self.begun
                    .get(&(*other, index))
                    .is_some_and(|&(actor, at)| self.actors[who].clock[actor] >= at)
            };
            if let Some(other) = (0..world).find(|other| !come(other)) {
                return Err(Fault::Wrong(format!("rank {me} left barrier {index} before rank {other} came")));
            }
        }
        let actor = &mut self.actors[who];
        (actor.op, actor.inside) = (index + 1, false);
        Ok(())
    }

    fn copy(&mut self, who: usize, into: &Part, from: &Part) -> Result<()> {
        if into.len != from.len {
            return Err(Fault::Outside(format!("rank {} copies {from} to {into}", self.rank(who))));
        }
        // A tensor that is its own result is not copied.
        if self.locate(who, into)? != self.locate(who, from)? {
            let values = self.read(who, from)?;
            self.write(who, into, &values)?;
        }
        Ok(())
    }

    fn reduce(&mut self, who: usize, inputs: &[Part], outputs: &[Part]) -> Result<()> {
        let len = inputs.first().map_or(0, |part| part.len);
        if inputs.iter().chain(outputs).any(|part| part.len != len) {
            return Err(Fault::Outside(format!("rank {} reduces parts of several sizes", self.rank(who))));
        }
        let values = inputs.iter().map(|part| self.read(who, part)).collect::<Result<Vec<_>>>()?;
        let result: Vec<_> = (0..len).map(|at| Value::reduced(values.iter().map(|list| list[at]))).collect();
        outputs.iter().try_for_each(|part| self.write(who, part, &result))
    }

    /// A host signals on its line.
    fn signal(&mut self, me: usize, tick: u32) -> Result<()> {
        let index = self.actors[me].op;
        let value = self.value(index, tick);
        let counter =
            &mut self.lines[me * LINES + self.case.first.wrapping_add(index as u32) as usize % LINES];
        if reached(*counter, value) {
            return Err(Fault::Ticks(format!("rank {me} signals tick {tick} of operation {index} again")));
        }
        *counter = value;
        self.signals.insert((me, index, tick), self.actors[me].clock.clone());
        self.actors[me].clock[me] += 1;
        Ok(())
    }

    /// Whether a host's wait is over.
    fn wait(&mut self, me: usize, whom: Who, tick: u32) -> Result<bool> {
        let others = self.others(me, whom);
        // Tick 0 is the last one of the operation before.
        let now = self.actors[me].op;
        let (of, tick) = match (now.checked_sub(1), tick) {
            (None, 0) => return Ok(true),
            (Some(before), 0) => (before, self.plans[before][me].ticks),
            (_, tick) => (now, tick),
        };
        let number = self.number(of);
        let goal = |other: usize| match self.case.ops[of].ahead(other, me) {
            ahead if !self.is_level => tick.saturating_add_signed(ahead).max(1),
            _ => tick,
        };
        let goals: Vec<u32> = (0..self.case.world).map(goal).collect();
        let there = |&other: &usize| {
            reached(self.lines[other * LINES + number as usize % LINES], self.value(of, goals[other]))
        };
        if !others.iter().all(there) {
            return Ok(false);
        }
        for other in others {
            if self.lines[other * LINES + number as usize % LINES] >> 20 != number & 0xfff {
                return Err(Fault::Ahead(format!("rank {other} of rank {me}: {}", self.positions())));
            }
            let tick = goals[other];
            let Some(known) = self.signals.get(&(other, of, tick)) else {
                return Err(Fault::Ticks(format!("rank {other} skips tick {tick} of operation {of}")));
            };
            join(&mut self.actors[me].clock, known);
            // Whoever waits also looks at what the other came for.
            let line = self.line(other, of);
            self.touch(me, line, HEADER, false)?;
            if self.memory[line].values[HEADER.start] != Value::Header(number) {
                return Err(Fault::Wrong(format!("rank {me} reads another header of rank {other}")));
            }
            // Where some are apart, nobody looks at offers.
            let apart = (0..self.case.world).any(|rank| self.case.ops[of].is_apart(rank));
            if of == now && self.offers(of) && !apart {
                self.touch(me, line, PAYLOAD_AT..LINE, false)?;
            }
        }
        Ok(true)
    }

    /// A stream sets a word of its operation.
    fn signal_word(&mut self, who: usize, word: u32) -> Result<()> {
        let (me, index) = (self.rank(who), self.actors[who].op);
        let known = self.actors[who].clock.clone();
        if self.words.insert((me, index, word), known).is_some() {
            return Err(Fault::Ticks(format!("rank {me} sets word {word} of operation {index} again")));
        }
        self.actors[who].clock[who] += 1;
        Ok(())
    }

    /// Whether a stream's wait is over.
    fn wait_for_words(&mut self, who: usize, whom: Who, word: u32) -> bool {
        let index = self.actors[who].op;
        let others = self.others(self.rank(who), whom);
        let known: Option<Vec<&Clock>> =
            others.iter().map(|&other| self.words.get(&(other, index, word))).collect();
        let Some(known) = known else { return false };
        known.into_iter().for_each(|known| join(&mut self.actors[who].clock, known));
        true
    }

    fn others(&self, me: usize, whom: Who) -> Vec<usize> {
        match whom {
            Who::All => (0..self.case.world).filter(|&other| other != me).collect(),
            Who::One(other) => vec![other],
        }
    }

    fn read(&mut self, who: usize, part: &Part) -> Result<Vec<Value>> {
        let (memory, start) = self.locate(who, part)?;
        self.touch(who, memory, start..start + part.len, false)?;
        Ok(self.memory[memory].values[start..start + part.len].to_vec())
    }

    fn write(&mut self, who: usize, part: &Part, values: &[Value]) -> Result<()> {
        if let PartPlace::Slot(rank, _) | PartPlace::Line(rank) = part.place
            && rank != who
        {
            return Err(Fault::Outside(format!("rank {} writes {part}", self.rank(who))));
        }
        let (memory, start) = self.locate(who, part)?;
        self.touch(who, memory, start..start + part.len, true)?;
        self.memory[memory].values[start..start + part.len].copy_from_slice(values);
        Ok(())
    }

    fn touch(&mut self, who: usize, memory: usize, range: Range<usize>, write: bool) -> Result<()> {
        match self.memory[memory].touch(range.clone(), who, &self.actors[who].clock, write) {
            None => Ok(()),
            Some(other) => {
                let does = if write { "writes" } else { "reads" };
                let (me, other) = (self.rank(who), self.rank(other));
                let text = format!("rank {me} {does} bytes {range:?} of memory {memory} beside rank {other}");
                Err(Fault::Race(format!("{text}: {}", self.positions())))
            }
        }
    }

    /// The memory of a part, and where it begins there.
    fn locate(&self, who: usize, part: &Part) -> Result<(usize, usize)> {
        if self.is_stream(who) && matches!(part.place, PartPlace::Slot(..) | PartPlace::Line(_)) {
            return Err(Fault::Outside(format!("a stream of rank {} touches {part}", self.rank(who))));
        }
        self.place(self.rank(who), self.actors[who].op, part)
    }

    /// The same for a rank and an operation.
    pub(super) fn place(&self, me: usize, index: usize, part: &Part) -> Result<(usize, usize)> {
        let world = self.case.world;
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

    fn is_stream(&self, who: usize) -> bool {
        who >= self.case.world
    }

    /// The rank of a host or a stream.
    fn rank(&self, who: usize) -> usize {
        who % self.case.world
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

    fn offers(&self, index: usize) -> bool {
        let op = &self.case.ops[index];
        op.path == Path::Direct || op.announced && op.path != Path::Inline
    }

    /// Where everybody is, for messages.
    fn positions(&self) -> String {
        let position = |(who, actor): (usize, &Actor)| {
            let me = self.rank(who);
            let step = self.plans.get(actor.op).and_then(|plans| plans[me].steps.get(actor.step));
            let name = if self.is_stream(who) { "a stream of rank" } else { "rank" };
            let step = step.filter(|_| actor.inside);
            format!("{name} {me} in operation {}, step {}: {step:?}", actor.op, actor.step)
        };
        self.actors.iter().enumerate().map(position).collect::<Vec<_>>().join("; ")
    }
}
