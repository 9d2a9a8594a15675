//! How torch allocates symmetric memory of a GPU: the entry points of a pluggable allocator (`torch.cuda.memory`).
//!
//! torch finds them by name in this library. It calls them on any thread, with or without the interpreter, for segments that it
//! divides itself. `tensorwire.symmetric.mem_pool`, in Python, makes a pool of them.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tensorwire::device::Device;
use tensorwire::device::fork::PerProcess;
use tensorwire::{Result, Span};

use crate::gpu::{self, Stream};
use crate::{context, memory};

/// Segments that torch has, by their addresses.
static SEGMENTS: PerProcess<Mutex<HashMap<usize, Span>>> = PerProcess::new(Mutex::default);

/// Memory that other ranks can map; null if there is none, which torch reports as out of memory.
#[unsafe(no_mangle)]
extern "C" fn tensorwire_symmetric_alloc(nbytes: isize, device: c_int, _stream: *mut c_void) -> *mut c_void {
    match usize::try_from(nbytes).ok().zip(usize::try_from(device).ok()) {
        Some((nbytes, ordinal)) => match alloc(nbytes, ordinal) {
            Ok(address) => address as *mut c_void,
            Err(error) => {
                tracing::warn!("{nbytes} bytes of symmetric memory for torch: {error}");
                std::ptr::null_mut()
            }
        },
        None => std::ptr::null_mut(),
    }
}

/// Takes it back, when the stream that torch allocated it for has come so far.
#[unsafe(no_mangle)]
extern "C" fn tensorwire_symmetric_free(
    address: *mut c_void,
    _nbytes: isize,
    device: c_int,
    stream: *mut c_void,
) {
    let Some(span) = segments().remove(&(address as usize)) else { return };
    let Ok(ordinal) = usize::try_from(device) else { return };
    let kept = gpu::open(ordinal).and_then(|gpu| {
        let stream = Stream { gpu, number: stream as usize };
        // SAFETY: torch names the stream of the segment; its streams live as long as torch.
        unsafe { stream.keep(span) }
    });
    if let Err(error) = kept {
        tracing::warn!("a segment of torch in symmetric memory: {error}");
    }
}

fn alloc(nbytes: usize, ordinal: usize) -> Result<usize> {
    let context = context::ours()?;
    let gpu = gpu::open(ordinal)?;
    let span = Span::whole(context.pool(&gpu.id())?.alloc(nbytes)?);
    // Found by its address from now on, and every tensor in it.
    context.note(&span);
    let address = memory::address(&span);
    segments().insert(address, span);
    Ok(address)
}

fn segments() -> MutexGuard<'static, HashMap<usize, Span>> {
    SEGMENTS.get().lock().unwrap_or_else(PoisonError::into_inner)
}
