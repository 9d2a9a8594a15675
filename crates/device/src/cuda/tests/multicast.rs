//! The steps of multicast: their order, and what is undone when one fails.

use std::sync::Arc;

use super::super::driver::script::{CREATED, OBJECT, RETAINED, driver_without_multicast, fail, released};
use super::{calls, facts, gpu};
use crate::cuda::Gpu;
use crate::device::{Device, Region};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::multicast::{Multicast, MulticastHandle};

const UNIT: usize = 2 << 20;

/// What the steps of the process that makes an object ask of the driver, and of one that joins.
const MADE: [&str; 9] = [
    "cuMulticastGetGranularity",
    "cuMulticastCreate",
    "cuMemExportToShareableHandle",
    "cuMulticastAddDevice",
    "cuMemRetainAllocationHandle",
    "cuMulticastBindMem",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
];
const JOINED: [&str; 8] = [
    "cuMulticastGetGranularity",
    "cuMemImportFromShareableHandle",
    "cuMulticastAddDevice",
    "cuMemRetainAllocationHandle",
    "cuMulticastBindMem",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
];
/// What undoes all of it: the object goes before the memory.
const UNDONE: [&str; 5] =
    ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind", "cuMemRelease", "cuMemRelease"];

/// The calls that speak of memory and of multicast.
fn steps() -> Vec<&'static str> {
    let of_memory = |call: &&str| call.starts_with("cuMem") || call.starts_with("cuMulticast");
    calls().into_iter().filter(of_memory).collect()
}

fn handle(devices: usize, bytes: usize) -> MulticastHandle {
    let fd = rustix::fs::memfd_create("object", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    MulticastHandle { fd: crate::fd::Fd::new(fd), devices, bytes }
}

/// All steps of one process.
fn all(gpu: &Gpu, memory: &Arc<dyn Region>, joins: bool) -> Result<Box<dyn Multicast>> {
    let mut object = match joins {
        true => gpu.join_multicast(handle(2, UNIT))?,
        false => gpu.multicast(2, 100)?,
    };
    if !joins {
        let handle = object.export()?;
        assert_eq!((handle.devices, handle.bytes), (2, UNIT));
        assert!(rustix::io::fcntl_getfd(&handle.fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    object.add()?;
    object.bind(memory)?;
    assert_eq!(object.map()?, 0x7000_0000);
    Ok(object)
}

#[test]
fn the_steps_come_in_their_order_and_go_in_the_opposite_one() {
    let gpu = gpu();
    let memory = gpu.take(100).unwrap();
    for (joins, made) in [(false, &MADE[..]), (true, &JOINED[..])] {
        calls();
        let object = all(&gpu, &memory, joins).unwrap();
        assert_eq!(object.bytes(), UNIT);
        assert_eq!(steps(), made);
        drop(object);
        assert_eq!(steps(), UNDONE);
    }
    // The object keeps the memory, which goes last.
    let object = all(&gpu, &memory, false).unwrap();
    drop(memory);
    calls();
    released();
    drop(object);
    assert_eq!(released(), [OBJECT, RETAINED, CREATED]);
    let memory_goes = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"];
    assert_eq!(steps(), [&UNDONE[..], &memory_goes[..]].concat());
}

/// Whatever fails, what came before it is undone, and nothing else is.
#[test]
fn a_failed_step_leaves_nothing_behind() {
    for (joins, made) in [(false, &MADE[..]), (true, &JOINED[..])] {
        for (at, call) in made.iter().enumerate() {
            let gpu = gpu();
            let memory = gpu.take(100).unwrap();
            fail(call, 0);
            let error = all(&gpu, &memory, joins).unwrap_err();
            match &error {
                Error::Refused(text) => assert!(text.contains(call), "{error}"),
                Error::Device { call: failed, .. } => assert_eq!(failed, call),
                _ => panic!("{call}: {error:?}"),
            }
            let worked = |name: &str| made[..at].contains(&name);
            let object = worked("cuMulticastCreate") || worked("cuMemImportFromShareableHandle");
            let mut undone = Vec::new();
            undone.extend(worked("cuMemMap").then_some("cuMemUnmap"));
            undone.extend(worked("cuMemAddressReserve").then_some("cuMemAddressFree"));
            // A failed bind leaves a reference to the memory, which goes before the object.
            let (retained, bound) = (worked("cuMemRetainAllocationHandle"), worked("cuMulticastBindMem"));
            undone.extend(bound.then_some("cuMulticastUnbind"));
            undone.extend(retained.then_some("cuMemRelease"));
            undone.extend(object.then_some("cuMemRelease"));
            assert_eq!(steps(), [&made[..=at], &undone].concat(), "joins: {joins}, {call} fails");
            fail("nothing", 0);
            // The same can be tried again, with the same memory.
            drop(all(&gpu, &memory, joins).unwrap());
        }
    }
}

/// What fails while it is undone does not keep the rest from being undone.
#[test]
fn a_failed_undoing_goes_on() {
    for call in ["cuMemUnmap", "cuMemAddressFree", "cuMulticastUnbind", "cuMemRelease"] {
        let gpu = gpu();
        let memory = gpu.take(100).unwrap();
        let object = all(&gpu, &memory, false).unwrap();
        fail(call, 0);
        drop(object);
        assert_eq!(steps(), UNDONE, "{call} fails");
        fail("nothing", 0);
    }
}

#[test]
fn steps_out_of_order_ask_nothing_of_the_driver() {
    let gpu = gpu();
    let memory = gpu.take(100).unwrap();
    let mut object = gpu.multicast(2, UNIT).unwrap();
    let joined = gpu.join_multicast(handle(2, UNIT)).unwrap();
    calls();
    let refused = |result: Result<()>| {
        assert!(matches!(&result, Err(Error::Misuse(_))), "{result:?}");
        assert_eq!(steps(), [""; 0]);
    };
    refused(object.bind(&memory));
    refused(object.map().map(drop));
    refused(joined.export().map(drop));
    object.add().unwrap();
    calls();
    refused(object.add());
    refused(object.map().map(drop));
    // Memory that does not fit: too little, in a place that does not fit, of another device.
    let odd = crate::subregion::part(gpu.take(3 * UNIT).unwrap(), 512..512 + UNIT).unwrap();
    let little = crate::subregion::part(gpu.take(2 * UNIT).unwrap(), UNIT..2 * UNIT).unwrap();
    let mut large = gpu.multicast(2, 2 * UNIT).unwrap();
    large.add().unwrap();
    calls();
    refused(object.bind(&odd));
    refused(large.bind(&little));
    refused(object.bind(&Host.alloc(UNIT).unwrap()));
    object.bind(&memory).unwrap();
    calls();
    refused(object.bind(&memory));
    object.map().unwrap();
    calls();
    refused(object.map().map(drop));
}

#[test]
fn sizes_and_counts_are_checked() {
    let gpu = gpu();
    for (devices, bytes) in [(0, UNIT), (usize::MAX, UNIT), (2, 0), (2, usize::MAX)] {
        let error = gpu.multicast(devices, bytes).unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error:?}");
    }
    for bytes in [0, 1, UNIT + 1] {
        let error = gpu.join_multicast(handle(2, bytes)).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
    }
    assert_eq!(gpu.multicast(8, UNIT + 1).unwrap().bytes(), 2 * UNIT);
}

#[test]
fn what_has_no_multicast_says_why() {
    let why = |device: &dyn Device| {
        let made = device.multicast(2, UNIT).unwrap_err();
        let joined = device.join_multicast(handle(2, UNIT)).unwrap_err();
        assert_eq!(made.to_string(), joined.to_string());
        assert!(matches!(made, Error::Unsupported { .. }), "{made:?}");
        made.to_string()
    };
    assert!(why(&Host).contains("a device without multicast"));
    let gpu = |old| Gpu::with(driver_without_multicast(old), facts()).unwrap();
    assert!(why(&gpu(false)).contains("attribute that says no"));
    assert!(why(&gpu(true)).contains("cuMulticastGetGranularity"));
}
