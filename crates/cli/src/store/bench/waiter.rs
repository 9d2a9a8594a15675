//! A connection that only waits for keys, as torch's own client does it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tensorwire::store::Request;
use tensorwire::store::wire::{self, Frame};
use tensorwire::{Error, Result};

/// How long a wait may take before the bench fails.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Waiter {
    stream: TcpStream,
}

impl Waiter {
    pub(super) fn connect(port: u16) -> Result<Self> {
        let io = |error| Error::io("connecting a client that waits", error);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
        let mut greeting = Vec::new();
        wire::encode(&Frame::Validate(wire::MAGIC), &mut greeting);
        wire::encode(&Frame::Ping(1), &mut greeting);
        stream.write_all(&greeting).map_err(io)?;
        stream.read_exact(&mut [0; 4]).map_err(io)?;
        Ok(Self { stream })
    }

    /// Waits for a key of the user's, which torch's clients put behind a slash.
    pub(super) fn wait(&self, key: &str) -> Result<()> {
        let io = |error| Error::io(format!("waiting for the key {key}"), error);
        let mut frame = Vec::new();
        let request = Request::Wait(vec![format!("/{key}")]);
        wire::encode(&Frame::Operation { strict: false, request }, &mut frame);
        let mut stream = &self.stream;
        stream.write_all(&frame).map_err(io)?;
        stream.read_exact(&mut [0]).map_err(io)
    }
}
