//! The host passes the conformance suite; and what only the host can be asked.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod conformance;
mod process;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tensorwire_device::fd::Fd;
use tensorwire_device::host::Host;
use tensorwire_device::{Device, Error, Handle, Span};

conformance::tests!(Some(Subject { device: Box::new(Host) }));

#[test]
fn child() {
    match process::role().as_deref() {
        None => {}
        Some("imports") => import_what_must_be_refused(),
        Some("allocates") => assert!(Host.alloc(128 << 20).is_ok()),
        Some(role) => conformance::processes::child(role, &subject().unwrap()),
    }
}

const LEN: usize = 4096;
const NEEDED: [SealFlags; 3] = [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL];

fn memfd(seals: &[SealFlags]) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, LEN as u64).unwrap();
    for &seal in seals {
        fcntl_add_seals(&fd, seal).unwrap();
    }
    fd
}

/// Imports a descriptor and gives the words of the refusal.
fn refusal(fd: impl Into<OwnedFd>) -> String {
    let before = open_descriptors();
    let error = Host.import(Handle::Memfd { fd: Fd::new(fd.into()), len: LEN }).unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error:?}");
    assert_eq!(open_descriptors(), before - 1, "a refused descriptor is closed");
    error.to_string()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn descriptors_that_are_not_sealed_memory_are_refused() {
    process::Child::start(&mut process::command("imports")).succeed();
}

/// In a process of its own, because it counts descriptors.
fn import_what_must_be_refused() {
    assert!(Host.import(Handle::Memfd { fd: Fd::new(memfd(&NEEDED)), len: LEN }).is_ok());
    // Each seal missing, with the two others there.
    for missing in NEEDED {
        let others: Vec<_> = NEEDED.into_iter().filter(|&seal| seal != missing).collect();
        let text = refusal(memfd(&others));
        assert!(text.contains("seals") && text.contains("SHRINK"), "{text}");
    }
    assert!(refusal(memfd(&[])).contains("seals"));
    for sealed in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        let text = refusal(memfd(&[sealed, NEEDED[0], NEEDED[1], NEEDED[2]]));
        assert!(text.contains("WRITE") && text.contains("write to it"), "{text}");
    }
    refuse_huge_pages();

    let dir = std::env::temp_dir();
    let path = dir.join(format!("tw-plain-{}", std::process::id()));
    std::fs::write(&path, [0; LEN]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    refusal(file);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(writer);
    assert!(refusal(reader).contains("not a memfd"));
    assert!(refusal(File::open(&dir).unwrap()).contains("not a memfd"));
    assert!(refusal(File::open("/dev/null").unwrap()).contains("not a memfd"));
    if let Ok(file) = File::create_new(format!("/dev/shm/tw-plain-{}", std::process::id())) {
        std::fs::remove_file(format!("/dev/shm/tw-plain-{}", std::process::id())).unwrap();
        file.set_len(LEN as u64).unwrap();
        assert!(refusal(file).contains("seals"));
    }
}

/// Sealed as needed and of the promised length, but of a file system whose pages may not be there. Making the file needs
/// none of them.
fn refuse_huge_pages() {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let fd = match memfd_create("test", flags) {
        Ok(fd) => fd,
        Err(error) => return process::skip(format!("this kernel has no huge pages: {error}")),
    };
    let len = 1 << 30;
    rustix::fs::ftruncate(&fd, len).unwrap();
    for seal in NEEDED {
        fcntl_add_seals(&fd, seal).unwrap();
    }
    let handle = Handle::Memfd { fd: Fd::new(fd), len: len as usize };
    let error = Host.import(handle).unwrap_err();
    assert!(matches!(error, Error::Refused(_)) && error.to_string().contains("file system"), "{error:?}");
}

/// What a hole in shared memory is: zeros, in every mapping, and no end of anything.
#[test]
fn a_hole_reads_as_zeros() {
    let region = Host.alloc(4 * LEN).unwrap();
    region.write(0, &[7; 4 * LEN]).unwrap();
    let Handle::Memfd { fd, .. } = region.export().unwrap() else { panic!("no memfd") };
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&fd, flags, LEN as u64, LEN as u64).unwrap();
    let mut bytes = [1; 4 * LEN];
    region.read(0, &mut bytes).unwrap();
    let expected = |at: usize| if (LEN..2 * LEN).contains(&at) { 0 } else { 7 };
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == expected(at)));
    region.write(LEN, &[8; LEN]).unwrap();
    assert!(Span::whole(region).slice(LEN..2 * LEN).unwrap().to_vec().unwrap().iter().all(|&b| b == 8));
}

/// What somebody else has mapped from a file without seals goes out as that file, and is not mapped here.
#[test]
fn a_file_of_somebody_else_is_handed_on_and_not_mapped() {
    let fd = memfd(&[]);
    let memory = Arc::new(vec![5u8; LEN]);
    let addr = memory.as_ptr() as usize;
    // SAFETY: the memory stays with the region; that it is not mapped from the file is nobody's concern here.
    let adopt = |len| unsafe { Host.adopt_file(addr, len, fd.as_fd(), Box::new(memory.clone())) };
    let region = adopt(LEN).unwrap();
    let stat = rustix::fs::fstat(&fd).unwrap();
    let place = region.place().unwrap().unwrap();
    assert_eq!((place.ids, place.offset, place.whole), (vec![stat.st_dev, stat.st_ino], 0, LEN));
    assert!(!region.shareable(), "it is not for collectives");
    let handle = region.export().unwrap();
    let Handle::File { fd: exported, len } = &handle else { panic!("{handle:?}") };
    assert_eq!((rustix::fs::fstat(exported).unwrap().st_ino, *len), (stat.st_ino, LEN));
    assert!(Host.import(handle).unwrap_err().to_string().contains("seals"));
    assert!(adopt(LEN + 1).unwrap_err().to_string().contains("4096 bytes"), "the file is shorter");
}

#[test]
fn memory_that_can_only_be_read_is_not_imported() {
    let fd = memfd(&NEEDED);
    let readable = File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    let error = Host.import(Handle::Memfd { fd: Fd::new(readable.into()), len: LEN }).unwrap_err();
    assert!(error.to_string().contains("mapping 4096 bytes"), "{error}");
}

#[test]
fn memory_is_allocated_at_once_and_sealed() {
    let Handle::Memfd { fd, len } = Host.alloc(1 << 20).unwrap().export().unwrap() else {
        panic!("another handle")
    };
    let seals = rustix::fs::fcntl_get_seals(&fd).unwrap();
    assert!(NEEDED.into_iter().all(|seal| seals.contains(seal)), "{seals:?}");
    assert!(rustix::fs::ftruncate(&fd, 0).is_err() && rustix::fs::ftruncate(&fd, 2 << 20).is_err());
    assert!(fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    let stat = rustix::fs::fstat(&fd).unwrap();
    assert!(stat.st_blocks * 512 >= len as i64, "{} blocks", stat.st_blocks);
}

#[test]
fn private_memory_is_zeroed_aligned_and_stays_here() {
    for len in [0, 1, 4096, (1 << 20) + 3] {
        let region = tensorwire_device::host::private(len).unwrap();
        assert_eq!((region.len(), region.addr() % 64), (len, 0));
        let mut bytes = vec![1; len];
        region.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);
        region.write(0, &bytes).unwrap();
        bytes.fill(0);
        region.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
        assert!(region.read(len, &mut [0]).is_err());
        assert!(region.export().unwrap_err().to_string().contains("private memory"));
    }
}

/// Containers have 64 MiB of /dev/shm, or none; memory comes from elsewhere.
#[test]
fn a_small_dev_shm_does_not_matter() {
    let script = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\"";
    let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"];
    match std::process::Command::new(wrapper[0]).args(&wrapper[1..]).arg("true").output() {
        Ok(output) if output.status.success() => {
            process::Child::start(&mut process::command_under(&wrapper, "allocates")).succeed();
        }
        other => process::skip(format_args!("a mount namespace of our own: {other:?}")),
    }
}
