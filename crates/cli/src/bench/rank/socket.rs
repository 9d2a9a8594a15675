//! A bare loop to compare messages between hosts with: two processes, one connection on loopback, and nothing but
//! writes and reads of the same bytes. A wait looks again and again before it sleeps, as waits of the library do: otherwise
//! the ratio of a small message would be that of waking up. The same loop by UCX is in `ucx.rs`.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use tensorwire::store::{Store, TcpStore};

use super::Work;
use super::job::TOKEN;
use super::ucx::UcxLine;
use crate::bench::op::Op;
use crate::bench::order::Case;
use crate::bench::pattern::{Tile, phase};
use crate::bench::peers::PATIENCE;
use crate::bench::placement::Turn;
use crate::exit::Failure;

/// How long a wait looks before it sleeps: as long as the library's, where each rank has a core.
const LOOK: Duration = Duration::from_micros(500);

/// What one call of the system moves at most. In loops in C, on a quiet machine, parts of 1 MiB were faster than all in one call
/// (2 MiB: 260 and 750 us; 128 MiB: 28 and 43 ms) and than smaller parts. Under load they were not.
const PART: usize = 1 << 20;

/// What a rank has to its partner; a rank without one has nothing.
#[derive(Debug)]
pub(super) struct Socket {
    rank: usize,
    turn: Turn,
    way: Way,
}

#[derive(Debug)]
enum Way {
    None,
    Tcp(Line),
    Ucx(Box<UcxLine>),
}

impl Socket {
    /// The sender listens, and says where in the bench's store.
    pub(super) fn open(rank: usize, turn: Turn, by_ucx: bool) -> Result<Self, Failure> {
        let port = std::env::var("MASTER_PORT").ok().and_then(|port| port.parse().ok()).unwrap_or(0);
        let store = TcpStore::connect("127.0.0.1", port, PATIENCE)?;
        if by_ucx {
            let line = UcxLine::open(&store, rank, turn)?;
            return Ok(Self { rank, turn, way: line.map_or(Way::None, |line| Way::Ucx(Box::new(line))) });
        }
        let stream = match turn {
            Turn::Rest => None,
            Turn::Send(_) => {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                store.set(&format!("socket/{rank}"), port.to_string().as_bytes())?;
                // Without a deadline: the bench ends all ranks if one does not come up.
                Some(listener.accept().map_err(failed)?.0)
            }
            Turn::Recv(from) => {
                let port = store.get(&format!("socket/{from}"))?;
                let port = std::str::from_utf8(&port).ok().and_then(|port| port.parse().ok()).unwrap_or(0);
                Some(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(failed)?)
            }
        };
        let line = stream.map(Line::new).transpose()?;
        Ok(Self { rank, turn, way: line.map_or(Way::None, Way::Tcp) })
    }

    /// As ranks of a group meet before a message to another host: the receiver goes on first.
    pub(super) fn meet(&mut self) -> Result<(), Failure> {
        let mut token = vec![0; TOKEN];
        match self.turn {
            Turn::Send(_) => self.write(&mut token).and_then(|()| self.read(&mut token)),
            Turn::Recv(_) => self.read(&mut token).and_then(|()| self.write(&mut token)),
            Turn::Rest => Ok(()),
        }
    }

    fn write(&mut self, data: &mut Vec<u8>) -> Result<(), Failure> {
        match &mut self.way {
            Way::None => {}
            Way::Tcp(line) => line.write(data)?,
            Way::Ucx(line) => *data = line.write(std::mem::take(data))?,
        }
        Ok(())
    }

    fn read(&mut self, data: &mut Vec<u8>) -> Result<(), Failure> {
        match &mut self.way {
            Way::None => {}
            Way::Tcp(line) => line.read(data)?,
            Way::Ucx(line) => *data = line.read(std::mem::take(data))?,
        }
        Ok(())
    }
}

/// A connection that is written to and read from as fast as may be.
#[derive(Debug)]
pub(in crate::bench) struct Line(TcpStream);

impl Line {
    pub(in crate::bench) fn new(stream: TcpStream) -> Result<Self, Failure> {
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_nonblocking(true).map_err(failed)?;
        Ok(Self(stream))
    }

    pub(in crate::bench) fn write(&self, data: &[u8]) -> Result<(), Failure> {
        let len = data.len();
        self.move_all(len, PollFlags::OUT, |mut stream, part| stream.write(&data[part]))
    }

    pub(in crate::bench) fn read(&self, data: &mut [u8]) -> Result<(), Failure> {
        let len = data.len();
        self.move_all(len, PollFlags::IN, |mut stream, part| stream.read(&mut data[part]))
    }

    fn move_all(
        &self,
        len: usize,
        event: PollFlags,
        mut some: impl FnMut(&TcpStream, Range<usize>) -> io::Result<usize>,
    ) -> Result<(), Failure> {
        let stream = &self.0;
        let (mut done, mut idle) = (0, None);
        while done < len {
            match some(stream, done..len.min(done + PART)) {
                Ok(0) => return Err(failed(ErrorKind::UnexpectedEof.into())),
                Ok(moved) => (done, idle) = (done + moved, None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(failed(error)),
                Err(_) if idle.get_or_insert_with(Instant::now).elapsed() < LOOK => std::hint::spin_loop(),
                Err(_) => {
                    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                    match poll(&mut [PollFd::new(stream, event)], Some(&patience)) {
                        Ok(0) => return Err(failed(ErrorKind::TimedOut.into())),
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(errno) => return Err(failed(errno.into())),
                    }
                }
            }
        }
        Ok(())
    }
}

/// A message of one size.
#[derive(Debug)]
pub(super) struct SocketJob<'a> {
    socket: &'a mut Socket,
    data: Vec<u8>,
    plain: Tile,
}

impl<'a> SocketJob<'a> {
    /// Nothing, if it cannot do such an operation.
    pub(super) fn new(socket: &'a mut Socket, case: Case) -> Option<Self> {
        let plain = Tile::plain(case.dtype);
        (case.op == Op::SendRecv).then(|| Self { socket, data: vec![0; case.bytes], plain })
    }
}

impl Work for SocketJob<'_> {
    fn prepare(&mut self, iteration: usize) -> Result<(), Failure> {
        for (place, right) in self.plain.pieces(self.data.len(), phase(self.socket.rank, iteration)) {
            self.data[place].copy_from_slice(right);
        }
        Ok(())
    }

    fn meet(&mut self) -> Result<(), Failure> {
        self.socket.meet()
    }

    fn call(&mut self) -> Result<(), Failure> {
        match self.socket.turn {
            Turn::Send(_) => self.socket.write(&mut self.data),
            _ => self.socket.read(&mut self.data),
        }
    }

    fn wrong(&mut self, iteration: usize) -> Result<u64, Failure> {
        let Turn::Recv(from) = self.socket.turn else { return Ok(0) };
        let pieces = self.plain.pieces(self.data.len(), phase(from as usize, iteration));
        Ok(pieces.map(|(place, right)| self.plain.differences(&self.data[place], right)).sum())
    }

    fn path(&mut self) -> String {
        "default".into()
    }
}

fn failed(error: io::Error) -> Failure {
    Failure::failed(format!("the connection of the bare loop: {error}"))
}
