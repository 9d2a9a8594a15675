//! Questions about a process's state, from a process of the same user that belongs to none of its groups.
//!
//! The one who asks sends a single frame over a private socket and then only listens; what it hears is up to the one
//! who answers. No secret is needed: the same user could look into the other process anyway.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::Fd;
use super::connection::Handshake;
use super::socket::{self, Address};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::handshake;

/// The most listeners that [`listeners`] gives.
const MAX_LISTENERS: usize = 4096;

/// A connection on which one side asks and the other answers.
#[derive(Debug)]
pub struct Inquiry {
    socket: Fd,
    pid: u32,
}

impl Inquiry {
    /// Asks the process that listens at `address`.
    pub fn ask(address: &Address, deadline: Deadline) -> Result<Self> {
        let socket = socket::connect_socket(address, deadline)?;
        socket::check_user(&socket)?;
        let pid = socket::peer_pid(&socket);
        socket::send(&socket, &handshake::inquiry(), &[], deadline)?;
        Ok(Self { socket, pid })
    }

    /// The pid of the other process as this one sees it; 0 where that cannot be told.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a message if there is room for it now; gives whether there was.
    pub fn try_send(&self, bytes: &[u8]) -> Result<bool> {
        match socket::send(&self.socket, bytes, &[], Deadline::after(Duration::ZERO)) {
            Ok(()) => Ok(true),
            Err(Error::TimedOut) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Receives a message if one is there. An empty one means that the other side closed the connection.
    pub fn try_recv(&self) -> Result<Option<Vec<u8>>> {
        Ok(socket::try_recv(&self.socket)?.map(|(bytes, _)| bytes))
    }
}

impl AsFd for Inquiry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Handshake {
    /// The question that has arrived in place of a handshake; otherwise the handshake goes on.
    pub fn inquiry(self) -> std::result::Result<Inquiry, Self> {
        let question = handshake::inquiry();
        let mut bytes = [0; handshake::MAX_FRAME];
        let socket = self.socket();
        loop {
            match rustix::net::recv(socket, &mut bytes[..], RecvFlags::PEEK) {
                Err(Errno::INTR) => {}
                Ok((_, len)) if bytes.get(..len) == Some(&question) => break,
                _ => return Err(self),
            }
        }
        // Taken from the queue: closing a socket with unread bytes takes the answer from its reader.
        match socket::try_recv(socket) {
            Ok(_) => Ok(Inquiry { pid: socket::peer_pid(socket), socket: self.into_socket() }),
            Err(_) => Err(self),
        }
    }
}

/// The private sockets that can be seen from here: abstract ones of this network namespace, and those in `dir`.
pub fn listeners(dir: Option<&Path>) -> Vec<Address> {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut found: Vec<Address> = table.lines().filter_map(socket::listed).collect();
    if let Some(entries) = dir.and_then(|dir| std::path::absolute(dir).ok()).map(std::fs::read_dir) {
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        found.extend(paths.filter_map(socket::found_in_dir));
    }
    found.truncate(MAX_LISTENERS);
    found
}
