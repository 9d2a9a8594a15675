//! A log-log plot as SVG: a line for each library, with a band to its 99th percentile.

mod axis;

use std::fmt::Write;

use crate::bench::row::Row;
use crate::bench::sizes;
use crate::units;
use axis::{Axis, Tick};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 116.0;
const RIGHT: f64 = 44.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 62.0;
/// Letters are this large on a narrow screen, where the whole plot is made smaller (page.css).
const LETTER: f64 = 16.0;
/// Between a label and its axis.
const GAP: f64 = 8.0;

/// What the vertical axis measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Time,
    Rate,
}

impl Unit {
    fn title(self) -> &'static str {
        match self {
            Self::Time => "Time of one call",
            Self::Rate => "Bus bandwidth",
        }
    }

    fn axis(self) -> &'static str {
        match self {
            Self::Time => "median, band to p99",
            Self::Rate => "at median, band to p99",
        }
    }

    fn round(self, value: f64) -> String {
        match self {
            Self::Time => units::round_time(value),
            Self::Rate => units::round_rate(value),
        }
    }
}

/// One measurement in a plot.
#[derive(Debug, Clone)]
pub(super) struct Point {
    bytes: f64,
    value: f64,
    /// The same at the 99th percentile.
    edge: f64,
    /// What is shown when the pointer is on it.
    text: String,
}

impl Point {
    pub(super) fn of(row: &Row, unit: Unit) -> Self {
        let slow = (row.p99_us / row.median_us).max(1.0);
        let slow = if slow.is_finite() { slow } else { 1.0 };
        let (value, edge, shown) = match unit {
            Unit::Time => (
                row.median_us,
                row.median_us * slow,
                format!("{}, p99 {}", units::time(row.median_us), units::time(row.p99_us)),
            ),
            Unit::Rate => (row.busbw_gbs, row.busbw_gbs / slow, units::rate(row.busbw_gbs)),
        };
        let text = format!("{}, {}: {shown}", row.peer, sizes::show(row.bytes));
        Self { bytes: row.bytes as f64, value, edge, text }
    }
}

/// A plot against the size.
#[derive(Debug)]
pub(super) struct Plot {
    unit: Unit,
    lines: Vec<(usize, Vec<Point>)>,
}

impl Plot {
    pub(super) fn new(unit: Unit) -> Self {
        Self { unit, lines: Vec::new() }
    }

    /// One more line, in its colour. Points without a logarithm are left out.
    pub(super) fn line(&mut self, colour: usize, points: Vec<Point>) {
        let has_place = |point: &Point| point.value > 0.0 && point.edge > 0.0 && point.bytes > 0.0;
        let seen: Vec<Point> = points.into_iter().filter(has_place).collect();
        if !seen.is_empty() {
            self.lines.push((colour, seen));
        }
    }

    pub(super) fn svg(&self) -> String {
        let title = self.unit.title();
        let mut svg = format!(
            "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title} against size\">\n"
        );
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let x = Axis::sizes(points().map(|point| point.bytes), LEFT..WIDTH - RIGHT);
        let y = Axis::values(
            points().flat_map(|point| [point.value, point.edge]),
            TOP..HEIGHT - BOTTOM,
            |value| self.unit.round(value),
        );
        self.axes(&mut svg, &x, &y);
        let at = |bytes: f64, value: f64| format!("{:.1},{:.1}", x.at(bytes), y.at(value));
        for (colour, points) in &self.lines {
            let middle: Vec<String> = points.iter().map(|point| at(point.bytes, point.value)).collect();
            let edge = points.iter().rev().map(|point| at(point.bytes, point.edge));
            let band: Vec<String> = middle.iter().cloned().chain(edge).collect();
            let _ = writeln!(
                svg,
                "<g class=\"c{colour}\"><polygon class=\"band\" points=\"{}\"/><polyline points=\"{}\"/>",
                band.join(" "),
                middle.join(" ")
            );
            for point in points {
                let (x, y, text) = (x.at(point.bytes), y.at(point.value), &point.text);
                let _ = writeln!(
                    svg,
                    "<g class=\"point\" transform=\"translate({x:.1} {y:.1})\" data-text=\"{text}\">{}\
                     <circle class=\"hit\" r=\"9\"/><title>{text}</title></g>",
                    marker(*colour)
                );
            }
            svg.push_str("</g>\n");
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let _ = writeln!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"22\">{}</text>", self.unit.title());
        let _ = writeln!(svg, "<g class=\"axis\">");
        for Tick { at, text } in &y.ticks {
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{}\" y=\"{at:.1}\" class=\"y\">{text}</text>",
                LEFT - GAP
            );
        }
        let below = bottom + GAP + LETTER;
        for Tick { at, text } in &x.ticks {
            let _ = writeln!(
                svg,
                "<path d=\"M{at:.1} {TOP}V{bottom}\"/><text x=\"{at:.1}\" y=\"{below}\" class=\"x\">{text}</text>"
            );
        }
        let (middle, under, half) = ((LEFT + right) / 2.0, HEIGHT - 11.0, (TOP + bottom) / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{under}\" class=\"x\">size at each rank</text>\n\
             <text transform=\"translate(18 {half}) rotate(-90)\" class=\"x\">{}</text>\n</g>",
            self.unit.axis()
        );
    }
}

/// A mark that tells lines apart without colour.
fn marker(colour: usize) -> &'static str {
    match colour {
        0 => "<circle class=\"mark\" r=\"3.4\"/>",
        1 => "<rect class=\"mark\" x=\"-3.2\" y=\"-3.2\" width=\"6.4\" height=\"6.4\"/>",
        2 => "<path class=\"mark\" d=\"M0 -4.2 4 3 -4 3Z\"/>",
        _ => "<path class=\"mark\" d=\"M0 -4.5 4.5 0 0 4.5 -4.5 0Z\"/>",
    }
}

/// A piece of a line for the legend.
pub(super) fn key(colour: usize) -> String {
    format!("<polyline points=\"1,5 25,5\"/><g transform=\"translate(13 5)\">{}</g>", marker(colour))
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn a_band_goes_from_the_median_to_p99() {
        let mut plot = Plot::new(Unit::Time);
        // The 99th percentile is three times the median: both ends are round, so they are the ends of the axis.
        let rows = [row("gloo", "all-reduce", 8, 100.0 / 3.0), row("gloo", "all-reduce", 1024, 1.0)];
        plot.line(1, rows.iter().map(|row| Point::of(row, Unit::Time)).collect());
        let svg = plot.svg();
        let band = svg.split("class=\"band\" points=\"").nth(1).unwrap().split('"').next().unwrap();
        let points: Vec<&str> = band.split(' ').collect();
        assert_eq!(points.len(), 4, "{svg}");
        assert_eq!(points[3], format!("{LEFT:.1},{TOP:.1}"), "p99 of the first is at the top:\n{svg}");
        assert_eq!(points[1], format!("{:.1},{:.1}", WIDTH - RIGHT, HEIGHT - BOTTOM), "{svg}");
    }

    #[test]
    fn both_axes_have_names() {
        let svg = Plot::new(Unit::Time).svg();
        assert!(
            svg.contains(">size at each rank</text>") && svg.contains(">median, band to p99</text>"),
            "{svg}"
        );
    }

    #[test]
    fn nothing_has_no_points_but_axes() {
        let svg = Plot::new(Unit::Time).svg();
        assert!(svg.contains("</svg>") && !svg.contains("polyline") && !svg.contains("NaN"), "{svg}");
    }
}
