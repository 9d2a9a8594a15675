//! Physical memory: allocations that are mapped, and that leave their process as descriptors or fabric handles.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys;

use super::{Address, Driver, Opaque, Physical};
use crate::error::{Error, Result};

/// How physical memory may leave its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum Export {
    /// As a file descriptor.
    Fd,
    /// As a fabric handle.
    Fabric,
    /// As either.
    Both,
}

impl Export {
    pub(super) fn kind(self) -> sys::CUmemAllocationHandleType {
        match self {
            Self::Fd => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Self::Fabric => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
            Self::Both => Self::Fd.kind() | Self::Fabric.kind(),
        }
    }
}

impl Driver {
    /// What sizes and addresses of physical memory are multiples of.
    pub(in crate::cuda) fn granularity(&self, device: c_int, export: Export) -> Result<usize> {
        let properties = properties(device, export);
        let recommended = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: reads one struct, writes one number.
        unsafe { self.cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, recommended) }?;
        Ok(bytes.max(1))
    }

    /// Physical memory of a device; `len` is a multiple of the granularity.
    pub(in crate::cuda) fn create(&self, device: c_int, len: usize, export: Export) -> Result<Physical> {
        let properties = properties(device, export);
        let mut memory = 0;
        // SAFETY: reads one struct, writes one handle.
        unsafe { self.cuMemCreate(&raw mut memory, len, &raw const properties, 0) }.map(|()| memory)
    }

    /// # Safety
    /// The caller's own reference, used no more. (Mappings stay.)
    pub(in crate::cuda) unsafe fn release(&self, memory: Physical) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemRelease(memory) }
    }

    /// A reference to the physical memory behind a mapped address.
    pub(in crate::cuda) fn retain(&self, address: Address) -> Result<Physical> {
        let mut memory = 0;
        // SAFETY: the driver looks the address up and refuses what it does not know.
        unsafe { self.cuMemRetainAllocationHandle(&raw mut memory, address as *mut c_void) }.map(|()| memory)
    }

    /// Addresses without memory.
    pub(in crate::cuda) fn reserve(&self, len: usize) -> Result<Address> {
        self.reserve_aligned(len, 0)
    }

    /// The same, from a multiple of so many bytes on; 0 leaves it to the driver.
    pub(in crate::cuda) fn reserve_aligned(&self, len: usize, alignment: usize) -> Result<Address> {
        let mut address = 0;
        // SAFETY: writes one number.
        unsafe { self.cuMemAddressReserve(&raw mut address, len, alignment, 0, 0) }.map(|()| address)
    }

    /// # Safety
    /// The caller's own reservation of this length, without mappings, used no more.
    pub(in crate::cuda) unsafe fn free_addresses(&self, address: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemAddressFree(address, len) }
    }

    /// # Safety
    /// `address..address + len` is reserved by the caller and has no mapping.
    pub(in crate::cuda) unsafe fn map(&self, address: Address, len: usize, memory: Physical) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemMap(address, len, 0, memory, 0) }
    }

    /// # Safety
    /// `address..address + len` was mapped by the caller as a whole, and no queue uses it any more.
    pub(in crate::cuda) unsafe fn unmap(&self, address: Address, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuMemUnmap(address, len) }
    }

    /// Lets a device read and write mapped memory.
    ///
    /// # Safety
    /// `address..address + len` is mapped by the caller.
    pub(in crate::cuda) unsafe fn allow(&self, address: Address, len: usize, device: c_int) -> Result<()> {
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the caller's promise; reads one struct.
        unsafe { self.cuMemSetAccess(address, len, &raw const access, 1) }
    }

    /// Physical memory as a descriptor.
    pub(in crate::cuda) fn export_fd(&self, memory: Physical) -> Result<OwnedFd> {
        let mut fd: RawFd = -1;
        // SAFETY: writes one descriptor; a handle that was not made for it is refused.
        unsafe { self.cuMemExportToShareableHandle((&raw mut fd).cast(), memory, Export::Fd.kind(), 0) }?;
        if fd < 0 {
            return Err(Error::nonsense("cuMemExportToShareableHandle", "no descriptor came"));
        }
        // SAFETY: the driver opened it for us, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // The call has no flag for it.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|e| Error::io("keeping exported memory from programs that this process starts", e))?;
        Ok(fd)
    }

    /// Physical memory as a fabric handle.
    pub(in crate::cuda) fn export_fabric(&self, memory: Physical) -> Result<Opaque> {
        let mut handle: Opaque = [0; 64];
        // SAFETY: writes 64 bytes; a handle that was not made for it is refused.
        unsafe {
            self.cuMemExportToShareableHandle((&raw mut handle).cast(), memory, Export::Fabric.kind(), 0)
        }?;
        Ok(handle)
    }

    /// A reference to memory that came as a descriptor.
    pub(in crate::cuda) fn import_fd(&self, fd: BorrowedFd<'_>) -> Result<Physical> {
        let mut memory = 0;
        // The descriptor itself in place of a pointer: that is how this call takes it.
        let handle = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: an open descriptor; what is no memory of the driver's is refused.
        unsafe { self.cuMemImportFromShareableHandle(&raw mut memory, handle, Export::Fd.kind()) }?;
        Ok(memory)
    }

    /// A reference to memory that came as a fabric handle.
    pub(in crate::cuda) fn import_fabric(&self, handle: &Opaque) -> Result<Physical> {
        let (mut memory, mut handle) = (0, *handle);
        // SAFETY: reads 64 bytes; what is no handle is refused.
        unsafe {
            self.cuMemImportFromShareableHandle(
                &raw mut memory,
                (&raw mut handle).cast(),
                Export::Fabric.kind(),
            )
        }?;
        Ok(memory)
    }
}

fn location(device: c_int) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(device: c_int, export: Export) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: export.kind(),
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}
