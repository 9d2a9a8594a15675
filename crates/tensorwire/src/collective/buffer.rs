//! What a rank gives or gets, as one run of bytes that may lie in several places.

use tensorwire_device::{Span, View};

use crate::error::{Error, Result};

/// Spans one after the other.
#[derive(Debug, Clone, Default)]
pub(crate) enum Buffer {
    /// No bytes.
    #[default]
    Empty,
    /// One span.
    One(Span),
    /// Several, each with where it begins.
    Many(Box<[(usize, Span)]>),
}

impl Buffer {
    /// The bytes of one span.
    pub(crate) fn one(span: Span) -> Self {
        if span.is_empty() { Self::Empty } else { Self::One(span) }
    }

    /// The bytes of several spans, in order. Neighbours in memory become one.
    pub(crate) fn of(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut list: Vec<(usize, Span)> = Vec::new();
        let mut spans = spans.into_iter().filter(|span| !span.is_empty());
        let Some(mut last) = spans.next() else { return Self::Empty };
        let mut len = 0;
        for span in spans {
            if !last.absorb(&span) {
                let start = len;
                len += last.len();
                list.push((start, std::mem::replace(&mut last, span)));
            }
        }
        if list.is_empty() {
            return Self::One(last);
        }
        list.push((len, last));
        Self::Many(list.into())
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::One(span) => span.len(),
            Self::Many(list) => list.last().map_or(0, |(start, span)| start + span.len()),
        }
    }

    /// All spans.
    pub(crate) fn spans(&self) -> impl Iterator<Item = &Span> {
        let (one, many) = match self {
            Self::Empty => (None, [].as_slice()),
            Self::One(span) => (Some(span), [].as_slice()),
            Self::Many(list) => (None, &**list),
        };
        one.into_iter().chain(many.iter().map(|(_, span)| span))
    }

    /// The bytes from `at` on: at most `most`, and no more than lie together.
    #[inline]
    pub(crate) fn run(&self, at: usize, most: usize) -> Result<View<'_>> {
        let (start, span) = match self {
            Self::One(span) => (0, span),
            Self::Many(list) => {
                let after = list.partition_point(|(start, _)| *start <= at);
                let (start, span) =
                    after.checked_sub(1).and_then(|index| list.get(index)).ok_or_else(|| outside(at))?;
                (*start, span)
            }
            Self::Empty => return Err(outside(at)),
        };
        let from = at - start;
        let len = span.len().checked_sub(from).ok_or_else(|| outside(at))?.min(most);
        Ok(span.view().slice(from..from + len)?)
    }
}

fn outside(at: usize) -> Error {
    Error::bug(format!("a plan reaches byte {at} of a buffer that is shorter"))
}
