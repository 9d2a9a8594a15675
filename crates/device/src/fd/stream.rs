//! A stream socket between hosts: bytes go straight between the socket and memory, and no call waits.

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::Fd;
use crate::error::{Error, Result};
use crate::span::View;

/// A connection to a process on another host. Reads and writes take what there is and never wait.
#[derive(Debug)]
pub struct Stream(Fd<TcpStream>);

/// What a read gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// So many bytes have come.
    Bytes(usize),
    /// Nothing is there now.
    Nothing,
    /// The other side sends nothing any more.
    End,
}

impl Stream {
    /// Takes charge of a connection.
    pub fn new(socket: TcpStream) -> Result<Self> {
        let doing = |e| Error::io("preparing a connection to another host", e);
        socket.set_nonblocking(true).map_err(doing)?;
        socket.set_nodelay(true).map_err(doing)?;
        Ok(Self(Fd::new(socket)))
    }

    /// Sends `head`, `body` and `tail`, as much as the system takes now: gives how many bytes of all together.
    pub fn send(&self, head: &[u8], body: Option<View<'_>>, tail: &[u8]) -> Result<usize> {
        let bytes = |bytes: &[u8]| part(bytes.as_ptr().cast_mut(), bytes.len());
        let memory = match body {
            Some(view) => part(host_memory(view)?, view.len()),
            None => bytes(&[]),
        };
        let mut parts = [bytes(head), memory, bytes(tail)];
        // SAFETY: all of it is plain data, and zero is a valid value of each field.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        loop {
            // SAFETY: two parts are slices, and the one between lies in a region that its view keeps mapped. The kernel only
            // reads them. What another process writes there meanwhile is sent in some mixture, as `Span` says.
            let sent = unsafe { libc::sendmsg(self.raw()?, &message, flags) };
            if sent >= 0 {
                return Ok(sent as usize);
            }
            match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(0),
                error => return Err(Error::io("sending to another host", error)),
            }
        }
    }

    /// Receives straight into memory, at most as much as it holds.
    pub fn recv(&self, into: View<'_>) -> Result<Received> {
        let at = host_memory(into)?;
        // SAFETY: a region stays mapped as long as its views live. Others that touch the bytes see some mixture, as `Span` says.
        unsafe { self.recv_raw(at, into.len()) }
    }

    /// The same for private bytes.
    pub fn recv_bytes(&self, into: &mut [u8]) -> Result<Received> {
        // SAFETY: the slice is the caller's alone.
        unsafe { self.recv_raw(into.as_mut_ptr(), into.len()) }
    }

    /// # Safety
    ///
    /// `at` must be the begin of `len` bytes that the kernel may write, for the time of the call.
    unsafe fn recv_raw(&self, at: *mut u8, len: usize) -> Result<Received> {
        if len == 0 {
            return Ok(Received::Nothing);
        }
        loop {
            // SAFETY: the caller promises the memory, and the kernel writes no more than `len` bytes of it.
            let got = unsafe { libc::recv(self.raw()?, at.cast(), len, libc::MSG_DONTWAIT) };
            match got {
                0 => return Ok(Received::End),
                1.. => return Ok(Received::Bytes(got as usize)),
                _ => match std::io::Error::last_os_error() {
                    error if error.kind() == std::io::ErrorKind::Interrupted => {}
                    error if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                    error => return Err(Error::io("receiving from another host", error)),
                },
            }
        }
    }

    fn raw(&self) -> Result<i32> {
        self.0.check("a connection to another host")?;
        Ok(self.0.as_raw_fd())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn part(base: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: base.cast(), iov_len: len }
}

/// Where the bytes of a view are, if they are memory of the host.
fn host_memory(view: View<'_>) -> Result<*mut u8> {
    let device = view.device();
    let address = view.host_addr();
    address.map(|address| address as *mut u8).ok_or_else(|| {
        Error::misuse(format!("memory of {device} cannot be sent from or received into by a socket"))
    })
}
