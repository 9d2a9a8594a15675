//! Copies of memory that others may write meanwhile: other processes, and other threads of this one.
//!
//! A plain copy is a data race then, and the language gives a program with one no meaning at all. So these copies are made
//! by a function that the compiler cannot see: the C library's `memmove`, called through a pointer that is read anew
//! for each call, as volatile. It must take the call for one that may read and write those bytes in any way, such as with
//! relaxed atomics, one for each byte; and that is what it comes to. The bytes that arrive may be a mixture of old
//! and new ones. `memmove` decides nothing by what it copies, so nothing else happens.
//!
//! It costs what a plain copy of a length that is not known costs, which is a call of the same function.

use std::ffi::c_void;

type Move = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;

static MOVE: Move = libc::memmove;

/// Copies `len` bytes; others may write to either side meanwhile.
///
/// # Safety
/// `from` is valid for reads and `into` for writes of `len` bytes.
#[inline]
pub(super) unsafe fn copy(into: *mut u8, from: *const u8, len: usize) {
    // SAFETY: a static is always there.
    let call = unsafe { (&raw const MOVE).read_volatile() };
    // SAFETY: the caller's promise.
    unsafe { call(into.cast(), from.cast(), len) };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::{AtomicBool, Ordering};

    #[test]
    fn bytes_arrive_also_where_the_two_overlap() {
        let mut bytes: Vec<u8> = (0..200).collect();
        let all = bytes.as_mut_ptr();
        // SAFETY: both lie inside of the vector.
        unsafe { copy(all.add(10), all, 150) };
        assert!(bytes[10..160].iter().copied().eq(0..150) && bytes[..10].iter().copied().eq(0..10));
        assert!(bytes[160..].iter().copied().eq(160..200));
    }

    /// Under a checker of memory or of threads this is the case that must not be reported.
    #[test]
    fn what_is_written_meanwhile_is_old_or_new() {
        use crate::device::Device;
        let region = crate::host::Host.alloc(4096).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for value in [1_u8, 2] {
                let (region, over) = (&region, &over);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        region.write(0, &[value; 4096]).unwrap();
                    }
                });
            }
            let mut seen = [0; 4096];
            for _ in 0..2000 {
                region.read(0, &mut seen).unwrap();
                assert!(seen.iter().all(|&byte| byte < 3));
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
