//! Points on queues that other processes can wait for: counters in a region of host memory that every peer maps.
//!
//! A line is used again as soon as its last value has been reached: who still waits for an older value has what it
//! waits for. So there is no end to points, only to those that are not reached yet.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::fork::Birth;
use tensorwire_device::{Abort, Device, Flag, Region, Span};

use super::book::Point;
use crate::error::{Error, Result};
use crate::wire;

/// Lines of a process; the first is none.
pub(super) const LINES: usize = 4096;

/// Lines at the end that end waits for peers that have died.
const ABORTS: usize = 512;

/// The lines of this process.
pub(super) struct Points {
    birth: Birth,
    span: Span,
    lines: Mutex<Lines>,
}

struct Lines {
    /// The last value of each line.
    last: Vec<u32>,
    /// Where to look next.
    hand: usize,
    /// Abort words that are free.
    aborts: Vec<usize>,
}

impl fmt::Debug for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Points")
    }
}

impl Points {
    pub(super) fn new(host: &dyn Device) -> Result<Self> {
        let span = Span::whole(host.alloc(LINES * LINE)?);
        let lines =
            Lines { last: vec![0; LINES - ABORTS], hand: 0, aborts: (LINES - ABORTS..LINES).collect() };
        Ok(Self { birth: Birth::now(), span, lines: Mutex::new(lines) })
    }

    pub(super) fn region(&self) -> &Arc<dyn Region> {
        self.span.region()
    }

    /// A point that is not reached yet, for a queue to signal; none while all lines have such points.
    pub(super) fn take(&self) -> Result<Option<(Flag, Point)>> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let count = lines.last.len();
        for _ in 0..count {
            lines.hand = lines.hand % (count - 1) + 1;
            let index = lines.hand;
            let flag = flag(&self.span, index)?;
            if flag.reached(lines.last[index]) {
                lines.last[index] = lines.last[index].wrapping_add(1);
                return Ok(Some((flag, Point { line: index as u16, value: lines.last[index] })));
            }
        }
        Ok(None)
    }

    /// An abort word of its own, for a while: those that were given back are used again.
    pub(super) fn abort(self: &Arc<Self>) -> Result<Lent> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let index = lines.aborts.pop();
        let index = index.ok_or_else(|| {
            Error::misuse(format!("more than {ABORTS} owners of loans, and waits of queues for them"))
        })?;
        let abort = Abort::new(&line(&self.span, index)?)?;
        abort.reset();
        Ok(Lent { points: self.clone(), index, abort })
    }
}

/// An abort word, until it is dropped.
#[derive(Debug)]
pub(super) struct Lent {
    points: Arc<Points>,
    index: usize,
    abort: Abort,
}

impl std::ops::Deref for Lent {
    type Target = Abort;

    fn deref(&self) -> &Abort {
        &self.abort
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever.
        if !self.points.birth.is_ours() {
            return;
        }
        self.points.lines.lock().unwrap_or_else(PoisonError::into_inner).aborts.push(self.index);
    }
}

/// The lines of another process.
#[derive(Debug, Clone)]
pub(super) struct Theirs(Span);

impl Theirs {
    /// Refuses what is of another size.
    pub(super) fn of(region: Arc<dyn Region>) -> Result<Self> {
        if region.len() != LINES * LINE {
            return Err(wire::bad(&format!("{} bytes of lines", region.len())));
        }
        Ok(Self(Span::whole(region)))
    }

    /// The flag of a point; none for one without a line, and for one that does not exist.
    pub(super) fn flag(&self, point: Point) -> Option<Flag> {
        let index = usize::from(point.line);
        (index != 0 && index < LINES - ABORTS).then(|| flag(&self.0, index).ok()).flatten()
    }

    /// Whether a point is reached. One that does not exist is.
    pub(super) fn reached(&self, point: Point) -> bool {
        self.flag(point).is_none_or(|flag| flag.reached(point.value))
    }
}

fn line(span: &Span, index: usize) -> Result<Span> {
    Ok(span.slice(index * LINE..(index + 1) * LINE)?)
}

fn flag(span: &Span, index: usize) -> Result<Flag> {
    Ok(Flag::new(&line(span, index)?, Writer::Device)?)
}
