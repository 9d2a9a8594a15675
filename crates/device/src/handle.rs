//! What crosses to another process so that it can map a region.

use std::os::fd::{AsFd, BorrowedFd};

use crate::device::check_inside;
use crate::error::{Error, Result};
use crate::fd::Fd;

/// A region on its way to another process: a promise of how large it is, and the means to map it.
///
/// What [`Handle::encode`] gives travels in a frame; the descriptors beside it as SCM_RIGHTS.
#[derive(Debug)]
#[non_exhaustive]
pub enum Handle {
    /// A sealed memfd with host memory.
    Memfd {
        /// The descriptor.
        fd: Fd,
        /// The length that was promised; an import checks it.
        len: usize,
    },
    /// A file without seals that another program has mapped from its beginning. Nothing here maps it, because its maker could
    /// cut it short. A program that trusts the maker can map the descriptor itself.
    File {
        /// The descriptor.
        fd: Fd,
        /// The length that was promised.
        len: usize,
    },
    /// Memory of a GPU.
    Gpu(GpuHandle),
}

/// Memory of a GPU: a part of one or several allocations that lie one behind the other.
#[derive(Debug)]
#[non_exhaustive]
pub struct GpuHandle {
    /// The GPU's UUID: ordinals differ between processes.
    pub device: [u8; 16],
    /// Where the memory begins in the first allocation.
    pub offset: usize,
    /// The promised length in bytes.
    pub len: usize,
    /// The allocations.
    pub chunks: Vec<Chunk>,
}

impl GpuHandle {
    /// `len` bytes that begin at `offset` of the first allocation.
    pub fn new(device: [u8; 16], offset: usize, len: usize, chunks: Vec<Chunk>) -> Self {
        Self { device, offset, len, chunks }
    }
}

/// One allocation of a GPU.
#[derive(Debug)]
#[non_exhaustive]
pub struct Chunk {
    /// The driver's number of the allocation in the process that exported it. An address may come to mean other memory;
    /// this number does not.
    pub id: u64,
    /// Its length in bytes.
    pub size: usize,
    /// How to get it.
    pub means: Means,
}

/// How an allocation of a GPU crosses to another process.
#[derive(Debug)]
#[non_exhaustive]
pub enum Means {
    /// A descriptor.
    Fd(Fd),
    /// A fabric handle, which also crosses to other hosts of the same NVLink fabric.
    Fabric([u8; 64]),
    /// A legacy handle: works as long as its maker lives.
    Legacy([u8; 64]),
}

impl Handle {
    /// More allocations than one region is made of.
    const MOST_CHUNKS: usize = 1 << 12;

    /// The promised length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Memfd { len, .. } | Self::File { len, .. } => *len,
            Self::Gpu(gpu) => gpu.len,
        }
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first descriptor that travels beside the frame.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fds().next()
    }

    /// All descriptors that travel beside the frame, in their order.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let (file, chunks) = match self {
            Self::Memfd { fd, .. } | Self::File { fd, .. } => (Some(fd.as_fd()), [].as_slice()),
            Self::Gpu(gpu) => (None, gpu.chunks.as_slice()),
        };
        let chunks = chunks.iter().filter_map(|chunk| match &chunk.means {
            Means::Fd(fd) => Some(fd.as_fd()),
            Means::Fabric(_) | Means::Legacy(_) => None,
        });
        file.into_iter().chain(chunks)
    }

    /// What makes two handles the same memory in this process, where that can be told.
    pub fn key(&self) -> Result<Option<(u64, u64)>> {
        match self {
            Self::Memfd { fd, .. } => {
                let stat = rustix::fs::fstat(fd).map_err(|e| Error::io("looking at an imported memfd", e))?;
                Ok(Some((stat.st_dev, stat.st_ino)))
            }
            Self::File { .. } | Self::Gpu(_) => Ok(None),
        }
    }

    /// What a GPU maps. Refuses host memory.
    #[cfg(not(loom))]
    pub(crate) fn of_gpu(self) -> Result<GpuHandle> {
        match self {
            Self::Gpu(gpu) => Ok(gpu),
            Self::Memfd { .. } | Self::File { .. } => {
                Err(Error::misuse("host memory is mapped by the host, not by a GPU"))
            }
        }
    }

    /// The handle of a part of the region.
    pub fn part(self, start: usize, len: usize) -> Result<Self> {
        check_inside(self.len(), start, len)?;
        match self {
            Self::Gpu(gpu) => Ok(Self::Gpu(GpuHandle { offset: gpu.offset + start, len, ..gpu })),
            whole if whole.len() == len => Ok(whole),
            Self::Memfd { len: whole, .. } | Self::File { len: whole, .. } => Err(Error::Unsupported {
                what: format!("sharing {len} bytes of host memory"),
                need: "a region of their own, or the one that they lie in".into(),
                have: format!("a part of {whole} bytes"),
            }),
        }
    }

    /// The bytes of the frame. Numbers are little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let number = |bytes: &mut Vec<u8>, value: usize| bytes.extend((value as u64).to_le_bytes());
        match self {
            Self::Memfd { len, .. } => {
                bytes.push(kind::MEMFD);
                number(&mut bytes, *len);
            }
            Self::File { len, .. } => {
                bytes.push(kind::FILE);
                number(&mut bytes, *len);
            }
            Self::Gpu(gpu) => {
                bytes.push(kind::GPU);
                bytes.extend(gpu.device);
                number(&mut bytes, gpu.offset);
                number(&mut bytes, gpu.len);
                number(&mut bytes, gpu.chunks.len());
                for chunk in &gpu.chunks {
                    bytes.extend(chunk.id.to_le_bytes());
                    number(&mut bytes, chunk.size);
                    match &chunk.means {
                        Means::Fd(_) => bytes.push(kind::FD),
                        Means::Fabric(handle) => {
                            bytes.push(kind::FABRIC);
                            bytes.extend(handle);
                        }
                        Means::Legacy(handle) => {
                            bytes.push(kind::LEGACY);
                            bytes.extend(handle);
                        }
                    }
                }
            }
        }
        bytes
    }

    /// The handle from a frame and the descriptors that came beside it. Both must be used up.
    pub fn decode(bytes: &[u8], fds: Vec<Fd>) -> Result<Self> {
        let mut reader = Reader { bytes, fds: fds.into_iter() };
        let handle = match reader.byte()? {
            kind::MEMFD => Self::Memfd { len: reader.number()?, fd: reader.fd()? },
            kind::FILE => Self::File { len: reader.number()?, fd: reader.fd()? },
            kind::GPU => {
                let (device, offset, len) = (reader.array()?, reader.number()?, reader.number()?);
                let count = reader.number()?;
                if count > Self::MOST_CHUNKS {
                    return Err(Error::refused(format!("a handle of {count} allocations")));
                }
                let chunks = (0..count).map(|_| reader.chunk()).collect::<Result<Vec<_>>>()?;
                let whole = chunks.iter().try_fold(0_usize, |sum, chunk| sum.checked_add(chunk.size));
                let fits = offset.checked_add(len).is_some_and(|end| whole.is_some_and(|whole| end <= whole));
                if !fits || whole.is_none_or(|whole| whole > isize::MAX as usize) {
                    return Err(Error::refused(format!(
                        "a handle that promises {len} bytes at {offset} of allocations without so many"
                    )));
                }
                Self::Gpu(GpuHandle { device, offset, len, chunks })
            }
            other => return Err(Error::refused(format!("a handle of unknown kind {other}"))),
        };
        reader.end()?;
        Ok(handle)
    }
}

/// The first byte of a handle, and of a chunk's means.
mod kind {
    pub(super) const MEMFD: u8 = 0;
    pub(super) const GPU: u8 = 1;
    pub(super) const FILE: u8 = 2;
    pub(super) const FD: u8 = 0;
    pub(super) const FABRIC: u8 = 1;
    pub(super) const LEGACY: u8 = 2;
}

/// What is left of a frame.
struct Reader<'a> {
    bytes: &'a [u8],
    fds: std::vec::IntoIter<Fd>,
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (array, rest) =
            self.bytes.split_first_chunk().ok_or_else(|| Error::refused("a handle that ends early"))?;
        self.bytes = rest;
        Ok(*array)
    }

    fn byte(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<usize> {
        let number = u64::from_le_bytes(self.array()?);
        usize::try_from(number).map_err(|_| Error::refused(format!("a handle with a size of {number}")))
    }

    fn fd(&mut self) -> Result<Fd> {
        self.fds.next().ok_or_else(|| Error::refused("a handle that came without its descriptor"))
    }

    fn chunk(&mut self) -> Result<Chunk> {
        let id = u64::from_le_bytes(self.array()?);
        let size = self.number()?;
        let means = match self.byte()? {
            kind::FD => Means::Fd(self.fd()?),
            kind::FABRIC => Means::Fabric(self.array()?),
            kind::LEGACY => Means::Legacy(self.array()?),
            other => return Err(Error::refused(format!("a handle with unknown means {other}"))),
        };
        Ok(Chunk { id, size, means })
    }

    fn end(mut self) -> Result<()> {
        if !self.bytes.is_empty() || self.fds.next().is_some() {
            return Err(Error::refused("a handle with more behind it"));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)] // in helpers of tests too
mod tests {
    use super::*;

    fn fd() -> Fd {
        Fd::new(rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }

    fn gpu() -> Handle {
        let chunks = vec![
            Chunk { id: 7, size: 100, means: Means::Fd(fd()) },
            Chunk { id: 8, size: 50, means: Means::Fabric([3; 64]) },
            Chunk { id: 9, size: 10, means: Means::Legacy([4; 64]) },
        ];
        Handle::Gpu(GpuHandle { device: [5; 16], offset: 60, len: 100, chunks })
    }

    fn fds_of(handle: &Handle) -> Vec<Fd> {
        handle.fds().map(|fd| crate::fd::dup(fd).unwrap()).collect()
    }

    #[test]
    fn there_and_back() {
        for handle in [gpu(), Handle::Memfd { fd: fd(), len: 4096 }, Handle::File { fd: fd(), len: 4095 }] {
            let again = Handle::decode(&handle.encode(), fds_of(&handle)).unwrap();
            assert_eq!(again.encode(), handle.encode());
            assert_eq!((again.len(), again.fds().count()), (handle.len(), 1));
        }
    }

    #[test]
    fn damaged_frames_are_refused() {
        let handle = gpu();
        let whole = handle.encode();
        for len in 0..whole.len() {
            let error = Handle::decode(&whole[..len], fds_of(&handle)).unwrap_err();
            assert!(matches!(error, Error::Refused(_)), "{error:?}");
        }
        assert!(Handle::decode(&[&whole[..], &[0]].concat(), fds_of(&handle)).is_err());
        assert!(Handle::decode(&whole, vec![]).unwrap_err().to_string().contains("without its descriptor"));
        assert!(Handle::decode(&whole, vec![fd(), fd()]).is_err());
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            // Other numbers are other numbers; nothing panics, and nothing large is allocated.
            let _ = Handle::decode(&bytes, fds_of(&handle));
        }
    }

    #[test]
    fn promises_that_do_not_add_up_are_refused() {
        for (offset, len) in [(60, 101), (usize::MAX, 1), (161, 0), (0, usize::MAX)] {
            let Handle::Gpu(mut gpu) = gpu() else { unreachable!() };
            (gpu.offset, gpu.len) = (offset, len);
            let handle = Handle::Gpu(gpu);
            assert!(Handle::decode(&handle.encode(), fds_of(&handle)).is_err(), "{offset} {len}");
        }
    }
}
