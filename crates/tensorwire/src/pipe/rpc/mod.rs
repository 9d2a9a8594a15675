//! Calls by name, over a pipe.
//!
//! One end calls what the other one has, with metadata, payloads and tensors, and gets a message back or an error. Both ends may do
//! both. How arguments become metadata is up to the two programs: nothing is pickled here.
//!
//! ```
//! use std::time::Duration;
//! use tensorwire::pipe::rpc::{Rpc, Service};
//! use tensorwire::pipe::{Listener, Message, Pipe};
//! use tensorwire::{Context, Deadline, Tensor};
//!
//! fn main() -> tensorwire::Result<()> {
//!     let deadline = Deadline::after(Duration::from_secs(60));
//!     let context = Context::from_env()?;
//!     let listener = Listener::local(&context)?;
//!     let address = listener.address().to_owned(); // goes to the other process
//!
//!     let other = std::thread::spawn(move || -> tensorwire::Result<()> {
//!         let context = Context::from_env()?;
//!         let service = Service::new().with("double", |mut call| {
//!             let message = call.read()?;
//!             let numbers: Vec<f32> = message.tensors()[0].to_vec()?;
//!             let doubled: Vec<f32> = numbers.iter().map(|number| number * 2.0).collect();
//!             Ok(Message::new().with_tensor(&Tensor::private(&doubled)?))
//!         });
//!         let rpc = Rpc::over(Pipe::connect(&context, &address, deadline)?, service)?;
//!         rpc.wait(deadline) // until the other end has closed
//!     });
//!     let rpc = Rpc::over(listener.accept(deadline)?, Service::new())?;
//!     let numbers = Message::new().with_tensor(&Tensor::private(&[1.0_f32, 2.0])?);
//!     let answer = rpc.call("double", &numbers).wait()?;
//!     assert_eq!(answer.tensors()[0].to_vec::<f32>()?, [2.0, 4.0]);
//!     drop(rpc);
//!     other.join().expect("it does not panic")
//! }
//! ```
//!
//! A call is a message, and its answer is one. The head of an answer has the tag of the message that it answers: so who waits for it
//! waits as for any message, with a deadline, and no thread stands between. A call that its caller gives up is told to the other
//! end, which answers all the same, once. That answer is dropped as it comes.

mod header;
mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::Deadline;

use self::header::{Failure, Header, NAME};
pub use self::serve::{Call, Service, Wanted};
use self::serve::{Side, serve};
use super::descriptor::{Part, tag};
use super::pending::{How, now};
use super::receive::describe;
use super::send::Parcel;
use super::{HEADS, Incoming, Message, Pending, Pipe};
use crate::error::{Error, PeerFault, PeerFaultKind, Result};
use crate::group::Member;

/// One end of a pipe that calls, and answers calls. Clones are the same end. The pipe is closed when the last is dropped.
#[derive(Clone)]
pub struct Rpc(Arc<Open>);

struct Open {
    side: Arc<Side>,
    pipe: Pipe,
    serving: Pending<()>,
}

impl Rpc {
    /// Makes an end of a pipe one that calls and is called. All its messages are calls from now on, and those of the other end must
    /// be as well: receive nothing from another clone of it.
    ///
    /// The end has a thread for what comes, and more for calls that run.
    pub fn over(pipe: Pipe, service: Service) -> Result<Self> {
        let side = Arc::new(Side::new(&pipe.0, service));
        let serving = Pending::start("rpc", serve(side.clone()))?;
        Ok(Self(Arc::new(Open { side, pipe, serving })))
    }

    /// Calls what the other end has by this name.
    pub fn call<'a>(&'a self, name: &'a str, message: &'a Message) -> Calling<'a> {
        Calling { side: &self.0.side, name, message, deadline: None }
    }

    /// Waits until the other end has closed. Calls are answered meanwhile, and also if nobody waits.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.0.serving.wait_by(deadline).map_err(|error| match error {
            Error::TimedOut { after, .. } => {
                let missing = format!("{} has not closed it", self.0.side.other());
                Error::timed_out("serving the other end of a pipe", after, missing)
            }
            other => other,
        })
    }

    /// Closes the pipe, even while other handles live. Calls of both ends that are not answered fail.
    pub fn close(self) -> Result<()> {
        self.0.side.close()
    }

    /// The process at the other end.
    pub fn peer(&self) -> &Member {
        self.0.pipe.peer()
    }

    /// Which channel tensors take; see [`Pipe::explain`].
    pub fn explain(&self) -> String {
        self.0.pipe.explain()
    }
}

impl fmt::Debug for Rpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rpc({})", self.peer())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // What serves keeps the end: it is over with this.
        if let Err(error) = self.side.close() {
            tracing::debug!(%error, "an end of a pipe that calls is dropped");
        }
    }
}

/// A call that has not begun: wait for its answer, or start it.
#[derive(Debug)]
#[must_use = "nothing is called until it is waited for or started"]
pub struct Calling<'a> {
    side: &'a Arc<Side>,
    name: &'a str,
    message: &'a Message,
    deadline: Option<Deadline>,
}

impl<'a> Calling<'a> {
    fn new(side: &'a Arc<Side>, name: &'a str, message: &'a Message) -> Self {
        Self { side, name, message, deadline: None }
    }

    /// Sets when its answer must be here at the latest. Otherwise the time-out of the configuration counts. The other end is told how
    /// much time is left.
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Calls and waits for the answer. The tensors of the call may be changed then. If this fails, the other end hears that nobody
    /// waits for it any more.
    pub fn wait(self) -> Result<Message> {
        let (asked, by) = self.ask()?;
        let end = asked.side.clone();
        let name = asked.name.clone();
        let mut incoming = now(asked.answer(by, How::Wait))?;
        incoming.read().deadline(by).wait().map_err(|error| explained(&end, &name, error))
    }

    /// Calls and waits for the description of the answer: say where its tensors go, and read it.
    pub fn describe(self) -> Result<Incoming> {
        let (asked, by) = self.ask()?;
        now(asked.answer(by, How::Wait))
    }

    /// Starts it and returns at once. Do not change its tensors until it is over. If what you get is cancelled or dropped, the other end
    /// hears that nobody waits for it any more.
    pub fn start(self) -> Result<Pending<Message>> {
        let (asked, by) = self.ask()?;
        Pending::start("call", async move {
            let (side, name) = (asked.side.clone(), asked.name.clone());
            let incoming = asked.answer(by, How::Start).await?;
            incoming.read_out(by, How::Start).await.map_err(|error| explained(&side, &name, error))
        })
    }

    fn ask(self) -> Result<(Asked, Deadline)> {
        let Self { side, name, message, deadline } = self;
        if name.len() > NAME {
            return Err(Error::misuse(format!(
                "a call with a name of {} bytes; {NAME} are possible",
                name.len()
            )));
        }
        let by = side.end.by(deadline);
        let left = by.remaining().unwrap_or_default().as_nanos();
        let header = Header::Call { left: left.try_into().unwrap_or(u64::MAX), name: name.into() };
        let message = with_header(&header, message);
        let parcel = Parcel::pack(&side.end, &message, false, (HEADS, &[]))?;
        let (side, name, begin) = (side.clone(), name.into(), Instant::now());
        Ok((Asked { side, name, parcel, _message: message, begin, answered: false }, by))
    }
}

/// A call that goes to the other end, and is not answered. If it is dropped so, the other end is told.
struct Asked {
    side: Arc<Side>,
    name: String,
    parcel: Parcel,
    /// Its tensors stay until they have gone.
    _message: Message,
    begin: Instant,
    answered: bool,
}

impl Asked {
    /// Sends it, and waits for the description of its answer.
    async fn answer(mut self, by: Deadline, how: How) -> Result<Incoming> {
        let answer = self.exchange(by, how).await;
        answer.map_err(|error| explained(&self.side, &self.name, error))
    }

    async fn exchange(&mut self, by: Deadline, how: How) -> Result<Incoming> {
        let end = &self.side.end;
        self.parcel.send(by, how).await?;
        let lane = tag(self.parcel.serial(), Part::Answer);
        let Some(described) = describe(end.clone(), lane, by, how).await? else {
            let (who, rank) = (self.side.other(), Some(end.other()));
            return Err(Error::peer(PeerFaultKind::Left, who, rank, ""));
        };
        self.answered = true;
        let mut incoming = described.keep()?;
        match Header::begin(incoming.metadata()).map_err(|error| end.misbehaved(&error))? {
            (Header::Answer, len) => incoming.strip(len).map(|()| incoming),
            (Header::Error(failure, text), _) => Err(self.failed(failure, text)),
            _ => Err(end.misbehaved(&crate::wire::bad("an answer that is none"))),
        }
    }

    /// What the other end says instead of an answer.
    fn failed(&self, failure: Failure, text: String) -> Error {
        let name = &self.name;
        let did = match failure {
            Failure::Failed => format!("failed in {name:?}"),
            Failure::Unknown => format!("has no {name:?}"),
            Failure::Busy => format!("does not take {name:?} now"),
            // It has seen the deadline pass before this end has.
            Failure::Unwanted => {
                let missing =
                    format!("{}, which was still busy with it when the time was over", self.side.other());
                return Error::timed_out("", self.begin.elapsed(), missing).about([self.side.end.other()]);
            }
        };
        let (who, rank) = (self.side.other(), self.side.end.other());
        Error::peer(PeerFaultKind::Failed, who, Some(rank), text).having(did)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let told = self.parcel.withdraw();
        if told && !self.answered {
            self.side.give_up(self.parcel.serial());
        }
    }
}

/// An error of a wait for an answer: it says which call waited.
fn explained(side: &Side, name: &str, error: Error) -> Error {
    let asked = format!("calling {name:?} at the other end of a pipe");
    let mut error = side.end.during(&asked, error);
    if let Error::Peer(PeerFault { kind: PeerFaultKind::Died | PeerFaultKind::Left, .. }) = &error {
        error.say_also(&format!("; {name:?} was called and is not answered"));
    }
    error
}

/// A message as it travels: with what is for us before its metadata.
fn with_header(header: &Header, message: &Message) -> Message {
    let metadata = [&header.to_bytes()[..], message.metadata()].concat();
    message.clone().with_metadata(metadata)
}

/// As long as the pipe lives.
fn ever() -> Deadline {
    Deadline::after(Duration::MAX)
}

/// Any bytes as what stands before the metadata of a call.
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    header::fuzz(data);
}
