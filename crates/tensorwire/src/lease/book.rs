//! Who holds what, in shared memory: the book of an owner, and a row of it for each holder.
//!
//! # The protocol
//!
//! A grant has a *slot* of the book: a tag with a generation and a state, and a check of its token, written by the owner only. A holder has a *row*
//! with one word for each slot, written by the holder only: the generation that it last redeemed there, how often, and how
//! many of those loans it still has. So a holder that dies leaves a row that the owner reads and forgets as a whole:
//! nothing that it had begun has to be undone.
//!
//! *Redeem* (the holder): look at the tag; count one more in the own word; a sequentially consistent fence; look at the tag
//! again. If it is still open for that generation, the loan is made: the owner sees it before it frees anything. If not, the
//! loan is taken back.
//!
//! *Release* (the holder): count one less in the own word; the same fence; look at the tag. If the owner wants to be told,
//! set the slot's bit among the dirty ones and ring the owner's bell, unless somebody has rung it since the owner last
//! looked. That is noted after the bell was rung: one that is stopped in between keeps nobody else from ringing.
//!
//! *Free* (the owner, once it has dropped the grant): set the tag to `CLOSED`; the same fence; look at the slot's word in
//! every row. If nobody holds it, it is free, and its generation is never used again. Otherwise set the tag to `DRAINING`,
//! which can be redeemed and tells of releases, and look once more.
//!
//! Nothing is lost: of a redeemer and an owner that closes, one fence comes first. If it is the redeemer's, the owner sees
//! the loan; if it is the owner's, the redeemer sees `CLOSED`, and looks until the owner has decided. Of a releaser and an
//! owner that wants to be told, either the owner sees the loan gone or the releaser sees the new tag.
//!
//! This file stands alone: crates/device/tests/loom_lease.rs runs it under loom.

use tensorwire_device::words::Words;

/// How many grants may be outstanding at a time.
pub(crate) const SLOTS: usize = if cfg!(loom) { 64 } else { 1 << 18 };

/// Words before the tables of a book.
const HEAD: usize = if cfg!(loom) { 16 } else { 64 };
/// Bits of slots with a release that the owner has not looked at.
const DIRTY: usize = HEAD;
const TAGS: usize = DIRTY + SLOTS / 64;

/// Bytes of a book.
pub(super) const BOOK_BYTES: usize = (TAGS + SLOTS * 2) * 8;
/// Bytes of a row: for each slot the word, and the point after which the holder's device is done.
pub(super) const ROW_BYTES: usize = SLOTS * 16;

/// Slots whose memory is taken together.
pub(super) const AT_ONCE: usize = 4096;

/// What can be done with a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing: it is free, or its grant is over.
    Free,
    /// Redeem it. The owner does not want to be told of releases.
    Open,
    /// Redeem it. The owner waits for releases.
    Draining,
    /// The owner decides at this moment.
    Closed,
    /// Keep what was redeemed. The owner waits for releases.
    Expired,
}

/// A generation and a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag(pub(super) u32, pub(super) State);

impl Tag {
    fn word(self) -> u64 {
        u64::from(self.0) << 32 | self.1 as u64
    }

    /// Any word is a tag: another process may have written it.
    fn of(word: u64) -> Self {
        let states = [State::Free, State::Open, State::Draining, State::Closed, State::Expired];
        let state = states.get((word & 0xffff) as usize).copied().unwrap_or(State::Free);
        Self((word >> 32) as u32, state)
    }
}

/// What a holder has in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    pub(super) generation: u32,
    /// How often it was redeemed; more than 65,535 times count as so many.
    pub(super) taken: u16,
    /// Loans that are not released.
    pub(super) loans: u16,
}

impl Held {
    fn word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.taken) << 16 | u64::from(self.loans)
    }

    fn of(word: u64) -> Self {
        Self { generation: (word >> 32) as u32, taken: (word >> 16) as u16, loans: word as u16 }
    }
}

/// The point of a device's work after which it has no use for the memory any more: a line of its holder, and the value
/// that it gets. Line 0 is no line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Point {
    pub(super) line: u16,
    pub(super) value: u32,
}

/// Why a slot could not be redeemed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The grant is over: used and let go by all, or long expired.
    Over,
    /// It has expired.
    Expired,
    /// The owner is deciding; look again.
    Deciding,
    /// This process has too many loans of it.
    TooMany,
}

/// Counters that other processes read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counter {
    /// Bytes that are granted now.
    GrantedBytes = 8,
    /// Grants now.
    Granted = 9,
    /// Bytes whose owner has let them go and that are held or awaited.
    WaitingBytes = 10,
    /// The same in grants.
    Waiting = 11,
    /// Grants that expired before they were redeemed, since the start.
    Expired = 12,
    /// Their bytes.
    ExpiredBytes = 13,
    /// Holders.
    Holders = 14,
}

/// Where the pids of the first holders are.
const PIDS: std::ops::Range<usize> = 16..HEAD;

/// Bytes of a book's head.
pub(crate) const HEAD_BYTES: usize = HEAD * 8;

/// What a book's head says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) owner: u32,
    pub(crate) closed: bool,
    pub(crate) granted: (u64, u64),
    pub(crate) waiting: (u64, u64),
    pub(crate) expired: (u64, u64),
    pub(crate) holders: u64,
    pub(crate) pids: Vec<u32>,
}

impl Shown {
    /// The head of a book; nothing if it is other memory.
    pub(crate) fn of(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[index * 8 + byte]));
        if word(0) != MARK {
            return None;
        }
        let both = |count: Counter, bytes: Counter| (word(count as usize), word(bytes as usize));
        let holders = word(Counter::Holders as usize);
        let listed = PIDS.len().min(usize::try_from(holders).unwrap_or(usize::MAX));
        Some(Self {
            owner: word(PID) as u32,
            closed: word(OVER) != 0,
            granted: both(Counter::Granted, Counter::GrantedBytes),
            waiting: both(Counter::Waiting, Counter::WaitingBytes),
            expired: both(Counter::Expired, Counter::ExpiredBytes),
            holders,
            pids: PIDS.take(listed).map(|index| word(index) as u32).collect(),
        })
    }
}

/// The marks that tell a book from other memory, and its version.
const MARK: u64 = u64::from_le_bytes(*b"twlease2");
/// Odd if the bell was rung since the owner last looked, which makes it the next even number.
const RUNG: usize = 1;
const OVER: usize = 2;
const FORGET: usize = 3;
const PID: usize = 4;

/// An owner's book.
#[derive(Debug, Clone)]
pub(super) struct Book(pub(super) Words);

impl Book {
    /// Makes it one. For its owner.
    pub(super) fn begin(&self) {
        self.0.store(PID, u64::from(std::process::id()));
        self.0.store(0, MARK);
    }

    /// Whether it is one.
    pub(super) fn is_one(&self) -> bool {
        self.0.load(0) == MARK && self.0.len() * 8 >= BOOK_BYTES
    }

    pub(super) fn tag(&self, slot: usize) -> Tag {
        Tag::of(self.0.load(TAGS + slot * 2))
    }

    /// What the token of the slot's grant must say.
    pub(super) fn check(&self, slot: usize) -> u64 {
        self.0.load(TAGS + slot * 2 + 1)
    }

    /// For the owner, before it gives the token away.
    pub(super) fn set_check(&self, slot: usize, check: u64) {
        self.0.store(TAGS + slot * 2 + 1, check);
    }

    /// For the owner.
    pub(super) fn set_tag(&self, slot: usize, tag: Tag) {
        self.0.store(TAGS + slot * 2, tag.word());
        Words::meet();
    }

    /// Decides whether a grant that its owner has dropped is over. `look` gives whether its token is waited for, and its
    /// loans. If it is over, the tag stays closed; otherwise it gets `state`, and the owner is told of releases from now on.
    pub(super) fn decide(
        &self,
        slot: usize,
        generation: u32,
        state: State,
        mut look: impl FnMut() -> Option<(bool, u32)>,
    ) -> bool {
        // Twice: a release before the tag was set tells nobody.
        for _ in 0..2 {
            let Some((awaited, loans)) = look() else { return false };
            if !awaited && loans == 0 {
                self.set_tag(slot, Tag(generation, State::Closed));
                if look().is_some_and(|(_, loans)| loans == 0) {
                    return true;
                }
            }
            self.set_tag(slot, Tag(generation, state));
        }
        false
    }

    /// Says that something was released here; gives what to call `rung` with if the bell has to be rung.
    pub(super) fn soil(&self, slot: usize) -> Option<u64> {
        self.0.set(DIRTY + slot / 64, 1 << (slot % 64));
        Words::meet();
        let rung = self.0.load(RUNG);
        rung.is_multiple_of(2).then_some(rung)
    }

    /// The bell was rung. It is not noted if the owner has looked since.
    pub(super) fn rung(&self, was: u64) {
        let _ = self.0.update(RUNG, |rung| (rung == was).then_some(was | 1));
    }

    /// From now on the bell is rung again. For the owner, before it looks.
    pub(super) fn hear(&self) {
        let _ = self.0.update(RUNG, |rung| Some((rung | 1).wrapping_add(1)));
        Words::meet();
    }

    /// The slots below `end` that were released in, once.
    pub(super) fn dirty(&self, end: usize) -> Vec<usize> {
        let mut slots = Vec::new();
        for index in 0..end.div_ceil(64) {
            if self.0.load(DIRTY + index) == 0 {
                continue;
            }
            let bits = self.0.swap(DIRTY + index, 0);
            slots.extend((0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| index * 64 + bit));
        }
        slots
    }

    /// Nothing can be redeemed any more.
    pub(super) fn end(&self) {
        self.0.store(OVER, 1);
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.load(OVER) != 0
    }

    /// Asks all holders to unmap what they do not use.
    pub(super) fn ask_to_forget(&self) {
        self.0.add(FORGET, 1);
    }

    /// How often that was asked.
    pub(super) fn asked_to_forget(&self) -> u64 {
        self.0.load(FORGET)
    }

    pub(super) fn count(&self, counter: Counter, value: u64) {
        self.0.store(counter as usize, value);
    }

    /// Names the holders, as many as there is room for.
    pub(super) fn list(&self, pids: impl ExactSizeIterator<Item = u32>) {
        self.count(Counter::Holders, pids.len() as u64);
        for (index, pid) in PIDS.zip(pids) {
            self.0.store(index, pid.into());
        }
    }

    /// Where the bytes of a slot's tables are that must be there before it is used.
    pub(super) fn bytes_of(slot: usize) -> std::ops::Range<usize> {
        let first = slot - slot % AT_ONCE;
        (TAGS + first * 2) * 8..(TAGS + (first + AT_ONCE) * 2) * 8
    }

    /// The bytes before the tags.
    pub(super) const HEAD_BYTES: usize = TAGS * 8;
}

/// A holder's row.
#[derive(Debug, Clone)]
pub(super) struct Row(pub(super) Words);

impl Row {
    pub(super) fn held(&self, slot: usize) -> Held {
        Held::of(self.0.load(slot * 2))
    }

    /// The last point that was noted for a generation; no line if none was.
    pub(super) fn point(&self, slot: usize, generation: u32) -> Point {
        let word = self.0.load(slot * 2 + 1);
        let point = Point { line: (word >> 32) as u16, value: word as u32 };
        if (word >> 48) as u16 == generation as u16 { point } else { Point::default() }
    }

    /// Notes the point of a release, before the release.
    pub(super) fn set_point(&self, slot: usize, generation: u32, point: Point) {
        let head = u64::from(generation as u16) << 48 | u64::from(point.line) << 32;
        self.0.store(slot * 2 + 1, head | u64::from(point.value));
    }

    /// Makes a loan; or gives why not, and whether the owner wants to be told that it was tried.
    pub(super) fn redeem(&self, book: &Book, slot: usize, generation: u32) -> Result<(), (Refusal, bool)> {
        check(book.tag(slot), generation).map_err(|refusal| (refusal, false))?;
        let more = |word| {
            let held = Held::of(word);
            let fresh = held.generation != generation;
            // Another thread that came with an older token takes its loan back soon. And if this is the older one, what
            // has happened since must not be forgotten: the word was read before the tag.
            if fresh && (held.loans != 0 || book.tag(slot).0 != generation) {
                return None;
            }
            let held = if fresh { Held { generation, ..Held::default() } } else { held };
            let loans = held.loans.checked_add(1)?;
            Some(Held { taken: held.taken.saturating_add(1), loans, ..held }.word())
        };
        if let Err(word) = self.0.update(slot * 2, more) {
            let full = Held::of(word).generation == generation;
            return Err((if full { Refusal::TooMany } else { Refusal::Deciding }, false));
        }
        Words::meet();
        check(book.tag(slot), generation).map_err(|refusal| {
            // The owner may have seen it.
            (refusal, self.take_back(book, slot, generation))
        })
    }

    /// Takes a loan back that came to nothing, as if it had never been: it is no use of the token. Gives whether the owner
    /// wants to be told.
    pub(super) fn take_back(&self, book: &Book, slot: usize, generation: u32) -> bool {
        self.end(book, slot, generation, 1)
    }

    /// Ends a loan; gives whether the owner wants to be told.
    pub(super) fn release(&self, book: &Book, slot: usize, generation: u32) -> bool {
        self.end(book, slot, generation, 0)
    }

    fn end(&self, book: &Book, slot: usize, generation: u32, untaken: u16) -> bool {
        let less = |word| {
            let held = Held::of(word);
            let loans = (held.generation == generation).then(|| held.loans.checked_sub(1)).flatten()?;
            Some(Held { taken: held.taken.saturating_sub(untaken), loans, ..held }.word())
        };
        let _ = self.0.update(slot * 2, less);
        Words::meet();
        wants(book.tag(slot), generation)
    }

    /// Where the bytes of a slot are that must be there before it is used.
    pub(super) fn bytes_of(slot: usize) -> std::ops::Range<usize> {
        let first = slot - slot % AT_ONCE;
        first * 16..(first + AT_ONCE) * 16
    }
}

/// Whether the owner wants to be told of a release.
fn wants(tag: Tag, generation: u32) -> bool {
    tag.0 == generation && !matches!(tag.1, State::Free | State::Open)
}

fn check(tag: Tag, generation: u32) -> Result<(), Refusal> {
    match tag {
        Tag(now, _) if now != generation => Err(Refusal::Over),
        Tag(_, State::Open | State::Draining) => Ok(()),
        Tag(_, State::Closed) => Err(Refusal::Deciding),
        Tag(_, State::Expired) => Err(Refusal::Expired),
        Tag(_, State::Free) => Err(Refusal::Over),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn table(bytes: usize) -> Words {
        Words::local(bytes / 8)
    }

    #[test]
    fn a_loan_is_counted_and_released() {
        let (book, row) = (Book(table(BOOK_BYTES)), Row(table(ROW_BYTES)));
        assert_eq!(row.redeem(&book, 5, 1), Err((Refusal::Over, false)));
        book.set_tag(5, Tag(1, State::Open));
        assert_eq!(row.redeem(&book, 5, 2), Err((Refusal::Over, false)));
        assert_eq!((row.redeem(&book, 5, 1), row.redeem(&book, 5, 1)), (Ok(()), Ok(())));
        assert_eq!(row.held(5), Held { generation: 1, taken: 2, loans: 2 });
        assert!(!row.release(&book, 5, 1));
        book.set_tag(5, Tag(1, State::Draining));
        assert!(row.release(&book, 5, 1));
        assert_eq!(row.held(5), Held { generation: 1, taken: 2, loans: 0 });
        // Once too often, and of another generation: nothing happens.
        row.release(&book, 5, 1);
        row.release(&book, 5, 9);
        assert_eq!(row.held(5).loans, 0);
        assert_eq!(row.held(4), Held::default());
    }

    #[test]
    fn a_new_generation_begins_anew() {
        let (book, row) = (Book(table(BOOK_BYTES)), Row(table(ROW_BYTES)));
        book.set_tag(0, Tag(1, State::Open));
        row.redeem(&book, 0, 1).unwrap();
        row.set_point(0, 1, Point { line: 3, value: 4 });
        row.release(&book, 0, 1);
        assert_eq!(row.point(0, 1), Point { line: 3, value: 4 });
        book.set_tag(0, Tag(2, State::Open));
        row.redeem(&book, 0, 2).unwrap();
        let held = Held { generation: 2, taken: 1, loans: 1 };
        assert_eq!((row.held(0), row.point(0, 2)), (held, Point::default()));
    }

    #[test]
    fn what_came_to_nothing_is_no_use() {
        let (book, row) = (Book(table(BOOK_BYTES)), Row(table(ROW_BYTES)));
        book.set_tag(0, Tag(1, State::Open));
        row.redeem(&book, 0, 1).unwrap();
        row.redeem(&book, 0, 1).unwrap();
        assert!(!row.take_back(&book, 0, 1));
        assert_eq!(row.held(0), Held { generation: 1, taken: 1, loans: 1 });
        book.set_tag(0, Tag(1, State::Draining));
        assert!(row.take_back(&book, 0, 1));
        assert_eq!(row.held(0), Held { generation: 1, taken: 0, loans: 0 });
    }

    #[test]
    fn states_decide() {
        let (book, row) = (Book(table(BOOK_BYTES)), Row(table(ROW_BYTES)));
        for (state, result) in [
            (State::Free, Err(Refusal::Over)),
            (State::Open, Ok(())),
            (State::Draining, Ok(())),
            (State::Closed, Err(Refusal::Deciding)),
            (State::Expired, Err(Refusal::Expired)),
        ] {
            book.set_tag(1, Tag(7, state));
            assert_eq!(book.tag(1), Tag(7, state));
            assert_eq!(row.redeem(&book, 1, 7), result.map_err(|refusal| (refusal, false)));
        }
        // Whatever is there is a tag.
        book.0.store(TAGS + 2, u64::MAX);
        assert_eq!(book.tag(1), Tag(u32::MAX, State::Free));
    }

    #[test]
    fn there_is_an_end_to_loans() {
        let (book, row) = (Book(table(BOOK_BYTES)), Row(table(ROW_BYTES)));
        book.set_tag(0, Tag(1, State::Open));
        (0..u16::MAX).for_each(|_| row.redeem(&book, 0, 1).unwrap());
        assert_eq!(row.redeem(&book, 0, 1), Err((Refusal::TooMany, false)));
        row.release(&book, 0, 1);
        row.redeem(&book, 0, 1).unwrap();
        assert_eq!(row.held(0).taken, u16::MAX);
    }

    #[test]
    fn others_read_the_head() {
        let region = tensorwire_device::Device::alloc(&tensorwire_device::host::Host, HEAD_BYTES).unwrap();
        let book = Book(Words::new(&tensorwire_device::Span::whole(region.clone())).unwrap());
        let head = || {
            let mut head = [0; HEAD_BYTES];
            region.read(0, &mut head).unwrap();
            head
        };
        assert_eq!(Shown::of(&head()), None);
        book.begin();
        book.count(Counter::Waiting, 3);
        book.list((1..100).collect::<Vec<_>>().into_iter());
        let shown = Shown::of(&head()).unwrap();
        assert_eq!((shown.owner, shown.waiting, shown.holders), (std::process::id(), (3, 0), 99));
        assert_eq!(shown.pids, (1..49).collect::<Vec<u32>>());
        assert!(!shown.closed);
        // Whatever it says, nothing is believed too much.
        book.count(Counter::Holders, u64::MAX);
        assert_eq!(Shown::of(&head()).unwrap().pids.len(), 48);
    }

    #[test]
    fn dirty_slots_are_told_once() {
        let book = Book(table(BOOK_BYTES));
        let first = book.soil(3).unwrap();
        book.rung(first);
        assert_eq!([64, 3, SLOTS - 1].map(|slot| book.soil(slot)), [None; 3]);
        book.hear();
        assert_eq!(book.dirty(SLOTS), [3, 64, SLOTS - 1]);
        // A holder that notes late that it has rung keeps nobody from ringing.
        book.rung(first);
        assert!(book.soil(5).is_some());
        assert_eq!(book.dirty(4), [5], "whole words are looked at");
        assert_eq!(book.dirty(SLOTS), [0; 0]);
    }
}
