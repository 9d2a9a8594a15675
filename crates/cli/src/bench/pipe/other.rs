//! The other end: a process that sends back what it gets, or says that it has it.

use std::io::{BufRead, stdin};
use std::net::TcpStream;
use std::time::Duration;

use rustix::process::Signal;
use tensorwire::pipe::{Message, Pipe};
use tensorwire::{Context, Deadline, Dtype, Tensor};

use super::PATIENCE;
use crate::bench::rank::Line;
use crate::bench::spawn::end_with_parent;
use crate::exit::{Failure, Status};

/// The other end of a bench of pipes
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The bench
    parent: i32,
    /// Whether it is the other end of a bare socket
    #[arg(long)]
    socket: bool,
}

pub(crate) fn execute(args: &Args) -> Result<Status, Failure> {
    end_with_parent(Some(args.parent), Signal::KILL)?;
    let mut address = String::new();
    // Not an argument: everybody sees those, and this has a secret in it.
    stdin().lock().read_line(&mut address).map_err(|error| Failure::failed(error.to_string()))?;
    if args.socket {
        let stream =
            TcpStream::connect(address.trim()).map_err(|error| Failure::failed(error.to_string()))?;
        return answer_socket(stream).map(|()| Status::Success);
    }
    let context = Context::from_env()?;
    let pipe = Pipe::connect(&context, address.trim(), Deadline::after(PATIENCE))?;
    answer(&context, &pipe)?;
    Ok(Status::Success)
}

/// How a message is taken, as its metadata says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Whether bytes come back.
    pub(super) echo: bool,
    /// Whether it is looked at, and not copied.
    pub(super) view: bool,
    /// Whether what comes back is in memory that can be shared.
    pub(super) shareable: bool,
}

impl Order {
    pub(super) fn to_bytes(self) -> [u8; 3] {
        [self.echo, self.view, self.shareable].map(u8::from)
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let is = |index: usize| bytes.get(index).is_some_and(|&byte| byte != 0);
        Self { echo: is(0), view: is(1), shareable: is(2) }
    }
}

/// A tensor of so many bytes that are there.
pub(super) fn memory(context: &Context, bytes: usize, shareable: bool) -> tensorwire::Result<Tensor> {
    let filled = vec![1_u8; bytes];
    if !shareable {
        return Tensor::private(&filled);
    }
    let span = context.alloc(bytes)?.slice(0..bytes)?;
    span.write(0, &filled)?;
    Tensor::flat(span, Dtype::U8)
}

fn answer(context: &Context, pipe: &Pipe) -> tensorwire::Result<()> {
    let mut own: Option<(usize, bool, Tensor)> = None;
    let ever = || Deadline::after(Duration::MAX);
    while let Some(mut incoming) = pipe.next().deadline(ever()).wait()? {
        let order = Order::from_bytes(incoming.metadata());
        let Some(part) = incoming.tensors().first() else { continue };
        let (bytes, channel) = (part.shape.iter().product(), part.channel);
        let place = match own.take() {
            Some(kept) if (kept.0, kept.1) == (bytes, order.shareable) => kept.2,
            _ => memory(context, bytes, order.shareable)?,
        };
        match order.view {
            true => incoming.view(0)?,
            false => incoming.place(0, &place)?,
        }
        drop(incoming.read().wait()?);
        if order.echo {
            pipe.send(&Message::new().with_metadata(channel.name()).with_tensor(&place)).wait()?;
        }
        own = Some((bytes, order.shareable, place));
    }
    Ok(())
}

/// Before each message comes how long it is; 0 is the end.
fn answer_socket(stream: TcpStream) -> Result<(), Failure> {
    let line = Line::new(stream)?;
    let mut data = Vec::new();
    loop {
        let mut head = [0; 9];
        line.read(&mut head)?;
        let [back, len @ ..] = head;
        let len = u64::from_le_bytes(len) as usize;
        if len == 0 {
            return Ok(());
        }
        data.resize(len, 0);
        line.read(&mut data)?;
        line.write(if back == 0 { &[1] } else { &data })?;
    }
}
