//! What a rank does in each part of an operation on several hosts.

use std::ops::Range;

use tensorwire_device::flag::LINE;
use tensorwire_device::{Queue, Span};

use super::wide::TwoPhases;
use super::{copy, memory};
use crate::collective::buffer::Buffer;
use crate::collective::operation::Operation;
use crate::collective::plan::{Counts, Shape};
use crate::error::Result;
use crate::ranks::Ranks;
use crate::shm::kind::Kind;

/// The parts of one operation, as one rank does them.
pub(super) struct Parts {
    /// On this host, before the exchange.
    pub(super) collect: Operation,
    pub(super) traffic: Traffic,
    /// On this host, after it.
    pub(super) spread: Operation,
    /// Where the result was made, and where it belongs.
    finish: Option<(Buffer, Buffer)>,
}

/// What a leader gives to others and gets of them.
#[derive(Default)]
pub(super) struct Traffic {
    pub(super) steps: Vec<TrafficStep>,
    /// Between the first step and the second.
    pub(super) reduction: Option<HostReduction>,
}

/// Bytes to and from hosts.
#[derive(Default)]
pub(super) struct TrafficStep {
    pub(super) given: Vec<(usize, Buffer)>,
    pub(super) wanted: Vec<(usize, Buffer)>,
}

/// Makes a result of the parts of all hosts.
pub(super) struct HostReduction {
    phases: TwoPhases,
    /// By host.
    parts: Vec<Span>,
    into: Span,
    /// Whether nothing is written where something that is sent may lie.
    pub(super) apart: bool,
    /// The part of this host, where it lies in several places, and where it is wanted.
    own: Option<(Buffer, Buffer)>,
}

impl HostReduction {
    pub(super) fn run(&self, queue: &mut dyn Queue) -> Result<()> {
        self.own.as_ref().map_or(Ok(()), |(from, into)| copy(from, into, queue))?;
        self.phases.finish(&self.parts, &self.into, queue)
    }
}

/// Up to so many bytes go whole to all hosts, which all reduce them.
const SMALL: usize = 64 << 10;

/// A rank in its group.
struct Here<'a> {
    group: &'a Ranks,
    of: &'a Operation,
    shape: Shape,
    /// This host, and this rank among its ranks.
    own: usize,
    me: usize,
    leads: bool,
}

impl Parts {
    pub(super) fn new(group: &Ranks, of: &Operation, queue: &mut dyn Queue) -> Result<Self> {
        let shape = of.shape(group.rank, group.world()).0;
        let own = group.hosts.iter().position(|host| host.contains(&group.rank)).unwrap_or(0);
        let me = group.control.me();
        let here = Here { group, of, shape, own, me, leads: me == 0 };
        match of.kind {
            Kind::Broadcast => here.broadcast(),
            Kind::AllGather | Kind::Sizes => here.all_gather(),
            Kind::Gather => here.gather(),
            Kind::Scatter => here.scatter(),
            Kind::AllToAll => here.all_to_all(),
            Kind::AllReduce | Kind::Reduce => here.reduce(queue),
            Kind::ReduceScatter => here.reduce_scatter(queue),
            _ => Ok(here.parts(here.nothing(), Traffic::default(), here.nothing())),
        }
    }

    /// Puts the result where it belongs.
    pub(super) fn finish(&self, queue: &mut dyn Queue) -> Result<()> {
        self.finish.as_ref().map_or(Ok(()), |(from, into)| copy(from, into, queue))
    }
}

/// Bytes that are copied between the ranks of a host.
struct Moved {
    input: Buffer,
    output: Buffer,
}

impl Here<'_> {
    fn parts(&self, collect: Operation, traffic: Traffic, spread: Operation) -> Parts {
        Parts { collect, traffic, spread, finish: None }
    }

    /// The ranks of this host.
    fn ranks(&self) -> &[usize] {
        self.ranks_of(self.own)
    }

    fn ranks_of(&self, host: usize) -> &[usize] {
        self.group.hosts.get(host).map_or(&[], Vec::as_slice)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.group.hosts.len()).filter(move |&host| host != own)
    }

    fn host_of(&self, rank: usize) -> usize {
        self.group.hosts.iter().position(|host| host.contains(&rank)).unwrap_or(0)
    }

    /// The place of a rank on its host.
    fn place_of(&self, rank: usize) -> usize {
        self.ranks_of(self.host_of(rank)).iter().position(|&other| other == rank).unwrap_or(0)
    }

    /// An operation of this host in which nothing moves.
    fn nothing(&self) -> Operation {
        self.near(Kind::Barrier, 0, Counts::Even(0), Moved { input: Buffer::Empty, output: Buffer::Empty })
    }

    /// An operation of this host.
    fn near(&self, kind: Kind, root: usize, counts: Counts, moved: Moved) -> Operation {
        let mut near = Operation::new(kind, self.of.dtype);
        (near.root, near.counts, near.late) = (root, counts, self.of.late);
        (near.input, near.output) = (moved.input, moved.output);
        near.made_here = true;
        near
    }

    /// Brings bytes of one rank of this host to another.
    fn ship(&self, from: usize, to: usize, bytes: usize, moved: Moved) -> Operation {
        if from == to {
            return self.nothing();
        }
        let counts = (0..self.ranks().len()).map(|place| if place == from { bytes } else { 0 }).collect();
        self.near(Kind::Gather, to, Counts::PerRank(counts), moved)
    }

    /// What rank `from` gives to `to`.
    fn bytes(&self, from: usize, to: usize) -> usize {
        self.of.counts.of(self.of.kind, from, to, self.group.world())
    }

    /// Parts of a buffer, in this order.
    fn pick(&self, buffer: &Buffer, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<Buffer> {
        let mut spans = Vec::new();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let span = buffer.run(at, range.end - at)?.to_span();
                at += span.len();
                spans.push(span);
            }
        }
        Ok(Buffer::of(spans))
    }

    fn broadcast(&self) -> Result<Parts> {
        let (bytes, home) = (self.of.counts.largest(), self.host_of(self.of.root));
        let (input, output) = (self.of.input.clone(), self.of.output.clone());
        let mut step = TrafficStep::default();
        if self.own == home {
            let root = self.place_of(self.of.root);
            let has = if self.me == root { input.clone() } else { output.clone() };
            if self.leads {
                step.given = self.others().map(|host| (host, has.clone())).collect();
            }
            let collect = self.near(Kind::Broadcast, root, Counts::Even(bytes), Moved { input, output });
            let traffic = Traffic { steps: vec![step], reduction: None };
            return Ok(self.parts(collect, traffic, self.nothing()));
        }
        if self.leads {
            step.wanted = vec![(home, output.clone())];
        }
        let spread = self.spread_from_leader(bytes, output);
        Ok(self.parts(self.nothing(), Traffic { steps: vec![step], reduction: None }, spread))
    }

    /// The leader has what all ranks of this host get.
    fn spread_from_leader(&self, bytes: usize, whole: Buffer) -> Operation {
        let moved = match self.leads {
            true => Moved { input: whole, output: Buffer::Empty },
            false => Moved { input: Buffer::Empty, output: whole },
        };
        self.near(Kind::Broadcast, 0, Counts::Even(bytes), moved)
    }

    fn all_gather(&self) -> Result<Parts> {
        let (shape, rank, output) = (&self.shape, self.group.rank, self.of.output.clone());
        let of_host =
            |host: usize| self.pick(&output, self.ranks_of(host).iter().map(|&from| shape.taken(from, rank)));
        let counts: Vec<usize> = self.ranks().iter().map(|&from| self.bytes(from, from)).collect();
        let mut step = TrafficStep::default();
        let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        if self.leads {
            let own = of_host(self.own)?;
            step.given = self.others().map(|host| (host, own.clone())).collect();
            step.wanted = self.others().map(|host| Ok((host, of_host(host)?))).collect::<Result<_>>()?;
            moved.output = own;
        }
        let collect = self.near(Kind::Gather, 0, Counts::PerRank(counts.into()), moved);
        let spread = self.spread_from_leader(output.len(), output.clone());
        Ok(self.parts(collect, Traffic { steps: vec![step], reduction: None }, spread))
    }

    fn gather(&self) -> Result<Parts> {
        let (home, root) = (self.host_of(self.of.root), self.place_of(self.of.root));
        let (bytes, world) = (self.of.counts.largest(), self.group.world());
        let mut step = TrafficStep::default();
        let mut whole = Buffer::Empty;
        let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        if self.leads && self.own == home {
            whole = match root {
                0 => self.of.output.clone(),
                _ => Buffer::one(memory(bytes * world)?),
            };
            let of_host = |host: usize| {
                self.pick(&whole, self.ranks_of(host).iter().map(|&from| from * bytes..(from + 1) * bytes))
            };
            step.wanted = self.others().map(|host| Ok((host, of_host(host)?))).collect::<Result<_>>()?;
            moved.output = of_host(self.own)?;
        } else if self.leads {
            moved.output = Buffer::one(memory(bytes * self.ranks().len())?);
            step.given = vec![(home, moved.output.clone())];
        }
        let collect = self.near(Kind::Gather, 0, Counts::Even(bytes), moved);
        let spread = match self.own == home {
            true => {
                let moved = Moved { input: whole, output: self.of.output.clone() };
                self.ship(0, root, bytes * world, moved)
            }
            false => self.nothing(),
        };
        Ok(self.parts(collect, Traffic { steps: vec![step], reduction: None }, spread))
    }

    fn scatter(&self) -> Result<Parts> {
        let (home, root) = (self.host_of(self.of.root), self.place_of(self.of.root));
        let (bytes, world) = (self.of.counts.largest(), self.group.world());
        let mut step = TrafficStep::default();
        let (mut collect, mut parts) = (self.nothing(), Buffer::Empty);
        if self.own == home {
            let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
            if self.leads {
                let whole = match root {
                    0 => self.of.input.clone(),
                    _ => Buffer::one(memory(bytes * world)?),
                };
                let of_host = |host: usize| {
                    self.pick(&whole, self.ranks_of(host).iter().map(|&to| to * bytes..(to + 1) * bytes))
                };
                step.given = self.others().map(|host| Ok((host, of_host(host)?))).collect::<Result<_>>()?;
                parts = of_host(self.own)?;
                moved.output = whole;
            }
            collect = self.ship(root, 0, bytes * world, moved);
        } else if self.leads {
            parts = Buffer::one(memory(bytes * self.ranks().len())?);
            step.wanted = vec![(home, parts.clone())];
        }
        let moved = Moved { input: parts, output: self.of.output.clone() };
        let spread = self.near(Kind::Scatter, 0, Counts::Even(bytes), moved);
        Ok(self.parts(collect, Traffic { steps: vec![step], reduction: None }, spread))
    }

    fn all_to_all(&self) -> Result<Parts> {
        let world = self.group.world();
        let given = |from: usize| (0..world).map(|to| self.bytes(from, to)).sum::<usize>();
        let taken = |to: usize| (0..world).map(|from| self.bytes(from, to)).sum::<usize>();
        let mut step = TrafficStep::default();
        let mut collected = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        let mut spread = Moved { input: Buffer::Empty, output: self.of.output.clone() };
        if self.leads {
            // What ranks of this host give, one after the other, and where the part of each pair is.
            let all: usize = self.ranks().iter().map(|&from| given(from)).sum();
            let gifts = Buffer::one(memory(all)?);
            let start = |from: usize| -> usize {
                self.ranks().iter().take_while(|&&before| before != from).map(|&before| given(before)).sum()
            };
            let part = |from: usize, to: usize| {
                let at = start(from) + (0..to).map(|before| self.bytes(from, before)).sum::<usize>();
                at..at + self.bytes(from, to)
            };
            // What comes from each host: of each of its ranks, for each of this host.
            let mut arrivals = Vec::new();
            for host in 0..self.group.hosts.len() {
                let there = self.ranks_of(host);
                if host == self.own {
                    arrivals.push(Buffer::Empty);
                    continue;
                }
                let ranges = self.ranks().iter().flat_map(|&from| there.iter().map(move |&to| (from, to)));
                step.given.push((host, self.pick(&gifts, ranges.map(|(from, to)| part(from, to)))?));
                let bytes =
                    there.iter().flat_map(|&from| self.ranks().iter().map(move |&to| self.bytes(from, to)));
                let arrival = Buffer::one(memory(bytes.sum())?);
                step.wanted.push((host, arrival.clone()));
                arrivals.push(arrival);
            }
            let mut input = Vec::new();
            for &to in self.ranks() {
                for from in 0..world {
                    let host = self.host_of(from);
                    let found = if host == self.own {
                        self.pick(&gifts, std::iter::once(part(from, to)))?
                    } else {
                        let before = self.ranks_of(host).iter().take_while(|&&other| other != from);
                        let lane = |from: usize| self.ranks().iter().map(move |&to| self.bytes(from, to));
                        let rows: usize = before.flat_map(|&other| lane(other)).sum();
                        let own = self.ranks().iter().take_while(|&&other| other != to);
                        let at = rows + own.map(|&other| self.bytes(from, other)).sum::<usize>();
                        let arrival = arrivals.get(host).unwrap_or(&Buffer::Empty);
                        self.pick(arrival, std::iter::once(at..at + self.bytes(from, to)))?
                    };
                    input.extend(found.spans().cloned());
                }
            }
            (collected.output, spread.input) = (gifts, Buffer::of(input));
        }
        let counts = |of: &dyn Fn(usize) -> usize| {
            Counts::PerRank(self.ranks().iter().map(|&rank| of(rank)).collect())
        };
        let collect = self.near(Kind::Gather, 0, counts(&given), collected);
        let spread = self.near(Kind::Scatter, 0, counts(&taken), spread);
        Ok(self.parts(collect, Traffic { steps: vec![step], reduction: None }, spread))
    }

    /// How the inputs of a reduction become the part of this host, in memory of the leader: the operation, and that memory.
    fn partial(&self, place: Option<Span>, queue: &mut dyn Queue) -> Result<(TwoPhases, Operation, Span)> {
        let alone = self.of.tensors == 1 && self.group.hosts.iter().all(|host| host.len() == 1);
        let phases = TwoPhases::new(self.of.op, self.of.dtype, self.group.world() * self.of.tensors, alone);
        let whole = self.of.input.len() / self.of.tensors.max(1);
        if alone {
            if let Buffer::One(span) = &self.of.input {
                return Ok((phases, self.nothing(), span.clone()));
            }
            let packed = memory(whole)?;
            copy(&self.of.input, &Buffer::one(packed.clone()), queue)?;
            return Ok((phases, self.nothing(), packed));
        }
        let mut input = self.of.input.clone();
        if phases.wide != self.of.dtype && input.len() > 0 {
            let plain = match &input {
                Buffer::One(span) => span.clone(),
                _ => {
                    let packed = memory(input.len())?;
                    copy(&input, &Buffer::one(packed.clone()), queue)?;
                    packed
                }
            };
            input = Buffer::one(phases.widen(&plain, queue)?);
        }
        let part = match place.filter(|_| phases.in_place()) {
            Some(place) => place,
            None if self.leads => memory(phases.widened(whole))?,
            None => memory(0)?,
        };
        let output = if self.leads { Buffer::one(part.clone()) } else { Buffer::Empty };
        let counts = Counts::Even(phases.widened(whole));
        let mut collect = self.near(Kind::Reduce, 0, counts, Moved { input, output });
        (collect.op, collect.dtype, collect.tensors) = (phases.inside, phases.wide, self.of.tensors);
        Ok((phases, collect, part))
    }

    fn reduce(&self, queue: &mut dyn Queue) -> Result<Parts> {
        let all = self.of.kind == Kind::AllReduce;
        let (home, root) = (self.host_of(self.of.root), self.place_of(self.of.root));
        let bytes = self.of.counts.largest();
        // The result is made in place where it lies in one piece.
        let place = match &self.of.output {
            Buffer::One(span) if self.leads && (all || (self.own == home && root == 0)) => Some(span.clone()),
            _ => None,
        };
        let (phases, collect, part) = self.partial(place.clone(), queue)?;
        let place = place.filter(|_| phases.in_place());
        let mut traffic = Traffic::default();
        let mut result = place.clone();
        if self.leads && (all || self.own == home) && result.is_none() {
            result = Some(memory(bytes)?);
        }
        if self.leads && bytes > 0 {
            traffic = self.reduction((!all).then_some(home), (phases, part, bytes), result.clone())?;
        }
        let result = result.map_or(Buffer::Empty, Buffer::one);
        let whole = if self.leads { result.clone() } else { self.of.output.clone() };
        let spread = match () {
            () if all => self.spread_from_leader(bytes, whole),
            () if self.own == home => {
                self.ship(0, root, bytes, Moved { input: result.clone(), output: self.of.output.clone() })
            }
            () => self.nothing(),
        };
        let mut parts = self.parts(collect, traffic, spread);
        if self.leads && place.is_none() && (all || (self.own == home && root == 0)) {
            parts.finish = Some((result, self.of.output.clone()));
        }
        Ok(parts)
    }

    /// What leaders do with the parts of their hosts: all get the result, or the leader of one host.
    fn reduction(
        &self,
        home: Option<usize>,
        (phases, part, bytes): (TwoPhases, Span, usize),
        result: Option<Span>,
    ) -> Result<Traffic> {
        let (hosts, wide) = (self.group.hosts.len(), part.len());
        let mut traffic =
            Traffic { steps: vec![TrafficStep::default(), TrafficStep::default()], reduction: None };
        if let Some(home) = home.filter(|&home| home != self.own) {
            traffic.steps[0].given.push((home, Buffer::one(part)));
            return Ok(traffic);
        }
        let Some(result) = result else { return Ok(traffic) };
        // Large: each host makes a part of the result, and gives it to all.
        let element = self.of.dtype.size();
        let count = bytes / element;
        let each = match home.is_none() && wide > SMALL {
            true => count.div_ceil(hosts).next_multiple_of(LINE),
            false => count,
        };
        let scatters = each < count;
        let elements = |host: usize| (host * each).min(count)..((host + 1) * each).min(count);
        let own = if scatters { elements(self.own) } else { 0..count };
        let width = wide / count.max(1);
        let mut parts = Vec::new();
        for host in 0..hosts {
            if host == self.own {
                parts.push(part.slice(own.start * width..own.end * width)?);
                continue;
            }
            let there = memory(own.len() * width)?;
            traffic.steps[0].wanted.push((host, Buffer::one(there.clone())));
            parts.push(there);
            if home.is_none() {
                let theirs = if scatters { elements(host) } else { 0..count };
                let theirs = part.slice(theirs.start * width..theirs.end * width)?;
                traffic.steps[0].given.push((host, Buffer::one(theirs)));
            }
        }
        let into = result.slice(own.start * element..own.end * element)?;
        if scatters {
            for host in self.others() {
                traffic.steps[1].given.push((host, Buffer::one(into.clone())));
                let theirs = elements(host);
                let theirs = result.slice(theirs.start * element..theirs.end * element)?;
                traffic.steps[1].wanted.push((host, Buffer::one(theirs)));
            }
        }
        let apart = home.is_some() || scatters;
        traffic.reduction = Some(HostReduction { phases, parts, into, apart, own: None });
        Ok(traffic)
    }

    fn reduce_scatter(&self, queue: &mut dyn Queue) -> Result<Parts> {
        let (phases, collect, part) = self.partial(None, queue)?;
        let mut traffic =
            Traffic { steps: vec![TrafficStep::default(), TrafficStep::default()], reduction: None };
        let counts: Vec<usize> = self.ranks().iter().map(|&to| self.bytes(to, to)).collect();
        let all: usize = counts.iter().sum();
        let mut result = Buffer::Empty;
        if self.leads {
            let whole = Buffer::one(part);
            let of_host = |host: usize| {
                let ranges = self.ranks_of(host).iter().map(|&to| self.shape.given(self.group.rank, to));
                let wide = ranges.map(|range| phases.widened(range.start)..phases.widened(range.end));
                self.pick(&whole, wide)
            };
            let mut parts = Vec::new();
            for host in 0..self.group.hosts.len() {
                let there = memory(phases.widened(all))?;
                if host == self.own {
                    parts.push(there);
                    continue;
                }
                traffic.steps[0].given.push((host, of_host(host)?));
                traffic.steps[0].wanted.push((host, Buffer::one(there.clone())));
                parts.push(there);
            }
            let into = memory(all)?;
            result = Buffer::one(into.clone());
            let own = parts.get(self.own).cloned().map_or(Buffer::Empty, Buffer::one);
            let own = Some((of_host(self.own)?, own));
            traffic.reduction = Some(HostReduction { phases, parts, into, apart: true, own });
        }
        let moved = Moved { input: result, output: self.of.output.clone() };
        let spread = self.near(Kind::Scatter, 0, Counts::PerRank(counts.into()), moved);
        Ok(self.parts(collect, traffic, spread))
    }
}
