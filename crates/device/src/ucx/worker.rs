//! One worker of UCX with its endpoints: what is sent and received through them, as data.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::Ucx;
use super::load::quietly;
use super::table::{self, RequestParams, Status, status_of};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::fork::Birth;
use crate::span::Span;

/// The active message that all of ours are: a worker has nothing else.
const MESSAGE: u32 = 0;
/// What stands before a message is not longer.
const MOST_HEAD: usize = 256;
/// How long the end of a worker waits for what is still under way.
const LAST: Duration = Duration::from_secs(2);

/// What is sent, and where something is received: the worker's, until it is done with it.
#[derive(Debug)]
pub enum Body {
    /// Private bytes.
    Bytes(Vec<u8>),
    /// A part of registered memory, and the number that [`Worker::register`] gave for that.
    Part(Span, u64),
}

/// What has happened.
#[derive(Debug)]
pub enum Event {
    /// A message has come, whole.
    Came {
        /// What its sender put before it.
        head: Vec<u8>,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// A message can be fetched: by [`Worker::receive`], or never by [`Worker::refuse`].
    Offered {
        /// What its sender put before it.
        head: Vec<u8>,
        /// Its number, to name it by.
        offer: u64,
        /// Its bytes.
        len: usize,
    },
    /// What a call began is over.
    Done {
        /// What the caller named it.
        token: u64,
        /// How it ended.
        result: std::result::Result<(), String>,
        /// The memory that was used.
        body: Option<Body>,
    },
    /// Nothing goes to an endpoint any more, and why.
    Lost {
        /// The endpoint's number.
        endpoint: u64,
        /// The library's reason.
        why: String,
    },
}

/// See the module. One thread at a time uses it.
pub struct Worker {
    ucx: &'static Ucx,
    context: *mut c_void,
    worker: *mut c_void,
    fd: RawFd,
    desk: Rc<Desk>,
    endpoints: HashMap<u64, Endpoint>,
    /// Registered memory by its number, and the library's handle of it.
    registered: HashMap<u64, (Span, *mut c_void)>,
    next: u64,
    birth: Birth,
}

// SAFETY: the library lets any thread use a worker of its serialised mode, one at a time, and `Worker` is not `Sync`. Its callbacks
// run inside of calls on the worker, so the desk is only touched by the thread that makes them, and no clone of an `Rc` leaves it.
unsafe impl Send for Worker {}

/// Where callbacks write what has happened. It stays at its address as long as the worker lives.
struct Desk {
    ucx: &'static Ucx,
    /// No message is longer.
    most: usize,
    events: RefCell<Vec<Event>>,
    /// What the library wants back, by number.
    offers: RefCell<HashMap<u64, (*mut c_void, usize)>>,
    /// How many offers have come.
    offered: Cell<u64>,
    /// How many calls are under way, and how many of them use which registered memory.
    flying: Cell<usize>,
    in_use: RefCell<HashMap<u64, usize>>,
}

struct Endpoint {
    handle: *mut c_void,
    /// What its error handler gets. It lives as long as the library may call that.
    watch: Rc<Watch>,
    lost: bool,
}

struct Watch {
    desk: *const Desk,
    endpoint: u64,
}

/// A call that is under way: what it uses, and who wants to know of its end.
struct Flight {
    desk: *const Desk,
    token: u64,
    /// What must stay where it is until then: what goes before a message, and whom the error handler of an endpoint tells.
    _head: Box<[u8]>,
    _watch: Option<Rc<Watch>>,
    body: Option<Body>,
}

/// What a call is given but its own arguments.
struct Request {
    callback: *const c_void,
    /// The library's handle of the memory, or null.
    memory: *mut c_void,
    flags: u32,
}

impl Desk {
    fn note(&self, event: Event) {
        self.events.borrow_mut().push(event);
    }

    fn land(&self, flight: Flight, status: Status) {
        self.flying.set(self.flying.get() - 1);
        if let Some(Body::Part(_, number)) = &flight.body {
            let mut in_use = self.in_use.borrow_mut();
            match in_use.get_mut(number) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(in_use.remove(number)),
            }
        }
        let result = if status == table::OK { Ok(()) } else { Err(self.ucx.words(status)) };
        self.note(Event::Done { token: flight.token, result, body: flight.body });
    }
}

impl Worker {
    /// A worker that takes messages of at most `most` bytes.
    pub fn new(ucx: &'static Ucx, most: usize) -> Result<Self> {
        let params = table::ContextParams {
            field_mask: table::CONTEXT_FEATURES,
            features: table::FEATURE_AM | table::FEATURE_WAKEUP,
            rest: [0; 14],
        };
        let mut context = ptr::null_mut();
        // SAFETY: the parameters say which of their fields are set, and one handle is written.
        let made =
            quietly(|| unsafe { (ucx.table.ucp_init_version)(1, 13, &params, ptr::null(), &mut context) });
        ucx.done("ucp_init_version", made)?;
        let desk = Rc::new(Desk {
            ucx,
            most,
            events: RefCell::default(),
            offers: RefCell::default(),
            offered: Cell::new(0),
            flying: Cell::new(0),
            in_use: RefCell::default(),
        });
        // From here on a failure drops it, which gives back what there is.
        let mut worker = Self {
            ucx,
            context,
            worker: ptr::null_mut(),
            fd: -1,
            desk,
            endpoints: HashMap::new(),
            registered: HashMap::new(),
            next: 0,
            birth: Birth::now(),
        };
        worker.start()?;
        Ok(worker)
    }

    fn start(&mut self) -> Result<()> {
        let ucx = self.ucx;
        let params = table::WorkerParams {
            field_mask: table::WORKER_THREAD_MODE,
            thread_mode: table::SERIALIZED,
            rest: [0; 30],
        };
        // SAFETY: the context is the library's, the parameters say which of their fields are set, and one handle is written.
        let made =
            quietly(|| unsafe { (ucx.table.ucp_worker_create)(self.context, &params, &mut self.worker) });
        ucx.done("ucp_worker_create", made)?;
        let handler = table::HandlerParams {
            field_mask: table::HANDLER_FIELDS,
            id: MESSAGE,
            flags: 0,
            callback: Some(came),
            argument: Rc::as_ptr(&self.desk).cast_mut().cast(),
            rest: [0; 4],
        };
        // SAFETY: the desk stays where it is until the worker is destroyed.
        let set = unsafe { (ucx.table.ucp_worker_set_am_recv_handler)(self.worker, &handler) };
        ucx.done("ucp_worker_set_am_recv_handler", set)?;
        // SAFETY: one number is written.
        let got = unsafe { (ucx.table.ucp_worker_get_efd)(self.worker, &mut self.fd) };
        ucx.done("ucp_worker_get_efd", got)
    }

    /// By what other workers connect to it.
    pub fn address(&self) -> Result<Vec<u8>> {
        self.check()?;
        let (mut address, mut len) = (ptr::null_mut(), 0);
        // SAFETY: an address and its length are written.
        let got = unsafe { (self.ucx.table.ucp_worker_get_address)(self.worker, &mut address, &mut len) };
        self.ucx.done("ucp_worker_get_address", got)?;
        // SAFETY: there are so many bytes until they are released, which is right afterwards.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: it is the library's, and nobody uses it any more.
        unsafe { (self.ucx.table.ucp_worker_release_address)(self.worker, address) };
        Ok(bytes)
    }

    /// Readable when there is something to do, after [`arm`](Self::arm).
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open as long as the worker lives.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Gives false if there is something to do now; otherwise [`fd`](Self::fd) becomes readable when there is.
    pub fn arm(&mut self) -> Result<bool> {
        self.check()?;
        // SAFETY: the worker is the library's, and ours alone.
        match unsafe { (self.ucx.table.ucp_worker_arm)(self.worker) } {
            table::BUSY => Ok(false),
            status => self.ucx.done("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// Goes on with everything. Gives whether anything happened.
    pub fn progress(&mut self) -> bool {
        // SAFETY: as above. Callbacks touch the desk only, of which nothing is borrowed here.
        self.birth.is_ours() && unsafe { (self.ucx.table.ucp_worker_progress)(self.worker) } > 0
    }

    /// What has happened since the last call.
    pub fn events(&mut self) -> Vec<Event> {
        let mut events = std::mem::take(&mut *self.desk.events.borrow_mut());
        events.retain(|event| match event {
            // One that is closed already is nobody's any more.
            Event::Lost { endpoint, .. } => match self.endpoints.get_mut(endpoint) {
                Some(endpoint) => !std::mem::replace(&mut endpoint.lost, true),
                None => false,
            },
            _ => true,
        });
        events
    }

    /// Registers memory of the host with the network's devices, until the worker is dropped. Gives a number for it.
    pub fn register(&mut self, span: Span) -> Result<u64> {
        self.check()?;
        let mut memory = ptr::null_mut();
        let params = table::MemoryParams {
            field_mask: table::MEMORY_FIELDS,
            address: address_of(&span)?,
            length: span.len(),
            flags: 0,
            protection: 0,
            rest: [0; 8],
        };
        // SAFETY: the span, which is kept until the memory is given back, keeps the memory mapped.
        let mapped = unsafe { (self.ucx.table.ucp_mem_map)(self.context, &params, &mut memory) };
        self.ucx.done("ucp_mem_map", mapped)?;
        let number = self.number();
        self.registered.insert(number, (span, memory));
        Ok(number)
    }

    /// Lets go of registered memory. While a call that uses it is under way it stays.
    pub fn unregister(&mut self, number: u64) {
        if self.desk.in_use.borrow().contains_key(&number) || !self.birth.is_ours() {
            return;
        }
        if let Some((_span, memory)) = self.registered.remove(&number) {
            self.unmap(memory);
        }
    }

    /// A way to the worker with this address. Gives a number for it.
    pub fn connect(&mut self, address: &[u8]) -> Result<u64> {
        self.check()?;
        let endpoint = self.number();
        let watch = Rc::new(Watch { desk: Rc::as_ptr(&self.desk), endpoint });
        let params = table::EndpointParams {
            field_mask: table::ENDPOINT_ADDRESS | table::ENDPOINT_ERROR_MODE | table::ENDPOINT_ERROR_HANDLER,
            address: address.as_ptr().cast(),
            error_mode: table::PEER_ERRORS,
            error_handler: Some(lost),
            error_argument: Rc::as_ptr(&watch).cast_mut().cast(),
            rest: [0; 16],
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the library reads the address during the call only. The watch lives as long as the endpoint.
        let made = unsafe { (self.ucx.table.ucp_ep_create)(self.worker, &params, &mut handle) };
        self.ucx.done("ucp_ep_create", made)?;
        self.endpoints.insert(endpoint, Endpoint { handle, watch, lost: false });
        Ok(endpoint)
    }

    /// Sends a message. An [`Event::Done`] with this token says when the body may be used again.
    pub fn send(&mut self, endpoint: u64, head: &[u8], mut body: Body, token: u64) -> Result<()> {
        self.check()?;
        let handle = match self.endpoints.get(&endpoint) {
            Some(Endpoint { handle, lost: false, .. }) => *handle,
            _ => return Err(Error::misuse("an endpoint that is not there")),
        };
        let (at, len, memory) = self.place_of(&mut body)?;
        let head: Box<[u8]> = head.into();
        let (start, head_len) = (head.as_ptr(), head.len());
        let call = self.ucx.table.ucp_am_send_nbx;
        let request = Request { callback: sent as table::SendCallback as _, memory, flags: 0 };
        let flight = Flight { body: Some(body), _head: head, ..self.flight(token) };
        self.fly(flight, &request, |params| {
            // SAFETY: the flight keeps head and body where they are until the library is done with them.
            unsafe { call(handle, MESSAGE, start.cast(), head_len, at, len, params) }
        });
        Ok(())
    }

    /// Fetches a message that was offered. An [`Event::Done`] with this token says when it is there.
    pub fn receive(&mut self, offer: u64, mut into: Body, token: u64) -> Result<()> {
        self.check()?;
        let (at, room, memory) = self.place_of(&mut into)?;
        let offered = self.desk.offers.borrow_mut().remove(&offer);
        let (handle, len) = offered.ok_or_else(|| Error::misuse("an offer that is not there"))?;
        if len > room {
            self.desk.offers.borrow_mut().insert(offer, (handle, len));
            return Err(Error::misuse(format!("{len} bytes do not fit into {room}")));
        }
        let (call, worker) = (self.ucx.table.ucp_am_recv_data_nbx, self.worker);
        let request = Request { callback: received as table::ReceiveCallback as _, memory, flags: 0 };
        let flight = Flight { body: Some(into), ..self.flight(token) };
        self.fly(flight, &request, |params| {
            // SAFETY: the offer is taken by this call. The flight keeps the memory where it is until the library is done.
            unsafe { call(worker, handle, at, len, params) }
        });
        Ok(())
    }

    /// Lets go of a message that was offered.
    pub fn refuse(&mut self, offer: u64) {
        let offered = self.desk.offers.borrow_mut().remove(&offer);
        if let Some((handle, _)) = offered
            && self.birth.is_ours()
        {
            // SAFETY: it is the library's, and nobody has it any more.
            unsafe { (self.ucx.table.ucp_am_data_release)(self.worker, handle) };
        }
    }

    /// Ends the way to another worker: when all that was sent has gone, or at once. An [`Event::Done`] with this token follows.
    pub fn disconnect(&mut self, endpoint: u64, at_once: bool, token: u64) {
        let Some(Endpoint { handle, watch, lost }) = self.endpoints.remove(&endpoint) else { return };
        if !self.birth.is_ours() {
            return;
        }
        // One that is lost would be waited for in vain.
        let flags = if lost || at_once { table::CLOSE_BY_FORCE } else { 0 };
        let call = self.ucx.table.ucp_ep_close_nbx;
        let callback = sent as table::SendCallback as _;
        let request = Request { callback, memory: ptr::null_mut(), flags };
        // Its error handler may run until it is closed.
        let flight = Flight { _watch: Some(watch), ..self.flight(token) };
        self.fly(flight, &request, |params| {
            // SAFETY: the endpoint is the library's, and nobody has it any more.
            unsafe { call(handle, params) }
        });
    }

    /// How many calls are under way.
    pub fn under_way(&self) -> usize {
        self.desk.flying.get()
    }

    fn flight(&self, token: u64) -> Flight {
        Flight { desk: Rc::as_ptr(&self.desk), token, _head: Box::default(), _watch: None, body: None }
    }

    /// Begins a call, and notes its end if that is now.
    fn fly(
        &mut self,
        flight: Flight,
        request: &Request,
        call: impl FnOnce(*const RequestParams) -> table::Answer,
    ) {
        if let Some(Body::Part(_, number)) = &flight.body {
            *self.desk.in_use.borrow_mut().entry(*number).or_default() += 1;
        }
        let flight = Box::into_raw(Box::new(flight));
        let known = if request.memory.is_null() { 0 } else { table::REQUEST_MEMORY };
        let params = RequestParams {
            attributes: table::REQUEST_CALLBACK | table::REQUEST_ARGUMENT | table::REQUEST_FLAGS | known,
            flags: request.flags,
            request: ptr::null_mut(),
            callback: request.callback,
            datatype: 0,
            argument: flight.cast(),
            reply: ptr::null_mut(),
            memory_type: 0,
            information: ptr::null_mut(),
            memory: request.memory,
            rest: [0; 12],
        };
        self.desk.flying.set(self.desk.flying.get() + 1);
        if let Some(status) = status_of(call(&params)) {
            // SAFETY: the call is over, and its callback does not run: the flight is ours again.
            self.desk.land(*unsafe { Box::from_raw(flight) }, status);
        }
    }

    /// Gives back memory that no call under way uses.
    fn unmap(&self, memory: *mut c_void) {
        // SAFETY: it is the library's, and no call uses it.
        let given = unsafe { (self.ucx.table.ucp_mem_unmap)(self.context, memory) };
        if let Err(error) = self.ucx.done("ucp_mem_unmap", given) {
            tracing::warn!("{error}");
        }
    }

    /// Where a body is, how long, and the library's handle of its memory.
    fn place_of(&self, body: &mut Body) -> Result<(*mut c_void, usize, *mut c_void)> {
        match body {
            Body::Bytes(bytes) => Ok((bytes.as_mut_ptr().cast(), bytes.len(), ptr::null_mut())),
            Body::Part(span, number) => match self.registered.get(number) {
                Some((whole, memory))
                    if Arc::ptr_eq(whole.region(), span.region())
                        && span.offset() >= whole.offset()
                        && span.offset() + span.len() <= whole.offset() + whole.len() =>
                {
                    Ok((address_of(span)?, span.len(), *memory))
                }
                _ => Err(Error::misuse("memory that is not registered")),
            },
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn check(&self) -> Result<()> {
        self.birth.check("a worker of UCX")
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} endpoints, {} calls under way)", self.endpoints.len(), self.under_way())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // In a forked child there is no thread of the library, and what is under way is the parent's.
        if !self.birth.is_ours() {
            return;
        }
        let ucx = self.ucx;
        for endpoint in self.endpoints.keys().copied().collect::<Vec<_>>() {
            self.disconnect(endpoint, true, 0);
        }
        let offers: Vec<u64> = self.desk.offers.borrow().keys().copied().collect();
        for offer in offers {
            self.refuse(offer);
        }
        let deadline = Deadline::after(LAST);
        while self.under_way() > 0 && !deadline.passed() {
            if !self.progress() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        if self.under_way() > 0 {
            // The library may still touch what they use: it stays mapped, and the worker stays.
            tracing::warn!("UCX has not ended {} calls in time: their memory stays", self.under_way());
            std::mem::forget(std::mem::take(&mut self.registered));
            std::mem::forget(self.desk.clone());
            return;
        }
        for (_span, memory) in std::mem::take(&mut self.registered).into_values() {
            self.unmap(memory);
        }
        if !self.worker.is_null() {
            // SAFETY: it has no endpoint of ours any more. Callbacks that still run find the desk, which is dropped afterwards.
            unsafe { (ucx.table.ucp_worker_destroy)(self.worker) };
        }
        // SAFETY: it has no worker and no memory any more.
        unsafe { (ucx.table.ucp_cleanup)(self.context) };
    }
}

/// A message has come: what is kept of it is copied, or it is noted as an offer.
///
/// # Safety
///
/// The library calls it, with the desk of the worker.
unsafe extern "C" fn came(
    desk: *mut c_void,
    head: *const c_void,
    head_len: usize,
    data: *mut c_void,
    len: usize,
    params: *const table::ArrivalParams,
) -> Status {
    // SAFETY: the desk lives longer than the worker, whose thread this is.
    let desk = unsafe { &*desk.cast::<Desk>() };
    if len > desk.most || head_len > MOST_HEAD {
        // No worker of ours sent it. The library drops it.
        return table::OK;
    }
    let bytes = |at: *const c_void, len| match len {
        0 => Vec::new(),
        // SAFETY: there are so many bytes, during this call. Of none, the address may be null.
        _ => unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec(),
    };
    let head = bytes(head, head_len);
    // SAFETY: the library gives the parameters for this call.
    if unsafe { (*params).attributes } & table::ARRIVAL_IS_OFFER == 0 {
        desk.note(Event::Came { head, bytes: bytes(data, len) });
        return table::OK;
    }
    let offer = desk.offered.get();
    desk.offered.set(offer + 1);
    desk.offers.borrow_mut().insert(offer, (data, len));
    desk.note(Event::Offered { head, offer, len });
    table::IN_PROGRESS
}

/// Something that was sent has gone, or an endpoint is closed.
///
/// # Safety
///
/// The library calls it, with the flight of the call.
unsafe extern "C" fn sent(request: *mut c_void, status: Status, flight: *mut c_void) {
    // SAFETY: the flight was made for this call, and nobody else has it any more.
    let flight = *unsafe { Box::from_raw(flight.cast::<Flight>()) };
    // SAFETY: the desk lives longer than the worker, whose thread this is.
    let desk = unsafe { &*flight.desk };
    // SAFETY: the request is over.
    unsafe { (desk.ucx.table.ucp_request_free)(request) };
    desk.land(flight, status);
}

/// What was offered is there.
///
/// # Safety
///
/// The library calls it, with the flight of the call.
unsafe extern "C" fn received(request: *mut c_void, status: Status, _: usize, flight: *mut c_void) {
    // SAFETY: as promised by the library.
    unsafe { sent(request, status, flight) };
}

/// An endpoint is of no use any more.
///
/// # Safety
///
/// The library calls it, with the watch of the endpoint.
unsafe extern "C" fn lost(watch: *mut c_void, _: *mut c_void, status: Status) {
    // SAFETY: the watch lives until the endpoint is closed.
    let watch = unsafe { &*watch.cast::<Watch>() };
    // SAFETY: the desk lives longer than the worker, whose thread this is.
    let desk = unsafe { &*watch.desk };
    desk.note(Event::Lost { endpoint: watch.endpoint, why: desk.ucx.words(status) });
}

fn address_of(span: &Span) -> Result<*mut c_void> {
    let device = span.device();
    let address = span.view().host_addr();
    address
        .map(|address| address as *mut c_void)
        .ok_or_else(|| Error::misuse(format!("memory of {device} for UCX")))
}
