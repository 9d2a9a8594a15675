//! A machine whose driver cannot be loaded, whether it has one or not: the loader finds files that are no libraries first.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::Command;
use std::{env, fs};

use tensorwire_device::cuda::{self, CudaProbe, Gpu};
use tensorwire_device::nvml::Nvml;
use tensorwire_device::{Error, Result};

/// The folder of those files, in the process that is started with it.
const FOLDER: &str = "TEST_NO_DRIVER";

#[test]
fn every_call_says_why_there_is_no_gpu() {
    if let Ok(folder) = env::var(FOLDER) {
        return all_are_unsupported(&folder);
    }
    let folder = env::temp_dir().join(format!("tensorwire-no-driver-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for file in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
        fs::write(folder.join(file), "no library").unwrap();
    }
    // The loader reads the variable when a process begins.
    let ended = Command::new(env::current_exe().unwrap())
        .args(["--exact", "every_call_says_why_there_is_no_gpu", "--nocapture"])
        .envs([("LD_LIBRARY_PATH", &folder), (FOLDER, &folder)].map(|(name, path)| (name, path.as_os_str())))
        .output();
    fs::remove_dir_all(&folder).unwrap();
    let ended = ended.unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

fn all_are_unsupported(folder: &str) {
    fn check<T>(call: &str, library: &str, result: Result<T>) {
        match result {
            Err(Error::Unsupported { have, .. }) if have.contains(library) => {}
            Err(error) => panic!("{call} does not say why: {error}"),
            Ok(_) => panic!("{call} worked without a driver"),
        }
    }
    let driver = format!("{folder}/libcuda.so.1");
    check("count", &driver, cuda::count());
    check("driver_version", &driver, cuda::driver_version());
    check("facts", &driver, cuda::facts(0));
    check("Gpu::open", &driver, Gpu::open(0));
    check("Gpu::open_uuid", &driver, Gpu::open_uuid([7; 16]));
    check("CudaProbe::new", &driver, CudaProbe::new());
    check("Nvml::open", &format!("{folder}/libnvidia-ml.so.1"), Nvml::open());
}
