//! Marks, queues that follow them, and operations that follow each other on one queue.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use tensorwire_device::clock::monotonic;
use tensorwire_device::flag::Writer;
use tensorwire_device::words::Words;
use tensorwire_device::{Abort, Caching, DeviceId, Error, Flag, Mark, Span};

use super::flags::lines;
use super::{Subject, noise};
use crate::process::soon;

/// A device that queues its work says so at once. One whose calls block has not come so far: then nothing is lost.
const AHEAD: Duration = Duration::from_millis(20);

pub fn a_mark_is_behind_what_was_queued(subject: &Subject) {
    let bytes = noise(3_000_001, 3);
    let (src, dst) = (subject.span(&bytes), subject.span(&vec![0; bytes.len()]));
    let mut queue = subject.device.queue().unwrap();
    let before = queue.mark().unwrap();
    queue.copy(dst.view(), src.view(), Caching::Keep).unwrap();
    let mark = queue.mark().unwrap();
    // It outlives the queue, and a copy of it is the same.
    drop(queue);
    mark.clone().wait(&Abort::local(), soon()).unwrap();
    assert!(dst.to_vec().unwrap() == bytes);
    assert!(mark.is_passed().unwrap() && before.is_passed().unwrap() && Mark::passed().is_passed().unwrap());
}

pub fn another_queue_follows_a_mark(subject: &Subject) {
    let lines = lines(3);
    let flag = Flag::new(&lines[0], Writer::Host).unwrap();
    let aborts = [&lines[1], &lines[2]].map(|line| Abort::new(line).unwrap());
    let bytes = noise(1 << 20, 4);
    let [first, second, third] = [0; 3].map(|_| subject.span(&vec![0; bytes.len()]));
    let source = subject.span(&bytes);
    std::thread::scope(|scope| {
        let (send, marks) = mpsc::channel();
        let (flag, aborts) = (&flag, &aborts);
        let (first, second) = (&first, &second);
        scope.spawn(move || {
            let mut queue = subject.device.queue().unwrap();
            queue.wait(flag, 1, &aborts[0], soon()).unwrap();
            queue.copy(first.view(), source.view(), Caching::Keep).unwrap();
            send.send(queue.mark().unwrap()).unwrap();
            // Behind the mark: nobody has to wait for it.
            queue.copy(second.view(), source.view(), Caching::Keep).unwrap();
            queue.finish(&aborts[0], soon()).unwrap();
        });
        let early = marks.recv_timeout(AHEAD).ok();
        let mut queue = subject.device.queue().unwrap();
        if let Some(mark) = &early {
            queue.follow(mark, &aborts[1], soon()).unwrap();
            queue.copy(third.view(), first.view(), Caching::Keep).unwrap();
        }
        flag.signal(1);
        if early.is_none() {
            queue.follow(&marks.recv().unwrap(), &aborts[1], soon()).unwrap();
            queue.copy(third.view(), first.view(), Caching::Keep).unwrap();
        }
        queue.finish(&aborts[1], soon()).unwrap();
    });
    for copy in [first, second, third] {
        assert!(copy.to_vec().unwrap() == bytes);
    }
    // What is passed holds nobody up.
    let mut queue = subject.device.queue().unwrap();
    let mark = queue.mark().unwrap();
    mark.wait(&Abort::local(), soon()).unwrap();
    for mark in [mark, Mark::passed()] {
        queue.follow(&mark, &Abort::local(), soon()).unwrap();
    }
}

/// Memory stays until what was queued before is done. It then goes, though nobody calls the queue again.
pub fn memory_is_kept_until_work_is_done(subject: &Subject) {
    let lines = lines(2);
    let (flag, abort) = (Flag::new(&lines[0], Writer::Host).unwrap(), Abort::new(&lines[1]).unwrap());
    let (send, kept) = mpsc::channel();
    std::thread::scope(|scope| {
        let (flag, abort) = (&flag, &abort);
        scope.spawn(move || {
            let mut queue = subject.device.queue().unwrap();
            let source = subject.span(&[7; 5000]);
            queue.wait(flag, 1, abort, soon()).unwrap();
            let memory = subject.span(&[0; 5000]);
            queue.copy(memory.view(), source.view(), Caching::Keep).unwrap();
            queue.keep(memory.region().clone()).unwrap();
            send.send((queue, Arc::downgrade(memory.region()))).unwrap();
        });
        let early = kept.recv_timeout(AHEAD).ok();
        if let Some((_, memory)) = &early {
            assert!(memory.upgrade().is_some());
        }
        flag.signal(1);
        let (_queue, memory) = early.unwrap_or_else(|| kept.recv().unwrap());
        let end = soon();
        while memory.upgrade().is_some() {
            assert!(!end.passed(), "it stays");
            std::thread::yield_now();
        }
    });
}

/// Each operation has a verdict of its own, beside the word that all share. What has become of an earlier one is not the
/// concern of a later one.
pub fn operations_with_their_own_abort_words_follow_each_other(subject: &Subject) {
    const OPERATIONS: usize = 9;
    let lines = lines(2 * OPERATIONS + 1);
    let (flags, words) = lines.split_at(OPERATIONS);
    let flags: Vec<_> = flags.iter().map(|line| Flag::new(line, Writer::Host).unwrap()).collect();
    let words: Vec<_> = words.iter().map(|line| Abort::new(line).unwrap()).collect();
    let (group, verdicts) = words.split_last().unwrap();
    let sources: Vec<Span> = (0..OPERATIONS).map(|i| subject.span(&[i as u8 + 1; 5000])).collect();
    let results: Vec<Span> = (0..OPERATIONS).map(|_| subject.span(&[0; 5000])).collect();
    // This one is given up before it is queued.
    verdicts[4].set(7);
    let (send, queued) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = subject.device.queue().unwrap();
            for i in 0..OPERATIONS {
                queue.begin(None).unwrap();
                let abort = verdicts[i].or(group);
                let waited = queue.wait_all(&[(&flags[i], 1)], &abort, soon());
                if i == 4 {
                    assert!(matches!(waited, Err(Error::Aborted)), "{waited:?}");
                    continue;
                }
                waited.unwrap();
                queue.copy(results[i].view(), sources[i].view(), Caching::Keep).unwrap();
            }
            send.send(()).unwrap();
            queue.finish(group, soon()).unwrap();
        });
        let _ = queued.recv_timeout(AHEAD);
        for (_, flag) in flags.iter().enumerate().filter(|(i, _)| *i != 4) {
            flag.signal(1);
        }
    });
    for (i, result) in results.iter().enumerate() {
        let expected = if i == 4 { 0 } else { i as u8 + 1 };
        assert!(result.to_vec().unwrap() == [expected; 5000], "operation {i}");
    }
    assert!(!group.is_set());
}

/// By the host's clock, whatever clock the device has. What is said ends with the piece of work.
#[allow(clippy::print_stdout)]
pub fn work_says_when_it_ended(subject: &Subject) {
    /// Two clocks were compared a while ago. A device that waits for its turn may have been compared badly.
    const APART: u64 = 10_000_000;
    let lines = lines(2);
    let (abort, place) = (Abort::new(&lines[0]).unwrap(), lines[1].slice(8..16).unwrap());
    let time = Words::new(&place).unwrap();
    let bytes = noise(1 << 20, 5);
    let source = subject.span(&bytes);
    let [first, second] = [0; 2].map(|_| subject.span(&vec![0; bytes.len()]));
    let mut queue = subject.device.queue().unwrap();
    let mut last = 0;
    for _ in 0..3 {
        queue.begin(Some(&abort)).unwrap();
        queue.stamp(&place).unwrap();
        let before = monotonic();
        let copies = [(first.view(), source.view()), (second.view(), source.view())];
        queue.copy_all(&copies, Caching::Keep).unwrap();
        queue.finish(&abort, soon()).unwrap();
        let (after, said) = (monotonic(), time.load(0));
        if subject.device.id() == DeviceId::Host {
            assert_eq!(said, 0, "its caller sees the end himself");
            continue;
        }
        assert!(said != last && said != 0, "nothing was said");
        let inside = before - APART..after + APART;
        assert!(inside.contains(&said), "{said} is not between {before} and {after}");
        println!(
            "from the call {} ns, to the look {} ns",
            said.wrapping_sub(before) as i64,
            after.wrapping_sub(said) as i64
        );
        last = said;
    }
    queue.begin(Some(&abort)).unwrap();
    queue.copy_all(&[(first.view(), source.view())], Caching::Keep).unwrap();
    queue.finish(&abort, soon()).unwrap();
    assert_eq!(time.load(0), last, "another piece of work has said something");
    // Not everywhere can a time be written.
    let odd = [lines[1].slice(4..12), lines[1].slice(8..12)];
    let refused = odd.into_iter().all(|odd| queue.stamp(&odd.unwrap()).is_err());
    assert!(refused || subject.device.id() == DeviceId::Host);
}
