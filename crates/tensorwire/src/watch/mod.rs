//! Liveness: one thread per context that hears of deaths, of new neighbours, and of other hosts.
//!
//! A rank of this host is judged by its pidfd: the moment its process ends, every group it was in fails, on
//! every rank that watches it. Ranks of other hosts are heard of through the star (see [`star`]).

pub(crate) mod inquiry;
pub(crate) mod leaders;
mod poller;
pub(crate) mod star;

use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use tensorwire_device::fd::{Address, Connection, Fd, Listener};
use tensorwire_device::fork::Birth;
use tensorwire_device::gpu::background;
use tensorwire_device::secret::{Id, Secret};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::link::trunk::Trunks;
use crate::share::Share;
use crate::shm::control::Control;
use crate::shm::decided::Refusal;
use leaders::{Early, Forming};
use star::Star;

/// The handle on the watcher thread. Dropping it ends the thread.
pub(crate) struct Watcher {
    shared: Arc<Shared>,
    address: Address,
    birth: Birth,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and its clients share.
struct Shared {
    identity: Id,
    /// Answers those who ask for memory.
    share: Arc<Share>,
    state: Mutex<State>,
    bell: Fd,
    heartbeat: Duration,
}

struct State {
    groups: HashMap<Id, Watched>,
    /// Connections with processes of other hosts; groups share them, however many there are.
    trunks: Trunks,
    /// The pidfd of each neighbour; groups share them, however many there are.
    neighbours: HashMap<Id, Weak<Fd>>,
    stop: bool,
}

/// One group, as the watcher sees it.
struct Watched {
    secret: Secret,
    /// Connections of neighbours go here while the group forms.
    mailbox: Option<Sender<Connection>>,
    /// Set once the group has formed.
    control: Option<Arc<Control>>,
    /// Processes of this host whose death fails the group, by rank.
    pidfds: Vec<(usize, Arc<Fd>)>,
    /// Those of them that have ended.
    ended: Vec<usize>,
    /// What joins it with other hosts, at leaders only.
    star: Option<Star>,
    /// What leaders of other hosts are told that ask for it.
    forming: Forming,
    early: Early,
}

impl Watcher {
    pub(crate) fn start(share: &Arc<Share>, config: &Config) -> Result<Self> {
        let listener = Listener::bind(config.socket_dir.as_deref())?;
        let address = listener.address().clone();
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("making an eventfd", e))?;
        let shared = Arc::new(Shared {
            identity: share.identity(),
            share: share.clone(),
            state: Mutex::new(State {
                groups: HashMap::new(),
                trunks: Trunks::new(share.identity()),
                neighbours: HashMap::new(),
                stop: false,
            }),
            bell: Fd::new(bell),
            heartbeat: config.heartbeat,
        });
        let thread = std::thread::Builder::new()
            .name("tensorwire-watch".into())
            .spawn({
                let shared = shared.clone();
                move || {
                    background();
                    poller::Poller::new(shared, listener).run();
                }
            })
            .map_err(|e| Error::io("starting the watcher thread", e))?;
        Ok(Self { shared, address, birth: Birth::now(), thread: Some(thread) })
    }

    /// Where neighbours connect to.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts neighbours of a group that forms, from now on; they arrive at the receiver.
    pub(crate) fn open(&self, group: Id, secret: Secret) -> Result<Receiver<Connection>> {
        self.birth.check("the watcher")?;
        let (sender, receiver) = channel();
        let watched = Watched {
            secret,
            mailbox: Some(sender),
            control: None,
            pidfds: Vec::new(),
            ended: Vec::new(),
            star: None,
            forming: Forming::Closed,
            early: Early::default(),
        };
        let mut state = self.shared.lock();
        if state.groups.contains_key(&group) {
            return Err(Error::misuse(
                "this context is in that group already; a second rank in one process needs a context of its own",
            ));
        }
        state.groups.insert(group, watched);
        Ok(receiver)
    }

    /// Watches a group that has formed.
    pub(crate) fn watch(
        &self,
        group: Id,
        control: Arc<Control>,
        pidfds: Vec<(usize, Id, Fd)>,
        star: Option<Star>,
    ) -> Result<()> {
        self.birth.check("the watcher")?;
        let mut state = self.shared.lock();
        state.neighbours.retain(|_, pidfd| pidfd.strong_count() > 0);
        let State { groups, neighbours, trunks, .. } = &mut *state;
        if let Some(watched) = groups.get_mut(&group) {
            watched.mailbox = None;
            watched.control = Some(control);
            watched.pidfds = pidfds
                .into_iter()
                .map(|(rank, identity, pidfd)| {
                    let known = neighbours.get(&identity).and_then(Weak::upgrade);
                    let pidfd = known.unwrap_or_else(|| Arc::new(pidfd));
                    neighbours.insert(identity, Arc::downgrade(&pidfd));
                    (rank, pidfd)
                })
                .collect();
            watched.star = star;
            watched.forming = Forming::Closed;
            watched.catch_up(trunks);
        }
        drop(state);
        self.shared.ring();
        Ok(())
    }

    /// All ranks of this host have come to barrier `count`; other hosts are told, and `release` is signalled when
    /// all have. Gives whether the group spans several hosts at all.
    pub(crate) fn arrive(&self, group: Id, count: u32) -> Result<bool> {
        self.birth.check("the watcher")?;
        let mut state = self.shared.lock();
        let State { groups, trunks, .. } = &mut *state;
        let watched = groups.get_mut(&group);
        let watched = watched.ok_or_else(|| Error::Aborted("the group was closed on this rank".into()))?;
        let Watched { star: Some(star), control: Some(control), .. } = watched else { return Ok(false) };
        star.arrive(count, control, trunks);
        drop(state);
        self.shared.ring();
        Ok(true)
    }

    /// Hears what other hosts have said by now, without waiting for the thread to do so.
    pub(crate) fn hear(&self) {
        if self.birth.is_ours() {
            self.shared.lock().listen_to_all();
        }
    }

    /// This host cannot go on in an operation: the hub hears it.
    pub(crate) fn refuse(&self, group: Id, number: u32, refusal: Refusal) {
        if !self.birth.is_ours() {
            return;
        }
        let mut state = self.shared.lock();
        let State { groups, trunks, .. } = &mut *state;
        if let Some(Watched { star: Some(star), control: Some(control), .. }) = groups.get_mut(&group) {
            star.refuse(number, refusal, control, (trunks, Instant::now()));
            trunks.flush();
        }
        drop(state);
        self.shared.ring();
    }

    /// The leaders of hosts that have not come to the barrier that this one waits in; known at the hub only.
    pub(crate) fn absent(&self, group: Id) -> Vec<usize> {
        let state = self.shared.lock();
        state
            .groups
            .get(&group)
            .and_then(|watched| watched.star.as_ref())
            .map(Star::absent)
            .unwrap_or_default()
    }

    /// The ranks of this host whose processes have ended.
    pub(crate) fn ended(&self, group: Id) -> Vec<usize> {
        let state = self.shared.lock();
        state.groups.get(&group).map(|watched| watched.ended.clone()).unwrap_or_default()
    }

    /// Says in all groups why this process ends.
    pub(crate) fn say(&self, words: &str) {
        if self.birth.is_ours() {
            let state = self.shared.lock();
            state.groups.values().filter_map(|watched| watched.control.as_ref()).for_each(|c| c.say(words));
        }
    }

    /// Says in all groups that this process is about to end.
    pub(crate) fn ends(&self) {
        if self.birth.is_ours() {
            let state = self.shared.lock();
            state.groups.values().filter_map(|watched| watched.control.as_ref()).for_each(|c| c.ends());
        }
    }

    /// Tells other hosts at once, instead of at the next beat.
    pub(crate) fn ring(&self) {
        if self.birth.is_ours() {
            self.shared.ring();
        }
    }

    /// Forgets a group; other hosts are told that this rank has left.
    pub(crate) fn close(&self, group: Id) {
        if !self.birth.is_ours() {
            return;
        }
        let mut state = self.shared.lock();
        // What the others have just said of their ranks is passed on before.
        state.listen_to_all();
        let State { groups, trunks, .. } = &mut *state;
        let mut watched = groups.remove(&group);
        if let Some(Watched { star: Some(star), control: Some(control), .. }) = &mut watched {
            star.tell_news(control, trunks);
        }
        trunks.part(group);
        trunks.flush();
        drop(state);
        // What it held is let go without the lock.
        drop(watched);
        self.shared.ring();
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watcher({})", self.address)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and the lock may be held for ever.
        if !self.birth.is_ours() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.lock().stop = true;
        self.shared.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.lock().trunks.close(Instant::now());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // The counter cannot overflow: the thread empties it.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}
