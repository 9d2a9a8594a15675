//! Addresses of private sockets, as they come from a peer: what is taken comes out again as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tensorwire_device::fd::Address;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(address) = Address::from_bytes(bytes) {
        assert_eq!(address.to_bytes(), bytes);
    }
});
