//! `tensorwire topo`: what the machine is made of, who reaches whom, and why not.

mod matrix;
mod measure;
mod page;
mod report;
mod text;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tensorwire::device::gpu::{self, Probe};
use tensorwire::device::nvml::Nvml;
use tensorwire::topology::sysfs::Sysfs;
use tensorwire::topology::{Source, gather};
use tensorwire::{Config, Context};

use crate::exit::{Failure, Status};
use crate::html::PageFile;
use crate::printer::Printer;
use report::Report;

/// How long bytes may take from one GPU to another and back.
const CHECK: Duration = Duration::from_secs(5);
/// A saved machine is never larger; what is read is not ours.
const LARGEST: u64 = 64 << 20;

/// Show GPUs, NICs and NUMA nodes, who reaches whom, and why not
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tensorwire topo                      who is near whom, who reaches whom
  tensorwire topo --measure            also measure copies between them
  tensorwire topo --check              send bytes: a driver's yes may be wrong
  tensorwire topo --html topo.html     write a page: the tree, what copies reach
  tensorwire topo --json > there.json  save the machine as a file
  tensorwire topo --from there.json    show a saved machine, anywhere

The matrix has the words of nvidia-smi topo -m:
  NV#   over # NVLinks
  PIX   below one PCIe switch
  PXB   through several PCIe switches
  PHB   through a host bridge
  NODE  inside one NUMA node
  SYS   across NUMA nodes
TENSORWIRE_NICS=mlx5_0,mlx5_1 gives the GPUs their NICs, in order.

Exit codes: 0 shown, also where there is no GPU; 1 it failed; 2 wrong usage.")]
pub(crate) struct Args {
    /// Measure bandwidth and latency of copies between devices and NUMA nodes, for a minute at most
    #[arg(long, conflicts_with = "from")]
    measure: bool,
    /// Send a pattern between every two GPUs and compare what arrives
    #[arg(long, conflicts_with = "from")]
    check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also write one self-contained page for browsers. Without --from this measures, too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show a machine that --json has saved, here or elsewhere
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

pub(crate) fn execute(args: Args, printer: &Printer) -> Result<Status, Failure> {
    // What cannot be written is better known before something is measured.
    let page = args.html.as_ref().map(|path| PageFile::reserve(path).map(|file| (path, file))).transpose()?;
    let report = match &args.from {
        Some(path) => read(path)?,
        None => here(&args, printer)?,
    };
    if args.json {
        printer.json(&report)?;
    } else {
        text::print(&report, printer)?;
    }
    if let Some((path, file)) = page {
        file.write(&page::write(&report)?)?;
        printer.note(&format!("{} is written", path.display()));
    }
    Ok(Status::Success)
}

/// Who can be asked about GPUs; the first is believed first.
fn sources() -> Vec<Source> {
    let nvml = Nvml::open().map(|nvml| Arc::new(nvml) as Arc<dyn Probe>);
    vec![Source { name: "CUDA", probe: gpu::driver() }, Source { name: "NVML", probe: nvml }]
}

/// This machine.
fn here(args: &Args, printer: &Printer) -> Result<Report, Failure> {
    let config = Config::from_env()?;
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let check = args.check.then_some(CHECK);
    let machine = gather(name, &Sysfs::new("/sys"), &sources(), check);
    let nics = config.nics.clone();
    // A page without what copies reach would be almost empty where there is no GPU.
    let measured = match args.measure || args.html.is_some() {
        true => Some(measure::run(&Context::new(config)?.all_devices(), &machine, printer)),
        false => None,
    };
    Report::new(machine, nics, measured)
}

/// A report that was saved.
fn read(path: &Path) -> Result<Report, Failure> {
    let wrong = |why: &dyn std::fmt::Display| {
        Failure::failed(format!("{} is not what `tensorwire topo --json` prints: {why}", path.display()))
    };
    let size = fs::metadata(path).map(|about| about.len());
    match size {
        Err(error) => return Err(Failure::failed(format!("{} cannot be read: {error}", path.display()))),
        Ok(size) if size > LARGEST => return Err(wrong(&"it is too large")),
        Ok(_) => {}
    }
    let text = fs::read(path)
        .map_err(|error| Failure::failed(format!("{} cannot be read: {error}", path.display())))?;
    let saved: Report = serde_json::from_slice(&text).map_err(|error| wrong(&error))?;
    saved.checked().map_err(|failure| wrong(&failure.text().unwrap_or_default()))
}
