//! Reductions of hosts: in which type the ranks of a host make their part of the result, and how the parts become one.
//!
//! The ranks of a host come first, in their order, and then the hosts. The result is rounded once. So the part of a host has
//! the wide type in which the kernels add, which has more bits than the elements of small floats.

use tensorwire_device::host::convert;
use tensorwire_device::{Caching, Dtype, Queue, ReduceOp, RowPlan, Span};

use super::Room;
use crate::error::Result;

/// How a reduction goes over hosts.
#[derive(Debug, Clone, Copy)]
pub(super) struct TwoPhases {
    /// The type of the tensors.
    dtype: Dtype,
    /// That of the parts.
    pub(super) wide: Dtype,
    /// What each rank does to its own elements before they are widened.
    before: Option<ReduceOp>,
    /// What the ranks of a host do.
    pub(super) inside: ReduceOp,
    /// What is done with the parts of the hosts.
    between: ReduceOp,
    /// What an average is divided by.
    inputs: usize,
    /// Whether every host has one rank, whose input is its part.
    alone: bool,
}

impl TwoPhases {
    /// `alone`: every host has one rank, and each brings one tensor. Then inputs travel as they are.
    pub(super) fn new(op: ReduceOp, dtype: Dtype, inputs: usize, alone: bool) -> Self {
        let wide = if alone { dtype } else { convert::wide(dtype) };
        let (before, inside) = match op {
            _ if alone => (None, op),
            ReduceOp::PremulSum(_) if wide != dtype => (Some(op), ReduceOp::Sum),
            ReduceOp::Avg => (None, ReduceOp::Sum),
            _ => (None, op),
        };
        let between = match op {
            ReduceOp::PremulSum(_) if !alone => ReduceOp::Sum,
            _ => op,
        };
        Self { dtype, wide, before, inside, between, inputs, alone }
    }

    /// Bytes of as many elements in the wide type.
    pub(super) fn widened(&self, bytes: usize) -> usize {
        bytes / self.dtype.size() * self.wide.size()
    }

    /// Whether the last phase can write where its own part lies.
    pub(super) fn in_place(&self) -> bool {
        self.wide == self.dtype && (self.alone || self.between != ReduceOp::Avg)
    }

    /// What a rank brings, in the wide type.
    pub(super) fn widen(&self, input: &Span, room: &Room, queue: &mut dyn Queue) -> Result<Span> {
        let mut from = input.clone();
        if let Some(op) = self.before {
            let product = room.take(input.len())?;
            queue.reduce(op, self.dtype, &[input.view()], &[product.view()], Caching::Keep)?;
            from = product;
        }
        let into = room.take(self.widened(input.len()))?;
        convert::widen(self.dtype, from.view(), into.view())?;
        Ok(into)
    }

    /// Bytes that [`finish`](Self::finish) needs beside a result of so many.
    pub(super) fn spare(&self, bytes: usize) -> usize {
        if self.wide == self.dtype { 0 } else { self.widened(bytes) }
    }

    /// Makes the result of the parts of all hosts, in their order.
    pub(super) fn finish(
        &self,
        parts: &[Span],
        into: &Span,
        spare: &Span,
        queue: &mut dyn Queue,
    ) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let views: Vec<_> = parts.iter().map(Span::view).collect();
        if self.in_place() {
            return Ok(queue.reduce(self.between, self.wide, &views, &[into.view()], Caching::Keep)?);
        }
        let whole = match self.wide == self.dtype {
            true => into.clone(),
            false => spare.slice(0..self.widened(into.len()))?,
        };
        match self.between {
            // It is divided by the number of all inputs, not of hosts.
            ReduceOp::Avg => {
                let mut plan = RowPlan::new(&vec![1; parts.len()])?;
                plan.push((0..parts.len()).map(|host| (host, 0)))?;
                queue.reduce_rows(ReduceOp::Avg, self.wide, self.inputs, &views, &plan, whole.view())?;
            }
            op => queue.reduce(op, self.wide, &views, &[whole.view()], Caching::Keep)?,
        }
        if self.wide != self.dtype {
            convert::narrow(self.dtype, whole.view(), into.view())?;
        }
        Ok(())
    }
}
