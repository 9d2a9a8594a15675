//! Where the blocks of a message come, and its tensors: memory of this process, or the sender's.

use std::sync::Arc;
use std::time::Instant;

use tensorwire_device::subregion::keeping;
use tensorwire_device::{Caching, Deadline, DeviceId, Dtype, Layout, Mark, Queue, Span};

use super::Target;
use super::open::{Arrived, LetGo, Source};
use super::read::{READING, Reading};
use crate::collective::Tensor;
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt::Pace;
use crate::lease::{Loan, Token};
use crate::pipe::channel::{self, Channel};
use crate::pipe::convert;
use crate::pipe::descriptor::{self, Body, tag};
use crate::pipe::lent::Loaned;
use crate::pipe::send::strictly;

impl Reading {
    /// Where a block comes.
    pub(super) fn room(&self, number: usize) -> Result<Span> {
        let len = self.descriptor.blocks[number].len;
        match self.exact_place(number, &DeviceId::Host) {
            Some(tensor) => Ok(tensor.span().slice(0..len)?),
            None => {
                let goes_on = self.inside[number].iter().any(|&index| self.homes[index] != DeviceId::Host);
                self.memory(&DeviceId::Host, len, goes_on)
            }
        }
    }

    /// Gets a block that does not follow.
    pub(super) fn block(&mut self, number: usize, by: Deadline) -> Result<Arrived> {
        let block = &self.descriptor.blocks[number];
        match &block.body {
            Body::Here(_) => {
                let len = block.len;
                let (all, starts) = self.beside()?;
                Ok(Arrived::here(all.slice(starts[number]..starts[number] + len)?))
            }
            Body::Follows | Body::OnGpu(_) => Err(Error::bug("a block that should be here")),
            Body::Lent(token) | Body::Handed(token) => {
                let (token, way) = (token.clone(), channel::way(self.channel(number))?);
                let loan = way.take(self, &token, by);
                Ok(self.lent(number, loan.map_err(|error| self.not_lent(error))?))
            }
        }
    }

    /// A block that the sender has lent.
    pub(super) fn lent(&self, number: usize, loan: Loaned) -> Arrived {
        let tag = tag(self.serial, descriptor::Part::LetGo(number));
        let let_go = Some(Arc::new(LetGo { end: Arc::downgrade(&self.end), tag, word: 0 }));
        let source = Source { span: loan.span().clone(), loan: Some(loan), view: None, let_go };
        Arrived { source: Some(source), copies: Vec::new() }
    }

    /// What its block has come by, if it is memory of the sender.
    fn channel(&self, number: usize) -> Channel {
        match &self.descriptor.blocks[number].body {
            // A copy of memory of a GPU, too.
            Body::Lent(_) => Channel::Share,
            _ => self.descriptor.blocks[number].channel(self.end.streaming()),
        }
    }

    /// Copies from and to GPUs are made behind these marks, and so is what is looked at.
    pub(in crate::pipe) fn begin_behind(&mut self, marks: &[Mark]) -> Result<()> {
        self.marks.extend_from_slice(marks);
        self.lanes.begin_behind(marks)
    }

    /// Why a block was not lent, in the words of a pipe.
    pub(super) fn not_lent(&self, error: Error) -> Error {
        match &error {
            Error::Peer(fault) if fault.kind == PeerFaultKind::Refused => self.taken_back(),
            _ => self.end.during(READING, error),
        }
    }

    /// Gets what is lent, once its data is ready. So what is queued behind that waits for nobody else.
    pub(in crate::pipe) fn redeem(&self, token: &Token, by: Deadline) -> Result<Loan> {
        let mut pace = Pace::new();
        loop {
            match self.end.context().redeem(token, pace.until(by)) {
                Err(error) if error.is_timeout() && !by.passed() => pace.look(Instant::now())?,
                other => return other,
            }
        }
    }

    pub(super) fn taken_back(&self) -> Error {
        let text = "it has taken the message back while it was being read";
        let peer = self.end.peer().to_string();
        self.end.own(Error::peer(PeerFaultKind::Failed, peer, Some(self.end.other()), text))
    }

    /// All small blocks, in one piece of memory.
    fn beside(&mut self) -> Result<&(Span, Vec<usize>)> {
        if self.beside.is_none() {
            let (mut all, mut starts) = (Vec::new(), Vec::with_capacity(self.descriptor.blocks.len()));
            for block in &self.descriptor.blocks {
                starts.push(all.len());
                if let Body::Here(bytes) = &block.body {
                    all.extend_from_slice(bytes);
                    // What follows begins where any element may.
                    all.resize(all.len().next_multiple_of(16), 0);
                }
            }
            self.beside = Some((Tensor::private(&all)?.span().clone(), starts));
        }
        self.beside.as_ref().ok_or_else(|| Error::bug("a message without its small blocks"))
    }

    /// The place of a tensor on a device that is all of a block, in its order: its bytes go there at once.
    pub(super) fn exact_place(&self, number: usize, device: &DeviceId) -> Option<&Tensor> {
        let block = &self.descriptor.blocks[number];
        let &[index] = &self.inside[number][..] else { return None };
        let (part, Target::Into(tensor)) = (&self.descriptor.tensors[index], &self.targets[index]) else {
            return None;
        };
        let alike = part.layout.is_contiguous() && tensor.layout().is_contiguous();
        (alike && tensor.byte_len() == block.len && tensor.span().device() == *device).then_some(tensor)
    }

    pub(super) fn is_new(&self, index: usize) -> bool {
        matches!(self.targets[index], Target::New | Target::On(_))
    }

    /// See `homes`.
    pub(super) fn home_of(&self, index: usize) -> DeviceId {
        let block = &self.descriptor.blocks[self.descriptor.tensors[index].block];
        match &self.targets[index] {
            Target::On(device) => device.clone(),
            Target::Into(tensor) => tensor.span().device(),
            Target::View => block.from.clone(),
            Target::New if block.from == DeviceId::Host || !self.end.ours.has_gpu() => DeviceId::Host,
            Target::New => {
                let context = self.end.context();
                let there = |gpu: &&DeviceId| context.device(gpu).is_ok();
                let all = context.access().and_then(|access| Ok(access.gpus()?)).unwrap_or_default();
                let home = std::iter::once(&block.from).chain(all.iter().map(|gpu| &gpu.id)).find(there);
                home.cloned().unwrap_or(DeviceId::Host)
            }
        }
    }

    /// New memory.
    fn memory(&self, device: &DeviceId, len: usize, for_gpus: bool) -> Result<Span> {
        convert::of(device).allocate(self.end.context(), device, len, for_gpus)
    }

    /// A copy of a block in memory of this process, made once for each device.
    pub(super) fn own(&mut self, number: usize, device: &DeviceId, by: Deadline) -> Result<Span> {
        let arrived =
            self.arrived[number].as_ref().ok_or_else(|| Error::bug("a tensor without its block"))?;
        if let Some(copy) = arrived.copies.iter().find(|copy| copy.device() == *device) {
            return Ok(copy.clone());
        }
        let source =
            arrived.source.as_ref().ok_or_else(|| Error::bug("a block that was let go"))?.span.clone();
        let len = source.len();
        let by_gpus = *device != DeviceId::Host || source.device() != DeviceId::Host;
        // Only to memory that GPUs know is a copy from there queued.
        let place = self.exact_place(number, device).map(|place| place.span());
        let into =
            match place.filter(|place| !by_gpus || *device != DeviceId::Host || place.region().cacheable()) {
                Some(place) => place.slice(0..len)?,
                None => self.memory(device, len, by_gpus)?,
            };
        self.carry(&into, &source, by)?;
        self.arrived[number].iter_mut().for_each(|arrived| arrived.copies.push(into.clone()));
        Ok(into)
    }

    /// Copies from one device to another.
    fn carry(&mut self, into: &Span, from: &Span, by: Deadline) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let copy = |queue: &mut dyn Queue, into: &Span, from: &Span| {
            Ok(queue.copy(into.view(), from.view(), Caching::Keep)?)
        };
        match (from.device(), into.device()) {
            (DeviceId::Host, DeviceId::Host) => self.end.context().copy(|queue| copy(queue, into, from)),
            (gpu, DeviceId::Host) => {
                self.landing = true;
                copy(self.lanes.of(&gpu)?, into, from)
            }
            (DeviceId::Host, gpu) if from.region().cacheable() => copy(self.lanes.of(&gpu)?, into, from),
            (DeviceId::Host, gpu) => {
                let known = self.memory(&DeviceId::Host, from.len(), true)?;
                self.end.context().copy(|queue| copy(queue, &known, from))?;
                copy(self.lanes.of(&gpu)?, into, &known)
            }
            (there, here) => {
                let Some(why) = self.end.context().why_unreachable(&here, &there)? else {
                    return copy(self.lanes.of(&here)?, into, from);
                };
                let why = format!("{here} cannot reach {there}: {why}");
                if self.end.context().config().strict {
                    return Err(strictly(&why));
                }
                self.end.goes_around(&why);
                let known = self.memory(&DeviceId::Host, from.len(), true)?;
                copy(self.lanes.of(&there)?, &known, from)?;
                self.pass(by)?;
                copy(self.lanes.of(&here)?, into, &known)
            }
        }
    }

    /// A tensor, from the block that has come.
    pub(super) fn tensor(&mut self, index: usize, by: Deadline) -> Result<Tensor> {
        let (number, dtype) = (self.descriptor.tensors[index].block, self.descriptor.tensors[index].dtype);
        let layout = self.descriptor.tensors[index].layout.clone();
        let arrived =
            self.arrived[number].as_ref().ok_or_else(|| Error::bug("a tensor without its block"))?;
        let (source, lent) = (arrived.source.as_ref().map(|source| source.span.clone()), arrived.is_lent());
        if matches!(self.targets[index], Target::View) {
            return part_of(&self.viewed(number)?, dtype, &layout);
        }
        let home = self.homes[index].clone();
        let is_here = source.as_ref().is_some_and(|source| source.device() == home);
        let Target::Into(place) = self.targets[index].clone() else {
            let own = match source {
                Some(source) if is_here && !lent => source,
                _ => self.own(number, &home, by)?,
            };
            return part_of(&own, dtype, &layout);
        };
        if place.is_empty() {
            return Ok(place);
        }
        let span = match source {
            Some(source) if is_here => source,
            _ => self.own(number, &home, by)?,
        };
        if Arc::ptr_eq(span.region(), place.span().region()) && span.offset() == place.span().offset() {
            return Ok(place);
        }
        let (to, from) = ((place.span(), place.layout()), (&span, &layout));
        if home != DeviceId::Host {
            copy_between(self.lanes.of(&home)?, to, from)?;
            return Ok(place);
        }
        if self.landing {
            self.pass(by)?;
        }
        self.end.context().copy(|queue| copy_between(queue, to, from))?;
        Ok(place)
    }

    /// The sender's memory, which it gets back when the last user of this is gone, queues among them.
    fn viewed(&mut self, number: usize) -> Result<Span> {
        let source = self.arrived[number].as_mut().and_then(|arrived| arrived.source.as_mut());
        let source = source.ok_or_else(|| Error::bug("a view of a block that was let go"))?;
        if let Some(view) = &source.view {
            return Ok(view.clone());
        }
        let let_go = source.let_go.clone().ok_or_else(|| Error::bug("a view of a block that is not lent"))?;
        let range = source.span.offset()..source.span.offset() + source.span.len();
        // The end is there until the sender was told.
        let keep = Box::new((let_go, self.end.clone()));
        let view = Span::whole(keeping(source.span.region().clone(), range, keep)?);
        Ok(source.view.insert(view).clone())
    }
}

fn copy_between(
    queue: &mut dyn Queue,
    (to, as_to): (&Span, &Layout),
    (from, as_from): (&Span, &Layout),
) -> Result<()> {
    if !as_to.is_contiguous() || !as_from.is_contiguous() {
        return Ok(queue.copy_strided((to.view(), as_to), (from.view(), as_from))?);
    }
    let ((to_low, to_high), (from_low, from_high)) = (as_to.extent()?, as_from.extent()?);
    let (to, from) = (to.slice(to_low..to_high)?, from.slice(from_low..from_high)?);
    Ok(queue.copy(to.view(), from.view(), Caching::Keep)?)
}

/// A tensor in a block: its span begins with its first byte, so that one without gaps is one.
fn part_of(block: &Span, dtype: Dtype, layout: &Layout) -> Result<Tensor> {
    let (low, high) = layout.extent()?;
    let layout = Layout::with_origin(layout.shape(), layout.strides(), layout.item(), layout.origin() - low)?;
    Tensor::new(block.slice(low..high)?, dtype, layout)
}
