//! Jobs: a table of them, and what is said above one.

use std::io;

use serde::Serialize;
use tensorwire::status::{Doing, GroupReport, JobReport, Process, RankReport};

use super::table;
use crate::printer::{Printer, Tone, WIDTH, wrap};

/// One job.
#[derive(Debug, Serialize)]
struct JobLine<'a> {
    /// What `tensorwire status` takes to show it alone.
    job: u32,
    launcher: Option<u32>,
    command: &'a str,
    pids: &'a [u32],
    groups: Vec<GroupLine<'a>>,
    does: String,
}

#[derive(Debug, Serialize)]
struct GroupLine<'a> {
    name: &'a str,
    world: usize,
    ranks_here: usize,
    failure: Option<&'a str>,
    summary: &'a [String],
}

impl<'a> GroupLine<'a> {
    fn new(group: &'a GroupReport) -> Self {
        Self {
            name: &group.name,
            world: group.world,
            ranks_here: group.ranks.len(),
            failure: group.failure.as_deref(),
            summary: &group.summary,
        }
    }
}

pub(super) fn print_json(jobs: &[JobReport], printer: &Printer) -> io::Result<()> {
    for job in jobs {
        printer.json(&JobLine {
            job: number(job, jobs),
            launcher: job.launcher,
            command: &job.command,
            pids: &job.pids,
            groups: job.groups.iter().map(GroupLine::new).collect(),
            does: does(job).0,
        })?;
    }
    Ok(())
}

/// Several jobs in a table.
pub(super) fn print(jobs: &[JobReport], printer: &Printer) -> io::Result<()> {
    printer.line(&printer.tint(Tone::Heading, &format!("{} jobs of this user", jobs.len())))?;
    let row = |job: &JobReport| {
        let here = job.groups.iter().map(|group| group.ranks.len()).max().unwrap_or(0);
        let world = job.groups.iter().map(|group| group.world).max().unwrap_or(0);
        let ranks = if world > here { format!("{here} of {world}") } else { here.to_string() };
        vec![
            number(job, jobs).to_string(),
            ranks,
            job.groups.len().to_string(),
            does(job).0,
            job.command.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = jobs.iter().map(row).collect();
    let tones: Vec<Option<Tone>> = jobs.iter().map(|job| does(job).1).collect();
    table::lines(&["job", "ranks", "groups", "does", "command"], &rows, &tones, printer)?;
    printer.line("")?;
    let first = jobs.first().map_or(0, |job| number(job, jobs));
    let hint = format!(
        "A job has the pid of its launcher, or of a rank if the launcher has several jobs. tensorwire status {first} \
         shows the first of them."
    );
    wrap(&hint, WIDTH).iter().try_for_each(|line| printer.line(&printer.tint(Tone::Quiet, line)))
}

/// One job above its groups.
pub(super) fn head(job: &JobReport, jobs: &[JobReport], printer: &Printer, before: &str) -> io::Result<()> {
    let number = number(job, jobs);
    let launcher = match job.launcher.filter(|pid| *pid != number) {
        Some(pid) => format!(", started by pid {pid}"),
        None => String::new(),
    };
    let text = format!("job {number}{launcher}: {}", job.command);
    printer.bytes(before.as_bytes())?;
    // A command line may be as long as it likes.
    let lines = wrap(&text, WIDTH);
    for (index, line) in lines.iter().take(2).enumerate() {
        let cut = if index == 1 && lines.len() > 2 {
            table::cut(&format!("{line} ..."), WIDTH)
        } else {
            line.clone()
        };
        printer.line(&printer.tint(Tone::Heading, &cut))?;
    }
    Ok(())
}

/// The pid that shows this job and no other: its launcher's, or a rank's.
fn number(job: &JobReport, jobs: &[JobReport]) -> u32 {
    let alone = |pid: &u32| jobs.iter().filter(|other| other.launcher == Some(*pid)).count() == 1;
    job.launcher.filter(alone).or(job.pids.first().copied()).unwrap_or(0)
}

/// In a few words, the worst first.
fn does(job: &JobReport) -> (String, Option<Tone>) {
    let ranks = || job.groups.iter().flat_map(|group| &group.ranks);
    let halted = ranks().find(|rank| rank.process.is_halted() && rank.doing != Doing::Left);
    let waiting: Vec<&RankReport> = ranks().filter(|rank| !rank.waits_for.is_empty()).collect();
    let inside = ranks()
        .find(|rank| matches!(rank.doing, Doing::In(_) | Doing::Barrier(_)))
        .or_else(|| ranks().find(|rank| !rank.queued.is_empty()));
    let title = |rank: &RankReport| match (&rank.doing, rank.operation()) {
        (Doing::Barrier(Some(count)), _) => format!("barrier #{count}"),
        (Doing::Barrier(None), _) => "the forming of its group".into(),
        (_, Some(record)) => record.title(),
        (_, None) => "its first operation".into(),
    };
    if job.groups.iter().any(|group| group.failure.is_some()) {
        ("has failed".into(), Some(Tone::Bad))
    } else if let Some(rank) = halted {
        let number = rank.rank.map_or("?".into(), |rank| rank.to_string());
        (format!("rank {number} is {}", rank.process.name()), Some(Tone::Bad))
    } else if let Some(first) = waiting.first() {
        let verb = if waiting.len() == 1 { "rank waits" } else { "ranks wait" };
        (format!("{} {verb} in {}", waiting.len(), title(first)), Some(Tone::Warning))
    } else if let Some(rank) = inside {
        (format!("is in {}", title(rank)), None)
    } else if ranks().any(|rank| rank.doing == Doing::Joining) {
        ("forms a group".into(), None)
    } else {
        let computes = ranks().any(|rank| rank.process == Process::Running);
        let does = if computes { "computes" } else { "sleeps" };
        let last = ranks().filter_map(|rank| rank.operation()).max_by_key(|record| record.begun);
        let after = last.map_or(String::new(), |record| format!(" after {}", record.title()));
        (format!("{does}{after}"), Some(Tone::Quiet))
    }
}
