//! What an end of a pipe has that the other one can call.

use std::collections::{BTreeMap, HashMap};
use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::sync::{AtomicBool, Ordering};

use super::header::{Failure, Header};
use super::{Calling, ever, with_header};
use crate::error::{Error, Result};
use crate::group::Member;
use crate::interrupt;
use crate::pipe::descriptor::{Part, tag};
use crate::pipe::hand::Hand;
use crate::pipe::pending::How;
use crate::pipe::receive::describe;
use crate::pipe::send::Parcel;
use crate::pipe::{End, HEADS, Incoming, Message, Pending};

/// Calls that run or wait at an end, and answers that the caller has not taken. One more is refused.
const MOST: usize = 1024;
/// Calls that run at a time, unless told otherwise.
const THREADS: usize = 8;

/// What can go wrong in a handler: its text goes to the caller.
type Failed = Box<dyn StdError + Send + Sync>;
type Handler = Arc<dyn Fn(Call) -> Result<Message, Failed> + Send + Sync>;

/// What the other end can call.
#[derive(Clone)]
pub struct Service {
    handlers: BTreeMap<String, Handler>,
    threads: usize,
}

impl Default for Service {
    fn default() -> Self {
        Self { handlers: BTreeMap::new(), threads: THREADS }
    }
}

impl Service {
    /// One with nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one more name. `handler` answers its calls, on a thread of the library. If it fails, the caller gets an error with
    /// the name of the call and the text.
    #[must_use]
    pub fn with(
        mut self,
        name: impl Into<String>,
        handler: impl Fn(Call) -> Result<Message, Box<dyn StdError + Send + Sync>> + Send + Sync + 'static,
    ) -> Self {
        self.handlers.insert(name.into(), Arc::new(handler));
        self
    }

    /// The same, of which so many calls run at a time: 8 unless told otherwise. Others wait, and begin in the order in which they
    /// have come. With one, each begins when the one before it is over.
    #[must_use]
    pub fn threads(mut self, count: usize) -> Self {
        self.threads = count.max(1);
        self
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Service({:?}, {} threads)", self.handlers.keys(), self.threads)
    }
}

/// A call that a handler answers. What the handler has not read of it is dropped with it.
#[derive(Debug)]
pub struct Call {
    side: Arc<Side>,
    name: String,
    incoming: Incoming,
    wanted: Arc<Wanted>,
}

/// Whether somebody waits for the answer of a call. Any thread may ask.
#[derive(Debug)]
pub struct Wanted {
    by: Deadline,
    given_up: AtomicBool,
}

impl Wanted {
    /// Whether somebody does.
    pub fn is_so(&self) -> bool {
        !self.given_up.load(Ordering::Acquire) && !self.by.passed()
    }

    /// When the answer must be there: nobody waits for it after that.
    pub fn deadline(&self) -> Deadline {
        self.by
    }
}

impl Call {
    /// What was called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bytes that came with the call.
    pub fn metadata(&self) -> &[u8] {
        self.incoming.metadata()
    }

    /// Its message, of which only the description is here. Say where its tensors go, and read it.
    ///
    /// The call is over for its caller when the views of its tensors are dropped, too: an answer must not hold any.
    pub fn incoming(&mut self) -> &mut Incoming {
        &mut self.incoming
    }

    /// Reads its message, with the tensors in new memory of the host.
    pub fn read(&mut self) -> Result<Message> {
        self.incoming.read().deadline(self.wanted.by).wait()
    }

    /// When the answer must be there: nobody waits for it after that.
    pub fn deadline(&self) -> Deadline {
        self.wanted.by
    }

    /// Whether somebody waits for the answer: the caller has not given the call up, and its deadline has not passed. Waits of this library
    /// in the handler end soon after nobody does.
    pub fn is_wanted(&self) -> bool {
        self.wanted.is_so()
    }

    /// The same, for threads that work for the handler.
    pub fn wanted(&self) -> Arc<Wanted> {
        self.wanted.clone()
    }

    /// The process that calls.
    pub fn peer(&self) -> &Member {
        self.side.end.peer()
    }

    /// Calls what the caller has by this name.
    pub fn call_back<'a>(&'a self, name: &'a str, message: &'a Message) -> Calling<'a> {
        Calling::new(&self.side, name, message).deadline(self.wanted.by)
    }
}

/// One end of a pipe that calls and is called.
pub(super) struct Side {
    pub(super) end: Arc<End>,
    handlers: BTreeMap<String, Handler>,
    hand: Arc<Hand>,
    /// Calls that are not answered, by the numbers of their messages.
    calls: Mutex<HashMap<u64, Arc<Wanted>>>,
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Side({:?})", self.end)
    }
}

/// Takes what the other end calls, until it has closed the pipe.
pub(super) async fn serve(side: Arc<Side>) -> Result<()> {
    let served = side.take_all().await;
    // Nobody waits for an answer any more.
    side.calls().values().for_each(|wanted| wanted.given_up.store(true, Ordering::Release));
    served
}

/// An answer, or why there is none.
type Answer = Result<Message, (Failure, String)>;

impl Side {
    pub(super) fn new(end: &Arc<End>, service: Service) -> Self {
        let Service { handlers, threads } = service;
        Self { end: end.clone(), handlers, hand: Arc::new(Hand::new(threads)), calls: Mutex::default() }
    }

    /// The other end, for people.
    pub(super) fn other(&self) -> String {
        let Member { host, pid, .. } = self.end.peer();
        format!("the other end (host {host}, pid {pid})")
    }

    /// Closes the pipe. What is on its way is lost: who waits for it hears that this end has left.
    pub(super) fn close(&self) -> Result<()> {
        self.end.group.clone().close().map_err(|error| self.end.own(error))
    }

    async fn take_all(self: &Arc<Self>) -> Result<()> {
        while let Some(described) = describe(self.end.clone(), HEADS, ever(), How::Start).await? {
            self.take(described.keep()?)?;
        }
        Ok(())
    }

    fn take(self: &Arc<Self>, mut incoming: Incoming) -> Result<()> {
        let header = Header::begin(incoming.metadata());
        let (header, len) = header.map_err(|error| self.end.misbehaved(&error))?;
        match header {
            Header::Call { left, name } => {
                incoming.strip(len)?;
                self.begin(incoming, name, Duration::from_nanos(left))
            }
            Header::Unwanted(serial) => {
                // It may be answered already.
                if let Some(wanted) = self.calls().get(&serial) {
                    wanted.given_up.store(true, Ordering::Release);
                }
                Ok(())
            }
            _ => Err(self.end.misbehaved(&crate::wire::bad("an answer that nobody waits for"))),
        }
    }

    fn begin(self: &Arc<Self>, incoming: Incoming, name: String, left: Duration) -> Result<()> {
        let serial = incoming.serial();
        let wanted = Arc::new(Wanted { by: Deadline::after(left), given_up: AtomicBool::new(false) });
        let waiting = {
            let mut calls = self.calls();
            if calls.insert(serial, wanted.clone()).is_some() {
                drop(calls);
                return Err(self.end.misbehaved(&crate::wire::bad("the number of another call")));
            }
            calls.len()
        };
        let refused = match self.handlers.get(&name) {
            _ if waiting > MOST => (Failure::Busy, format!("{MOST} of your calls wait for their answers")),
            Some(handler) => {
                let (side, handler) = (self.clone(), handler.clone());
                let call = Call { side: self.clone(), name, incoming, wanted };
                let job = move || {
                    let answer = run(&handler, call);
                    side.reply(serial, answer);
                };
                match self.hand.post(Box::new(job)) {
                    Ok(()) => return Ok(()),
                    Err(error) => (Failure::Failed, error.to_string()),
                }
            }
            None => (Failure::Unknown, self.names()),
        };
        self.reply(serial, Err(refused));
        Ok(())
    }

    /// What can be called.
    fn names(&self) -> String {
        match self.handlers.is_empty() {
            true => "nothing can be called there".into(),
            false => {
                let names: Vec<_> = self.handlers.keys().map(|name| format!("{name:?}")).collect();
                format!("what can be called there: {}", names.join(", "))
            }
        }
    }

    /// Answers a call. Each call is answered once, whatever has become of it: the caller waits for that, or drops what comes.
    fn reply(self: &Arc<Self>, serial: u64, answer: Answer) {
        let packed = match answer {
            Ok(message) => {
                let message = with_header(&Header::Answer, &message);
                let failed = |error: Error| (Failure::Failed, format!("its answer cannot be sent: {error}"));
                self.pack(serial, &message).map(|parcel| (parcel, message)).map_err(failed)
            }
            Err(failure) => Err(failure),
        };
        let packed = packed.or_else(|(failure, text)| {
            let message = with_header(&Header::Error(failure, text), &Message::new());
            self.pack(serial, &message).map(|parcel| (parcel, message))
        });
        let sent = packed.and_then(|(mut parcel, message)| {
            Pending::start("answer", async move {
                let sent = parcel.send(ever(), How::Start).await;
                drop(message);
                sent
            })
        });
        let side = self.clone();
        match sent {
            Ok(sending) => sending.on_done(move |sent| side.forget(serial, sent)),
            Err(error) => self.forget(serial, Err(error)),
        }
    }

    fn pack(&self, serial: u64, message: &Message) -> Result<Parcel> {
        Parcel::pack(&self.end, message, false, (tag(serial, Part::Answer), &[]))
    }

    fn forget(&self, serial: u64, sent: Result<()>) {
        self.calls().remove(&serial);
        if let Err(error) = sent {
            tracing::debug!(%error, "the answer of a call has not gone");
        }
    }

    /// Has the other end hear that nobody waits for the answer of a call, and drops that.
    pub(super) fn give_up(&self, serial: u64) {
        if self.end.group.check().is_err() {
            return;
        }
        let told = with_header(&Header::Unwanted(serial), &Message::new());
        let (end, lane) = (self.end.clone(), tag(serial, Part::Answer));
        let begun = Parcel::pack(&end, &told, false, (HEADS, &[])).and_then(|mut parcel| {
            let telling = Pending::start("word", async move { parcel.send(ever(), How::Start).await });
            telling.map(drop)
        });
        let drops = Pending::start("answer", async move {
            let described = describe(end, lane, ever(), How::Start).await?;
            described.map_or(Ok(()), |described| described.keep().map(drop))
        });
        if let Err(error) = begun.and(drops.map(drop)) {
            tracing::debug!(%error, "the other end is not told that a call is not wanted");
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<u64, Arc<Wanted>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a handler. What it has not read of the call is dropped before its answer goes.
fn run(handler: &Handler, call: Call) -> Answer {
    let given_up = || Err((Failure::Unwanted, "its caller does not wait for it any more".into()));
    let wanted = call.wanted.clone();
    if !wanted.is_so() {
        return given_up();
    }
    let own = wanted.clone();
    let look = move || match own.is_so() {
        true => Ok(()),
        false => Err(Error::Interrupted("the caller does not wait for the answer any more".into())),
    };
    // It is code of the user's, and other calls go on.
    let answer = catch_unwind(AssertUnwindSafe(|| interrupt::with_another(look, || handler(call))));
    if !wanted.is_so() {
        return given_up();
    }
    match answer {
        Ok(answer) => answer.map_err(|error| (Failure::Failed, error.to_string())),
        Err(_) => Err((Failure::Failed, "it panicked".into())),
    }
}
