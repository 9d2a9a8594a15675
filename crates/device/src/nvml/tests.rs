//! NVML without a GPU: libraries that are missing or are something else, and one whose functions are ours.

use super::*;

/// A library with none of the functions.
const OTHER: &str = "libc.so.6";

#[test]
fn a_missing_library_is_unsupported_with_its_reason() {
    let error = Nvml::open_first(&["libno-such-thing.so.1", "/no/such/place.so"]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Unsupported { .. }), "{text}");
    assert!(text.contains("libnvidia-ml.so.1") && text.contains("libno-such-thing.so.1"), "{text}");
}

#[test]
fn another_library_is_unsupported_too() {
    let text = Nvml::open_first(&[OTHER]).unwrap_err().to_string();
    assert!(text.contains("nvmlInit_v2 is not available here"), "{text}");
}

#[test]
fn opening_never_panics() {
    if let Ok(nvml) = Nvml::open() {
        assert!(!nvml.driver().unwrap().is_empty());
        nvml.gpus().unwrap();
    }
}

const OK: sys::nvmlReturn_t = sys::nvmlReturn_enum_NVML_SUCCESS;
const NO: sys::nvmlReturn_t = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;

unsafe extern "C" fn nothing() -> sys::nvmlReturn_t {
    OK
}

unsafe extern "C" fn no_driver() -> sys::nvmlReturn_t {
    sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
}

unsafe extern "C" fn count(count: *mut c_uint) -> sys::nvmlReturn_t {
    // SAFETY: as `Nvml::count` calls it.
    unsafe { *count = 3 };
    OK
}

/// Handles are numbers from 1; the third GPU is lost.
unsafe extern "C" fn by_index(index: c_uint, handle: *mut sys::nvmlDevice_t) -> sys::nvmlReturn_t {
    if index == 2 {
        return sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
    }
    // SAFETY: as `Nvml::by_index` calls it.
    unsafe { *handle = ptr::without_provenance_mut(index as usize + 1) };
    OK
}

unsafe extern "C" fn by_uuid(uuid: *const c_char, handle: *mut sys::nvmlDevice_t) -> sys::nvmlReturn_t {
    // SAFETY: as `Nvml::by_id` calls it.
    let uuid = unsafe { CStr::from_ptr(uuid) }.to_str().unwrap();
    let Some(index) = (0..2).find(|index| uuid == uuid_of(*index)) else {
        return sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
    };
    // SAFETY: as `Nvml::by_id` calls it.
    unsafe { *handle = ptr::without_provenance_mut(index + 1) };
    OK
}

fn uuid_of(index: usize) -> String {
    format!("GPU-0000000{index}-0000-0000-0000-00000000000f")
}

unsafe extern "C" fn uuid(handle: sys::nvmlDevice_t, into: *mut c_char, len: c_uint) -> sys::nvmlReturn_t {
    let text = uuid_of(handle.addr() - 1);
    assert!(text.len() < len as usize);
    // SAFETY: as `text` calls it: there is room.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), into, text.len()) };
    OK
}

unsafe extern "C" fn pci(handle: sys::nvmlDevice_t, info: *mut sys::nvmlPciInfo_t) -> sys::nvmlReturn_t {
    // SAFETY: as `Device::pci` calls it.
    unsafe { (*info).bus = handle.addr() as u32 + 0x19 };
    OK
}

/// Link 0 is inactive, 1 is not there, 2 goes to a GPU, 5 to a switch.
unsafe extern "C" fn link_state(
    _: sys::nvmlDevice_t,
    link: c_uint,
    state: *mut sys::nvmlEnableState_t,
) -> sys::nvmlReturn_t {
    if ![0, 2, 5].contains(&link) {
        return sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
    }
    // SAFETY: as `Device::links` calls it.
    unsafe { *state = u32::from(link != 0) };
    OK
}

unsafe extern "C" fn link_kind(
    _: sys::nvmlDevice_t,
    link: c_uint,
    kind: *mut sys::nvmlIntNvLinkDeviceType_t,
) -> sys::nvmlReturn_t {
    // SAFETY: as `Device::remote` calls it.
    unsafe { *kind = if link == 2 { 0 } else { 2 } };
    OK
}

unsafe extern "C" fn link_pci(
    handle: sys::nvmlDevice_t,
    _: c_uint,
    info: *mut sys::nvmlPciInfo_t,
) -> sys::nvmlReturn_t {
    // SAFETY: as `Device::remote` calls it.
    unsafe { (*info).bus = 3 - handle.addr() as u32 + 0x19 };
    OK
}

/// Knows only the second version. The second GPU has no fabric.
unsafe extern "C" fn fabric(
    handle: sys::nvmlDevice_t,
    info: *mut sys::nvmlGpuFabricInfoV_t,
) -> sys::nvmlReturn_t {
    // SAFETY: as `Device::ask_fabric` calls it.
    let info = unsafe { &mut *info };
    if info.version != (36 | 2 << 24) {
        return sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if handle.addr() == 2 {
        return NO;
    }
    (info.state, info.cliqueId, info.clusterUuid) = (3, 7, [0xab; 16]);
    OK
}

/// The first may write to the second, and nothing else.
unsafe extern "C" fn peer(
    from: sys::nvmlDevice_t,
    _: sys::nvmlDevice_t,
    index: sys::nvmlGpuP2PCapsIndex_t,
    status: *mut sys::nvmlGpuP2PStatus_t,
) -> sys::nvmlReturn_t {
    let fine = from.addr() == 1 || index == sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ;
    // SAFETY: as `Nvml::ask_peer` calls it.
    unsafe { *status = if fine { 0 } else { 3 } };
    OK
}

fn scripted() -> sys::NvmlLib {
    // SAFETY: this process has that library already.
    let mut lib = unsafe { sys::NvmlLib::new(OTHER) }.unwrap();
    lib.nvmlInit_v2 = Ok(nothing);
    lib.nvmlShutdown = Ok(nothing);
    lib.nvmlDeviceGetCount_v2 = Ok(count);
    lib.nvmlDeviceGetHandleByIndex_v2 = Ok(by_index);
    lib.nvmlDeviceGetHandleByUUID = Ok(by_uuid);
    lib.nvmlDeviceGetUUID = Ok(uuid);
    lib.nvmlDeviceGetPciInfo_v3 = Ok(pci);
    lib.nvmlDeviceGetNvLinkState = Ok(link_state);
    lib.nvmlDeviceGetNvLinkRemoteDeviceType = Ok(link_kind);
    lib.nvmlDeviceGetNvLinkRemotePciInfo_v2 = Ok(link_pci);
    lib.nvmlDeviceGetGpuFabricInfoV = Ok(fabric);
    lib.nvmlDeviceGetP2PStatus = Ok(peer);
    lib
}

#[test]
fn gpus_have_all_their_links_and_one_that_is_lost_hides_no_other() {
    let nvml = Nvml::start(scripted()).unwrap();
    let gpus = nvml.gpus().unwrap();
    assert_eq!(gpus.iter().map(|gpu| gpu.pci.as_str()).collect::<Vec<_>>(), ["0000:1a:00.0", "0000:1b:00.0"]);
    let link = |number, active, remote| NvLink { number, active, remote };
    let other = Remote::Gpu("0000:1b:00.0".into());
    let expected = [link(0, false, Remote::Unknown), link(2, true, other), link(5, true, Remote::Switch)];
    assert_eq!(gpus[0].links, expected);
    // What this library has no function for is left open.
    assert_eq!((gpus[0].name.as_str(), gpus[0].memory, gpus[0].capability), ("NVIDIA GPU", 0, None));
}

#[test]
fn the_fabric_is_asked_for_in_older_words_too() {
    let nvml = Nvml::start(scripted()).unwrap();
    let gpus = nvml.gpus().unwrap();
    let expected =
        Fabric { state: FabricState::Completed, trouble: None, clique: 7, cluster: "ab".repeat(16) };
    assert_eq!(gpus[0].fabric, Some(expected));
    assert_eq!(nvml.fabric(&gpus[0].id), Access::Unknown, "only trying tells");
    let access = nvml.fabric(&gpus[1].id);
    let reason = access.reason().unwrap();
    assert!(
        reason.contains("in no NVLink fabric") && reason.contains("NVML_ERROR_NOT_SUPPORTED"),
        "{reason}"
    );
}

#[test]
fn peer_access_needs_reads_and_writes() {
    let nvml = Nvml::start(scripted()).unwrap();
    let gpus = nvml.gpus().unwrap();
    assert_eq!(nvml.peer(&gpus[0].id, &gpus[1].id), Access::Yes);
    let access = nvml.peer(&gpus[1].id, &gpus[0].id);
    assert!(
        access.reason().is_some_and(|reason| reason.starts_with("NVML: no peer write, the way")),
        "{access:?}"
    );
    assert_eq!(nvml.peer(&gpus[0].id, &DeviceId::Gpu([9; 16])), Access::Unknown);
    assert_eq!(nvml.peer(&gpus[0].id, &DeviceId::Host), Access::Unknown);
}

#[test]
fn a_driver_that_is_not_loaded_is_said() {
    let mut lib = scripted();
    lib.nvmlInit_v2 = Ok(no_driver);
    let text = Nvml::start(lib).unwrap_err().to_string();
    assert!(
        text.contains("NVML_ERROR_DRIVER_NOT_LOADED") && text.contains("a loaded NVIDIA driver"),
        "{text}"
    );
}

#[test]
fn a_function_that_is_missing_is_an_error_of_its_own() {
    let nvml = Nvml::start(scripted()).unwrap();
    let text = nvml.driver().unwrap_err().to_string();
    assert!(text.starts_with("nvmlSystemGetDriverVersion is not available here"), "{text}");
    assert!(nvml.compute_version().is_err());
}
