//! The handshake without sockets: every wrong bit is refused, whatever arrives.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs::File;
use std::path::Path;

use proptest::prelude::*;
use tensorwire_device::fd::{Address, Fd};
use tensorwire_device::handshake::{Asked, Caller, MAX_FRAME};
use tensorwire_device::{Error, Handle, Id, Secret};

const GROUP: Id = Id([1; 16]);
const HERE: Id = Id([2; 16]);
const THERE: Id = Id([3; 16]);

fn secret() -> Secret {
    Secret::from_bytes([4; 32])
}

fn secret_of(group: Id) -> Option<Secret> {
    (group == GROUP).then(secret)
}

#[test]
fn both_know_the_secret() {
    let caller = Caller::new(GROUP, HERE).unwrap();
    let (asked, welcome) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
    let (answered, proof) = caller.prove(&secret(), &welcome).unwrap();
    let (group, called) = asked.accept(&proof).unwrap();
    assert_eq!((group, called.identity, answered.identity), (GROUP, HERE, THERE));
    assert_eq!((called.pid, answered.pid), (std::process::id(), std::process::id()));
    assert!([caller.hello(), welcome, proof].iter().all(|frame| frame.len() <= MAX_FRAME));
}

#[test]
fn no_frame_holds_the_secret_or_repeats() {
    let run = || {
        let caller = Caller::new(GROUP, HERE).unwrap();
        let (_, welcome) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
        let proof = caller.prove(&secret(), &welcome).unwrap().1;
        [caller.hello(), welcome, proof]
    };
    let (first, second) = (run(), run());
    for (one, other) in first.iter().zip(&second) {
        assert_ne!(one, other, "an old conversation proves nothing");
        assert!(!one.windows(8).any(|bytes| bytes == [4; 8]));
    }
    // The last frame of one conversation in another.
    let caller = Caller::new(GROUP, HERE).unwrap();
    let (asked, _) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
    assert!(matches!(asked.accept(&first[2]), Err(Error::Refused(_))));
    // And the answer to another caller's first frame.
    assert!(matches!(caller.prove(&secret(), &first[1]), Err(Error::Refused(_))));
}

/// Every bit of every frame, and every shorter and longer one.
#[test]
fn every_change_is_refused() {
    for bit in 0..MAX_FRAME * 8 {
        let flip = |mut frame: Vec<u8>| {
            let inside = bit / 8 < frame.len();
            if inside {
                frame[bit / 8] ^= 1 << (bit % 8);
            }
            inside.then_some(frame)
        };
        let caller = Caller::new(GROUP, HERE).unwrap();
        let (asked, welcome) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
        let (_, proof) = caller.prove(&secret(), &welcome).unwrap();
        if let Some(welcome) = flip(welcome) {
            assert!(matches!(caller.prove(&secret(), &welcome), Err(Error::Refused(_))), "bit {bit}");
        }
        if let Some(proof) = flip(proof) {
            assert!(matches!(asked.accept(&proof), Err(Error::Refused(_))), "bit {bit}");
        }
        // A changed first frame is refused at once, or its caller does not accept the answer.
        if let Some(hello) = flip(caller.hello()) {
            match Asked::answer(THERE, &secret_of, &hello) {
                Err(error) => assert!(matches!(error, Error::Refused(_)), "bit {bit}"),
                Ok((_, welcome)) => assert!(caller.prove(&secret(), &welcome).is_err(), "bit {bit}"),
            }
        }
    }
    for len in 0..MAX_FRAME + 10 {
        let caller = Caller::new(GROUP, HERE).unwrap();
        let (asked, welcome) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
        let (_, proof) = caller.prove(&secret(), &welcome).unwrap();
        let resized =
            |frame: &[u8]| frame.iter().copied().chain(std::iter::repeat(0)).take(len).collect::<Vec<u8>>();
        let unchanged = |frame: &[u8]| frame.len() == len;
        let hello = caller.hello();
        assert_eq!(Asked::answer(THERE, &secret_of, &resized(&hello)).is_ok(), unchanged(&hello), "{len}");
        assert_eq!(caller.prove(&secret(), &resized(&welcome)).is_ok(), unchanged(&welcome), "{len}");
        assert_eq!(asked.accept(&resized(&proof)).is_ok(), unchanged(&proof), "{len}");
    }
}

/// The corpora of the fuzz targets.
#[test]
fn corpora_are_refused_or_survive() {
    let files = |target: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
        let files: Vec<Vec<u8>> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
            .collect();
        assert!(!files.is_empty(), "{target}");
        files
    };
    for bytes in files("device_handshake") {
        let caller = Caller::new(GROUP, HERE).unwrap();
        assert!(caller.prove(&secret(), &bytes).is_err());
        let (asked, _) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
        assert!(asked.accept(&bytes).is_err());
        let _ = Asked::answer(THERE, &secret_of, &bytes);
    }
    for bytes in files("device_address") {
        if let Ok(address) = Address::from_bytes(&bytes) {
            assert_eq!(address.to_bytes(), bytes);
        }
    }
    let taken = files("device_handle").into_iter().filter(|data| {
        let Some((&count, bytes)) = data.split_first() else { return false };
        let fd = |_| Fd::new(File::open("/dev/null").unwrap().into());
        let handle = Handle::decode(bytes, (0..count % 8).map(fd).collect());
        handle.is_ok_and(|handle| handle.encode() == bytes)
    });
    assert_eq!(taken.count(), 3, "a memfd, a file and memory of a GPU");
}

proptest! {
    /// What the fuzz targets do, with as many cases as a test has time for.
    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), version in 0..3u8, kind in 0..5u8) {
        let framed = [&b"twfd"[..], &[version, kind], &bytes].concat();
        for bytes in [&bytes, &framed] {
            let caller = Caller::new(GROUP, HERE).unwrap();
            prop_assert!(caller.prove(&secret(), bytes).is_err());
            let (asked, _) = Asked::answer(THERE, &secret_of, &caller.hello()).unwrap();
            prop_assert!(asked.accept(bytes).is_err());
            prop_assert!(Asked::answer(THERE, &secret_of, bytes).is_err());
        }
    }

    #[test]
    fn an_address_survives_its_frame(bytes in prop::collection::vec(any::<u8>(), 0..200), first in "[@/a]") {
        let bytes = [first.as_bytes(), &bytes].concat();
        if let Ok(address) = Address::from_bytes(&bytes) {
            prop_assert_eq!(address.to_bytes(), bytes);
        }
    }
}
