//! The memory that signals travel through.
//!
//! Each handle of a rank has a *book*: lines of host memory, each with one writer. Other ranks map it and write there.
//!
//! | lines | who writes | what |
//! |---|---|---|
//! | 1 | any rank, once | in the book of rank 0, the word that ends waits of all queues |
//! | 1 | the rank itself | how work of its queues that met that of others has failed |
//! | n | each rank of the group, one line each | whether it has dropped its handle |
//! | n for each channel | each rank of the group, one line each | how many signals it has sent |
//!
//! Several books lie in one region (a *segment*), so that many handles need few descriptors. A rank uses a book again when it has
//! dropped its handle and all others have said that they have dropped theirs: nobody writes there any more. If a rendezvous
//! fails on some ranks only, nobody knows who has a handle, and its book is not used again as long as the group lives. Neither is
//! one whose waits were ended: work that is queued behind them may still look at the word.
//!
//! The words of meetings lie in other memory. A rank keeps its own until all ranks have no handle any more, as kernels of others
//! write there. A rank that gets no handle says so in its own book.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::{Abort, Flag, Span};

use crate::error::Result;
use crate::ranks::Ranks;

/// How many signals of a pair of ranks are told apart.
pub const CHANNELS: usize = 32;

/// The first line in which ranks say that they have dropped their handles.
const LEFT: usize = 2;

/// Books of a segment.
const BOOKS: usize = 16;

/// Bytes of a book.
pub(super) const fn size(world: usize) -> usize {
    LINE * (LEFT + world * (1 + CHANNELS))
}

/// All books of one rank in a group.
#[derive(Debug, Default)]
pub(crate) struct Books(Mutex<Vec<Segment>>);

#[derive(Debug)]
struct Segment {
    span: Span,
    uses: [Use; BOOKS],
}

/// What has become of a book.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nobody has used it.
    New,
    /// This rank has a handle on it.
    Taken,
    /// This rank has dropped its handle.
    Left,
}

/// One rank's book, mapped here.
#[derive(Debug, Clone)]
pub(super) struct Book {
    span: Span,
    world: usize,
}

/// A book of this rank, in use until it is left.
#[derive(Debug)]
pub(super) struct OwnBook {
    pub(super) book: Book,
    books: Arc<Books>,
    at: (usize, usize),
    rank: usize,
    /// Whether this rank has said that it has no handle.
    left: AtomicBool,
}

impl Books {
    /// A book that nobody uses, as new.
    pub(super) fn take(self: &Arc<Self>, ranks: &Ranks) -> Result<OwnBook> {
        let world = ranks.world();
        let mut segments = self.lock();
        let free = segments.iter().enumerate().find_map(|(number, segment)| {
            let index = (0..BOOKS).find(|&index| segment.is_free(index, world))?;
            Some((number, index))
        });
        let at = match free {
            Some(at) => at,
            None => {
                let span = Span::whole(ranks.context.host().alloc(BOOKS * size(world))?);
                segments.push(Segment { span, uses: [Use::New; BOOKS] });
                (segments.len() - 1, 0)
            }
        };
        let segment = &mut segments[at.0];
        let book = segment.book(at.1, world)?;
        book.clear()?;
        segment.uses[at.1] = Use::Taken;
        Ok(OwnBook { book, books: self.clone(), at, rank: ranks.rank, left: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Segment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Segment {
    fn book(&self, index: usize, world: usize) -> Result<Book> {
        let size = size(world);
        Book::new(self.span.slice(index * size..(index + 1) * size)?, world)
    }

    fn is_free(&self, index: usize, world: usize) -> bool {
        match self.uses[index] {
            Use::New => true,
            Use::Taken => false,
            Use::Left => self.book(index, world).is_ok_and(|book| book.is_left() && !book.is_aborted()),
        }
    }
}

impl OwnBook {
    /// This rank uses it no more. The last thing that is done with it.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
        if let Some(segment) = self.books.lock().get_mut(self.at.0) {
            segment.uses[self.at.1] = Use::Left;
        }
    }
}

impl Drop for OwnBook {
    fn drop(&mut self) {
        // Of a rendezvous that failed here: nobody takes this book again, and others can read it as long as they have it.
        if !self.left.load(Ordering::Acquire)
            && let Ok(flag) = self.book.left(self.rank)
        {
            flag.store(1);
        }
    }
}

impl Book {
    /// The book of a rank in bytes that were mapped.
    pub(super) fn new(span: Span, world: usize) -> Result<Self> {
        Ok(Self { span: span.slice(0..size(world))?, world })
    }

    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    /// Ends waits of queues.
    pub(super) fn abort(&self) -> Result<Abort> {
        Ok(Abort::new(&self.line(0)?)?)
    }

    /// Tells how work of the rank's queues that met that of others has failed.
    pub(super) fn failure(&self) -> Result<Flag> {
        self.flag(1, Writer::Device)
    }

    /// Where a rank says that it has dropped its handle.
    pub(super) fn left(&self, rank: usize) -> Result<Flag> {
        self.flag(LEFT + rank, Writer::Host)
    }

    /// Where a rank counts the signals that it sends on a channel.
    pub(super) fn signal(&self, channel: usize, from: usize, writer: Writer) -> Result<Flag> {
        self.flag(LEFT + self.world * (1 + channel) + from, writer)
    }

    /// Whether all ranks have dropped their handles.
    fn is_left(&self) -> bool {
        (0..self.world).all(|rank| self.left(rank).is_ok_and(|flag| flag.load() != 0))
    }

    fn is_aborted(&self) -> bool {
        self.abort().map_or(true, |abort| abort.is_set())
    }

    fn clear(&self) -> Result<()> {
        self.abort()?.reset();
        (1..size(self.world) / LINE).try_for_each(|line| {
            self.flag(line, Writer::Host)?.store(0);
            Ok(())
        })
    }

    fn flag(&self, line: usize, writer: Writer) -> Result<Flag> {
        Ok(Flag::new(&self.line(line)?, writer)?)
    }

    fn line(&self, number: usize) -> Result<Span> {
        Ok(self.span.slice(number * LINE..(number + 1) * LINE)?)
    }
}
