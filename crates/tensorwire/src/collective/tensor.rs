//! Tensors: memory with a type, a shape and strides.

use tensorwire_device::{Dtype, Element, Layout, Span};

use crate::error::{Error, Result};

/// A tensor: where it is, what its elements are, and how they lie there. Cloning it clones no element.
#[derive(Debug, Clone)]
pub struct Tensor {
    span: Span,
    dtype: Dtype,
    layout: Layout,
}

impl Tensor {
    /// A tensor of one dimension that fills its span.
    pub fn flat(span: Span, dtype: Dtype) -> Result<Self> {
        if !span.len().is_multiple_of(dtype.size()) {
            let len = span.len();
            return Err(Error::misuse(format!("{len} bytes are not a whole number of {dtype} elements")));
        }
        let layout = Layout::contiguous(&[span.len() / dtype.size()], dtype.size())?;
        Ok(Self { span, dtype, layout })
    }

    /// A tensor of one dimension with these values, in private memory. It costs no file descriptor. Other processes
    /// cannot map it, so operations copy it through the group's own memory. [`Group::tensor`](crate::Group::tensor)
    /// makes a tensor that other ranks can reach.
    pub fn private<T: Element>(values: &[T]) -> Result<Self> {
        let region = tensorwire_device::host::private(size_of_val(values))?;
        let tensor = Self::flat(Span::whole(region).slice(0..size_of_val(values))?, T::DTYPE)?;
        tensor.write(values)?;
        Ok(tensor)
    }

    /// A tensor without gaps, last dimension fastest, from the start of its span.
    pub fn contiguous(span: Span, dtype: Dtype, shape: &[usize]) -> Result<Self> {
        Self::new(span, dtype, Layout::contiguous(shape, dtype.size())?)
    }

    /// A tensor with any strides.
    pub fn strided(span: Span, dtype: Dtype, shape: &[usize], strides: &[isize]) -> Result<Self> {
        Self::new(span, dtype, Layout::new(shape, strides, dtype.size())?)
    }

    /// A tensor of a given layout.
    pub fn new(span: Span, dtype: Dtype, layout: Layout) -> Result<Self> {
        if layout.item() != dtype.size() {
            let item = layout.item();
            return Err(Error::misuse(format!("a layout for elements of {item} bytes, of type {dtype}")));
        }
        layout.fits(span.len())?;
        Ok(Self { span, dtype, layout })
    }

    /// Writes the elements of a tensor without gaps. If an operation works on the tensor, wait for it first.
    /// Otherwise the operation may read a mixture of old and new bytes, which every rank sees, and the tensor may
    /// end up as a mixture of the result and these values.
    pub fn write<T: Element>(&self, values: &[T]) -> Result<()> {
        self.check::<T>(values.len())?;
        Ok(self.span.write(0, T::bytes(values))?)
    }

    /// Reads the elements of a tensor without gaps. While an operation writes the tensor, you get a mixture of old
    /// and new bytes.
    pub fn read<T: Element>(&self, values: &mut [T]) -> Result<()> {
        self.check::<T>(values.len())?;
        Ok(self.span.read(0, T::bytes_mut(values))?)
    }

    /// A copy of the elements of a tensor without gaps.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let mut values = vec![T::default(); self.len()];
        self.read(&mut values)?;
        Ok(values)
    }

    fn check<T: Element>(&self, count: usize) -> Result<()> {
        if !self.layout.is_contiguous() {
            return Err(Error::misuse("only a tensor without gaps can be read or written as a slice"));
        }
        if self.dtype != T::DTYPE || self.len() != count {
            let (own, dtype) = (self.len(), self.dtype);
            return Err(Error::misuse(format!("{count} {} as a tensor of {own} {dtype}", T::DTYPE)));
        }
        Ok(())
    }

    /// Its memory.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How its elements lie in its memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.layout.count()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all its elements, without gaps.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// A part of a tensor without gaps, as a tensor of one dimension: `count` elements from `start` on.
    pub fn part(&self, start: usize, count: usize) -> Result<Self> {
        if !self.layout.is_contiguous() {
            return Err(Error::misuse("only a tensor without gaps can be cut into parts"));
        }
        let end = start.checked_add(count).filter(|&end| end <= self.len()).ok_or_else(|| {
            let all = self.len();
            Error::misuse(format!("{count} elements from {start} on, of a tensor that has {all}"))
        })?;
        let size = self.dtype.size();
        Self::flat(self.span.slice(start * size..end * size)?, self.dtype)
    }

    /// The tensor in `parts` equal parts, one after the other.
    pub fn split(&self, parts: usize) -> Result<Vec<Self>> {
        let count = self.len();
        if parts == 0 || !count.is_multiple_of(parts) {
            return Err(Error::misuse(format!("{count} elements cannot be cut into {parts} equal parts")));
        }
        let each = count / parts;
        (0..parts).map(|index| self.part(index * each, each)).collect()
    }

    /// Whether two of its elements may be the same memory.
    pub(crate) fn overlaps_itself(&self) -> bool {
        let mut dims: Vec<(usize, usize)> = self
            .layout
            .shape()
            .iter()
            .zip(self.layout.strides())
            .filter(|(size, _)| **size > 1)
            .map(|(&size, &stride)| (stride.unsigned_abs(), size))
            .collect();
        if self.is_empty() {
            return false;
        }
        dims.sort_unstable();
        let mut reach = 0usize;
        dims.into_iter().any(|(stride, size)| {
            let inside = stride <= reach;
            reach = reach.saturating_add(stride.saturating_mul(size - 1));
            inside
        })
    }
}
