//! The other end: a process that sends back what it gets, or says that it has it.

use std::io::{BufRead, stdin};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tensorwire::pipe::{Message, Pipe};
use tensorwire::{Context, Deadline, DeviceId, Dtype, Span, Tensor};

use super::PATIENCE;
use crate::bench::device::BenchDevice;
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
    /// Where its memory of a GPU is
    #[arg(long, default_value_t = BenchDevice::Host)]
    device: BenchDevice,
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
    answer(&Memory::new(context, args.device)?, &pipe)?;
    Ok(Status::Success)
}

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Memory of the host that cannot be shared.
    Private,
    Shareable,
    Gpu,
}

/// How a message is taken, as its metadata says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    /// Whether bytes come back.
    pub(super) echo: bool,
    /// Whether it is looked at, and not copied.
    pub(super) view: bool,
    /// The memory that it is copied to, and that comes back.
    pub(super) kind: Kind,
}

impl Order {
    pub(super) fn to_bytes(self) -> [u8; 3] {
        [u8::from(self.echo), u8::from(self.view), self.kind as u8]
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let at = |index: usize| bytes.get(index).copied().unwrap_or_default();
        let kind = match at(2) {
            0 => Kind::Private,
            1 => Kind::Shareable,
            _ => Kind::Gpu,
        };
        Self { echo: at(0) != 0, view: at(1) != 0, kind }
    }
}

/// Where an end takes memory.
pub(super) struct Memory {
    pub(super) context: Arc<Context>,
    pub(super) device: BenchDevice,
    gpu: Option<DeviceId>,
}

impl Memory {
    pub(super) fn new(context: Arc<Context>, device: BenchDevice) -> tensorwire::Result<Self> {
        let gpus = if device.is_gpu() { device.gpus(context.access()?)? } else { Vec::new() };
        let gpu = gpus.first().map(|gpu| gpu.id.clone());
        Ok(Self { context, device, gpu })
    }

    /// The GPU, or the host where none is measured.
    pub(super) fn gpu(&self) -> DeviceId {
        self.gpu.clone().unwrap_or(DeviceId::Host)
    }

    /// A tensor of so many bytes that are there.
    pub(super) fn tensor(&self, bytes: usize, kind: Kind) -> tensorwire::Result<Tensor> {
        let filled = vec![1_u8; bytes];
        let span = match kind {
            Kind::Private => return Tensor::private(&filled),
            Kind::Shareable => self.context.alloc(bytes)?,
            Kind::Gpu => Span::whole(self.context.pool(&self.gpu())?.alloc(bytes)?),
        };
        let span = span.slice(0..bytes)?;
        span.write(0, &filled)?;
        Tensor::flat(span, Dtype::U8)
    }
}

fn answer(memory: &Memory, pipe: &Pipe) -> tensorwire::Result<()> {
    let mut own: Option<(usize, Kind, Tensor)> = None;
    let ever = || Deadline::after(Duration::MAX);
    while let Some(mut incoming) = pipe.next().deadline(ever()).wait()? {
        let order = Order::from_bytes(incoming.metadata());
        let Some(part) = incoming.tensors().first() else { continue };
        let (bytes, channel) = (part.shape.iter().product(), part.channel);
        let place = match own.take() {
            Some(kept) if (kept.0, kept.1) == (bytes, order.kind) => kept.2,
            _ => memory.tensor(bytes, order.kind)?,
        };
        match order.view {
            true => incoming.view(0)?,
            false => incoming.place(0, &place)?,
        }
        drop(incoming.read().wait()?);
        if order.echo {
            pipe.send(&Message::new().with_metadata(channel.name()).with_tensor(&place)).wait()?;
        }
        own = Some((bytes, order.kind, place));
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
