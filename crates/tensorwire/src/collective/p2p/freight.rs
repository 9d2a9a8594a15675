//! Messages of tensors on GPUs.
//!
//! What is sent is copied into memory of the context's pool, on a queue behind what the caller has queued, and this copy is lent:
//! the message carries its token, which names the point of the queue at which the copy is there. So a send never waits
//! for its receiver, and the caller's tensor may change as soon as the copy is made. The receiver's queue waits for that point, pulls, and
//! releases; then the memory goes back to the pool. A queue thus only ever waits for what was queued before.
//!
//! | tensor of the sender | of the receiver | what goes through the ring | then |
//! |---|---|---|---|
//! | host | host | the bytes | nothing |
//! | GPU | the same GPU, or one that reaches it | the token | the receiver's queue copies from the sender's pool |
//! | GPU | another GPU | the token | a queue of the sender's GPU copies to memory of the host, and the receiver's queue from there |
//! | GPU | host | the token | a queue of the sender's GPU copies to memory of the host, and a thread from there |
//! | host | GPU | the bytes, into memory of the host that GPUs reach | the receiver's queue copies |
//!
//! To a rank on another host a tensor of a GPU goes through memory of the host, and its sender waits for that copy.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorwire_device::flag::LINE;
use tensorwire_device::pool::Pool;
use tensorwire_device::{Abort, Caching, Deadline, DeviceId, Mark, Queue, Span, host};

use super::operation::{Apart, Arrival, Gaps, dense};
use super::peers::Peers;
use crate::collective::queued::after_hosts;
use crate::collective::tensor::Tensor;
use crate::context::{Context, IdleQueues};
use crate::error::{Error, PeerFaultKind, Result};
use crate::interrupt;
use crate::lease::{Terms, Token};

/// How long a rank that has left the group waits for those that have not taken what it has sent from a GPU.
const LINGER: Duration = Duration::from_secs(10);
/// How long the group is given to hear why the sender of a message does not answer.
const HEARSAY: Duration = Duration::from_millis(500);
/// How long a token may be redeemed after that.
const LATER: Duration = Duration::from_secs(600);
/// How long a send without memory waits before it asks again.
const AGAIN: Duration = Duration::from_millis(2);
/// Words of a page.
const WORDS: usize = 64;

/// On which queue the work of a message is put, and behind what.
#[derive(Debug)]
pub(crate) enum Course<'q> {
    /// On one of the group's own, behind a mark.
    Own(Option<Mark>),
    /// On the caller's.
    On(&'q mut dyn Queue),
}

/// A tensor of a GPU, ready to be sent.
#[derive(Debug)]
pub(super) struct Parcel {
    /// What goes through the ring: the token of the copy, or the copy.
    pub(super) payload: Span,
    pub(super) lent: bool,
    /// Behind the copy.
    pub(super) copied: Option<Mark>,
}

/// What a receive knows of its tensor when its message is here.
#[derive(Debug)]
pub(super) struct Unload {
    pub(super) into: Span,
    pub(super) apart: Option<Gaps>,
    pub(super) deadline: Deadline,
}

/// A message on its way from one memory to another.
#[derive(Debug)]
pub(super) struct Moving {
    /// The place of its sender.
    from: usize,
    /// Behind the copy.
    pub(super) mark: Mark,
    /// What ends its waits. Nothing for a copy that waits for nobody.
    word: Option<Abort>,
    /// Where the bytes are then, if a thread is to bring them on.
    landed: Option<Span>,
    begin: Instant,
    deadline: Deadline,
}

/// What a rank needs for messages of GPUs.
#[derive(Debug)]
pub(super) struct Freight {
    context: Arc<Context>,
    peers: Arc<Peers>,
    queues: IdleQueues,
    /// Abort words that nobody uses.
    words: Mutex<Vec<Abort>>,
    sent: Mutex<Sent>,
    ways: Mutex<Ways>,
}

/// How messages have gone, and why not straight from GPU to GPU.
#[derive(Debug, Default)]
struct Ways {
    straight: u64,
    /// By reason.
    around: BTreeMap<String, u64>,
}

/// Tokens that may not have been redeemed yet, each with the place of the rank that it is for.
#[derive(Debug, Default)]
struct Sent {
    tokens: Vec<(usize, Token)>,
    /// From how many on it is looked which of them are over.
    many: usize,
}

/// Bytes as private memory.
pub(super) fn spanned(bytes: &[u8]) -> Result<Span> {
    let span = Span::whole(host::private(bytes.len())?).slice(0..bytes.len())?;
    span.write(0, bytes)?;
    Ok(span)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Freight {
    pub(super) fn new(context: &Arc<Context>, peers: &Arc<Peers>) -> Self {
        Self {
            context: context.clone(),
            peers: peers.clone(),
            queues: IdleQueues::default(),
            words: Mutex::default(),
            sent: Mutex::default(),
            ways: Mutex::default(),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.peers.control.abort.is_set()
    }

    /// Memory of the host that GPUs copy from and to.
    pub(super) fn host_pool(&self) -> Result<Pool> {
        self.context.pool(&DeviceId::Host)
    }

    /// Makes the copy of a tensor that is sent.
    pub(super) fn pack(
        &self,
        tensor: &Tensor,
        to: usize,
        course: Course<'_>,
        deadline: Deadline,
    ) -> Result<Parcel> {
        let (device, bytes, far) = (tensor.span().device(), tensor.byte_len(), self.peers.is_far(to));
        let pool = if far { self.host_pool()? } else { self.context.pool(&device)? };
        let copy = self.room(&pool, bytes, deadline)?;
        let begin = Instant::now();
        let parcel = self.on((&device, true), course, |queue| {
            queue.begin(None)?;
            copy_packed(queue, (&copy, None), (tensor.span(), Some(tensor)))?;
            if far {
                return Ok(Parcel { payload: copy, lent: false, copied: Some(queue.mark()?) });
            }
            let lease = self.context.grant_after(&copy, &Terms::default().lifetime(Duration::MAX), queue)?;
            let payload = spanned(&lease.token().to_bytes())?;
            let copied = Some(queue.mark()?);
            self.note(to, lease.token());
            Ok(Parcel { payload, lent: true, copied })
        })?;
        if let Some(mark) = parcel.copied.as_ref().filter(|_| far) {
            self.went_around("the receiver is on another host");
            mark.wait(&self.peers.control.abort, deadline).map_err(|error| match error {
                tensorwire_device::Error::TimedOut => {
                    let missing = format!("the queue of {device} has not come so far");
                    Error::timed_out("sending a tensor of a GPU", begin.elapsed(), missing)
                }
                other => self.peers.failure().unwrap_or_else(|| other.into()),
            })?;
        }
        Ok(parcel)
    }

    /// Memory for a copy. Where there is too little, messages that were sent before have some: they are waited for.
    fn room(&self, pool: &Pool, bytes: usize, deadline: Deadline) -> Result<Span> {
        let mut pace = interrupt::Pace::new();
        let mut warned = false;
        loop {
            let error = match pool.alloc(bytes) {
                Ok(region) => return Ok(Span::whole(region).slice(0..bytes)?),
                Err(error) => Error::from(error),
            };
            let mut sent = lock(&self.sent);
            let gone = self.over(&mut sent);
            let left = sent.tokens.len();
            drop(sent);
            gone.iter().for_each(|token| self.discard(token));
            if left == 0 && gone.is_empty() {
                return Err(error);
            }
            if deadline.passed() {
                return Err(error.adding(&format!("{left} messages that were sent before are not received")));
            }
            if !std::mem::replace(&mut warned, true) {
                tracing::warn!("a send waits for memory: {left} messages are not received ({error})");
            }
            pace.look(Instant::now())?;
            std::thread::sleep(AGAIN);
        }
    }

    /// Brings a message that is here to its tensor: puts that on a queue.
    pub(super) fn unload(&self, arrival: &Arrival, unload: &Unload, course: Course<'_>) -> Result<Moving> {
        self.try_unload(arrival, unload, course).map_err(|error| match error {
            // That the sender is gone may be known to the group in a moment.
            Error::Peer(_) | Error::Aborted(_) => {
                let _ = self.peers.control.abort.wait(Deadline::after(HEARSAY));
                let failure = self.peers.failure();
                failure.unwrap_or_else(|| match &error {
                    Error::Peer(fault) => {
                        let text = format!("a message of it cannot be received: {error}");
                        self.peers.fault(fault.kind, arrival.from, text)
                    }
                    _ => error,
                })
            }
            other => other,
        })
    }

    fn try_unload(&self, arrival: &Arrival, unload: &Unload, course: Course<'_>) -> Result<Moving> {
        let from = arrival.from;
        let token = match arrival.header.lent {
            0 => None,
            _ => Some(Token::from_bytes(&arrival.payload.to_vec()?)?),
        };
        let other = |token: &Token| token.len() as u64 != arrival.header.bytes || self.peers.is_far(from);
        if token.as_ref().is_some_and(other) {
            let text = "it lends other memory for a message than it says, or to another host".to_owned();
            return Err(self.peers.fault(PeerFaultKind::Misbehaved, from, text));
        }
        let gpu = unload.apart.as_deref().filter(|apart| apart.gpu.is_some());
        match (token, gpu) {
            (None, None) => Ok(Moving::new(from, Mark::passed(), None, unload)),
            (None, Some(apart)) => {
                self.went_around("the sender's tensor was on the CPU, or on another host");
                self.moved((from, apart), course, unload, |queue, _| {
                    copy_packed(queue, (apart.tensor.span(), Some(&apart.tensor)), (&arrival.payload, None))
                })
            }
            (Some(token), Some(apart)) => {
                let device = apart.tensor.span().device();
                if let Some(reason) = self.context.why_unreachable(&device, token.device())? {
                    if self.context.config().strict {
                        return Err(Error::Unsupported {
                            what: format!("a message from {} to {device}, in strict mode", token.device()),
                            need: "a GPU that reaches the memory of the other one".into(),
                            have: reason,
                        });
                    }
                    self.went_around(&reason);
                    let landing = self.land(from, &token, unload)?;
                    let landed = self.settle(landing)?;
                    return self.moved((from, apart), course, unload, |queue, _| {
                        let from = landed.as_ref().unwrap_or(&arrival.payload);
                        copy_packed(queue, (apart.tensor.span(), Some(&apart.tensor)), (from, None))
                    });
                }
                lock(&self.ways).straight += 1;
                self.moved((from, apart), course, unload, |queue, word| {
                    let loan = self.context.redeem_by(&token, queue, word, unload.deadline)?;
                    copy_packed(queue, (apart.tensor.span(), Some(&apart.tensor)), (loan.span(), None))?;
                    loan.release_after(queue)
                })
            }
            (Some(token), None) => {
                self.went_around("the receiver's tensor was on the CPU");
                self.land(from, &token, unload)
            }
        }
    }

    /// How it went, once its copy is made or its time is over; nothing before.
    pub(super) fn look(&self, moving: &Moving) -> Option<Result<()>> {
        // Behind the mark, if it is passed: what ended a wait was set before.
        let passed = moving.mark.is_passed();
        let stopped = moving.word.as_ref().filter(|word| word.or(&self.peers.control.abort).is_set());
        match passed {
            Err(error) => Some(Err(error.into())),
            Ok(true) => Some(stopped.map_or(Ok(()), |word| Err(self.stopped(word, moving)))),
            Ok(false) if after_hosts(moving.deadline).passed() => Some(Err(self.late(moving))),
            Ok(false) => None,
        }
    }

    /// The end of a message whose copy was made: brings it on to a tensor of the host.
    pub(super) fn bring_on(&self, moving: Moving, unload: &Unload) -> Result<()> {
        let landed = self.settle(moving)?;
        let Some(landed) = landed else { return Ok(()) };
        let mut queue = self.context.device(&DeviceId::Host)?.queue()?;
        queue.copy(unload.into.view(), landed.view(), Caching::Keep)?;
        match unload.apart.as_deref() {
            Some(apart) => apart.unpack(&unload.into, &mut *queue),
            None => Ok(()),
        }
    }

    /// Waits until its copy is made; gives where the bytes are, if a thread is to bring them on.
    fn settle(&self, mut moving: Moving) -> Result<Option<Span>> {
        let mut pace = interrupt::Pace::new();
        let begin = Instant::now();
        loop {
            if let Some(result) = self.look(&moving) {
                result?;
                if let Some(word) = moving.word.take() {
                    lock(&self.words).push(word);
                }
                return Ok(moving.landed);
            }
            pace.look(Instant::now())?;
            if begin.elapsed() > Duration::from_micros(200) {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// Has a queue of the GPU that lent memory is on bring it to memory of the host.
    fn land(&self, from: usize, token: &Token, unload: &Unload) -> Result<Moving> {
        let gpu = token.device();
        self.context.device(gpu).map_err(|error| Error::Unsupported {
            what: format!("a message that {} has sent from {gpu}", self.peers.name(from)),
            need: "a receiver that can open that GPU: have its process see it, or send a tensor of the CPU"
                .into(),
            have: format!("{}, where that fails: {error}", self.peers.name(self.peers.me())),
        })?;
        let landed = Span::whole(self.host_pool()?.alloc(token.len())?).slice(0..token.len())?;
        let word = self.word()?;
        let abort = word.or(&self.peers.control.abort);
        let mark = self.on((gpu, false), Course::Own(None), |queue| {
            queue.begin(Some(&abort))?;
            let loan = self.context.redeem_by(token, queue, &abort, unload.deadline)?;
            queue.copy(landed.view(), loan.span().view(), Caching::Keep)?;
            loan.release_after(queue)?;
            Ok(queue.mark()?)
        })?;
        Ok(Moving { landed: Some(landed), ..Moving::new(from, mark, Some(word), unload) })
    }

    /// Puts a copy to a tensor of a GPU on a queue there.
    fn moved(
        &self,
        (from, apart): (usize, &Apart),
        course: Course<'_>,
        unload: &Unload,
        work: impl FnOnce(&mut dyn Queue, &Abort) -> Result<()>,
    ) -> Result<Moving> {
        let word = self.word()?;
        let abort = word.or(&self.peers.control.abort);
        let course = match (course, &apart.gpu) {
            (Course::Own(None), Some((_, after))) => Course::Own(after.clone()),
            (course, _) => course,
        };
        let mark = self.on((&apart.tensor.span().device(), false), course, |queue| {
            queue.begin(Some(&abort))?;
            work(queue, &abort)?;
            Ok(queue.mark()?)
        })?;
        Ok(Moving::new(from, mark, Some(word), unload))
    }

    /// Does something on a queue, which looks at no abort words afterwards.
    fn on<T>(
        &self,
        (device, sends): (&DeviceId, bool),
        course: Course<'_>,
        work: impl FnOnce(&mut dyn Queue) -> Result<T>,
    ) -> Result<T> {
        let after = match course {
            Course::On(queue) => {
                let done = work(queue);
                queue.begin(None)?;
                return done;
            }
            Course::Own(after) => after,
        };
        let mut queue = self.queues.take(&self.context, (device, sends), &Vec::from_iter(after))?;
        let done = work(&mut *queue);
        self.queues.give_back((device, sends), queue);
        done
    }

    fn went_around(&self, reason: &str) {
        *lock(&self.ways).around.entry(reason.to_owned()).or_default() += 1;
    }

    /// How messages have gone, as a few lines.
    pub(super) fn explain(&self) -> String {
        let ways = lock(&self.ways);
        let mut text = String::new();
        if ways.straight > 0 {
            text = format!("  messages received straight from the memory of GPUs: {}\n", ways.straight);
        }
        for (reason, count) in &ways.around {
            text.push_str(&format!("  messages of GPUs through memory of the host: {count} ({reason})\n"));
        }
        text
    }

    /// An abort word for a wait.
    fn word(&self) -> Result<Abort> {
        let mut words = lock(&self.words);
        if let Some(word) = words.pop() {
            return Ok(word);
        }
        let page = Span::whole(self.context.host().alloc(WORDS * LINE)?);
        for at in 1..WORDS {
            words.push(Abort::new(&page.slice(at * LINE..(at + 1) * LINE)?)?);
        }
        Ok(Abort::new(&page.slice(0..LINE)?)?)
    }

    /// Why the waits before a copy were ended: it was not made.
    fn stopped(&self, word: &Abort, moving: &Moving) -> Error {
        if word.code() == Some(Abort::LATE) {
            return self.late(moving);
        }
        let given_up = || Error::Aborted("the copy of a message was given up".into());
        self.peers.failure().unwrap_or_else(given_up)
    }

    fn late(&self, moving: &Moving) -> Error {
        let who = self.peers.name(moving.from);
        let missing = format!("the queue of {who}, or the one that receives, has not come so far");
        let error = Error::timed_out("copying a message of a GPU", moving.begin.elapsed(), missing);
        error.about([self.peers.rank(moving.from)])
    }

    fn note(&self, to: usize, token: &Token) {
        let mut sent = lock(&self.sent);
        let mut gone = Vec::new();
        if sent.tokens.len() >= sent.many.max(16) {
            gone = self.over(&mut sent);
            sent.many = sent.tokens.len() * 2;
        }
        sent.tokens.push((to, token.clone()));
        drop(sent);
        gone.iter().for_each(|token| self.discard(token));
    }

    /// Forgets what was redeemed; gives what nobody will redeem.
    fn over(&self, sent: &mut Sent) -> Vec<Token> {
        sent.tokens.retain(|(_, token)| !self.context.is_over(token));
        let failed = self.peers.control.abort.is_set();
        let gone = sent.tokens.extract_if(.., |(to, _)| failed || self.peers.is_gone(*to));
        gone.map(|(_, token)| token).collect()
    }

    /// Uses a token up that nobody wants.
    fn discard(&self, token: &Token) {
        if let Err(error) = self.context.discard(token, Deadline::after(Duration::from_secs(1))) {
            tracing::debug!("a message that nobody receives: {error}");
        }
    }

    /// The same for one that is still bytes.
    pub(super) fn throw_away(&self, token: &[u8]) {
        if let Ok(token) = Token::from_bytes(token) {
            self.discard(&token);
        }
    }

    /// This rank has left the group: waits a moment for those that have not taken what was sent to them.
    pub(super) fn linger(&self, timeout: Duration) {
        if std::thread::panicking() {
            return;
        }
        let begin = Instant::now();
        loop {
            let mut sent = lock(&self.sent);
            let gone = self.over(&mut sent);
            let left = sent.tokens.len();
            drop(sent);
            gone.iter().for_each(|token| self.discard(token));
            if left == 0 {
                return;
            }
            if begin.elapsed() > LINGER.min(timeout) || interrupt::sleep(Duration::from_millis(1)).is_err() {
                break;
            }
        }
        let left = std::mem::take(&mut lock(&self.sent).tokens);
        tracing::warn!(
            "{} messages of tensors on GPUs have not been received when the group is closed; they can be for ten minutes, as \
             long as this process lives",
            left.len()
        );
        for (_, token) in left {
            let _ = self.context.renew(&token, LATER);
        }
    }
}

impl Moving {
    fn new(from: usize, mark: Mark, word: Option<Abort>, unload: &Unload) -> Self {
        Self { from, mark, word, landed: None, begin: Instant::now(), deadline: unload.deadline }
    }
}

/// Copies between two pieces of memory, of which either may be a tensor with gaps; the other one has none.
fn copy_packed(
    queue: &mut dyn Queue,
    (into, to): (&Span, Option<&Tensor>),
    (from, of): (&Span, Option<&Tensor>),
) -> Result<()> {
    let Some(tensor) = to.or(of) else { return Err(Error::bug("a copy without a tensor")) };
    let bytes = tensor.byte_len();
    if bytes == 0 {
        return Ok(());
    }
    if tensor.layout().is_contiguous() {
        return Ok(queue.copy(into.slice(0..bytes)?.view(), from.slice(0..bytes)?.view(), Caching::Keep)?);
    }
    let packed = dense(tensor)?;
    let layout =
        |side: Option<&Tensor>| side.map_or_else(|| packed.clone(), |tensor| tensor.layout().clone());
    let (to, of) = (layout(to), layout(of));
    Ok(queue.copy_strided((into.view(), &to), (from.view(), &of))?)
}
