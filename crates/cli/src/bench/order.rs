//! What the bench tells its workers, and what they answer. Both are lines of words, so that a program in any
//! language can be a worker.
//!
//! A worker says `ready PID ABOUT` once it is up. An order is `OP BYTES DTYPE REDUCE MEMORY PATH WARMUP ITERATIONS
//! FIRST`. Every rank gets it and answers `ok WRONG PATH NANOS NANOS ...`, with one time for each iteration. A rank
//! that cannot do such an operation at all answers `no WHY`. A worker ends when its input ends.

use std::fmt;
use std::str::FromStr;

use tensorwire::collective::Path;
use tensorwire::{Dtype, ReduceOp};

use super::op::Op;

/// Where the tensors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum TensorMemory {
    /// Ordinary memory of each process
    Private,
    /// Memory of the group, which other ranks can reach
    Shared,
    /// Memory of a GPU, from the pool of the rank's context. It comes with `--device`
    #[value(skip)]
    Pool,
}

impl TensorMemory {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Shared => "shared",
            Self::Pool => "pool",
        }
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Case {
    pub(super) op: Op,
    pub(super) bytes: usize,
    pub(super) dtype: Dtype,
    pub(super) reduce: ReduceOp,
    pub(super) memory: TensorMemory,
    /// Forced, or chosen by the library.
    pub(super) path: Option<Path>,
}

/// A number of measurements of a case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Order {
    pub(super) case: Case,
    /// Iterations before those that are timed.
    pub(super) warmup: usize,
    pub(super) iterations: usize,
    /// The number of the first iteration; data differ from one to the next.
    pub(super) first: usize,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { op, bytes, dtype, reduce, memory, path } = self.case;
        let (op, memory, path) = (op.word(), memory.name(), path.map_or("-", Path::name));
        let Self { warmup, iterations, first, .. } = self;
        write!(f, "{op} {bytes} {dtype} {reduce} {memory} {path} {warmup} {iterations} {first}")
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [op, bytes, dtype, reduce, memory, path, warmup, iterations, first] = words[..] else {
            return Err(format!("an order has 9 words: {line:?}"));
        };
        let number = |word: &str| word.parse().map_err(|_| format!("{word:?} is no number"));
        let case = Case {
            op: op.parse()?,
            bytes: number(bytes)?,
            dtype: dtype.parse().map_err(|error: tensorwire::device::Error| error.to_string())?,
            reduce: reduce_op(reduce)?,
            memory: [TensorMemory::Shared, TensorMemory::Pool]
                .into_iter()
                .find(|known| known.name() == memory)
                .unwrap_or(TensorMemory::Private),
            path: match path {
                "-" => None,
                path => Some(path.parse().map_err(|error: tensorwire::Error| error.to_string())?),
            },
        };
        Ok(Self { case, warmup: number(warmup)?, iterations: number(iterations)?, first: number(first)? })
    }
}

/// A reduction by its name; those that need no factor.
pub(super) fn reduce_op(name: &str) -> Result<ReduceOp, String> {
    let all = || ReduceOp::ALL.into_iter().filter(|op| !matches!(op, ReduceOp::PremulSum(_)));
    all().find(|op| op.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names = all().map(|op| op.name().to_ascii_lowercase()).collect::<Vec<_>>().join(", ");
        format!("no reduction is called {name:?}; the reductions are {names}")
    })
}

/// What a rank answered.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Done {
        /// Elements that were not what they must be, over all iterations.
        wrong: u64,
        /// The way that was taken.
        path: String,
        nanos: Vec<u64>,
    },
    /// It cannot do such an operation.
    No(String),
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { wrong, path, nanos } => {
                write!(f, "ok {wrong} {path}")?;
                nanos.iter().try_for_each(|nanos| write!(f, " {nanos}"))
            }
            Self::No(why) => write!(f, "no {}", why.replace('\n', " ")),
        }
    }
}

impl FromStr for Answer {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let garbled = || format!("answered {line:?}");
        match line.split_once(' ') {
            Some(("no", why)) => Ok(Self::No(why.to_owned())),
            Some(("ok", rest)) => {
                let mut words = rest.split(' ');
                let wrong = words.next().and_then(|word| word.parse().ok()).ok_or_else(garbled)?;
                let path = words.next().ok_or_else(garbled)?.to_owned();
                let nanos: Result<Vec<u64>, _> = words.map(str::parse).collect();
                Ok(Self::Done { wrong, path, nanos: nanos.map_err(|_| garbled())? })
            }
            _ => Err(garbled()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::{Keys, Spread};
    use super::*;

    #[test]
    fn an_order_is_read_as_it_was_written() {
        for path in [None, Some(Path::OneShot)] {
            let sparse = Op::AllReduceSparse(Keys::new(0.01, Spread::Zipf).unwrap());
            let memories = [TensorMemory::Private, TensorMemory::Shared, TensorMemory::Pool];
            for (op, memory) in Op::ALL
                .into_iter()
                .chain([Op::ReduceAlone, Op::Hop, sparse])
                .zip(memories.into_iter().cycle())
            {
                let (dtype, reduce) = (Dtype::Bf16, ReduceOp::Max);
                let case = Case { op, bytes: 1 << 20, dtype, reduce, memory, path };
                let order = Order { case, warmup: 1, iterations: 20, first: 300 };
                assert_eq!(order.to_string().parse(), Ok(order));
            }
        }
        assert!("all-reduce 8".parse::<Order>().is_err());
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let done = Answer::Done { wrong: 3, path: "one-shot".into(), nanos: vec![1, 22, 333] };
        for answer in [done, Answer::No("it has no bfloat16".into())] {
            assert_eq!(answer.to_string().parse(), Ok(answer));
        }
        for line in ["", "ok", "ok x", "ok 0 staged 1 x", "what"] {
            assert!(line.parse::<Answer>().is_err(), "{line:?}");
        }
    }
}
