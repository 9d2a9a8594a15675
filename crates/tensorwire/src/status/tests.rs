use std::sync::Arc;

use tensorwire_device::host::Host;
use tensorwire_device::{Dtype, ReduceOp};

use super::*;
use crate::shm::control::{Board, Cause, Control, Desk, Failure};
use crate::shm::kind::{Kind, Path};
use crate::shm::record::{Begun, Entry, Recorder, Says};

/// A group of this process whose ranks do what a test says.
struct Fake {
    controls: Vec<Arc<Control>>,
    recorders: Vec<Recorder>,
}

impl Fake {
    fn new(world: usize) -> Self {
        let memory = Control::alloc(&Host, world, world).unwrap();
        let open =
            |rank| Arc::new(Control::open(memory.clone(), (0..world).collect(), (rank, world)).unwrap());
        let controls: Vec<Arc<Control>> = (0..world).map(open).collect();
        for (rank, control) in controls.iter().enumerate() {
            let card = format!("{rank}\n{world}\n{}\nhost-a\nthe group\n", 800 + rank);
            let at = control.map().desk(rank) + Desk::CARD;
            control.region().write(at, card.as_bytes()).unwrap();
        }
        let recorders = controls.iter().map(|control| Recorder::new(control).unwrap()).collect();
        Self { controls, recorders }
    }

    /// Rank `rank` begins an operation some seconds ago, and ends it at once if a state is given.
    fn op(&self, rank: usize, kind: Kind, number: u64, ago: u64, end: Option<State>) {
        let begun = now() - ago * 1_000_000_000;
        let ticket = self.recorders[rank].begin(entry(kind, number, begun));
        if let Some(state) = end {
            self.recorders[rank].end(&ticket, state, begun);
        }
        self.is_at(rank, 2 * number as u32 + 1 + u32::from(end.is_some()));
    }

    /// Rank `rank` queued an operation some seconds ago. Its queue says so much on the board.
    fn queue(&self, rank: usize, kind: Kind, number: u64, ago: u64, says: (bool, bool)) {
        let (mut ticket, begun) = self.meet(rank, kind, number, ago, says);
        self.recorders[rank].queued(&mut ticket, begun + 5_000);
        self.is_at(rank, 2 * number as u32 + 2);
    }

    /// Rank `rank` met the others for an operation some seconds ago, and puts it on its queue.
    fn meet(
        &self,
        rank: usize,
        kind: Kind,
        number: u64,
        ago: u64,
        (arrived, done): (bool, bool),
    ) -> (Begun, u64) {
        let begun = now() - ago * 1_000_000_000;
        let mut ticket = self.recorders[rank].begin(entry(kind, number, begun));
        self.recorders[rank].met(&mut ticket, Says { arrived, done }, begun + 2_000);
        self.is_at(rank, 2 * number as u32 + 1);
        (ticket, begun)
    }

    fn is_at(&self, rank: usize, position: u32) {
        let control = &self.controls[rank];
        control.flag(control.map().desk(rank) + Desk::WHERE).unwrap().store(position);
    }

    /// The queue of a rank sets its word.
    fn says(&self, rank: usize, number: u32, which: usize) {
        let control = &self.controls[rank];
        control.region().commit(control.map().board_lines()).unwrap();
        control.flag(control.map().board(rank, number) + which).unwrap().store(number);
    }

    fn message(&self, rank: usize, kind: Kind, peer: Option<usize>) {
        self.recorders[rank].begin(Entry {
            number: 1,
            kind,
            dtype: None,
            op: None,
            root_or_peer: peer,
            tag: 5,
            bytes: 8,
            path: None,
            now: now(),
        });
    }

    /// What is seen if the given ranks are stopped and all others sleep.
    fn look(&self, stopped: &[usize], gone: &[usize]) -> GroupReport {
        let mut group = self.read(stopped, gone);
        waits::settle(&mut group, now());
        group
    }

    fn read(&self, stopped: &[usize], gone: &[usize]) -> GroupReport {
        let len = self.controls[0].map().slot(0);
        let bytes = crate::shm::record::read_quietly(&self.controls[0], 0, len).unwrap();
        let mut process = |pid: u32| match pid as usize - 800 {
            rank if stopped.contains(&rank) => Process::Stopped,
            rank if gone.contains(&rank) => Process::Gone,
            _ => Process::Sleeping,
        };
        region::read(&crate::shm::view::Bytes(&bytes), &mut process).unwrap()
    }
}

fn entry(kind: Kind, number: u64, now: u64) -> Entry {
    Entry {
        number,
        kind,
        dtype: Some(Dtype::F32),
        op: Some(ReduceOp::Sum),
        root_or_peer: None,
        tag: 0,
        bytes: 4096,
        path: Some(Path::OneShot),
        now,
    }
}

#[test]
fn a_stopped_rank_is_named() {
    let fake = Fake::new(4);
    for rank in 0..3 {
        fake.op(rank, Kind::Broadcast, 41, 12, Some(State::Done));
        fake.op(rank, Kind::AllReduce, 42, 12, None);
    }
    fake.op(3, Kind::Broadcast, 41, 12, None);
    let group = fake.look(&[3], &[]);
    assert_eq!((group.name.as_str(), group.world, &group.failure), ("the group", 4, &None));
    assert_eq!(
        group.summary,
        ["ranks 0, 1 and 2 wait in all_reduce #42 for rank 3 (host host-a, pid 803), \
          which is stopped (SIGSTOP) in broadcast #41 for 12 s"]
    );
    assert_eq!(group.ranks[0].waits_for, [3]);
    assert_eq!(group.ranks[3].waits_for, [0; 0]);
    assert_eq!(group.ranks[1].operation().unwrap().title(), "all_reduce #42");
}

#[test]
fn one_that_does_something_else_is_named() {
    let fake = Fake::new(3);
    for rank in 0..3 {
        fake.op(rank, Kind::AllReduce, 1, 20, Some(State::Done));
    }
    fake.op(0, Kind::AllGather, 2, 15, None);
    fake.op(1, Kind::AllGather, 2, 15, None);
    assert_eq!(
        fake.look(&[], &[]).summary,
        ["ranks 0 and 1 wait in all_gather #2 for rank 2 (host host-a, pid 802), \
          which sleeps outside of tensorwire after all_reduce #1, done 20 s ago"]
    );
}

/// Whether it computes or sleeps is said, and what would show where.
#[test]
fn one_that_computes_outside_is_told_from_one_that_sleeps() {
    let fake = Fake::new(3);
    fake.op(0, Kind::AllGather, 1, 15, None);
    let mut group = fake.read(&[], &[]);
    let show = |rank: &mut RankReport, process| {
        rank.process = process;
        rank.stacks = Some(format!("py-spy dump --pid {}", rank.pid));
    };
    show(&mut group.ranks[1], Process::Running);
    show(&mut group.ranks[2], Process::Blocked);
    waits::settle(&mut group, now());
    assert_eq!(
        group.summary,
        [
            "rank 0 waits in all_gather #1 for rank 1 (host host-a, pid 801), which computes outside of tensorwire \
          before its first operation (to see where: py-spy dump --pid 801); and for rank 2 (host host-a, pid 802), \
          which waits for a disk or a driver, outside of tensorwire before its first operation (to see where: \
          py-spy dump --pid 802)"
        ]
    );
    let mut group = Fake::new(3).read(&[], &[]);
    show(&mut group.ranks[0], Process::Running);
    show(&mut group.ranks[1], Process::Sleeping);
    show(&mut group.ranks[2], Process::Running);
    waits::settle(&mut group, now());
    assert_eq!(
        group.summary,
        [
            "no rank waits for another; ranks 0 and 2 compute outside of tensorwire (to see where: py-spy dump \
          --pid 800); rank 1 sleeps outside of tensorwire (to see where: py-spy dump --pid 801)"
        ]
    );
    let mut group = fake.read(&[], &[]);
    group.ranks[1].process = Process::Unknown;
    waits::settle(&mut group, now());
    let unseen = "which has not come (before its first operation; its process cannot be seen from here)";
    assert!(group.summary[0].contains(unseen), "{:?}", group.summary);
}

#[test]
fn one_that_never_came_is_named() {
    let fake = Fake::new(2);
    fake.op(1, Kind::Barrier, 1, 12, None);
    assert_eq!(
        fake.look(&[], &[]).summary,
        ["rank 1 waits in barrier #1 for rank 0 (host host-a, pid 800), \
          which sleeps outside of tensorwire before its first operation"]
    );
}

#[test]
fn chains_are_said_link_by_link() {
    let fake = Fake::new(3);
    fake.op(0, Kind::Reduce, 3, 11, None);
    fake.op(1, Kind::Reduce, 2, 11, None);
    fake.op(2, Kind::Reduce, 1, 11, Some(State::TimedOut));
    let summary = fake.look(&[], &[]).summary;
    assert_eq!(summary.len(), 2);
    assert!(
        summary[0].starts_with("rank 1 waits in reduce #2 for rank 2 (host host-a, pid 802), which sleeps")
    );
    assert!(summary[0].contains("after reduce #1, timed out 11 s ago"), "{summary:?}");
    assert!(
        summary[1]
            .contains("for rank 1 (host host-a, pid 801), which is still in reduce #2 for 11 s; and for")
    );
}

#[test]
fn one_stopped_in_the_same_operation_is_named() {
    let fake = Fake::new(3);
    (0..3).for_each(|rank| fake.op(rank, Kind::AllToAll, 9, 30, None));
    let all = fake.look(&[], &[]).summary;
    assert_eq!(
        all,
        ["ranks 0, 1 and 2 are in all_to_all #9 for 30 s; all ranks of this host have come to it"]
    );
    let one = fake.look(&[1], &[]).summary;
    assert!(one[0].starts_with("ranks 0 and 2 wait in all_to_all #9 for rank 1 (host"), "{one:?}");
    assert!(one[0].ends_with("which is stopped (SIGSTOP) in all_to_all #9 for 30 s"), "{one:?}");
}

#[test]
fn different_operations_of_one_number_are_seen() {
    let fake = Fake::new(3);
    fake.op(0, Kind::AllReduce, 9, 1, None);
    fake.op(1, Kind::Broadcast, 9, 1, None);
    let summary = fake.look(&[], &[]).summary;
    assert!(
        summary[0].contains("wait in operation #9 (not the same one on all ranks) for rank 2"),
        "{summary:?}"
    );
}

#[test]
fn a_failed_group_says_why() {
    let fake = Fake::new(2);
    fake.op(1, Kind::AllReduce, 1, 1, None);
    fake.op(0, Kind::AllReduce, 1, 1, Some(State::Failed));
    fake.controls[0].fail(Failure { cause: Cause::Died, rank: 1 }, "");
    let group = fake.look(&[], &[1]);
    assert_eq!(group.failure.as_deref(), Some("rank 1 (host host-a, pid 801) died: its process has ended"));
    assert_eq!(
        group.summary[0],
        "the group has failed: rank 1 (host host-a, pid 801) died: its process has ended"
    );
    let fake = Fake::new(2);
    fake.controls[1].fail(Failure { cause: Cause::Aborted, rank: 1 }, "no more data");
    let why = fake.look(&[], &[]).failure.unwrap();
    assert_eq!(why, "aborted: rank 1 (host host-a, pid 801) called abort(): no more data");
}

#[test]
fn messages_wait_for_their_peers() {
    let fake = Fake::new(3);
    fake.message(0, Kind::Recv, Some(1));
    fake.message(1, Kind::Recv, None);
    let group = fake.look(&[], &[]);
    assert!(group.summary[0].starts_with("rank 0 waits in recv #1 (tag 5) for a message from rank 1 (host"));
    assert_eq!(group.summary[1], "rank 1 waits in recv #1 (tag 5) for a message from any rank");
    assert_eq!(group.ranks[0].waits_for, [1]);
    // A message that both take part in is under way.
    let fake = Fake::new(2);
    fake.message(0, Kind::Recv, Some(1));
    fake.message(1, Kind::Send, Some(0));
    assert_eq!(fake.look(&[], &[]).summary, ["no rank waits for another"]);
    assert!(fake.look(&[1], &[]).summary[0].contains("which is stopped (SIGSTOP) in send #1"));
    let fake = Fake::new(2);
    fake.message(0, Kind::Recv, None);
    fake.message(1, Kind::Send, Some(0));
    assert_eq!(fake.look(&[], &[]).summary, ["no rank waits for another"]);
    assert_eq!(
        fake.look(&[1], &[]).summary[0],
        "rank 0 waits in recv #1 (tag 5) for a message from any rank"
    );
    // Each waits for the other.
    let fake = Fake::new(2);
    fake.message(0, Kind::Recv, Some(1));
    fake.message(1, Kind::Recv, Some(0));
    let group = fake.look(&[], &[]);
    assert_eq!((&group.ranks[0].waits_for[..], &group.ranks[1].waits_for[..]), (&[1][..], &[0][..]));
    assert_eq!(group.summary.len(), 2);
    assert!(
        group.summary[1]
            .contains("for a message from rank 0 (host host-a, pid 800), which is still in recv #1")
    );
}

/// Rank 0 works for all three. First the queue of rank 2 is missing, then nobody is, then rank 0 is done.
#[test]
fn queued_operations_wait_for_queues() {
    let fake = Fake::new(3);
    fake.queue(0, Kind::AllReduce, 12, 12, (false, true));
    (1..3).for_each(|rank| fake.queue(rank, Kind::AllReduce, 12, 12, (true, false)));
    fake.says(1, 12, Board::ARRIVED);
    let group = fake.look(&[], &[]);
    assert_eq!(
        group.summary,
        [
            "the queues of ranks 0 and 1 wait in all_reduce #12 for the queue of rank 2 (host host-a, pid 802), \
          which sleeps outside of tensorwire after all_reduce #12, queued 12 s ago; other work is before it on \
          that queue"
        ]
    );
    assert_eq!(
        group.ranks.iter().map(|rank| rank.waits_for.as_slice()).collect::<Vec<_>>(),
        [&[2][..], &[2], &[]]
    );
    assert!(group.ranks.iter().all(|rank| rank.doing == Doing::Idle));
    let queued = &group.ranks[1].queued;
    assert_eq!((queued.len(), &queued[0].standing), (1, &Standing::Queued(vec![2])));
    assert_eq!((queued[0].record.met, queued[0].record.queued), (Some(micros(2)), Some(micros(5))));
    let stopped = fake.look(&[2], &[]).summary;
    assert!(stopped[0].contains("which is stopped (SIGSTOP) after all_reduce #12, queued"), "{stopped:?}");
    fake.says(2, 12, Board::ARRIVED);
    let group = fake.look(&[], &[]);
    assert_eq!(group.ranks[2].queued[0].standing, Standing::Running(vec![0]));
    assert_eq!(group.ranks[2].waits_for, [0; 0]);
    assert_eq!(
        group.summary,
        [
            "no rank waits for another",
            "all_reduce #12 is running on the queue of rank 0, for ranks 0, 1 and 2; it was queued 12 s ago"
        ]
    );
    fake.says(0, 12, Board::DONE);
    let group = fake.look(&[], &[]);
    assert_eq!(group.ranks[0].queued[0].standing, Standing::Done);
    assert_eq!(
        group.summary[1],
        "all_reduce #12 is done on all queues; ranks 0, 1 and 2 have not seen it yet"
    );
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// A rank whose host has not queued its part yet is waited for, where its part is known to be needed.
#[test]
fn a_host_that_has_not_queued_is_waited_for() {
    for (kind, missing) in [(Kind::AllReduce, vec![1]), (Kind::Broadcast, vec![])] {
        let fake = Fake::new(2);
        fake.queue(0, kind, 3, 12, (false, true));
        fake.op(1, kind, 3, 12, None);
        let group = fake.look(&[1], &[]);
        assert_eq!(group.ranks[0].queued[0].standing, Standing::Queued(missing.clone()));
        assert_eq!(group.ranks[0].waits_for, missing);
        let said = group.summary.join("; ");
        match kind {
            Kind::AllReduce => assert!(
                said.ends_with(
                    "the queue of rank 0 waits in all_reduce #3 for the queue of rank 1 (host host-a, pid 801), which \
                     is stopped (SIGSTOP) in all_reduce #3 for 12 s"
                ),
                "{said}"
            ),
            _ => assert!(said.ends_with("broadcast #3 is queued on rank 0 for 12 s"), "{said}"),
        }
    }
}

/// Where streams do not wait, hosts wait in their place: the board knows for whose queue.
#[test]
fn hosts_that_wait_for_queues() {
    let fake = Fake::new(3);
    fake.meet(0, Kind::AllReduce, 12, 12, (false, true));
    (1..3).for_each(|rank| _ = fake.meet(rank, Kind::AllReduce, 12, 12, (true, false)));
    fake.says(1, 12, Board::ARRIVED);
    let group = fake.look(&[], &[]);
    assert_eq!(
        group.summary,
        [
            "the queues of ranks 0 and 1 wait in all_reduce #12 for the queue of rank 2 (host host-a, pid 802), \
          which is still in all_reduce #12 for 12 s"
        ]
    );
    assert!(group.ranks.iter().all(|rank| matches!(rank.doing, Doing::In(_))));
    assert_eq!((&group.ranks[0].waits_for[..], &group.ranks[2].waits_for[..]), (&[2][..], &[][..]));
    // One that is stopped keeps the others.
    let stopped = fake.look(&[2], &[]).summary;
    assert!(stopped[0].starts_with("ranks 0 and 1 wait in all_reduce #12 for rank 2 "), "{stopped:?}");
    fake.says(2, 12, Board::ARRIVED);
    let group = fake.look(&[], &[]);
    assert_eq!(group.ranks[1].queued[0].standing, Standing::Running(vec![0]));
    assert_eq!(group.summary[1], "all_reduce #12 is running on the queue of rank 0, for ranks 0, 1 and 2");
}

/// Many operations that stand in the same way are one sentence. All queues may have other work before.
#[test]
fn many_queued_operations_are_counted() {
    let fake = Fake::new(2);
    for number in 1..=32 {
        fake.queue(0, Kind::Reduce, number, 12, (false, true));
        fake.queue(1, Kind::Reduce, number, 12, (true, false));
    }
    fake.op(0, Kind::AllGather, 33, 1, None);
    let group = fake.look(&[], &[]);
    assert_eq!(group.ranks[1].queued.len(), 32);
    assert_eq!(group.ranks[0].operation().unwrap().title(), "all_gather #33");
    assert_eq!(group.ranks[1].operation().unwrap().title(), "reduce #1");
    assert_eq!(group.summary.len(), 2);
    let begin = "the queue of rank 0 waits in reduce #1 and 31 more operations for the queue of rank 1 (host";
    assert!(group.summary[1].starts_with(begin), "{:?}", group.summary);
    // A queue that has not come itself waits for nobody.
    let fake = Fake::new(2);
    (0..2).for_each(|rank| fake.queue(rank, Kind::Reduce, 1, 12, (true, true)));
    let group = fake.look(&[], &[]);
    assert_eq!(
        group.summary,
        ["reduce #1 is queued for 12 s; other work is before it on the queues of ranks 0 and 1"]
    );
    assert!(group.ranks.iter().all(|rank| rank.waits_for.is_empty()));
}

/// Words of the board are used again, and records may say anything.
#[test]
fn less_is_said_where_less_is_known() {
    let fake = Fake::new(2);
    fake.queue(0, Kind::AllReduce, 1, 12, (true, true));
    fake.queue(0, Kind::AllReduce, 129, 2, (true, true));
    let group = fake.look(&[], &[]);
    let standings: Vec<_> = group.ranks[0].queued.iter().map(|one| one.standing.clone()).collect();
    assert_eq!(standings, [Standing::Queued(vec![]), Standing::Queued(vec![0])]);
    // A world of one says nothing on the board.
    let fake = Fake::new(1);
    fake.queue(0, Kind::AllReduce, 1, 12, (false, false));
    fake.queue(0, Kind::Barrier, 2, 2, (false, false));
    let group = fake.look(&[], &[]);
    assert_eq!(group.ranks[0].queued[0].standing, Standing::Running(vec![]));
    assert_eq!(group.ranks[0].queued[1].standing, Standing::Running(vec![0]));
}

/// Many receives may be posted ahead: the oldest are said, the others counted.
#[test]
fn many_messages_are_counted() {
    let fake = Fake::new(2);
    (0..100).for_each(|_| fake.message(0, Kind::Recv, Some(1)));
    let group = fake.look(&[], &[]);
    assert_eq!(group.summary.len(), 5);
    assert_eq!(group.summary[4], "rank 0 waits in 96 more messages");
    assert_eq!(group.ranks[0].waits_for, [1]);
}

#[test]
fn barriers_left_and_idle_ranks() {
    let fake = Fake::new(3);
    assert_eq!(fake.look(&[], &[]).summary, ["no rank waits for another"]);
    fake.controls[0].come(1);
    let forming = fake.look(&[], &[]);
    assert_eq!(forming.ranks[0].doing, Doing::Barrier(None));
    assert!(forming.summary[0].starts_with("rank 0 waits in the forming of the group for rank 1"));
    fake.controls[0].release().signal(1);
    fake.controls[2].come(2);
    let barrier = fake.look(&[], &[]);
    assert_eq!(barrier.ranks[2].doing, Doing::Barrier(Some(1)));
    assert!(barrier.summary[0].starts_with("rank 2 waits in barrier #1 for rank 0"), "{:?}", barrier.summary);
    fake.controls[0].release().signal(2);
    fake.controls[1].leave();
    let left = fake.look(&[], &[]);
    assert_eq!(left.ranks[1].doing, Doing::Left);
    assert_eq!(left.summary, ["no rank waits for another; rank 1 has closed the group"]);
}

#[test]
fn lists_are_short() {
    let fake = Fake::new(9);
    (0..9).filter(|rank| *rank != 7).for_each(|rank| fake.op(rank, Kind::Barrier, 1, 1, None));
    assert!(fake.look(&[], &[]).summary[0].starts_with("ranks 0 to 6 and 8 wait in barrier #1 for rank 7"));
    let fake = Fake::new(9);
    fake.op(0, Kind::Barrier, 1, 1, None);
    assert!(fake.look(&[], &[]).summary[0].ends_with("; and for 4 more"));
}

#[test]
fn names_cannot_play_tricks_on_a_terminal() {
    let fake = Fake::new(1);
    let at = fake.controls[0].map().desk(0) + Desk::CARD;
    fake.controls[0].region().write(at, b"0\n1\n800\nho\x1b[31mst\ngr\x07oup\n\0").unwrap();
    let group = fake.look(&[], &[]);
    assert_eq!((group.name.as_str(), group.ranks[0].host.as_str()), ("gr\u{fffd}oup", "ho\u{fffd}[31mst"));
}

#[test]
fn times_are_short() {
    let texts =
        [0, 1_500, 20_000, 3_000_000, 1_250_000_000, 12_900_000_000, 200_000_000_000, 7_300_000_000_000];
    let texts = texts.map(|nanos| span(Duration::from_nanos(nanos)));
    assert_eq!(texts, ["0.0 us", "1.5 us", "20 us", "3 ms", "1.2 s", "12 s", "3 min 20 s", "2 h 1 min"]);
}

#[test]
fn corpus_of_status() {
    crate::store::fuzz::tests::replay("status", fuzz);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        failure_persistence: None,
        ..Default::default()
    })]

    /// A right head, and then anything.
    #[test]
    fn any_region_is_read(ranks in 1..4u32, rest in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..9000)) {
        let mut bytes = b"twcontrl".to_vec();
        bytes.extend(crate::wire::PROTOCOL.to_le_bytes());
        bytes.extend(ranks.to_le_bytes());
        bytes.extend(rest);
        fuzz(&bytes);
    }

    /// Records that are whole and say anything, and any words on the board.
    #[test]
    fn any_queue_is_read(
        records in proptest::collection::vec(
            (0..3usize, 0..14usize, proptest::prelude::any::<u64>(), 0..4u8), 0..60),
        near in proptest::prelude::any::<bool>(),
        words in proptest::collection::vec((0..3usize, 0..64u32, proptest::prelude::any::<u32>()), 0..60),
    ) {
        let fake = Fake::new(3);
        for (rank, kind, number, bits) in records {
            let number = if near { number % 64 } else { number };
            let kind = Kind::ALL[kind % Kind::ALL.len()];
            let recorder = &fake.recorders[rank];
            let mut begun = recorder.begin(entry(kind, number, now()));
            let says = Says { arrived: bits & 1 != 0, done: bits & 2 != 0 };
            recorder.met(&mut begun, says, now());
            recorder.queued(&mut begun, number);
        }
        for (rank, number, value) in words {
            let control = &fake.controls[rank];
            control.region().commit(control.map().board_lines()).unwrap();
            control.flag(control.map().board(rank, number) + Board::DONE * (value % 2) as usize).unwrap().store(value);
        }
        let group = fake.look(&[], &[]);
        proptest::prop_assert!(group.summary.len() <= 12);
    }
}
