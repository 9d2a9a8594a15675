//! The receiver's end of a stream.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire_device::fd::Received;
use tensorwire_device::host::Host;
use tensorwire_device::{Caching, Device, Queue, View};

use super::{BY_TCP, BY_UCX, COST, Chunk, Engine, Lane, Shared, WINDOW, lock};
use crate::error::{Error, Result};
use crate::link::office::TcpCarrier;
use crate::link::stream::Carrier;
use crate::link::{Fault, Linked};

/// After how much a receiver says that it has taken so much.
const TOLD: u64 = WINDOW / 8;
/// What UCX has on its way when the connection ends has so long to come.
const GRACE: Duration = Duration::from_secs(1);

/// A stream that the thread knows, until this is dropped.
#[derive(Debug)]
pub(in crate::link) struct OpenLane {
    pub(super) shared: Arc<Shared>,
    pub(super) lane: Arc<Lane>,
}

impl Deref for OpenLane {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl Drop for OpenLane {
    fn drop(&mut self) {
        if !self.shared.birth.is_ours() {
            return;
        }
        lock(&self.shared.state).lanes.remove(&self.lane.name);
        let chunks = std::mem::take(&mut lock(&self.lane.state).chunks);
        for chunk in chunks.into_values().flatten() {
            if let Chunk::Large(block, _) = chunk {
                self.shared.give(block);
            }
        }
    }
}

/// The receiver's end of a stream.
#[derive(Debug)]
pub(in crate::link) struct UcxInput {
    engine: Arc<Engine>,
    control: TcpCarrier,
    lane: OpenLane,
    /// Whether the sender has said that it takes the stream up.
    taken_up: bool,
    /// The chunk that is being taken, and how much of it was.
    current: Option<Chunk>,
    taken: usize,
    /// What was taken and the sender does not know, and what is being told.
    untold: u64,
    telling: Vec<u8>,
    /// Since when the connection has ended, and how.
    ended: Option<(Instant, Option<String>)>,
    queue: Box<dyn Queue>,
}

impl UcxInput {
    pub(super) fn new(engine: Arc<Engine>, control: TcpCarrier, lane: OpenLane) -> Result<Self> {
        Ok(Self {
            engine,
            control,
            lane,
            taken_up: false,
            current: None,
            taken: 0,
            untold: 0,
            telling: Vec::new(),
            ended: None,
            queue: Host.queue()?,
        })
    }

    /// Whether the sender has taken the stream up: it says so before its first chunk.
    fn is_taken_up(&mut self) -> Linked<bool> {
        if self.taken_up {
            return Ok(true);
        }
        let mut word = [0];
        match (self.control.recv_bytes(&mut word)?, word) {
            (Received::Nothing, _) => Ok(false),
            (Received::End, _) => Err(Fault::Lost("the connection ended before it was used".into())),
            (Received::Bytes(_), [BY_UCX]) => {
                self.taken_up = true;
                Ok(true)
            }
            (Received::Bytes(_), [BY_TCP]) => Err(Fault::Unfit(
                "it sends by TCP, and TENSORWIRE_LINK=ucx is set here: all ranks need the same setting"
                    .into(),
            )),
            (Received::Bytes(_), _) => Err(Fault::Nonsense),
        }
    }

    /// Has the next chunk at hand, if it is there.
    fn open(&mut self) -> Linked<Received> {
        self.tell()?;
        if self.current.is_some() {
            return Ok(Received::Bytes(0));
        }
        let next = {
            let mut coming = lock(&self.lane.state);
            if let Some(trouble) = &coming.fault {
                return Err(trouble.clone().into());
            }
            let next = coming.next;
            let chunk = coming.chunks.get_mut(&next).and_then(Option::take);
            if chunk.is_some() {
                coming.chunks.remove(&next);
                coming.next += 1;
            }
            chunk
        };
        match next {
            Some(chunk) => (self.current, self.taken) = (Some(chunk), 0),
            None => return self.listen(),
        }
        Ok(Received::Bytes(0))
    }

    /// Nothing is here. Looks whether the connection has ended, which may overtake what UCX carries.
    fn listen(&mut self) -> Linked<Received> {
        if self.ended.is_none() {
            let mut nothing = [0];
            let why = match self.control.recv_bytes(&mut nothing) {
                Ok(Received::Nothing) => return Ok(Received::Nothing),
                Ok(Received::Bytes(_)) => return Err(Fault::Nonsense),
                Ok(Received::End) => None,
                Err(Fault::Lost(why)) => Some(why),
                Err(fault) => return Err(fault),
            };
            self.ended = Some((Instant::now(), why));
        }
        match &self.ended {
            Some((since, why)) if since.elapsed() >= GRACE => match why {
                Some(why) => Err(Fault::Lost(why.clone())),
                None => Ok(Received::End),
            },
            _ => Ok(Received::Nothing),
        }
    }

    /// So many bytes of the chunk were taken.
    fn advance(&mut self, count: usize) -> Linked<()> {
        self.taken += count;
        let Some(chunk) = self.current.take_if(|chunk| chunk.len() == self.taken) else { return Ok(()) };
        let cost = self.taken as u64 + COST;
        {
            let mut coming = lock(&self.lane.state);
            coming.held = coming.held.saturating_sub(cost);
        }
        if let Chunk::Large(block, _) = chunk {
            self.engine.shared.give(block);
        }
        self.untold += cost;
        self.tell()
    }

    /// Tells the sender what was taken, if that is worth it.
    fn tell(&mut self) -> Linked<()> {
        if self.untold >= TOLD {
            self.telling.extend((self.untold as u32).to_le_bytes());
            self.untold = 0;
        }
        if self.telling.is_empty() || self.ended.is_some() {
            return Ok(());
        }
        match self.control.send(&self.telling, None, &[]) {
            Ok(sent) => drop(self.telling.drain(..sent)),
            // A sender that has ended needs no room. What it sent may still come.
            Err(Fault::Lost(why)) => self.ended = Some((Instant::now(), Some(why))),
            Err(fault) => return Err(fault),
        }
        Ok(())
    }
}

impl Carrier for UcxInput {
    fn send(&mut self, _: &[u8], _: Option<View<'_>>, _: &[u8]) -> Linked<usize> {
        Err(Fault::Ours(Error::Bug("a stream that is read is sent to".into())))
    }

    fn flush(&mut self) -> Linked<bool> {
        Ok(true)
    }

    fn recv(&mut self, into: View<'_>) -> Linked<Received> {
        if !self.is_taken_up()? {
            return Ok(Received::Nothing);
        }
        let opened = self.open()?;
        let len = match &self.current {
            None => return Ok(opened),
            Some(Chunk::Small(bytes)) => {
                let rest = &bytes[self.taken..];
                let rest = &rest[..rest.len().min(into.len())];
                into.to_span().write(0, rest)?;
                rest.len()
            }
            Some(Chunk::Large(block, len)) => {
                let len = (len - self.taken).min(into.len());
                let from = block.span.view().slice(self.taken..self.taken + len)?;
                self.queue.copy(into.slice(0..len)?, from, Caching::Keep)?;
                len
            }
        };
        self.advance(len)?;
        Ok(if len == 0 { Received::Nothing } else { Received::Bytes(len) })
    }

    fn recv_bytes(&mut self, into: &mut [u8]) -> Linked<Received> {
        if !self.is_taken_up()? {
            return Ok(Received::Nothing);
        }
        let opened = self.open()?;
        let len = match &self.current {
            None => return Ok(opened),
            Some(Chunk::Small(bytes)) => {
                let rest = &bytes[self.taken..];
                let len = rest.len().min(into.len());
                into[..len].copy_from_slice(&rest[..len]);
                len
            }
            Some(Chunk::Large(block, len)) => {
                let len = (len - self.taken).min(into.len());
                block.span.read(self.taken, &mut into[..len])?;
                len
            }
        };
        self.advance(len)?;
        Ok(if len == 0 { Received::Nothing } else { Received::Bytes(len) })
    }

    fn arm_for_room(&self) {}

    fn arm_for_bytes(&self) {
        let ready = {
            let mut coming = lock(&self.lane.state);
            coming.armed = true;
            let next = coming.next;
            coming.fault.is_some() || coming.chunks.get(&next).is_some_and(Option::is_some)
        };
        if ready {
            self.lane.bell.ring();
        }
        // An end is heard once. Whoever sleeps looks again in time.
        if self.ended.is_none() {
            self.control.arm_for_bytes();
        }
    }
}

impl Drop for UcxInput {
    fn drop(&mut self) {
        if let Some(Chunk::Large(block, _)) = self.current.take()
            && self.engine.shared.birth.is_ours()
        {
            self.engine.shared.give(block);
        }
    }
}
