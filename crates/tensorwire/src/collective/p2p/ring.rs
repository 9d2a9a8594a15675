//! The ring between two ranks, in one direction: a stream of frames in shared memory, with one writer and one reader.
//!
//! | what | bytes | who writes |
//! |---|---|---|
//! | `head`: how many bytes were put | a line | the sender |
//! | `tail`: how many were taken | a line | the receiver |
//! | `broken`: 1 once the sender has given up in the middle of a message | a line | the sender |
//! | nothing | a line | |
//! | the stream, around and around | the rest | the sender |
//!
//! A frame is a [`Header`], the payload, and filling up to a whole line. Both counters count bytes and wrap. Each
//! side knows its own counter as 64 bits. From the other side's counter it takes only how far that has moved, which
//! cannot be more than the ring holds.

use std::sync::Arc;

use tensorwire_device::flag::LINE;
use tensorwire_device::{Bell, Caching, Dtype, Flag, Queue, Region, View};

use crate::error::{Error, Result};
use crate::shm::control::Control;

/// Bytes of a header. What is left of its line holds a small payload.
pub(super) const HEADER: usize = 32;
const LINES: usize = 4;
const PAGE: usize = 4096;

/// What stands before each payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) tag: u64,
    /// Bytes of the payload.
    pub(super) bytes: u64,
    /// How many messages went before it on this ring.
    pub(super) number: u64,
    pub(super) dtype: Dtype,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        for (at, word) in [self.tag, self.bytes, self.number, self.dtype as u64].into_iter().enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Nothing, if no sender of ours wrote it.
    fn from_bytes(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| bytes.get(at * 8..)?.first_chunk().copied().map(u64::from_le_bytes);
        let dtype = *Dtype::ALL.get(usize::try_from(word(3)?).ok()?)?;
        let header = Self { tag: word(0)?, bytes: word(1)?, number: word(2)?, dtype };
        let whole = header.bytes.is_multiple_of(dtype.size() as u64) && header.bytes <= isize::MAX as u64;
        whole.then_some(header)
    }
}

/// Why a ring cannot be used any more.
#[derive(Debug)]
pub(super) enum Fault {
    /// The other side did what only a broken or malicious process does.
    Nonsense,
    /// Something failed here.
    Ours(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<tensorwire_device::Error> for Fault {
    fn from(error: tensorwire_device::Error) -> Self {
        Self::Ours(error.into())
    }
}

type Ringed<T> = std::result::Result<T, Fault>;

/// What both sides know.
#[derive(Debug)]
struct Place {
    region: Arc<dyn Region>,
    /// Where the stream begins in the region.
    data: usize,
    capacity: u64,
    head: Flag,
    tail: Flag,
    broken: Flag,
    /// The other side's.
    bell: Bell,
}

impl Place {
    /// The memory of the counters is taken by whoever comes first, that of the stream by the sender.
    fn open(control: &Control, (from, to): (usize, usize), committed: usize) -> Result<Self> {
        let other = if from == control.me() { to } else { from };
        let (region, at) = (control.region().clone(), control.map().ring(from, to));
        region.commit(at..at + committed)?;
        Ok(Self {
            head: control.flag(at)?,
            tail: control.flag(at + LINE)?,
            broken: control.flag(at + 2 * LINE)?,
            bell: control.bell(other).clone(),
            data: at + LINES * LINE,
            capacity: (control.map().ring_len() - LINES * LINE) as u64,
            region,
        })
    }

    /// The next part of the stream that lies in one piece, at most `len` bytes.
    fn piece(&self, at: u64, len: usize) -> Result<View<'_>> {
        let offset = at % self.capacity;
        let len = len.min((self.capacity - offset) as usize);
        let start = self.data + offset as usize;
        Ok(View::new(&self.region, start..start + len)?)
    }

    /// What is put whole or not at all, and how often the sender hears of room.
    fn step(&self) -> u64 {
        self.capacity / 4
    }

    /// How often the receiver hears of bytes: it copies while the sender puts the next piece.
    fn stride(&self) -> u64 {
        self.capacity / 16
    }
}

/// The sender's end.
#[derive(Debug)]
pub(super) struct Producer {
    place: Place,
    head: u64,
    /// How far the receiver is known to be.
    tail: u64,
    /// How far the receiver was told.
    told: u64,
}

impl Producer {
    pub(super) fn open(control: &Control, to: usize) -> Result<Self> {
        let place = Place::open(control, (control.me(), to), control.map().ring_len())?;
        Ok(Self { place, head: 0, tail: 0, told: 0 })
    }

    /// As if so many bytes had been put and taken already.
    #[cfg(test)]
    pub(super) fn start_at(&mut self, count: u64) {
        (self.head, self.tail, self.told) = (count, count, count);
        self.place.head.store(count as u32);
    }

    /// Begins a frame, if there is room for all of it, or for a good part of a large one: a small message is in the ring
    /// or not, but never in part. A receiver that has taken all there was has told of three quarters of the ring at least.
    pub(super) fn begin(&mut self, header: Header) -> Ringed<bool> {
        let frame = (header.bytes + HEADER as u64).next_multiple_of(LINE as u64);
        let wanted = frame.min(self.place.step().next_multiple_of(LINE as u64));
        if self.room(wanted as usize)? < wanted {
            return Ok(false);
        }
        let at = self.place.data + (self.head % self.place.capacity) as usize;
        self.place.region.write(at, &header.to_bytes())?;
        self.head += HEADER as u64;
        Ok(true)
    }

    /// Puts as much of the rest of a payload as there is room for, and ends the frame if that is all of it. Gives how
    /// much was put.
    pub(super) fn put(&mut self, queue: &mut dyn Queue, rest: View<'_>, caching: Caching) -> Ringed<usize> {
        let mut done = 0;
        while done < rest.len() {
            let most = self.room(rest.len() - done)?.min(self.place.stride()) as usize;
            if most == 0 {
                break;
            }
            let piece = self.place.piece(self.head, most.min(rest.len() - done))?;
            let len = piece.len();
            queue.copy(piece, rest.slice(done..done + len)?, caching)?;
            self.head += len as u64;
            done += len;
            // The end of a frame is told together with its filling.
            if self.head - self.told >= self.place.stride() && done < rest.len() {
                self.tell();
            }
        }
        if done == rest.len() {
            self.head = self.head.next_multiple_of(LINE as u64);
        }
        self.tell();
        Ok(done)
    }

    /// Says that the frame that was begun will not be ended.
    pub(super) fn give_up(&mut self) {
        self.place.broken.store(1);
        self.place.bell.ring();
    }

    /// Lets the receiver see what was put.
    fn tell(&mut self) {
        if self.told != self.head {
            self.place.head.store(self.head as u32);
            self.told = self.head;
            self.place.bell.ring();
        }
    }

    /// Bytes that may be put; looks at the receiver's counter only if less than `wanted` is known to be free. A frame
    /// ends with a whole line, so a line of which something has not been taken yet does not count.
    fn room(&mut self, wanted: usize) -> Ringed<u64> {
        let room = |tail: u64, head: u64| tail / LINE as u64 * LINE as u64 + self.place.capacity - head;
        if room(self.tail, self.head) < wanted as u64 {
            let taken = u64::from(self.place.tail.load().wrapping_sub(self.tail as u32));
            if taken > self.told - self.tail {
                return Err(Fault::Nonsense);
            }
            self.tail += taken;
        }
        Ok(room(self.tail, self.head))
    }
}

/// The receiver's end.
#[derive(Debug)]
pub(super) struct Consumer {
    place: Place,
    /// How far the sender is known to be.
    head: u64,
    tail: u64,
    /// How far the sender was told.
    told: u64,
    number: u64,
}

impl Consumer {
    pub(super) fn open(control: &Control, from: usize) -> Result<Self> {
        let place = Place::open(control, (from, control.me()), PAGE)?;
        Ok(Self { place, head: 0, tail: 0, told: 0, number: 0 })
    }

    /// As if so many bytes had been put and taken already.
    #[cfg(test)]
    pub(super) fn start_at(&mut self, count: u64) {
        (self.head, self.tail, self.told) = (count, count, count);
        self.place.tail.store(count as u32);
    }

    /// The next frame's header, if it is there.
    pub(super) fn begin(&mut self) -> Ringed<Option<Header>> {
        if self.available(HEADER)? == 0 {
            return Ok(None);
        }
        let mut bytes = [0; HEADER];
        let at = self.place.data + (self.tail % self.place.capacity) as usize;
        self.place.region.read(at, &mut bytes)?;
        let header = Header::from_bytes(&bytes).filter(|header| header.number == self.number);
        let header = header.ok_or(Fault::Nonsense)?;
        self.number += 1;
        self.tail += HEADER as u64;
        Ok(Some(header))
    }

    /// The next part of the payload that lies in one piece, at most `len` bytes; empty if nothing has come.
    pub(super) fn peek(&mut self, len: usize) -> Ringed<View<'_>> {
        let most = self.available(1)?.min(self.place.stride()) as usize;
        Ok(self.place.piece(self.tail, most.min(len))?)
    }

    /// Takes bytes that were looked at.
    pub(super) fn take(&mut self, len: usize) {
        self.tail += len as u64;
        self.tell();
    }

    /// Ends a frame.
    pub(super) fn end(&mut self) {
        self.tail = self.tail.next_multiple_of(LINE as u64);
        self.tell();
    }

    /// Whether the sender has given up. What it had put before is visible from then on.
    pub(super) fn is_broken(&self) -> bool {
        self.place.broken.load() != 0
    }

    /// Lets the sender see from time to time what was taken. One that waits for room has filled the ring, so it hears
    /// of room before the ring is empty.
    fn tell(&mut self) {
        if self.tail - self.told >= self.place.step() {
            self.place.tail.store(self.tail as u32);
            self.told = self.tail;
            self.place.bell.ring();
        }
    }

    /// Bytes that have come; looks at the sender's counter only if less than `wanted` is known of.
    fn available(&mut self, wanted: usize) -> Ringed<u64> {
        if self.head.saturating_sub(self.tail) < wanted as u64 {
            let put = u64::from(self.place.head.load().wrapping_sub(self.head as u32));
            if self.head + put > self.told + self.place.capacity {
                return Err(Fault::Nonsense);
            }
            self.head += put;
        }
        // The filling behind a frame comes together with its end.
        self.head.checked_sub(self.tail).ok_or(Fault::Nonsense)
    }
}
