//! Operations on tensors of GPUs that do not go straight between them: the plan of the host runs on copies in memory of the host.
//! Some ranks have their tensors on the host, or a tensor is in memory that other ranks cannot reach.
//!
//! The ranks have met. The queue copies what this rank gives into registered memory of the host, piece by piece. This thread runs
//! the plan, as a rank with tensors on the host does. Before a step it waits for the pieces that the step reads ([`Along`]). What
//! this rank gets is copied back by a second queue, as soon as a piece of it is there. So copies in, the steps of the host and
//! copies out go on at once.

use std::time::{Duration, Instant};

use tensorwire_device::{Deadline, DeviceId, Mark, Queue, Span};

use super::buffer::Buffer;
use super::exec::{Executor, Queued};
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::{Part, PartPlace, Plan, Step};
use super::queued::after_hosts;
use super::runner::{Along, Met};
use crate::error::Result;
use crate::interrupt;
use crate::ranks::Ranks;
use crate::shm::control::Note;
use crate::shm::sentence::other_work;

/// Bytes of a piece. Smaller ones cost more calls of the driver, and larger ones more time before the first and behind the last.
/// The tests have many pieces in small tensors.
const PIECE: usize = if cfg!(feature = "hooks") { 16 << 10 } else { 2 << 20 };

/// An operation on memory of the host that stands for one on a GPU.
pub(super) struct Stage {
    operation: Operation,
    /// What is copied before and after it: into, from.
    before: Vec<(Span, Span)>,
    after: Vec<(Span, Span)>,
}

impl Stage {
    pub(super) fn new(group: &Ranks, operation: &Operation, me: usize) -> Result<Self> {
        let (gives, gets) = operation.gives_and_gets(me);
        let mut before: Vec<(Span, Span)> = Vec::new();
        let mut after = Vec::new();
        let room = |len: usize| -> Result<Span> {
            Ok(Span::whole(group.context.pool(&DeviceId::Host)?.alloc(len)?).slice(0..len)?)
        };
        for span in operation.input.spans().filter(|_| gives) {
            before.push((room(span.len())?, span.clone()));
        }
        for span in operation.output.spans().filter(|_| gets) {
            // A tensor that is reduced in place stays one.
            let same = before.iter().find(|(_, from)| from.view().is_same(span.view()));
            let there = same.map_or_else(|| room(span.len()), |(there, _)| Ok(there.clone()))?;
            after.push((span.clone(), there));
        }
        let input = Buffer::of(before.iter().map(|(there, _)| there.clone()));
        let output = Buffer::of(after.iter().map(|(_, there)| there.clone()));
        Ok(Self { operation: operation.on_host(input, output), before, after })
    }
}

/// Copies that belong together, with the byte of the whole buffer at which they end.
struct Piece {
    end: usize,
    copies: Vec<(Span, Span)>,
}

/// The copies of a buffer, in pieces.
fn pieces(copies: &[(Span, Span)]) -> Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = 0;
    for (into, from) in copies {
        let mut done = 0;
        while done < into.len() {
            // Pieces end at multiples of their length, wherever tensors begin.
            let room = PIECE - at % PIECE;
            let len = room.min(into.len() - done);
            let part = (into.slice(done..done + len)?, from.slice(done..done + len)?);
            (at, done) = (at + len, done + len);
            match pieces.last_mut() {
                Some(piece) if room < PIECE => {
                    piece.copies.push(part);
                    piece.end = at;
                }
                _ => pieces.push(Piece { end: at, copies: vec![part] }),
            }
        }
    }
    Ok(pieces)
}

/// When the first of some copies was queued, and when they were seen to be done.
#[derive(Debug, Default, Clone, Copy)]
struct Busy {
    /// Until when what is counted so far went on.
    until: Option<Instant>,
    sum: Duration,
}

impl Busy {
    /// Something that was queued then is done by now. A queue does one after the other.
    fn add(&mut self, queued: Instant, now: Instant) {
        let begin = self.until.map_or(queued, |until| until.max(queued));
        self.sum += now.saturating_duration_since(begin);
        self.until = Some(now);
    }
}

/// What went on while the plan ran, as this thread has seen it between steps.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Overlap {
    bytes: usize,
    copied_in: Busy,
    copied_out: Busy,
    /// What this thread has copied and reduced.
    worked: Duration,
    elapsed: Duration,
}

impl Overlap {
    /// A line for people.
    pub(super) fn explain(&self) -> String {
        let micros = |time: Duration| time.as_micros();
        let sum = self.copied_in.sum + self.copied_out.sum + self.worked;
        let times = sum.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        format!(
            "  the last operation through memory of the host ({} bytes) took {} us: copies from the GPU {} us, the host's copies and \
             reductions {} us, copies to the GPU {} us; together {times:.2} times that\n",
            self.bytes,
            micros(self.elapsed),
            micros(self.copied_in.sum),
            micros(self.worked),
            micros(self.copied_out.sum),
        )
    }
}

/// What goes on beside the plan: copies in, and copies out.
struct Flow<'a> {
    group: &'a Ranks,
    deadline: Deadline,
    /// Copies in that are queued: where they end, and when they are done.
    coming: Vec<(usize, Mark, Instant)>,
    /// How many of them are done.
    come: usize,
    /// Copies out: how many bytes of each piece are not there yet.
    going: Vec<(Piece, usize)>,
    out: Option<&'a mut Box<dyn Queue>>,
    /// Copies out that are queued.
    gone: Vec<(Mark, Instant)>,
    /// How many of them are done.
    left: usize,
    step: Instant,
    seen: Overlap,
}

impl Flow<'_> {
    /// Takes note of copies that are done.
    fn look(&mut self) {
        while self.coming.get(self.come).is_some_and(|(_, mark, _)| mark.is_over()) {
            self.comes();
        }
        while let Some((_, queued)) = self.gone.get(self.left).filter(|(mark, _)| mark.is_over()) {
            self.seen.copied_out.add(*queued, Instant::now());
            self.left += 1;
        }
    }

    /// The next copy in is done.
    fn comes(&mut self) {
        if let Some((.., queued)) = self.coming.get(self.come) {
            self.seen.copied_in.add(*queued, Instant::now());
        }
        self.come += 1;
    }

    /// Waits until what this rank gives is there, up to a byte.
    fn needs(&mut self, lines: &Lines, end: usize) -> Result<(), Stop> {
        let needed = self.coming.partition_point(|(ends, ..)| *ends < end) + usize::from(end > 0);
        while let Some((_, mark, _)) = self.coming.get(self.come).filter(|_| self.come < needed) {
            settle(lines, self.group, mark, self.deadline)?;
            self.comes();
        }
        Ok(())
    }

    /// Some bytes of what this rank gets are there. Pieces of which all are there are copied out.
    fn has(&mut self, part: &Part) -> Result<(), Stop> {
        let (mut at, end) = (part.at, part.at + part.len);
        while at < end {
            let index = at / PIECE;
            let until = end.min((index + 1) * PIECE);
            if let Some((piece, missing)) = self.going.get_mut(index) {
                *missing = missing.saturating_sub(until - at);
                if *missing == 0
                    && let Some(out) = &mut self.out
                {
                    let copies = std::mem::take(&mut piece.copies);
                    send(&mut ***out, &copies)?;
                    self.gone.push((out.mark()?, Instant::now()));
                }
            }
            at = until;
        }
        Ok(())
    }
}

/// Queues copies one after the other.
fn send(queue: &mut dyn Queue, copies: &[(Span, Span)]) -> Result<()> {
    for (into, from) in copies {
        queue.copy(into.view(), from.view(), Default::default())?;
    }
    Ok(())
}

impl Along for Flow<'_> {
    fn before(&mut self, lines: &Lines, plan: &Plan, step: &Step) -> Result<(), Stop> {
        let input = |part: &Part| if part.place == PartPlace::Input { part.at + part.len } else { 0 };
        let end = match step {
            Step::Copy { from, .. } => input(from),
            Step::Reduce { inputs, .. } => plan.parts(inputs).iter().map(input).max().unwrap_or(0),
            Step::Signal(_) | Step::Wait(..) => 0,
        };
        self.needs(lines, end)?;
        self.step = Instant::now();
        Ok(())
    }

    fn after(&mut self, plan: &Plan, step: &Step) -> Result<(), Stop> {
        let output = |part: &&Part| part.place == PartPlace::Output;
        match step {
            Step::Copy { into, .. } => {
                self.seen.worked += self.step.elapsed();
                Some(into).filter(output).map_or(Ok(()), |part| self.has(part))?;
            }
            Step::Reduce { outputs, .. } => {
                self.seen.worked += self.step.elapsed();
                plan.parts(outputs).iter().filter(output).try_for_each(|part| self.has(part))?;
            }
            Step::Signal(_) | Step::Wait(..) => {}
        }
        self.look();
        Ok(())
    }
}

impl Executor {
    /// Runs an operation on tensors of a GPU through memory of the host, on a queue that is behind all that it must be behind. The
    /// copies of what this rank gets are queued by then, with a mark behind them.
    pub(super) fn put_staged(
        &mut self,
        group: &Ranks,
        met: &Met<'_>,
        stage: &Stage,
        queue: &mut dyn Queue,
        deadline: Deadline,
        queued: &mut Queued,
    ) -> Result<(), Stop> {
        queue.begin(None)?;
        met.operation.pack(queue)?;
        let begin = Instant::now();
        let mut coming = Vec::new();
        for Piece { end, copies } in pieces(&stage.before)? {
            send(queue, &copies)?;
            coming.push((end, queue.mark()?, Instant::now()));
        }
        let (mut begun, mut going) = (0, Vec::new());
        for piece in pieces(&stage.after)? {
            let bytes = piece.end - begun;
            begun = piece.end;
            going.push((piece, bytes));
        }
        // One piece need not overlap with others.
        let mut out = match (going.len(), met.operation.gpu()) {
            (2.., Some(device)) => Some(match self.outward.take() {
                Some((of, out)) if of == *device => (of, out),
                _ => (device.clone(), group.context.device(device)?.queue()?),
            }),
            _ => None,
        };
        // The other queue must not overtake what this one still has to do with these tensors.
        if let Some((_, out)) = &mut out {
            let before = coming.first().map_or_else(|| queue.mark(), |(_, mark, _)| Ok(mark.clone()))?;
            out.begin(None)?;
            out.follow(&before, self.lines.stop(), after_hosts(deadline))?;
            out.begin(None)?;
        }
        let (shape, path, signalled) = (met.shape.clone(), met.path, met.signalled);
        let met_on_host = Met { operation: &stage.operation, shape, path, peers: Vec::new(), signalled };
        let mut flow = Flow {
            group,
            deadline,
            coming,
            come: 0,
            going,
            out: out.as_mut().map(|(_, out)| out),
            gone: Vec::new(),
            left: 0,
            step: begin,
            seen: Overlap {
                bytes: met.operation.input.len().max(met.operation.output.len()),
                ..Overlap::default()
            },
        };
        let ran = self.runner.run_along(&mut self.lines, &met_on_host, deadline, &mut flow);
        let Flow { going, gone, left, mut seen, .. } = flow;
        // Whatever became of it, what is queued behind it comes behind its copies.
        if let Some((mark, _)) = gone.last() {
            queue.follow(mark, self.lines.stop(), after_hosts(deadline))?;
        }
        self.outward = out;
        queued.staged = Some(ran?);
        queue.begin(None)?;
        for (piece, _) in &going {
            send(queue, &piece.copies)?;
        }
        met.operation.unpack(queue)?;
        queued.mark = Some(queue.mark()?);
        if left < gone.len() {
            // What is not done is not counted: nobody waits for it here.
            let now = Instant::now();
            gone.get(left).into_iter().for_each(|(_, queued)| seen.copied_out.add(*queued, now));
        }
        seen.elapsed = begin.elapsed();
        self.flights.overlapped(seen);
        Ok(())
    }
}

/// Waits until this rank's queue has come to a mark.
fn settle(lines: &Lines, group: &Ranks, mark: &Mark, deadline: Deadline) -> Result<(), Stop> {
    match interrupt::in_slices(deadline, |slice| mark.wait(lines.stop(), slice)).map_err(Stop::Own)? {
        Err(tensorwire_device::Error::TimedOut) => Err(Stop::QueuesLate(own_queue(group))),
        other => Ok(other?),
    }
}

/// Only this rank's own queue was awaited.
pub(super) fn own_queue(group: &Ranks) -> Note {
    let text =
        format!("it waited for {}; {}", group.described_queues(&[group.control.me()]), other_work(false));
    Note { ranks: vec![group.rank], text }
}
