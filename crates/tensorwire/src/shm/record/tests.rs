use std::time::Instant;

use proptest::prelude::*;
use tensorwire_device::host::Host;

use super::*;

/// The control region of two ranks, as each of them sees it.
fn region() -> [Arc<Control>; 2] {
    let memory = Control::alloc(&Host, 2, 2).unwrap();
    [0, 1].map(|rank| Arc::new(Control::open(memory.clone(), vec![0, 1], (rank, 2)).unwrap()))
}

fn entry(number: u64) -> Entry {
    Entry {
        number,
        kind: Kind::AllReduce,
        dtype: Some(Dtype::Bf16),
        op: Some(ReduceOp::PremulSum(0.5)),
        root_or_peer: Some(3),
        tag: 0,
        bytes: 1 << 40,
        path: Some(Path::Staged),
        now: 1000 + number,
    }
}

#[test]
fn a_record_comes_back() {
    let [mine, theirs] = region();
    let recorder = Recorder::new(&mine).unwrap();
    assert_eq!(recorder.last(10), []);
    assert_eq!(records_of(&theirs, 0), []);
    let mut begun = recorder.begin(entry(42));
    let running = Record {
        serial: 1,
        number: 42,
        kind: Kind::AllReduce,
        dtype: Some(Dtype::Bf16),
        op: Some("PREMUL_SUM"),
        peer: Some(3),
        tag: 0,
        bytes: 1 << 40,
        path: Some(Path::Staged),
        detour: None,
        state: State::Running,
        begun: 1042,
        met: None,
        queued: None,
        took: None,
        says: None,
    };
    assert_eq!(records_of(&theirs, 0), std::slice::from_ref(&running));
    recorder.via(&mut begun, Path::Direct);
    let running = Record { path: Some(Path::Direct), ..running };
    assert_eq!(records_of(&theirs, 0), std::slice::from_ref(&running));
    recorder.not_direct(&mut begun, Detour::Other);
    let running = Record { detour: Some(Detour::Other), ..running };
    assert_eq!(records_of(&theirs, 0), std::slice::from_ref(&running));
    recorder.end(&begun, State::TimedOut, 1542);
    let ended = Record { state: State::TimedOut, took: Some(Duration::from_nanos(500)), ..running };
    assert_eq!(records_of(&theirs, 0), std::slice::from_ref(&ended));
    assert_eq!(recorder.last(1), [ended]);
    assert_eq!(recorder.last(0), []);
}

#[test]
fn what_nobody_committed_stays_uncommitted() {
    let [mine, theirs] = region();
    let blocks = |control: &Control| {
        let handle = control.region().export().unwrap();
        rustix::fs::fstat(handle.fd().unwrap()).unwrap().st_blocks
    };
    let before = blocks(&mine);
    assert_eq!(records_of(&mine, 1), []);
    assert_eq!(blocks(&mine), before);
    let _recorder = Recorder::new(&theirs).unwrap();
    assert!(blocks(&mine) >= before + (RECORDS / 512) as i64);
}

#[test]
fn the_ring_goes_round() {
    let [mine, theirs] = region();
    let recorder = Recorder::new(&mine).unwrap();
    let stuck = recorder.begin(entry(1));
    for number in 2..=LENGTH as u64 + 10 {
        let begun = recorder.begin(entry(number));
        recorder.end(&begun, State::Done, 5000);
    }
    let records = records_of(&theirs, 0);
    assert_eq!(records.len(), LENGTH);
    let numbers: Vec<u64> = records.iter().map(|record| record.number).collect();
    assert_eq!(numbers, (11..=LENGTH as u64 + 10).collect::<Vec<_>>());
    // The one that was overwritten ends without a trace.
    recorder.end(&stuck, State::Failed, 9000);
    assert_eq!(records_of(&theirs, 0), records);
    assert_eq!(
        recorder.last(3).iter().map(|record| record.number).collect::<Vec<_>>(),
        numbers[LENGTH - 3..]
    );
}

#[test]
fn threads_record_at_once() {
    let [mine, theirs] = region();
    let recorder = Recorder::new(&mine).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let recorder = &recorder;
            scope.spawn(move || {
                for number in 0..300 {
                    let begun = recorder.begin(entry(thread * 1000 + number));
                    recorder.end(&begun, State::Done, now());
                }
            });
        }
        // Whatever a reader sees meanwhile is a record that somebody wrote.
        for _ in 0..20 {
            for record in records_of(&theirs, 0) {
                assert_eq!((record.begun, record.bytes), (1000 + record.number, 1 << 40));
            }
        }
    });
    let records = records_of(&theirs, 0);
    assert_eq!(records.len(), 1200);
    assert!(records.iter().all(|record| record.state == State::Done));
}

/// An operation that is queued keeps its times to the end.
#[test]
fn times_come_back() {
    let [mine, theirs] = region();
    let recorder = Recorder::new(&mine).unwrap();
    let mut begun = recorder.begin(entry(7));
    let says = Says { arrived: true, done: false };
    recorder.met(&mut begun, says, 1007);
    let read = || records_of(&theirs, 0).remove(0);
    let met = read();
    assert_eq!((met.state, met.met, met.queued), (State::Met, Some(Duration::from_nanos(1)), None));
    assert_eq!((met.says, met.tag, met.left_at()), (Some(says), 0, None));
    recorder.queued(&mut begun, 1007 + 9_000);
    let queued = read();
    assert_eq!((queued.state, queued.took), (State::Queued, None));
    assert_eq!((queued.met, queued.queued), (met.met, Some(Duration::from_micros(9))));
    assert_eq!(queued.left_at(), Some(1007 + 9_000));
    recorder.end(&begun, State::Done, 1007 + 20_000);
    let done = read();
    assert_eq!(done, Record { state: State::Done, took: Some(Duration::from_micros(20)), ..queued });
    // What is not queued has none, and a message has its tag.
    recorder.end(&recorder.begin(entry(8)), State::Done, 2000);
    recorder.begin(Entry { kind: Kind::Recv, tag: u64::MAX, ..entry(1) });
    let records = records_of(&theirs, 0);
    assert_eq!((records[1].met, records[1].queued, records[1].says), (None, None, None));
    assert_eq!((records[2].tag, records[2].met, records[2].queued), (u64::MAX, None, None));
}

#[test]
fn short_numbers_are_near() {
    assert_eq!((0..1 << 21).find(|&number| long(short(number)) != number), None);
    for number in [1 << 21, (1 << 21) + 1, 1_234_567_890, 3_600_000_000_007, (1 << 52) - 1] {
        let back = long(short(number));
        assert!(back <= number && number - back <= number >> 20, "{number} is {back}");
    }
    assert_eq!(long(short(u64::MAX)), long(SHORT));
}

/// A line of which only a part has arrived is no record, or one without times.
#[test]
fn half_a_line_is_recognised() {
    let mut begun = Begun { serial: 5, at: 0, path: None, detour: None, times: Times::default() };
    let mut ended = encode(5, &entry(5));
    ended[END..].copy_from_slice(&end_word(State::Done, &begun, 77).to_le_bytes());
    begun.times = Times { met: 5, queued: 6, says: Some(Says { arrived: true, done: true }) };
    let mut queued = ended;
    queued[TAG..][..8].copy_from_slice(&begun.times.to_word(5).to_le_bytes());
    assert_eq!(decode(&queued).unwrap().queued, Some(Duration::from_nanos(6)));
    let new = encode(5 + LENGTH as u64, &entry(5 + LENGTH as u64));
    for (parts, old) in (1..255u8).flat_map(|parts| [(parts, ended), (parts, queued)]) {
        let mut line = old;
        for word in (0..8).filter(|word| parts >> word & 1 != 0) {
            line[8 * word..][..8].copy_from_slice(&new[8 * word..][..8]);
        }
        match decode(&line) {
            None => {}
            Some(record) if record.serial == 5 => assert!(line == old || Some(record) == decode(&ended)),
            Some(record) => assert_eq!(Some(record), decode(&new)),
        }
    }
}

#[test]
fn every_op_has_its_name() {
    for op in ReduceOp::ALL {
        let record = decode(&encode(1, &Entry { op: Some(op), ..entry(1) })).unwrap();
        assert_eq!(record.op, Some(op.name()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        parse(&bytes);
    }

    #[test]
    fn any_record_with_a_right_check_is_read(words in any::<[u64; 6]>(), end in any::<u64>()) {
        let mut line = [0; LINE];
        let mut checked = words;
        if Kind::from_code((words[5] >> 32) as u8).is_some_and(|kind| !is_message(kind)) {
            checked[TAG / 8] = 0;
        }
        let words = words.into_iter().chain([check(&checked), end]);
        for (to, word) in line.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        if let Some(record) = decode(&line) {
            let _ = (record.title(), record.ended(), record.left_at());
        }
    }
}

/// What a record costs, clocks included; `--nocapture` shows it.
#[test]
fn cost() {
    let [mine, _] = region();
    let recorder = Recorder::new(&mine).unwrap();
    let rounds = 200_000;
    let start = Instant::now();
    for number in 0..rounds {
        let begun = recorder.begin(Entry { now: now(), ..entry(number) });
        recorder.end(&begun, State::Done, now());
    }
    let with_clocks = start.elapsed();
    let start = Instant::now();
    for number in 0..rounds {
        let begun = recorder.begin(Entry { now: number, ..entry(number) });
        recorder.end(&begun, State::Done, number);
    }
    let each = |time: Duration| time.as_nanos() as f64 / rounds as f64;
    println!("a record: {:.1} ns, with two clocks {:.1} ns", each(start.elapsed()), each(with_clocks));
}
