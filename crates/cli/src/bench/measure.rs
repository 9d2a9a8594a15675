//! Measures cases: ours and the peers' in turn, round after round.

use std::time::{Duration, Instant};

use super::crew::{Crew, Outcome};
use super::order::{Case, Order};
use super::row::Row;
use crate::latency::Latency;

/// How often each library has its turn in one case.
const ROUNDS: usize = 3;
/// Fewer iterations in a round say nothing, more no more.
const FEWEST: usize = 3;
const MOST: usize = 2000;

/// Why there is no measurement of one library in one case.
#[derive(Debug)]
pub(super) enum Missing {
    /// It cannot do this.
    No(String),
    /// It failed; nothing more can be measured with it.
    Broken(String),
}

/// Measures one case with each crew, each for `length` and at least a few times.
pub(super) fn case(
    crews: &mut [&mut Crew],
    case: &Case,
    ranks: usize,
    length: Duration,
) -> Vec<Result<Row, Missing>> {
    let mut turns: Vec<Turn> = crews.iter().map(|_| Turn::default()).collect();
    for round in 0..=ROUNDS {
        for (crew, turn) in crews.iter_mut().zip(&mut turns) {
            if turn.missing.is_none() {
                let result = if round == 0 { turn.probe(crew, case, length) } else { turn.round(crew, case) };
                turn.missing = result.err();
            }
        }
    }
    let measured = |(crew, turn): (&&mut Crew, Turn)| match turn.missing {
        Some(missing) => Err(missing),
        None => Ok(Row::new(crew, case, ranks, (turn.wrong, turn.path), turn.latency)),
    };
    crews.iter().zip(turns).map(measured).collect()
}

/// One library in one case.
#[derive(Debug, Default)]
struct Turn {
    /// Iterations of a round.
    iterations: usize,
    /// Iterations so far.
    next: usize,
    wrong: u64,
    path: String,
    latency: Latency,
    missing: Option<Missing>,
}

impl Turn {
    /// Takes memory, warms up, and finds out how many iterations fit the time.
    fn probe(&mut self, crew: &mut Crew, case: &Case, length: Duration) -> Result<(), Missing> {
        self.order(crew, case, 1, 1)?;
        let begun = Instant::now();
        self.order(crew, case, 0, FEWEST)?;
        let one = begun.elapsed().as_secs_f64() / FEWEST as f64;
        let fit = length.as_secs_f64() / ROUNDS as f64 / one.max(1e-9);
        self.iterations = (fit as usize).clamp(FEWEST, MOST);
        self.latency = Latency::default();
        Ok(())
    }

    fn round(&mut self, crew: &mut Crew, case: &Case) -> Result<(), Missing> {
        let warmup = (self.iterations / 10).clamp(1, 20);
        self.order(crew, case, warmup, self.iterations)
    }

    fn order(
        &mut self,
        crew: &mut Crew,
        case: &Case,
        warmup: usize,
        iterations: usize,
    ) -> Result<(), Missing> {
        let order = Order { case: *case, warmup, iterations, first: self.next };
        self.next += warmup + iterations;
        match crew.carry_out(&order).map_err(Missing::Broken)? {
            Outcome::No(why) => Err(Missing::No(why)),
            Outcome::Done { wrong, path, nanos } => {
                self.wrong += wrong;
                self.path = path;
                for index in 0..iterations {
                    let slowest = nanos.iter().filter_map(|rank| rank.get(index)).max();
                    self.latency.add(Duration::from_nanos(slowest.copied().unwrap_or(0)));
                }
                Ok(())
            }
        }
    }
}
