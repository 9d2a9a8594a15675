//! Graphs of the script: a stream that is said to record, and what its graph owns.

use std::cell::{Cell, RefCell};
use std::ffi::{c_uint, c_ulonglong, c_void};

use super::super::Code;
use super::super::table::Table;
use super::{called, sys};

/// What the graph owns: what is called at its end, and with what.
type Owned = (sys::CUhostFn, *mut c_void);

thread_local! {
    static RECORDS: Cell<bool> = const { Cell::new(false) };
    static MADE: RefCell<Vec<Owned>> = const { RefCell::new(Vec::new()) };
    static OWNED: RefCell<Vec<Owned>> = const { RefCell::new(Vec::new()) };
}

/// From now on all streams of this thread record a graph, or none does.
pub(crate) fn record(records: bool) {
    RECORDS.set(records);
}

/// The graph goes, as the driver lets it go: on a thread of its own. Gives how much it owned.
pub(crate) fn drop_graph() -> usize {
    let owned = OWNED.take();
    owned.iter().for_each(|owned| release(*owned));
    owned.len()
}

fn release((destroy, data): Owned) {
    let data = data as usize;
    let thread = std::thread::spawn(move || {
        // SAFETY: as the driver calls it, once.
        unsafe { destroy.unwrap()(data as *mut c_void) };
    });
    thread.join().unwrap();
}

impl Table {
    /// With graphs that own objects.
    pub(super) fn with_graphs(self) -> Self {
        Self {
            cuStreamIsCapturing: Some(is_capturing),
            cuStreamGetCaptureInfo_v2: Some(info),
            cuUserObjectCreate: Some(make),
            cuUserObjectRelease: Some(give_up),
            cuGraphRetainUserObject: Some(own),
            ..self
        }
    }
}

unsafe extern "C" fn is_capturing(_: sys::CUstream, status: *mut c_uint) -> Code {
    // SAFETY: as the true call writes it.
    unsafe { *status = c_uint::from(RECORDS.get()) };
    called("cuStreamIsCapturing")
}

unsafe extern "C" fn info(
    _: sys::CUstream,
    status: *mut c_uint,
    _: *mut c_ulonglong,
    graph: *mut sys::CUgraph,
    _: *mut *const sys::CUgraphNode,
    _: *mut usize,
) -> Code {
    if RECORDS.get() {
        // SAFETY: as the true call writes them; nobody follows the handle.
        unsafe { (*status, *graph) = (1, std::ptr::dangling_mut()) };
    }
    called("cuStreamGetCaptureInfo_v2")
}

unsafe extern "C" fn make(
    object: *mut sys::CUuserObject,
    data: *mut c_void,
    destroy: sys::CUhostFn,
    _: c_uint,
    _: c_uint,
) -> Code {
    let code = called("cuUserObjectCreate");
    if code == 0 {
        MADE.with_borrow_mut(|made| made.push((destroy, data)));
        // SAFETY: as the true call writes it; nobody follows the handle.
        unsafe { *object = std::ptr::dangling_mut() };
    }
    code
}

unsafe extern "C" fn give_up(_: sys::CUuserObject, _: c_uint) -> Code {
    MADE.take().into_iter().for_each(release);
    called("cuUserObjectRelease")
}

unsafe extern "C" fn own(_: sys::CUgraph, _: sys::CUuserObject, _: c_uint, _: c_uint) -> Code {
    let code = called("cuGraphRetainUserObject");
    if code == 0 {
        OWNED.with_borrow_mut(|owned| owned.append(&mut MADE.take()));
    }
    code
}
