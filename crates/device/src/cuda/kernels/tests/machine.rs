//! The kernels' sources as a library for this processor, and memory that they may touch.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use libloading::Library;

use crate::cuda::kernels::arguments::{Gate, StridedArguments, StridedDim};

/// Runs kernels, one at a time. Takes the memory they may touch from the caller and refuses all other.
pub(super) struct Machine(MutexGuard<'static, Library>);

/// The library, built where it is not yet; or nothing where there is no compiler, and the reason is printed.
pub(super) fn machine() -> Option<Machine> {
    static LIBRARY: LazyLock<Result<Mutex<Library>, String>> = LazyLock::new(|| {
        let built = build()?;
        // SAFETY: our own library; loading it runs only what C++ does for its statics.
        unsafe { Library::new(built) }.map(Mutex::new).map_err(|error| error.to_string())
    });
    match &*LIBRARY {
        Ok(library) => Some(Machine(library.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(reason) => {
            println!("skipped: {reason}");
            assert!(std::env::var_os("CI").is_none(), "{reason}");
            None
        }
    }
}

/// Beside this program, named by the hash of the sources, so that it is built once.
fn build() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (kernels, machine) = (root.join("kernels"), root.join("tests/kernels"));
    let mut hash = blake3::Hasher::new();
    let mut sources = Vec::new();
    for folder in [&kernels, &machine] {
        sources.extend(std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    }
    sources.retain(|path| path.is_file());
    sources.sort();
    for path in sources {
        hash.update(&std::fs::read(path).unwrap());
    }
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap();
    let built = folder.join(format!("libkernels-{}.so", &hash.finalize().to_hex()[..16]));
    if built.exists() {
        return Ok(built);
    }
    let unfinished = folder.join(format!("libkernels-{}.part", std::process::id()));
    let said = Command::new("g++")
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"])
        // A reduction has at least one input, which the compiler cannot know.
        .arg("-Wno-maybe-uninitialized")
        .arg(format!("-I{}", machine.display()))
        .arg(format!("-I{}", kernels.display()))
        .arg(machine.join("machine.cpp"))
        .arg("-o")
        .arg(&unfinished)
        .output()
        .map_err(|error| format!("g++ is needed to compile the kernels for this processor: {error}"))?;
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    std::fs::rename(unfinished, &built).unwrap();
    Ok(built)
}

impl Machine {
    /// Runs all threads; how many accesses were wrong.
    pub(super) fn run<A>(
        &self,
        entry: &str,
        (blocks, threads): (u32, u32),
        arguments: &A,
        read: &[&TouchedMemory],
        written: &[&TouchedMemory],
    ) -> u64 {
        self.launch(entry, (blocks, threads), 0..blocks, arguments, read, written)
    }

    /// Runs one block of a grid that would take too long.
    pub(super) fn run_one<A>(
        &self,
        entry: &str,
        grid: (u32, u32),
        block: u32,
        arguments: &A,
        read: &[&TouchedMemory],
        written: &[&TouchedMemory],
    ) -> u64 {
        self.launch(entry, grid, block..block + 1, arguments, read, written)
    }

    fn launch<A>(
        &self,
        entry: &str,
        (blocks, threads): (u32, u32),
        part: std::ops::Range<u32>,
        arguments: &A,
        read: &[&TouchedMemory],
        written: &[&TouchedMemory],
    ) -> u64 {
        type Allow = unsafe extern "C" fn(u64, u64);
        type Launch = unsafe extern "C" fn(*const (), *const (), u64, u32, u32, u32, u32) -> u64;
        // SAFETY: these are their types in machine.cpp. What is allowed is memory of the caller's, and the library touches
        // no other; the kernel takes these arguments.
        unsafe {
            let kernel = *self.0.get::<*const ()>(entry.as_bytes()).unwrap();
            let (allow_read, allow_write) =
                (self.0.get::<Allow>(b"allow_read").unwrap(), self.0.get::<Allow>(b"allow_write").unwrap());
            read.iter().for_each(|memory| allow_read(memory.address(), memory.len as u64));
            written.iter().for_each(|memory| allow_write(memory.address(), memory.len as u64));
            let launch = self.0.get::<Launch>(b"launch").unwrap();
            let pointer = std::ptr::from_ref(arguments).cast();
            launch(kernel, pointer, size_of::<A>() as u64, blocks, threads, part.start, part.end)
        }
    }
}

/// Bytes at a place that is known, to be read and written by kernels.
pub(super) struct TouchedMemory {
    place: *mut u8,
    room: std::alloc::Layout,
    offset: usize,
    len: usize,
}

// SAFETY: threads that share it take its address; who writes the bytes is ordered by the kernels that they run.
unsafe impl Sync for TouchedMemory {}

impl TouchedMemory {
    /// These bytes, so far after a multiple of 16.
    pub(super) fn new(bytes: &[u8], offset: usize) -> Self {
        let room = std::alloc::Layout::from_size_align(offset + bytes.len() + 1, 16).unwrap();
        // SAFETY: it has at least one byte.
        let place = unsafe { std::alloc::alloc_zeroed(room) };
        assert!(!place.is_null());
        let mut memory = Self { place, room, offset, len: bytes.len() };
        memory.write(bytes);
        memory
    }

    pub(super) fn address(&self) -> u64 {
        self.place.expose_provenance() as u64 + self.offset as u64
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: there is room for so many after the offset.
        unsafe { self.place.add(self.offset).copy_to_nonoverlapping(bytes.as_mut_ptr(), self.len) };
        bytes
    }

    pub(super) fn clear(&self) {
        // SAFETY: as above, and kernels run one after the other.
        unsafe { self.place.add(self.offset).write_bytes(0, self.len) };
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        // SAFETY: as above.
        unsafe { self.place.add(self.offset).copy_from_nonoverlapping(bytes.as_ptr(), self.len) };
    }
}

impl Drop for TouchedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated so.
        unsafe { std::alloc::dealloc(self.place, self.room) };
    }
}

impl StridedArguments {
    /// More than 2^32 elements of one byte that fall on four bytes.
    pub(super) fn as_if_large(to: u64, from: u64) -> Self {
        let mut dim = [StridedDim::default(); crate::cuda::kernels::arguments::MOST_DIMS];
        dim[0] = StridedDim::new(2, 1, 1);
        dim[1] = StridedDim::new(3 << 30, 0, 0);
        dim[2] = StridedDim::new(2, 2, 2);
        Self { gate: Gate::OPEN, to, from, count: 12 << 30, dims: 3, unused: 0, dim }
    }
}
