//! Wrong input, wrong neighbours, and deaths while a group forms: every rank gets a clear error, and in time.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ranks::{LONG, context, context_on, describe, on_threads};
use tensorwire::store::{MemoryStore, Store, TcpServer, TcpStore};
use tensorwire::wire::{PROTOCOL, Reader, Writer};
use tensorwire::{Error, Group, PeerFaultKind};

/// The time-out of groups that wait for what never comes.
const SHORT: Duration = Duration::from_secs(2);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn join(store: &Arc<dyn Store>, rank: usize, world: usize, timeout: Duration) -> Result<Group, Error> {
    Group::builder().context(&context()).timeout(timeout).from_store(store.clone(), rank, world)
}

/// Joins as each of the (rank, world) pairs, at once, and gives the errors.
fn errors(store: &Arc<dyn Store>, pairs: &[(usize, usize)], timeout: Duration) -> Vec<Error> {
    let ends = on_threads(pairs.len(), |index| {
        let (rank, world) = pairs[index];
        join(store, rank, world, timeout).map(drop).unwrap_err()
    });
    for error in &ends {
        println!("{pairs:?}: {}", describe(error));
    }
    ends
}

fn is(error: &Error, kind: PeerFaultKind, parts: &[&str]) {
    assert!(matches!(error, Error::Peer(fault) if fault.kind == kind), "{}", describe(error));
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn a_rank_outside_of_its_world() {
    for wrong in [2, 3, usize::MAX] {
        let all = errors(&memory(), &[(0, 2), (wrong, 2)], LONG);
        is(&all[0], PeerFaultKind::Incompatible, &[&format!("rank {wrong} of a world of 2")]);
        assert!(matches!(&all[1], Error::Misuse(text) if text.contains("ranks count from 0")), "{}", all[1]);
    }
}

#[test]
fn a_world_of_none() {
    let all = errors(&memory(), &[(0, 0), (1, 2)], LONG);
    assert!(matches!(&all[0], Error::Misuse(text) if text.contains("a world of 0")), "{}", all[0]);
    is(&all[1], PeerFaultKind::Incompatible, &["a world of 0"]);
    assert!(matches!(join(&memory(), 0, usize::MAX, LONG), Err(Error::Misuse(_))));
}

#[test]
fn two_processes_with_one_rank() {
    for pairs in [&[(0, 3), (1, 3), (1, 3)][..], &[(0, 2), (0, 2)], &[(0, 3), (0, 3), (2, 3)]] {
        for error in errors(&memory(), pairs, LONG) {
            is(&error, PeerFaultKind::Incompatible, &["claims the same rank", "pid", "a rank of its own"]);
        }
    }
}

#[test]
fn two_processes_with_one_rank_and_no_rank_0() {
    // Nobody judges; when the time is up it is found out all the same.
    for error in errors(&memory(), &[(1, 3), (1, 3)], SHORT) {
        is(&error, PeerFaultKind::Incompatible, &["rank 1", "claims the same rank"]);
    }
}

#[test]
fn one_process_too_many_is_told_to_all() {
    // All tickets are taken before rank 0 comes.
    let store = memory();
    std::thread::scope(|scope| {
        let early: Vec<_> = (0..2).map(|_| scope.spawn(|| join(&store, 1, 2, LONG).map(drop))).collect();
        while store.add("tensorwire/world/joined", 0).unwrap() < 2 {
            std::thread::yield_now();
        }
        let late = join(&store, 0, 2, LONG).unwrap_err();
        println!("{}", describe(&late));
        is(&late, PeerFaultKind::Incompatible, &["rank 0", "2 processes have joined already"]);
        for thread in early {
            is(&thread.join().unwrap().unwrap_err(), PeerFaultKind::Incompatible, &["rank 0"]);
        }
    });
}

#[test]
fn a_latecomer_to_a_formed_group() {
    let store = memory();
    let groups = on_threads(2, |rank| join(&store, rank, 2, LONG).unwrap());
    for (rank, world) in [(0, 2), (1, 2), (2, 3)] {
        let error = join(&store, rank, world, LONG).unwrap_err();
        println!("{}", describe(&error));
        is(&error, PeerFaultKind::Incompatible, &["2 ranks have formed it", "another name or store"]);
    }
    on_threads(2, |rank| groups[rank].barrier().wait().unwrap());
}

#[test]
fn different_world_sizes() {
    for pairs in [[(0, 2), (1, 3)], [(0, 3), (1, 2)]] {
        for error in errors(&memory(), &pairs, LONG) {
            is(&error, PeerFaultKind::Incompatible, &["was told a world of", "pid"]);
        }
    }
}

#[test]
fn one_context_for_two_ranks() {
    let (store, context) = (memory(), context());
    let ends = on_threads(2, |rank| {
        let builder = Group::builder().context(&context).timeout(LONG);
        builder.from_store(store.clone(), rank, 2).map(drop).unwrap_err()
    });
    for error in ends {
        println!("{}", describe(&error));
        is(&error, PeerFaultKind::Incompatible, &["a context of its own"]);
    }
}

#[test]
fn missing_ranks_are_named_to_all() {
    for error in errors(&memory(), &[(0, 4), (2, 4)], SHORT) {
        assert!(error.is_timeout(), "{error}");
        assert!(error.to_string().contains("ranks 1, 3 are missing; 2 of 4 are here"), "{error}");
        // Whose time-out it is, once.
        let whose = "the time-out is that of the group (its timeout, or TENSORWIRE_TIMEOUT)";
        assert_eq!(error.to_string().matches(whose).count(), 1, "{error}");
    }
    for error in errors(&memory(), &[(1, 3), (2, 3)], SHORT) {
        assert!(error.to_string().contains("rank 0 is missing"), "{error}");
    }
}

#[test]
fn a_ticket_without_a_card() {
    let store = memory();
    store.add("tensorwire/world/joined", 1).unwrap();
    for error in errors(&store, &[(0, 3), (2, 3)], SHORT) {
        assert!(error.is_timeout(), "{error}");
        assert!(error.to_string().contains("rank 1 is missing; 2 of 3 are here"), "{error}");
    }
}

// Cards and verdicts made by hand

/// A process to speak for, and what its card says.
struct Puppet {
    process: Child,
    member: Vec<u8>,
    /// Who sees its pid.
    sight: tensorwire::device::Id,
}

impl Puppet {
    /// A process that waits, as `rank`, with a host label of its own or none.
    fn new(rank: u64, label: &str) -> Self {
        let process = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let read = |path: String| std::fs::read_to_string(path).unwrap();
        let boot = read("/proc/sys/kernel/random/boot_id".into());
        let stat = read(format!("/proc/{}/stat", process.id()));
        let started = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        let namespace = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata("/proc/self/ns/pid").unwrap());
        let member = Writer::new()
            .u64(rank)
            .fixed(&tensorwire::device::Id::random().unwrap().0)
            .bytes(b"puppet")
            .u32(process.id())
            .bytes(boot.trim().as_bytes())
            .bytes(label.as_bytes())
            .u64(namespace)
            .u64(started)
            .bytes(b"@tensorwire-nobody-listens-here")
            .finish();
        let sight = tensorwire::device::secret::digest(format!("{namespace} {}", boot.trim()).as_bytes());
        Self { process, member, sight }
    }

    /// Its card, from a job without a key: nothing is sealed.
    fn card(&self, protocol: u32, release: &str, world: u64) -> Vec<u8> {
        let head = Writer::new().fixed(b"twcd").u32(protocol).bytes(release.as_bytes()).u64(world).u8(0);
        head.fixed(&self.member).finish()
    }

    /// Takes a ticket and hands in a card.
    fn hand_in(&self, store: &Arc<dyn Store>, card: &[u8]) {
        let ticket = store.add("tensorwire/world/joined", 1).unwrap();
        let near = format!("tensorwire/world/near/{}", self.sight);
        let number = store.add(&near, 1).unwrap();
        store.set(&format!("tensorwire/world/card/{ticket}"), card).unwrap();
        store.set(&format!("{near}/{number}"), card).unwrap();
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.kill();
    }
}

const RELEASE: &str = env!("CARGO_PKG_VERSION");

#[test]
fn another_version() {
    for (protocol, rest) in [(PROTOCOL + 1, &b"of the future"[..]), (0, b"")] {
        let store = memory();
        let head = Writer::new().fixed(b"twcd").u32(protocol).bytes(b"9.8.7");
        Puppet::new(2, "").hand_in(&store, &head.fixed(rest).finish());
        for error in errors(&store, &[(0, 3), (1, 3)], LONG) {
            is(&error, PeerFaultKind::Incompatible, &["tensorwire 9.8.7", &format!("protocol {protocol}")]);
            is(&error, PeerFaultKind::Incompatible, &[RELEASE, "install the same version"]);
        }
    }
}

#[test]
fn a_verdict_of_another_version() {
    let store = memory();
    let verdict =
        Writer::new().fixed(b"twvd").u32(PROTOCOL + 1).bytes(b"9.8.7").u8(0).fixed(&[7; 99]).finish();
    store.set("tensorwire/world/verdict", &verdict).unwrap();
    for error in errors(&store, &[(0, 2), (1, 2)], LONG) {
        is(&error, PeerFaultKind::Incompatible, &["tensorwire 9.8.7"]);
    }
}

#[test]
fn a_card_with_a_rank_out_of_range() {
    let store = memory();
    let puppet = Puppet::new(7, "");
    puppet.hand_in(&store, &puppet.card(PROTOCOL, RELEASE, 3));
    for error in errors(&store, &[(0, 3), (1, 3)], LONG) {
        is(&error, PeerFaultKind::Incompatible, &["rank 7 (host puppet, pid", "outside of a world of 3"]);
    }
}

#[test]
fn garbage_for_a_card() {
    for garbage in
        [&b""[..], b"x", b"twcd", &[0xff; 100], &[b"twcd".as_slice(), &[1, 0, 0, 0], &[0xff; 60]].concat()]
    {
        let store = memory();
        store.set("tensorwire/world/card/1", garbage).unwrap();
        store.add("tensorwire/world/joined", 1).unwrap();
        for error in errors(&store, &[(0, 3), (1, 3)], LONG) {
            is(&error, PeerFaultKind::Misbehaved, &["under the group's name"]);
        }
    }
}

#[test]
fn garbage_for_a_verdict() {
    for garbage in [
        &b"x"[..],
        b"twvd",
        &[0xff; 100],
        &[b"twvd".as_slice(), &[1, 0, 0, 0], &[0; 4], &[0xff; 60]].concat(),
    ] {
        let store = memory();
        store.set("tensorwire/world/verdict", garbage).unwrap();
        errors(&store, &[(0, 2), (1, 2)], LONG);
    }
}

#[test]
fn garbage_for_tickets() {
    let store = memory();
    store.set("tensorwire/world/joined", b"not a number").unwrap();
    errors(&store, &[(0, 2), (1, 2)], LONG);
}

#[test]
fn garbage_for_hosts_and_the_hub() {
    for (key, garbage) in [
        ("host/0", &[0xff; 20][..]),
        ("host/0", &[0; 4]),
        ("host/1", &[3, 0, 0, 0]),
        ("host/2", &[1, 0, 0, 0, 3, 0, 0, 0]),
        ("map", &[0xff; 20]),
        ("map", &[0; 4]),
        ("map", &[1, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]),
        ("hub", b"\xff\xfe nonsense"),
        ("failed", b"\xff\xff\xff"),
        ("failed", b""),
    ] {
        let store = memory();
        store.set(&format!("tensorwire/world/{key}"), garbage).unwrap();
        let ends = on_threads(4, |rank| {
            let context = context_on(if rank < 2 { "a" } else { "b" });
            let builder = Group::builder().context(&context).timeout(LONG);
            // Late garbage: the owner of the key may have replaced it, then all is well.
            builder.from_store(store.clone(), rank, 4).map(drop)
        });
        let bad = ends.iter().filter(|end| end.is_err()).count();
        for end in &ends {
            println!("{key}: {}", ranks::outcome(end));
        }
        assert!(bad == 0 || bad == 4, "{key}: some ranks think that the group has formed");
    }
}

#[test]
fn a_hub_address_that_leads_nowhere() {
    let store = memory();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let nowhere = format!("{} 127.0.0.1:1", taken.local_addr().unwrap());
    // A malicious user of the store keeps replacing what rank 0 says.
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                store.set("tensorwire/world/hub", nowhere.as_bytes()).unwrap();
            }
        });
        let ends = on_threads(2, |rank| {
            let context = context_on(if rank == 0 { "a" } else { "b" });
            let builder = Group::builder().context(&context).timeout(SHORT);
            builder.from_store(store.clone(), rank, 2).map(drop)
        });
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        for end in ends {
            println!("{}", ranks::outcome(&end));
            // Rank 1 may have read the true address in between.
            if let Err(error) = end {
                assert!(error.is_timeout(), "{error}");
            }
        }
    });
}

// Deaths

fn died(error: &Error, rank: usize, pid: u32) {
    let Error::Peer(fault) = error else { panic!("{}", describe(error)) };
    assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Died, Some(rank)), "{error}");
    assert_eq!(fault.who, format!("rank {rank} (host puppet, pid {pid})"), "{error}");
}

#[test]
fn death_after_the_card() {
    // As rank 0, whose verdict everybody waits for, and as another rank; near the others and elsewhere.
    for (rank, label) in [(0, ""), (0, "elsewhere"), (2, ""), (2, "elsewhere")] {
        let store = memory();
        let mut puppet = Puppet::new(rank, label);
        puppet.hand_in(&store, &puppet.card(PROTOCOL, RELEASE, 4));
        let (pid, rank) = (puppet.process.id(), rank as usize);
        let others: Vec<(usize, usize)> =
            [0, 1, 2].into_iter().filter(|&r| r != rank).map(|r| (r, 4)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while store.add("tensorwire/world/joined", 0).unwrap() < 3 {
                    std::thread::yield_now();
                }
                puppet.kill();
            });
            for error in errors(&store, &others, LONG) {
                died(&error, rank, pid);
            }
        });
    }
}

#[test]
fn death_after_the_verdict_before_connecting() {
    for label in ["", "elsewhere"] {
        let store = memory();
        let mut puppet = Puppet::new(2, label);
        puppet.hand_in(&store, &puppet.card(PROTOCOL, RELEASE, 3));
        let pid = puppet.process.id();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                store.wait(&["tensorwire/world/verdict"]).unwrap();
                puppet.kill();
            });
            for error in errors(&store, &[(0, 3), (1, 3)], LONG) {
                died(&error, 2, pid);
            }
        });
        // The secret of the group that never was is gone.
        let verdict = store.get("tensorwire/world/verdict").unwrap();
        assert!(!store.check(&["tensorwire/world/hub"]).unwrap());
        assert_ne!(verdict[4 + 4 + 4 + RELEASE.len()], 0, "the verdict still holds the roster");
    }
}

/// A puppet as rank 0 that decides, and dies before it leads.
#[test]
fn death_of_the_leader_after_its_verdict() {
    let store = memory();
    let mut puppet = Puppet::new(0, "");
    puppet.hand_in(&store, &puppet.card(PROTOCOL, RELEASE, 3));
    let pid = puppet.process.id();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let head = 4 + 4 + 4 + RELEASE.len() + 8 + 1;
            let cards = store.multi_get(&["tensorwire/world/card/2", "tensorwire/world/card/3"]).unwrap();
            let mut members: Vec<&[u8]> = cards.iter().map(|card| &card[head..]).collect();
            members.push(&puppet.member);
            members.sort_by_key(|member| member[0]);
            let (mut homes, mut rest) = (Writer::new().u32(3), Writer::new().u32(3));
            for (home, member) in members.into_iter().enumerate() {
                let mut member = Reader::new(member);
                let (_, identity) = (member.u64().unwrap(), member.array::<16>().unwrap());
                let (host, pid) = (member.bytes().unwrap(), member.u32().unwrap());
                homes = homes.bytes(host).bytes(member.bytes().unwrap()).bytes(member.bytes().unwrap());
                homes = homes.u64(member.u64().unwrap());
                rest = rest.fixed(&identity).u32(home as u32).u32(pid).u64(member.u64().unwrap());
                rest = rest.bytes(member.bytes().unwrap());
            }
            let verdict = Writer::new().fixed(b"twvd").u32(PROTOCOL).bytes(RELEASE.as_bytes()).u8(0);
            let verdict = verdict.fixed(&[1; 16]).fixed(&[2; 32]).fixed(&homes.finish());
            let verdict = verdict.fixed(&rest.finish()).finish();
            store.set("tensorwire/world/verdict", &verdict).unwrap();
            puppet.kill();
        });
        for error in errors(&store, &[(1, 3), (2, 3)], LONG) {
            died(&error, 0, pid);
        }
    });
}

/// A rank that is alive, but never speaks, as one of this host and as the leader of another: rank 0 waits for it, and says to
/// all for whom.
#[test]
fn a_rank_that_never_speaks() {
    for label in ["", "elsewhere"] {
        let store = memory();
        let puppet = Puppet::new(2, label);
        puppet.hand_in(&store, &puppet.card(PROTOCOL, RELEASE, 3));
        for error in errors(&store, &[(0, 3), (1, 3)], SHORT) {
            assert!(error.is_timeout() && error.ranks() == [2], "{error}");
            assert!(error.to_string().contains("nothing was heard of rank 2 (host puppet, pid"), "{error}");
        }
    }
}

// Stores that are none, or go away

#[test]
fn the_store_dies_during_the_rendezvous() {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    let server = std::sync::Mutex::new(Some(server));
    on_threads(3, |index| {
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect("127.0.0.1", port, LONG).unwrap());
        if index == 2 {
            while store.add("tensorwire/world/joined", 0).unwrap() < 2 {
                std::thread::yield_now();
            }
            drop(server.lock().unwrap().take());
            return;
        }
        let error = join(&store, index, 3, Duration::from_secs(4)).unwrap_err();
        println!("{}", describe(&error));
        assert!(error.to_string().contains(&port.to_string()), "{error}");
    });
}

#[test]
fn a_port_that_is_taken() {
    // Silent; talks nonsense; another store.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let garbage = TcpListener::bind("127.0.0.1:0").unwrap();
    let foreign = TcpServer::bind("127.0.0.1:0").unwrap();
    let ports = [
        silent.local_addr().unwrap().port(),
        garbage.local_addr().unwrap().port(),
        foreign.local_addr().port(),
    ];
    std::thread::spawn(move || {
        for client in garbage.incoming() {
            let mut client = client.unwrap();
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\nwhat do you want of me?\r\n");
            let _ = client.read(&mut [0; 64]);
        }
    });
    for port in ports {
        let url = format!("tcp://127.0.0.1:{port}");
        on_threads(2, |rank| {
            let builder = Group::builder().context(&context()).timeout(SHORT);
            let error = builder.from_url(&url, Some(rank), Some(2)).unwrap_err();
            println!("rank {rank}: {}", describe(&error));
            if rank == 0 {
                assert!(matches!(&error, Error::Io { .. }), "{error}");
                assert!(error.to_string().contains(&port.to_string()), "{error}");
            }
        });
    }
}

#[test]
fn nobody_serves_the_store() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let builder = Group::builder().context(&context()).timeout(SHORT);
    let error = builder.from_url(&format!("tcp://127.0.0.1:{free}"), Some(1), Some(2)).unwrap_err();
    println!("{}", describe(&error));
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains(&free.to_string()), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn files_that_cannot_be_a_store() {
    for path in ["/nowhere/at/all", "/proc/version", "/tmp", "/dev/null"] {
        let builder = Group::builder().context(&context()).timeout(SHORT);
        let error = builder.from_url(&format!("file://{path}"), Some(0), Some(1)).unwrap_err();
        println!("{}", describe(&error));
        assert!(error.to_string().contains(path), "{error}");
    }
}
