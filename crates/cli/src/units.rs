//! Figures in the unit that suits them.

use crate::latency::figure;

/// Names of units, and how many of the smallest one each is.
type Units = [(&'static str, f64)];

const TIMES: [(&str, f64); 4] = [("ns", 1e-3), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];
const RATES: [(&str, f64); 4] = [("kB/s", 1e-6), ("MB/s", 1e-3), ("GB/s", 1.0), ("TB/s", 1e3)];

/// Microseconds as `850 ns`, `15.2 ms`.
pub(crate) fn time(micros: f64) -> String {
    show(micros, &TIMES, figure)
}

/// Gigabytes in a second as `850 MB/s`.
pub(crate) fn rate(gbs: f64) -> String {
    show(gbs, &RATES, figure)
}

/// How many times one figure another is; of a small part still two digits.
pub(crate) fn times(ratio: f64) -> String {
    if ratio < 0.0995 { format!("{ratio:.3}") } else { figure(ratio) }
}

/// A time of an axis, without digits that say nothing.
pub(crate) fn round_time(micros: f64) -> String {
    show(micros, &TIMES, short)
}

/// A rate of an axis.
pub(crate) fn round_rate(gbs: f64) -> String {
    show(gbs, &RATES, short)
}

fn show(value: f64, units: &Units, digits: fn(f64) -> String) -> String {
    // What would be rounded to 1000 of a unit is one of the next.
    let fits = |(_, unit): &&(&str, f64)| value >= unit * 0.9995;
    match units.iter().rev().find(fits).or(units.first()) {
        Some((name, unit)) => format!("{} {name}", digits(value / unit)),
        None => digits(value),
    }
}

fn short(value: f64) -> String {
    let text = figure(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_unit_that_suits_them() {
        assert_eq!(
            [0.66, 1.0, 24.9, 999.7, 15_190.0, 2e6].map(time),
            ["660 ns", "1.00 µs", "24.9 µs", "1.00 ms", "15.2 ms", "2.00 s"]
        );
        assert_eq!(
            [0.0, 0.000_04, 0.041, 0.9999, 12.3, 4800.0].map(rate),
            ["0.00 kB/s", "40.0 kB/s", "41.0 MB/s", "1.00 GB/s", "12.3 GB/s", "4.80 TB/s"]
        );
        assert_eq!([0.1, 5.0, 20.0, 200_000.0].map(round_time), ["100 ns", "5 µs", "20 µs", "200 ms"]);
        assert_eq!([0.004, 0.51, 9.7, 1670.0].map(times), ["0.004", "0.51", "9.70", "1670"]);
        assert_eq!([0.05, 2.0].map(round_rate), ["50 MB/s", "2 GB/s"]);
    }
}
