use super::*;
use crate::Group;
use crate::config::Config;
use crate::store::{MemoryStore, Store};
use crate::wire::Writer;

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

/// An operation that others have given up does not wait for an owner that does not answer.
#[test]
fn a_stop_ends_the_wait() {
    let (groups, _span) = pair();
    // A listener that accepts nobody.
    let deaf = tensorwire_device::fd::Listener::bind(None).unwrap();
    let ranks = groups[0].ranks();
    let proof = (ranks.id, Secret::random().unwrap());
    let mut members = ranks.members.clone();
    members[1].address = deaf.address().clone();
    let inner = RankMemory::new(&ranks.context, &ranks.control, proof, &members, 0).unwrap();
    let stop = Abort::local();
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| inner.peer(1, 1, &stop, soon()).unwrap_err());
        stop.set(1);
        let error = asks.join().unwrap();
        assert!(matches!(&error, Error::Aborted(text) if text.contains("rank 1 (")), "{error}");
    });
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
        assert_eq!(groups[1].ranks().memory.find(&span).unwrap(), Some((id, 0)));
        groups[0].memory_of_peer(1, id, soon()).unwrap();
        assert_eq!(mapped(), before + 1);
        drop(span);
        groups[1].sweep_memory();
        groups[0].sweep_memory();
        assert_eq!(mapped(), before);
        assert_eq!(memory.released[1].load(), start.wrapping_add(id as u32 - 1));
    }
}

/// What a rank sends in place of its descriptors ends that connection. The error names the rank, and nothing stays open.
#[test]
fn a_rank_that_lies_about_descriptors_is_found_out() {
    let (groups, _span) = pair();
    let ranks = groups[0].ranks();
    let liar = tensorwire_device::fd::Listener::bind(None).unwrap();
    let mut members = ranks.members.clone();
    members[1].address = liar.address().clone();
    let proof = (Id::random().unwrap(), Secret::random().unwrap());
    let inner = RankMemory::new(&ranks.context, &ranks.control, proof, &members, 0).unwrap();
    let answer = |serial, count| Writer::new().u8(b'a').u64(serial).u32(count).bytes(&[]).finish();
    let handle = Writer::new().u8(b'a').u64(1).u32(1).bytes(&[0; 9]).finish();
    // Too few, too many, none that were promised, memory, another answer, half an answer, no answer.
    let answers = vec![
        (answer(1, 0), 0),
        (answer(1, 2), 2),
        (answer(1, 1), 0),
        (answer(1, 250), 250),
        (handle, 1),
        (answer(7, 1), 1),
        (Writer::new().u8(b'f').u64(1).finish(), 1),
        (b"nonsense".to_vec(), 1),
        (b"a".to_vec(), 0),
    ];
    let (count, identity, secret) = (answers.len(), members[1].identity, proof.1);
    let open = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links.filter_map(|fd| std::fs::read_link(fd.path()).ok()).filter(|to| to == "/dev/full").count()
    };
    let lies = std::thread::spawn(move || crate::share::tests::liar(&liar, identity, secret, answers));
    for turn in 0..count {
        let error = inner.take_fds(1, 1, 1, soon()).unwrap_err();
        let misbehaved = matches!(&error, Error::Peer(fault) if fault.kind == PeerFaultKind::Misbehaved);
        assert!(misbehaved && error.to_string().contains(&members[1].to_string()), "{turn}: {error}");
        assert!(inner.mapped()[1].connection.is_none(), "{turn}: it has lost its connection");
    }
    lies.join().unwrap();
    assert_eq!(open(), 0);
}
