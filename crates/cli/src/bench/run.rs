//! A whole run: it starts all ranks, measures case by case, and shows the results.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use indicatif::ProgressBar;
use tensorwire::Config;
use tensorwire::store::TcpServer;

use super::crew::{Crew, Pipes};
use super::machine::Machine;
use super::measure::{self, Missing};
use super::op::Op;
use super::order::{Case, TensorMemory};
use super::page::{self, Header};
use super::row::Row;
use super::spawn::Processes;
use super::table::Table;
use super::torch::{self, Backend};
use super::{Chosen, OURS, RANK, Through, binding, length, path, sizes};
use crate::exit::{Failure, Status};
use crate::latency::figure;
use crate::printer::{Printer, Tone};
use crate::run::variables;
use crate::this_program;

/// Sizes where one operation is asked for, and where none is.
const ONE: &str = "8..128M";
const ALL: &str = "1K,64K,1M,16M";
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
    if chosen.explain && chosen.json {
        path::ranges(world as usize).iter().try_for_each(|line| printer.json(line))?;
        return Ok(Status::Success);
    }
    if chosen.explain {
        printer.line(tensorwire::collective::explain(world as usize).trim_end())?;
        return Ok(Status::Success);
    }
    if chosen.path.is_some() && chosen.through == Through::Torch {
        return Err(Failure::usage(
            "--path cannot be used with --through torch: torch has no word for paths",
        ));
    }
    let cases = cases(&chosen, world as usize)?;
    let length = length(chosen.seconds)?;
    let page = chosen.html.as_deref().map(Page::reserve).transpose()?;
    let progress = printer.progress(cases.len() + 2);
    let mut run = Run {
        chosen,
        world,
        length,
        printer,
        progress,
        strict: config.strict,
        crews: Vec::new(),
        rows: Vec::new(),
    };
    run.start(&cpus, config.timeout + SLACK)?;
    run.heading(&Machine::here(cpus.len()))?;
    let largest = cases.iter().map(|case| case.bytes).max().unwrap_or(0);
    let memcpy = run.memcpy(largest.clamp(*COPIED.start(), *COPIED.end()))?;
    run.measure(&cases)?;
    run.progress.finish_and_clear();
    if let Some(page) = page {
        page.write(&run.page(&Machine::here(cpus.len()), memcpy))?;
    }
    let wrong: u64 = run.rows.iter().filter(|row| row.peer == OURS).map(|row| row.wrong).sum();
    match wrong {
        0 => Ok(Status::Success),
        wrong => Err(Failure::failed(format!("{wrong} elements of results were wrong"))),
    }
}

/// All that is to be measured, in order.
fn cases(chosen: &Chosen, world: usize) -> Result<Vec<Case>, Failure> {
    let default = if chosen.operation.is_some() { ONE } else { ALL };
    let sizes = chosen.sizes.clone().map_or_else(|| sizes::parse(default), Ok).map_err(Failure::usage)?;
    let (dtype, reduce, memory, path) = (chosen.dtype, chosen.op, chosen.memory, chosen.path);
    let mut cases: Vec<Case> = Vec::new();
    for op in chosen.operation.map_or_else(|| Op::ALL.to_vec(), |op| vec![op]) {
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
    length: Duration,
    printer: &'a Printer,
    progress: ProgressBar,
    strict: bool,
    /// Ours first.
    crews: Vec<Crew>,
    rows: Vec<Row>,
}

impl Run<'_> {
    fn start(&mut self, cpus: &[usize], patience: Duration) -> Result<(), Failure> {
        self.progress.set_message("starting ranks");
        let cores = |is_ours| self.chosen.bind.cores(is_ours, cpus);
        let ours = match self.chosen.through {
            Through::Native => ours(self.world, cores(true), patience)?,
            Through::Torch => {
                torch::start(Backend::Tensorwire, self.world, cores(true)).map_err(Failure::failed)?
            }
        };
        self.crews.push(ours);
        for peer in self.chosen.against.clone() {
            if self.crews.iter().any(|crew| crew.peer == peer.name()) {
                continue;
            }
            self.progress.set_message(format!("starting {}", peer.name()));
            match peer.start(self.world, self.chosen.bind.cores(false, cpus)) {
                Ok(crew) => self.crews.push(crew),
                Err(why) => self.leave_out(peer.name(), &why)?,
            }
        }
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

    fn setting(&self) -> String {
        let Chosen { dtype, op, memory, .. } = &self.chosen;
        let memory = if *memory == TensorMemory::Shared { "memory of the group" } else { "private memory" };
        let op = op.name().to_ascii_lowercase();
        let ours = self.crews.first();
        let through = if ours.is_some_and(|crew| crew.torch) { ", through torch" } else { "" };
        let bound = if ours.is_some_and(|crew| !crew.bound) { ", not bound to cores" } else { "" };
        format!("{} ranks, {dtype} {op}, {memory}{through}{bound}", self.world)
    }

    fn heading(&self, machine: &Machine) -> Result<(), Failure> {
        if self.chosen.json {
            return Ok(());
        }
        for line in crate::printer::wrap(&machine.to_string(), crate::printer::WIDTH) {
            self.line(&line)?;
        }
        let peers: Vec<String> = self.crews[1..].iter().map(Crew::title_of_library).collect();
        let against =
            if peers.is_empty() { String::new() } else { format!("; against {}", peers.join(", ")) };
        for line in crate::printer::wrap(&format!("{}{against}", self.setting()), crate::printer::WIDTH) {
            self.line(&line)?;
        }
        Ok(())
    }

    /// What memcpy reaches, by one rank and by all at once.
    fn memcpy(&mut self, bytes: usize) -> Result<String, Failure> {
        self.progress.set_message("memcpy");
        let mut found = Vec::new();
        for (op, ranks) in [(Op::MemcpyAlone, 1), (Op::Memcpy, self.world as usize)] {
            let (dtype, reduce) = (self.chosen.dtype, self.chosen.op);
            let case = Case { op, bytes, dtype, reduce, memory: TensorMemory::Private, path: None };
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
        let rates: Vec<String> = found.iter().map(|row| figure(row.algbw_gbs)).collect();
        self.rows.extend(found);
        let text = match &rates[..] {
            [one, all] => {
                let (size, world) = (sizes::show(bytes), self.world);
                format!("{one} GB/s copied by one rank, {all} GB/s by {world} at once, {size} each")
            }
            _ => String::new(),
        };
        if !self.chosen.json {
            self.line(&format!("memcpy: {text}"))?;
        }
        Ok(text)
    }

    fn measure(&mut self, cases: &[Case]) -> Result<(), Failure> {
        let table = Table::new(self.crews[1..].iter().map(|crew| crew.peer).collect());
        let mut last = None;
        // Each reason is said once.
        let mut said: Vec<String> = Vec::new();
        for case in cases {
            self.progress.set_message(format!("{}, {}", case.op, sizes::show(case.bytes)));
            let peers: Vec<&'static str> = self.crews.iter().map(|crew| crew.peer).collect();
            let mut crews: Vec<&mut Crew> = self.crews.iter_mut().collect();
            let measured = measure::case(&mut crews, case, self.world as usize, self.length);
            let mut found: Vec<(&'static str, Option<Row>)> = Vec::new();
            for (peer, measured) in peers.into_iter().zip(measured) {
                let why = match measured {
                    Ok(row) => {
                        let path = self.path_of(&row, case.op);
                        found.push((peer, Some(Row { path, ..row })));
                        continue;
                    }
                    Err(Missing::No(why) | Missing::Broken(why)) if peer == OURS => {
                        return Err(Failure::failed(why));
                    }
                    Err(Missing::No(why)) => format!("{}: {why}", case.op),
                    Err(Missing::Broken(why)) => {
                        self.crews.retain(|crew| crew.peer != peer);
                        why
                    }
                };
                found.push((peer, None));
                if !said.contains(&why) {
                    self.leave_out(peer, &why)?;
                    said.push(why);
                }
            }
            if last != Some(case.op) && !self.chosen.json {
                self.section(case.op, &table)?;
            }
            last = Some(case.op);
            self.show(&table, found)?;
            self.progress.inc(1);
        }
        Ok(())
    }

    /// The path of a row: ours is asked for where the ranks cannot tell it themselves.
    fn path_of(&self, row: &Row, op: Op) -> String {
        let ours = self.crews.first().filter(|crew| crew.torch && row.peer == crew.peer);
        match ours.and_then(Crew::first_pid) {
            Some(pid) => path::shown(path::recorded(pid, op)),
            None => row.path.clone(),
        }
    }

    fn section(&self, op: Op, table: &Table) -> Result<(), Failure> {
        self.line("")?;
        self.line(&self.printer.tint(Tone::Heading, op.name()))?;
        self.line(&self.printer.tint(Tone::Quiet, &table.head()))
    }

    fn show(&mut self, table: &Table, found: Vec<(&'static str, Option<Row>)>) -> Result<(), Failure> {
        let rows: Vec<&Row> = found.iter().filter_map(|(_, row)| row.as_ref()).collect();
        if self.chosen.json {
            for row in &rows {
                self.progress.suspend(|| self.printer.json(row))?;
            }
        } else if let Some(ours) = rows.first() {
            let peers = table
                .peers()
                .map(|name| found.iter().find(|(peer, _)| *peer == name).and_then(|(_, row)| row.clone()));
            let line = table.row(ours, &peers.collect::<Vec<_>>());
            self.line(&if ours.wrong > 0 { self.printer.tint(Tone::Bad, &line) } else { line })?;
        }
        for row in rows.iter().filter(|row| row.peer != OURS && row.wrong > 0) {
            let (peer, wrong, size) = (row.peer, row.wrong, sizes::show(row.bytes));
            let text = format!("{peer}: {wrong} elements were wrong in {} of {size}", row.op);
            self.progress.suspend(|| self.printer.note(&text));
        }
        self.rows.extend(found.into_iter().filter_map(|(_, row)| row));
        Ok(())
    }

    fn page(&self, machine: &Machine, memcpy: String) -> String {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let header = Header {
            machine: machine.to_string(),
            command: format!("tensorwire {}", words.join(" ")),
            libraries: self.crews.iter().map(|crew| (crew.peer, crew.title_of_library())).collect(),
            memcpy,
            setting: self.setting(),
        };
        page::write(&header, &self.rows)
    }
}

/// Our own ranks.
fn ours(world: u32, cpus: &[usize], patience: Duration) -> Result<Crew, Failure> {
    let store = TcpServer::bind((Ipv4Addr::LOCALHOST, 0))?;
    let run = variables::Run { world, port: store.local_addr().port(), id: "bench".into() };
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    let mut processes = Processes::default();
    let mut pipes = Vec::new();
    for rank in 0..world {
        let mut command = this_program::command();
        command.arg(RANK).arg(std::process::id().to_string());
        if !cpus.is_empty() {
            command.arg(cpus.join(","));
        }
        command.envs(variables::of_rank(&run, rank)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = processes.start(format!("rank {rank}"), &mut command)?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed(format!("rank {rank} has no pipes")));
        };
        let (orders, answers) = (File::from(OwnedFd::from(orders)), File::from(OwnedFd::from(answers)));
        pipes.push(Pipes { orders, answers });
    }
    let mut crew = Crew::gather(OURS, processes, pipes, patience).map_err(Failure::failed)?;
    crew.keep(store);
    crew.bound = !cpus.is_empty();
    Ok(crew)
}

/// The file of the page: there before anything is measured, so that a wrong name costs no time.
#[derive(Debug)]
struct Page {
    path: PathBuf,
    file: File,
    /// Whether it is removed again if nothing comes.
    fresh: bool,
}

impl Page {
    fn reserve(path: &Path) -> Result<Self, Failure> {
        let fresh = !path.exists();
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file =
            file.map_err(|error| Failure::failed(format!("{} cannot be written: {error}", path.display())))?;
        Ok(Self { path: path.to_owned(), file, fresh })
    }

    fn write(mut self, text: &str) -> Result<(), Failure> {
        let written = self.file.set_len(0).and_then(|()| self.file.write_all(text.as_bytes()));
        written.map_err(|error| {
            Failure::failed(format!("{} cannot be written: {error}", self.path.display()))
        })?;
        self.fresh = false;
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.fresh {
            // An empty page would only puzzle.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
