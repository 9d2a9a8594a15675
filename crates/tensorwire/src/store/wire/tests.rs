use proptest::prelude::*;

use super::*;

fn frame() -> impl Strategy<Value = Frame> {
    let key = || "[a-z/ü]{0,12}";
    let value = || prop::collection::vec(any::<u8>(), 0..40);
    let keys = || prop::collection::vec(key(), 0..5);
    let request = prop_oneof![
        (key(), value()).prop_map(|(k, v)| Request::Set(k, v)),
        (key(), value(), value()).prop_map(|(key, expected, desired)| Request::CompareSet {
            key,
            expected,
            desired
        }),
        key().prop_map(Request::Get),
        (key(), any::<i64>()).prop_map(|(k, n)| Request::Add(k, n)),
        keys().prop_map(Request::Check),
        keys().prop_map(Request::Wait),
        Just(Request::NumKeys),
        key().prop_map(Request::Delete),
        (key(), value()).prop_map(|(k, v)| Request::Append(k, v)),
        keys().prop_map(Request::MultiGet),
        prop::collection::vec((key(), value()), 0..5).prop_map(Request::MultiSet),
        (key(), value()).prop_map(|(k, v)| Request::Push(k, v)),
        key().prop_map(|key| Request::Pop { key, wait: true }),
        key().prop_map(Request::QueueLen),
        Just(Request::ListKeys),
        (key(), 1..i64::MAX as u64).prop_map(|(key, world)| Request::Barrier { key, world }),
    ];
    prop_oneof![
        1 => any::<u32>().prop_map(Frame::Validate),
        1 => any::<u32>().prop_map(Frame::Ping),
        1 => Just(Frame::CancelWait),
        12 => (any::<bool>(), request).prop_map(|(strict, request)| {
            // Whether a pop waits is said by its being strict.
            let request = match request {
                Request::Pop { key, .. } => Request::Pop { key, wait: strict },
                other => other,
            };
            Frame::Operation { strict, request }
        }),
    ]
}

/// Decodes bytes that come in pieces.
fn decode(pieces: &[&[u8]], limits: &Limits) -> Result<Vec<Frame>, String> {
    let (mut decoder, mut pending, mut frames) = (Decoder::default(), Vec::new(), Vec::new());
    for piece in pieces {
        pending.extend_from_slice(piece);
        while let Some((frame, len)) = decoder.next(&pending, limits)? {
            pending.drain(..len);
            frames.push(frame);
        }
    }
    Ok(frames)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_come_back(frames in prop::collection::vec(frame(), 0..8), step in 1_usize..50) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| encode(frame, &mut bytes));
        let limits = Limits::default();
        prop_assert_eq!(decode(&[&bytes], &limits), Ok(frames.clone()));
        let pieces: Vec<&[u8]> = bytes.chunks(step).collect();
        prop_assert_eq!(decode(&pieces, &limits), Ok(frames));
    }

    #[test]
    fn any_bytes_are_taken_alike_in_pieces(bytes in prop::collection::vec(any::<u8>(), 0..200), step in 1_usize..20) {
        let limits = Limits { request: 150, ..Limits::default() };
        let pieces: Vec<&[u8]> = bytes.chunks(step).collect();
        prop_assert_eq!(decode(&pieces, &limits), decode(&[&bytes], &limits));
    }
}

#[test]
fn too_long_is_seen_before_it_comes() {
    let limits = Limits { key: 10, value: 20, keys_per_request: 3, request: 60, ..Limits::default() };
    let seen = |bytes: &[u8]| Decoder::default().next(bytes, &limits);
    let word = |n: u64| n.to_le_bytes();
    assert!(seen(&[&[code::GET][..], &word(11)].concat()).is_err());
    assert!(seen(&[&[code::GET][..], &word(10)].concat()).unwrap().is_none());
    assert!(seen(&[&[code::GET][..], &word(u64::MAX)].concat()).is_err());
    assert!(seen(&[&[code::WAIT][..], &word(4)].concat()).is_err());
    assert!(seen(&[&[code::SET][..], &word(1), b"k", &word(21)].concat()).is_err());
    // Each part is short enough, all together are not.
    let pair = [&word(1)[..], b"k", &word(20), &[0; 20]].concat();
    assert!(seen(&[&[code::MULTI_SET][..], &word(2), &pair, &word(1), b"k", &word(20)].concat()).is_err());
}
