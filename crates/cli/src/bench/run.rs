//! A whole run: it starts all ranks, measures case by case, and shows the results.

use std::ops::RangeInclusive;
use std::time::Duration;

use indicatif::ProgressBar;
use tensorwire::device::gpu::Gpu;
use tensorwire::{Config, Dtype, ReduceOp};

use super::crew::Crew;
use super::device::BenchDevice;
use super::fair::{self, Side};
use super::floor::Floor;
use super::gpus::{self, memory};
use super::keys::{Keys, Spread};
use super::measure::{self, Missing};
use super::op::Op;
use super::order::{Case, TensorMemory};
use super::page::{self, Header, Library};
use super::peers::Peer;
use super::placement::{self, Hosts};
use super::row::Row;
use super::score::{self, Score};
use super::sheet::Sheet;
use super::start::Start;
use super::{Chosen, OURS, Through, binding, length, path, sizes};
use crate::exit::{Failure, Status};
use crate::html::{self, PageFile};
use crate::machine::Machine;
use crate::printer::{Printer, WIDTH, wrap};
use crate::{this_program, units};

/// The path of a collective between hosts. The record has that of its last part, on one host.
const BETWEEN: &str = "hosts";
/// Sizes where one operation is asked for, and where none is.
const ONE: &str = "8..128M";
const ALL: &str = "1K,64K,1M,16M";
/// Where tensors are sparse.
const SPARSE: &str = "1M,16M,256M";
/// How long more than a rank's own patience its answer is awaited.
const SLACK: Duration = Duration::from_secs(10);
/// How long memcpy is measured at most.
const LONG_ENOUGH: Duration = Duration::from_millis(250);
/// What a rank copies for comparison: as much as the largest tensor, within these.
const COPIED: RangeInclusive<usize> = 4 << 20..=64 << 20;

pub(super) fn execute(chosen: Chosen, printer: &Printer) -> Result<Status, Failure> {
    let config = Config::from_env().map_err(Failure::usage)?;
    let cpus = binding::allowed()?;
    let world = chosen.ranks.unwrap_or_else(|| cpus.len().clamp(2, 8) as u32);
    let hosts = Hosts { ranks: world, hosts: chosen.hosts };
    placement::check(&chosen, hosts)?;
    if chosen.explain && hosts.are_many() {
        match chosen.json {
            true => hosts.lines().try_for_each(|line| printer.json(&line))?,
            false => printer.line(&hosts.explain())?,
        }
        return Ok(Status::Success);
    }
    if chosen.explain && chosen.json {
        path::ranges(world as usize, chosen.device).iter().try_for_each(|line| printer.json(line))?;
        return Ok(Status::Success);
    }
    if chosen.explain {
        match chosen.device {
            BenchDevice::Host => printer.line(tensorwire::collective::explain(world as usize).trim_end())?,
            _ => printer.line(path::ON_GPUS)?,
        }
        return Ok(Status::Success);
    }
    check_path(&chosen)?;
    check_sparse(&chosen)?;
    gpus::check(&chosen)?;
    let cases = cases(&chosen, world as usize)?;
    let length = length(chosen.seconds)?;
    let gpus = gpus::found(chosen.device)?;
    let page = chosen.html.as_deref().map(PageFile::reserve).transpose()?;
    let progress = printer.progress(cases.len() + 2);
    let mut run = Run {
        chosen,
        world,
        hosts,
        length,
        printer,
        progress,
        gpus,
        strict: config.strict,
        crews: Vec::new(),
        libraries: Vec::new(),
        rows: Vec::new(),
    };
    run.start(&cpus, config.timeout + SLACK)?;
    run.heading(&Machine::here(cpus.len()))?;
    let largest = cases.iter().map(|case| case.bytes).max().unwrap_or(0);
    let memcpy = run.memcpy(largest.clamp(*COPIED.start(), *COPIED.end()))?;
    let floor = run.floor(&cases)?;
    run.measure(&cases, floor)?;
    run.progress.finish_and_clear();
    run.score()?;
    if let Some(page) = page {
        page.write(&run.page(&Machine::here(cpus.len()), memcpy))?;
    }
    let wrong: u64 = run.rows.iter().filter(|row| row.peer == OURS).map(|row| row.wrong).sum();
    match wrong {
        0 => Ok(Status::Success),
        wrong => Err(Failure::failed(format!("{wrong} elements of results were wrong"))),
    }
}

/// A path can only be forced where we are called from Rust.
fn check_path(chosen: &Chosen) -> Result<(), Failure> {
    let why = match chosen.through {
        _ if chosen.path.is_none() => return Ok(()),
        Some(Through::Native) => return Ok(()),
        Some(Through::Torch) => "--through torch: torch has no word for paths",
        None if chosen.against.contains(&Peer::Gloo) => {
            "--against gloo, which calls both through torch: add --through native"
        }
        None => return Ok(()),
    };
    Err(Failure::usage(format!("--path cannot be used with {why}")))
}

/// Sparse tensors are those that both Gloo and we reduce.
fn check_sparse(chosen: &Chosen) -> Result<(), Failure> {
    let why = match chosen {
        Chosen { sparse: None, keys: Spread::Uniform, .. } => return Ok(()),
        Chosen { sparse: None, .. } => return Err(Failure::usage("--keys is for --sparse")),
        Chosen { sparse: Some(share), .. } if Keys::new(*share, chosen.keys).is_none() => {
            return Err(Failure::usage("--sparse needs a share of the rows: more than 0, at most 1"));
        }
        Chosen { operation, .. } if *operation != Some(Op::AllReduce) => "all-reduce alone",
        Chosen { device, through, .. } if device.is_gpu() && *through != Some(Through::Torch) => {
            "CUDA tensors through torch alone: add --through torch"
        }
        Chosen { dtype, op, .. } if *dtype != Dtype::F32 || *op != ReduceOp::Sum => "sums of float32",
        Chosen { path: Some(_), .. } => "no --path: its exchanges choose theirs",
        Chosen { memory: TensorMemory::Shared, .. } => "private memory",
        Chosen { against, .. } if against.iter().any(|peer| peer.is_mpi()) => {
            "--against gloo: MPI has no sparse tensors"
        }
        _ => return Ok(()),
    };
    Err(Failure::usage(format!("--sparse measures {why}")))
}

/// All that is to be measured, in order.
fn cases(chosen: &Chosen, world: usize) -> Result<Vec<Case>, Failure> {
    let sparse = chosen.sparse.and_then(|share| Keys::new(share, chosen.keys)).map(Op::AllReduceSparse);
    let default = match sparse {
        Some(_) => SPARSE,
        None if chosen.operation.is_some() => ONE,
        None => ALL,
    };
    let sizes = chosen.sizes.clone().map_or_else(|| sizes::parse(default), Ok).map_err(Failure::usage)?;
    let (dtype, reduce, memory, path) = (chosen.dtype, chosen.op, memory(chosen), chosen.path);
    let mut cases: Vec<Case> = Vec::new();
    let all = Op::ALL.into_iter().filter(|op| !(chosen.device.is_gpu() && *op == Op::SendRecv));
    for op in sparse.or(chosen.operation).map_or_else(|| all.collect(), |op| vec![op]) {
        if op.reduces() {
            reduce.check(dtype).map_err(Failure::usage)?;
        }
        for &bytes in &sizes.0 {
            let case = Case { op, bytes: op.fit(bytes, dtype.size(), world), dtype, reduce, memory, path };
            // Small sizes become the same where each rank has at least one element.
            if cases.last() != Some(&case) {
                cases.push(case);
            }
        }
    }
    Ok(cases)
}

/// Everything of one run.
#[derive(Debug)]
struct Run<'a> {
    chosen: Chosen,
    world: u32,
    hosts: Hosts,
    length: Duration,
    printer: &'a Printer,
    progress: ProgressBar,
    /// Those that ranks take in turn; none on the host.
    gpus: Vec<Gpu>,
    strict: bool,
    /// Ours first.
    crews: Vec<Crew>,
    /// All that were started, also those that failed since.
    libraries: Vec<Library>,
    rows: Vec<Row>,
}

impl Run<'_> {
    fn start(&mut self, cpus: &[usize], patience: Duration) -> Result<(), Failure> {
        let start = Start { chosen: &self.chosen, hosts: self.hosts, cpus, patience };
        let doing = |text: &str| self.progress.set_message(text.to_owned());
        self.crews = start.crews(doing, |peer, why| self.leave_out(peer, why))?;
        let library = |crew: &Crew| Library { side: crew.side(), about: crew.title_of_library() };
        self.libraries = self.crews.iter().map(library).collect();
        self.progress.inc(1);
        Ok(())
    }

    /// Says why a peer is not measured; in strict mode that is an error.
    fn leave_out(&self, peer: &str, why: &str) -> Result<(), Failure> {
        let text = format!("{peer} is left out: {why}");
        if self.strict {
            return Err(Failure::failed(text));
        }
        self.progress.suspend(|| self.printer.note(&text));
        Ok(())
    }

    fn line(&self, text: &str) -> Result<(), Failure> {
        Ok(self.progress.suspend(|| self.printer.line(text))?)
    }

    /// What all measurements of one of ours have in common, and whom it is compared with.
    fn settings(&self) -> Vec<String> {
        let Chosen { dtype, op, memory, .. } = &self.chosen;
        let memory = match (&self.gpus[..], memory) {
            ([], TensorMemory::Shared) => "memory of the group".to_owned(),
            ([], _) => "private memory".to_owned(),
            ([gpu], _) => format!("all on one GPU ({})", gpu.name),
            (all, _) => format!("on {} GPUs ({})", all.len(), all[0].name),
        };
        let op = op.name().to_ascii_lowercase();
        let sides: Vec<Side> = self.libraries.iter().map(|library| library.side).collect();
        let setting = |ours: &Side| {
            let through = if ours.torch { ", through torch" } else { "" };
            let bound = if ours.bound { "" } else { ", not bound to cores" };
            let of_this = |peer: &&Library| fair::opponent(&sides, peer.side) == Some(*ours);
            let peers = self.libraries.iter().filter(|library| !library.side.is_ours());
            let peers: Vec<&str> = peers.filter(of_this).map(|peer| &*peer.about).collect();
            let against =
                if peers.is_empty() { String::new() } else { format!("; against {}", peers.join(", ")) };
            let link = self.chosen.link.map_or(String::new(), |link| format!(", by {}", link.name()));
            format!("{}{link}, {dtype} {op}, {memory}{through}{bound}{against}", self.hosts.title())
        };
        sides.iter().filter(|side| side.is_ours()).map(setting).collect()
    }

    fn sides(&self) -> Vec<Side> {
        self.crews.iter().map(Crew::side).collect()
    }

    fn heading(&self, machine: &Machine) -> Result<(), Failure> {
        if self.chosen.json {
            return Ok(());
        }
        for text in std::iter::once(machine.to_string()).chain(self.settings()) {
            wrap(&text, WIDTH).iter().try_for_each(|line| self.line(line))?;
        }
        Ok(())
    }

    /// What memcpy reaches, by one rank and by all at once.
    fn memcpy(&mut self, bytes: usize) -> Result<String, Failure> {
        self.progress.set_message("memcpy");
        let mut found = Vec::new();
        for (op, ranks) in [(Op::MemcpyAlone, 1), (Op::Memcpy, self.world as usize)] {
            let (dtype, reduce) = (self.chosen.dtype, self.chosen.op);
            let memory = match memory(&self.chosen) {
                TensorMemory::Pool => TensorMemory::Pool,
                _ => TensorMemory::Private,
            };
            let case = Case { op, bytes, dtype, reduce, memory, path: None };
            let row =
                match measure::case(&mut [&mut self.crews[0]], &case, ranks, self.length.min(LONG_ENOUGH))
                    .pop()
                {
                    Some(Ok(row)) => Row { peer: "memcpy", path: "copy".into(), ..row },
                    Some(Err(Missing::No(why) | Missing::Broken(why))) => return Err(Failure::failed(why)),
                    None => continue,
                };
            if self.chosen.json {
                self.progress.suspend(|| self.printer.json(&row))?;
            }
            found.push(row);
        }
        self.progress.inc(1);
        let rates: Vec<String> = found.iter().map(|row| units::rate(row.algbw_gbs)).collect();
        self.rows.extend(found);
        let text = match &rates[..] {
            [one, all] => {
                let (size, world) = (sizes::show(bytes), self.world);
                format!("{one} copied by one rank, {all} by {world} at once, {size} each")
            }
            _ => String::new(),
        };
        if !self.chosen.json {
            self.line(&format!("memcpy: {text}"))?;
        }
        Ok(text)
    }

    /// What the floor is computed from, where there is one: on a GPU that all ranks share. Ranks of Rust measure it.
    fn floor(&mut self, cases: &[Case]) -> Result<Option<Floor>, Failure> {
        let (Some(case), [_]) = (cases.iter().find(|case| case.op == Op::AllReduce), &self.gpus[..]) else {
            return Ok(None);
        };
        if self.crews[0].torch {
            return Ok(None);
        }
        self.progress.set_message("signals between queues");
        let floor = Floor::new(&mut self.crews[0], case, self.length.min(LONG_ENOUGH))?;
        if !self.chosen.json {
            self.line(&format!("floor: {}", floor.text()))?;
        }
        Ok(Some(floor))
    }

    fn measure(&mut self, cases: &[Case], floor: Option<Floor>) -> Result<(), Failure> {
        let sheets = Sheet::all(&self.sides(), memory(&self.chosen), floor.is_some(), self.is_best());
        // Each reason is said once.
        let mut said: Vec<String> = Vec::new();
        // Tables of one operation follow one another: the first is shown line by line, others when it is whole.
        for cases in cases.chunk_by(|one, next| one.op == next.op) {
            let mut later: Vec<Vec<String>> = vec![Vec::new(); sheets.len().saturating_sub(1)];
            for (index, case) in cases.iter().enumerate() {
                let lowest = match floor {
                    Some(floor) => {
                        let (ours, length) = (&mut self.crews[0], self.length.min(LONG_ENOUGH));
                        floor.of(ours, case, self.world as usize, length)?
                    }
                    None => None,
                };
                let mut found = self.case(case, &mut said)?;
                let ours = found.iter_mut().filter(|(side, _)| side.is_ours());
                ours.filter_map(|(_, row)| row.as_mut()).for_each(|row| row.floor_us = lowest);
                for (number, sheet) in sheets.iter().enumerate().filter(|_| !self.chosen.json) {
                    let mut lines = Vec::new();
                    if index == 0 {
                        lines.extend(sheet.head(case.op, self.printer));
                    }
                    lines.extend(sheet.row(&found, self.printer));
                    if index + 1 == cases.len() {
                        lines.extend(sheet.foot(self.printer));
                    }
                    match number.checked_sub(1) {
                        None => lines.iter().try_for_each(|line| self.line(line))?,
                        Some(number) => later[number].extend(lines),
                    }
                }
                self.keep(found)?;
                self.progress.inc(1);
            }
            later.iter().flatten().try_for_each(|line| self.line(line))?;
        }
        Ok(())
    }

    /// Measures one case with all crews. A peer that fails has no part in what follows.
    fn case(&mut self, case: &Case, said: &mut Vec<String>) -> Result<Vec<(Side, Option<Row>)>, Failure> {
        self.progress.set_message(format!("{}, {}", case.op, sizes::show(case.bytes)));
        let sides = self.sides();
        let mut crews: Vec<&mut Crew> = self.crews.iter_mut().collect();
        let measured = measure::case(&mut crews, case, self.world as usize, self.length);
        let mut found: Vec<(Side, Option<Row>)> = Vec::new();
        for (side, measured) in sides.into_iter().zip(measured) {
            let why = match measured {
                Ok(row) => {
                    let path = self.path_of(&row, case.op);
                    let hosts = self.hosts.are_many().then_some(self.hosts.hosts);
                    found.push((side, Some(Row { path, hosts, ..row })));
                    continue;
                }
                Err(Missing::No(why) | Missing::Broken(why)) if side.is_ours() => {
                    return Err(Failure::failed(why));
                }
                Err(Missing::No(why)) => format!("{}: {why}", case.op),
                Err(Missing::Broken(why)) => {
                    self.crews.retain(|crew| crew.peer != side.library);
                    why
                }
            };
            found.push((side, None));
            if !said.contains(&why) {
                self.leave_out(side.library, &why)?;
                said.push(why);
            }
        }
        fair::compare(&mut found, memory(&self.chosen));
        if self.is_best() {
            score::mark_best(&mut found);
        }
        Ok(found)
    }

    /// The path of a row: ours is asked for where the ranks cannot tell it themselves.
    fn path_of(&self, row: &Row, op: Op) -> String {
        if row.peer == OURS && self.hosts.are_many() && op != Op::SendRecv {
            return BETWEEN.into();
        }
        let is_ours = |crew: &&Crew| crew.torch && row.peer == OURS && row.through == crew.side().through();
        match self.crews.iter().find(is_ours).and_then(Crew::first_pid) {
            Some(pid) => path::shown(path::recorded(pid, op)),
            None => row.path.clone(),
        }
    }

    fn keep(&mut self, found: Vec<(Side, Option<Row>)>) -> Result<(), Failure> {
        for row in found.into_iter().filter_map(|(_, row)| row) {
            if self.chosen.json {
                self.progress.suspend(|| self.printer.json(&row))?;
            }
            if row.peer != OURS && row.wrong > 0 {
                let (peer, wrong, size) = (row.peer, row.wrong, sizes::show(row.bytes));
                let text = format!("{peer}: {wrong} elements were wrong in {} of {size}", row.op);
                self.progress.suspend(|| self.printer.note(&text));
            }
            self.rows.push(row);
        }
        Ok(())
    }

    /// Whether the best of several libraries is asked for.
    fn is_best(&self) -> bool {
        self.chosen.against.contains(&Peer::Best)
    }

    /// What all rows say together, where there are some.
    fn score(&self) -> Result<(), Failure> {
        let sides: Vec<Side> = self.libraries.iter().map(|library| library.side).collect();
        let scores = Score::all(&sides, &self.rows, self.is_best());
        if self.chosen.json {
            // Without the best, lines are rows and nothing else.
            let mut of_best = scores.iter().filter(|score| score.summary == Peer::Best.name());
            return Ok(of_best.try_for_each(|score| self.printer.json(score))?);
        }
        for score in scores.iter().filter(|score| score.rows > 1) {
            self.printer.line("")?;
            score.lines().iter().try_for_each(|line| self.printer.line(line))?;
        }
        Ok(())
    }

    fn page(&self, machine: &Machine, memcpy: String) -> String {
        let header = Header {
            machine: machine.clone(),
            ranks: self.world,
            command: this_program::typed(),
            date: html::now(),
            libraries: self.libraries.clone(),
            memcpy,
            settings: self.settings(),
        };
        page::write(&header, &self.rows)
    }
}
