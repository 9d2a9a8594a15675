//! Finds libucp and loads it so that the rest of the process does not notice: libucs, which it brings along, handles signals and
//! patches functions of libc as soon as it is loaded.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};

use super::Ucx;
use super::table::Table;
use crate::error::{Error, Result};

/// The library of the first interface, in all versions.
const NAME: &str = "libucp.so.0";
/// The oldest version that has all we call.
const OLDEST: [u32; 3] = [1, 13, 0];

/// What is found is kept: a library that has patched a process is never unloaded.
static LOADED: Mutex<Option<&'static Ucx>> = Mutex::new(None);

/// See [`Ucx::load`].
pub(super) fn load(folders: &[PathBuf]) -> Result<&'static Ucx> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(ucx) = *loaded {
        return Ok(ucx);
    }
    let found = find(folders)?;
    *loaded = Some(found);
    Ok(found)
}

fn find(folders: &[PathBuf]) -> Result<&'static Ucx> {
    if let Ok(library) = quietly(|| open(NAME.as_ref(), libc::RTLD_NOLOAD)) {
        return check(library, "libucp of this process");
    }
    // The loader is not asked for what is not there: its words would not help.
    let there = folders.iter().map(|folder| folder.join(NAME)).filter(|path| path.exists());
    find_in(&std::iter::once(PathBuf::from(NAME)).chain(there).collect::<Vec<_>>())
}

/// The first of these files that is one, and new enough.
pub(super) fn find_in(paths: &[PathBuf]) -> Result<&'static Ucx> {
    let mut reasons = Vec::new();
    for path in paths {
        let found = quietly(|| open(path.as_os_str(), 0));
        match found.map_err(|error| cause(&error)).and_then(|library| {
            check(library, &path.display().to_string()).map_err(|error| error.to_string())
        }) {
            Ok(ucx) => return Ok(ucx),
            Err(why) => reasons.push(why),
        }
    }
    Err(unsupported(reasons.join("; ")))
}

fn open(path: &OsStr, flags: c_int) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: loading runs the initialisers of libucp and of what it brings along. `quietly` undoes what they do to the process.
    unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_LOCAL | flags) }.map(Library::from)
}

/// Takes a library that is loaded, if it is new enough.
fn check(library: Library, place: &str) -> Result<&'static Ucx> {
    // It has threads and handlers by now: it stays loaded, whatever it is.
    let library = Box::leak(Box::new(library));
    let table = Table::load(library).map_err(|missing| {
        unsupported(format!("{place}, which is too old or incomplete: it has no {missing}"))
    })?;
    let mut version = [0; 3];
    let [major, minor, release] = &mut version;
    // SAFETY: the function writes three numbers.
    unsafe { (table.ucp_get_version)(major, minor, release) };
    if !fits(version) {
        let [major, minor, release] = version;
        return Err(unsupported(format!("{place}, which is version {major}.{minor}.{release}")));
    }
    Ok(Box::leak(Box::new(Ucx { table, version, place: place.into() })))
}

/// The loader's own words.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether a version has all that we call, as we call it.
pub(super) fn fits(version: [u32; 3]) -> bool {
    version >= OLDEST && version[0] == OLDEST[0]
}

fn unsupported(have: String) -> Error {
    let have = if have.is_empty() { "none".into() } else { have };
    Error::Unsupported { what: "UCX".into(), need: "libucp 1.13 or newer".into(), have }
}

/// Runs what loads or starts the library. Signals that it handles from then on are given back to whoever handled them before, and
/// it is told not to patch the functions that map memory.
pub(super) fn quietly<T>(run: impl FnOnce() -> T) -> T {
    let before = dispositions();
    let done = with_variable(c"UCX_MEM_EVENTS", c"n", run);
    for (signal, old) in before {
        let Some(new) = disposition(signal) else { continue };
        if new.sa_sigaction != old.sa_sigaction && is_of_ucx(new.sa_sigaction) {
            // SAFETY: the disposition is the one that the signal had.
            unsafe { libc::sigaction(signal, &old, ptr::null_mut()) };
        }
    }
    done
}

fn dispositions() -> Vec<(c_int, libc::sigaction)> {
    (1..=libc::SIGRTMAX()).filter_map(|signal| Some((signal, disposition(signal)?))).collect()
}

/// What happens on a signal; nothing for those that libc keeps for itself.
pub(super) fn disposition(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: all of it is plain data, and zero is a valid value of each field.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed, and one structure is written.
    (unsafe { libc::sigaction(signal, ptr::null(), &mut now) } == 0).then_some(now)
}

/// Whether a signal's handler belongs to the library: other threads may set theirs while it is loaded.
fn is_of_ucx(handler: usize) -> bool {
    // SAFETY: all of it is plain data, and zero is a valid value of each field.
    let mut place: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for, and one structure is written.
    if handler <= 1 || unsafe { libc::dladdr(handler as *const _, &mut place) } == 0 {
        return false;
    }
    // SAFETY: the loader gives the name of a loaded file, which ends in zero, or null.
    let file = unsafe { place.dli_fname.as_ref().map(|name| CStr::from_ptr(name)) };
    let file = file.and_then(|file| file.to_str().ok()).map(Path::new);
    file.and_then(Path::file_name).is_some_and(|name| name.to_string_lossy().starts_with("libuc"))
}

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

/// Runs something in an environment that has this variable, unless the user has set it.
///
/// Other threads may read the environment at any time, and `setenv` may move the list under them. So the list is not changed. A
/// longer one, which lives for ever, takes its place, and the old one comes back afterwards.
fn with_variable<T>(name: &CStr, value: &CStr, run: impl FnOnce() -> T) -> T {
    if std::env::var_os(OsStr::new(&*name.to_string_lossy())).is_some() {
        return run();
    }
    let entry = [name.to_bytes(), b"=", value.to_bytes()].concat();
    let Ok(entry) = CString::new(entry) else { return run() };
    // SAFETY: the list of the environment ends in null, or is null where it was cleared. Nobody frees a list that others may read.
    let (old, mut list) = unsafe {
        let old = environ;
        let mut list = Vec::new();
        let mut at = old;
        while !at.is_null() && !(*at).is_null() {
            list.push(*at);
            at = at.add(1);
        }
        (old, list)
    };
    list.extend([entry.into_raw(), ptr::null_mut()]);
    let new = Box::leak(list.into_boxed_slice()).as_mut_ptr();
    // SAFETY: whoever reads the pointer sees the one list or the other, and both are whole and live for ever.
    unsafe { environ = new };
    let done = run();
    // SAFETY: as above. If somebody has set a variable meanwhile, there is a third list by now, which stays.
    unsafe {
        if environ == new {
            environ = old;
        }
    }
    done
}
