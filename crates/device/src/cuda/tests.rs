//! Order and failure of driver calls, seen with a driver that is a script.

mod multicast;
mod queues;

use std::time::Duration;

use super::driver::script::{INVALID_HANDLE, calls, driver, fail, fail_with};
use super::gpu::{Facts, Gpu};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::Error;
use crate::host::Host;

fn gpu() -> Gpu {
    let gpu = Gpu::with(driver(), facts()).unwrap();
    calls();
    gpu
}

/// The calls that speak of memory.
fn memory_calls() -> Vec<&'static str> {
    calls().into_iter().filter(|call| call.starts_with("cuMem")).collect()
}

#[test]
fn memory_goes_back_in_the_order_it_came() {
    let gpu = gpu();
    let region = gpu.take(100).unwrap();
    assert_eq!(memory_calls(), ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]);
    drop(region);
    assert_eq!(memory_calls(), ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]);
    // Nothing is asked for nothing.
    drop(gpu.take(0).unwrap());
    assert_eq!(memory_calls(), [""; 0]);
}

/// Whatever fails, what came before is given back.
#[test]
fn a_failed_allocation_leaves_nothing_behind() {
    let undone: [(&str, &[&str]); 4] = [
        ("cuMemCreate", &[]),
        ("cuMemAddressReserve", &["cuMemRelease"]),
        ("cuMemMap", &["cuMemAddressFree", "cuMemRelease"]),
        ("cuMemSetAccess", &["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
    ];
    for (call, after) in undone {
        let gpu = gpu();
        fail(call, 0);
        let error = gpu.take(3 << 20).unwrap_err();
        let calls = memory_calls();
        let at = calls.iter().position(|made| *made == call).unwrap();
        let after_it: Vec<_> = calls[at + 1..].iter().filter(|made| !made.contains("GetInfo")).collect();
        assert_eq!(after_it, after.iter().collect::<Vec<_>>(), "after {call}");
        if call == "cuMemCreate" {
            assert!(
                matches!(&error, Error::Unsupported { need, .. } if need.contains("free memory")),
                "{error:?}"
            );
        } else {
            assert!(matches!(&error, Error::Device { call: failed, .. } if *failed == call), "{error:?}");
        }
    }
}

/// A fabric handle where the whole cycle works, else a descriptor.
#[test]
fn memory_leaves_by_the_way_that_works() {
    use crate::handle::{Handle, Means};
    let Ok(Handle::Gpu(handle)) = gpu().take(100).unwrap().export() else { panic!("no handle") };
    assert!(matches!(handle.chunks[0].means, Means::Fabric(_)));
    for call in [
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
    ] {
        let driver = driver();
        fail(call, 0);
        let gpu = Gpu::with(driver, facts()).unwrap();
        let calls = calls();
        assert!(calls.contains(&call), "{calls:?}");
        // What the attempt took is given back.
        let count = |name: &str| calls.iter().filter(|made| **made == name).count();
        let worked = |name: &str| count(name) - usize::from(call == name);
        let taken = worked("cuMemCreate") + worked("cuMemImportFromShareableHandle");
        assert_eq!(count("cuMemRelease"), taken, "{calls:?}");
        assert_eq!(count("cuMemAddressReserve"), count("cuMemAddressFree"), "{calls:?}");
        fail("nothing", 0);
        let Ok(Handle::Gpu(handle)) = gpu.take(100).unwrap().export() else { panic!("no handle") };
        let Means::Fd(fd) = &handle.chunks[0].means else { panic!("no descriptor") };
        // The driver's own flags let every program inherit it that this process starts.
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}

/// WSL2's driver answers so to every legacy handle.
#[test]
fn a_refused_handle_says_what_to_do() {
    use crate::handle::{Chunk, GpuHandle, Handle, Means};
    let gpu = gpu();
    let handle = || {
        let chunk = Chunk { id: 1, size: 2 << 20, means: Means::Legacy([0; 64]) };
        Handle::Gpu(GpuHandle { device: [1; 16], offset: 0, len: 100, chunks: vec![chunk] })
    };
    fail_with("cuIpcOpenMemHandle_v2", 0, INVALID_HANDLE);
    let error = gpu.import(handle()).unwrap_err();
    assert!(matches!(&error, Error::Refused(_)), "{error:?}");
    let text = error.to_string();
    for part in ["CUDA_ERROR_INVALID_HANDLE", "its maker must live", "WSL2", "host memory"] {
        assert!(text.contains(part), "{text}");
    }
    // Of another refusal that is no reason.
    fail("cuIpcOpenMemHandle_v2", 0);
    let error = gpu.import(handle()).unwrap_err().to_string();
    assert!(!error.contains("WSL2"), "{error}");
    fail("nothing", 0);
}

/// One side signals first, the other waits first; what fails lets its waits go.
#[test]
fn an_exchange_takes_turns() {
    let gpu = gpu();
    let words = gpu.take(4096).unwrap();
    let soon = || Deadline::after(Duration::from_secs(60));
    let turns = || calls().into_iter().filter(|call| call.contains("Value32")).collect::<Vec<_>>();
    let (write, wait) = ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2");
    for (side, turn) in [(0, [write, wait]), (1, [wait, write])] {
        assert_eq!(gpu.exchange(&words, side, 3, soon()).unwrap().len(), 2);
        assert_eq!(turns(), turn.repeat(3 * 64));
    }
    fail(wait, 5);
    let error = gpu.exchange(&words, 0, 3, soon()).unwrap_err();
    assert!(matches!(&error, Error::Device { call, .. } if *call == wait), "{error:?}");
    let calls = turns();
    assert_eq!((calls.len(), calls.last()), (13, Some(&write)), "six waits, and the one that lets go");
    fail("nothing", 0);
    assert!(gpu.exchange(&gpu.take(100).unwrap(), 0, 1, soon()).is_err());
    assert!(gpu.exchange(&words, 2, 1, soon()).is_err());
    assert!(gpu.exchange(&Host.alloc(4096).unwrap(), 0, 1, soon()).is_err());
}

#[test]
fn a_gpu_that_cannot_be_opened_is_let_go() {
    for call in [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreateWithPriority",
        "cuEventCreate",
        "cuMemHostAlloc",
    ] {
        let driver = driver();
        fail(call, 0);
        assert!(Gpu::with(driver, facts()).is_err());
        let calls = calls();
        assert_eq!(calls.last(), Some(&"cuDevicePrimaryCtxRelease_v2"), "after {call}: {calls:?}");
        // What came before is undone.
        let count = |name: &str| calls.iter().filter(|made| **made == name && name != call).count();
        for (made, undone) in [
            ("cuModuleLoadData", "cuModuleUnload"),
            ("cuStreamCreateWithPriority", "cuStreamDestroy_v2"),
            ("cuEventCreate", "cuEventDestroy_v2"),
        ] {
            assert_eq!(count(made), count(undone), "after {call}: {calls:?}");
        }
    }
}

fn facts() -> Facts {
    Facts {
        ordinal: 0,
        uuid: [1; 16],
        name: "script".into(),
        pci: "0000:00:00.0".into(),
        memory: 1 << 30,
        compute: (9, 0),
        processors: 1,
    }
}
