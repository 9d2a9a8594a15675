//! How long many small operations took.

use std::time::Duration;

/// Times of operations of one kind.
#[derive(Debug, Default)]
pub(crate) struct Latency {
    nanos: Vec<u64>,
}

impl Latency {
    pub(crate) fn add(&mut self, time: Duration) {
        self.nanos.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.nanos.extend(other.nanos);
    }

    pub(crate) fn count(&self) -> usize {
        self.nanos.len()
    }

    /// The times that these shares of all operations did not exceed, in microseconds.
    pub(crate) fn quantiles<const N: usize>(&mut self, shares: [f64; N]) -> [f64; N] {
        self.nanos.sort_unstable();
        let last = self.nanos.len().saturating_sub(1);
        shares.map(|share| {
            let nearest = (share * last as f64).round() as usize;
            self.nanos.get(nearest).map_or(0.0, |nanos| *nanos as f64 / 1e3)
        })
    }
}

/// A figure with as many digits as mean something.
pub(crate) fn figure(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let mut latency = Latency::default();
        (0..=100).rev().for_each(|micros| latency.add(Duration::from_micros(micros)));
        assert_eq!(latency.quantiles([0.0, 0.5, 0.99, 1.0]), [0.0, 50.0, 99.0, 100.0]);
        assert_eq!(Latency::default().quantiles([0.5]), [0.0]);
    }
}
