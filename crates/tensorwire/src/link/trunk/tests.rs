//! Trunks between this process and others that the tests play.

use std::net::{TcpListener, TcpStream};

use super::*;

pub(crate) const GROUP: Id = Id([7; 16]);
const OTHER: Id = Id([8; 16]);
const US: Id = Id([1; 16]);
const PATIENCE: Duration = Duration::from_secs(60);

fn secret(group: Id) -> Secret {
    Secret::from_bytes([group.0[0]; 32])
}

/// A process of another host, with a trunk to the one under test.
pub(crate) struct Far {
    pub(crate) number: Number,
    trunks: Trunks,
    ours: Number,
}

impl Far {
    /// What it hears next.
    pub(crate) fn hears(&mut self) -> What {
        eventually(|| self.trunks.hear(self.ours, Instant::now()))
    }

    /// What it is told next in the group.
    pub(crate) fn said(&mut self) -> Vec<u8> {
        match self.hears() {
            What::Said(GROUP, bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }
}

/// What comes next, and on which trunk.
fn next(trunks: &mut Trunks) -> (Number, What) {
    eventually(|| {
        let mut numbers = trunks.numbers().into_iter();
        numbers.find_map(|number| Some((number, trunks.hear(number, Instant::now())?)))
    })
}

fn eventually<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, theirs)
}

fn line(socket: TcpStream) -> TcpLine {
    TcpLine::new(Stream::new(socket).unwrap(), None, Id([9; 16]))
}

/// Two ends of a trunk in which nobody talks.
fn quiet(number: u8) -> (Trunks, Far) {
    let (mut near, mut far) = (Trunks::new(US), Trunks::new(Id([2 + number; 16])));
    let (ours, theirs) = sockets();
    let ours =
        (near.add(far.identity, line(ours), Instant::now()), far.add(US, line(theirs), Instant::now()));
    (near, Far { number: ours.0, trunks: far, ours: ours.1 })
}

/// Our trunks, and processes that talk with us in the group.
pub(crate) fn trunks(count: u8) -> (Trunks, Vec<Far>) {
    let mut near = Trunks::new(US);
    let fars = (0..count).map(|number| {
        let (mut alone, mut far) = quiet(number);
        far.number =
            near.add(far.trunks.identity, alone.all.remove(&far.number).unwrap().line, Instant::now());
        meet(&mut near, &mut far, GROUP);
        far
    });
    let fars = fars.collect();
    (near, fars)
}

/// Has a far process join a group.
fn meet(near: &mut Trunks, far: &mut Far, group: Id) {
    assert!(far.trunks.ask(far.ours, group, &secret(group)));
    far.trunks.flush();
    let (number, asked) = next(near);
    let What::Asked(asked, proof) = asked else { panic!("{asked:?}") };
    assert_eq!((number, asked), (far.number, group));
    assert!(near.proves(number, group, &secret(group), Role::Asks, &proof));
    near.admit(number, group, &secret(group));
    near.flush();
    let What::Joined(joined, proof) = far.hears() else { panic!("it has not joined") };
    assert_eq!(joined, group);
    assert!(far.trunks.proves(far.ours, group, &secret(group), Role::Answers, &proof));
    far.trunks.joined(far.ours, group);
}

#[test]
fn groups_share_a_trunk() {
    let (mut near, mut fars) = trunks(1);
    let far = &mut fars[0];
    meet(&mut near, far, OTHER);
    for (group, word) in [(GROUP, b"one"), (OTHER, b"two")] {
        near.say(far.number, group, word);
        near.flush();
        assert_eq!(far.hears(), What::Said(group, word.to_vec()));
        far.trunks.say(far.ours, group, word);
        far.trunks.flush();
        assert_eq!(next(&mut near), (far.number, What::Said(group, word.to_vec())));
    }
    assert_eq!(near.to(far.trunks.identity), Some(far.number));
    assert_eq!(near.streams().count(), 1);
}

/// A proof is worth something for one group, one way, and one connection.
#[test]
fn proofs_are_for_one_purpose() {
    let (mut near, mut far) = quiet(0);
    far.trunks.ask(far.ours, GROUP, &secret(GROUP));
    far.trunks.flush();
    let (number, what) = next(&mut near);
    let What::Asked(_, proof) = what else { panic!("{what:?}") };
    let proves = |group, known, role| near.proves(number, group, &secret(known), role, &proof);
    assert!(proves(GROUP, GROUP, Role::Asks));
    assert!(!proves(GROUP, OTHER, Role::Asks));
    assert!(!proves(OTHER, GROUP, Role::Asks));
    assert!(!proves(GROUP, GROUP, Role::Answers));
    // Its own proof, sent back to it.
    assert!(!far.trunks.proves(far.ours, GROUP, &secret(GROUP), Role::Asks, &proof));
    let (mut third, _) = quiet(0);
    let (socket, _theirs) = sockets();
    let other = TcpLine::new(Stream::new(socket).unwrap(), None, Id([10; 16]));
    let other = third.add(far.trunks.identity, other, Instant::now());
    assert!(!third.proves(other, GROUP, &secret(GROUP), Role::Asks, &proof));
}

/// What is said in a group before both have joined it, or after one has parted, is not heard.
#[test]
fn nobody_hears_who_has_not_joined() {
    let (mut near, mut far) = quiet(0);
    near.say(far.number, GROUP, b"early");
    near.flush();
    far.trunks.ask(far.ours, GROUP, &secret(GROUP));
    far.trunks.flush();
    assert!(matches!(next(&mut near).1, What::Asked(GROUP, _)));
    near.say(far.number, GROUP, b"early, too");
    near.refuse(far.number, GROUP);
    near.flush();
    assert_eq!(far.hears(), What::Refused(GROUP));
    // It has asked in vain: it does not keep the connection.
    far.trunks.look_after(PATIENCE, Instant::now());
    assert_eq!(far.trunks.to(US), None);
    assert_eq!(next(&mut near), (far.number, What::Ended(End::Lost, vec![])));
}

/// The last group that parts closes the connection, on both sides, and nobody calls that a death.
#[test]
fn the_last_one_closes_it() {
    let (mut near, mut fars) = trunks(1);
    let mut far = fars.pop().unwrap();
    let now = Instant::now();
    near.say(far.number, GROUP, b"last words");
    near.part(GROUP);
    near.look_after(PATIENCE, now);
    assert_eq!(near.to(far.trunks.identity), None);
    assert_eq!(far.said(), b"last words");
    assert_eq!(far.hears(), What::Parted(GROUP));
    // A group that asks on a connection that is about to be closed hears its end, and makes another one.
    far.trunks.ask(far.ours, OTHER, &secret(OTHER));
    far.trunks.flush();
    let What::Ended(End::Lost, mut groups) = far.hears() else { panic!("it goes on") };
    groups.sort();
    assert_eq!(groups, [GROUP, OTHER]);
    assert_eq!(next(&mut near), (far.number, What::Ended(End::Lost, vec![])));
    assert!(near.is_empty());
}

#[test]
fn a_connection_in_which_nobody_talks_goes() {
    let (mut near, far) = quiet(0);
    assert_eq!(near.look_after(PATIENCE, Instant::now()), None);
    assert_eq!(near.to(far.trunks.identity), Some(far.number));
    near.look_after(PATIENCE, Instant::now() + super::PATIENCE * 2);
    assert_eq!(near.to(far.trunks.identity), None);
    // The other side does not close it: it goes all the same.
    let ended = near.look_after(PATIENCE, Instant::now() + super::PATIENCE * 4);
    assert_eq!(ended, Some((far.number, What::Ended(End::Silent, vec![]))));
}

#[test]
fn silence_and_a_reader_that_does_not_read() {
    let (mut near, mut fars) = trunks(2);
    let late = Instant::now() + PATIENCE * 2;
    // Both have said something; then one beats again.
    fars[1].trunks.look_after(PATIENCE, Instant::now());
    eventually(|| {
        near.hear(fars[1].number, late);
        near.all[&fars[1].number].heard.filter(|heard| *heard == late)
    });
    assert_eq!(
        near.look_after(PATIENCE, late),
        Some((fars[0].number, What::Ended(End::Silent, vec![GROUP])))
    );
    assert_eq!(near.look_after(PATIENCE, late), None);
    for _ in 0..(96 << 20) / MOST {
        near.say(fars[1].number, GROUP, &[0; MOST]);
    }
    assert_eq!(
        near.look_after(PATIENCE, late),
        Some((fars[1].number, What::Ended(End::Silent, vec![GROUP])))
    );
}

#[test]
fn frames_that_are_not_as_agreed_end_the_connection() {
    let frame = |kind: u8, body: &[u8]| frame_of(kind, GROUP, body);
    let flipped = |at: usize| {
        let mut bytes = frame(SAY, b"words");
        bytes[at] ^= 1;
        bytes
    };
    let wrong = [
        vec![0; 8],
        vec![0xff; 64],
        frame::piece(HEAD + MOST + 1).to_vec(),
        frame(0, &[]),
        frame(77, &[]),
        frame(JOIN, &[1; 31]),
    ];
    let wrong = wrong.into_iter().chain((0..frame(SAY, b"words").len()).map(flipped));
    for bytes in wrong {
        let (mut near, far) = quiet(0);
        far.trunks.all[&far.ours].line.stream().send(&bytes, None, &[]).unwrap();
        let ended = next(&mut near);
        assert_eq!(ended, (far.number, What::Ended(End::Nonsense, vec![])), "{bytes:?}");
    }
}

/// The seeds of the fuzzer are frames of this version.
#[test]
fn the_corpus_is_of_this_version() {
    let read = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/group_links/");
        std::fs::read(format!("{folder}{name}")).unwrap()
    };
    for (name, kind) in [("beats", BEAT), ("join", JOIN), ("said_fail", SAY), ("refused", REFUSED)] {
        assert!(matches!(take_frame(&mut read(name)), Ok(Some((seen, ..))) if seen == kind), "{name}");
    }
    assert_eq!(take_frame(&mut read("flipped")), Err(End::Nonsense));
}
