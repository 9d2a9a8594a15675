//! `tensorwire bench pipe`: what a message takes through a pipe, there and back and one way, by size and channel, beside a bare socket
//! and torch's RPC.

mod other;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tensorwire::device::{Abort, Caching};
use tensorwire::pipe::{Listener, Message, Pipe};
use tensorwire::{Config, Context, Deadline};

pub(crate) use self::other::{Args as OtherArgs, execute as execute_other};
use self::other::{Kind, Memory, Order};
use super::binding;
use super::device::BenchDevice;
use super::peers::Folder;
use super::rank::Line;
use super::sizes::{self, Sizes};
use super::spawn::Processes;
use crate::exit::{Failure, Status};
use crate::latency::{Latency, figure};
use crate::machine::Machine;
use crate::printer::{Printer, Tone, WIDTH, table, wrap};
use crate::this_program;

/// What the other end is started as.
pub(crate) const OTHER: &str = "__bench-pipe";

const RPC: &str = include_str!("rpc.py");

/// How long an end may take to come up, and for one message.
const PATIENCE: Duration = Duration::from_secs(300);

/// From here on memory is lent.
const LENT: usize = 1 << 20;

/// Each size has as many turns at least, and as many at most.
const ROUNDS: std::ops::Range<usize> = 3..10_000;

/// Measure messages through a pipe, beside other ways
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire bench pipe
  tensorwire bench pipe --against socket,tensorpipe
  tensorwire bench pipe --sizes 4,1M,256M --json

Two processes have a pipe. echo is a message there and the same bytes back; the
other process has them in memory of its own between. one way is a message until
the reader has it. The ways:
  private    memory that cannot be shared: through a ring, copied twice
  shareable  memory that is lent: the reader copies it once, from 1 MiB on
  view       the reader looks at memory that is lent, from 1 MiB on
  wire       to another host, as a label: over TCP on loopback, to a listener
             that is open to all
  sealed     the same to a listener whose address holds a secret
  memcpy     one thread copies as many bytes, in the same turns
  socket     a bare loop: the same bytes over one TCP connection on loopback
  tensorpipe an echo through torch's RPC, in $PYTHON or python3
With --device cuda, where both ends have the same GPU:
  gpu        from one tensor of the GPU to another
  gpu view   the reader looks at the tensor, from 1 MiB on
  gpu wire   to another host, as a label: by way of the host and TCP
  to shared  from the GPU to memory of the host that can be shared
  to private from the GPU to memory of the host that cannot
  copy       the GPU copies as many bytes: for itself, and to the host

x memcpy is the time over that of the memcpy of this size, or of the copy. ratio is the peer's
time over ours, for an echo from private memory, or of a tensor of the GPU. A peer that cannot run is left
out with the reason.

Exit codes: 0 success, 1 a process failed, 2 wrong usage.")]
pub(crate) struct Args {
    /// A list (4,1M) or a range (4..256M), as of tensorwire bench
    #[arg(long, value_name = "4..256M", default_value = "4,4K,64K,1M,16M,256M", value_parser = sizes::parse)]
    sizes: Sizes,
    /// How long each size of each way is measured
    #[arg(long, default_value_t = 0.25)]
    seconds: f64,
    /// Where the tensors are: host, cuda, or cuda:N
    #[arg(long, default_value_t = BenchDevice::Host)]
    device: BenchDevice,
    /// What to compare with, in the same run: socket, tensorpipe
    #[arg(long, value_name = "PEERS", value_enum, value_delimiter = ',', hide_possible_values = true)]
    against: Vec<Against>,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Against {
    /// A bare loop over one TCP connection
    Socket,
    /// torch's RPC
    Tensorpipe,
}

/// One way at one size, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Row {
    /// echo, one way, memcpy, or copy.
    op: &'static str,
    way: &'static str,
    /// How the other end got it; nothing for other libraries.
    channel: Option<String>,
    bytes: usize,
    rounds: usize,
    median_us: f64,
    p99_us: f64,
    /// This time over that of a memcpy of as many bytes by one thread.
    memcpys: Option<f64>,
    /// Of a peer: its time over that of our echo from private memory.
    ratio: Option<f64>,
}

impl Row {
    fn new(op: &'static str, way: &'static str, bytes: usize, mut latency: Latency) -> Self {
        let [median_us, p99_us] = latency.quantiles([0.5, 0.99]);
        let rounds = latency.count();
        Self { op, way, channel: None, bytes, rounds, median_us, p99_us, memcpys: None, ratio: None }
    }
}

/// A way through a pipe.
#[derive(Debug, Clone, Copy)]
struct Way {
    name: &'static str,
    /// From which memory, and to which.
    from: Kind,
    to: Kind,
    view: bool,
    far: Option<Far>,
    least: usize,
}

/// How another host is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Far {
    Open,
    Sealed,
}

const fn way(name: &'static str, from: Kind, to: Kind, least: usize) -> Way {
    Way { name, from, to, view: false, far: None, least }
}

const WAYS: [Way; 5] = [
    way("private", Kind::Private, Kind::Private, 0),
    way("shareable", Kind::Shareable, Kind::Shareable, LENT),
    Way { view: true, ..way("view", Kind::Shareable, Kind::Shareable, LENT) },
    Way { far: Some(Far::Open), ..way("wire", Kind::Private, Kind::Private, 0) },
    Way { far: Some(Far::Sealed), ..way("sealed", Kind::Private, Kind::Private, 0) },
];

/// Of tensors of a GPU.
const GPU_WAYS: [Way; 5] = [
    way("gpu", Kind::Gpu, Kind::Gpu, 0),
    Way { view: true, ..way("gpu view", Kind::Gpu, Kind::Gpu, LENT) },
    Way { far: Some(Far::Open), ..way("gpu wire", Kind::Gpu, Kind::Gpu, 0) },
    way("to shared", Kind::Gpu, Kind::Shareable, 0),
    way("to private", Kind::Gpu, Kind::Private, 0),
];

pub(crate) fn execute(args: &Args, printer: &Printer) -> Result<Status, Failure> {
    let length = super::length(args.seconds)?;
    let sizes = &args.sizes.0;
    if sizes.contains(&0) {
        return Err(Failure::usage("--sizes: a message of 0 bytes has no tensor to measure"));
    }
    let mut processes = Processes::default();
    let mut config = Config::from_env()?;
    // It refuses what is measured here: large tensors in private memory.
    let strict = std::mem::take(&mut config.strict);
    let context = Context::new(config)?;
    let memory = Memory::new(context, args.device)?;
    let near = Ours::start(&mut processes, &memory, None)?;
    let open = Ours::start(&mut processes, &memory, Some(Far::Open))?;
    let sealed = Ours::start(&mut processes, &memory, Some(Far::Sealed))?;
    let ways = if args.device.is_gpu() { &GPU_WAYS[..] } else { &WAYS };
    let socket = match args.against.contains(&Against::Socket) {
        true => Some(Bare::start(&mut processes)?),
        false => None,
    };
    let progress = printer.progress(sizes.len());
    let mut rows = Vec::new();
    for &bytes in sizes {
        progress.set_message(sizes::show(bytes));
        if args.device.is_gpu() {
            rows.push(gpu_copies(&memory, ("gpu", Kind::Gpu), bytes, length)?);
            rows.push(gpu_copies(&memory, ("to host", Kind::Shareable), bytes, length)?);
        } else {
            rows.push(copies(bytes, length));
        }
        for way in ways.iter().filter(|way| bytes >= way.least) {
            let ours = match way.far {
                None => &near,
                Some(Far::Open) => &open,
                Some(Far::Sealed) => &sealed,
            };
            rows.push(ours.echo(&memory, way, bytes, length)?);
            rows.push(ours.one_way(&memory, way, bytes, length)?);
        }
        if let Some(socket) = &socket {
            rows.push(socket.measure("echo", bytes, length)?);
            rows.push(socket.measure("one way", bytes, length)?);
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Some(socket) = socket {
        socket.end()?;
    }
    drop((near, open, sealed));
    if let Some(why) = processes.failure(Deadline::after(PATIENCE)) {
        return Err(Failure::failed(why));
    }
    if args.against.contains(&Against::Tensorpipe) {
        match tensorpipe(sizes, args.seconds, args.device) {
            Ok(theirs) => rows.extend(theirs),
            Err(why) => missing(&why, strict, printer)?,
        }
    }
    compare(&mut rows);
    print(&rows, args.json, printer)?;
    Ok(Status::Success)
}

/// A peer cannot run.
fn missing(why: &str, strict: bool, printer: &Printer) -> Result<(), Failure> {
    let text = format!("tensorpipe is left out: {why}");
    if strict {
        return Err(Failure::failed(text));
    }
    printer.note(&text);
    Ok(())
}

/// Takes the time of something again and again. The first time does not count.
fn repeat(length: Duration, mut once: impl FnMut() -> Result<Duration, Failure>) -> Result<Latency, Failure> {
    let mut latency = Latency::default();
    once()?;
    let begin = Instant::now();
    while latency.count() < ROUNDS.start || begin.elapsed() < length && latency.count() < ROUNDS.end {
        latency.add(once()?);
    }
    Ok(latency)
}

fn copies(bytes: usize, length: Duration) -> Row {
    let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
    let latency = repeat(length, || {
        let begin = Instant::now();
        std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
        Ok(begin.elapsed())
    });
    Row::new("memcpy", "memcpy", bytes, latency.unwrap_or_default())
}

/// Copies of a GPU, from its memory.
fn gpu_copies(
    memory: &Memory,
    (way, to): (&'static str, Kind),
    bytes: usize,
    length: Duration,
) -> Result<Row, Failure> {
    let (from, to) = (memory.tensor(bytes, Kind::Gpu)?, memory.tensor(bytes, to)?);
    let mut queue = memory.context.device(&memory.gpu())?.queue().map_err(tensorwire::Error::from)?;
    let latency = repeat(length, || {
        let begin = Instant::now();
        let copied = queue.copy(to.span().view(), from.span().view(), Caching::Keep);
        let finished = copied.and_then(|()| queue.finish(&Abort::local(), Deadline::after(PATIENCE)));
        finished.map_err(tensorwire::Error::from)?;
        Ok(begin.elapsed())
    })?;
    Ok(Row::new("copy", way, bytes, latency))
}

/// A pipe to another process of ours.
struct Ours {
    pipe: Pipe,
}

impl Ours {
    fn start(processes: &mut Processes, memory: &Memory, far: Option<Far>) -> Result<Self, Failure> {
        let listener = match far {
            Some(Far::Open) => Listener::at(&memory.context, "tcp://127.0.0.1:0/open")?,
            _ => Listener::local(&memory.context)?,
        };
        let mut command = this_program::command();
        command.arg(OTHER).arg(std::process::id().to_string());
        command.arg("--device").arg(memory.device.to_string());
        command.env("TENSORWIRE_STRICT", "0").envs(far.map(|_| ("TENSORWIRE_HOST", "another")));
        start(processes, &mut command, listener.address())?;
        Ok(Self { pipe: listener.accept(Deadline::after(PATIENCE))? })
    }

    fn echo(&self, memory: &Memory, way: &Way, bytes: usize, length: Duration) -> Result<Row, Failure> {
        let order = Order { echo: true, view: way.view, kind: way.to };
        let tensor = memory.tensor(bytes, way.from)?;
        let message = Message::new().with_metadata(order.to_bytes()).with_tensor(&tensor);
        let back = memory.tensor(bytes, if way.from == Kind::Gpu { Kind::Gpu } else { Kind::Private })?;
        let mut channel = None;
        let latency = repeat(length, || {
            let begin = Instant::now();
            self.pipe.send(&message).deadline(Deadline::after(PATIENCE)).wait()?;
            let next = self.pipe.next().deadline(Deadline::after(PATIENCE)).wait()?;
            let mut incoming = next.ok_or_else(|| Failure::failed("the other end has ended"))?;
            match way.view {
                true => incoming.view(0)?,
                false => incoming.place(0, &back)?,
            }
            let answer = incoming.read().wait()?;
            let took = begin.elapsed();
            channel = Some(String::from_utf8_lossy(answer.metadata()).into_owned());
            Ok(took)
        })?;
        Ok(Row { channel, ..Row::new("echo", way.name, bytes, latency) })
    }

    fn one_way(&self, memory: &Memory, way: &Way, bytes: usize, length: Duration) -> Result<Row, Failure> {
        let order = Order { echo: false, view: way.view, kind: way.to };
        let tensor = memory.tensor(bytes, way.from)?;
        let message = Message::new().with_metadata(order.to_bytes()).with_tensor(&tensor);
        let latency = repeat(length, || {
            let begin = Instant::now();
            self.pipe.send(&message).delivered().deadline(Deadline::after(PATIENCE)).wait()?;
            Ok(begin.elapsed())
        })?;
        Ok(Row::new("one way", way.name, bytes, latency))
    }
}

/// A bare connection to another process.
struct Bare(Line);

impl Bare {
    fn start(processes: &mut Processes) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| Failure::failed(format!("a socket: {error}"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?.to_string();
        let mut command = this_program::command();
        command.arg(OTHER).arg(std::process::id().to_string()).arg("--socket");
        start(processes, &mut command, &address)?;
        Ok(Self(Line::new(listener.accept().map_err(failed)?.0)?))
    }

    fn measure(&self, op: &'static str, bytes: usize, length: Duration) -> Result<Row, Failure> {
        let (data, echo) = (vec![1_u8; bytes], op == "echo");
        let mut back = vec![0_u8; if echo { bytes } else { 1 }];
        let mut head = [u8::from(echo); 9];
        head[1..].copy_from_slice(&(bytes as u64).to_le_bytes());
        let latency = repeat(length, || {
            let begin = Instant::now();
            // As one write where it is small, as anybody would.
            match bytes {
                ..=4096 => self.0.write(&[&head[..], &data].concat())?,
                _ => self.0.write(&head).and_then(|()| self.0.write(&data))?,
            }
            self.0.read(&mut back)?;
            Ok(begin.elapsed())
        })?;
        Ok(Row::new(op, "socket", bytes, latency))
    }

    fn end(self) -> Result<(), Failure> {
        self.0.write(&[0; 9])
    }
}

/// Starts a process, and tells it an address.
fn start(processes: &mut Processes, command: &mut Command, address: &str) -> Result<(), Failure> {
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let child = processes.start("the other end".into(), command)?;
    let told = child.stdin.take().map(|mut stdin| stdin.write_all(format!("{address}\n").as_bytes()));
    told.unwrap_or(Ok(())).map_err(|error| Failure::failed(format!("the other end is not told: {error}")))
}

/// What the program of torch's RPC prints.
#[derive(Debug, Deserialize)]
struct Theirs {
    bytes: usize,
    rounds: usize,
    median_us: f64,
    p99_us: f64,
}

/// Measures torch's RPC.
fn tensorpipe(sizes: &[usize], seconds: f64, device: BenchDevice) -> Result<Vec<Row>, String> {
    let folder = Folder::new("pipe")?;
    let script = folder.write("rpc.py", RPC)?;
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr());
    let port = port.map_err(|error| error.to_string())?.port();
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let mut processes = Processes::default();
    let (mut measures, mut said) = (None, String::new());
    for rank in [1, 0] {
        let mut command = Command::new(crate::python::python());
        let device = if device.is_gpu() { device.to_string() } else { "cpu".into() };
        command.arg(&script).args([
            rank.to_string(),
            port.to_string(),
            seconds.to_string(),
            sizes.join(","),
            device,
        ]);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).stdout(Stdio::piped());
        let child = processes.start(format!("rank {rank} of torch's RPC"), &mut command);
        let child = child.map_err(|failure| failure.text().unwrap_or_default().to_owned())?;
        measures = child.stdout.take();
    }
    if let Some(mut stdout) = measures {
        stdout.read_to_string(&mut said).map_err(|error| error.to_string())?;
    }
    if let Some(why) = processes.failure(Deadline::after(PATIENCE)) {
        return Err(why);
    }
    let row = |line: &str| {
        let theirs: Theirs =
            serde_json::from_str(line).map_err(|error| format!("it said {line:?}: {error}"))?;
        let Theirs { bytes, rounds, median_us, p99_us } = theirs;
        let row = Row::new("echo", "tensorpipe", bytes, Latency::default());
        Ok(Row { rounds, median_us, p99_us, ..row })
    };
    said.lines().map(row).collect()
}

/// Sets each row beside the memcpy of its size, and those of peers beside ours.
fn compare(rows: &mut [Row]) {
    let find = |rows: &[Row], op: &str, way: &str, bytes: usize| {
        let row = rows.iter().find(|row| row.op == op && row.way == way && row.bytes == bytes);
        row.map(|row| row.median_us).filter(|micros| *micros > 0.0)
    };
    for index in 0..rows.len() {
        let (op, way, bytes, micros) =
            (rows[index].op, rows[index].way, rows[index].bytes, rows[index].median_us);
        let (of, copies) = match way {
            "to shared" | "to private" | "to host" => ("copy", "to host"),
            way if way.starts_with("gpu") => ("copy", "gpu"),
            _ => ("memcpy", "memcpy"),
        };
        rows[index].memcpys = find(rows, of, copies, bytes).map(|copy| micros / copy);
        if matches!(way, "socket" | "tensorpipe") {
            let ours = find(rows, op, "private", bytes).or_else(|| find(rows, op, "gpu", bytes));
            rows[index].ratio = ours.map(|ours| micros / ours);
        }
    }
}

fn print(rows: &[Row], json: bool, printer: &Printer) -> Result<(), Failure> {
    if json {
        return Ok(rows.iter().try_for_each(|row| printer.json(row))?);
    }
    let machine = Machine::here(binding::allowed()?.len()).to_string();
    wrap(&machine, WIDTH).iter().try_for_each(|line| printer.line(line))?;
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| row.bytes);
    let cells = |row: &&Row| {
        let times =
            |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{}x", figure(share)));
        // A copy of a few bytes takes no time that can be told.
        let memcpys = if row.bytes < LENT { "-".into() } else { times(row.memcpys) };
        let op = if row.op == "memcpy" { "" } else { row.op };
        vec![
            row.way.into(),
            sizes::show(row.bytes),
            op.into(),
            row.channel.clone().unwrap_or_default(),
            figure(row.median_us),
            figure(row.p99_us),
            memcpys,
            times(row.ratio),
        ]
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    printer.line("")?;
    let head = ["way", "size", "", "channel", "median us", "p99 us", "x memcpy", "ratio"];
    for (index, line) in table(&head, &cells).iter().enumerate() {
        printer.line(&if index == 0 { printer.tint(Tone::Quiet, line) } else { line.clone() })?;
    }
    Ok(())
}
