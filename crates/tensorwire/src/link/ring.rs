//! The ring between two ranks, in one direction: a stream of frames in shared memory, with one writer and one reader.
//!
//! | what | bytes | who writes |
//! |---|---|---|
//! | `head`: how many bytes were put | a line | the sender |
//! | `tail`: how many were taken | a line | the receiver |
//! | `cut`: which message was given up after its begin, or 0 | a line | the sender |
//! | `behind`: what `head` was behind it | a line | the sender |
//! | `heard`: the last `cut` that the receiver has gone behind | a line | the receiver |
//! | the stream, around and around | the rest | the sender |
//!
//! A frame is a [`Header`], the payload, and filling up to a whole line. Both counters count bytes and wrap. Each
//! side knows its own counter as 64 bits. From the other side's counter it takes only how far that has moved, which
//! cannot be more than the ring holds.
//!
//! A sender that gives a message up writes `behind`, then `cut`, and only then the next frame. So a receiver that sees bytes
//! of that frame sees the cut as well, and goes on behind it. It tells at once that it has: the two lines are free again then. `tail`
//! does not say so: the receiver may be there already because it has taken all that was put, and know of no cut.

use std::sync::Arc;

use tensorwire_device::flag::{LINE, Writer};
use tensorwire_device::{Bell, Caching, Flag, Queue, Region, Span, View};

use super::{Fault, Header, Inlet, Landing, Linked, Outlet, Standing};
use crate::error::Result;

/// Bytes of a header. What is left of its line holds a small payload.
pub(crate) const HEADER: usize = 32;
const LINES: usize = 5;
const PAGE: usize = 4096;

/// Memory for a ring, and the bell of the other side.
#[derive(Debug)]
pub(crate) struct RingMemory {
    pub(crate) region: Arc<dyn Region>,
    /// Where the ring begins in the region, and its bytes.
    pub(crate) at: usize,
    pub(crate) len: usize,
    pub(crate) bell: Bell,
}

fn to_bytes(header: Header) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    for (at, word) in header.words().into_iter().enumerate() {
        bytes[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Nothing, if no sender of ours wrote it.
fn from_bytes(bytes: &[u8; HEADER]) -> Option<Header> {
    let word = |at: usize| bytes.get(at * 8..)?.first_chunk().copied().map(u64::from_le_bytes);
    Header::from_words([word(0)?, word(1)?, word(2)?, word(3)?])
}

/// What `cut` is for a message. It is never 0, and another one only for messages that are not in the ring together.
fn mark(number: u64) -> u32 {
    (number as u32) << 1 | 1
}

/// What both sides know.
#[derive(Debug)]
struct RingPlace {
    region: Arc<dyn Region>,
    /// Where the stream begins in the region.
    data: usize,
    capacity: u64,
    head: Flag,
    tail: Flag,
    cut: Flag,
    behind: Flag,
    heard: Flag,
    /// The other side's.
    bell: Bell,
}

impl RingPlace {
    /// The first of the two ranks commits the memory of the counters, the sender that of the stream.
    fn open(memory: RingMemory, committed: usize) -> Result<Self> {
        let RingMemory { region, at, len, bell } = memory;
        region.commit(at..at + committed)?;
        let flag = |line: usize| {
            let at = at + line * LINE;
            Flag::new(&Span::new(region.clone(), at..at + LINE)?, Writer::Host)
        };
        Ok(Self {
            head: flag(0)?,
            tail: flag(1)?,
            cut: flag(2)?,
            behind: flag(3)?,
            heard: flag(4)?,
            bell,
            data: at + LINES * LINE,
            capacity: (len - LINES * LINE) as u64,
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
pub(crate) struct Producer {
    place: RingPlace,
    head: u64,
    /// How far the receiver is known to be.
    tail: u64,
    /// How far the receiver was told.
    told: u64,
    /// The number of the message that was begun last, and how much of it is to be put.
    number: u64,
    rest: u64,
    /// Whether it was given up, and the receiver could not be told so yet.
    cutting: bool,
    /// The last message that was given up, until the receiver is known to be behind it; or 0.
    unheard: u32,
}

impl Producer {
    pub(crate) fn open(memory: RingMemory) -> Result<Self> {
        let len = memory.len;
        let place = RingPlace::open(memory, len)?;
        Ok(Self { place, head: 0, tail: 0, told: 0, number: 0, rest: 0, cutting: false, unheard: 0 })
    }

    /// As if so many bytes had been put and taken already.
    #[cfg(test)]
    pub(crate) fn start_at(&mut self, count: u64) {
        (self.head, self.tail, self.told) = (count, count, count);
        self.place.head.store(count as u32);
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
    fn room(&mut self, wanted: usize) -> Linked<u64> {
        let room = |this: &Self| this.tail / LINE as u64 * LINE as u64 + this.place.capacity - this.head;
        if room(self) < wanted as u64 {
            self.look()?;
        }
        Ok(room(self))
    }

    /// Looks how far the receiver is.
    fn look(&mut self) -> Linked<()> {
        let taken = u64::from(self.place.tail.load().wrapping_sub(self.tail as u32));
        if taken > self.told - self.tail {
            return Err(Fault::Nonsense);
        }
        self.tail += taken;
        Ok(())
    }

    /// Tells the receiver of a message that was given up, once it knows of the one before.
    fn cut(&mut self) {
        if self.unheard != 0 && self.place.heard.load() == self.unheard {
            self.unheard = 0;
            self.place.cut.store(0);
        }
        if self.cutting && self.unheard == 0 {
            self.cutting = false;
            // The filling is told behind the cut. Otherwise it could be taken for the end of the message.
            self.head = self.head.next_multiple_of(LINE as u64);
            self.unheard = mark(self.number);
            self.place.behind.store(self.head as u32);
            self.place.cut.store(self.unheard);
            self.place.bell.ring();
            self.tell();
        }
    }
}

impl Outlet for Producer {
    /// A small message is in the ring or not, but never in part. A receiver that has taken all there was has told of three
    /// quarters of the ring at least.
    fn begin(&mut self, header: Header) -> Linked<bool> {
        if self.cutting || self.unheard != 0 {
            self.cut();
            if self.cutting {
                return Ok(false);
            }
        }
        let frame = (header.follow() + HEADER as u64).next_multiple_of(LINE as u64);
        let wanted = frame.min(self.place.step().next_multiple_of(LINE as u64));
        if self.room(wanted as usize)? < wanted {
            return Ok(false);
        }
        let at = self.place.data + (self.head % self.place.capacity) as usize;
        self.place.region.write(at, &to_bytes(header))?;
        self.head += HEADER as u64;
        (self.number, self.rest) = (header.number, header.follow());
        Ok(true)
    }

    /// Ends the frame behind the last byte.
    fn put(&mut self, queue: &mut dyn Queue, rest: View<'_>, caching: Caching) -> Linked<usize> {
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
        self.rest -= done as u64;
        if self.rest == 0 {
            self.head = self.head.next_multiple_of(LINE as u64);
        }
        self.tell();
        Ok(done)
    }

    fn settle(&mut self) -> Linked<bool> {
        if self.cutting {
            self.cut();
        }
        Ok(!self.cutting)
    }

    fn give_up(&mut self) -> Linked<bool> {
        self.cutting = true;
        self.cut();
        Ok(true)
    }

    /// The receiver rings.
    fn arm(&self) {}

    /// The memory outlives its sender, and the group says who has left.
    fn close(&mut self) {}
}

/// The receiver's end.
#[derive(Debug)]
pub(crate) struct Consumer {
    place: RingPlace,
    /// How far the sender is known to be.
    head: u64,
    tail: u64,
    /// How far the sender was told.
    told: u64,
    number: u64,
    /// How much of the message that was begun last is to be taken.
    rest: u64,
    /// Whether it was given up.
    given_up: bool,
}

impl Consumer {
    pub(crate) fn open(memory: RingMemory) -> Result<Self> {
        let place = RingPlace::open(memory, PAGE)?;
        Ok(Self { place, head: 0, tail: 0, told: 0, number: 0, rest: 0, given_up: false })
    }

    /// As if so many bytes had been put and taken already.
    #[cfg(test)]
    pub(crate) fn start_at(&mut self, count: u64) {
        (self.head, self.tail, self.told) = (count, count, count);
        self.place.tail.store(count as u32);
    }

    /// The next part of what is known to be there that lies in one piece, at most `len` bytes.
    fn peek(&self, len: usize) -> Linked<View<'_>> {
        let most = (self.head - self.tail).min(self.place.stride()) as usize;
        Ok(self.place.piece(self.tail, most.min(len))?)
    }

    /// Goes on behind the message that was begun, if it was given up; gives whether it was.
    fn skip(&mut self) -> Linked<bool> {
        // It counts those that were begun.
        let cut = mark(self.number.wrapping_sub(1));
        if self.place.cut.load() != cut {
            return Ok(false);
        }
        let ahead = u64::from(self.place.behind.load().wrapping_sub(self.tail as u32));
        self.available(usize::MAX)?;
        if ahead >= self.head - self.tail + LINE as u64 {
            return Err(Fault::Nonsense);
        }
        // The sender may not have told of the filling yet: then in a moment.
        if ahead <= self.head - self.tail {
            self.tail += ahead;
            self.given_up = true;
            self.place.heard.store(cut);
            self.tell();
        }
        Ok(true)
    }

    /// Lets the sender see from time to time what was taken. One that waits for room has filled the ring, so it hears
    /// of room before the ring is empty.
    fn tell_now_and_then(&mut self) {
        if self.tail - self.told >= self.place.step() {
            self.tell();
        }
    }

    fn tell(&mut self) {
        self.place.tail.store(self.tail as u32);
        self.told = self.tail;
        self.place.bell.ring();
    }

    /// Bytes that have come; looks at the sender's counter only if less than `wanted` is known of.
    fn available(&mut self, wanted: usize) -> Linked<u64> {
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

impl Inlet for Consumer {
    fn begin(&mut self) -> Linked<Option<Header>> {
        if self.available(HEADER)? == 0 {
            return Ok(None);
        }
        let mut bytes = [0; HEADER];
        let at = self.place.data + (self.tail % self.place.capacity) as usize;
        self.place.region.read(at, &mut bytes)?;
        let header = from_bytes(&bytes).filter(|header| header.number == self.number);
        let header = header.ok_or(Fault::Nonsense)?;
        self.number += 1;
        self.tail += HEADER as u64;
        (self.rest, self.given_up) = (header.follow(), false);
        Ok(Some(header))
    }

    fn take(&mut self, queue: &mut dyn Queue, mut into: Landing<'_>, most: usize) -> Linked<usize> {
        let mut done = 0;
        while done < most && !self.given_up {
            // Looked at behind the counter: who sees bytes behind a cut sees the cut.
            self.available(1)?;
            if self.skip()? {
                break;
            }
            let piece = self.peek(most - done)?;
            let len = piece.len();
            if len == 0 {
                break;
            }
            match &mut into {
                Landing::Place(view, caching) => {
                    queue.copy(view.slice(done..done + len)?, piece, *caching)?
                }
                Landing::Keep(bytes) => {
                    let start = bytes.len();
                    bytes.resize(start + len, 0);
                    piece.to_span().read(0, &mut bytes[start..])?;
                }
                Landing::Drop => {}
            }
            self.tail += len as u64;
            self.tell_now_and_then();
            self.rest -= len as u64;
            done += len;
        }
        Ok(done)
    }

    fn end(&mut self) {
        self.tail = self.tail.next_multiple_of(LINE as u64);
        self.tell_now_and_then();
    }

    fn standing(&self) -> Standing {
        match (self.given_up, self.rest) {
            (true, _) => Standing::GivenUp,
            (_, 0) => Standing::Whole,
            _ => Standing::Open,
        }
    }

    /// The sender rings.
    fn arm(&self) {}
}
