//! How a tensor's elements lie in its span.

use crate::error::{Error, Result};
#[cfg(not(loom))]
use crate::span::View;

/// Shape and strides of a tensor, in elements, and the size of one element.
///
/// Strides may be zero (broadcast, as a source only) or negative; the element at index zero lies at `origin`
/// bytes from the start of the span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    shape: Vec<usize>,
    strides: Vec<isize>,
    item: usize,
    origin: usize,
}

impl Layout {
    /// The largest number of dimensions.
    pub const MAX_DIMS: usize = 8;

    /// A layout whose first element lies at the start of its span.
    pub fn new(shape: &[usize], strides: &[isize], item: usize) -> Result<Self> {
        Self::with_origin(shape, strides, item, 0)
    }

    /// A layout whose first element lies `origin` bytes into its span.
    pub fn with_origin(shape: &[usize], strides: &[isize], item: usize, origin: usize) -> Result<Self> {
        if shape.len() != strides.len() {
            return Err(Error::misuse(format!("{} sizes but {} strides", shape.len(), strides.len())));
        }
        if shape.len() > Self::MAX_DIMS {
            let most = Self::MAX_DIMS;
            return Err(Error::misuse(format!("{} dimensions; at most {most} are supported", shape.len())));
        }
        if !matches!(item, 1 | 2 | 4 | 8 | 16) {
            return Err(Error::misuse(format!("elements of {item} bytes; 1, 2, 4, 8 or 16 are supported")));
        }
        let layout = Self { shape: shape.to_vec(), strides: strides.to_vec(), item, origin };
        layout.extent()?;
        Ok(layout)
    }

    /// The layout of a tensor without gaps, last dimension fastest.
    pub fn contiguous(shape: &[usize], item: usize) -> Result<Self> {
        let mut strides = vec![0; shape.len()];
        let mut step = 1isize;
        for (stride, &size) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step = isize::try_from(size.max(1))
                .ok()
                .and_then(|size| step.checked_mul(size))
                .ok_or_else(|| Error::misuse(format!("a shape of {shape:?} is too large")))?;
        }
        Self::new(shape, &strides, item)
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// Bytes of one element.
    #[inline]
    pub fn item(&self) -> usize {
        self.item
    }

    /// Bytes from the start of the span to the element at index zero.
    #[inline]
    pub fn origin(&self) -> usize {
        self.origin
    }

    /// Number of elements.
    #[inline]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie one after the other without gaps, from the start of the span.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1isize;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size > 1 && stride != step {
                return false;
            }
            step = step.saturating_mul(size as isize);
        }
        self.origin == 0
    }

    /// Refuses a span that does not hold every element.
    pub fn fits(&self, len: usize) -> Result<()> {
        let (_, end) = self.extent()?;
        if end > len {
            return Err(Error::misuse(format!(
                "a tensor of shape {:?} and strides {:?} needs {end} bytes; its span has {len}",
                self.shape, self.strides
            )));
        }
        Ok(())
    }

    /// First and one past the last byte that any element touches.
    pub fn extent(&self) -> Result<(usize, usize)> {
        let large = || {
            Error::misuse(format!(
                "a tensor of shape {:?} and strides {:?} is too large",
                self.shape, self.strides
            ))
        };
        let mut count = 1usize;
        for &size in &self.shape {
            count = count.checked_mul(size.max(1)).ok_or_else(large)?;
        }
        count.checked_mul(self.item).filter(|&n| n <= isize::MAX as usize).ok_or_else(large)?;
        if self.shape.contains(&0) {
            return Ok((self.origin, self.origin));
        }
        let item = self.item as i128;
        let (mut low, mut high) = (self.origin as i128, self.origin as i128 + item);
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (size as i128 - 1).checked_mul(stride as i128).ok_or_else(large)?;
            let reach = reach.checked_mul(item).ok_or_else(large)?;
            let side = if reach < 0 { &mut low } else { &mut high };
            *side = side.checked_add(reach).ok_or_else(large)?;
        }
        if low < 0 {
            return Err(Error::misuse(format!(
                "strides {:?} reach before the start of the span",
                self.strides
            )));
        }
        Ok((low as usize, usize::try_from(high).map_err(|_| large())?))
    }
}

/// Refuses a copy between layouts and spans of so many bytes that do not fit each other.
pub(crate) fn check_copy((to, into): (&Layout, usize), (of, from): (&Layout, usize)) -> Result<()> {
    if to.shape() != of.shape() || to.item() != of.item() {
        return Err(Error::misuse(format!(
            "copying a tensor of shape {:?} ({} bytes an element) into shape {:?} ({} bytes)",
            of.shape(),
            of.item(),
            to.shape(),
            to.item()
        )));
    }
    to.fits(into)?;
    of.fits(from)?;
    let repeats = to.strides().iter().zip(to.shape()).any(|(&stride, &size)| stride == 0 && size > 1);
    if repeats && to.count() > 0 {
        return Err(Error::misuse("a tensor with a stride of 0 cannot be written: its elements are one"));
    }
    Ok(())
}

/// Refuses a copy between views that do not hold what their layouts say, or that touch each other. Gives whether there is
/// anything to copy. For queues of GPUs, which tell memory apart by its device and its address there.
#[cfg(not(loom))]
pub(crate) fn check_views((dst, to): (View<'_>, &Layout), (src, of): (View<'_>, &Layout)) -> Result<bool> {
    check_copy((to, dst.len()), (of, src.len()))?;
    dst.check_apart(src)?;
    Ok(to.count() > 0)
}

/// One dimension of a strided copy: how often, and how far both sides step, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Dim {
    pub(crate) size: usize,
    pub(crate) into: isize,
    pub(crate) from: isize,
}

/// The dimensions of both layouts, with those joined that are one run on both sides. Strides in bytes cannot
/// overflow where the size is 2 or more: both layouts fit into memory.
pub(crate) fn joined(to: &Layout, of: &Layout) -> Vec<Dim> {
    let item = to.item() as isize;
    let mut dims: Vec<Dim> = Vec::with_capacity(to.shape().len());
    for ((&size, &into), &from) in to.shape().iter().zip(to.strides()).zip(of.strides()) {
        // The stride of a dimension of size 1 means nothing and may be anything.
        if size == 1 {
            continue;
        }
        let dim = Dim { size, into: into * item, from: from * item };
        let joins = |outer: isize, step: isize| step.checked_mul(size as isize) == Some(outer);
        match dims.last_mut() {
            Some(outer) if joins(outer.into, dim.into) && joins(outer.from, dim.from) => {
                *outer = Dim { size: outer.size * size, ..dim };
            }
            _ => dims.push(dim),
        }
    }
    dims
}
