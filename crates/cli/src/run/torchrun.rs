//! torchrun's spellings: those that mean something here, and what to do about those that do not.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::exit::Failure;

/// The most ranks of a run.
const MOST: u32 = 4096;

/// What is accepted if it says what holds here anyway.
#[derive(clap::Args, Debug)]
pub(super) struct Torchrun {
    #[arg(long, hide = true, value_name = "N", default_value = "1")]
    nnodes: String,
    #[arg(long, alias = "node_rank", hide = true, value_name = "RANK", default_value = "0")]
    node_rank: String,
    #[arg(long, alias = "master_addr", hide = true, value_name = "HOST", default_value = "127.0.0.1")]
    master_addr: String,
    #[arg(long, alias = "max_restarts", hide = true, value_name = "N", default_value = "0")]
    max_restarts: String,
    #[arg(long, hide = true)]
    standalone: bool,
}

impl Torchrun {
    /// Refuses what would need more than this machine.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let Self { nnodes, node_rank, master_addr, max_restarts, standalone: _ } = self;
        let several =
            "tensorwire run starts ranks on this machine only; torchrun and srun start them on several";
        if !matches!(nnodes.as_str(), "1" | "1:1") {
            return Err(Failure::usage(format!("--nnodes {nnodes}: {several}")));
        }
        if node_rank != "0" {
            return Err(Failure::usage(format!("--node-rank {node_rank}: {several}")));
        }
        let is_here = master_addr == "localhost" || master_addr == "::1" || master_addr.starts_with("127.");
        if !is_here {
            return Err(Failure::usage(format!(
                "--master-addr {master_addr}: the store of tensorwire run is at 127.0.0.1; leave the option out. \
                 {several}"
            )));
        }
        match max_restarts.as_str() {
            "0" => Ok(()),
            _ => Err(Failure::usage(format!(
                "--max-restarts {max_restarts}: tensorwire run starts a rank only once; use torchrun to restart"
            ))),
        }
    }
}

/// How many ranks: a number, or what torchrun calls auto, gpu or cpu.
pub(super) fn ranks(text: &str) -> Result<u32, String> {
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let gpus =
        || tensorwire::device::cuda::count().map(|count| count as u32).map_err(|error| error.to_string());
    match text {
        "cpu" => Ok(cores()),
        "auto" => Ok(gpus().ok().filter(|gpus| *gpus > 0).unwrap_or_else(cores)),
        "gpu" => match gpus() {
            Ok(0) => Err("there is no GPU; look at CUDA_VISIBLE_DEVICES".into()),
            gpus => gpus.map_err(|error| format!("there is no GPU: {error}")),
        },
        "p" => Err("mpirun's -np is -n here".into()),
        number => match number.parse() {
            Ok(count @ 1..=MOST) => Ok(count),
            _ => Err(format!("a number from 1 to {MOST} is needed, or auto, gpu or cpu")),
        },
    }
}

/// What was meant by an option that we do not have; nothing if the error is another one.
pub(crate) fn explain(error: &clap::Error) -> Option<Failure> {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(given))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let name = given.split('=').next().unwrap_or(given);
    let spelled = name.replace('_', "-");
    if let Some((_, instead)) = OTHERS.iter().find(|(names, _)| names.contains(&spelled.as_str())) {
        return Some(Failure::usage(format!("tensorwire run does not have torchrun's {name}: {instead}")));
    }
    Some(Failure::usage(match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(similar)) if differ(&spelled, similar) <= TYPO => {
            format!("{name} is no option of tensorwire run; did you mean {similar}?")
        }
        _ => format!(
            "{name} is no option of tensorwire run (--help lists them); an option of your program comes after the \
             program: tensorwire run -n 2 train.py {name}"
        ),
    }))
}

/// The most letters that a slip of the fingers changes.
const TYPO: usize = 3;

/// How many letters are to be added, left out or changed.
fn differ(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (above, letter) in one.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], above + 1);
        for (at, theirs) in other.chars().enumerate() {
            let changed = diagonal + usize::from(letter != theirs);
            diagonal = row[at + 1];
            row[at + 1] = changed.min(row[at] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

/// Options of torchrun that are not ours, and what to do instead.
const OTHERS: [(&[&str], &str); 6] = [
    (
        &["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"],
        "tensorwire run serves the store itself, on this machine; leave it out",
    ),
    (&["--redirects", "-r", "--tee", "-t"], "--log-dir DIR writes the output of each rank to a file as well"),
    (
        &["--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters"],
        "--log-dir DIR has the output of each rank in a file of its own",
    ),
    (
        &["--role", "--monitor-interval", "--start-method", "--logs-specs", "--numa-binding"],
        "leave it out, or start the ranks with torchrun",
    ),
    (
        &["--run-path", "--event-log-handler", "--signals-to-handle", "--virtual-local-rank"],
        "leave it out, or start the ranks with torchrun",
    ),
    (&["--hostfile", "--host", "--np"], "tensorwire run starts N ranks on this machine with -n N"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_told_from_other_words() {
        let pairs =
            [("--nproc", "--nproc", 0), ("--nprocs", "--nproc", 1), ("--grcae", "--grace", 2), ("", "ab", 2)];
        for (one, other, wanted) in pairs {
            assert_eq!((differ(one, other), differ(other, one)), (wanted, wanted), "{one} {other}");
        }
        assert!(differ("--epochs", "--nproc") > TYPO);
    }
}
