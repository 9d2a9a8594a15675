//! Forming a group: the ranks meet in the store, find their hosts, and are joined.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::sync::AtomicBool;

use super::notes::Notes;
use super::rendezvous::{self, Rendezvous};
use super::same_host::Finder;
use super::{Group, Inner, Origin, hub};
use crate::collective::Collectives;
use crate::config::Seal;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::interrupt::is_interrupt;
use crate::link::meet::Domain;
use crate::link::{Branch, address};
use crate::ranks::memory::RankMemory;
use crate::ranks::{Barriers, Ranks};
use crate::shm::control::{self, Control};
use crate::shm::member::Member;
use crate::shm::record::Recorder;
use crate::store::StoreExchange;

/// Forms a group: rendezvous, hosts, the star between hosts, and a first barrier, after which nobody needs the
/// store any more.
pub(super) fn form(
    context: &Arc<Context>,
    origin: Origin,
    name: String,
    (rank, world): (usize, usize),
    (timeout, deadline): (Duration, Deadline),
    sensible: &dyn Fn() -> Result<()>,
) -> Result<Group> {
    context.birth().check("the context")?;
    if world > MAX_WORLD {
        return Err(Error::misuse(format!("a world of {world}; 1 to {MAX_WORLD} ranks are possible")));
    }
    // Time-outs of a client that others use are not changed.
    let store = if origin.once { origin.store.clone() } else { origin.store.clone_store()? };
    let notes = Notes::new(store, &name, origin.key(context));
    let store = &notes.store;
    // Requests that do not wait for another rank are answered at once, or the store is stuck. torch's server can be for
    // 10 seconds: it looks up the names of its clients, and answers nobody while a name server does not answer.
    let stuck = Duration::from_secs(30);
    // The store of a listener is not torch's: it answers at once, or its process is stopped.
    let stuck = if origin.once { stuck.min(deadline.remaining().unwrap_or_default()) } else { stuck };
    store.set_timeout(timeout.min(stuck));
    let me = Member::this_process(rank, context.identity(), context.watcher().address(), context.config())?;
    let seal = origin.key(context).map(|_| context.config().seal);
    let meeting = Rendezvous { notes: &notes, seal, me: &me, world, timeout, deadline, sensible };
    let give_up = |error: &Error| {
        if origin.lingers {
            rendezvous::linger(store, world, error);
        }
    };
    let roster = sensible().and_then(|()| meeting.meet()).inspect_err(give_up)?;

    let mailbox = context.watcher().open(roster.id, roster.secret)?;
    let own = notes.with(notes.proofs().map(|proofs| proofs.within(&roster.secret)));
    let finder = Finder::after(&meeting, context, (&roster, &own), &mailbox);
    let formed = finder.find().and_then(|hosts| {
        let star = hub::connect(&finder, &hosts, origin.route)?;
        let ranks = hosts.map.iter().find(|ranks| ranks.contains(&rank)).cloned().unwrap_or_default();
        let control = Arc::new(Control::open(hosts.region.clone(), ranks, (rank, world))?);
        control.introduce(&me, world, &name)?;
        let memory = RankMemory::new(context, &control, (roster.id, roster.secret), &roster.members, rank)?;
        let domain = finder.domain();
        // Only what leaders say is always sealed.
        let domain = Domain { sealed: seal == Some(Seal::All), ..domain };
        let branch = match hosts.map.len() {
            1 => None,
            _ => Some(open_branch(context, &control, domain, rank, origin.route)?),
        };
        Ok((hosts, star, control, memory, branch))
    });
    let failed = |error: &Error| {
        finder.report(error);
        rendezvous::hear(store);
        give_up(error);
    };
    let formed = formed.map_err(|error| finder.first_of(error));
    let (hosts, star, control, memory, branch) = formed.inspect_err(|error| {
        context.watcher().close(roster.id);
        failed(error);
    })?;
    let recorder = Arc::new(Recorder::new(&control)?);
    let identity_of = |rank: usize| roster.members.get(rank).map(|member| member.identity);
    let pidfds = hosts.pidfds.into_iter().filter_map(|(rank, pidfd)| Some((rank, identity_of(rank)?, pidfd)));
    context.watcher().watch(roster.id, control.clone(), pidfds.collect(), star)?;
    let ranks = Ranks {
        context: context.clone(),
        id: roster.id,
        name,
        rank,
        members: roster.members.clone(),
        hosts: hosts.map,
        control,
        memory,
        branch,
        recorder,
        timeout,
        barriers: Barriers::default(),
        closed: AtomicBool::new(false),
        failing: Mutex::default(),
    };
    let splits = if origin.once { origin.kept().store } else { store.clone() };
    let group = Group(Arc::new(Inner {
        collectives: Collectives::new(ranks)?,
        origin: origin.kept(),
        reasons: hosts.reasons,
        splits: StoreExchange::new(splits, "split", rank, world)?,
        proofs: own.proofs().cloned(),
        seal,
        shrinks: Mutex::default(),
        books: Arc::default(),
        made: Mutex::default(),
    }));
    first_barrier(&group, &finder).inspect_err(failed)?;
    if rank == 0
        && let Err(error) = rendezvous::tidy(&notes, &roster, group.hosts())
    {
        tracing::warn!("keys of the group {:?} stay in its store: {error}", group.name());
    }
    Ok(group)
}

/// Lets ranks of other hosts connect to this one, and writes down where. All know that after the first barrier.
fn open_branch(
    context: &Arc<Context>,
    control: &Control,
    domain: Domain,
    rank: usize,
    route: Option<IpAddr>,
) -> Result<Arc<Branch>> {
    let office = context.office()?;
    let branch = Branch::open(office, domain, control.bell(control.me()), context.config())?;
    let addresses = address::own(context.config(), route, office.port())?;
    control.set_address(rank, &address::to_text(&addresses, control::ADDRESS))?;
    Ok(Arc::new(branch))
}

/// Waits for all ranks, and meanwhile for one that tells by way of the store that it could not come so far.
fn first_barrier(group: &Group, finder: &Finder<'_>) -> Result<()> {
    let deadline = if group.ranks().control.leads() { finder.deadline } else { finder.grace };
    loop {
        let slice = Deadline::after(rendezvous::slice(Duration::from_millis(250), group.world()));
        let Err(error) = group.ranks().barrier(deadline.min(slice)) else { return Ok(()) };
        if is_interrupt(&error) {
            return Err(error);
        }
        if let Some(told) = finder.told() {
            return Err(told);
        }
        if !error.is_timeout() || deadline.passed() {
            return Err(error);
        }
    }
}

/// More ranks than an abort word can name.
const MAX_WORLD: usize = 1 << 20;
