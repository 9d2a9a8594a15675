//! Streams and events of the script. What is queued on a stream is done in order: as soon as somebody asks for an event, and
//! as far as what streams wait for is there.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::*;
use super::{LAST, called};
use crate::flag::reached;
use crate::sync::{AtomicU32, Ordering};

/// A stream, whose address is its handle. It is never freed.
#[derive(Default)]
pub(crate) struct ScriptStream(Mutex<ScriptLine>);

#[derive(Default)]
struct ScriptLine {
    queued: VecDeque<Item>,
    ran: Vec<Ran>,
}

/// A kernel that has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ran {
    /// The abort words it looked at.
    pub(crate) words: [u64; 2],
    /// Whether one of them was set.
    pub(crate) closed: bool,
}

enum Item {
    Wait(Vec<(Address, u32)>),
    Write(Address, u32),
    Record(Arc<Mutex<bool>>),
    Follow(Arc<Mutex<bool>>),
    Launch([u64; 2]),
}

/// An event: whether what it was recorded behind last is done, and where that is.
#[derive(Default)]
struct ScriptEvent(Mutex<Option<(Arc<Mutex<bool>>, usize)>>);

/// Host memory that is registered, by its address.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A word of host memory; the device's own is only addresses here, which are low.
fn word(at: Address) -> Option<&'static AtomicU32> {
    let registered = lock(&REGISTERED);
    let there = registered.range(..=at as usize).next_back();
    let inside = there.is_some_and(|(start, len)| at as usize + 4 <= start + len);
    assert!(inside || at < 1 << 32, "{at:#x} is not registered (any more)");
    // SAFETY: registered memory is there, and flags and abort words are atomics.
    inside.then(|| unsafe { &*(at as *const AtomicU32) })
}

impl ScriptStream {
    fn of(handle: sys::CUstream) -> Option<&'static Self> {
        // SAFETY: null, for a default stream, or made by `create` and never freed.
        unsafe { handle.cast::<Self>().as_ref() }
    }

    fn push(handle: sys::CUstream, item: Item) {
        if let Some(stream) = Self::of(handle) {
            lock(&stream.0).queued.push_back(item);
        }
    }

    /// Does what can be done.
    pub(crate) fn run(&self) {
        let mut line = lock(&self.0);
        while let Some(item) = line.queued.front() {
            let goes_on = match item {
                Item::Wait(all) => all.iter().all(|(at, value)| {
                    word(*at).is_none_or(|word| reached(word.load(Ordering::Acquire), *value))
                }),
                Item::Follow(passed) => *lock(passed),
                _ => true,
            };
            if !goes_on {
                return;
            }
            match line.queued.pop_front() {
                Some(Item::Write(at, value)) => {
                    let _ = word(at).map(|word| word.store(value, Ordering::Release));
                }
                Some(Item::Record(passed)) => *lock(&passed) = true,
                Some(Item::Launch(words)) => {
                    let set =
                        |at: u64| at != 0 && word(at).is_some_and(|word| word.load(Ordering::Acquire) != 0);
                    line.ran.push(Ran { words, closed: words.into_iter().any(set) });
                }
                _ => {}
            }
        }
    }

    /// The kernels that have run since the last question.
    pub(crate) fn ran(&self) -> Vec<Ran> {
        self.run();
        std::mem::take(&mut lock(&self.0).ran)
    }
}

impl Table {
    /// With streams that do what they are told.
    pub(super) fn with_streams(self) -> Self {
        Self {
            cuStreamCreateWithPriority: Some(create),
            cuStreamWriteValue32_v2: Some(write_value),
            cuStreamWaitValue32_v2: Some(wait_value),
            cuStreamBatchMemOp_v2: Some(batch),
            cuStreamQuery: Some(query_stream),
            cuStreamWaitEvent: Some(wait_event),
            cuEventCreate: Some(create_event),
            cuEventRecord: Some(record),
            cuEventQuery: Some(query),
            cuLaunchKernel: Some(launch),
            cuMemHostRegister_v2: Some(register),
            cuMemHostUnregister: Some(unregister),
            cuMemHostGetDevicePointer_v2: Some(seen_at),
            ..self
        }
    }
}

unsafe extern "C" fn create(stream: *mut sys::CUstream, _: c_uint, _: c_int) -> Code {
    let code = called("cuStreamCreateWithPriority");
    if code == 0 {
        let made: &'static ScriptStream = Box::leak(Box::default());
        LAST.set(Some(made));
        // SAFETY: as the true call does.
        unsafe { *stream = std::ptr::from_ref(made).cast_mut().cast() };
    }
    code
}

unsafe extern "C" fn write_value(stream: sys::CUstream, at: Address, value: u32, _: c_uint) -> Code {
    ScriptStream::push(stream, Item::Write(at, value));
    called("cuStreamWriteValue32_v2")
}

unsafe extern "C" fn wait_value(stream: sys::CUstream, at: Address, value: u32, _: c_uint) -> Code {
    let code = called("cuStreamWaitValue32_v2");
    if code == 0 {
        ScriptStream::push(stream, Item::Wait(vec![(at, value)]));
    }
    code
}

unsafe extern "C" fn batch(
    stream: sys::CUstream,
    count: c_uint,
    operations: *mut sys::CUstreamBatchMemOpParams,
    _: c_uint,
) -> Code {
    let code = called("cuStreamBatchMemOp_v2");
    if code == 0 {
        // SAFETY: as the true call reads them; only waits of 32 bits are queued so.
        let wait = |i: c_uint| unsafe {
            let wait = (*operations.add(i as usize)).waitValue;
            (wait.address, wait.__bindgen_anon_1.value)
        };
        ScriptStream::push(stream, Item::Wait((0..count).map(wait).collect()));
    }
    code
}

unsafe extern "C" fn wait_event(stream: sys::CUstream, event: sys::CUevent, _: c_uint) -> Code {
    // SAFETY: made by `create_event` and never freed.
    let event = unsafe { event.cast::<ScriptEvent>().as_ref() };
    if let Some((passed, _)) = event.and_then(|event| lock(&event.0).clone()) {
        ScriptStream::push(stream, Item::Follow(passed));
    }
    called("cuStreamWaitEvent")
}

unsafe extern "C" fn create_event(event: *mut sys::CUevent, _: c_uint) -> Code {
    let code = called("cuEventCreate");
    if code == 0 {
        let made: &'static ScriptEvent = Box::leak(Box::default());
        // SAFETY: as the true call does.
        unsafe { *event = std::ptr::from_ref(made).cast_mut().cast() };
    }
    code
}

unsafe extern "C" fn record(event: sys::CUevent, stream: sys::CUstream) -> Code {
    let code = called("cuEventRecord");
    // SAFETY: made by `create_event` and never freed.
    let event = unsafe { event.cast::<ScriptEvent>().as_ref() };
    if let Some(event) = event.filter(|_| code == 0) {
        let passed = Arc::new(Mutex::new(stream.is_null()));
        *lock(&event.0) = Some((passed.clone(), stream as usize));
        ScriptStream::push(stream, Item::Record(passed));
    }
    code
}

unsafe extern "C" fn query_stream(stream: sys::CUstream) -> Code {
    let busy = ScriptStream::of(stream).is_some_and(|stream| {
        stream.run();
        !lock(&stream.0).queued.is_empty()
    });
    match called("cuStreamQuery") {
        0 if busy => NOT_READY,
        code => code,
    }
}

unsafe extern "C" fn query(event: sys::CUevent) -> Code {
    // SAFETY: made by `create_event` and never freed.
    let recorded = unsafe { event.cast::<ScriptEvent>().as_ref() }.and_then(|event| lock(&event.0).clone());
    let passed = recorded.is_none_or(|(passed, stream)| {
        ScriptStream::of(stream as sys::CUstream).into_iter().for_each(ScriptStream::run);
        *lock(&passed)
    });
    match called("cuEventQuery") {
        0 if !passed => NOT_READY,
        code => code,
    }
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn launch(
    _: sys::CUfunction,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    stream: sys::CUstream,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> Code {
    let code = called("cuLaunchKernel");
    if code == 0 {
        // SAFETY: every kernel takes one struct, which begins with the addresses of two abort words.
        ScriptStream::push(stream, Item::Launch(unsafe { (*arguments).cast::<[u64; 2]>().read() }));
    }
    code
}

unsafe extern "C" fn register(address: *mut c_void, len: usize, _: c_uint) -> Code {
    lock(&REGISTERED).insert(address as usize, len);
    called("cuMemHostRegister_v2")
}

unsafe extern "C" fn unregister(address: *mut c_void) -> Code {
    lock(&REGISTERED).remove(&(address as usize));
    called("cuMemHostUnregister")
}

unsafe extern "C" fn seen_at(on_device: *mut Address, address: *mut c_void, _: c_uint) -> Code {
    // SAFETY: as the true call does.
    unsafe { *on_device = address as Address };
    called("cuMemHostGetDevicePointer_v2")
}
