//! What a rank does in each part of an operation on several hosts.

use std::ops::Range;

use tensorwire_device::flag::LINE;
use tensorwire_device::{Queue, Span};

use super::wide::TwoPhases;
use super::{Room, copy};
use crate::collective::buffer::Buffer;
use crate::collective::operation::Operation;
use crate::collective::plan::{Counts, Shape};
use crate::error::Result;
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
    /// What is there before anything has come, by host.
    pub(super) given: Vec<(usize, Buffer)>,
    /// What comes of each host, in its order.
    pub(super) wanted: Vec<Wanted>,
    pub(super) reduction: Option<HostReduction>,
}

/// Bytes that come from a host.
pub(super) struct Wanted {
    pub(super) host: usize,
    /// Whether this is of a result, and not what a host gives at once.
    pub(super) made: bool,
    pub(super) bytes: Buffer,
    /// How many pieces must have been made before: until then this memory holds others.
    pub(super) after: usize,
}

impl Wanted {
    fn new(host: usize, bytes: Buffer) -> Self {
        Self { host, made: false, bytes, after: 0 }
    }
}

/// Makes a result of the parts of all hosts: each piece of it when it has come from all of them, while others are on their way.
pub(super) struct HostReduction {
    phases: TwoPhases,
    /// The part of this host.
    own: Buffer,
    /// Where pieces of other hosts come, by host. That of this host is used where its part lies in several places.
    rings: Vec<Span>,
    into: Span,
    /// For the result of a piece, where that is not made in place.
    spare: Span,
    cut: Cut,
    /// Who gets the pieces.
    pub(super) to: Vec<usize>,
    /// Whether nothing is written where something that is sent may lie.
    pub(super) apart: bool,
}

impl HostReduction {
    pub(super) fn pieces(&self) -> usize {
        self.cut.pieces()
    }

    /// Pieces, bytes that are read to make them, of so many hosts, and their own.
    pub(super) fn bytes(&self, hosts: usize) -> (usize, usize, usize) {
        let Cut { count, width, element, .. } = self.cut;
        (self.pieces(), hosts * count * width, count * element)
    }

    /// Makes a piece, which has come from all, and gives it.
    pub(super) fn make(&self, index: usize, queue: &mut dyn Queue) -> Result<Span> {
        let (wide, place) = (self.cut.wide(index), self.cut.place(index));
        let mut parts = Vec::with_capacity(self.rings.len());
        for (host, ring) in self.rings.iter().enumerate() {
            parts.push(match &self.own {
                Buffer::One(own) if host == self.cut.own => own.slice(wide.clone())?,
                own if host == self.cut.own => {
                    let here = ring.slice(0..wide.len())?;
                    copy(&pick(own, [wide.clone()])?, &Buffer::one(here.clone()), queue)?;
                    here
                }
                _ => ring.slice(place.clone())?,
            });
        }
        let into = self.into.slice(self.cut.narrow(index))?;
        self.phases.finish(&parts, &into, &self.spare, queue)?;
        Ok(into)
    }
}

/// How a result is cut into pieces.
#[derive(Clone, Copy)]
struct Cut {
    /// This host.
    own: usize,
    /// Elements of all, and of a piece.
    count: usize,
    piece: usize,
    /// Bytes of an element of a part, and of the result.
    width: usize,
    element: usize,
}

impl Cut {
    fn pieces(&self) -> usize {
        self.count.div_ceil(self.piece)
    }

    fn elements(&self, index: usize) -> Range<usize> {
        (index * self.piece).min(self.count)..((index + 1) * self.piece).min(self.count)
    }

    /// Where a piece of a part is.
    fn wide(&self, index: usize) -> Range<usize> {
        let elements = self.elements(index);
        elements.start * self.width..elements.end * self.width
    }

    /// Where a piece of the result is.
    fn narrow(&self, index: usize) -> Range<usize> {
        let elements = self.elements(index);
        elements.start * self.element..elements.end * self.element
    }

    /// Bytes of the memory in which pieces of a host come.
    fn ring(&self) -> usize {
        (self.piece * AHEAD).min(self.count) * self.width
    }

    /// Where in it a piece comes.
    fn place(&self, index: usize) -> Range<usize> {
        let start = index % AHEAD * self.piece * self.width;
        start..start + self.wide(index).len()
    }
}

/// Bytes of a piece of a part. It stays in the caches of a core between its arrival and its reduction.
const PIECE: usize = 256 << 10;
/// How many pieces of a host may have come before the first of them is reduced.
const AHEAD: usize = 4;

/// Up to so many bytes go whole to all hosts, which all reduce them.
const SMALL: usize = 64 << 10;

/// Where the ranks of a group are, and one of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout<'a> {
    pub(super) hosts: &'a [Vec<usize>],
    pub(super) rank: usize,
}

impl Layout<'_> {
    fn world(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }
}

/// A rank in its group.
struct Here<'a> {
    layout: Layout<'a>,
    of: &'a Operation,
    shape: Shape,
    /// This host, and this rank among its ranks.
    own: usize,
    me: usize,
    leads: bool,
    room: &'a Room,
}

impl Parts {
    pub(super) fn new(
        layout: Layout<'_>,
        of: &Operation,
        room: &Room,
        queue: &mut dyn Queue,
    ) -> Result<Self> {
        let shape = of.shape(layout.rank, layout.world()).0;
        let own = layout.hosts.iter().position(|host| host.contains(&layout.rank)).unwrap_or(0);
        let place = layout.hosts.get(own).and_then(|host| host.iter().position(|rank| *rank == layout.rank));
        let me = place.unwrap_or(0);
        let here = Here { layout, of, shape, own, me, leads: me == 0, room };
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

/// Parts of a buffer, in this order.
fn pick(buffer: &Buffer, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<Buffer> {
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

/// Where parts of these lengths begin, one after the other, and where the last one ends.
fn starts(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut at = 0;
    let ends = lengths.map(|length| {
        at += length;
        at
    });
    std::iter::once(0).chain(ends).collect()
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
        self.layout.hosts.get(host).map_or(&[], Vec::as_slice)
    }

    /// Whether no other rank is on this host: nothing has to be brought to its leader, or from there.
    fn alone(&self) -> bool {
        self.ranks().len() == 1
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.own;
        (0..self.layout.hosts.len()).filter(move |&host| host != own)
    }

    fn host_of(&self, rank: usize) -> usize {
        self.layout.hosts.iter().position(|host| host.contains(&rank)).unwrap_or(0)
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
        self.of.counts.of(self.of.kind, from, to, self.layout.world())
    }

    fn broadcast(&self) -> Result<Parts> {
        let (bytes, home) = (self.of.counts.largest(), self.host_of(self.of.root));
        let (input, output) = (self.of.input.clone(), self.of.output.clone());
        let mut traffic = Traffic::default();
        if self.own == home {
            let root = self.place_of(self.of.root);
            let has = if self.me == root { input.clone() } else { output.clone() };
            if self.leads {
                traffic.given = self.others().map(|host| (host, has.clone())).collect();
            }
            let collect = self.near(Kind::Broadcast, root, Counts::Even(bytes), Moved { input, output });
            return Ok(self.parts(collect, traffic, self.nothing()));
        }
        if self.leads {
            traffic.wanted = vec![Wanted::new(home, output.clone())];
        }
        let spread = self.spread_from_leader(bytes, output);
        Ok(self.parts(self.nothing(), traffic, spread))
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
        let (shape, rank, output) = (&self.shape, self.layout.rank, self.of.output.clone());
        let of_host =
            |host: usize| pick(&output, self.ranks_of(host).iter().map(|&from| shape.taken(from, rank)));
        let counts: Vec<usize> = self.ranks().iter().map(|&from| self.bytes(from, from)).collect();
        let mut traffic = Traffic::default();
        let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        if self.leads {
            let own = of_host(self.own)?;
            traffic.given = self.others().map(|host| (host, own.clone())).collect();
            traffic.wanted =
                self.others().map(|host| Ok(Wanted::new(host, of_host(host)?))).collect::<Result<_>>()?;
            moved.output = own;
        }
        let collect = self.near(Kind::Gather, 0, Counts::PerRank(counts.into()), moved);
        let spread = self.spread_from_leader(output.len(), output.clone());
        Ok(self.parts(collect, traffic, spread))
    }

    fn gather(&self) -> Result<Parts> {
        let (home, root) = (self.host_of(self.of.root), self.place_of(self.of.root));
        let (bytes, world) = (self.of.counts.largest(), self.layout.world());
        let mut traffic = Traffic::default();
        let mut whole = Buffer::Empty;
        let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        if self.leads && self.own == home {
            whole = match root {
                0 => self.of.output.clone(),
                _ => Buffer::one(self.room.take(bytes * world)?),
            };
            let of_host = |host: usize| {
                pick(&whole, self.ranks_of(host).iter().map(|&from| from * bytes..(from + 1) * bytes))
            };
            traffic.wanted =
                self.others().map(|host| Ok(Wanted::new(host, of_host(host)?))).collect::<Result<_>>()?;
            moved.output = of_host(self.own)?;
        } else if self.leads {
            moved.output = match self.alone() {
                true => self.of.input.clone(),
                false => Buffer::one(self.room.take(bytes * self.ranks().len())?),
            };
            traffic.given = vec![(home, moved.output.clone())];
        }
        let collect = self.near(Kind::Gather, 0, Counts::Even(bytes), moved);
        let spread = match self.own == home {
            true => {
                let moved = Moved { input: whole, output: self.of.output.clone() };
                self.ship(0, root, bytes * world, moved)
            }
            false => self.nothing(),
        };
        Ok(self.parts(collect, traffic, spread))
    }

    fn scatter(&self) -> Result<Parts> {
        let (home, root) = (self.host_of(self.of.root), self.place_of(self.of.root));
        let (bytes, world) = (self.of.counts.largest(), self.layout.world());
        let mut traffic = Traffic::default();
        let (mut collect, mut parts) = (self.nothing(), Buffer::Empty);
        if self.own == home {
            let mut moved = Moved { input: self.of.input.clone(), output: Buffer::Empty };
            if self.leads {
                let whole = match root {
                    0 => self.of.input.clone(),
                    _ => Buffer::one(self.room.take(bytes * world)?),
                };
                let of_host = |host: usize| {
                    pick(&whole, self.ranks_of(host).iter().map(|&to| to * bytes..(to + 1) * bytes))
                };
                traffic.given =
                    self.others().map(|host| Ok((host, of_host(host)?))).collect::<Result<_>>()?;
                parts = of_host(self.own)?;
                moved.output = whole;
            }
            collect = self.ship(root, 0, bytes * world, moved);
        } else if self.leads {
            parts = match self.alone() {
                true => self.of.output.clone(),
                false => Buffer::one(self.room.take(bytes * self.ranks().len())?),
            };
            traffic.wanted = vec![Wanted::new(home, parts.clone())];
        }
        let moved = Moved { input: parts, output: self.of.output.clone() };
        let spread = self.near(Kind::Scatter, 0, Counts::Even(bytes), moved);
        Ok(self.parts(collect, traffic, spread))
    }

    fn all_to_all(&self) -> Result<Parts> {
        let world = self.layout.world();
        let given = |from: usize| (0..world).map(|to| self.bytes(from, to)).sum::<usize>();
        let taken = |to: usize| (0..world).map(|from| self.bytes(from, to)).sum::<usize>();
        let mut traffic = Traffic::default();
        let mut collected = Moved { input: self.of.input.clone(), output: Buffer::Empty };
        let mut spread = Moved { input: Buffer::Empty, output: self.of.output.clone() };
        if self.leads {
            // What ranks of this host give, one after the other, and where the part of each pair is.
            let all: usize = self.ranks().iter().map(|&from| given(from)).sum();
            let gifts = match self.alone() {
                true => self.of.input.clone(),
                false => Buffer::one(self.room.take(all)?),
            };
            let pairs = self.ranks().iter().flat_map(|&from| (0..world).map(move |to| (from, to)));
            let starts = starts(pairs.map(|(from, to)| self.bytes(from, to)));
            let part = |place: usize, to: usize| starts[place * world + to]..starts[place * world + to + 1];
            let own_starts = self::starts((0..world).map(|from| self.bytes(from, self.layout.rank)));
            // What comes from each rank: for each of this host, one after the other.
            let mut arrivals = vec![Buffer::Empty; world];
            for host in self.others() {
                let there = self.ranks_of(host);
                let places = 0..self.ranks().len();
                let ranges = places.flat_map(|place| there.iter().map(move |&to| (place, to)));
                traffic.given.push((host, pick(&gifts, ranges.map(|(place, to)| part(place, to)))?));
                let rows = there
                    .iter()
                    .map(|&from| self.ranks().iter().map(|&to| self.bytes(from, to)).sum::<usize>());
                let rows = self::starts(rows);
                let arrival = match self.alone() {
                    // A rank that is alone on its host gets them where it wants them.
                    true => pick(
                        &self.of.output,
                        there.iter().map(|&from| own_starts[from]..own_starts[from + 1]),
                    )?,
                    false => Buffer::one(self.room.take(rows.last().copied().unwrap_or(0))?),
                };
                for (&from, row) in there.iter().zip(rows.windows(2)) {
                    arrivals[from] = pick(&arrival, std::iter::once(row[0]..row[1]))?;
                }
                traffic.wanted.push(Wanted::new(host, arrival));
            }
            let mut input = Vec::new();
            for (place, &to) in self.ranks().iter().enumerate() {
                for (from, arrival) in arrivals.iter().enumerate() {
                    let found = match self.ranks().iter().position(|&here| here == from) {
                        Some(here) => pick(&gifts, [part(here, to)])?,
                        None => {
                            let at = self.ranks()[..place].iter().map(|&own| self.bytes(from, own)).sum();
                            pick(arrival, std::iter::once(at..at + self.bytes(from, to)))?
                        }
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
        Ok(self.parts(collect, traffic, spread))
    }

    /// How the inputs of a reduction become the part of this host, in memory of the leader: the operation, and that memory.
    fn partial(&self, place: Option<Span>, queue: &mut dyn Queue) -> Result<(TwoPhases, Operation, Span)> {
        let alone = self.of.tensors == 1 && self.layout.hosts.iter().all(|host| host.len() == 1);
        let phases = TwoPhases::new(self.of.op, self.of.dtype, self.layout.world() * self.of.tensors, alone);
        let whole = self.of.input.len() / self.of.tensors.max(1);
        if alone {
            if let Buffer::One(span) = &self.of.input {
                return Ok((phases, self.nothing(), span.clone()));
            }
            let packed = self.room.take(whole)?;
            copy(&self.of.input, &Buffer::one(packed.clone()), queue)?;
            return Ok((phases, self.nothing(), packed));
        }
        let mut input = self.of.input.clone();
        if phases.wide != self.of.dtype && input.len() > 0 {
            let plain = match &input {
                Buffer::One(span) => span.clone(),
                _ => {
                    let packed = self.room.take(input.len())?;
                    copy(&input, &Buffer::one(packed.clone()), queue)?;
                    packed
                }
            };
            input = Buffer::one(phases.widen(&plain, self.room, queue)?);
        }
        let part = match place.filter(|_| phases.in_place()) {
            Some(place) => place,
            None if self.leads => self.room.take(phases.widened(whole))?,
            None => self.room.take(0)?,
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
            result = Some(self.room.take(bytes)?);
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
        let (hosts, wide, element) = (self.layout.hosts.len(), part.len(), self.of.dtype.size());
        let mut traffic = Traffic::default();
        let count = bytes / element;
        let width = wide / count.max(1);
        // Large: each host makes a part of the result, and gives it to all.
        let each = match home.is_none() && wide > SMALL {
            true => count.div_ceil(hosts).next_multiple_of(LINE),
            false => count,
        };
        let scatters = each < count;
        let elements = |host: usize| match scatters {
            true => (host * each).min(count)..((host + 1) * each).min(count),
            false => 0..count,
        };
        let cut = |host: usize| self.cut(elements(host).len(), (width, element));
        for host in self.others().filter(|host| home.is_none_or(|home| home == *host)) {
            let theirs = elements(host);
            let theirs = part.slice(theirs.start * width..theirs.end * width)?;
            traffic.give_pieces(host, &Buffer::one(theirs), cut(host))?;
        }
        let Some(result) = result.filter(|_| home.is_none_or(|home| home == self.own)) else {
            return Ok(traffic);
        };
        let own = elements(self.own);
        let part = Buffer::one(part.slice(own.start * width..own.end * width)?);
        let into = result.slice(own.start * element..own.end * element)?;
        let to = if scatters { self.others().collect() } else { Vec::new() };
        let apart = home.is_some() || scatters;
        self.make_pieces(&mut traffic, (phases, part, into), cut(self.own), (to, apart))?;
        for host in self.others().filter(|_| scatters) {
            let (start, cut) = (elements(host).start * element, cut(host));
            for index in 0..cut.pieces() {
                let piece = cut.narrow(index);
                let bytes = Buffer::one(result.slice(start + piece.start..start + piece.end)?);
                traffic.wanted.push(Wanted { host, made: true, bytes, after: 0 });
            }
        }
        Ok(traffic)
    }

    fn cut(&self, count: usize, (width, element): (usize, usize)) -> Cut {
        Cut { own: self.own, count, piece: PIECE / width.max(1), width, element }
    }

    /// This host makes a result of the parts of all.
    fn make_pieces(
        &self,
        traffic: &mut Traffic,
        (phases, own, into): (TwoPhases, Buffer, Span),
        cut: Cut,
        (to, apart): (Vec<usize>, bool),
    ) -> Result<()> {
        let mut rings = Vec::new();
        for host in 0..self.layout.hosts.len() {
            // The part of this host is used where it lies, if that is one place.
            let bytes = match (&own, host == self.own) {
                (Buffer::Many(_), true) => cut.wide(0).len(),
                (_, true) => 0,
                _ => cut.ring(),
            };
            let ring = self.room.take(bytes)?;
            for index in (0..cut.pieces()).filter(|_| host != self.own) {
                let bytes = Buffer::one(ring.slice(cut.place(index))?);
                let after = (index + 1).saturating_sub(AHEAD);
                traffic.wanted.push(Wanted { host, made: false, bytes, after });
            }
            rings.push(ring);
        }
        let spare = self.room.take(phases.spare(cut.narrow(0).len()))?;
        traffic.reduction = Some(HostReduction { phases, own, rings, into, spare, cut, to, apart });
        Ok(())
    }

    fn reduce_scatter(&self, queue: &mut dyn Queue) -> Result<Parts> {
        let (phases, collect, part) = self.partial(None, queue)?;
        let mut traffic = Traffic::default();
        let counts: Vec<usize> = self.ranks().iter().map(|&to| self.bytes(to, to)).collect();
        let all: usize = counts.iter().sum();
        let mut result = Buffer::Empty;
        if self.leads {
            let element = self.of.dtype.size();
            let cut = |bytes: usize| self.cut(bytes / element, (phases.widened(element), element));
            let whole = Buffer::one(part);
            let of_host = |host: usize| {
                let ranges = self.ranks_of(host).iter().map(|&to| self.shape.given(self.layout.rank, to));
                let wide = ranges.map(|range| phases.widened(range.start)..phases.widened(range.end));
                pick(&whole, wide)
            };
            for host in self.others() {
                let bytes = self.ranks_of(host).iter().map(|&to| self.bytes(to, to)).sum();
                traffic.give_pieces(host, &of_host(host)?, cut(bytes))?;
            }
            let into = match &self.of.output {
                Buffer::One(output) if self.alone() => output.clone(),
                _ => self.room.take(all)?,
            };
            result = Buffer::one(into.clone());
            self.make_pieces(&mut traffic, (phases, of_host(self.own)?, into), cut(all), (Vec::new(), true))?;
        }
        let moved = Moved { input: result, output: self.of.output.clone() };
        let spread = self.near(Kind::Scatter, 0, Counts::PerRank(counts.into()), moved);
        Ok(self.parts(collect, traffic, spread))
    }
}

impl Traffic {
    /// Gives a part to a host, in pieces.
    fn give_pieces(&mut self, host: usize, part: &Buffer, cut: Cut) -> Result<()> {
        for index in 0..cut.pieces() {
            self.given.push((host, pick(part, [cut.wide(index)])?));
        }
        Ok(())
    }
}
