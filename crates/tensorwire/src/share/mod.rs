//! Memory that crosses between processes of a host: the one table of what this process exports and what it has of others.
//! Groups and leases stand on it.
//!
//! An allocation of this process gets a **number** when it is first used with others; no other one ever gets the same
//! ([`exports`]). A **domain** is a group, or the leases of a process: it has an id and a secret, and says who may have
//! which memory. A process that hears of a number asks its owner for it, and maps what it gets ([`mappings`]): once, however often
//! and by whomever it arrives.
//!
//! | file | what |
//! |---|---|
//! | `exports` | what this process exports, by number |
//! | `adopted` | which of it is memory of other allocators, and whether it is still there |
//! | `addresses` | shared memory that a caller knows by its address only |
//! | `mappings` | what is mapped of other processes, by lender and number |
//! | `connection` | the asking side: one connection for each process that is asked |
//! | `server` | the answering side: one thread |
//! | `frames` | what travels between the two |
//!
//! # The protocol
//!
//! A pair of processes has one connection in each direction that is asked in, whatever number of groups and leases they have in
//! common; it is made with the first request and closed with the last user ([`PeerConnection`]). One connection does not yet serve both
//! directions: who connects proves the secret of a domain and only claims an identity, and who is reached at an address proves both. A
//! process that asked over a connection which it had accepted would take any peer's claim for the lender. It begins with the handshake of
//! `tensorwire_device::fd` for the domain of the first request: same user, the domain's secret, pidfds. Each request then
//! proves the secret of its own domain, by a keyed hash over the domain and both processes' identities. It is seen by nobody
//! but its owner, who knows the secret anyway.
//!
//! | frame | bytes | beside it |
//! |---|---|---|
//! | request for memory | `M`, version, serial, domain, proof, number, pass | |
//! | hello | `H`, version, serial, domain, proof, hello | what the domain wants |
//! | request for descriptors | `D`, version, serial, domain, proof, number | |
//! | they were taken | `T`, version, serial, domain, proof, number | |
//! | answer | `a`, serial, how many descriptors, a handle or a welcome or nothing | the first of its descriptors |
//! | more of it | `f`, serial | more of them |
//! | refusal | `n`, serial, a reason, why | |
//! | the last one | `x`, why | |
//!
//! The *pass* is empty in a group, whose secret is enough. For a lease it names the grant, and proves that the one who
//! asks has its token. A *hello* makes a process known to a domain until its connection ends; the holders of leases are
//! counted by it. *Descriptors* are any that a rank offers to ranks of its group (`ranks::descriptors`). They are kept until
//! they were taken, because an answer may be lost. A process asks again only when it has the answer to what it asked before. A
//! process that sends nonsense loses its connection. A process that is refused keeps it.
//!
//! That memory is gone is told by the domains: groups say so in the control region (`ranks::memory`), leases count.

mod addresses;
mod adopted;
mod connection;
mod exports;
mod frames;
mod mappings;
mod server;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::fd::{Connection, Fd, Peer};
use tensorwire_device::fork::{Birth, PerProcess};
use tensorwire_device::gpu::background;
use tensorwire_device::handle::{GpuHandle, Means};
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::subregion::part;
use tensorwire_device::{DeviceId, Handle, Region, RegionPlace, Span};

use self::addresses::Addresses;
use self::adopted::{Adopted, AdoptedPlace, Looks};
use self::exports::{Exports, Gone, Key, place_of};
use self::mappings::{Identity, Keep, Mappings};
use self::server::Server;
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::wire;

pub(crate) use self::connection::{LenderId, Patience, PeerConnection, Trouble, Whom};
pub(crate) use self::exports::Allocation;
pub(crate) use self::frames::Reason;
#[cfg(any(test, fuzzing))]
pub use self::frames::fuzz;

/// How many bytes of other processes' memory on GPUs stay mapped behind their last use.
const KEPT: usize = 256 << 20;
/// How often it is looked whether memory is gone that others have mapped, where nobody calls.
const LOOK: Duration = Duration::from_secs(1);

/// Who may have which memory: a group, or the leases of this process.
pub(crate) trait Domain: Send + Sync {
    /// The memory that a peer asks for, if it may have it; otherwise why not. Called by the thread that answers.
    fn memory(&self, number: u64, pass: &[u8]) -> Result<Arc<dyn Region>, (Reason, String)>;

    /// Takes back what `memory` gave for a pass. A domain whose memory may take long to drop has that done elsewhere.
    fn put_back(&self, region: Arc<dyn Region>, _pass: &[u8]) {
        drop(region);
    }

    /// The descriptors that a peer asks for, if it may have them.
    fn descriptors(&self, _peer: Id, _number: u64) -> Option<Vec<Arc<Fd>>> {
        None
    }

    /// A peer has the descriptors of a number.
    fn taken(&self, _peer: Id, _number: u64) {}

    /// A peer wants to be known.
    fn greet(&self, _peer: &Peer, _hello: &[u8], _fds: Vec<Fd>) -> Result<Welcome> {
        Err(wire::bad("a hello, and nobody is greeted here"))
    }

    /// The memory of a number is gone, that peers of this domain may have mapped.
    fn released(&self, _number: u64) {}

    /// Looks at what peers have released.
    fn look(&self) {}
}

/// What a peer hears that is known from now on.
pub(crate) struct Welcome {
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<Fd>,
    /// Dropped when the peer is gone.
    pub(crate) guest: Box<dyn Send>,
}

/// All of this process, by their identities: ranks may be threads.
static HERE: PerProcess<Mutex<HashMap<Id, Weak<Share>>>> = PerProcess::new(Mutex::default);

/// See the module.
pub(crate) struct Share {
    birth: Birth,
    identity: Id,
    devices: Arc<Devices>,
    exports: Exports,
    adopted: Adopted,
    addresses: Addresses,
    mappings: Mutex<Mappings>,
    connections: Mutex<HashMap<LenderId, Weak<PeerConnection>>>,
    server: Arc<Server>,
    /// All domains. The thread that looks whether memory is gone holds the lock.
    sweeping: Mutex<Vec<Weak<dyn Domain>>>,
    /// What ends the thread that looks now and then.
    looking: Mutex<Option<Sender<()>>>,
    /// What stays until others are through with it.
    limbo: Mutex<Vec<Lingering>>,
}

/// Whether what it holds may go.
pub(crate) type Lingering = Box<dyn FnMut() -> bool + Send>;

impl Share {
    /// For a process with this identity.
    pub(crate) fn new(identity: Id, devices: &Arc<Devices>) -> Arc<Self> {
        let share = Arc::new(Self {
            birth: Birth::now(),
            identity,
            devices: devices.clone(),
            exports: Exports::default(),
            adopted: Adopted::default(),
            addresses: Addresses::default(),
            mappings: Mutex::new(Mappings::new(KEPT)),
            connections: Mutex::default(),
            server: Server::new(identity),
            sweeping: Mutex::default(),
            looking: Mutex::default(),
            limbo: Mutex::default(),
        });
        let mut here = HERE.get().lock().unwrap_or_else(PoisonError::into_inner);
        here.retain(|_, share| share.strong_count() > 0);
        here.insert(identity, Arc::downgrade(&share));
        share
    }

    /// Of another context of this process, by its identity.
    pub(crate) fn in_this_process(identity: Id) -> Option<Weak<Self>> {
        HERE.get().lock().unwrap_or_else(PoisonError::into_inner).get(&identity).cloned()
    }

    /// Who this process is.
    pub(crate) fn identity(&self) -> Id {
        self.identity
    }

    /// The devices of this process.
    pub(crate) fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    /// Lets processes that know its secret ask in a domain, until [`Share::leave`].
    pub(crate) fn enter(&self, domain: Id, secret: Secret, who: Weak<dyn Domain>) {
        self.sweeping.lock().unwrap_or_else(PoisonError::into_inner).push(who.clone());
        self.server.enter(domain, secret, who);
    }

    /// Nobody asks in a domain any more.
    pub(crate) fn leave(&self, domain: Id) {
        if self.birth.is_ours() {
            self.server.leave(domain);
            self.exports.withdraw(domain);
            self.exports.forget(self.adopted.withdraw(domain));
        }
    }

    /// This process lends memory, and others will ask for it.
    pub(crate) fn expect(&self) {
        if self.birth.is_ours() {
            self.server.expect();
        }
    }

    /// The secret of a domain, if it is open.
    pub(crate) fn secret_of(&self, domain: Id) -> Option<Secret> {
        self.server.secret_of(domain)
    }

    /// Answers a process that has proved to know the secret of a domain.
    pub(crate) fn accept(&self, connection: Connection) {
        if let Err(error) = self.server.accept(connection) {
            tracing::warn!("a process that wants memory cannot be answered: {error}");
        }
    }

    /// The allocation that a span lies in, and where in it the span begins. It gets its number if it has none.
    pub(crate) fn name(&self, span: &Span) -> Result<(Allocation, usize)> {
        let (named, gone) = self.exports.name(span, |root| self.mappings().lingers(root))?;
        self.tell(gone);
        Ok(named)
    }

    /// The number of the allocation that a span of memory of ours lies in, and where in it, for peers of a domain, who may ask for
    /// it from now on; nothing for other memory.
    #[inline]
    pub(crate) fn offer(&self, span: &Span, domain: Id) -> Option<(u64, usize)> {
        // Asked first: other memory costs no lock.
        if !span.region().shareable() {
            return None;
        }
        match self.exports.number_in(span.region(), domain) {
            Some(number) => Some((number, span.offset())),
            None => self.offer_root(span, domain),
        }
    }

    /// The same for memory that was not offered before, or is a part of some that was.
    fn offer_root(&self, span: &Span, domain: Id) -> Option<(u64, usize)> {
        let root = root(span.region());
        let number = match self.exports.number_in(root, domain) {
            Some(number) => number,
            None => match self.exports.offer(root, domain) {
                Ok((number, gone)) => {
                    self.tell(gone);
                    number
                }
                Err(error) => {
                    tracing::warn!("memory of this process cannot be shared: {error}");
                    return None;
                }
            },
        };
        Some((number, start_in(root, span)))
    }

    /// The same for memory of another allocator of this process. An error says why peers cannot map it.
    pub(crate) fn offer_adopted(self: &Arc<Self>, span: &Span, domain: Id) -> Result<(u64, usize)> {
        self.birth.check("the context")?;
        let root = root(span.region());
        let device = root.device();
        let RegionPlace { ids, offset, whole, .. } = place_of(root)?;
        let start = root.addr().wrapping_sub(offset);
        let place =
            AdoptedPlace { device: device.clone(), addresses: start..start.saturating_add(whole), ids };
        let number = self.exports.number_of(Key { device, ids: place.ids.clone() });
        let is_new = self.adopted.offer(number, &place, root, domain);
        self.look_at(if is_new { Looks::At(&place) } else { Looks::One });
        if is_new {
            self.look_after();
        }
        Ok((number, offset + start_in(root, span)))
    }

    /// Looks whether memory of other allocators is gone, and tells those who may have mapped it.
    fn look_at(&self, looks: Looks<'_>) {
        let gone = self.adopted.look(looks, |device, addresses| {
            let there = self.devices.open(device).and_then(|device| {
                Ok(device.ids_at(addresses.start, addresses.end - addresses.start)?.unwrap_or_default())
            });
            there.inspect_err(|error| tracing::debug!("asking for allocations: {error}")).ok()
        });
        self.exports.forget(gone.iter().map(|(number, _)| *number));
        self.tell(gone);
    }

    /// Has a thread look now and then whether memory is gone: own, and that of peers. Meant for those who offer memory of
    /// other allocators, or have some of theirs mapped.
    pub(crate) fn look_after(self: &Arc<Self>) {
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        if looking.is_some() || !self.birth.is_ours() {
            return;
        }
        let (stop, stopped) = channel();
        let share = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("tensorwire-look".into()).spawn(move || {
            background();
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout)
                && let Some(share) = share.upgrade()
            {
                share.sweep(usize::MAX);
                share.settle();
            }
        });
        match thread {
            Ok(_) => *looking = Some(stop),
            Err(error) => tracing::warn!("no thread to look for memory that is gone: {error}"),
        }
    }

    /// Keeps something that other processes may still write to, until it says that it may go, or this process ends. It is asked
    /// now, once a second, and whenever somebody [settles](Self::settle).
    pub(crate) fn linger(self: &Arc<Self>, what: Lingering) {
        self.limbo().push(what);
        self.settle();
        if !self.limbo().is_empty() {
            self.look_after();
        }
    }

    /// Lets go of what need not stay any longer.
    pub(crate) fn settle(&self) {
        // Nothing is asked or dropped with the lock held.
        let mut all = std::mem::take(&mut *self.limbo());
        all.retain_mut(|is_over| !is_over());
        self.limbo().append(&mut all);
    }

    fn limbo(&self) -> MutexGuard<'_, Vec<Lingering>> {
        self.limbo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers in one domain what is offered in another.
    pub(crate) fn inherit(&self, from: Id, to: Id) {
        self.exports.inherit(from, to);
    }

    /// Memory that is offered in a domain, if it is still there.
    pub(crate) fn offered(&self, number: u64, domain: Id) -> Option<Arc<dyn Region>> {
        self.exports.offered(number, domain).or_else(|| self.adopted.offered(number, domain))
    }

    /// Memory of another allocator of this process that is offered in a domain: all of its allocations, where they are. It
    /// keeps what was adopted last of them.
    pub(crate) fn offered_here(&self, number: u64, domain: Id) -> Option<Result<Arc<dyn Region>>> {
        let region = self.adopted.offered(number, domain)?;
        Some(self.devices.open(&region.device()).and_then(|device| Ok(device.around(&region)?)))
    }

    /// Has shared memory found by its address.
    pub(crate) fn note(&self, span: &Span) {
        if self.birth.is_ours() && !span.is_empty() {
            self.addresses.add(span.region());
        }
    }

    /// The shared memory at an address that was noted, if all of these bytes are one piece of it. In a forked child it is
    /// ordinary memory.
    pub(crate) fn at(&self, address: usize, len: usize) -> Option<Span> {
        if self.birth.is_ours() { self.addresses.find(address, len) } else { None }
    }

    /// Notices memory that is gone: own, so that peers give up their mappings, and that of peers. Looks at so many own
    /// regions.
    pub(crate) fn sweep(&self, looks: usize) {
        if !self.adopted.is_empty() && self.birth.is_ours() {
            self.look_at(if looks == usize::MAX { Looks::All } else { Looks::One });
        }
        // A thread that holds it does just this. In a forked child the memory is the parent's.
        let Ok(mut domains) = self.sweeping.try_lock() else { return };
        if !self.birth.is_ours() {
            return;
        }
        let gone = self.exports.release(looks);
        self.tell(gone);
        domains.retain(|domain| domain.upgrade().inspect(|domain| domain.look()).is_some());
    }

    fn tell(&self, gone: Vec<Gone>) {
        for (number, domains) in gone {
            let domains = domains.into_iter().filter_map(|id| self.server.domain(id));
            domains.for_each(|domain| domain.released(number));
        }
    }

    /// The connection to a process, made if there is none.
    pub(crate) fn reach(
        &self,
        whom: &Whom<'_>,
        patience: Patience<'_>,
    ) -> Result<Arc<PeerConnection>, Trouble> {
        self.birth.check("the context").map_err(|error| Trouble::Ours(error.into()))?;
        let lender = whom.lender();
        let usable = |connection: Option<&Weak<PeerConnection>>| {
            connection?.upgrade().filter(|connection| !connection.is_broken())
        };
        let known = usable(self.connections().get(&lender));
        if let Some(connection) = known {
            return Ok(connection);
        }
        // Without the lock: a process that is stopped must not keep this one from others.
        let new = Arc::new(PeerConnection::connect(self.identity, whom, patience)?);
        let mut connections = self.connections();
        connections.retain(|_, connection| connection.strong_count() > 0);
        if let Some(connection) = usable(connections.get(&lender)) {
            return Ok(connection);
        }
        connections.insert(lender, Arc::downgrade(&new));
        Ok(new)
    }

    /// What a lender calls by a number, if it is mapped here.
    pub(crate) fn mapping(&self, lender: LenderId, number: u64) -> Option<Arc<dyn Region>> {
        self.mappings().find(lender, number)
    }

    /// Maps all of the memory of a handle that was fetched from a lender by a number; gives it and where it begins in the
    /// allocation. `wanted` is the part that is needed. It stays mapped for a while behind its last use.
    pub(crate) fn map_fetched(
        &self,
        lender: LenderId,
        number: u64,
        handle: Handle,
        wanted: Range<usize>,
    ) -> Result<(Arc<dyn Region>, usize)> {
        if let Some(own) = self.own(&handle, &wanted) {
            return Ok(own);
        }
        // A handle without a descriptor names a place in its maker's memory: as long as memory that was freed there is still
        // mapped here, the driver refuses it, so what is kept of that process is given up.
        let again = if handle.fd().is_none() { Some(handle.encode()) } else { None };
        let mut result = self.map_all(lender, handle, Keep::Linger);
        for _ in 0..10 {
            let (Err(Error::Peer(_)), Some(bytes)) = (&result, &again) else { break };
            let unused = self.mappings().give_up_of(lender.identity);
            drop(unused);
            result = self.map_all(lender, Handle::decode(bytes, Vec::new())?, Keep::Linger);
        }
        let region = result?;
        self.mappings().note(lender, number, &region);
        Ok((region, 0))
    }

    /// Memory of this process that has come back from another.
    fn own(&self, handle: &Handle, wanted: &Range<usize>) -> Option<(Arc<dyn Region>, usize)> {
        match handle {
            Handle::Gpu(GpuHandle { device, chunks, .. }) => {
                let ids = chunks.iter().map(|chunk| chunk.id).collect();
                let found = self.exports.find(&Key { device: DeviceId::Gpu(*device), ids }, wanted)?;
                // The numbers are only what the other process says. A legacy handle is what the driver says; a descriptor
                // can be mapped again.
                let opaque = |handle: &Handle| match handle {
                    Handle::Gpu(gpu) => Some(
                        gpu.chunks
                            .iter()
                            .map(|chunk| match &chunk.means {
                                Means::Legacy(opaque) => Some(*opaque),
                                _ => None,
                            })
                            .collect::<Option<Vec<_>>>()?,
                    ),
                    _ => None,
                };
                let theirs = opaque(handle)?;
                (root(&found.0).export().ok().and_then(|own| opaque(&own)) == Some(theirs)).then_some(found)
            }
            host => {
                let (file, number) = host.key().ok()??;
                self.exports.find(&Key { device: DeviceId::Host, ids: vec![file, number] }, wanted)
            }
        }
    }

    /// Maps memory of this host that another process exported, or gives the mapping that is there already.
    pub(crate) fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        if matches!(handle, Handle::Gpu(_)) {
            let text =
                "memory of a GPU is told from other memory by the process that exported it: use import_from";
            return Err(Error::misuse(text));
        }
        // Files say which they are, whoever sends them.
        self.map_all(LenderId::told(self.identity), handle, Keep::Not)
    }

    /// The same for memory of any device, exported by this process.
    pub(crate) fn import_from(&self, exporter: LenderId, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        let Handle::Gpu(GpuHandle { offset, len, ref chunks, .. }) = handle else {
            return self.import(handle);
        };
        // Memory that came by a legacy handle must be closed before its owner frees it.
        let legacy = chunks.iter().any(|chunk| matches!(chunk.means, Means::Legacy(_)));
        let region = self.map_all(exporter, handle, if legacy { Keep::Not } else { Keep::Room })?;
        Ok(part(region, offset..offset.saturating_add(len))?)
    }

    /// The same, and all of the memory of the handle, which goes with its last user.
    pub(crate) fn import_all(&self, exporter: LenderId, handle: Handle) -> Result<Arc<dyn Region>> {
        self.birth.check("the context")?;
        match handle {
            Handle::Gpu(_) => self.map_all(exporter, handle, Keep::Not),
            host => self.import(host),
        }
    }

    /// All of the memory of a handle.
    fn map_all(&self, exporter: LenderId, handle: Handle, keep: Keep) -> Result<Arc<dyn Region>> {
        let (device, handle) = match handle {
            Handle::Gpu(GpuHandle { device, chunks, .. }) => {
                let len = chunks.iter().map(|chunk| chunk.size).sum();
                (DeviceId::Gpu(device), Handle::Gpu(GpuHandle::new(device, 0, len, chunks)))
            }
            host => (DeviceId::Host, host),
        };
        // Before the lock: to open a GPU takes long.
        let device = self.devices.open(&device)?;
        let map = |handle| Ok(device.import(handle)?);
        match Identity::of(exporter, &handle)? {
            Some(identity) => {
                let len = handle.len();
                let (region, gone) =
                    self.mappings().get(identity, len, (exporter.identity, keep), || map(handle))?;
                drop(gone);
                Ok(region)
            }
            // Of what cannot be told apart, and of what the host refuses.
            None => map(handle),
        }
    }

    /// Unmaps what is kept of a process that is gone, or that takes its memory back, and that nobody here uses.
    pub(crate) fn forget(&self, exporter: Id) {
        let unused = self.mappings().forget(exporter);
        drop(unused);
    }

    /// Gives up mappings of what was lent that nobody has used for a while, and those of lenders that are gone or need
    /// their memory.
    pub(crate) fn give_up(&self, now: Instant, let_go: impl Fn(Id) -> bool) {
        let unused = self.mappings().give_up(now, let_go);
        drop(unused);
    }

    /// Gives up all mappings of what was lent, but those that are in use.
    pub(crate) fn give_up_all(&self) {
        let unused = self.mappings().give_up_all();
        drop(unused);
    }

    /// When the next mapping may be given up.
    pub(crate) fn next_to_give_up(&self) -> Option<Instant> {
        self.mappings().next()
    }

    /// How many mappings of other processes' memory are in use or kept, and their bytes.
    pub(crate) fn mapped(&self) -> (usize, usize) {
        self.mappings().sum()
    }

    fn mappings(&self) -> MutexGuard<'_, Mappings> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<LenderId, Weak<PeerConnection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and the lock may be held for ever.
        if self.birth.is_ours() {
            self.server.stop();
        }
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Share({} exported)", self.exports.count())
    }
}

/// The region that a region is a part of, at last.
pub(crate) fn root(region: &Arc<dyn Region>) -> &Arc<dyn Region> {
    let mut region = region;
    while let Some(whole) = region.whole() {
        region = whole;
    }
    region
}

/// Where a span begins in the root of its region.
pub(crate) fn start_in(root: &Arc<dyn Region>, span: &Span) -> usize {
    if Arc::ptr_eq(root, span.region()) {
        return span.offset();
    }
    span.region().addr().wrapping_sub(root.addr()).wrapping_add(span.offset())
}

#[cfg(test)]
pub(crate) mod tests;
