//! The rules of a star, with what a test says in the place of other leaders.

use proptest::prelude::*;
use tensorwire_device::host::Host;

use super::*;
use crate::link::trunk::What;
use crate::link::trunk::tests::{Far, GROUP, trunks};
use crate::shm::control::{Note, Verdict, Why};

fn control() -> Control {
    Control::open(Control::alloc(&Host, 1, 2).unwrap(), vec![0], (0, 2)).unwrap()
}

/// A star with one link to rank 1, and that rank.
fn star(hub: bool) -> (Star, Control, Trunks, Far) {
    let (mut trunks, mut far) = trunks(1);
    let far = far.pop().unwrap();
    let star = Star::new(GROUP, hub, vec![Link::new(far.number, 1)]);
    trunks.flush();
    (star, control(), trunks, far)
}

fn cause(control: &Control) -> Option<Cause> {
    control.failure().map(|failure| {
        assert_eq!(failure.rank, 1);
        failure.cause
    })
}

#[test]
fn what_is_not_as_agreed_ends_the_talk() {
    let wrong: [&[u8]; 7] = [
        &[],
        &[77],
        &[FAIL],
        &[ARRIVE, 1],
        &[ADDRESS, 0, 0, 0, 0, 0, 0, 0, 0],
        &[REFUSE, 1, 0, 0, 0],
        &[REFUSE, 1, 0, 0, 0, 7, 0, 0, 0, 1, 9, 9, 9, 9, 0, 0],
    ];
    for bytes in wrong {
        let (mut star, control, mut trunks, far) = star(true);
        star.hear(far.number, bytes, &control, &mut trunks);
        assert_eq!(cause(&control), Some(Cause::Misbehaved), "{bytes:?}");
        assert!(!star.links[0].open);
    }
    // Only the hub releases, and only to it others arrive.
    for (hub, kind) in
        [(true, RELEASE), (false, ARRIVE), (true, VERDICT), (false, REFUSE), (true, ASK), (false, ABSENT)]
    {
        let (mut star, control, mut trunks, far) = star(hub);
        star.hear(far.number, &frame(kind, |body| body.u32(1)), &control, &mut trunks);
        assert_eq!(cause(&control), Some(Cause::Misbehaved));
    }
}

#[test]
fn the_end_of_a_trunk_is_a_death() {
    for (end, wanted) in
        [(End::Lost, Cause::Died), (End::Silent, Cause::Silent), (End::Nonsense, Cause::Misbehaved)]
    {
        let (mut star, control, _trunks, far) = star(true);
        star.ended(far.number + 1, end, &control);
        assert_eq!(cause(&control), None);
        star.ended(far.number, end, &control);
        assert_eq!(cause(&control), Some(wanted));
    }
}

#[test]
fn a_farewell_is_none_until_it_is_needed() {
    let (mut star, control, mut trunks, far) = star(true);
    star.parted(far.number, &control);
    star.ended(far.number, End::Lost, &control);
    assert_eq!(cause(&control), None);
    star.arrive(1, &control, &mut trunks);
    assert_eq!(cause(&control), Some(Cause::Left));
}

/// Why a rank leaves, and that it has left, in this order; then a rank fails the group and closes it, and the hub hears both.
#[test]
fn why_comes_before_who() {
    let (mut star, control, mut trunks, mut far) = star(true);
    control.fail(Failure { cause: Cause::Aborted, rank: 0 }, "enough");
    control.leave();
    star.tell_news(&control, &mut trunks);
    trunks.part(GROUP);
    trunks.flush();
    let code = Failure { cause: Cause::Aborted, rank: 0 }.to_code();
    assert_eq!(far.said(), frame(FAIL, |body| body.u32(code).bytes(b"enough")));
    assert_eq!(far.said(), frame(GONE, |body| body.u32(0)));
    assert_eq!(far.hears(), What::Parted(GROUP));

    let (mut trunks, mut fars) = trunks_of_two();
    let links = fars.iter().zip(1..).map(|(far, rank)| Link::new(far.number, rank)).collect();
    let control = Control::open(Control::alloc(&Host, 1, 3).unwrap(), vec![0], (0, 3)).unwrap();
    let mut star = Star::new(GROUP, true, links);
    let code = Failure { cause: Cause::Aborted, rank: 1 }.to_code();
    let fail = frame(FAIL, |body| body.u32(code).bytes(b"enough"));
    star.hear(fars[0].number, &fail, &control, &mut trunks);
    star.hear(fars[0].number, &frame(GONE, |body| body.u32(1)), &control, &mut trunks);
    trunks.flush();
    assert_eq!(fars[1].said()[0], FAIL);
    assert_eq!(fars[1].said()[0], GONE);
    assert_eq!(cause(&control), Some(Cause::Aborted));
}

fn refusal(late: bool, rank: usize) -> Refusal {
    let note = Note { ranks: vec![rank], text: format!("rank {rank} says so") };
    Refusal { late, rank, note, by: String::new() }
}

/// Whoever has waited is asked for, and the word of the hub holds.
#[test]
fn the_hub_decides_once() {
    let (mut star, control, mut trunks, mut far) = star(true);
    let ask = |number| frame(ASK, |body| body.u32(number));
    let absent = |number, note: &[u8]| frame(ABSENT, |body| body.u32(number).bytes(note));
    let start = Instant::now();
    // For another reason than time: at once.
    star.hear(far.number, &words(REFUSE, 1, &refusal(false, 1)), &control, &mut trunks);
    trunks.flush();
    assert_eq!(far.said(), words(VERDICT, 1, &refusal(false, 1)));
    // What comes behind that changes nothing, and its sender is told once more.
    star.refuse(1, refusal(false, 0), &control, (&mut trunks, start));
    star.hear(far.number, &words(REFUSE, 1, &refusal(true, 1)), &control, &mut trunks);
    trunks.flush();
    assert_eq!(far.said(), words(VERDICT, 1, &refusal(false, 1)));
    // Operation 1 of the group is 1 and 2 of the host, and its word is in both verdicts.
    for number in [1, 2] {
        let verdict = control.verdict(number).unwrap().code().and_then(Verdict::from_code).unwrap();
        assert_eq!((verdict.why, verdict.place), (Why::Far, 1));
        assert_eq!(Note::read(&control.reason(1, number)), refusal(false, 1).note);
    }
    // Who has not come is asked for: nobody of this host has.
    star.refuse(2, refusal(true, 0), &control, (&mut trunks, start));
    trunks.flush();
    assert_eq!(far.said(), ask(2));
    assert!(star.due().is_some());
    star.hear(far.number, &absent(2, b"@1 rank 1 (host b)"), &control, &mut trunks);
    trunks.flush();
    let said = far.said();
    let known = Refusal::from_bytes(&said[9..], 2).unwrap();
    assert_eq!((said[0], known.note.ranks), (VERDICT, vec![0, 1]));
    assert!(known.note.text.ends_with("rank 1 (host b) have not come to it"), "{}", known.note.text);
    // Nobody answers.
    star.refuse(3, refusal(true, 0), &control, (&mut trunks, start));
    trunks.flush();
    assert_eq!(far.said(), ask(3));
    star.judge(&control, (&mut trunks, start));
    assert!(star.due().is_some());
    star.judge(&control, (&mut trunks, start + AGREE));
    assert!(star.due().is_none());
    trunks.flush();
    assert_eq!(far.said(), words(VERDICT, 3, &refusal(true, 0)));
    // Verdicts of operations that its leader is far from wait for it.
    assert_eq!(control.verdict(6).unwrap().code(), None);
    control.decided.come(2, &control);
    assert!(control.verdict(6).unwrap().code().is_some());
}

/// Other hosts say who of them has not come.
#[test]
fn who_has_not_come_is_said() {
    let (mut star, control, mut trunks, mut far) = star(false);
    star.hear(far.number, &frame(ASK, |body| body.u32(1)), &control, &mut trunks);
    trunks.flush();
    let said = far.said();
    assert_eq!((said[0], &said[1..5]), (ABSENT, &[1, 0, 0, 0][..]));
    assert!(String::from_utf8_lossy(&said[9..]).starts_with("@0 rank "), "{said:?}");
    // Inside operation 1 of the host.
    control.flag(control.map().desk(0) + crate::shm::control::Desk::WHERE).unwrap().store(3);
    star.hear(far.number, &frame(ASK, |body| body.u32(1)), &control, &mut trunks);
    trunks.flush();
    assert_eq!(far.said(), frame(ABSENT, |body| body.u32(1).bytes(b"")));
}

fn trunks_of_two() -> (Trunks, Vec<Far>) {
    trunks(2)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn no_bytes_panic(hub in any::<bool>(), frames in proptest::collection::vec((0..13u8, proptest::collection::vec(any::<u8>(), 0..40)), 0..20)) {
        let (mut star, control, mut trunks, far) = star(hub);
        for (kind, body) in frames {
            star.hear(far.number, &[&[kind], &body[..]].concat(), &control, &mut trunks);
        }
        star.arrive(7, &control, &mut trunks);
        star.tell_news(&control, &mut trunks);
    }
}
