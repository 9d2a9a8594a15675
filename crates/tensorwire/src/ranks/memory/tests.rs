use proptest::prelude::*;
use tensorwire_device::fd::{Connection, Fd};

use super::*;
use crate::Group;
use crate::config::Config;
use crate::store::{MemoryStore, Store};

const LONG: Duration = Duration::from_secs(60);

fn soon() -> Deadline {
    Deadline::after(LONG)
}

/// Two ranks of this process; the second has one region.
fn pair() -> (Vec<Group>, Span) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = std::thread::scope(|scope| {
        let rank = |rank| {
            let store = store.clone();
            scope.spawn(move || {
                let context = Context::new(Config::default()).unwrap();
                Group::builder().context(&context).timeout(LONG).from_store(store, rank, 2).unwrap()
            })
        };
        let threads = [rank(0), rank(1)];
        threads.map(|thread| thread.join().unwrap()).into()
    });
    let groups: Vec<Group> = groups;
    let span = groups[1].alloc(64).unwrap();
    (groups, span)
}

/// A connection of rank 0 to rank 1, as memory is asked for.
fn connect(groups: &[Group]) -> Connection {
    let memory = &groups[0].ranks().memory;
    let me = memory.context.identity();
    fd::connect(&memory.there(1).address, memory.group, me, &memory.secret, soon()).unwrap()
}

#[test]
fn nonsense_costs_a_peer_its_connection_only() {
    let (groups, _span) = pair();
    let long = vec![b'M'; tensorwire_device::fd::MAX_MESSAGE];
    let frames: [&[u8]; 6] =
        [b"M", b"M1234567", b"M123456789", b"X12345678", b"\0\0\0\0\0\0\0\0\0", long.as_slice()];
    for frame in frames {
        let connection = connect(&groups);
        connection.send(frame, &[], soon()).unwrap();
        assert!(connection.recv(soon()).unwrap().0.is_empty(), "{frame:?}");
    }
    // Descriptors that nobody asked for are closed.
    let connection = connect(&groups);
    let strange = Fd::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
    let frame = clients::request(1);
    connection.send(&frame, &[std::os::fd::AsFd::as_fd(&strange); 3], soon()).unwrap();
    let (answer, fds) = connection.recv(soon()).unwrap();
    assert_eq!(clients::read_answer(&answer, fds).unwrap().unwrap().len(), 64);
    groups[0].memory_of_peer(1, 1, soon()).unwrap();
}

#[test]
fn one_connection_may_ask_often() {
    let (groups, _span) = pair();
    let connection = connect(&groups);
    for id in [1, 2, 1, u64::MAX, 0, 1] {
        connection.send(&clients::request(id), &[], soon()).unwrap();
        let (frame, fds) = connection.recv(soon()).unwrap();
        assert_eq!(clients::read_answer(&frame, fds).unwrap().is_some(), id == 1);
    }
}

/// One that asks and never listens, and many that do not even ask, leave room for the others.
#[test]
fn idle_and_deaf_peers_disturb_nobody() {
    let (groups, _span) = pair();
    let deaf = connect(&groups);
    let now = || Deadline::after(Duration::from_millis(100));
    while deaf.send(&clients::request(1), &[], now()).is_ok() {}
    let idle: Vec<Connection> = (0..200).map(|_| connect(&groups)).collect();
    groups[0].memory_of_peer(1, 1, soon()).unwrap();
    drop((deaf, idle));
    let second = groups[1].alloc(64).unwrap();
    groups[0].memory_of_peer(1, 2, soon()).unwrap().write(0, &[5]).unwrap();
    assert_eq!(second.to_vec().unwrap()[0], 5);
}

/// An operation that others have given up does not wait for an owner that does not answer.
#[test]
fn a_stop_ends_the_wait() {
    let (groups, _span) = pair();
    // A listener that accepts nobody.
    let deaf = tensorwire_device::fd::Listener::bind(None).unwrap();
    let ranks = groups[0].ranks();
    let proof = (ranks.id, Secret::random().unwrap());
    let mut inner = Memory::new(&ranks.context, &ranks.control, proof, &ranks.members, 0).unwrap();
    inner.members[1].address = deaf.address().clone();
    let stop = Abort::local();
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| inner.peer(1, 1, &stop, soon()).unwrap_err());
        stop.set(1);
        let error = asks.join().unwrap();
        assert!(matches!(&error, Error::Aborted(text) if text.contains("rank 1 (")), "{error}");
    });
}

#[test]
fn a_stranger_gets_nothing() {
    let (groups, _span) = pair();
    let memory = &groups[0].ranks().memory;
    let (there, me) = (memory.there(1), memory.context.identity());
    let wrong = Secret::random().unwrap();
    assert!(fd::connect(&there.address, memory.group, me, &wrong, soon()).is_err());
    let unknown = Id::random().unwrap();
    assert!(fd::connect(&there.address, unknown, me, &memory.secret, soon()).is_err());
    groups[0].memory_of_peer(1, 1, soon()).unwrap();
}

/// An owner that tells nonsense of what it has freed: at worst mappings are made anew.
#[test]
fn false_tales_of_freed_memory_do_no_harm() {
    let (groups, span) = pair();
    let memory = &groups[0].ranks().memory;
    groups[0].memory_of_peer(1, 1, soon()).unwrap();
    let line = memory.control.map().desk(1) + Desk::RELEASED;
    for (count, names) in [(1u32, [9u8; 32]), (3, [1; 32]), (2, [0; 32]), (u32::MAX, [255; 32]), (5, [0; 32])]
    {
        memory.control.region().write(line + NAMES, &names).unwrap();
        memory.released[1].store(count);
        groups[0].sweep_memory();
        groups[0].memory_of_peer(1, 1, soon()).unwrap().write(0, &[count as u8]).unwrap();
        assert_eq!(span.to_vec().unwrap()[0], count as u8);
        assert_eq!(memory.mappings.load(Ordering::Relaxed), 1);
    }
}

/// The counter of freed regions goes round.
#[test]
fn the_count_of_freed_regions_wraps() {
    let (groups, _span) = pair();
    let memory = &groups[0].ranks().memory;
    let start = u32::MAX - 20;
    memory.released[1].store(start);
    groups[0].sweep_memory();
    let mapped = || memory.context.mapped().0;
    let before = mapped();
    for id in 2..42 {
        let span = groups[1].alloc(64).unwrap();
        assert_eq!(groups[1].ranks().memory.find(&span), Some((id, 0)));
        groups[0].memory_of_peer(1, id, soon()).unwrap();
        assert_eq!(mapped(), before + 1);
        drop(span);
        groups[1].sweep_memory();
        groups[0].sweep_memory();
        assert_eq!(mapped(), before);
        assert_eq!(memory.released[1].load(), start.wrapping_add(id as u32 - 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_answer_panics(frame in proptest::collection::vec(any::<u8>(), 0..20), fds in 0..3usize) {
        let fds = (0..fds).map(|_| Fd::new(std::fs::File::open("/dev/null").unwrap().into())).collect();
        let _ = clients::read_answer(&frame, fds);
    }
}
