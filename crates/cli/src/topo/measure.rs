//! Measures copies between the places of a machine. A place is a GPU, or a NUMA node of the host.
//!
//! The code uses only the traits of devices, so it measures all devices that the process has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tensorwire::device::gpu::show_uuid;
use tensorwire::device::{Abort, Caching, Device, Region, View};
use tensorwire::topology::Machine;
use tensorwire::{Deadline, DeviceId};

use super::report::gpu_name;
use crate::latency::Latency;
use crate::printer::Printer;

/// What is copied for the bandwidth: more than caches hold.
const LARGE: usize = 64 << 20;
/// And for the latency.
const SMALL: usize = 8;
/// How long one pair may take in all.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long large copies are repeated, and small ones.
const LONG: Duration = Duration::from_millis(200);
const SHORT: Duration = Duration::from_millis(20);
/// How long large copies of all pairs are repeated: with many pairs, each has less time.
const ALL: Duration = Duration::from_secs(20);
/// After that no further pair is measured.
const ENOUGH: Duration = Duration::from_secs(60);

/// The figures: a row for where bytes come from, a column for where they go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Bytes of a large copy.
    pub(super) bytes: usize,
    pub(super) places: Vec<String>,
    pub(super) cells: Vec<Vec<Cell>>,
}

/// One pair.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Cell {
    /// Gigabytes copied in a second.
    #[serde(default)]
    pub(super) gbs: Option<f64>,
    /// Microseconds until a copy of a few bytes is done.
    #[serde(default)]
    pub(super) micros: Option<f64>,
    /// Why there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
}

/// One end of a copy: a device, and the processors that are near it.
struct Endpoint {
    name: String,
    device: Arc<dyn Device>,
    cpus: Option<CpuSet>,
}

impl Measured {
    /// Whether what was read is a square of sound figures.
    pub(super) fn check(&self) -> Result<(), String> {
        let count = self.places.len();
        let square = self.cells.len() == count && self.cells.iter().all(|row| row.len() == count);
        let figures = self.cells.iter().flatten().flat_map(|cell| [cell.gbs, cell.micros]).flatten();
        match square && figures.into_iter().all(|figure| figure.is_finite() && figure >= 0.0) {
            true => Ok(()),
            false => {
                Err(format!("`measured` must have {count} rows of {count} cells with figures from 0 on"))
            }
        }
    }
}

/// Measures every pair, one after the other.
pub(super) fn run(devices: &[Arc<dyn Device>], machine: &Machine, printer: &Printer) -> Measured {
    let places = places(devices, machine);
    let pairs = places.len() * places.len();
    let (progress, end) = (printer.progress(pairs), Deadline::after(ENOUGH));
    let length = LONG.min(ALL / u32::try_from(pairs.max(1)).unwrap_or(u32::MAX));
    let mut cells = Vec::new();
    for from in &places {
        let row = places.iter().map(|to| {
            progress.set_message(format!("{} to {}", from.name, to.name));
            let cell = match end.passed() {
                true => Cell { why: Some(format!("not within {} s", ENOUGH.as_secs())), ..Cell::default() },
                false => pair(from, to, length),
            };
            progress.inc(1);
            cell
        });
        cells.push(row.collect());
    }
    progress.finish_and_clear();
    Measured { bytes: LARGE, places: places.into_iter().map(|place| place.name).collect(), cells }
}

/// GPUs as the machine names them; the host once for each NUMA node whose processors we may use.
fn places(devices: &[Arc<dyn Device>], machine: &Machine) -> Vec<Endpoint> {
    let mut places = Vec::new();
    for device in devices {
        let plain = |name: String| Endpoint { name, device: device.clone(), cpus: None };
        match device.id() {
            DeviceId::Host => {
                let nodes: Vec<(u32, CpuSet)> = machine
                    .nodes
                    .iter()
                    .filter_map(|node| Some((node.number, cpu_set(&node.cpus).filter(may_run)?)))
                    .collect();
                match nodes.as_slice() {
                    [] | [_] => places.push(plain("host".into())),
                    several => places.extend(several.iter().map(|(number, cpus)| Endpoint {
                        name: format!("node{number}"),
                        device: device.clone(),
                        cpus: Some(*cpus),
                    })),
                }
            }
            DeviceId::Gpu(uuid) => {
                let uuid = show_uuid(&uuid);
                let index = machine.gpus.iter().position(|gpu| gpu.uuid.as_ref() == Some(&uuid));
                places.push(plain(index.map_or(uuid, gpu_name)));
            }
            other => places.push(plain(other.to_string())),
        }
    }
    places
}

fn pair(from: &Endpoint, to: &Endpoint, length: Duration) -> Cell {
    let measured = on(from.cpus, || {
        let near = || from.device.alloc(LARGE).map_err(|error| format!("memory of {}: {error}", from.name));
        let far = || to.device.alloc(LARGE).map_err(|error| format!("memory of {}: {error}", to.name));
        let (source, target) = (near()?, on(to.cpus, far)?);
        // A GPU copies better than the processor; whichever reaches both.
        let mut workers = [&from.device, &to.device];
        workers.sort_by_key(|device| device.id() == DeviceId::Host);
        let mut why = String::new();
        for device in workers {
            match copies(&**device, &source, &target, length) {
                Ok(figures) => return Ok(figures),
                Err(error) => why = error.to_string(),
            }
        }
        Err(why)
    });
    match measured {
        Ok((gbs, micros)) => Cell { gbs: Some(gbs), micros: Some(micros), why: None },
        Err(why) => Cell { why: Some(why), ..Cell::default() },
    }
}

/// Gigabytes in a second, and microseconds of a small one.
fn copies(
    by: &dyn Device,
    from: &Arc<dyn Region>,
    to: &Arc<dyn Region>,
    length: Duration,
) -> tensorwire::device::Result<(f64, f64)> {
    let (mut queue, abort) = (by.queue()?, Abort::local());
    let deadline = Deadline::after(PATIENCE);
    let mut median = |bytes: usize, caching: Caching, length: Duration| {
        let (mut times, begin) = (Latency::default(), Instant::now());
        let mut first = None;
        // Four at least, unless they take far too long.
        while first.is_none()
            || (times.count() < 3 && begin.elapsed() < length * 10)
            || begin.elapsed() < length
        {
            let start = Instant::now();
            queue.copy(View::new(to, 0..bytes)?, View::new(from, 0..bytes)?, caching)?;
            queue.finish(&abort, deadline)?;
            // The first one counts only if there is no other: pages and clocks wake up.
            match first {
                None => first = Some(start.elapsed()),
                Some(_) => times.add(start.elapsed()),
            }
        }
        if times.count() == 0 {
            first.into_iter().for_each(|time| times.add(time));
        }
        Ok::<f64, tensorwire::device::Error>(times.quantiles([0.5])[0])
    };
    let large = median(LARGE, Caching::Keep, length)?;
    let small = median(SMALL, Caching::Keep, SHORT)?;
    // A clock that did not move would make an infinite rate.
    Ok((LARGE as f64 / 1e3 / large.max(1e-3), small))
}

/// Runs it on some processors, which a thread of its own takes: memory that it touches first is theirs.
fn on<T: Send>(cpus: Option<CpuSet>, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    let Some(cpus) = cpus else { return work() };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            sched_setaffinity(None, &cpus)
                .map_err(|errno| format!("moving to another NUMA node: {errno}"))?;
            work()
        });
        thread.join().unwrap_or_else(|_| Err("a thread ended early".into()))
    })
}

/// Whether any of them is ours.
fn may_run(cpus: &CpuSet) -> bool {
    let allowed = rustix::thread::sched_getaffinity(None);
    allowed.is_ok_and(|allowed| (0..CpuSet::MAX_CPU).any(|cpu| allowed.is_set(cpu) && cpus.is_set(cpu)))
}

/// `0-15,32-47` as a set; nothing where it is empty or no such list.
fn cpu_set(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for part in list.split(',') {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (first..=last.min(CpuSet::MAX_CPU - 1)).for_each(|cpu| set.set(cpu));
    }
    (set.count() > 0).then_some(set)
}

#[cfg(test)]
mod tests {
    use tensorwire::topology::Node;

    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        let set = cpu_set("0-1,4").unwrap();
        assert_eq!((0..8).filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>(), [0, 1, 4]);
        assert_eq!(cpu_set("0-99999999999").unwrap().count() as usize, CpuSet::MAX_CPU);
        for wrong in ["", "x", "1-", "-1", "5-3"] {
            assert!(cpu_set(wrong).is_none(), "{wrong}");
        }
    }

    /// Two nodes with the same processor stand in for a machine that has two.
    #[test]
    fn each_node_of_the_host_is_a_place() {
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        let node = |number| Node::new(number, cpu.to_string());
        let mut machine = Machine::default();
        machine.nodes = vec![node(0), node(3)];
        let host: Arc<dyn Device> = Arc::new(tensorwire::device::host::Host);
        let names = |places: &[Endpoint]| places.iter().map(|place| place.name.clone()).collect::<Vec<_>>();
        let two = places(std::slice::from_ref(&host), &machine);
        assert_eq!(names(&two), ["node0", "node3"]);
        let cell = pair(&two[0], &two[1], LONG);
        assert!(
            cell.gbs.is_some_and(|gbs| gbs > 0.0) && cell.micros.is_some() && cell.why.is_none(),
            "{cell:?}"
        );
        // One whose processors are not ours, or that has none, is no place; with one left there is only the host.
        machine.nodes[1].cpus.clear();
        assert_eq!(names(&places(&[host], &machine)), ["host"]);
    }

    #[test]
    fn a_square_of_figures_is_needed() {
        let cell = Cell { gbs: Some(1.0), micros: Some(2.0), why: None };
        let mut measured = Measured { bytes: 8, places: vec!["host".into()], cells: vec![vec![cell]] };
        measured.check().unwrap();
        measured.cells[0][0].gbs = Some(-1.0);
        assert!(measured.check().is_err());
        measured.cells.clear();
        assert!(measured.check().is_err());
    }
}
