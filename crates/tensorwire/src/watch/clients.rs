//! Neighbours that ask for memory of this rank; the watcher answers them (see `ranks::memory`).
//!
//! | frame | bytes | beside it |
//! |---|---|---|
//! | request | `M`, number of the region | |
//! | answer | 1, its length | its descriptor |
//! | answer | 0: there is no such region | |

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use tensorwire_device::fd::{Connection, Fd};
use tensorwire_device::secret::Id;
use tensorwire_device::{Deadline, Handle};

use crate::error::{Error, Result};
use crate::ranks::memory::Exports;
use crate::wire::{Reader, Writer};

/// How long a client may keep its place without asking.
const IDLE: Duration = Duration::from_secs(10);

const MEMORY: u8 = b'M';

/// Those who have proved that they belong to a group, and may ask.
#[derive(Default)]
pub(super) struct Clients(Vec<Client>);

struct Client {
    group: Id,
    connection: Connection,
    until: Instant,
}

impl Clients {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn add(&mut self, group: Id, connection: Connection) {
        self.0.push(Client { group, connection, until: Instant::now() + IDLE });
    }

    /// Their sockets, in order.
    pub(super) fn sources(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|client| client.connection.as_fd())
    }

    /// When the first of them has been idle for too long.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.iter().map(|client| client.until).min()
    }

    /// Answers those that are ready, one request each; whoever closes, sends nonsense, takes no answer or stays idle
    /// loses its connection. Never waits.
    pub(super) fn hear(
        &mut self,
        is_ready: impl Fn(usize) -> bool,
        exports_of: impl Fn(Id) -> Option<std::sync::Arc<Exports>>,
    ) {
        let now = Instant::now();
        for (index, mut client) in std::mem::take(&mut self.0).into_iter().enumerate() {
            if !is_ready(index) {
                if client.until > now {
                    self.0.push(client);
                }
                continue;
            }
            match exports_of(client.group).map(|exports| serve(&client.connection, &exports)) {
                Some(Ok(true)) => {
                    client.until = now + IDLE;
                    self.0.push(client);
                }
                // It is done, or the group has been closed.
                Some(Ok(false)) | None => {}
                Some(Err(error)) => {
                    tracing::warn!("process {} asked for memory: {error}", client.connection.peer().pid);
                }
            }
        }
    }
}

/// Answers one request; gives whether there may be another.
fn serve(connection: &Connection, exports: &Exports) -> Result<bool> {
    let Some((frame, _)) = connection.try_recv()? else { return Ok(true) };
    if frame.is_empty() {
        return Ok(false);
    }
    let mut reader = Reader::new(&frame);
    let (kind, id) = (reader.u8()?, reader.u64()?);
    reader.end()?;
    if kind != MEMORY {
        return Err(Error::misuse(format!("request of unknown kind {kind}")));
    }
    let now = Deadline::after(Duration::ZERO);
    match exports.export(id)? {
        Some(handle) => {
            let fds: Vec<_> = handle.fd().into_iter().collect();
            connection.send(&Writer::new().u8(1).u64(handle.len() as u64).finish(), &fds, now)?;
        }
        None => connection.send(&[0], &[], now)?,
    }
    Ok(true)
}

/// Asks for a region.
pub(crate) fn request(id: u64) -> Vec<u8> {
    Writer::new().u8(MEMORY).u64(id).finish()
}

/// What an answer brings: the region, or nothing if there is none of that number.
pub(crate) fn read_answer(frame: &[u8], mut fds: Vec<Fd>) -> Result<Option<Handle>> {
    let mut reader = Reader::new(frame);
    if reader.u8()? == 0 {
        reader.end()?;
        return Ok(None);
    }
    let len = reader.u64()?;
    reader.end()?;
    match (fds.pop(), fds.is_empty(), usize::try_from(len)) {
        (Some(fd), true, Ok(len)) => Ok(Some(Handle::Memfd { fd, len })),
        _ => Err(Error::misuse("one descriptor and its length were expected")),
    }
}
