//! A log-log plot as SVG.

use std::fmt::Write;

use crate::bench::row::Row;
use crate::bench::sizes;
use crate::latency::figure;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

/// What the vertical axis measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Micros,
    Rate,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Rate if value >= 0.99 => format!("{} GB/s", short(value)),
            Self::Rate if value >= 0.99e-3 => format!("{} MB/s", short(value * 1e3)),
            Self::Rate => format!("{} kB/s", short(value * 1e6)),
            Self::Micros if value >= 0.99e6 => format!("{} s", short(value / 1e6)),
            Self::Micros if value >= 0.99e3 => format!("{} ms", short(value / 1e3)),
            Self::Micros => format!("{} µs", short(value)),
        }
    }
}

/// A figure of an axis: a power of ten, without digits that say nothing.
fn short(value: f64) -> String {
    let text = if value >= 1.0 { figure(value) } else { format!("{value:.3}") };
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// One measurement in a plot.
#[derive(Debug, Clone)]
pub(super) struct Point {
    bytes: f64,
    value: f64,
    /// What is shown when the pointer is on it.
    text: String,
}

impl Point {
    pub(super) fn of(row: &Row, unit: Unit) -> Self {
        let value = if unit == Unit::Micros { row.median_us } else { row.busbw_gbs };
        let shown = match unit {
            Unit::Micros => format!("{} µs, p99 {} µs", figure(row.median_us), figure(row.p99_us)),
            Unit::Rate => format!("{} GB/s", figure(row.busbw_gbs)),
        };
        let text = format!("{}, {}: {shown}", row.peer, sizes::show(row.bytes));
        Self { bytes: row.bytes as f64, value, text }
    }
}

/// A plot against the size.
#[derive(Debug)]
pub(super) struct Plot {
    title: &'static str,
    unit: Unit,
    lines: Vec<(usize, Vec<Point>)>,
}

impl Plot {
    pub(super) fn new(title: &'static str, unit: Unit) -> Self {
        Self { title, unit, lines: Vec::new() }
    }

    /// One more line, in its colour. Points without a logarithm are left out.
    pub(super) fn line(&mut self, colour: usize, points: Vec<Point>) {
        let seen: Vec<Point> =
            points.into_iter().filter(|point| point.value > 0.0 && point.bytes > 0.0).collect();
        if !seen.is_empty() {
            self.lines.push((colour, seen));
        }
    }

    pub(super) fn svg(&self) -> String {
        let mut svg = format!(
            "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{} against size\">\n",
            self.title
        );
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let (x, y) = (Axis::sizes(points()), Axis::values(points()));
        self.axes(&mut svg, &x, &y);
        for (colour, points) in &self.lines {
            let at = |point: &Point| {
                (
                    LEFT + x.at(point.bytes) * (WIDTH - LEFT - RIGHT),
                    HEIGHT - BOTTOM - y.at(point.value) * (HEIGHT - TOP - BOTTOM),
                )
            };
            let path: Vec<String> = points
                .iter()
                .map(|point| {
                    let (x, y) = at(point);
                    format!("{x:.1},{y:.1}")
                })
                .collect();
            let _ = writeln!(svg, "<g class=\"c{colour}\"><polyline points=\"{}\"/>", path.join(" "));
            for point in points {
                let (x, y) = at(point);
                let _ = writeln!(
                    svg,
                    "<g class=\"point\" transform=\"translate({x:.1} {y:.1})\" data-text=\"{}\">{}<circle class=\"hit\" r=\"9\"/><title>{}</title></g>",
                    point.text,
                    marker(*colour),
                    point.text
                );
            }
            svg.push_str("</g>\n");
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let _ = writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"18\">{}</text>", self.title);
        let _ = writeln!(svg, "<g class=\"axis\">");
        for (tick, text) in y.ticks(|value| self.unit.show(value)) {
            let at = bottom - y.at(tick) * (bottom - TOP);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" class=\"y\">{text}</text>",
                LEFT - 8.0,
                at + 4.0
            );
        }
        for (tick, text) in x.ticks(|value| sizes::show(value as usize)) {
            let at = LEFT + x.at(tick) * (right - LEFT);
            let _ = writeln!(
                svg,
                "<path d=\"M{at:.1} {TOP}V{bottom}\"/><text x=\"{at:.1}\" y=\"{}\" class=\"x\">{text}</text>",
                bottom + 17.0
            );
        }
        let (middle, under) = ((LEFT + right) / 2.0, HEIGHT - 8.0);
        let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{under}\" class=\"x\">size</text>\n</g>");
    }
}

/// A logarithmic axis.
#[derive(Debug)]
struct Axis {
    low: f64,
    high: f64,
    /// From one tick to the next, as a factor.
    step: f64,
}

impl Axis {
    /// Whole powers of two, a tick at most for every fourth power.
    fn sizes<'a>(points: impl Iterator<Item = &'a Point>) -> Self {
        Self::around(points.map(|point| point.bytes), 2.0, 8)
    }

    fn values<'a>(points: impl Iterator<Item = &'a Point>) -> Self {
        Self::around(points.map(|point| point.value), 10.0, 8)
    }

    /// From a power of `base` below all values to one above them; steps so large that there are at most `most` ticks.
    fn around(values: impl Iterator<Item = f64>, base: f64, most: u32) -> Self {
        let (low, high) = values
            .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), value| (low.min(value), high.max(value)));
        let power = |value: f64| value.ln() / base.ln();
        let low = (power(low.min(high)) + 1e-9).floor();
        let high = (power(high) - 1e-9).ceil().max(low + 1.0);
        let per_tick = ((high - low) / f64::from(most)).ceil().max(1.0);
        Self { low: base.powf(low), high: base.powf(high), step: base.powf(per_tick) }
    }

    /// Where a value is between the ends, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        (value / self.low).ln() / (self.high / self.low).ln()
    }

    fn ticks(&self, show: impl Fn(f64) -> String) -> Vec<(f64, String)> {
        let ticks = std::iter::successors(Some(self.low), |tick| Some(tick * self.step));
        let end = self.high * 1.001;
        ticks.take_while(|tick| *tick <= end).map(|tick| (tick, show(tick))).collect()
    }
}

/// A mark that tells lines apart without colour.
fn marker(colour: usize) -> &'static str {
    match colour {
        0 => "<circle class=\"mark\" r=\"3.4\"/>",
        1 => "<rect class=\"mark\" x=\"-3.2\" y=\"-3.2\" width=\"6.4\" height=\"6.4\"/>",
        _ => "<path class=\"mark\" d=\"M0 -4.2 4 3 -4 3Z\"/>",
    }
}

/// A piece of a line for the legend.
pub(super) fn key(colour: usize) -> String {
    format!("<polyline points=\"1,5 25,5\"/><g transform=\"translate(13 5)\">{}</g>", marker(colour))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_reaches_around_all_values() {
        let axis = Axis::around([3.0, 250.0].into_iter(), 10.0, 8);
        assert!((axis.low - 1.0).abs() < 1e-6 && (axis.high - 1000.0).abs() < 1e-6, "{axis:?}");
        assert!((axis.at(10.0) - 1.0 / 3.0).abs() < 1e-6);
        assert_eq!(
            axis.ticks(|value| Unit::Micros.show(value))
                .iter()
                .map(|(_, text)| text.as_str())
                .collect::<Vec<_>>(),
            ["1 µs", "10 µs", "100 µs", "1 ms"]
        );
    }

    #[test]
    fn one_value_has_an_axis_too() {
        for value in [1.0, 8.0, 1024.0, 0.001] {
            let axis = Axis::around([value].into_iter(), 2.0, 8);
            assert!(
                (0.0..=1.0).contains(&axis.at(value)) && axis.ticks(|_| String::new()).len() >= 2,
                "{axis:?}"
            );
        }
    }

    #[test]
    fn nothing_has_no_points_but_axes() {
        let svg = Plot::new("Time", Unit::Micros).svg();
        assert!(svg.contains("</svg>") && !svg.contains("polyline") && !svg.contains("NaN"), "{svg}");
    }
}
