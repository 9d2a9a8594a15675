//! The three frames of the handshake: any bytes are refused, none panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire_device::handshake::{Asked, Caller};
use tensorwire_device::{Id, Secret};

fuzz_target!(|bytes: &[u8]| {
    let (group, secret) = (Id([1; 16]), Secret::from_bytes([4; 32]));
    let caller = Caller::new(group, Id([2; 16])).expect("random bytes");
    assert!(caller.prove(&secret, bytes).is_err());
    let answered = Asked::answer(Id([3; 16]), &|asked| (asked == group).then_some(secret), &caller.hello());
    assert!(answered.expect("a right frame").0.accept(bytes).is_err());
    // The only frame that may be right by luck: it proves nothing yet.
    let _ = Asked::answer(Id([3; 16]), &|_| Some(secret), bytes);
});
