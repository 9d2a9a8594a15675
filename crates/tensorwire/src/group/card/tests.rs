use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn member(rank: usize) -> impl Strategy<Value = Member> {
    let text = || ".{0,20}";
    (
        any::<[u8; 16]>(),
        text(),
        any::<u32>(),
        text(),
        text(),
        any::<u64>(),
        any::<u64>(),
        "[a-z]{1,9}",
        any::<bool>(),
    )
        .prop_map(move |(id, host, pid, boot, label, pid_namespace, started, name, file)| Member {
            rank,
            identity: Id(id),
            host,
            pid,
            place: Whereabouts { boot, label, pid_namespace, started },
            address: if file { Address::Path(format!("/{name}").into()) } else { Address::Abstract(name) },
        })
}

fn failure() -> impl Strategy<Value = Error> {
    let kinds = prop_oneof![
        Just(PeerFaultKind::Died),
        Just(PeerFaultKind::Left),
        Just(PeerFaultKind::Misbehaved),
        Just(PeerFaultKind::Incompatible),
        Just(PeerFaultKind::Refused),
    ];
    prop_oneof![
        (kinds, ".*", proptest::option::of(0..usize::MAX), ".*")
            .prop_map(|(kind, who, rank, detail)| Error::peer(kind, who, rank, detail)),
        (".*", any::<u64>(), ".*").prop_map(|(doing, after, missing)| Error::timed_out(
            doing,
            Duration::from_nanos(after),
            missing
        )),
        ".*".prop_map(Error::Aborted),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn cards_come_back(member in member(7), world in any::<usize>(), seal in 0..3usize) {
        let seal = [None, Some(Seal::All), Some(Seal::Control)][seal];
        let card = Card { version: Version::ours(), world, seal, member };
        prop_assert_eq!(Card::from_bytes(&card.to_bytes()).unwrap().unwrap(), card);
    }

    #[test]
    fn rosters_come_back(members in (member(0), member(1), member(2)), id in any::<[u8; 16]>(), secret in proptest::option::of(any::<[u8; 32]>())) {
        let wanted = vec![members.0, members.1, members.2];
        let wanted = (Id(id), secret.map(Secret::from_bytes), wanted);
        let verdict = Verdict::Formed { id: wanted.0, secret: wanted.1, members: wanted.2.clone() };
        let bytes = verdict.to_bytes();
        let Verdict::Formed { id, secret, members } = Verdict::from_bytes(&bytes).unwrap() else { panic!("not formed") };
        prop_assert_eq!((id, secret, members), wanted);
        // Cut anywhere, it is refused.
        for len in 0..bytes.len() {
            prop_assert!(Verdict::from_bytes(&bytes[..len]).is_err(), "{} of {}", len, bytes.len());
        }
    }

    #[test]
    fn failures_come_back(error in failure()) {
        let bytes = Verdict::Failed(error.clone()).to_bytes();
        let Verdict::Failed(back) = Verdict::from_bytes(&bytes).unwrap() else { panic!("formed") };
        prop_assert_eq!(back.to_string(), error.to_string());
        prop_assert_eq!(Verdict::Failed(back).to_bytes(), bytes);
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0..4u8) {
        let head = match kind {
            0 => Vec::new(),
            1 => CARD.to_vec(),
            2 => VERDICT.to_vec(),
            // A right head, so that the rest is reached.
            _ => header(VERDICT, &Version::ours()).finish(),
        };
        let bytes = [head, bytes].concat();
        let _ = Card::from_bytes(&bytes);
        let _ = Verdict::from_bytes(&bytes);
        let _ = crate::group::report::read(&mut Reader::new(&bytes));
    }
}

#[test]
fn a_roster_that_promises_too_many_is_refused_before_it_is_allocated() {
    let head = || header(VERDICT, &Version::ours()).u8(0).fixed(&[0; 48]);
    assert!(Verdict::from_bytes(&head().u32(u32::MAX).fixed(&[0; 64]).finish()).is_err());
    assert!(Verdict::from_bytes(&head().u32(0).u32(u32::MAX).fixed(&[0; 64]).finish()).is_err());
}

#[test]
fn a_rank_on_a_host_that_is_not_listed_is_refused() {
    let head = header(VERDICT, &Version::ours()).u8(0).fixed(&[0; 48]).u32(0).u32(1);
    let member = head.fixed(&[1; 16]).u32(0).u32(7).u64(1).bytes(b"@name").finish();
    let error = Verdict::from_bytes(&member).unwrap_err();
    assert!(error.to_string().contains("a rank on no host"), "{error}");
}
