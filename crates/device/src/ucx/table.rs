//! The functions of libucp that we call, with the structures and numbers of its public headers.
//!
//! Every structure that we hand over begins with a mask of the fields that are set, and the library reads no others. So fields that
//! later versions have added behind ours do not matter. What is passed is at least as long as the newest version knows.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// `ucs_status_t`.
pub(super) type Status = c_int;
/// A status, a request, or null: `ucs_status_ptr_t`.
pub(super) type Answer = *mut c_void;

pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
pub(super) const BUSY: Status = -15;
/// No status is lower.
const LAST_ERROR: isize = -100;

/// What an answer is, if it is a status.
pub(super) fn status_of(answer: Answer) -> Option<Status> {
    match answer as isize {
        0 => Some(OK),
        code @ LAST_ERROR..0 => Some(code as Status),
        _ => None,
    }
}

#[repr(C)]
pub(super) struct ContextParams {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    pub(super) rest: [u64; 14],
}

pub(super) const CONTEXT_FEATURES: u64 = 1 << 0;
pub(super) const FEATURE_WAKEUP: u64 = 1 << 4;
pub(super) const FEATURE_AM: u64 = 1 << 6;

#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_int,
    pub(super) rest: [u64; 30],
}

pub(super) const WORKER_THREAD_MODE: u64 = 1 << 0;
/// Threads take turns.
pub(super) const SERIALIZED: c_int = 1;

pub(super) type ErrorHandler = unsafe extern "C" fn(*mut c_void, *mut c_void, Status);

#[repr(C)]
pub(super) struct EndpointParams {
    pub(super) field_mask: u64,
    pub(super) address: *const c_void,
    pub(super) error_mode: c_int,
    pub(super) error_handler: Option<ErrorHandler>,
    pub(super) error_argument: *mut c_void,
    pub(super) rest: [u64; 16],
}

pub(super) const ENDPOINT_ADDRESS: u64 = 1 << 0;
pub(super) const ENDPOINT_ERROR_MODE: u64 = 1 << 1;
pub(super) const ENDPOINT_ERROR_HANDLER: u64 = 1 << 2;
/// The death of the other side is an error, and no undefined behaviour.
pub(super) const PEER_ERRORS: c_int = 1;

pub(super) type SendCallback = unsafe extern "C" fn(*mut c_void, Status, *mut c_void);
pub(super) type ReceiveCallback = unsafe extern "C" fn(*mut c_void, Status, usize, *mut c_void);

#[repr(C)]
pub(super) struct RequestParams {
    pub(super) attributes: u32,
    pub(super) flags: u32,
    pub(super) request: *mut c_void,
    /// A [`SendCallback`] or a [`ReceiveCallback`], as the call wants.
    pub(super) callback: *const c_void,
    pub(super) datatype: u64,
    pub(super) argument: *mut c_void,
    pub(super) reply: *mut c_void,
    pub(super) memory_type: u64,
    pub(super) information: *mut c_void,
    pub(super) memory: *mut c_void,
    pub(super) rest: [u64; 12],
}

pub(super) const REQUEST_CALLBACK: u32 = 1 << 1;
pub(super) const REQUEST_ARGUMENT: u32 = 1 << 2;
pub(super) const REQUEST_FLAGS: u32 = 1 << 4;
pub(super) const REQUEST_MEMORY: u32 = 1 << 8;

/// A flag of `ucp_ep_close_nbx`: nothing is waited for.
pub(super) const CLOSE_BY_FORCE: u32 = 1 << 0;

#[repr(C)]
pub(super) struct ArrivalParams {
    pub(super) attributes: u64,
    pub(super) reply: *mut c_void,
}

/// The bytes are not here yet: what came is an offer.
pub(super) const ARRIVAL_IS_OFFER: u64 = 1 << 17;

pub(super) type ArrivalCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ArrivalParams,
) -> Status;

#[repr(C)]
pub(super) struct HandlerParams {
    pub(super) field_mask: u64,
    pub(super) id: c_uint,
    pub(super) flags: u32,
    pub(super) callback: Option<ArrivalCallback>,
    pub(super) argument: *mut c_void,
    pub(super) rest: [u64; 4],
}

/// Id, callback and argument.
pub(super) const HANDLER_FIELDS: u64 = 1 << 0 | 1 << 2 | 1 << 3;

#[repr(C)]
pub(super) struct MemoryParams {
    pub(super) field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) flags: c_uint,
    pub(super) protection: c_uint,
    pub(super) rest: [u64; 8],
}

/// Address and length.
pub(super) const MEMORY_FIELDS: u64 = 1 << 0 | 1 << 1;

/// What a function gives that fails: for tests.
#[cfg(any(test, feature = "thread-gpus"))]
trait Fails {
    fn failure() -> Self;
}

#[cfg(any(test, feature = "thread-gpus"))]
mod failing {
    use super::{Answer, Fails, Status, c_char, c_uint};

    /// UCS_ERR_NO_MEMORY.
    const NO_MEMORY: Status = -4;

    impl Fails for Status {
        fn failure() -> Self {
            NO_MEMORY
        }
    }

    impl Fails for Answer {
        fn failure() -> Self {
            NO_MEMORY as isize as Self
        }
    }

    impl Fails for c_uint {
        fn failure() -> Self {
            0
        }
    }

    impl Fails for *const c_char {
        fn failure() -> Self {
            std::ptr::null()
        }
    }

    impl Fails for () {
        fn failure() -> Self {}
    }
}

/// Declares the functions: how they are looked up, and how a test lets one fail.
macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?) -> $gives:ty;)*) => {
        /// The functions. All of them are there, or the library is of no use.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Table {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> $gives,)*
        }

        impl Table {
            /// Gives the name of the first function that is missing where one is.
            pub(super) fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {$(
                    // SAFETY: the symbol, if it is there, is the function of that name, which has this signature in all versions
                    // of the library's first interface.
                    $name: match unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err(stringify!($name)),
                    },
                )*})
            }

            /// The names of all functions.
            #[cfg(any(test, feature = "thread-gpus"))]
            pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// The same functions, but this one fails and does nothing.
            #[cfg(any(test, feature = "thread-gpus"))]
            pub(super) fn failing(mut self, which: &str) -> Self {
                match which {
                    $(stringify!($name) => {
                        unsafe extern "C" fn failing($(_: $type),*) -> $gives {
                            Fails::failure()
                        }
                        self.$name = failing;
                    })*
                    _ => {}
                }
                self
            }
        }
    };
}

table! {
    ucp_get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint) -> ();
    ucs_status_string(status: Status) -> *const c_char;
    ucp_init_version(
        major: c_uint, minor: c_uint, params: *const ContextParams, config: *const c_void, context: *mut *mut c_void,
    ) -> Status;
    ucp_cleanup(context: *mut c_void) -> ();
    ucp_mem_map(context: *mut c_void, params: *const MemoryParams, memory: *mut *mut c_void) -> Status;
    ucp_mem_unmap(context: *mut c_void, memory: *mut c_void) -> Status;
    ucp_worker_create(context: *mut c_void, params: *const WorkerParams, worker: *mut *mut c_void) -> Status;
    ucp_worker_destroy(worker: *mut c_void) -> ();
    ucp_worker_get_address(worker: *mut c_void, address: *mut *mut c_void, len: *mut usize) -> Status;
    ucp_worker_release_address(worker: *mut c_void, address: *mut c_void) -> ();
    ucp_worker_get_efd(worker: *mut c_void, fd: *mut c_int) -> Status;
    ucp_worker_arm(worker: *mut c_void) -> Status;
    ucp_worker_progress(worker: *mut c_void) -> c_uint;
    ucp_worker_set_am_recv_handler(worker: *mut c_void, params: *const HandlerParams) -> Status;
    ucp_ep_create(worker: *mut c_void, params: *const EndpointParams, endpoint: *mut *mut c_void) -> Status;
    ucp_ep_close_nbx(endpoint: *mut c_void, params: *const RequestParams) -> Answer;
    ucp_am_send_nbx(
        endpoint: *mut c_void, id: c_uint, head: *const c_void, head_len: usize, body: *const c_void, len: usize,
        params: *const RequestParams,
    ) -> Answer;
    ucp_am_recv_data_nbx(
        worker: *mut c_void, offer: *mut c_void, into: *mut c_void, len: usize, params: *const RequestParams,
    ) -> Answer;
    ucp_am_data_release(worker: *mut c_void, offer: *mut c_void) -> ();
    ucp_request_free(request: *mut c_void) -> ();
}
