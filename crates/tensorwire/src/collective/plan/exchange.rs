//! The plans that move bytes unchanged, and reduce_scatter. Each rank publishes what it gives in its slot, round by
//! round. The ranks that need it take it from there. Each round has one signal and one wait.

use tensorwire_device::Caching;

use super::{Counts, LINE, Part, PartPlace, Plan, Who, whole_lines, windows};
use crate::collective::plan::shape::Shape;
use crate::shm::kind::Kind;

pub(super) fn plan(plan: &mut Plan, shape: &Shape) {
    let flow = Flow::new(shape);
    let (me, first) = (shape.me, shape.first());
    let publishes = flow.publishes(me);
    if shape.announced {
        plan.signal(1);
    }
    if publishes {
        plan.wait(Who::All, 0);
    }
    let rounds = flow.rounds();
    for round in 0..rounds {
        let tick = first + round as u32;
        if publishes {
            match round {
                0 => {}
                1 => plan.wait(Who::All, 1),
                _ => flow.readers().into_iter().for_each(|who| plan.wait(who, tick - 1)),
            }
            flow.publish(plan, round);
        }
        plan.signal(tick);
        if round == 0 {
            if !publishes {
                plan.wait(Who::All, 0);
            }
            flow.keep(plan);
        }
        flow.sources().into_iter().for_each(|who| plan.wait(who, tick));
        flow.take(plan, round);
    }
    if rounds.is_multiple_of(2) {
        plan.signal(first + rounds as u32);
    }
}

/// Parts up to so many bytes together are put with one copy, the own one too.
const TOGETHER: usize = 16 << 10;

/// Which rank gives what to which rank.
struct Flow<'a> {
    shape: &'a Shape,
    /// Whether each round has a lane for each rank, because each gets something else.
    lanes: bool,
    width: usize,
}

impl<'a> Flow<'a> {
    fn new(shape: &'a Shape) -> Self {
        let lanes = matches!(shape.kind, Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll);
        let mut most = shape.width(if lanes { shape.world } else { 1 });
        // One rank fills the slot for all: they take one round while it fills the next.
        if shape.kind == Kind::Scatter && !shape.inline {
            most = most.min(whole_lines(shape.window / shape.world).max(LINE));
        }
        // Where one round is enough, the slot holds the parts as the input does.
        let width = if lanes { most.min(shape.counts.largest()) } else { most };
        Self { shape, lanes, width }
    }

    /// Whether a rank gives anything to others.
    fn publishes(&self, rank: usize) -> bool {
        let root = self.shape.root;
        self.shape.world > 1
            && match self.shape.kind {
                Kind::Broadcast | Kind::Scatter => rank == root,
                Kind::Gather => rank != root,
                _ => true,
            }
    }

    /// Whether a rank gets anything from others.
    fn takes(&self, rank: usize) -> bool {
        let root = self.shape.root;
        self.shape.world > 1
            && match self.shape.kind {
                Kind::Broadcast | Kind::Scatter => rank != root,
                Kind::Gather => rank == root,
                _ => true,
            }
    }

    /// The ranks that read this rank's slot.
    fn readers(&self) -> Option<Who> {
        match self.shape.kind {
            Kind::Gather => Some(Who::One(self.shape.root)),
            _ => Some(Who::All),
        }
    }

    /// Whose slots this rank reads.
    fn sources(&self) -> Option<Who> {
        match self.shape.kind {
            _ if !self.takes(self.shape.me) => None,
            Kind::Broadcast | Kind::Scatter => Some(Who::One(self.shape.root)),
            _ => Some(Who::All),
        }
    }

    fn rounds(&self) -> usize {
        let shape = self.shape;
        let ranks = 0..shape.world;
        let most = ranks.clone().filter(|&rank| self.publishes(rank)).flat_map(|from| {
            let to = if self.lanes { ranks.clone() } else { from..from + 1 };
            to.map(move |to| shape.bytes(from, to))
        });
        windows(most.max().unwrap_or(0), self.width)
    }

    /// The part of `from`'s gift for `to` that goes in a round: counted from its start.
    fn window(&self, from: usize, to: usize, round: usize) -> std::ops::Range<usize> {
        let bytes = self.shape.bytes(from, to);
        let start = (round * self.width).min(bytes);
        start..(start + self.width).min(bytes)
    }

    /// Where that part lies in `from`'s slot.
    fn slot(&self, from: usize, to: usize, round: usize) -> Part {
        let start = if self.lanes { to * self.width } else { 0 };
        let window = self.window(from, to, round);
        Part::new(self.shape.published(from, round), start..start + window.len())
    }

    /// Fills this rank's slot.
    fn publish(&self, plan: &mut Plan, round: usize) {
        let me = self.shape.me;
        let mut put = |to: usize| {
            let window = self.window(me, to, round);
            let given = self.shape.given(me, to).start;
            let from = Part::new(PartPlace::Input, given + window.start..given + window.end);
            plan.copy(self.slot(me, to, round), from, Caching::Give);
        };
        match (self.lanes, &self.shape.counts) {
            (false, _) => put(me),
            // All parts at once, which lie in the slot as they do in the input.
            (true, Counts::Even(bytes)) if *bytes == self.width && bytes * self.shape.world <= TOGETHER => {
                let all = 0..bytes * self.shape.world;
                let into = Part::new(self.shape.published(me, round), all.clone());
                plan.copy(into, Part::new(PartPlace::Input, all), Caching::Give);
            }
            (true, _) => self.shape.others().for_each(put),
        }
    }

    /// What a rank gives to itself.
    fn keep(&self, plan: &mut Plan) {
        let shape = self.shape;
        let me = shape.me;
        let has = match shape.kind {
            Kind::Gather | Kind::Scatter => me == shape.root,
            Kind::Broadcast | Kind::ReduceScatter => false,
            _ => true,
        };
        if has {
            let into = Part::new(PartPlace::Output, shape.taken(me, me));
            plan.copy(into, Part::new(PartPlace::Input, shape.given(me, me)), shape.caching());
        }
        if shape.kind == Kind::ReduceScatter && shape.world == 1 {
            let (into, from) = (shape.taken(me, me), shape.given(me, me));
            let parts = |place, range| std::iter::once(Part::new(place, range));
            plan.reduce(parts(PartPlace::Input, from), parts(PartPlace::Output, into), shape.caching());
        }
    }

    /// Takes what others have published for this rank.
    fn take(&self, plan: &mut Plan, round: usize) {
        let shape = self.shape;
        let me = shape.me;
        if !self.takes(me) {
            return;
        }
        if shape.kind == Kind::ReduceScatter {
            let window = self.window(me, me, round);
            let given = shape.given(me, me).start;
            let input = |from: usize| match from == me {
                true => Part::new(PartPlace::Input, given + window.start..given + window.end),
                false => self.slot(from, me, round),
            };
            let output = Part::new(PartPlace::Output, window.clone());
            plan.reduce((0..shape.world).map(input), std::iter::once(output), shape.caching());
            return;
        }
        for from in shape.others().filter(|&from| self.publishes(from)) {
            let to = if self.lanes { me } else { from };
            let window = self.window(from, to, round);
            let start = shape.taken(from, me).start;
            let into = Part::new(PartPlace::Output, start + window.start..start + window.end);
            plan.copy(into, self.slot(from, to, round), shape.caching());
        }
    }
}
