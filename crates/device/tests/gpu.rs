//! The cache of answers about GPUs, with a scripted probe.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use tensorwire_device::gpu::{Access, Answers, Gpu, Probe};
use tensorwire_device::{Deadline, DeviceId, Error, Result};

/// Counts every question.
#[derive(Debug, Default)]
struct Scripted {
    gpus: u8,
    broken: bool,
    lies: bool,
    asked: Mutex<Vec<String>>,
}

fn id(number: u8) -> DeviceId {
    DeviceId::Gpu([number; 16])
}

impl Scripted {
    fn new(gpus: u8) -> Arc<Self> {
        Arc::new(Self { gpus, ..Self::default() })
    }

    fn note(&self, question: String) {
        self.asked.lock().unwrap().push(question);
    }

    fn times(&self, question: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| *asked == question).count()
    }
}

fn number(id: &DeviceId) -> u8 {
    match id {
        DeviceId::Gpu(uuid) => uuid[0],
        _ => unreachable!("only GPUs are asked about"),
    }
}

impl Probe for Scripted {
    fn gpus(&self) -> Result<Vec<Gpu>> {
        self.note("gpus".into());
        if self.broken {
            return Err(Error::Unsupported { what: "x".into(), need: "y".into(), have: "z".into() });
        }
        let gpu = |number| Gpu::new(id(number), "scripted", format!("0000:{number:02x}:00.0"));
        Ok((0..self.gpus).map(gpu).collect())
    }

    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        self.note(format!("peer {} {}", number(from), number(to)));
        // Slow, so that others arrive meanwhile.
        std::thread::sleep(Duration::from_millis(2));
        if number(from) < number(to) { Access::Yes } else { Access::no("downhill") }
    }

    fn open_peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        self.note(format!("open {} {}", number(from), number(to)));
        if number(to) == 3 { Access::no("too many peers: copies are staged") } else { Access::Yes }
    }

    fn check_peer(&self, from: &DeviceId, to: &DeviceId, deadline: Deadline) -> Access {
        self.note(format!("check {} {}", number(from), number(to)));
        match (deadline.passed(), self.lies) {
            (true, _) => Access::Unknown,
            (false, true) => Access::no("byte 17 is wrong"),
            (false, false) => Access::Yes,
        }
    }

    fn fabric(&self, of: &DeviceId) -> Access {
        self.note(format!("fabric {}", number(of)));
        Access::no("refused")
    }

    fn multicast(&self, of: &DeviceId) -> Access {
        self.note(format!("multicast {}", number(of)));
        Access::Unknown
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

#[test]
fn every_pair_is_asked_once_by_many_threads() {
    let probe = Scripted::new(4);
    let answers = Answers::new(probe.clone());
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (answers, start) = (&answers, &start);
            scope.spawn(move || {
                start.wait();
                for step in 0..16 {
                    let pair = (step + thread * 5) % 16;
                    let (from, to) = (pair / 4, pair % 4);
                    let expected = match from {
                        _ if from == to => Access::Yes,
                        _ if from < to => Access::Yes,
                        _ => Access::no("downhill"),
                    };
                    assert_eq!(answers.peer(from, to).unwrap(), &expected);
                    assert_eq!(answers.fabric(to).unwrap(), &Access::no("refused"));
                    assert_eq!(answers.multicast(to).unwrap(), &Access::Unknown);
                }
            });
        }
    });
    assert_eq!(probe.times("gpus"), 1);
    for from in 0..4 {
        assert_eq!(
            (probe.times(&format!("fabric {from}")), probe.times(&format!("multicast {from}"))),
            (1, 1)
        );
        for to in 0..4 {
            assert_eq!(probe.times(&format!("peer {from} {to}")), usize::from(from != to), "{from} {to}");
        }
    }
}

#[test]
fn nothing_is_asked_before_it_is_needed() {
    let probe = Scripted::new(2);
    let answers = Answers::new(probe.clone());
    assert_eq!(probe.times("gpus"), 0);
    answers.peer(0, 1).unwrap();
    assert_eq!(probe.asked.lock().unwrap().as_slice(), ["gpus", "peer 0 1"]);
}

#[test]
fn a_gpu_that_is_not_there_is_an_error() {
    let answers = Answers::new(Scripted::new(2));
    for (from, to) in [(2, 0), (0, 2), (usize::MAX, usize::MAX)] {
        let error = answers.peer(from, to).unwrap_err();
        assert!(matches!(&error, Error::Misuse(text) if text.contains("this process has 0 to 1")), "{error}");
        assert!(answers.open_peer(from, to).is_err() && answers.check_peer(from, to, soon()).is_err());
    }
    assert!(answers.fabric(2).is_err() && answers.multicast(2).is_err());
    assert!(Answers::new(Scripted::new(0)).fabric(0).unwrap_err().to_string().contains("has none"));
    assert_eq!(answers.index(&id(1)).unwrap(), 1);
    assert!(answers.index(&id(9)).unwrap_err().to_string().contains("none of the 2 GPUs"));
    assert!(answers.index(&DeviceId::Host).is_err());
}

#[test]
fn access_is_opened_once_and_only_where_it_is_possible() {
    let probe = Scripted::new(4);
    let answers = Answers::new(probe.clone());
    for _ in 0..3 {
        assert!(answers.open_peer(0, 1).unwrap().is_yes());
        assert_eq!(answers.open_peer(1, 0).unwrap().reason(), Some("downhill"));
        assert_eq!(answers.open_peer(0, 3).unwrap().reason(), Some("too many peers: copies are staged"));
        assert!(answers.open_peer(2, 2).unwrap().is_yes());
    }
    let counts = ["open 0 1", "open 1 0", "open 0 3", "open 2 2"].map(|question| probe.times(question));
    assert_eq!(counts, [1, 0, 1, 0]);
}

#[test]
fn a_check_that_fails_overrules_the_driver() {
    let probe = Arc::new(Scripted { gpus: 2, lies: true, ..Scripted::default() });
    let answers = Answers::new(probe.clone());
    assert!(answers.peer(0, 1).unwrap().is_yes());
    let passed = Deadline::after(Duration::ZERO);
    assert_eq!(answers.check_peer(0, 1, passed).unwrap(), Access::Unknown);
    assert!(answers.peer(0, 1).unwrap().is_yes(), "what could not be tried changes nothing");
    for _ in 0..2 {
        assert_eq!(answers.check_peer(0, 1, soon()).unwrap().reason(), Some("byte 17 is wrong"));
    }
    assert_eq!(answers.peer(0, 1).unwrap().reason(), Some("byte 17 is wrong"));
    assert_eq!(answers.open_peer(0, 1).unwrap().reason(), Some("byte 17 is wrong"));
    assert_eq!((probe.times("check 0 1"), probe.times("open 0 1")), (2, 0));
    assert_eq!(answers.check_peer(1, 0, soon()).unwrap().reason(), Some("downhill"), "a no needs no check");
    assert_eq!(probe.times("check 1 0"), 0);
}

#[test]
fn a_probe_that_fails_says_so_to_everybody() {
    let probe = Arc::new(Scripted { broken: true, ..Scripted::default() });
    let answers = Answers::new(probe.clone());
    for _ in 0..2 {
        assert!(matches!(answers.peer(0, 0), Err(Error::Unsupported { .. })));
    }
    assert_eq!(probe.times("gpus"), 1);
}
