//! Leases between real processes: counted, released, refused, and reclaimed.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::sync::Arc;
use std::time::Duration;

use lease_peer::{MemoryKind, Peer, byte, context, memory, settles, soon, usage, usage_of};
use tensorwire::{Context, Deadline, Terms, Token};

/// What other processes do.
#[test]
fn child() {
    match process::role().as_deref() {
        Some("sends often") => send_often(1000),
        Some(role) => lease_peer::run(role),
        None => {}
    }
}

fn peer() -> Peer {
    Peer::start(MemoryKind::Host)
}

#[test]
fn memory_is_seen_by_both_and_let_go_at_last() {
    let (us, them) = (context(), peer());
    let span = memory(&us, 100_000, 5);
    let lease = us.grant(&span, &Terms::default()).unwrap();
    assert_eq!(them.redeem(lease.token()), Ok(5));
    span.write(0, &[6]).unwrap();
    assert_eq!(them.bytes(), Ok(vec![6]));
    let holders = lease.holders();
    assert_eq!((holders.len(), holders[0].pid, holders[0].loans), (1, them.child.pid(), 1));
    let stats = us.lease_stats().unwrap();
    assert_eq!(
        (stats.granted, stats.redeemed, stats.waiting, stats.holders),
        ((1, 100_000), (1, 100_000), (0, 0), 1)
    );

    // The owner drops it first, then the holder.
    drop((lease, span));
    assert_eq!(us.lease_stats().unwrap().waiting, (1, 100_000));
    assert!(us.outstanding().unwrap().contains(&them.child.pid().to_string()));
    assert_eq!(them.bytes(), Ok(vec![6]));
    them.release_last().unwrap();
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    assert_eq!((us.lease_stats().unwrap().waiting, us.outstanding()), ((0, 0), None));
    drop(them);
    settles(|| us.lease_stats().unwrap().holders, 0);
}

#[test]
fn a_token_keeps_memory_until_it_is_redeemed() {
    let (us, them) = (context(), peer());
    let lease = us.grant(&memory(&us, 10, 7), &Terms::default().uses(2)).unwrap();
    let token = lease.token().clone();
    drop(lease);
    // Redeemed and released once: the second use is still waited for.
    assert_eq!(them.redeem(&token), Ok(7));
    them.release_last().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(us.lease_stats().unwrap().waiting, (1, 10));
    assert_eq!(them.redeem(&token), Ok(7));
    // While it is held, it may be redeemed more often.
    assert_eq!(them.redeem(&token), Ok(7));
    them.release_last().unwrap();
    them.release_last().unwrap();
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    let error = them.redeem(&token).unwrap_err().text();
    assert!(error.contains("over"), "{error}");
}

#[test]
fn the_owner_is_told_of_releases() {
    let (us, them) = (context(), peer());
    for round in 0..100 {
        let lease = us.grant(&memory(&us, 10, round), &Terms::default()).unwrap();
        assert_eq!(them.redeem(lease.token()), Ok(round));
        them.say(b'd', &[]).unwrap();
        lease.wait(soon()).unwrap();
        them.hear().unwrap();
    }
    let lease = us.grant(&memory(&us, 10, 1), &Terms::default()).unwrap();
    let error = lease.wait(Deadline::after(Duration::from_millis(30))).unwrap_err().to_string();
    assert!(error.contains("nobody has redeemed it"), "{error}");
    them.redeem(lease.token()).unwrap();
    let error = lease.wait(Deadline::after(Duration::from_millis(30))).unwrap_err().to_string();
    assert!(error.contains(&format!("process {} holds it", them.child.pid())), "{error}");
}

#[test]
fn a_holder_that_dies_has_released() {
    let us = context();
    let mut them = peer();
    let lease = us.grant(&memory(&us, 10, 1), &Terms::default()).unwrap();
    them.redeem(lease.token()).unwrap();
    them.child.kill();
    lease.wait(soon()).unwrap();
    drop(lease);
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
}

#[test]
fn views_outlive_their_owner_and_its_tokens_do_not() {
    let us = context();
    let mut them = peer();
    let (first, second) = (them.grants(5000, 77).unwrap(), them.grants(5000, 77).unwrap());
    let loan = us.redeem(&first, soon()).unwrap();
    assert_eq!((byte(loan.span()), loan.pid()), (77, them.child.pid()));
    them.child.kill();
    loan.span().write(0, &[3]).unwrap();
    assert_eq!(byte(loan.span()), 3);
    for context in [&us, &context()] {
        let error = context.redeem(&second, soon()).unwrap_err().to_string();
        assert!(error.contains(&format!("process {} died", them.child.pid())), "{error}");
    }
    drop(loan);
}

#[test]
fn what_was_received_is_granted_onward() {
    let us = context();
    let (b, c) = (peer(), peer());
    let lease = us.grant(&memory(&us, 10, 9), &Terms::default()).unwrap();
    assert_eq!(b.redeem(lease.token()), Ok(9));
    let onward = b.lends_last_onward().unwrap();
    assert_eq!(c.redeem(&onward), Ok(9));
    // B lets go of its view and of its grant; C holds it through B.
    b.release_last().unwrap();
    b.drop_leases().unwrap();
    assert_eq!(c.bytes(), Ok(vec![9]));
    let error = lease.wait(Deadline::after(Duration::from_millis(50)));
    assert!(error.is_err());
    c.release_last().unwrap();
    lease.wait(soon()).unwrap();
    // And back to where it came from.
    assert_eq!(b.redeem(lease.token()), Ok(9));
    let back = us.redeem(&b.lends_last_onward().unwrap(), soon()).unwrap();
    back.span().write(0, &[4]).unwrap();
    assert_eq!(b.bytes(), Ok(vec![4]));
}

/// Every process numbers its allocations from 1; what one calls by a number says nothing of another's.
#[test]
fn lenders_do_not_get_mixed_up() {
    let (us, owners) = (context(), [context(), context()]);
    let lend = |(owner, byte): (&Arc<Context>, u8)| {
        owner.grant(&memory(owner, 64, byte), &Terms::default()).unwrap()
    };
    let leases: Vec<_> = owners.iter().zip([1, 2]).map(lend).collect();
    let loans: Vec<_> = leases.iter().map(|lease| us.redeem(lease.token(), soon()).unwrap()).collect();
    assert_eq!(loans.iter().map(|loan| byte(loan.span())).collect::<Vec<_>>(), [1, 2]);
    // What comes by two ways is mapped once: that is seen, not believed.
    let onward =
        owners[0].grant(owners[0].redeem(leases[1].token(), soon()).unwrap().span(), &Terms::default());
    let again = us.redeem(onward.unwrap().token(), soon()).unwrap();
    assert_eq!((byte(again.span()), again.span().distance(loans[1].span())), (2, 0));
}

#[test]
fn a_process_redeems_its_own_tokens() {
    let us = context();
    let span = memory(&us, 1000, 5);
    let lease = us.grant(&span.slice(100..300).unwrap(), &Terms::default()).unwrap();
    span.write(100, &[8]).unwrap();
    let loan = us.redeem(lease.token(), soon()).unwrap();
    assert_eq!((byte(loan.span()), loan.span().len()), (8, 200));
    drop((lease, span));
    assert_eq!(us.lease_stats().unwrap().redeemed, (1, 200));
    drop(loan);
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
}

#[test]
fn tokens_expire_and_are_renewed() {
    let (us, them) = (context(), peer());
    let short = Terms::default().lifetime(Duration::from_millis(100));
    let lease = us.grant(&memory(&us, 1000, 1), &short).unwrap();
    let lost = us.grant(&memory(&us, 3000, 1), &short).unwrap().token().clone();
    lease.renew(Duration::from_secs(600)).unwrap();
    settles(|| us.lease_stats().unwrap().expired, (1, 3000));
    them.redeem(&lost).unwrap_err().text();
    assert_eq!(us.lease_stats().unwrap().granted, (1, 1000));
    them.redeem(lease.token()).unwrap();

    // While the owner has it, an expired token cannot be redeemed, and what was redeemed stays.
    lease.renew(Duration::ZERO).unwrap();
    let error = loop {
        match them.redeem(lease.token()) {
            Ok(_) => them.release_last().unwrap(),
            Err(trouble) => break trouble.text(),
        }
    };
    assert!(error.contains("expired"), "{error}");
    assert!(lease.renew(Duration::from_secs(1)).is_err());
    drop(lease);
    assert_eq!(them.bytes(), Ok(vec![1]));
    them.release_last().unwrap();
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
    assert!(us.renew(&lost, Duration::from_secs(1)).is_err());
}

#[test]
fn forged_tokens_map_nothing() {
    let (us, them) = (context(), peer());
    let lease = us.grant(&memory(&us, 10, 1), &Terms::default()).unwrap();
    let bytes = lease.token().to_bytes();
    assert!(Token::from_bytes(&bytes[..bytes.len() - 1]).is_err());
    them.ask(b'r', &bytes[..50]).unwrap_err().text();
    // Right in itself, with the secret of another process.
    let other = context();
    let theirs = other.grant(&memory(&other, 10, 1), &Terms::default()).unwrap().token().to_bytes();
    let mixed = [&bytes[..5], &theirs[5..37], &bytes[37..]].concat();
    them.ask(b'r', &mixed).unwrap_err().text();
    assert_eq!(lease.holders().len(), 0);
}

#[test]
fn ordinary_memory_cannot_be_lent() {
    let us = context();
    let span = tensorwire::Span::whole(tensorwire::device::host::private(100).unwrap());
    let error = us.grant(&span, &Terms::default()).unwrap_err().to_string();
    assert!(error.contains("memory that tensorwire allocated"), "{error}");
    // Only who asks for it gets a copy, and it is said.
    span.write(0, &[6]).unwrap();
    let lease = us.grant(&span, &Terms::default().copy(true)).unwrap();
    assert!(lease.is_copy());
    assert_eq!(us.lease_stats().unwrap().copied, (1, 100));
    span.write(0, &[7]).unwrap();
    assert_eq!(byte(us.redeem(lease.token(), soon()).unwrap().span()), 6);
    let shared = us.grant(&memory(&us, 10, 1), &Terms::default().copy(true)).unwrap();
    assert!(!shared.is_copy());
    // Nothing is lent as it is.
    let (them, empty) = (peer(), us.alloc(0).unwrap());
    let lease = us.grant(&empty, &Terms::default()).unwrap();
    assert_eq!(them.redeem(lease.token()), Ok(0));
}

/// Sends the same memory so often to another process, which redeems and releases it. In a process of its own, whose
/// descriptors and mappings nobody else changes.
fn send_often(times: usize) {
    let (us, them) = (context(), peer());
    let span = memory(&us, 4096, 1);
    let theirs = || usage_of(&them.child.pid().to_string());
    let mut before = None;
    for round in 0..times {
        let token = us.grant(&span, &Terms::default()).unwrap().token().clone();
        them.redeem(&token).unwrap();
        them.release_last().unwrap();
        if round == 10 {
            before = Some((usage(), theirs()));
        }
    }
    assert_eq!(Some((usage(), theirs())), before);
    settles(|| us.lease_stats().unwrap().granted, (0, 0));
}

#[test]
fn a_thousand_sends_leave_nothing() {
    process::Child::start(&mut process::command("sends often")).succeed();
}
