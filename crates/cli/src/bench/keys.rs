//! Which keys each rank has in an all-reduce of sparse tensors: a function of rank and key alone.
//!
//! The same function is in `torch/sparse.py`: both have the same keys, but for a few that rounding decides.

use std::fmt;
use std::str::FromStr;

/// Elements of a row.
pub(super) const WIDTH: usize = 64;

/// How the keys of a rank lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keys {
    /// How many of a million rows a rank has.
    pub(super) millionths: u32,
    pub(super) spread: Spread,
}

/// Which rows are likely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Spread {
    /// All rows alike
    Uniform,
    /// Row k in proportion to 1 / k: popular rows are on all ranks, as in a recommender
    Zipf,
}

impl Spread {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

impl Keys {
    /// From a share of the rows.
    pub(super) fn new(share: f64, spread: Spread) -> Option<Self> {
        let millionths = (share * 1e6).round();
        (1.0..=1e6).contains(&millionths).then_some(Self { millionths: millionths as u32, spread })
    }

    pub(super) fn share(self) -> f64 {
        f64::from(self.millionths) / 1e6
    }

    /// Whether a rank has a key, of so many rows.
    pub(super) fn has(self, rank: usize, key: u64, rows: u64) -> bool {
        is_drawn(rank, key, self.likelihood(key, self.top(rows)))
    }

    /// The keys of a rank, of so many rows, in order.
    pub(super) fn of(self, rank: usize, rows: u64) -> impl Iterator<Item = i64> {
        let top = self.top(rows);
        (0..rows).filter(move |&key| is_drawn(rank, key, self.likelihood(key, top))).map(|key| key as i64)
    }

    fn likelihood(self, key: u64, top: f64) -> f64 {
        match self.spread {
            Spread::Uniform => top,
            Spread::Zipf => (top / (key + 1) as f64).min(1.0),
        }
    }

    /// The likelihood of a row if all are alike. Otherwise how many rows are on all ranks, so that a rank has its share:
    /// `top + top ln(rows / top)` rows.
    fn top(self, rows: u64) -> f64 {
        let rows = rows as f64;
        match self.spread {
            Spread::Uniform => self.share(),
            Spread::Zipf => {
                let (mut low, mut high) = (0.0, rows.max(1.0));
                for _ in 0..60 {
                    let middle = (low + high) / 2.0;
                    let all = if middle > 0.0 { middle * (1.0 + (rows / middle).ln()) } else { 0.0 };
                    if all < self.share() * rows { low = middle } else { high = middle }
                }
                high
            }
        }
    }
}

fn is_drawn(rank: usize, key: u64, likelihood: f64) -> bool {
    let mut word =
        key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^= word >> 29;
    ((word >> 11) as f64) < likelihood * (1u64 << 53) as f64
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.millionths, self.spread.name())
    }
}

impl FromStr for Keys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let spreads = [Spread::Uniform, Spread::Zipf];
        let read = text.split_once(':').and_then(|(millionths, spread)| {
            let spread = spreads.into_iter().find(|known| known.name() == spread)?;
            Some(Self { millionths: millionths.parse().ok()?, spread })
        });
        read.ok_or_else(|| format!("{text:?} says nothing about keys"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_its_share() {
        for spread in [Spread::Uniform, Spread::Zipf] {
            let keys = Keys::new(0.01, spread).unwrap();
            let of_rank: Vec<Vec<i64>> = (0..3).map(|rank| keys.of(rank, 1_000_000).collect()).collect();
            for list in &of_rank {
                assert!((9_000..11_000).contains(&list.len()), "{spread:?}: {}", list.len());
                assert!(
                    list.iter().all(|&key| keys.has(0, key as u64, 1_000_000) == of_rank[0].contains(&key))
                );
            }
            assert_ne!(of_rank[0], of_rank[1]);
            let low = of_rank[0].iter().filter(|&&key| key < 1000).count();
            assert_eq!(low > 500, spread == Spread::Zipf, "{low}");
        }
        assert!(Keys::new(0.0, Spread::Zipf).is_none() && Keys::new(1.1, Spread::Zipf).is_none());
    }

    #[test]
    fn they_are_read_as_they_were_written() {
        let keys = Keys::new(0.25, Spread::Zipf).unwrap();
        assert_eq!(keys.to_string().parse(), Ok(keys));
        assert!("1000".parse::<Keys>().is_err() && "x:zipf".parse::<Keys>().is_err());
    }
}
