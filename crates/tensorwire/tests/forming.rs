//! What forming a group asks of the store: a rank makes the same few requests whatever the number of ranks and hosts.
#![allow(clippy::unwrap_used, clippy::panic)]

mod ranks;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ranks::{LONG, context, context_on, on_threads};
use tensorwire::group::rehearsal::World;
use tensorwire::store::{MemoryStore, Reply, Request, Store};
use tensorwire::{Deadline, Group, Result};

/// A store that writes down what is asked of it. Its clones write into the same list.
#[derive(Debug, Clone)]
struct Recording {
    below: Arc<dyn Store>,
    keys: Arc<Mutex<Vec<String>>>,
}

impl Recording {
    fn new(below: &Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self { below: below.clone(), keys: Arc::default() })
    }

    /// What was asked for, each thing once: a rank that waits asks again as time goes by, whoever else is there. `failed`,
    /// cards of processes whose death a rank could see, and whether somebody cannot reach its leader, are asked for in such waits
    /// only.
    fn requests(&self) -> BTreeSet<String> {
        let keys = self.keys.lock().unwrap();
        let waits = |key: &String| {
            let aparts = key.rsplit_once("/apart/").is_some_and(|(_, leader)| !leader.contains('/'));
            aparts || key.ends_with("/failed") || key.contains("/near/")
        };
        keys.iter().filter(|key| !waits(key)).cloned().collect()
    }

    /// The same without numbers.
    fn kinds(&self) -> BTreeSet<String> {
        let kind = |key: &String| key.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        self.requests().iter().map(kind).collect()
    }
}

impl Store for Recording {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        let asked = Mutex::new(Vec::new());
        let renamed = request.map_keys(|key| {
            asked.lock().unwrap().push(key.clone());
            key
        });
        // A request for several keys is one request.
        self.keys.lock().unwrap().extend(asked.into_inner().unwrap().into_iter().next());
        self.below.call(renamed, deadline)
    }

    fn timeout(&self) -> Duration {
        self.below.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.below.set_timeout(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { below: self.below.clone_store()?, keys: self.keys.clone() }))
    }
}

/// What each rank asks for: a rank that leads nobody, and a leader other than rank 0.
const RANK: [&str; 5] = ["card/", "joined", "map", "open/", "verdict"];
const LEADER: [&str; 6] = ["card/", "host/", "hub", "joined", "map", "open/"];

fn check(stores: &[Arc<Recording>], per_host: usize) {
    let (world, hosts) = (stores.len(), stores.len() / per_host);
    let named =
        |keys: &[&str]| keys.iter().map(|key| format!("tensorwire/world/{key}")).collect::<BTreeSet<_>>();
    for (rank, store) in stores.iter().enumerate() {
        let (kinds, requests) = (store.kinds(), store.requests());
        if rank == 0 {
            // Cards are read and removed, and so are two keys for each host.
            assert!(requests.len() <= world + 2 * hosts + 8, "{world} ranks, {hosts} hosts: {requests:?}");
        } else if rank % per_host == 0 {
            let mut expected = named(&LEADER);
            expected.extend(named(&["verdict"]));
            assert_eq!(kinds, expected, "rank {rank} of {world}");
            assert_eq!(requests.len(), expected.len(), "rank {rank} of {world}: {requests:?}");
        } else {
            assert_eq!(kinds, named(&RANK), "rank {rank} of {world}");
            assert_eq!(requests.len(), RANK.len(), "rank {rank} of {world}: {requests:?}");
        }
    }
}

#[test]
fn groups_of_any_size_cost_a_rank_the_same() {
    for (world, per_host) in [(4, 2), (6, 3), (8, 2), (8, 4), (16, 4)] {
        let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let stores: Vec<_> = (0..world).map(|_| Recording::new(&memory)).collect();
        let groups = on_threads(world, |rank| {
            let builder =
                Group::builder().context(&context_on(&format!("{}", rank / per_host))).timeout(LONG);
            builder.from_store(stores[rank].clone(), rank, world).unwrap()
        });
        assert_eq!(groups[0].hosts().len(), world / per_host);
        check(&stores, per_host);
    }
}

#[test]
fn large_worlds_cost_a_rank_the_same() {
    let context = context();
    for (ranks, per_host) in [(64, 8), (256, 8), (256, 64), (256, 2)] {
        let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let stores: Vec<_> = (0..ranks).map(|_| Recording::new(&memory)).collect();
        let world = World { ranks, per_host, timeout: LONG };
        let formed = on_threads(ranks, |rank| world.form(&context, stores[rank].clone(), rank).unwrap());
        let hosts: Vec<Vec<usize>> =
            (0..ranks / per_host).map(|host| (host * per_host..(host + 1) * per_host).collect()).collect();
        assert!(formed.iter().all(|one| one.hosts == hosts && one.id().unwrap() == formed[0].id().unwrap()));
        check(&stores, per_host);
        // What stays: tickets, the answer to latecomers, and where leaders find the hub, which rank 0 removes with their
        // connections.
        formed[0].tidy().unwrap();
        let mut left = memory.list_keys().unwrap();
        left.sort();
        assert_eq!(left, ["tensorwire/world/hub", "tensorwire/world/joined", "tensorwire/world/verdict"]);
    }
}
