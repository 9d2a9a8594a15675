//! NVML, the management library of the NVIDIA driver: all GPUs of the machine, hidden ones too, with their NVLinks and
//! how they stand in a fabric. The only file that names its bindings.
//!
//! The library is loaded when it is asked for. That it, or a function of an older one, is missing is `Unsupported`
//! with the reason. No GPU is woken up, and no context is made on one.

#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_char, c_uint};
use std::fmt::{self, Display};
use std::ptr;

use nvml_wrapper_sys::bindings as sys;

use crate::deadline::Deadline;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::gpu::{
    Access, Fabric, FabricState, Gpu, NvLink, Probe, Remote, parse_uuid, pci_address, show_uuid,
};

/// Where it is: by the loader's path, and where Windows' Linux puts it.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];

/// More links than any GPU has; a number that a GPU lacks is answered with an error and skipped.
const LINKS: u32 = 64;

/// The loaded library.
pub struct Nvml {
    lib: sys::NvmlLib,
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nvml")
    }
}

impl Nvml {
    /// Loads and starts it.
    pub fn open() -> Result<Self> {
        Self::open_first(&LIBRARIES)
    }

    fn open_first(libraries: &[&str]) -> Result<Self> {
        let mut missing = String::new();
        for name in libraries {
            // SAFETY: loading runs the library's initialisers; NVML's touch nothing of ours.
            match unsafe { sys::NvmlLib::new(name) } {
                Ok(lib) => return Self::start(lib),
                // The loader's own words, of the first place only: the others are guesses.
                Err(error) if missing.is_empty() => missing = cause(&error),
                Err(_) => {}
            }
        }
        Err(unsupported("libnvidia-ml.so.1, which comes with the NVIDIA driver", missing))
    }

    fn start(lib: sys::NvmlLib) -> Result<Self> {
        let init = found("nvmlInit_v2", &lib.nvmlInit_v2)?;
        // SAFETY: the function takes nothing.
        match unsafe { init() } {
            sys::nvmlReturn_enum_NVML_SUCCESS => Ok(Self { lib }),
            code => Err(unsupported(
                match code {
                    sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => {
                        "a library of the loaded driver's version (reboot, or load the new driver)"
                    }
                    sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => "access to /dev/nvidiactl",
                    _ => "a loaded NVIDIA driver and its device files",
                },
                format!("nvmlInit_v2: {}", name_of(code)),
            )),
        }
    }

    /// The version of the driver, such as 580.65.06.
    pub fn driver(&self) -> Result<String> {
        let call = "nvmlSystemGetDriverVersion";
        let get = found(call, &self.lib.nvmlSystemGetDriverVersion)?;
        // SAFETY: it writes a string of at most the given length.
        text(call, |into, len| unsafe { get(into, len) })
    }

    /// The newest version of the compute interface that the driver speaks, such as (13, 0).
    pub fn compute_version(&self) -> Result<(u32, u32)> {
        let call = "nvmlSystemGetCudaDriverVersion_v2";
        let get = found(call, &self.lib.nvmlSystemGetCudaDriverVersion_v2)?;
        let mut version = 0;
        // SAFETY: it writes one number.
        done(call, unsafe { get(&mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Free bytes of a GPU's memory.
    pub fn free_memory(&self, id: &DeviceId) -> Result<u64> {
        Ok(self.by_id(id)?.memory()?.0)
    }

    fn count(&self) -> Result<u32> {
        let call = "nvmlDeviceGetCount_v2";
        let get = found(call, &self.lib.nvmlDeviceGetCount_v2)?;
        let mut count = 0;
        // SAFETY: it writes one number.
        done(call, unsafe { get(&mut count) })?;
        Ok(count)
    }

    fn by_index(&self, index: u32) -> Result<Device<'_>> {
        let call = "nvmlDeviceGetHandleByIndex_v2";
        let get = found(call, &self.lib.nvmlDeviceGetHandleByIndex_v2)?;
        let mut handle = ptr::null_mut();
        // SAFETY: it writes one handle.
        done(call, unsafe { get(index, &mut handle) })?;
        Ok(Device { lib: &self.lib, handle })
    }

    fn by_id(&self, id: &DeviceId) -> Result<Device<'_>> {
        let DeviceId::Gpu(uuid) = id else {
            return Err(Error::misuse(format!("{id} is no GPU")));
        };
        let call = "nvmlDeviceGetHandleByUUID";
        let get = found(call, &self.lib.nvmlDeviceGetHandleByUUID)?;
        let name = CString::new(show_uuid(uuid)).unwrap_or_default();
        let mut handle = ptr::null_mut();
        // SAFETY: it reads a string that ends in zero and writes one handle.
        done(call, unsafe { get(name.as_ptr(), &mut handle) })?;
        Ok(Device { lib: &self.lib, handle })
    }

    /// Reading and writing are two questions; both must be a yes.
    fn ask_peer(&self, from: &DeviceId, to: &DeviceId) -> Result<Access> {
        let call = "nvmlDeviceGetP2PStatus";
        let get = found(call, &self.lib.nvmlDeviceGetP2PStatus)?;
        let (from, to) = (self.by_id(from)?, self.by_id(to)?);
        for (word, index) in [
            ("read", sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ),
            ("write", sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE),
        ] {
            let mut status = sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_UNKNOWN;
            // SAFETY: both handles are the library's, and it writes one number.
            done(call, unsafe { get(from.handle, to.handle, index, &mut status) })?;
            if let Some(why) = peer_trouble(status) {
                return Ok(Access::No(format!("NVML: no peer {word}, {why}")));
            }
        }
        Ok(Access::Yes)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Ok(shutdown) = &self.lib.nvmlShutdown {
            // SAFETY: it takes nothing, and every handle borrows from us. There is nobody to tell of a failure.
            let _ = unsafe { shutdown() };
        }
    }
}

impl Probe for Nvml {
    /// In the library's order, which is that of PCI addresses. One that does not answer is left out, and logged.
    fn gpus(&self) -> Result<Vec<Gpu>> {
        let gpu = |index| {
            let gpu = self.by_index(index).and_then(|device| device.gpu());
            gpu.inspect_err(|error| tracing::warn!("GPU {index} of NVML does not answer: {error}")).ok()
        };
        Ok((0..self.count()?).filter_map(gpu).collect())
    }

    fn peer(&self, from: &DeviceId, to: &DeviceId) -> Access {
        self.ask_peer(from, to).unwrap_or_else(|error| {
            tracing::debug!("peer access from {from} to {to}: {error}");
            Access::Unknown
        })
    }

    /// NVML moves no data.
    fn check_peer(&self, _: &DeviceId, _: &DeviceId, _: Deadline) -> Access {
        Access::Unknown
    }

    fn fabric(&self, of: &DeviceId) -> Access {
        let fabric = self.by_id(of).map(|device| device.fabric());
        fabric.map_or(Access::Unknown, |fabric| fabric.access())
    }

    /// Only a creation that succeeds tells.
    fn multicast(&self, _: &DeviceId) -> Access {
        Access::Unknown
    }
}

/// One GPU, for as long as the library is loaded.
struct Device<'a> {
    lib: &'a sys::NvmlLib,
    handle: sys::nvmlDevice_t,
}

impl Device<'_> {
    fn gpu(&self) -> Result<Gpu> {
        let uuid = self.uuid()?;
        let bytes = parse_uuid(&uuid).ok_or_else(|| {
            Error::nonsense("nvmlDeviceGetUUID", format!("{uuid} is not the UUID of a GPU"))
        })?;
        Ok(Gpu {
            id: DeviceId::Gpu(bytes),
            ordinal: None,
            name: self.name().unwrap_or_else(|_| "NVIDIA GPU".into()),
            pci: self.pci()?,
            memory: self.memory().map_or(0, |(_, total)| total),
            capability: self.capability().ok(),
            links: self.links(),
            fabric: Some(self.fabric()),
        })
    }

    fn uuid(&self) -> Result<String> {
        let call = "nvmlDeviceGetUUID";
        let get = found(call, &self.lib.nvmlDeviceGetUUID)?;
        // SAFETY: the handle is the library's; it writes a string of at most the given length.
        text(call, |into, len| unsafe { get(self.handle, into, len) })
    }

    fn name(&self) -> Result<String> {
        let call = "nvmlDeviceGetName";
        let get = found(call, &self.lib.nvmlDeviceGetName)?;
        // SAFETY: as above.
        text(call, |into, len| unsafe { get(self.handle, into, len) })
    }

    fn pci(&self) -> Result<String> {
        let call = "nvmlDeviceGetPciInfo_v3";
        let get = found(call, &self.lib.nvmlDeviceGetPciInfo_v3)?;
        let mut info = no_pci();
        // SAFETY: the handle is the library's, and it fills in one structure.
        done(call, unsafe { get(self.handle, &mut info) })?;
        Ok(pci_address(info.domain, info.bus, info.device))
    }

    /// Free bytes, and all bytes.
    fn memory(&self) -> Result<(u64, u64)> {
        let call = "nvmlDeviceGetMemoryInfo";
        let get = found(call, &self.lib.nvmlDeviceGetMemoryInfo)?;
        let mut memory = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: as above.
        done(call, unsafe { get(self.handle, &mut memory) })?;
        Ok((memory.free, memory.total))
    }

    fn capability(&self) -> Result<(u32, u32)> {
        let call = "nvmlDeviceGetCudaComputeCapability";
        let get = found(call, &self.lib.nvmlDeviceGetCudaComputeCapability)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: as above, two numbers.
        done(call, unsafe { get(self.handle, &mut major, &mut minor) })?;
        Ok((u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0)))
    }

    /// All links, whatever the ones before them said: an inactive link hides no later one.
    fn links(&self) -> Vec<NvLink> {
        let Ok(get) = &self.lib.nvmlDeviceGetNvLinkState else { return Vec::new() };
        let link = |number| {
            let mut state = sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED;
            // SAFETY: the handle is the library's, and it writes one number.
            let there = unsafe { get(self.handle, number, &mut state) } == sys::nvmlReturn_enum_NVML_SUCCESS;
            let active = state == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED;
            let remote = if there && active { self.remote(number) } else { Remote::Unknown };
            there.then_some(NvLink { number, active, remote })
        };
        (0..LINKS).filter_map(link).collect()
    }

    fn remote(&self, link: u32) -> Remote {
        let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        if let Ok(get) = &self.lib.nvmlDeviceGetNvLinkRemoteDeviceType {
            // SAFETY: the handle is the library's, and it writes one number. Without it the kind stays unknown.
            let _ = unsafe { get(self.handle, link, &mut kind) };
        }
        match kind {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Remote::Switch,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Remote::Cpu,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => {
                let Ok(get) = &self.lib.nvmlDeviceGetNvLinkRemotePciInfo_v2 else { return Remote::Unknown };
                let mut info = no_pci();
                // SAFETY: the handle is the library's, and it fills in one structure.
                match unsafe { get(self.handle, link, &mut info) } {
                    sys::nvmlReturn_enum_NVML_SUCCESS => {
                        Remote::Gpu(pci_address(info.domain, info.bus, info.device))
                    }
                    _ => Remote::Unknown,
                }
            }
            _ => Remote::Unknown,
        }
    }

    fn fabric(&self) -> Fabric {
        self.ask_fabric().unwrap_or_else(|error| Fabric {
            state: FabricState::NotSupported,
            trouble: Some(error.to_string()),
            clique: 0,
            cluster: hex(&[0; 16]),
        })
    }

    /// By the third version of the question, or the second, which older drivers know.
    fn ask_fabric(&self) -> Result<Fabric> {
        let call = "nvmlDeviceGetGpuFabricInfoV";
        let get = found(call, &self.lib.nvmlDeviceGetGpuFabricInfoV)?;
        let versions =
            [(3, size_of::<sys::nvmlGpuFabricInfo_v3_t>()), (2, size_of::<sys::nvmlGpuFabricInfo_v2_t>())];
        let mut last = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;
        for (version, size) in versions {
            let mut info = sys::nvmlGpuFabricInfoV_t {
                version: size as c_uint | version << 24,
                clusterUuid: [0; 16],
                status: sys::nvmlReturn_enum_NVML_SUCCESS,
                cliqueId: 0,
                state: 0,
                healthMask: 0,
                healthSummary: 0,
            };
            // SAFETY: the handle is the library's; it fills in as much of the structure as its version has.
            last = unsafe { get(self.handle, &mut info) };
            match last {
                sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
                | sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => continue,
                code => done(call, code)?,
            }
            return Ok(Fabric {
                state: match u32::from(info.state) {
                    sys::NVML_GPU_FABRIC_STATE_NOT_STARTED => FabricState::NotStarted,
                    sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS => FabricState::InProgress,
                    sys::NVML_GPU_FABRIC_STATE_COMPLETED => FabricState::Completed,
                    _ => FabricState::NotSupported,
                },
                trouble: (info.status != sys::nvmlReturn_enum_NVML_SUCCESS).then(|| name_of(info.status)),
                clique: info.cliqueId,
                cluster: hex(&info.clusterUuid),
            });
        }
        done(call, last)?;
        Err(Error::nonsense(call, "no answer"))
    }
}

/// A function, or why it is not there.
fn found<'a, F, E: std::error::Error>(call: &'static str, symbol: &'a Result<F, E>) -> Result<&'a F> {
    symbol.as_ref().map_err(|error| Error::Unsupported {
        what: call.into(),
        need: "a newer NVIDIA driver".into(),
        have: cause(error),
    })
}

fn done(call: &'static str, code: sys::nvmlReturn_t) -> Result<()> {
    match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => Ok(()),
        code => Err(Error::Device { call, code: i32::try_from(code).ok(), name: name_of(code) }),
    }
}

/// A string that the library writes into space of the given length.
fn text(call: &'static str, fill: impl FnOnce(*mut c_char, c_uint) -> sys::nvmlReturn_t) -> Result<String> {
    let mut space = [0_u8; 96];
    done(call, fill(space.as_mut_ptr().cast(), space.len() as c_uint))?;
    let text =
        CStr::from_bytes_until_nul(&space).map_err(|_| Error::nonsense(call, "its text has no end"))?;
    Ok(text.to_string_lossy().into_owned())
}

fn no_pci() -> sys::nvmlPciInfo_t {
    sys::nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    }
}

fn unsupported(need: &str, have: impl Into<String>) -> Error {
    Error::Unsupported { what: "NVML".into(), need: need.into(), have: have.into() }
}

/// What the loader said; its own wrapper says only which of its functions failed.
fn cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn peer_trouble(status: sys::nvmlGpuP2PStatus_t) -> Option<impl Display> {
    Some(match status {
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK => return None,
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED => "the chipset does not support it",
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_GPU_NOT_SUPPORTED => "the GPU does not support it",
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED => {
            "the way between them crosses an interconnect that does not support it"
        }
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_DISABLED_BY_REGKEY => "the driver's settings disable it",
        sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED => "it is not supported",
        _ => "the driver does not know why",
    })
}

/// NVML's name of a code.
fn name_of(code: sys::nvmlReturn_t) -> String {
    let name = match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => "SUCCESS",
        sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => "ERROR_UNINITIALIZED",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => "ERROR_INVALID_ARGUMENT",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => "ERROR_NOT_SUPPORTED",
        sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => "ERROR_NO_PERMISSION",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => "ERROR_NOT_FOUND",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => "ERROR_INSUFFICIENT_SIZE",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER => "ERROR_INSUFFICIENT_POWER",
        sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => "ERROR_DRIVER_NOT_LOADED",
        sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => "ERROR_TIMEOUT",
        sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE => "ERROR_IRQ_ISSUE",
        sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND => "ERROR_LIBRARY_NOT_FOUND",
        sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => "ERROR_FUNCTION_NOT_FOUND",
        sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM => "ERROR_CORRUPTED_INFOROM",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => "ERROR_GPU_IS_LOST",
        sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => "ERROR_RESET_REQUIRED",
        sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => "ERROR_OPERATING_SYSTEM",
        sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => "ERROR_LIB_RM_VERSION_MISMATCH",
        sys::nvmlReturn_enum_NVML_ERROR_IN_USE => "ERROR_IN_USE",
        sys::nvmlReturn_enum_NVML_ERROR_MEMORY => "ERROR_MEMORY",
        sys::nvmlReturn_enum_NVML_ERROR_NO_DATA => "ERROR_NO_DATA",
        sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => "ERROR_ARGUMENT_VERSION_MISMATCH",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_READY => "ERROR_NOT_READY",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND => "ERROR_GPU_NOT_FOUND",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE => "ERROR_INVALID_STATE",
        sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN => "ERROR_UNKNOWN",
        other => return format!("NVML error {other}"),
    };
    format!("NVML_{name}")
}
