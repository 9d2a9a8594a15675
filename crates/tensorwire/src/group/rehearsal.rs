//! What a rank says in the store while a group forms, without sockets and shared memory: for benches and tests of large
//! worlds.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::Id;

use super::card::Roster;
use super::hub;
use super::notes::Notes;
use super::rendezvous::{self, Rendezvous};
use super::same_host::Finder;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::shm::member::Member;
use crate::store::Store;

/// A world of made-up hosts with as many ranks each.
#[derive(Debug, Clone, Copy)]
pub struct World {
    /// How many ranks there are.
    pub ranks: usize,
    /// How many of them are on each host.
    pub per_host: usize,
    /// How long forming the group may take.
    pub timeout: Duration,
}

/// What a rank has learnt.
#[derive(Debug)]
pub struct Formed {
    notes: Notes,
    roster: Roster,
    /// The ranks of all hosts.
    pub hosts: Vec<Vec<usize>>,
}

impl World {
    /// One rank's part, as its process would do it. `context` is anything that is alive.
    pub fn form(&self, context: &Arc<Context>, store: Arc<dyn Store>, rank: usize) -> Result<Formed> {
        let (leader, deadline) = (rank - rank % self.per_host, Deadline::after(self.timeout));
        let notes = Notes::new(store, "world", context.config().key.as_ref());
        let mut me =
            Member::this_process(rank, Id::random()?, context.watcher().address(), context.config())?;
        me.place.boot = format!("00000000-0000-0000-0000-{leader:012x}");
        me.host = format!("host-{leader}");
        let sensible = || Ok(());
        let timeout = self.timeout;
        let meeting = Rendezvous {
            notes: &notes,
            seal: None,
            me: &me,
            world: self.ranks,
            timeout,
            deadline,
            sensible: &sensible,
        };
        let roster = meeting.meet()?;
        let own = notes.with(notes.proofs().map(|proofs| proofs.within(&roster.secret)));
        let (_sender, mailbox) = channel();
        let finder = Finder::after(&meeting, context, (&roster, &own), &mailbox);
        let mine: Vec<usize> = (leader..self.ranks.min(leader + self.per_host)).collect();
        let told = |result: Result<_>| result.inspect_err(|error| finder.report(error));
        let hosts = told(
            if rank == leader {
                finder.say_open().and_then(|()| finder.say_host(&mine))
            } else {
                finder.await_open(leader)
            }
            .and_then(|()| finder.map(&mine)),
        )?;
        if rank == 0 {
            hub::say_hub(&finder, &[([127, 0, 0, 1], 1).into()])?;
        } else if rank == leader {
            hub::await_hub(&finder).map_err(|error| finder.first_of(error))?;
        }
        Ok(Formed { notes, roster, hosts })
    }
}

impl Formed {
    /// What rank 0 does when all ranks have formed the group.
    pub fn tidy(&self) -> Result<()> {
        rendezvous::tidy(&self.notes, &self.roster, &self.hosts)
    }

    /// What all ranks must have in common.
    pub fn id(&self) -> Result<Id> {
        let world: usize = self.hosts.iter().map(Vec::len).sum();
        if world == self.roster.members.len() {
            Ok(self.roster.id)
        } else {
            Err(Error::bug("a map without all ranks"))
        }
    }
}
