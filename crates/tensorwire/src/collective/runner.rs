//! Runs the steps of a plan on the caller's thread, one after the other. A step that waits holds up the steps behind it.
//! (`queued` has the steps run on a device's queue.)

use std::sync::Arc;

use smallvec::SmallVec;
use tensorwire_device::flag::LINE;
use tensorwire_device::sync::{Ordering, fence};
use tensorwire_device::{Caching, Deadline, Queue, View};

use super::buffer::Buffer;
use super::lines::{Lines, Stop};
use super::operation::Operation;
use super::plan::{Part, PartPlace, Plan, Shape, Step, Who};
use super::tuning::Tuning;
use crate::error::{Error, Result};
use crate::shm::control::{Control, Desk, HALF};
use crate::shm::cores::Room;
use crate::shm::kind::Path;

/// The queue of one rank in one group, and the plans that it has run.
#[derive(Debug)]
pub(super) struct Runner {
    queue: Box<dyn Queue>,
    plans: Plans,
    /// How many threads operations of so many bytes and more have, and how many the queue has now.
    threads: usize,
    share: usize,
    sharing: usize,
}

/// An operation whose ranks meet; once they have, the way is agreed.
pub(super) struct Met<'a> {
    pub(super) operation: &'a Operation,
    pub(super) shape: Shape,
    pub(super) path: Path,
    /// The input and output of each rank, where they are reached directly.
    pub(super) peers: Vec<Reach>,
    /// Whether the first signal has been given.
    pub(super) signalled: bool,
}

impl Runner {
    pub(super) fn new(queue: Box<dyn Queue>) -> Self {
        Self { queue, plans: Plans::default(), threads: 1, share: 0, sharing: 1 }
    }

    /// The plan of an operation whose ranks have met.
    pub(super) fn plan(&mut self, met: &Met<'_>) -> Arc<Plan> {
        self.plans.get(&met.shape, met.path)
    }

    /// The queue itself, for what comes before and after the steps.
    pub(super) fn queue(&mut self) -> &mut dyn Queue {
        &mut *self.queue
    }

    /// How many threads large operations get: all ranks have said by now where they may run.
    pub(super) fn set_room(&mut self, room: Room, world: usize) {
        let tuning = Tuning::new(world);
        (self.threads, self.share) = (room.threads(tuning.threads), tuning.share);
        #[cfg(feature = "hooks")]
        super::hooks::threads().inspect(|threads| (self.threads, self.share) = (*threads, 0));
    }

    /// Runs all steps; gives the plan's last tick.
    #[inline(always)]
    pub(super) fn run(&mut self, lines: &mut Lines, met: &Met<'_>, deadline: Deadline) -> Result<u32, Stop> {
        self.run_along(lines, met, deadline, &mut ())
    }

    /// The same, with something that goes on beside the steps.
    #[inline(always)]
    pub(super) fn run_along(
        &mut self,
        lines: &mut Lines,
        met: &Met<'_>,
        deadline: Deadline,
        along: &mut impl Along,
    ) -> Result<u32, Stop> {
        let Met { operation, shape, path, peers, signalled } = met;
        self.share(operation);
        let plan = self.plans.get(shape, *path);
        let job = Job { number: lines.number, operation, peers };
        // Every plan begins with the first signal.
        for (index, step) in plan.steps.iter().enumerate().skip((*signalled).into()) {
            lines.point(operation.kind, index + 1);
            along.before(lines, &plan, step)?;
            match step {
                Step::Copy { into, from, caching } => {
                    job.look(lines)?;
                    job.copy(lines, into, from, |dst, src| Ok(self.queue.copy(dst, src, *caching)?))?;
                    job.look(lines)?;
                }
                Step::Reduce { inputs, outputs, caching } => {
                    let (inputs, outputs) = (plan.parts(inputs), plan.parts(outputs));
                    job.look(lines)?;
                    job.reduce(lines, &mut *self.queue, inputs, outputs, *caching)?;
                    job.look(lines)?;
                }
                Step::Signal(tick) => lines.signal(&mut *self.queue, *tick)?,
                Step::Wait(Who::All, tick) => lines.wait_all(&mut *self.queue, *tick, deadline)?,
                Step::Wait(Who::One(place), tick) => {
                    lines.wait_for(&mut *self.queue, *place, *tick, deadline)?;
                }
            }
            along.after(&plan, step)?;
        }
        lines.point(operation.kind, plan.steps.len() + 1);
        // What was read may have been overwritten by a rank that left a cancelled operation: then the word is set.
        fence(Ordering::Acquire);
        if lines.is_cancelled() {
            return Err(Stop::Aborted);
        }
        Ok(plan.ticks)
    }

    /// Has the queue take as many threads as the operation is worth. The other ranks need not do the same.
    fn share(&mut self, operation: &Operation) {
        if self.threads == 1 {
            return;
        }
        let bytes = operation.input.len().max(operation.output.len());
        let threads = if bytes < self.share { 1 } else { self.threads };
        if self.sharing != threads {
            self.sharing = threads;
            self.queue.share(threads);
        }
    }
}

/// What goes on beside the steps of a plan: it makes what they read, and takes what they have written.
pub(super) trait Along {
    /// Before a step.
    #[inline(always)]
    fn before(&mut self, _lines: &Lines, _plan: &Plan, _step: &Step) -> Result<(), Stop> {
        Ok(())
    }

    /// After a step.
    #[inline(always)]
    fn after(&mut self, _plan: &Plan, _step: &Step) -> Result<(), Stop> {
        Ok(())
    }
}

impl Along for () {}

/// What one operation works on.
pub(super) struct Job<'a> {
    pub(super) number: u32,
    pub(super) operation: &'a Operation,
    /// The input and output of each rank, where they are reached directly.
    pub(super) peers: &'a [Reach],
}

/// Another rank's memory.
#[derive(Debug, Default)]
pub(super) struct Reach {
    pub(super) input: Buffer,
    pub(super) output: Buffer,
}

type Views<'a> = SmallVec<[View<'a>; 16]>;

impl Job<'_> {
    /// One copy of a plan. It becomes several where a side lies in several places, and none where both are the same memory.
    pub(super) fn copy<'a>(
        &'a self,
        lines: &'a Lines,
        into: &Part,
        from: &Part,
        mut copy: impl FnMut(View<'a>, View<'a>) -> Result<()>,
    ) -> Result<(), Stop> {
        let mut done = 0;
        while done < into.len {
            let (dst, src) = (self.view(&lines.control, into, done)?, self.view(&lines.control, from, done)?);
            let len = dst.len().min(src.len());
            let (dst, src) = (dst.slice(0..len)?, src.slice(0..len)?);
            if !dst.is_same(src) {
                copy(dst, src)?;
            }
            done += len.max(1);
        }
        Ok(())
    }

    /// One reduction of a plan, on a queue.
    #[inline(always)]
    pub(super) fn reduce(
        &self,
        lines: &Lines,
        queue: &mut dyn Queue,
        inputs: &[Part],
        outputs: &[Part],
        to: Caching,
    ) -> Result<(), Stop> {
        let len = inputs.first().map_or(0, |part| part.len);
        let (mut from, mut into) = (Views::new(), Views::new());
        let mut done = 0;
        while done < len {
            let mut run = len - done;
            for (views, parts) in [(&mut from, inputs), (&mut into, outputs)] {
                views.clear();
                for part in parts {
                    let view = self.view(&lines.control, part, done)?;
                    run = run.min(view.len());
                    views.push(view);
                }
            }
            for view in from.iter_mut().chain(&mut into).filter(|view| view.len() != run) {
                *view = view.slice(0..run)?;
            }
            queue.reduce(self.operation.op, self.operation.dtype, &from, &into, to)?;
            done += run.max(1);
        }
        Ok(())
    }

    /// In other ranks' memory: nobody touches it for long after a cancellation.
    pub(super) fn look(&self, lines: &Lines) -> Result<(), Stop> {
        if !self.peers.is_empty() && lines.stop().is_set() { Err(Stop::Aborted) } else { Ok(()) }
    }

    /// The bytes of a part behind the first `done`, as far as they lie together.
    #[inline]
    fn view<'a>(&'a self, control: &'a Control, part: &Part, done: usize) -> Result<View<'a>> {
        let (at, most) = (part.at + done, part.len - done);
        let fixed = |start: usize| Ok(View::new(control.region(), start + at..start + at + most)?);
        let map = control.map();
        let peer =
            |place: usize| self.peers.get(place).ok_or_else(|| Error::bug("a peer's memory is not mapped"));
        match part.place {
            PartPlace::Input => self.operation.input.run(at, most),
            PartPlace::Output => self.operation.output.run(at, most),
            PartPlace::Slot(place, half) => {
                let half = (self.number as usize + usize::from(half)) % 2;
                fixed(map.slot(place) + half * HALF)
            }
            PartPlace::Line(place) => {
                let line = self.number as usize % Desk::STEPS * LINE;
                fixed(map.desk(place) + Desk::PROGRESS + line + super::lines::PAYLOAD_AT)
            }
            PartPlace::PeerInput(place) => peer(place)?.input.run(at, most),
            PartPlace::PeerOutput(place) => peer(place)?.output.run(at, most),
        }
    }
}

/// Plans that were used last.
#[derive(Debug, Default)]
pub(super) struct Plans(Vec<(Shape, Path, Arc<Plan>)>);

impl Plans {
    /// How many are kept.
    const MOST: usize = 32;
    /// Plans with more steps are not kept: making them costs little beside running them.
    const LONGEST: usize = 1000;

    pub(super) fn get(&mut self, shape: &Shape, path: Path) -> Arc<Plan> {
        let same = |(other, by, _): &(Shape, Path, Arc<Plan>)| *by == path && other == shape;
        if let Some(at) = self.0.iter().position(same) {
            if at > 0 {
                self.0[..=at].rotate_right(1);
            }
            return self.0[0].2.clone();
        }
        let plan = Arc::new(Plan::new(shape, path));
        if plan.steps.len() <= Self::LONGEST {
            self.0.truncate(Self::MOST - 1);
            self.0.insert(0, (shape.clone(), path, plan.clone()));
        }
        plan
    }
}
