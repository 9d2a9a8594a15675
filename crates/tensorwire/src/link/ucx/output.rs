//! The sender's end of a stream.

use std::sync::Arc;

use tensorwire_device::fd::Received;
use tensorwire_device::host::Host;
use tensorwire_device::secret::{Id, Secret};
use tensorwire_device::{Caching, Device, Queue, View};

use super::{BLOCK, COST, Chunk, Engine, Order, SMALL, Sender, WINDOW, head_of, lock};
use crate::error::{Error, Result};
use crate::link::office::TcpCarrier;
use crate::link::stream::Carrier;
use crate::link::{Fault, Linked};

/// A sender that has less room waits for more.
const ROOM: u64 = 64 << 10;

/// The sender's end of a stream.
#[derive(Debug)]
pub(in crate::link) struct UcxOutput {
    engine: Arc<Engine>,
    control: TcpCarrier,
    sender: Arc<Sender>,
    name: Id,
    proof: Secret,
    /// How many chunks were sent.
    number: u64,
    /// What the receiver takes now.
    room: u64,
    /// A part of a number that it has told.
    told: Vec<u8>,
    queue: Box<dyn Queue>,
}

impl UcxOutput {
    /// Under this name, with what proves its chunks.
    pub(super) fn new(
        engine: Arc<Engine>,
        control: TcpCarrier,
        sender: Arc<Sender>,
        (name, proof): (Id, Secret),
    ) -> Result<Self> {
        let (told, queue) = (Vec::new(), Host.queue()?);
        Ok(Self { engine, control, sender, name, proof, number: 0, room: WINDOW, told, queue })
    }

    /// Hears what the receiver has taken.
    fn hear(&mut self) -> Linked<()> {
        let mut bytes = [0; 64];
        loop {
            match self.control.recv_bytes(&mut bytes)? {
                Received::Nothing => return Ok(()),
                Received::End => return Err(Fault::Lost("the other side has ended the connection".into())),
                Received::Bytes(count) => self.told.extend(&bytes[..count]),
            }
            while let Some((number, rest)) = self.told.split_first_chunk::<4>() {
                self.room += u64::from(u32::from_le_bytes(*number));
                self.told = rest.to_vec();
            }
            if self.room > WINDOW {
                return Err(Fault::Nonsense);
            }
        }
    }

    /// How many bytes of a chunk there is room for, if that is worth a chunk.
    fn fits(&self, len: usize) -> usize {
        let most = self.room.saturating_sub(COST).min(BLOCK as u64) as usize;
        if most >= len || most as u64 >= ROOM { len.min(most) } else { 0 }
    }
}

impl Carrier for UcxOutput {
    fn send(&mut self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Linked<usize> {
        self.flush()?;
        self.hear()?;
        let middle = body.map_or(0, View::len);
        let len = self.fits(head.len() + middle + tail.len());
        if len == 0 {
            return Ok(0);
        }
        // What goes of each part.
        let of_head = head.len().min(len);
        let of_body = middle.min(len - of_head);
        let of_tail = len - of_head - of_body;
        let body = body.map(|body| body.slice(0..of_body)).transpose()?;
        let chunk = if len <= SMALL {
            let mut bytes = Vec::with_capacity(len);
            bytes.extend(&head[..of_head]);
            if let Some(body) = body {
                bytes.resize(of_head + of_body, 0);
                body.to_span().read(0, &mut bytes[of_head..])?;
            }
            bytes.extend(&tail[..of_tail]);
            Chunk::Small(bytes)
        } else {
            let block = self.engine.shared.block()?;
            block.span.write(0, &head[..of_head])?;
            if let Some(body) = body {
                let into = block.span.view().slice(of_head..of_head + of_body)?;
                self.queue.copy(into, body, Caching::Keep)?;
            }
            block.span.write(of_head + of_body, &tail[..of_tail])?;
            Chunk::Large(block, len)
        };
        let head = head_of(self.name, self.number, &self.proof);
        self.engine.shared.order(Order::Send(self.sender.clone(), head, chunk))?;
        self.number += 1;
        self.room -= len as u64 + COST;
        Ok(len)
    }

    /// What was taken is the engine's: it goes, whatever the sender does.
    fn flush(&mut self) -> Linked<bool> {
        match &*lock(&self.sender.lost) {
            Some(why) => Err(Fault::Lost(why.clone())),
            None => Ok(true),
        }
    }

    fn recv(&mut self, _: View<'_>) -> Linked<Received> {
        Err(Fault::Ours(Error::Bug("a stream that is sent to is read".into())))
    }

    fn recv_bytes(&mut self, _: &mut [u8]) -> Linked<Received> {
        Err(Fault::Ours(Error::Bug("a stream that is sent to is read".into())))
    }

    fn arm_for_room(&self) {
        if self.room >= ROOM + COST || lock(&self.sender.lost).is_some() {
            self.sender.bell.ring();
        } else {
            self.control.arm_for_bytes();
        }
    }

    fn arm_for_bytes(&self) {}
}

impl Drop for UcxOutput {
    fn drop(&mut self) {
        let _ = self.engine.shared.order(Order::End(self.sender.clone()));
    }
}
