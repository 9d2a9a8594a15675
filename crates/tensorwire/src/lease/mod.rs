//! Leases: memory that is lent to other processes, counted, and cannot leak.
//!
//! An owner *grants* a span ([`Context::grant`]) and gets a [`Lease`], whose [`Token`] goes to other processes of the same
//! user over any medium. There it is *redeemed* ([`Context::redeem`]) for a [`Loan`]: the memory is mapped, once for each
//! process, and counted until the loan's last user is gone. The memory is let go when the owner and all holders have
//! dropped it, in any order, and whoever dies has dropped what it held.
//!
//! | file | what |
//! |---|---|
//! | `book` | who holds what, in shared memory, and the protocol of redeeming, releasing and freeing |
//! | `token` | what travels |
//! | `owner`, `holder` | the two sides |
//! | `points` | when data is ready, and when a device is done with it |
//! | `service` | the thread that answers holders and hears of releases and deaths |

mod book;
mod holder;
#[cfg(feature = "hooks")]
pub mod hooks;
mod owner;
mod points;
mod service;
mod token;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use tensorwire_device::fd::Fd;
use tensorwire_device::fork::Birth;
use tensorwire_device::handle::GpuHandle;
use tensorwire_device::host::Host;
use tensorwire_device::pool::Pool;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::subregion::keeping;
use tensorwire_device::sync::{AtomicBool, Ordering};
use tensorwire_device::words::Words;
use tensorwire_device::{Abort, Caching, Deadline, Device, DeviceId, Handle, Queue, Region, Span};

pub use self::owner::{HolderInfo, Stats, Terms};
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use self::token::fuzz;
pub use self::token::{MAX_NOTE, Token};

pub(crate) use self::book::{HEAD_BYTES, Shown};

use self::book::{BOOK_BYTES, Book, Point, ROW_BYTES, Row};
use self::holder::{Hold, Holding, Lender, ring, root};
use self::owner::{Holder, Owner};
use self::points::{Points, Theirs};
use self::token::Domain;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::interrupt;

/// How long a wait looks before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// The leases of a process: what it has granted and what it holds.
#[derive(Debug)]
pub(crate) struct Leases(Arc<Inner>);

/// What leases, loans and the thread share.
struct Inner {
    identity: Id,
    domain: Domain,
    birth: Birth,
    book: Book,
    book_region: Arc<dyn Region>,
    points: Arc<Points>,
    owner: Mutex<Owner>,
    /// Something was released, or is over.
    released: Condvar,
    holding: Mutex<Holding>,
    bell: Arc<Fd>,
    stop: AtomicBool,
    /// How long queues of this process may take, where no call says it.
    timeout: Duration,
}

impl Leases {
    /// Starts the thread.
    pub(crate) fn start(context: &Context) -> Result<Self> {
        let identity = context.identity();
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(Fd::new(eventfd.map_err(|e| Error::io("making an eventfd", e))?));
        let secret = Secret::random()?;
        let domain = Domain {
            owner: identity,
            pid: std::process::id(),
            name: Id::random()?,
            secret: secret.to_bytes(),
            address: context.watcher().address().clone(),
        };
        let book_region = Host.reserve(BOOK_BYTES)?;
        book_region.commit(0..Book::HEAD_BYTES)?;
        let book = Book(Words::new(&Span::whole(book_region.clone()))?);
        book.begin();
        let points = Arc::new(Points::new(context.host())?);
        let row_region = Host.reserve(ROW_BYTES)?;
        let row = Row(Words::new(&Span::whole(row_region.clone()))?);
        let theirs = Theirs::of(points.region().clone())?;
        let me = Arc::new(Holder {
            identity,
            pid: domain.pid,
            row: row.clone(),
            region: row_region,
            points: theirs.clone(),
            bell: bell.clone(),
            gone: AtomicBool::new(false),
        });
        // This process redeems its own tokens as others do.
        let lender = Lender {
            identity,
            pid: domain.pid,
            line: None,
            pidfd: None,
            book: book.clone(),
            row,
            points: theirs,
            bell: bell.clone(),
            abort: points.abort()?,
            ended: AtomicBool::new(false),
            forgot: Mutex::new(0),
            order: Mutex::default(),
        };
        let mut holding = Holding::default();
        holding.lenders.insert(identity, Arc::new(lender));
        let mailbox = context.watcher().open_for(domain.name, secret, Some(bell.clone()))?;
        let inner = Arc::new(Inner {
            identity,
            owner: Mutex::new(Owner::new(book.clone(), book_region.clone(), me)),
            domain,
            birth: Birth::now(),
            book,
            book_region,
            points,
            released: Condvar::new(),
            holding: Mutex::new(holding),
            bell,
            stop: AtomicBool::new(false),
            timeout: context.config().timeout,
        });
        let thread = std::thread::Builder::new().name("tensorwire-lease".into());
        let shared = inner.clone();
        thread.spawn(move || service::run(&shared, &mailbox)).map_err(|e| {
            context.watcher().close(inner.domain.name);
            Error::io("starting the thread that serves leases", e)
        })?;
        Ok(Self(inner))
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
        write!(f, "Leases of process {}", self.domain.pid)
    }
}

impl Inner {
    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holding(&self) -> MutexGuard<'_, Holding> {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner)
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
        let unused = self.holding().give_up(now);
        drop(unused);
    }

    /// A lender that has died, or closed its context.
    fn forget(&self, lender: &Arc<Lender>) {
        self.holding().remove(lender.identity);
    }

    /// The end of the thread: memory that was granted is let go here; holders keep what they have mapped.
    fn close(&self) {
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
        let mut holding = self.holding();
        let holding = std::mem::take(&mut *holding);
        drop(holding);
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
}

impl Context {
    /// Lends memory of this process, or memory that was lent to it, to whoever redeems the lease's token. The data is ready.
    pub fn grant(&self, span: &Span, terms: &Terms) -> Result<Lease> {
        self.grant_when(span, terms, None)
    }

    /// The same for data that is ready when a queue has come so far: whoever redeems it waits for that, on its own queue
    /// where it has one. Nobody waits here.
    pub fn grant_after(&self, span: &Span, terms: &Terms, queue: &mut dyn Queue) -> Result<Lease> {
        self.grant_when(span, terms, Some(queue))
    }

    fn grant_when(&self, span: &Span, terms: &Terms, mut queue: Option<&mut dyn Queue>) -> Result<Lease> {
        let inner = &self.leases()?.0;
        if terms.note.len() > MAX_NOTE {
            return Err(Error::misuse(format!("a note of {} bytes: at most {MAX_NOTE}", terms.note.len())));
        }
        let copy = match owner::name(inner.identity, span) {
            Err(Error::Unsupported { have, .. }) if terms.copy => {
                tracing::info!("{} bytes are copied to be lent: {have}", span.len());
                inner.owner().count_copy(span);
                let queue = queue.as_mut().map(|queue| &mut **queue as &mut dyn Queue);
                Some(self.copy_of(span, queue)?)
            }
            _ => None,
        };
        let (is_copy, span) = (copy.is_some(), copy.as_ref().unwrap_or(span));
        let (mut memory, offset) = owner::name(inner.identity, span)?;
        let root = root(span.region());
        let mut holding = inner.holding();
        match holding.name_of(root) {
            Some(name) => memory = name,
            None => holding.note_own(&memory, root, offset.saturating_sub(span_start(span, root))),
        }
        drop(holding);
        let ready = match queue {
            Some(queue) => point_on(inner, queue)?,
            None => Point::default(),
        };
        at("grant: before it is noted");
        let (slot, generation) = inner.owner().grant(span.clone(), terms)?;
        at("grant: noted");
        let token = Token {
            domain: inner.domain.clone(),
            slot,
            generation,
            memory,
            offset,
            len: span.len(),
            ready,
            note: terms.note.clone(),
        };
        if terms.lifetime < service::NAP {
            ring(&inner.bell);
        }
        Ok(Lease { inner: inner.clone(), token, is_copy })
    }

    /// A copy in memory of the same device that can be lent, made on the queue or else now.
    fn copy_of(&self, span: &Span, queue: Option<&mut dyn Queue>) -> Result<Span> {
        let device = self.device(&span.device())?;
        let copy = Span::whole(device.take(span.len())?);
        match queue {
            Some(queue) => queue.copy(copy.view(), span.view(), Caching::Keep)?,
            None => {
                let mut queue = device.queue()?;
                queue.copy(copy.view(), span.view(), Caching::Keep)?;
                queue.finish(&Abort::local(), Deadline::after(self.config().timeout))?;
            }
        }
        Ok(copy)
    }

    /// Maps the memory of a token and counts it as held until the last user of the loan's span is gone. Waits until the data
    /// is ready.
    pub fn redeem(&self, token: &Token, deadline: Deadline) -> Result<Loan> {
        self.redeem_for(token, None, deadline)
    }

    /// The same, but the queue waits for the data: what is queued on it from now on finds it ready.
    pub fn redeem_on(&self, token: &Token, queue: &mut dyn Queue, deadline: Deadline) -> Result<Loan> {
        self.redeem_for(token, Some(queue), deadline)
    }

    fn redeem_for(&self, token: &Token, queue: Option<&mut dyn Queue>, deadline: Deadline) -> Result<Loan> {
        let inner = &self.leases()?.0;
        let lender = self.lender(inner, token, deadline)?;
        let hold = Arc::new(lender.redeem(token, deadline)?);
        let region = self.ready(inner, &hold, token, queue, deadline).inspect_err(|_| hold.take_back())?;
        Ok(Loan { inner: inner.clone(), span: Span::whole(region), hold })
    }

    /// The memory of a loan, mapped and ready.
    fn ready(
        &self,
        inner: &Inner,
        hold: &Arc<Hold>,
        token: &Token,
        queue: Option<&mut dyn Queue>,
        deadline: Deadline,
    ) -> Result<Arc<dyn Region>> {
        let lender = &hold.lender;
        let (root, start) = self.map(inner, lender, token, deadline)?;
        at("redeem: mapped");
        if let Some(flag) = lender.points.flag(token.ready).filter(|flag| !flag.reached(token.ready.value)) {
            match queue {
                Some(queue) => queue.wait(&flag, token.ready.value, &lender.abort, deadline)?,
                None => {
                    flag.wait(token.ready.value, &lender.abort, deadline).map_err(|error| match error {
                        tensorwire_device::Error::TimedOut => Error::timed_out(
                            format!("redeeming {token:?}"),
                            Duration::ZERO,
                            format!("the device of process {} has not come so far", lender.pid),
                        ),
                        _ => lender.check().err().unwrap_or_else(|| error.into()),
                    })?
                }
            }
        }
        at("redeem: ready");
        Ok(keeping(root, start..start + token.len, Box::new(hold.clone()))?)
    }

    /// The file of a token whose memory somebody else maps ([`Host::adopt_file`]), which uses the token up. Nothing is mapped
    /// here: it has no seals, and who made it could cut it short. From now on the kernel counts who has it.
    pub fn redeem_file(&self, token: &Token, deadline: Deadline) -> Result<Fd> {
        let inner = &self.leases()?.0;
        let lender = self.lender(inner, token, deadline)?;
        let hold = lender.redeem(token, deadline)?;
        file_of(inner, &lender, token, deadline).inspect_err(|_| hold.take_back())
    }

    /// Uses a token up without its memory: for one that is not wanted, or whose memory cannot be had here. Otherwise its
    /// owner waits for it until it expires.
    pub fn discard(&self, token: &Token, deadline: Deadline) -> Result<()> {
        let inner = &self.leases()?.0;
        let lender = self.lender(inner, token, deadline)?;
        lender.redeem(token, deadline).map(drop)
    }

    /// The owner of a token.
    fn lender(&self, inner: &Arc<Inner>, token: &Token, deadline: Deadline) -> Result<Arc<Lender>> {
        let known = inner.holding().lenders.get(&token.domain.owner).cloned();
        if let Some(lender) = known {
            return Ok(lender);
        }
        // Without the lock: an owner that is stopped must not keep this process from others.
        let met = Arc::new(service::meet(self, inner, token, deadline)?);
        let mut holding = inner.holding();
        let lender = holding.lenders.entry(token.domain.owner).or_insert(met).clone();
        drop(holding);
        // So that the thread hears of its death.
        ring(&inner.bell);
        Ok(lender)
    }

    /// The mapping that the memory of a token lies in, and where it begins there.
    fn map(
        &self,
        inner: &Inner,
        lender: &Arc<Lender>,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(Arc<dyn Region>, usize)> {
        if token.len == 0 {
            return Ok((self.device(&token.memory.device)?.alloc(0)?, 0));
        }
        // Memory of this process is where it is. Parts of one allocation may have been granted one by one.
        if lender.line.is_none()
            && let Some(span) = inner.owner().memory(token.slot, token.generation)
        {
            let root = root(span.region()).clone();
            let start = span_start(&span, &root);
            return Ok((root, start));
        }
        let found = inner.holding().find(&token.memory, token.offset, token.len, lender.identity);
        if let Some(found) = found {
            return Ok(found);
        }
        let handle = service::fetch(lender, token, deadline)?;
        let (device, whole) = match &handle {
            Handle::Gpu(GpuHandle { device, chunks, .. }) => {
                (DeviceId::Gpu(*device), chunks.iter().map(|chunk| chunk.size).sum())
            }
            other => (DeviceId::Host, other.len()),
        };
        if device != token.memory.device || whole != token.memory.len {
            let text = format!("its token promises {token:?}, and its handle {whole} bytes on {device}");
            return Err(lender.blame(crate::PeerFaultKind::Misbehaved, &text));
        }
        let unused = inner.holding().give_up(Instant::now());
        drop(unused);
        let root = self.import_fetched(inner, lender, token, handle)?;
        inner.holding().note_mapped(&token.memory, &root, lender.identity);
        // The thread gives it up some day.
        ring(&inner.bell);
        Ok((root, token.offset))
    }

    /// Maps what was fetched. A handle without a descriptor names a place in its maker's memory: as long as memory that was
    /// freed there is still mapped here, the driver refuses it, so what is kept of that process is given up.
    fn import_fetched(
        &self,
        inner: &Inner,
        lender: &Lender,
        token: &Token,
        handle: Handle,
    ) -> Result<Arc<dyn Region>> {
        let again = if handle.fd().is_none() { Some(handle.encode()) } else { None };
        let mut result = self.import_all(token.memory.name, handle);
        for _ in 0..10 {
            let (Err(Error::Peer(_)), Some(bytes)) = (&result, &again) else { break };
            let unused = inner.holding().give_up_all(lender.identity);
            drop(unused);
            result = self.import_all(token.memory.name, Handle::decode(bytes, Vec::new())?);
        }
        result
    }

    /// Gives a token longer: `lifetime` from now. For its owner.
    pub fn renew(&self, token: &Token, lifetime: Duration) -> Result<()> {
        let inner = &self.leases()?.0;
        if token.domain.owner != inner.identity {
            return Err(Error::misuse(format!(
                "only its owner renews a token: process {}",
                token.domain.pid
            )));
        }
        if !inner.owner().renew(token.slot, token.generation, lifetime) {
            return Err(Error::misuse(format!("{token:?} is over, or has expired")));
        }
        ring(&inner.bell);
        Ok(())
    }

    /// Lets go of all memory that was granted and that nobody needs any more, and asks holders to unmap what they do not
    /// use; gives the bytes that were let go here.
    pub fn collect(&self) -> Result<usize> {
        Ok(self.leases()?.0.collect())
    }

    /// What this process has granted.
    pub fn lease_stats(&self) -> Result<Stats> {
        Ok(self.leases()?.0.owner().stats())
    }

    /// What is still held or awaited of this process's grants, and by whom; nothing if all is well.
    pub fn outstanding(&self) -> Option<String> {
        self.leases_if_any().and_then(|leases| leases.0.owner().outstanding())
    }

    /// A caching allocator on a device, whose blocks can be lent: the one of this context. When the device is short of memory,
    /// what was lent and is not needed any more is collected first.
    pub fn pool(&self, id: &DeviceId) -> Result<Pool> {
        let device = self.device(id)?;
        let inner = Arc::downgrade(&self.leases()?.0);
        Ok(self.pool_of(id, || {
            let pool = Pool::new(device);
            pool.on_pressure(Box::new(move |_| inner.upgrade().map_or(0, |inner| inner.collect())));
            pool
        }))
    }
}

/// The file behind a token, as long as promised now.
fn file_of(inner: &Inner, lender: &Arc<Lender>, token: &Token, deadline: Deadline) -> Result<Fd> {
    let own = if lender.line.is_none() { inner.owner().memory(token.slot, token.generation) } else { None };
    let handle = match own {
        Some(span) => root(span.region()).export()?,
        None => service::fetch(lender, token, deadline)?,
    };
    let Handle::File { fd, len } = handle else {
        return Err(Error::misuse(format!("{token:?} is not for a file: redeem it for its memory")));
    };
    let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io("looking at a file that was lent", e))?;
    if len != token.memory.len || u64::try_from(stat.st_size).is_ok_and(|size| size < len as u64) {
        let text = format!("its token promises {token:?}, and its file has {} bytes", stat.st_size);
        return Err(lender.blame(crate::PeerFaultKind::Misbehaved, &text));
    }
    Ok(fd)
}

/// Where a span begins in the region that its region is a part of at last.
fn span_start(span: &Span, root: &Arc<dyn Region>) -> usize {
    span.region().addr().wrapping_sub(root.addr()).wrapping_add(span.offset())
}

/// A point on a queue. Where no line is free, the queue is waited for instead.
fn point_on(inner: &Inner, queue: &mut dyn Queue) -> Result<Point> {
    match inner.points.take()? {
        Some((flag, point)) => {
            queue.signal(&flag, point.value)?;
            Ok(point)
        }
        None => {
            tracing::warn!(
                "a queue is waited for: thousands of leases are on queues that have not come to them"
            );
            queue.finish(&Abort::local(), Deadline::after(inner.timeout))?;
            Ok(Point::default())
        }
    }
}

/// Memory that is granted to other processes. Dropping it ends the owner's interest: the memory is let go when the token's
/// uses have taken place, or it has expired, and all holders have released it.
#[derive(Debug)]
pub struct Lease {
    inner: Arc<Inner>,
    token: Token,
    is_copy: bool,
}

impl Lease {
    /// What goes to whoever may redeem it.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Whether it is a copy that is lent, see [`Terms::copy`].
    pub fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// Who holds it now.
    pub fn holders(&self) -> Vec<HolderInfo> {
        // In a forked child nobody knows, and the lock may be held for ever.
        if !self.inner.birth.is_ours() {
            return Vec::new();
        }
        self.inner.owner().holders_of(self.token.slot, self.token.generation)
    }

    /// Gives the token longer: `lifetime` from now; an error if it has expired.
    pub fn renew(&self, lifetime: Duration) -> Result<()> {
        self.inner.birth.check("a lease")?;
        let renewed = self.inner.owner().renew(self.token.slot, self.token.generation, lifetime);
        ring(&self.inner.bell);
        if renewed { Ok(()) } else { Err(Error::misuse(format!("{:?} has expired", self.token))) }
    }

    /// Waits until it was redeemed as often as its terms say (or has expired), all loans are released, and the devices of
    /// their holders are done with it.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.wait_released(deadline)?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let begin = Instant::now();
        let mut pace = interrupt::Pace::since(begin);
        loop {
            let points = self.inner.owner().points(slot, generation);
            let Some((holder, _)) = points.first() else { return Ok(()) };
            if deadline.passed() {
                let missing = format!("the device of process {}, which has released it", holder.pid);
                return Err(self.late(begin, missing));
            }
            if begin.elapsed() > SPIN {
                std::thread::sleep(Duration::from_micros(50));
            }
            pace.look(Instant::now())?;
        }
    }

    /// Waits until all loans are released, and has the queue wait for the devices of their holders: what is queued on it from
    /// now on may write to the memory.
    pub fn reclaim(&self, queue: &mut dyn Queue, deadline: Deadline) -> Result<()> {
        self.wait_released(deadline)?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let lender = self.inner.holding().lenders.get(&self.inner.identity).cloned();
        let abort = lender.map_or_else(Abort::local, |lender| (*lender.abort).clone());
        let points = self.inner.owner().points(slot, generation);
        for (holder, point) in points {
            if let Some(flag) = holder.points.flag(point) {
                queue.wait(&flag, point.value, &abort, deadline)?;
            }
        }
        Ok(())
    }

    fn wait_released(&self, deadline: Deadline) -> Result<()> {
        self.inner.birth.check("a lease")?;
        let (slot, generation) = (self.token.slot, self.token.generation);
        let over = |owner: &mut Owner| {
            let standing = owner.standing(slot, generation);
            standing.is_none_or(|it| it.loans == 0 && (it.expired || it.taken >= it.uses))
        };
        let begin = Instant::now();
        while begin.elapsed() < SPIN {
            if over(&mut self.inner.owner()) {
                return Ok(());
            }
            std::thread::yield_now();
        }
        let mut owner = self.inner.owner();
        owner.watch(slot, generation, true);
        let mut asked = Instant::now();
        let result = loop {
            if over(&mut owner) {
                break Ok(());
            }
            let Some(left) = deadline.remaining() else { break Err(None) };
            if asked.elapsed() > interrupt::SLICE {
                asked = Instant::now();
                // Without the lock: the hook may wait for others.
                drop(owner);
                let go_on = interrupt::check();
                owner = self.inner.owner();
                match go_on {
                    Ok(()) => continue,
                    Err(error) => break Err(Some(error)),
                }
            }
            // A redemption tells nobody; a release does.
            let left = left.min(Duration::from_millis(20));
            owner = self.inner.released.wait_timeout(owner, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        owner.watch(slot, generation, false);
        let holders = owner.holders_of(slot, generation);
        drop(owner);
        result.map_err(|error| {
            if let Some(error) = error {
                return error;
            }
            let missing = match holders.first() {
                Some(holder) => format!("process {} holds it ({} loans)", holder.pid, holder.loans),
                None => "nobody has redeemed it".into(),
            };
            self.late(begin, missing)
        })
    }

    fn late(&self, begin: Instant, missing: String) -> Error {
        Error::timed_out(format!("waiting for the holders of {:?}", self.token), begin.elapsed(), missing)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // In a forked child it is the parent's.
        if !self.inner.birth.is_ours() {
            return;
        }
        let mut owner = self.inner.owner();
        owner.let_go(self.token.slot, self.token.generation);
        let garbage = owner.take_garbage();
        drop(owner);
        drop(garbage);
    }
}

/// Memory of another process, counted as held until the last user of its span is gone, queues among them.
#[derive(Debug)]
pub struct Loan {
    inner: Arc<Inner>,
    span: Span,
    hold: Arc<Hold>,
}

impl Loan {
    /// The memory. Its clones hold the loan.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The memory, which holds the loan from now on.
    pub fn into_span(self) -> Span {
        self.span
    }

    /// The owner's pid as it sees itself.
    pub fn pid(&self) -> u32 {
        self.hold.lender.pid
    }

    /// Releases it now, for what is queued on `queue` so far: the owner waits until the queue has come to this point, and this
    /// process must not queue anything more on the memory. Nobody waits here.
    pub fn release_after(self, queue: &mut dyn Queue) -> Result<()> {
        let noted = self.used_by(queue);
        self.hold.release(|_| noted)
    }

    /// Notes that what is queued on `queue` so far uses it: when the last user of the span is gone, the owner waits for that,
    /// too, and until then it stays mapped here. Nobody waits here.
    pub fn used_by(&self, queue: &mut dyn Queue) -> Result<()> {
        self.inner.birth.check("a loan")?;
        let Hold { lender, slot, generation, .. } = &*self.hold;
        let _order = lender.order.lock().unwrap_or_else(PoisonError::into_inner);
        // One point stands for all: what other queues have released before has to be done, too.
        let earlier = lender.row.point(*slot, *generation);
        let mine = Theirs::of(self.inner.points.region().clone())?;
        if let Some(flag) = mine.flag(earlier).filter(|flag| !flag.reached(earlier.value)) {
            let deadline = Deadline::after(self.inner.timeout);
            queue.wait(&flag, earlier.value, &lender.abort, deadline)?;
        }
        let point = point_on(&self.inner, queue)?;
        lender.row.set_point(*slot, *generation, point);
        // Memory of this process itself is kept by its owner's side.
        if let Some(flag) = mine.flag(point).filter(|_| lender.line.is_some()) {
            self.inner.holding().keep_until(flag, point.value, root(self.span.region()));
        }
        Ok(())
    }
}

/// A numbered step, at which tests end the process.
fn at(_step: &'static str) {
    #[cfg(feature = "hooks")]
    hooks::at(_step);
}
