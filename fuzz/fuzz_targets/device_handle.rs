//! Handles of memory, as they come from a peer with some descriptors: what is taken comes out again as it was.
#![no_main]

use std::fs::File;

use libfuzzer_sys::fuzz_target;
use tensorwire_device::Handle;
use tensorwire_device::fd::Fd;

fuzz_target!(|data: &[u8]| {
    // The first byte says how many descriptors came.
    let Some((&count, bytes)) = data.split_first() else { return };
    let open = |_| File::open("/dev/null").ok().map(|file| Fd::new(file.into()));
    let fds: Vec<Fd> = (0..count % 8).filter_map(open).collect();
    if let Ok(handle) = Handle::decode(bytes, fds) {
        assert_eq!(handle.encode(), bytes);
    }
});
