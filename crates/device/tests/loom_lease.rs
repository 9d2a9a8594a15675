//! The book of leases under loom: the code that runs, over loom's atomics. An owner that drops a grant frees its memory
//! when nobody needs it: not before (a race on the memory), and it hears of the last release (otherwise a deadlock).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tensorwire-device --release --test loom_lease`

#![cfg(loom)]
#![allow(clippy::unwrap_used, clippy::panic, dead_code, unreachable_pub)]

#[path = "../../tensorwire/src/lease/book.rs"]
mod book;

use book::{Book, Refusal, Row, State, Tag};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use loom::thread;
use tensorwire_device::words::Words;

/// The slot of the one grant, its generation, and the one before.
const SLOT: usize = 0;
const GENERATION: u32 = 2;
const OLD: u32 = 1;

/// What the processes share.
struct World {
    book: Book,
    rows: Vec<Row>,
    bell: Notify,
    /// The memory: who holds it reads it, and the owner writes to it once it is free.
    memory: UnsafeCell<bool>,
}

// SAFETY: loom sees to it that nobody reads the memory while it is written.
unsafe impl Sync for World {}

impl World {
    fn new(holders: usize) -> Arc<Self> {
        let rows = (0..holders).map(|_| Row(Words::local(2))).collect();
        // As far as the tag of the one slot: loom has every word cost something.
        let book = Book(Words::local(Book::HEAD_BYTES / 8 + 1));
        book.set_tag(SLOT, Tag(GENERATION, State::Open));
        Arc::new(Self { book, rows, bell: Notify::new(), memory: UnsafeCell::new(false) })
    }

    fn tell(&self) {
        if let Some(rung) = self.book.soil(SLOT) {
            self.bell.notify();
            self.book.rung(rung);
        }
    }

    /// Redeems, uses and releases; gives whether it could.
    fn hold(&self, holder: usize) -> bool {
        let row = &self.rows[holder];
        loop {
            match row.redeem(&self.book, SLOT, GENERATION) {
                Ok(()) => break,
                Err((refusal, tell)) => {
                    if tell {
                        self.tell();
                    }
                    match refusal {
                        Refusal::Deciding => thread::yield_now(),
                        Refusal::Over => return false,
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
        // SAFETY: loom checks it.
        self.memory.with(|memory| assert!(!unsafe { *memory }, "it is freed while it is held"));
        if row.release(&self.book, SLOT, GENERATION) {
            self.tell();
        }
        true
    }

    /// Whether the token is waited for, and the loans.
    fn look(&self, uses: u32) -> Option<(bool, u32)> {
        let held = self.rows.iter().map(|row| row.held(SLOT)).filter(|held| held.generation == GENERATION);
        let (taken, loans) =
            held.fold((0, 0), |sum, held| (sum.0 + u32::from(held.taken), sum.1 + u32::from(held.loans)));
        Some((taken < uses, loans))
    }

    fn try_free(&self, uses: u32) -> bool {
        let over = self.book.decide(SLOT, GENERATION, State::Draining, || self.look(uses));
        if over {
            self.book.set_tag(SLOT, Tag(GENERATION, State::Free));
            // SAFETY: loom checks it.
            self.memory.with_mut(|memory| unsafe { *memory = true });
        }
        over
    }

    /// The owner's thread: it sleeps until it is told of something.
    fn drop_grant(&self, uses: u32) {
        let mut over = self.try_free(uses);
        while !over {
            self.bell.wait();
            self.book.hear();
            for slot in self.book.dirty(1) {
                assert_eq!(slot, SLOT);
                over = over || self.try_free(uses);
            }
        }
    }
}

fn check(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

/// The token is waited for: whoever has it redeems it, and the last release is heard.
#[test]
fn expected_redemptions_take_place() {
    check(2, || {
        let world = World::new(2);
        let holders: Vec<_> = (0..2)
            .map(|holder| {
                let world = world.clone();
                thread::spawn(move || assert!(world.hold(holder), "the owner waits for it"))
            })
            .collect();
        world.drop_grant(2);
        holders.into_iter().for_each(|holder| holder.join().unwrap());
    });
}

/// Nobody waits for the token: it is redeemed in time, or over.
#[test]
fn a_redemption_meets_the_end() {
    check(4, || {
        let world = World::new(1);
        let holder = thread::spawn({
            let world = world.clone();
            move || {
                world.hold(0);
            }
        });
        world.drop_grant(0);
        holder.join().unwrap();
    });
}

/// The same with two, one of which is waited for.
#[test]
fn two_redemptions_meet_the_end() {
    check(2, || {
        let world = World::new(2);
        let holders: Vec<_> = (0..2)
            .map(|holder| {
                let world = world.clone();
                thread::spawn(move || world.hold(holder))
            })
            .collect();
        world.drop_grant(1);
        let held: Vec<bool> = holders.into_iter().map(|holder| holder.join().unwrap()).collect();
        assert!(held.contains(&true), "the owner waited for one");
    });
}

/// Two threads of one process share its row; one of them comes with an old token.
#[test]
fn an_old_token_does_not_disturb_a_new_one() {
    check(4, || {
        let world = World::new(1);
        world.book.set_tag(SLOT, Tag(OLD, State::Open));
        let late = thread::spawn({
            let world = world.clone();
            move || loop {
                match world.rows[0].redeem(&world.book, SLOT, OLD) {
                    Ok(()) => return,
                    Err((Refusal::Deciding, _)) => thread::yield_now(),
                    Err(_) => return,
                }
            }
        });
        let held = || world.rows[0].held(SLOT);
        let look = || Some((false, if held().generation == OLD { held().loans.into() } else { 0 }));
        if !world.book.decide(SLOT, OLD, State::Draining, look) {
            // The old one was redeemed in time, or nearly: there is no new one yet.
            return late.join().unwrap();
        }
        world.book.set_tag(SLOT, Tag(OLD, State::Free));
        world.book.set_tag(SLOT, Tag(GENERATION, State::Open));
        assert!(world.hold(0));
        assert_eq!(world.look(1), Some((false, 0)), "the use is forgotten");
        late.join().unwrap();
        assert_eq!(world.look(1), Some((false, 0)), "the use is forgotten");
    });
}
