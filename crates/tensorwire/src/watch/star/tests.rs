//! The rules of a star, with what a test says in the place of other leaders.

use proptest::prelude::*;
use tensorwire_device::host::Host;

use super::*;
use crate::link::trunk::What;
use crate::link::trunk::tests::{Far, GROUP, trunks};

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
    let wrong: [&[u8]; 5] = [&[], &[77], &[FAIL], &[ARRIVE, 1], &[ADDRESS, 0, 0, 0, 0, 0, 0, 0, 0]];
    for bytes in wrong {
        let (mut star, control, mut trunks, far) = star(true);
        star.hear(far.number, bytes, &control, &mut trunks);
        assert_eq!(cause(&control), Some(Cause::Misbehaved), "{bytes:?}");
        assert!(!star.links[0].open);
    }
    // Only the hub releases, and only to it others arrive.
    for (hub, kind) in [(true, RELEASE), (false, ARRIVE)] {
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

fn trunks_of_two() -> (Trunks, Vec<Far>) {
    trunks(2)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn no_bytes_panic(hub in any::<bool>(), frames in proptest::collection::vec((0..9u8, proptest::collection::vec(any::<u8>(), 0..40)), 0..20)) {
        let (mut star, control, mut trunks, far) = star(hub);
        for (kind, body) in frames {
            star.hear(far.number, &[&[kind], &body[..]].concat(), &control, &mut trunks);
        }
        star.arrive(7, &control, &mut trunks);
        star.tell_news(&control, &mut trunks);
    }
}
