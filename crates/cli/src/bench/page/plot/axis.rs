//! A logarithmic axis whose labels do not touch.

use std::ops::Range;

use super::{GAP, LETTER};
use crate::bench::sizes;

/// The width of a letter as a part of its height, of a wide font.
const WIDE: f64 = 0.64;
/// So many labels at most stand on top of one another.
const MOST: usize = 9;

/// A logarithmic axis between two places of a picture.
#[derive(Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    /// Where these two are.
    ends: (f64, f64),
    pub(super) ticks: Vec<Tick>,
}

/// A place on an axis that has a label.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) text: String,
}

impl Axis {
    /// From left to right, with labels at sizes that were measured: at every one, or every second and so on.
    pub(super) fn sizes(values: impl Iterator<Item = f64>, place: Range<f64>) -> Self {
        let mut all: Vec<f64> = values.collect();
        all.sort_by(f64::total_cmp);
        all.dedup();
        let (low, high) = (all.first().copied().unwrap_or(1.0), all.last().copied().unwrap_or(2.0));
        let mut axis =
            Self { low, high: high.max(low * 2.0), ends: (place.start, place.end), ticks: Vec::new() };
        let labels = |step: usize| -> Vec<Tick> {
            let tick = |bytes: &f64| Tick { at: axis.at(*bytes), text: sizes::show(*bytes as usize) };
            all.iter().step_by(step).map(tick).collect()
        };
        axis.ticks = (1..=all.len()).map(labels).find(|ticks| are_apart(ticks)).unwrap_or_default();
        axis
    }

    /// From below to above, from a round value to a round value: 1, 2, 5, 10 and so on.
    pub(super) fn values(
        values: impl Iterator<Item = f64>,
        place: Range<f64>,
        show: impl Fn(f64) -> String,
    ) -> Self {
        let (least, most) = values
            .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
        let (least, most) = if least > most { (1.0, 10.0) } else { (least, most) };
        let first = round_below(least);
        let mut last = first + 1;
        while round(last) < most * (1.0 - 1e-9) {
            last += 1;
        }
        let mut axis =
            Self { low: round(first), high: round(last), ends: (place.end, place.start), ticks: Vec::new() };
        // All of 1, 2, 5; or powers of ten; or every second, third, ... power of ten.
        let steps = std::iter::once(1).chain((1..).map(|tens| 3 * tens));
        let labels =
            |step: i32| -> Vec<i32> { (first..=last).filter(|rung| rung.rem_euclid(step) == 0).collect() };
        let rungs = steps.map(labels).find(|rungs| rungs.len() <= MOST).unwrap_or_default();
        let tick = |rung: i32| Tick { at: axis.at(round(rung)), text: show(round(rung)) };
        axis.ticks = rungs.into_iter().map(tick).collect();
        axis
    }

    /// Where a value is.
    pub(super) fn at(&self, value: f64) -> f64 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        self.ends.0 + share.clamp(0.0, 1.0) * (self.ends.1 - self.ends.0)
    }
}

/// The round values, by number: 1, 2, 5, 10, 20, ...; below 0 those under 1.
fn round(rung: i32) -> f64 {
    [1.0, 2.0, 5.0][rung.rem_euclid(3) as usize] * 10f64.powi(rung.div_euclid(3))
}

/// The last round value that is not above this one.
fn round_below(value: f64) -> i32 {
    let mut rung = 3 * (value.log10().floor() as i32);
    while round(rung + 1) <= value * (1.0 + 1e-9) {
        rung += 1;
    }
    rung
}

/// Whether labels below one another's side do not touch.
fn are_apart(ticks: &[Tick]) -> bool {
    let half = |tick: &Tick| tick.text.chars().count() as f64 * WIDE * LETTER / 2.0;
    ticks.windows(2).all(|pair| pair[0].at + half(&pair[0]) + GAP <= pair[1].at - half(&pair[1]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::round_time;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.text.as_str()).collect()
    }

    #[test]
    fn values_have_round_labels() {
        let axis = |values: &[f64]| Axis::values(values.iter().copied(), 0.0..100.0, round_time);
        assert_eq!(labels(&axis(&[3.0, 18.0])), ["2 µs", "5 µs", "10 µs", "20 µs"]);
        assert_eq!(labels(&axis(&[0.7, 15_190.0])), ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]);
        let wide = axis(&[1e-3, 1e7]);
        assert!(wide.ticks.len() <= MOST && wide.ticks.len() > 3, "{wide:?}");
        // What is larger is higher up, and nothing is outside.
        assert!(wide.at(1e7) < wide.at(1.0) && (0.0..=100.0).contains(&wide.at(1e7)));
        for one in [1.0, 0.3, 1e6] {
            let axis = axis(&[one]);
            assert!((0.0..=100.0).contains(&axis.at(one)) && axis.ticks.len() >= 2, "{axis:?}");
        }
    }

    #[test]
    fn labels_of_sizes_do_not_touch() {
        let axis = |sizes: &[usize]| Axis::sizes(sizes.iter().map(|bytes| *bytes as f64), 116.0..516.0);
        let doubled: Vec<usize> = (3..28).map(|power| 1 << power).collect();
        for sizes in [
            &doubled[..],
            &[1 << 10, 1 << 16, 1 << 20, 1 << 24],
            &[1000, 1001, 1002, 1 << 20],
            &[1020, 65_532, 1_048_572],
            &[8, 9],
            &[64],
            &[],
        ] {
            let axis = axis(sizes);
            assert!(are_apart(&axis.ticks), "{axis:?}");
            assert!(sizes.is_empty() || !axis.ticks.is_empty(), "{axis:?}");
        }
        let few = axis(&[1 << 10, 1 << 16, 1 << 20, 1 << 24]);
        assert_eq!(labels(&few), ["1 KiB", "64 KiB", "1 MiB", "16 MiB"]);
        let apart = [Tick { at: 0.0, text: "1 KiB".into() }, Tick { at: 40.0, text: "2 KiB".into() }];
        assert!(!are_apart(&apart), "letters of 16 need more than 40");
    }
}
