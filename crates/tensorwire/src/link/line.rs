//! A connection to a process of another host whose two ends have met: open, or sealed. No call waits.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tensorwire_device::View;
use tensorwire_device::fd::{Received, Stream};
use tensorwire_device::secret::Id;

use super::seal::{BLOCK, LENGTH, MOST, Seal, length};
use super::{Fault, Linked};

/// See the module.
#[derive(Debug)]
pub(crate) struct TcpLine {
    stream: Arc<Stream>,
    sealing: Option<Box<Sealing>>,
    session: Id,
}

impl TcpLine {
    /// `session` tells this connection from all others: see [`super::meet`].
    pub(crate) fn new(stream: Stream, seal: Option<Seal>, session: Id) -> Self {
        let sealing = seal.map(|seal| Box::new(Sealing::new(seal)));
        Self { stream: Arc::new(stream), sealing, session }
    }

    /// What both sides said first, in short.
    pub(crate) fn session(&self) -> Id {
        self.session
    }

    /// What is to be watched.
    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Sends `head`, `body` and `tail`, as much as there is room for now: gives how many bytes of all together. The last of them
    /// may still be here: see [`flush`](Self::flush).
    pub(crate) fn send(&mut self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Linked<usize> {
        match &mut self.sealing {
            None => self.stream.send(head, body, tail).map_err(lost),
            Some(sealing) => sealing.send(&self.stream, [Part::Bytes(head), body.into(), Part::Bytes(tail)]),
        }
    }

    /// Sends what was sealed and did not fit. Gives whether nothing is left.
    pub(crate) fn flush(&mut self) -> Linked<bool> {
        match &mut self.sealing {
            None => Ok(true),
            Some(sealing) => sealing.flush(&self.stream),
        }
    }

    /// Receives into memory, at most as much as it holds.
    pub(crate) fn recv(&mut self, into: View<'_>) -> Linked<Received> {
        match &mut self.sealing {
            None => self.stream.recv(into).map_err(lost),
            Some(sealing) => {
                sealing.recv(&self.stream, into.len(), |plain| Ok(into.to_span().write(0, plain)?))
            }
        }
    }

    /// The same for private bytes.
    pub(crate) fn recv_bytes(&mut self, into: &mut [u8]) -> Linked<Received> {
        match &mut self.sealing {
            None => self.stream.recv_bytes(into).map_err(lost),
            Some(sealing) => sealing.recv(&self.stream, into.len(), |plain| {
                into[..plain.len()].copy_from_slice(plain);
                Ok(())
            }),
        }
    }
}

impl AsFd for TcpLine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A part of what is to be sent.
#[derive(Clone, Copy)]
enum Part<'a> {
    Bytes(&'a [u8]),
    Memory(View<'a>),
}

impl<'a> From<Option<View<'a>>> for Part<'a> {
    fn from(body: Option<View<'a>>) -> Self {
        body.map_or(Part::Bytes(&[]), Part::Memory)
    }
}

impl Part<'_> {
    fn len(self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Memory(view) => view.len(),
        }
    }

    /// Appends some of its bytes.
    fn append(self, from: usize, len: usize, to: &mut Vec<u8>) -> Linked<()> {
        match self {
            Part::Bytes(bytes) => to.extend(&bytes[from..from + len]),
            Part::Memory(view) => {
                let start = to.len();
                to.resize(start + len, 0);
                view.slice(from..from + len)?.to_span().read(0, &mut to[start..])?;
            }
        }
        Ok(())
    }
}

/// Blocks on their way. Each direction has its memory once it is used: most connections carry messages in one.
#[derive(Debug)]
struct Sealing {
    seal: Seal,
    /// What goes into the next block.
    plain: Vec<u8>,
    /// Blocks that are not sent yet, and how much of them is.
    blocks: Vec<u8>,
    sent: usize,
    /// What has come and was not opened, from where to where.
    come: Vec<u8>,
    start: usize,
    end: usize,
    /// What was in the last block, how much of it was taken, and where it ends.
    opened: Vec<u8>,
    taken: usize,
    last: usize,
}

impl Sealing {
    fn new(seal: Seal) -> Self {
        Self {
            seal,
            plain: Vec::new(),
            blocks: Vec::new(),
            sent: 0,
            come: Vec::new(),
            start: 0,
            end: 0,
            opened: Vec::new(),
            taken: 0,
            last: 0,
        }
    }

    fn send(&mut self, stream: &Stream, parts: [Part<'_>; 3]) -> Linked<usize> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let mut taken = 0;
        // One block is kept at most: what does not fit the system's buffers waits with its sender.
        while self.flush(stream)? && taken < len {
            self.plain.clear();
            let mut start = 0;
            for part in parts {
                let from = taken.saturating_sub(start).min(part.len());
                let fits = (part.len() - from).min(MOST - self.plain.len());
                part.append(from, fits, &mut self.plain)?;
                start += part.len();
            }
            self.seal.seal(&self.plain, &mut self.blocks)?;
            taken += self.plain.len();
        }
        Ok(taken)
    }

    fn flush(&mut self, stream: &Stream) -> Linked<bool> {
        while self.sent < self.blocks.len() {
            match stream.send(&self.blocks[self.sent..], None, &[]).map_err(lost)? {
                0 => return Ok(false),
                sent => self.sent += sent,
            }
        }
        self.blocks.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Hands over what was in the next block, or the rest of it: at most `most` bytes.
    fn recv(
        &mut self,
        stream: &Stream,
        most: usize,
        put: impl FnOnce(&[u8]) -> Linked<()>,
    ) -> Linked<Received> {
        if most == 0 {
            return Ok(Received::Nothing);
        }
        // A block may be empty.
        while self.taken == self.last {
            match self.next_block(stream)? {
                Received::Bytes(_) => {}
                other => return Ok(other),
            }
        }
        let plain = &self.opened[self.taken..self.last];
        let plain = &plain[..plain.len().min(most)];
        put(plain)?;
        let count = plain.len();
        self.taken += count;
        Ok(Received::Bytes(count))
    }

    /// Opens the next block, if all of it has come.
    fn next_block(&mut self, stream: &Stream) -> Linked<Received> {
        self.come.resize(LENGTH + BLOCK + LENGTH, 0);
        self.opened.resize(BLOCK, 0);
        loop {
            let come = &self.come[self.start..self.end];
            let block = match come.split_first_chunk() {
                Some((head, _)) => LENGTH + length(*head).ok_or(Fault::Unsealed)?,
                None => LENGTH,
            };
            if block > LENGTH && come.len() >= block {
                let opened = self.seal.open(&come[LENGTH..block], &mut self.opened);
                (self.taken, self.last) = (0, opened.ok_or(Fault::Unsealed)?);
                self.start += block;
                return Ok(Received::Bytes(self.last));
            }
            self.come.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // No more of what follows a long block than its length: the rest would have to be moved.
            let until = if block > LENGTH { block + LENGTH } else { self.come.len() };
            match stream.recv_bytes(&mut self.come[self.end..until]).map_err(lost)? {
                Received::Bytes(got) => self.end += got,
                other => return Ok(other),
            }
        }
    }
}

fn lost(error: tensorwire_device::Error) -> Fault {
    match error {
        tensorwire_device::Error::Io { source, .. } => Fault::Lost(source.to_string()),
        other => Fault::Ours(other.into()),
    }
}
