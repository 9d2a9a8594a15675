//! A rank of the bench. Rank 0 measures and prints; rank 1 is its partner; the others come to the barriers.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tensorwire::device::Device;
use tensorwire::{Group, Result};

use super::report::Row;
use super::{kernels, queues, shared};
use crate::bench::device::BenchDevice;
use crate::bench::spawn::end_with_parent;
use crate::exit::{Failure, Status};
use crate::latency::Latency;

/// How many rows a run gives.
pub(super) const fn measurements(device: BenchDevice) -> usize {
    match device {
        BenchDevice::Host => STORE + shared::MEASUREMENTS + BARRIER + kernels::MEASUREMENTS,
        BenchDevice::Gpus | BenchDevice::Gpu(_) => queues::MEASUREMENTS + kernels::MEASUREMENTS,
    }
}

const STORE: usize = 3;
const BARRIER: usize = 1;

/// How long anything may take before the bench fails: long enough for a machine that does much else.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A rank of `bench parts`
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    parent: i32,
    seconds: f64,
    device: BenchDevice,
}

pub(crate) fn execute(args: Args) -> Result<Status, Failure> {
    end_with_parent(Some(args.parent), Signal::KILL)?;
    let length = Duration::try_from_secs_f64(args.seconds).map_err(Failure::usage)?;
    let group = Group::builder().timeout(PATIENCE).from_env()?;
    let (place, device) = (args.device, args.device.open(group.context())?);
    let bench = Bench { place, device, group, length };
    match args.device {
        BenchDevice::Host => {
            bench.store()?;
            shared::measure(&bench)?;
            bench.barrier()?;
        }
        BenchDevice::Gpus | BenchDevice::Gpu(_) => queues::measure(&bench)?,
    }
    if bench.group.rank() == 0 {
        kernels::measure(&bench)?;
    }
    bench.group.barrier().wait()?;
    Ok(Status::Success)
}

/// What all measurements need.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) group: Group,
    /// Whose queues and kernels are measured.
    pub(super) place: BenchDevice,
    pub(super) device: Arc<dyn Device>,
    length: Duration,
}

impl Bench {
    /// Repeats a call for the length of a measurement.
    pub(super) fn repeat(&self, mut call: impl FnMut() -> Result<()>) -> Result<Latency> {
        const LEAST: usize = 1;
        call()?;
        let mut latency = Latency::default();
        let begun = Instant::now();
        while begun.elapsed() < self.length || latency.count() < LEAST {
            let start = Instant::now();
            call()?;
            latency.add(start.elapsed());
        }
        Ok(latency)
    }

    /// Hands a row to the parent.
    pub(super) fn print(&self, row: &Row) -> Result<()> {
        let line =
            serde_json::to_string(row).map_err(|error| tensorwire::Error::misuse(error.to_string()))?;
        let mut out = std::io::stdout().lock();
        let written = writeln!(out, "{line}").and_then(|()| out.flush());
        written.map_err(|error| tensorwire::Error::io("handing on a measurement", error))
    }

    /// Round trips of one client.
    fn store(&self) -> Result<()> {
        if self.group.rank() == 0 {
            let store = self.group.store();
            let value = [7; 64];
            let row = |what, latency| Row::new("store", what, 1, latency);
            self.print(&row("store set", self.repeat(|| store.set("bench", &value))?))?;
            self.print(&row("store get", self.repeat(|| store.get("bench").map(drop))?))?;
            self.print(&row("store add", self.repeat(|| store.add("bench counter", 1).map(drop))?))?;
        }
        self.group.barrier().wait()
    }

    /// Rank 0 cannot stop by the clock alone: all must agree how many there are.
    fn barrier(&self) -> Result<()> {
        let group = &self.group;
        let mut latency = Latency::default();
        let begun = Instant::now();
        for round in 0.. {
            let start = Instant::now();
            group.barrier().wait()?;
            latency.add(start.elapsed());
            if round % 100 == 0 {
                let key = format!("bench barrier {round}");
                if group.rank() == 0 {
                    group.store().set(&key, if begun.elapsed() < self.length { b"on" } else { b"over" })?;
                }
                if group.store().get(&key)? == b"over" {
                    break;
                }
            }
        }
        if group.rank() == 0 {
            self.print(&Row::new("barrier", "barrier", group.world(), latency))
        } else {
            Ok(())
        }
    }
}
