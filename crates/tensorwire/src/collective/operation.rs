//! One operation as a rank asks for it: what kind, over which bytes.

use std::sync::Arc;

use tensorwire_device::flag::LINE;
use tensorwire_device::gpu::MOST_REDUCED;
use tensorwire_device::{DeviceId, Dtype, Layout, Queue, ReduceOp, Region, Span};

use super::buffer::Buffer;
use super::chain::Chained;
use super::plan::{Counts, PAYLOAD, Shape, Workers};
use super::tensor::Tensor;
use super::tuning::Tuning;
use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::shm::control::{HALF, Why};
use crate::shm::header::Header;
use crate::shm::kind::{Kind, Path};
use crate::shm::record::Entry;

/// An operation, checked and ready to run. Ranks are places on this host.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) dtype: Dtype,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    pub(crate) counts: Counts,
    /// How many tensors of each rank are reduced together.
    pub(crate) tensors: usize,
    pub(crate) input: Buffer,
    pub(crate) output: Buffer,
    /// Forced.
    pub(crate) path: Option<Path>,
    /// Whether its memory is the library's own choice, and not the caller's.
    pub(crate) made_here: bool,
    /// Whose time is over when it is too late.
    pub(crate) late: Why,
    /// Where all of its tensors live, once it has some.
    pub(crate) device: Option<DeviceId>,
    /// What most operations do not need.
    pub(super) extra: Option<Box<Extra>>,
}

/// What is done before and after an operation.
#[derive(Debug, Clone, Default)]
pub(super) struct Extra {
    /// Tensors with gaps, and where their bytes are gathered before and spread after.
    pack: Vec<Packed>,
    unpack: Vec<Packed>,
    /// Results that lie in several places: copied from the first after the end.
    repeat: Vec<(Span, Span)>,
    /// Bytes for and from each rank, where only this rank knows them: an all_to_all of uneven parts.
    uneven: Option<Uneven>,
    /// What runs as several exchanges in its place.
    chained: Option<Arc<dyn Chained>>,
}

/// What this rank gives to each rank, and expects from each, in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Uneven {
    pub(crate) given: Vec<usize>,
    pub(crate) taken: Vec<usize>,
}

/// A tensor with gaps and the span that stands for it.
#[derive(Debug, Clone)]
struct Packed {
    tensor: Tensor,
    dense: Span,
    layout: Layout,
}

impl Packed {
    /// Without gaps, it is one of several tensors that are packed into one piece.
    fn has_gaps(&self) -> bool {
        !self.tensor.layout().is_contiguous()
    }
}

/// Each round takes two ticks; see `exec`.
const MOST_ROUNDS: usize = (1 << 19) - 8;

/// How many sizes a message names.
const MOST_PARTS: usize = 16;

/// Where tensors with gaps are packed to.
pub(crate) type Alloc<'a> = &'a dyn Fn(&DeviceId, usize) -> Result<Arc<dyn Region>>;

impl Operation {
    pub(crate) fn new(kind: Kind, dtype: Dtype) -> Self {
        Self {
            kind,
            dtype,
            op: ReduceOp::Sum,
            root: 0,
            counts: Counts::Even(0),
            tensors: 1,
            input: Buffer::Empty,
            output: Buffer::Empty,
            path: None,
            made_here: false,
            late: Why::CallTimedOut,
            device: None,
            extra: None,
        }
    }

    /// Whether the kind reduces.
    pub(crate) fn reduces(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Tensors that are read.
    pub(crate) fn inputs(&mut self, tensors: &[Tensor], alloc: Alloc<'_>) -> Result<()> {
        self.locate(tensors)?;
        if let Some(span) = self.plain(tensors) {
            self.input = Buffer::one(span);
            return Ok(());
        }
        let spans = self.spans(tensors, alloc, true, false)?;
        self.input = self.in_one_piece(Buffer::of(spans), alloc, true, false)?;
        Ok(())
    }

    /// Tensors that are written.
    pub(crate) fn outputs(&mut self, tensors: &[Tensor], alloc: Alloc<'_>) -> Result<()> {
        self.locate(tensors)?;
        if let Some(span) = self.plain(tensors) {
            self.output = Buffer::one(span);
            return Ok(());
        }
        let spans = self.spans(tensors, alloc, false, true)?;
        self.output = self.in_one_piece(Buffer::of(spans), alloc, false, true)?;
        Ok(())
    }

    /// Tensors that are read and then written.
    pub(crate) fn in_place(&mut self, tensors: &[Tensor], alloc: Alloc<'_>) -> Result<()> {
        self.locate(tensors)?;
        if let Some(span) = self.plain(tensors) {
            self.input = Buffer::one(span);
            self.output = self.input.clone();
            return Ok(());
        }
        let spans = self.spans(tensors, alloc, true, true)?;
        self.input = self.in_one_piece(Buffer::of(spans), alloc, true, true)?;
        self.output = self.input.clone();
        Ok(())
    }

    /// Notes where the tensors live. One operation works on one device.
    pub(super) fn locate(&mut self, tensors: &[Tensor]) -> Result<()> {
        for tensor in tensors {
            let there = match tensor.span().region().host_addr() {
                Some(_) => DeviceId::Host,
                None => tensor.span().device(),
            };
            match &self.device {
                Some(device) if *device == there => {}
                None => self.device = Some(there),
                Some(device) => {
                    let kind = self.kind;
                    return Err(Error::misuse(format!(
                        "{kind} with tensors on {device} and on {there}: all tensors of a rank live on one device"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The GPU that all of its tensors live on. Its steps are then queued there.
    pub(crate) fn gpu(&self) -> Option<&DeviceId> {
        self.device.as_ref().filter(|device| **device != DeviceId::Host)
    }

    /// The memory of one tensor without gaps: the usual case.
    fn plain(&self, tensors: &[Tensor]) -> Option<Span> {
        match tensors {
            [tensor] if tensor.dtype() == self.dtype && tensor.layout().is_contiguous() => {
                tensor.span().slice(0..tensor.byte_len()).ok()
            }
            _ => None,
        }
    }

    /// Several tensors of the same size, reduced together: the result goes to each of them.
    pub(crate) fn together(&mut self, tensors: &[Tensor], alloc: Alloc<'_>) -> Result<()> {
        self.locate(tensors)?;
        let spans = self.spans(tensors, alloc, true, true)?;
        self.tensors = spans.len();
        if let Some((first, others)) = spans.split_first() {
            self.output = Buffer::of([first.clone()]);
            self.extra().repeat = others.iter().map(|other| (other.clone(), first.clone())).collect();
        }
        self.input = self.in_one_piece(Buffer::of(spans), alloc, true, false)?;
        Ok(())
    }

    /// On a GPU, what lies in several places is packed into one, which others can reach.
    fn in_one_piece(
        &mut self,
        buffer: Buffer,
        alloc: Alloc<'_>,
        read: bool,
        written: bool,
    ) -> Result<Buffer> {
        let (Buffer::Many(list), Some(gpu)) = (&buffer, self.gpu().cloned()) else { return Ok(buffer) };
        let whole = Span::whole(alloc(&gpu, buffer.len())?).slice(0..buffer.len())?;
        for (start, span) in list {
            let dense = whole.slice(*start..start + span.len())?;
            let layout = Layout::contiguous(&[span.len()], 1)?;
            let packed = Packed { tensor: Tensor::flat(span.clone(), Dtype::U8)?, dense, layout };
            if read {
                self.extra().pack.push(packed.clone());
            }
            if written {
                self.extra().unpack.insert(0, packed);
            }
        }
        Ok(Buffer::One(whole))
    }

    /// The bytes of each tensor without gaps: its own, or packed ones.
    fn spans(
        &mut self,
        tensors: &[Tensor],
        alloc: Alloc<'_>,
        read: bool,
        written: bool,
    ) -> Result<Vec<Span>> {
        if written && tensors.len() > 1 {
            self.check_apart(tensors)?;
        }
        let mut spans = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            if tensor.dtype() != self.dtype {
                return Err(Error::misuse(format!(
                    "{} of {} and {} together; all tensors of an operation have one type",
                    self.kind,
                    self.dtype,
                    tensor.dtype()
                )));
            }
            if tensor.layout().is_contiguous() {
                spans.push(tensor.span().slice(0..tensor.byte_len())?);
                continue;
            }
            if written && tensor.overlaps_itself() {
                return Err(Error::misuse(format!(
                    "{} cannot write to a tensor of shape {:?} and strides {:?}: some of its elements are the same memory",
                    self.kind,
                    tensor.layout().shape(),
                    tensor.layout().strides()
                )));
            }
            let dense = Span::whole(alloc(&tensor.span().device(), tensor.byte_len())?)
                .slice(0..tensor.byte_len())?;
            let layout = Layout::contiguous(tensor.layout().shape(), tensor.dtype().size())?;
            let packed = Packed { tensor: tensor.clone(), dense: dense.clone(), layout };
            if read {
                self.extra().pack.push(packed.clone());
            }
            if written {
                self.extra().unpack.push(packed);
            }
            spans.push(dense);
        }
        Ok(spans)
    }

    /// Refuses results of which two would lie in the same memory. Tensors with gaps may lie between each other, so that
    /// only the very same one is seen.
    fn check_apart(&self, tensors: &[Tensor]) -> Result<()> {
        let Some(first) = tensors.first() else { return Ok(()) };
        let start = |tensor: &Tensor| first.span().distance(tensor.span());
        let full = tensors.iter().filter(|tensor| !tensor.is_empty());
        let (mut dense, mut gaps): (Vec<&Tensor>, Vec<&Tensor>) =
            full.partition(|tensor| tensor.layout().is_contiguous());
        dense.sort_unstable_by_key(|tensor| start(tensor));
        gaps.sort_by_key(|tensor| start(tensor));
        let touch = |pair: &[&Tensor]| start(pair[0]) + pair[0].byte_len() as isize > start(pair[1]);
        let same =
            |pair: &[&Tensor]| start(pair[0]) == start(pair[1]) && pair[0].layout() == pair[1].layout();
        if dense.windows(2).any(touch) || gaps.windows(2).any(same) {
            return Err(Error::misuse(format!(
                "two of the tensors that {} writes are the same memory, in whole or in part",
                self.kind
            )));
        }
        Ok(())
    }

    fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    /// Parts of an all_to_all whose sizes the other ranks must be told.
    pub(crate) fn set_uneven(&mut self, uneven: Uneven) {
        self.extra().uneven = Some(uneven);
    }

    pub(crate) fn uneven(&self) -> Option<&Uneven> {
        self.extra.as_ref()?.uneven.as_ref()
    }

    /// Has several exchanges run in its place.
    pub(crate) fn set_chained(&mut self, job: Arc<dyn Chained>) {
        self.extra().chained = Some(job);
    }

    pub(super) fn chained(&self) -> Option<&Arc<dyn Chained>> {
        self.extra.as_ref()?.chained.as_ref()
    }

    /// Whether tensors with gaps are packed for it.
    pub(super) fn is_packed_in(&self, span: &Span) -> bool {
        let mut packed = self.extra.iter().flat_map(|extra| extra.pack.iter().chain(&extra.unpack));
        packed.any(|packed| packed.dense.view().is_same(span.view()))
    }

    pub(crate) fn has_sizes_to_exchange(&self) -> bool {
        self.uneven().is_some()
    }

    /// Gathers tensors with gaps.
    pub(crate) fn pack(&self, queue: &mut dyn Queue) -> Result<()> {
        let Some(extra) = &self.extra else { return Ok(()) };
        // What has gaps first: a list is packed from what that gave.
        for Packed { tensor, dense, layout } in extra.pack.iter().filter(|packed| packed.has_gaps()) {
            queue.copy_strided((dense.view(), layout), (tensor.span().view(), tensor.layout()))?;
        }
        let whole = extra.pack.iter().filter(|packed| !packed.has_gaps());
        let copies: Vec<_> = whole.map(|packed| (packed.dense.view(), packed.tensor.span().view())).collect();
        Ok(queue.copy_all(&copies, Default::default())?)
    }

    /// Whether something is left to do when the plan is done.
    pub(super) fn unpacks(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| !extra.repeat.is_empty() || !extra.unpack.is_empty())
    }

    /// Spreads results to where they belong.
    pub(crate) fn unpack(&self, queue: &mut dyn Queue) -> Result<()> {
        let Some(extra) = &self.extra else { return Ok(()) };
        let repeated: Vec<_> = extra.repeat.iter().map(|(into, from)| (into.view(), from.view())).collect();
        queue.copy_all(&repeated, Default::default())?;
        let whole = extra.unpack.iter().filter(|packed| !packed.has_gaps());
        let copies: Vec<_> = whole.map(|packed| (packed.tensor.span().view(), packed.dense.view())).collect();
        queue.copy_all(&copies, Default::default())?;
        for Packed { tensor, dense, layout } in extra.unpack.iter().filter(|packed| packed.has_gaps()) {
            queue.copy_strided((tensor.span().view(), tensor.layout()), (dense.view(), layout))?;
        }
        Ok(())
    }

    /// Refuses an output that shares memory with an input in any other way than the operation can bear.
    pub(crate) fn check_overlap(&self, me: usize, world: usize) -> Result<()> {
        if let (Buffer::One(input), Buffer::One(output), Kind::AllReduce | Kind::Reduce) =
            (&self.input, &self.output, self.kind)
            && input.view().is_same(output.view())
        {
            return Ok(());
        }
        // The bytes of the input that may be the same memory as those of the output, both from here on.
        let (given, taken) = match self.kind {
            Kind::AllReduce | Kind::Reduce => (0, 0),
            _ => {
                let shape = self.shape(me, world).0;
                (shape.given(me, me).start, shape.taken(me, me).start)
            }
        };
        let mut at = 0;
        for input in self.input.spans() {
            let mut to = 0;
            for output in self.output.spans() {
                if input.touches(output) {
                    // The distance of the two in memory must be that of the bytes they stand for.
                    let inside = input.distance(output)
                        == (to as isize - taken as isize) - (at as isize - given as isize);
                    let alone = self.kind != Kind::AllToAll;
                    if !(inside && alone) {
                        return Err(Error::misuse(format!(
                            "the input and the output of {} overlap in memory in a way it cannot bear",
                            self.kind
                        )));
                    }
                }
                to += output.len();
            }
            at += input.len();
        }
        Ok(())
    }

    /// Refuses what has no meaning before a byte moves.
    pub(crate) fn check(&self, world: usize) -> Result<()> {
        if self.reduces() {
            self.op.check(self.dtype)?;
        }
        let reduced = self.tensors.saturating_mul(world);
        if self.reduces() && self.gpu().is_some() && reduced > MOST_REDUCED {
            return Err(Error::Unsupported {
                what: format!("{} of {reduced} tensors of {world} ranks on a GPU at once", self.kind),
                need: format!("at most {MOST_REDUCED} tensors of all ranks together"),
                have: "more; several operations can share them".into(),
            });
        }
        let bytes = self.counts.largest();
        let parts = if self.has_lanes() { 1 } else { self.tensors };
        // Ticks have a fixed number of bits, and each tensor or rank needs its part of a slot.
        let shares = if self.has_lanes() { world } else { self.tensors + 1 };
        let width = (HALF / shares).min(Tuning::new(world).window) / LINE * LINE;
        if width == 0 || bytes / width > MOST_ROUNDS {
            return Err(Error::Unsupported {
                what: format!("{} of {bytes} bytes at once, {shares} times", self.kind),
                need: format!("at most {} bytes, {} times", MOST_ROUNDS * width, HALF / LINE),
                have: "more".into(),
            });
        }
        match self.path {
            Some(Path::Inline) if self.has_lanes() && bytes * world > PAYLOAD => Err(Error::misuse(format!(
                "{bytes} bytes for each of {world} ranks do not go through the inline path; it has room for {PAYLOAD}"
            ))),
            Some(Path::Inline) if bytes * parts > PAYLOAD => Err(Error::misuse(format!(
                "{bytes} bytes do not go through the inline path; it has room for {PAYLOAD}"
            ))),
            Some(Path::OneShot) if bytes * parts > HALF => Err(Error::misuse(format!(
                "{bytes} bytes do not go through the one-shot path; it has room for {HALF}"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses sizes of parts that are not as this rank expects them.
    pub(crate) fn check_sizes(&self, group: &Ranks, me: usize, world: usize) -> Result<()> {
        let (Some(uneven), Counts::Matrix(all)) = (self.uneven(), &self.counts) else { return Ok(()) };
        let size = self.dtype.size();
        for (from, &taken) in uneven.taken.iter().enumerate() {
            let given = all.get(from * world + me).copied().unwrap_or(0);
            if given != taken {
                let who = |rank: usize| group.members.get(rank).map_or_else(String::new, ToString::to_string);
                return Err(Error::misuse(format!(
                    "{} gives {} {} elements to {}, which has room for {}",
                    who(from),
                    given / size,
                    self.dtype,
                    who(me),
                    taken / size
                )));
            }
        }
        Ok(())
    }

    fn is_in_place(&self) -> bool {
        match (&self.input, &self.output) {
            (Buffer::One(input), Buffer::One(output)) => input.touches(output),
            (Buffer::Many(..), Buffer::Many(..)) => self.kind == Kind::AllReduce,
            _ => false,
        }
    }

    fn has_lanes(&self) -> bool {
        matches!(self.kind, Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll)
    }

    /// What must be the same on all ranks.
    pub(crate) fn header(&self, number: u32) -> Header {
        let typed =
            !matches!(self.kind, Kind::Barrier | Kind::Sizes | Kind::Symmetric) && !self.kind.is_of_fds();
        let chained = self.chained();
        let mut rest = self.tensors as u32;
        let mut mix =
            |word: u64| rest = rest.rotate_left(5).wrapping_mul(0x9e37_79b9) ^ (word ^ word >> 32) as u32;
        if let ReduceOp::PremulSum(factor) = self.op {
            mix(factor.to_bits());
        }
        let count = match &self.counts {
            Counts::Even(bytes) => *bytes,
            Counts::PerRank(all) => {
                all.iter().for_each(|&bytes| mix(bytes as u64));
                all.iter().sum()
            }
            Counts::Matrix(all) => {
                all.iter().for_each(|&bytes| mix(bytes as u64));
                all.iter().sum()
            }
        };
        let count = match chained {
            Some(job) => {
                job.agreed().into_iter().for_each(&mut mix);
                job.elements()
            }
            None => (count / self.dtype.size()) as u64,
        };
        Header {
            number,
            kind: self.kind,
            dtype: typed.then_some(self.dtype),
            op: (self.reduces() || self.kind == Kind::Keys).then_some(self.op),
            path: self.path,
            queued: self.gpu().is_some() || chained.is_some_and(|job| job.gpu().is_some()),
            root: self.root as u32,
            count,
            rest,
        }
    }

    /// In words, what the header has only as a mixed number: " in parts of 3, 2, 3".
    pub(crate) fn rest(&self) -> String {
        let mut text = String::new();
        if let (Counts::PerRank(all), size) = (&self.counts, self.dtype.size().max(1)) {
            let parts: Vec<String> =
                all.iter().take(MOST_PARTS).map(|bytes| (bytes / size).to_string()).collect();
            text = format!(" in parts of {}", parts.join(", "));
            if all.len() > parts.len() {
                text += &format!(" and {} more", all.len() - parts.len());
            }
        }
        if let Some(job) = self.chained() {
            text = job.words();
        }
        if let ReduceOp::PremulSum(factor) = self.op {
            text += &format!(" with factor {factor}");
        }
        if self.tensors > 1 {
            text += &format!(" over {} tensors", self.tensors);
        }
        text
    }

    /// What the flight recorder keeps.
    pub(crate) fn entry(&self, header: &Header, path: Path, now: u64) -> Entry {
        let rooted = self.kind.is_rooted();
        Entry {
            number: header.number.into(),
            kind: self.kind,
            dtype: header.dtype,
            op: header.op,
            root_or_peer: rooted.then_some(self.root),
            tag: 0,
            bytes: self.chained().map_or(self.input.len().max(self.output.len()), |job| job.bytes()) as u64,
            path: Some(path),
            now,
        }
    }

    /// How many ticks more than this rank those have in it whose tensors lie on another kind of device: ranks with tensors on GPUs
    /// announce themselves at every size.
    #[inline]
    pub(super) fn ahead(&self, world: usize) -> i32 {
        match (self.announces_on_host(world), self.gpu()) {
            (true, _) => 0,
            (false, None) => 1,
            (false, Some(_)) => -1,
        }
    }

    /// Whether ranks with tensors on the host announce themselves.
    #[inline]
    fn announces_on_host(&self, world: usize) -> bool {
        let may = world > 1 && self.kind != Kind::Barrier && !self.kind.tells_numbers();
        match self.path {
            Some(path) => may && path == Path::Direct,
            None => may && self.counts.largest() >= Tuning::new(world).direct,
        }
    }

    /// What this rank gives to any rank, itself too, and whether it gets anything.
    pub(super) fn gives_and_gets(&self, me: usize) -> (bool, bool) {
        match self.kind {
            Kind::Broadcast => (me == self.root, me != self.root),
            Kind::Scatter => (me == self.root, true),
            Kind::Reduce | Kind::Gather => (true, me == self.root),
            _ => (true, true),
        }
    }

    /// The same operation on memory of the host.
    pub(super) fn on_host(&self, input: Buffer, output: Buffer) -> Self {
        Self { input, output, device: None, extra: None, ..self.clone() }
    }

    /// The numbers of its plan, and the path for memory that is not shared.
    pub(crate) fn shape(&self, me: usize, world: usize) -> (Shape, Path) {
        let tuning = Tuning::new(world);
        let bytes = self.counts.largest();
        let parts = if self.has_lanes() { world } else { self.tensors };
        let natural = tuning.path(self.kind, bytes, parts);
        let path = self.path.filter(|path| *path != Path::Direct).unwrap_or(natural);
        let announced = self.gpu().is_some() || self.announces_on_host(world);
        let window = match (path, self.kind) {
            (Path::OneShot, _) => HALF,
            (_, Kind::AllReduce | Kind::Reduce) => tuning.reduce_window,
            _ => tuning.window,
        };
        let shape = Shape {
            kind: self.kind,
            me,
            world,
            root: self.root,
            counts: self.counts.clone(),
            tensors: self.tensors,
            window,
            half: HALF,
            inline: path == Path::Inline,
            // What was just read from the same place is in the cache already.
            bypass: self.output.len().saturating_mul(world) >= tuning.bypass && !self.is_in_place(),
            announced,
            told: 0,
            workers: Workers::All,
            launch: tuning.launch,
        };
        (shape, path)
    }
}
