//! Leases: memory that is lent to other processes, counted, and cannot leak.
//!
//! An owner *grants* a span ([`Context::grant`](crate::Context::grant)) and gets a [`Lease`], whose [`Token`] goes to other
//! processes of the same user over any medium. There it is *redeemed* ([`Context::redeem`](crate::Context::redeem)) for a
//! [`Loan`]: the memory is mapped, once for each process, and counted until the loan's last user is gone. The memory is let go
//! when the owner and all holders have dropped it, in any order, and whoever dies has dropped what it held.
//!
//! | file | what |
//! |---|---|
//! | `book` | who holds what, in shared memory, and the protocol of redeeming, releasing and freeing |
//! | `token`, `terms` | what travels, and on what terms |
//! | `grant`, `granted`, `owner` | the owner's side: how memory is lent, what the owner has then, and all that is lent |
//! | `redeem`, `loan`, `holder` | the holder's side: how memory is got, what the holder has then, and of whom |
//! | `points` | when data is ready, and when a device is done with it |
//! | `meet`, `domain` | the two ends of the connection between them, which is one of `share` |
//! | `thread` | the thread that hears of releases and lets memory go |

mod book;
mod domain;
mod grant;
mod granted;
mod holder;
#[cfg(feature = "hooks")]
pub mod hooks;
mod loan;
mod meet;
mod owner;
mod points;
mod redeem;
mod terms;
mod thread;
mod token;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use tensorwire_device::fd::{Address, Fd};
use tensorwire_device::fork::Birth;
use tensorwire_device::gpu::background;
use tensorwire_device::host::Host;
use tensorwire_device::secret::{Id, Secret, Side};
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::words::Words;
use tensorwire_device::{Abort, Deadline, Device, Queue, Region, Span};

pub use self::granted::Lease;
pub use self::loan::Loan;
pub use self::owner::HolderInfo;
pub use self::terms::{Stats, Terms};
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use self::token::fuzz;
pub use self::token::{MAX_NOTE, Token};
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use crate::share::fuzz as fuzz_frames;

pub(crate) use self::book::{HEAD_BYTES, Shown};

use self::book::{BOOK_BYTES, Book, Point, ROW_BYTES, Row};
use self::holder::{Holding, Lender, ring};
use self::owner::{Holder, Owner};
use self::points::{Points, Theirs};
use self::token::{Issuer, Key};
use crate::error::{Error, Result};
use crate::share::{Domain, LenderId, Share};

/// How long a wait looks before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// The leases of a process: what it has granted and what it holds.
#[derive(Debug)]
pub(crate) struct Leases(Arc<Inner>);

/// What leases, loans and the thread share.
struct Inner {
    myself: Weak<Self>,
    share: Arc<Share>,
    /// What tokens say of this process.
    issuer: Issuer,
    /// Makes the keys of grants.
    keys: Secret,
    birth: Birth,
    book: Book,
    book_region: Arc<dyn Region>,
    points: Arc<Points>,
    owner: Mutex<Owner>,
    /// Something was released, or is over.
    released: Condvar,
    holding: Mutex<Holding>,
    /// This process as a lender to itself.
    me: Arc<Lender>,
    bell: Arc<Fd>,
    stop: AtomicBool,
    /// How long queues of this process may take, where no call says it.
    timeout: Duration,
}

impl Leases {
    /// Starts the thread. Others reach this process at `address`.
    pub(crate) fn start(share: &Arc<Share>, address: &Address, timeout: Duration) -> Result<Self> {
        let identity = share.identity();
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(Fd::new(eventfd.map_err(|e| Error::io("making an eventfd", e))?));
        let (domain, secret) = (Id::random()?, Secret::random()?);
        let issuer = Issuer {
            owner: identity,
            pid: std::process::id(),
            domain,
            secret: secret.to_bytes(),
            address: address.clone(),
        };
        let book_region = Host.reserve(BOOK_BYTES)?;
        book_region.commit(0..Book::HEAD_BYTES)?;
        let book = Book(Words::new(&Span::whole(book_region.clone()))?);
        book.begin();
        let points = Arc::new(Points::new(&**share.devices().host())?);
        let row_region = Host.reserve(ROW_BYTES)?;
        let row = Row(Words::new(&Span::whole(row_region.clone()))?);
        let theirs = Theirs::of(points.region().clone())?;
        let holder = Arc::new(Holder {
            identity,
            pid: issuer.pid,
            row: row.clone(),
            region: row_region,
            points: theirs.clone(),
            bell: bell.clone(),
            gone: AtomicBool::new(false),
        });
        // This process redeems its own tokens as others do.
        let me = Arc::new(Lender {
            id: LenderId::new(identity, address),
            address: address.clone(),
            pid: issuer.pid,
            connection: None,
            book: book.clone(),
            row,
            points: theirs,
            bell: bell.clone(),
            abort: points.abort()?,
            ended: AtomicBool::new(false),
            waits: Mutex::default(),
            forgot: Mutex::new(0),
            order: Mutex::default(),
        });
        let mut holding = Holding::default();
        holding.add(&me);
        let keys = Secret::random()?;
        let inner = Arc::new_cyclic(|myself| Inner {
            myself: myself.clone(),
            share: share.clone(),
            issuer,
            keys,
            birth: Birth::now(),
            owner: Mutex::new(Owner::new(book.clone(), book_region.clone(), holder)),
            book,
            book_region,
            points,
            released: Condvar::new(),
            holding: Mutex::new(holding),
            me,
            bell,
            stop: AtomicBool::new(false),
            timeout,
        });
        let thread = std::thread::Builder::new().name("tensorwire-lease".into());
        let shared = inner.clone();
        thread
            .spawn(move || {
                background();
                thread::run(&shared);
            })
            .map_err(|e| Error::io("starting the thread that serves leases", e))?;
        let who: Arc<dyn Domain> = inner.clone();
        share.enter(domain, secret, Arc::downgrade(&who));
        Ok(Self(inner))
    }

    /// Lets go of all memory that nobody needs, and asks holders to unmap what they do not use; gives the bytes.
    pub(crate) fn collect(&self) -> usize {
        self.0.collect()
    }

    /// The same as a function that does not keep the leases alive. It does nothing once they are gone.
    pub(crate) fn collector(&self) -> impl Fn() -> usize + Send + Sync + use<> {
        let inner = Arc::downgrade(&self.0);
        move || inner.upgrade().map_or(0, |inner| inner.collect())
    }

    /// Whether a token of this process is over.
    pub(crate) fn is_over(&self, token: &Token) -> bool {
        self.0.owner().standing(token.slot, token.generation).is_none()
    }

    /// What is granted.
    pub(crate) fn stats(&self) -> Stats {
        self.0.owner().stats()
    }

    /// What is still held or awaited, and by whom; nothing if all is well.
    pub(crate) fn outstanding(&self) -> Option<String> {
        self.0.owner().outstanding()
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        let inner = &self.0;
        // In a forked child the thread does not exist, and the locks may be held for ever.
        if !inner.birth.is_ours() {
            return;
        }
        inner.stop.store(true, Ordering::Release);
        ring(&inner.bell);
    }
}

/// Short: every lease and every loan has one.
impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leases of process {}", self.issuer.pid)
    }
}

impl Inner {
    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holding(&self) -> MutexGuard<'_, Holding> {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a grant. A process that knows the keys of other grants cannot guess it.
    fn key_of(&self, slot: u32, generation: u32) -> Key {
        let grant = (u64::from(slot) << 32 | u64::from(generation)).to_le_bytes();
        let whole = self.keys.proof(Side::Listener, &grant);
        std::array::from_fn(|index| whole[index])
    }

    /// What is due: for the thread.
    fn look(&self, now: Instant) {
        let mut owner = self.owner();
        owner.expire(now);
        owner.sweep();
        let garbage = owner.take_garbage();
        drop(owner);
        self.released.notify_all();
        at("owner: before memory is let go");
        drop(garbage);
        self.give_up(now);
    }

    /// Gives up mappings that nobody has used for a while, and those of lenders that are gone or need their memory.
    fn give_up(&self, now: Instant) {
        let mut holding = self.holding();
        let (done, lenders) = (holding.done(), holding.standing());
        drop(holding);
        drop(done);
        // The driver may give the handle of memory whose maker has died to other memory.
        self.share.give_up(now, |lender| lenders.get(&lender).copied().unwrap_or(true));
    }

    /// The end of the thread: memory that was granted is let go here; holders keep what they have mapped.
    fn close(&self) {
        self.share.leave(self.issuer.domain);
        let mut owner = self.owner();
        if let Some(text) = owner.outstanding() {
            tracing::warn!("the context is closed while {text}");
        }
        owner.close();
        let holders = owner.holders().clone();
        let garbage = owner.take_garbage();
        drop(owner);
        holders.iter().for_each(|holder| ring(&holder.bell));
        self.released.notify_all();
        drop(garbage);
        let holding = std::mem::take(&mut *self.holding());
        drop(holding);
        self.share.give_up_all();
    }

    fn collect(&self) -> usize {
        let mut owner = self.owner();
        owner.sweep_all();
        let garbage = owner.take_garbage();
        let holders = owner.holders().clone();
        drop(owner);
        self.released.notify_all();
        self.book.ask_to_forget();
        holders.iter().for_each(|holder| ring(&holder.bell));
        let freed = garbage.iter().map(Span::len).sum();
        drop(garbage);
        freed
    }

    /// A point on a queue. Where no line is free, the queue is waited for instead.
    fn point_on(&self, queue: &mut dyn Queue) -> Result<Point> {
        match self.points.take()? {
            Some((flag, point)) => {
                queue.signal(&flag, point.value)?;
                Ok(point)
            }
            None => {
                tracing::warn!(
                    "a queue is waited for: thousands of leases are on queues that have not come to them"
                );
                queue.finish(&Abort::local(), Deadline::after(self.timeout))?;
                Ok(Point::default())
            }
        }
    }
}

/// A numbered step, at which tests end the process.
fn at(_step: &'static str) {
    #[cfg(feature = "hooks")]
    hooks::at(_step);
}
