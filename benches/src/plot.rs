//! Charts as SVG text: lines with markers, whiskers for the interval of each point, and a legend beside them.
//!
//! The same chart always has the same bytes. It has a white background of its own for viewers with a dark one, and
//! colours that colour-blind readers can tell apart (those of Okabe and Ito), each with a different marker.

mod scale;

use std::fmt::Write as _;

use scale::Scale;
use serde_json::{Value, json};

use crate::{paired::Estimate, summary::percentiles};

/// Sizes of the plot area and its margins, in px.
const AREA_WIDTH: f64 = 560.0;
const AREA_HEIGHT: f64 = 300.0;
const LEFT: f64 = 84.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
const LEGEND_GAP: f64 = 20.0;
const LEGEND_ROW: f64 = 22.0;
/// Width of the line with a marker before each name of the legend.
const LEGEND_KEY: f64 = 34.0;

/// Assumed width of a character of the legend and of the labels, more than that of most.
const CHARACTER_WIDTH: f64 = 7.0;

const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

/// Half the width of a marker and of a whisker.
const MARKER: f64 = 4.0;

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// A part of a file's name, such as `wrk-throughput`.
    pub name: String,
    /// Heading above the chart.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis; it begins at zero unless it is logarithmic.
    pub y: Axis,
    /// The lines, in the order of the legend, which leaves out empty ones.
    pub series: Vec<Series>,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Quantity and its unit.
    pub label: String,
    /// Whether the axis is logarithmic. Values not above zero are not drawn then.
    pub is_log: bool,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points in any order.
    pub points: Vec<Point>,
}

/// A point of a line. One that is not finite leaves a gap.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// Position on the horizontal axis.
    pub x: f64,
    /// Position on the vertical axis, with whiskers from `low` to `high`.
    pub y: Estimate,
}

impl Axis {
    /// A linear axis.
    #[must_use]
    pub fn linear(label: &str) -> Self {
        Self { label: label.to_owned(), is_log: false }
    }

    /// A logarithmic axis.
    #[must_use]
    pub fn log(label: &str) -> Self {
        Self { label: label.to_owned(), is_log: true }
    }

    /// The horizontal axis for [`Series::distribution`].
    #[must_use]
    pub fn percent_of(samples: &str) -> Self {
        Self::linear(&format!("% of the {samples} that are no larger"))
    }
}

impl Series {
    /// The distribution of samples: for each twentieth of them, the largest.
    #[must_use]
    pub fn distribution(name: impl Into<String>, samples: impl IntoIterator<Item = f64>) -> Self {
        let steps: [usize; 21] = std::array::from_fn(|step| step * 50);
        let points = percentiles(samples, steps).into_iter().flat_map(|values| {
            let exactly = |y| Estimate { median: y, low: y, high: y };
            steps.into_iter().zip(values).map(move |(permille, y)| Point { x: permille as f64 / 10.0, y: exactly(y) })
        });
        Self { name: name.into(), points: points.collect() }
    }

    /// A distribution limited to the tenth to ninetieth percentile.
    #[must_use]
    pub fn without_ends(mut self) -> Self {
        self.points.retain(|point| (10.0..=90.0).contains(&point.x));
        self
    }
}

impl Chart {
    /// The chart as an SVG document.
    #[must_use]
    pub fn svg(&self) -> String {
        let longest = self.drawn().map(|series| series.name.chars().count()).max().unwrap_or(0);
        let legend_width = LEGEND_GAP + LEGEND_KEY + longest as f64 * CHARACTER_WIDTH + LEGEND_GAP;
        let legend_height = LEGEND_ROW * self.drawn().count() as f64;
        let width = LEFT + AREA_WIDTH + legend_width;
        let height = TOP + AREA_HEIGHT.max(legend_height) + BOTTOM;
        let title = escape(&self.title);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" font-family=\"sans-serif\" font-size=\"12\" \
             fill=\"#222222\">\n<title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        text(&mut svg, (LEFT, 26.0), "start", "font-size=\"15\" font-weight=\"bold\"", &self.title);
        match self.scales() {
            Some(scales) => self.draw(&mut svg, &scales),
            None => text(&mut svg, (LEFT + AREA_WIDTH / 2.0, TOP + AREA_HEIGHT / 2.0), "middle", "", "no data"),
        }
        push(
            &mut svg,
            format_args!(
                "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{AREA_WIDTH}\" height=\"{AREA_HEIGHT}\" fill=\"none\" \
                 stroke=\"#666666\"/>"
            ),
        );
        self.draw_axis_labels(&mut svg);
        self.draw_legend(&mut svg);
        svg.push_str("</svg>\n");
        svg
    }

    /// JSON of the chart for a file of results.
    #[must_use]
    pub fn json(&self) -> Value {
        let axis = |axis: &Axis| json!({"label": axis.label, "is_log": axis.is_log});
        let point = |point: &Point| json!({"x": point.x, "y": point.y.json()});
        let points = |points: &[Point]| points.iter().map(point).collect::<Vec<_>>();
        let series = |series: &Series| json!({"name": series.name, "points": points(&series.points)});
        json!({
            "name": self.name, "title": self.title, "x": axis(&self.x), "y": axis(&self.y),
            "series": self.series.iter().map(series).collect::<Vec<_>>(),
        })
    }

    /// Both axes; `None` when the chart is empty.
    fn scales(&self) -> Option<(Scale, Scale)> {
        let points = || self.series.iter().flat_map(|series| &series.points).filter(|point| self.is_drawable(point));
        let x = Scale::of_places(points().map(|point| point.x), self.x.is_log, AREA_WIDTH)?;
        let y = Scale::of_sizes(points().flat_map(|Point { y, .. }| [y.median, y.low, y.high]), self.y.is_log)?;
        Some((x, y))
    }

    /// The lines that have any point on the chart.
    fn drawn(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| series.points.iter().any(|point| self.is_drawable(point)))
    }

    fn is_drawable(&self, point: &Point) -> bool {
        let fits = |value: f64, axis: &Axis| value.is_finite() && (value > 0.0 || !axis.is_log);
        fits(point.x, &self.x) && fits(point.y.median, &self.y)
    }

    fn draw(&self, svg: &mut String, scales: &(Scale, Scale)) {
        draw_grid(svg, scales);
        for (number, series) in self.drawn().enumerate() {
            let mut points = series.points.clone();
            points.sort_by(|one, other| one.x.total_cmp(&other.x));
            let style = Style::of(number);
            for part in points.split(|point| !self.is_drawable(point)) {
                draw_part(svg, scales, &style, part);
            }
        }
    }

    fn draw_axis_labels(&self, svg: &mut String) {
        let (middle, bottom) = (LEFT + AREA_WIDTH / 2.0, TOP + AREA_HEIGHT);
        text(svg, (middle, bottom + 42.0), "middle", "", &self.x.label);
        let (x, y) = (18.0, TOP + AREA_HEIGHT / 2.0);
        text(svg, (x, y), "middle", &format!("transform=\"rotate(-90 {x} {y})\""), &self.y.label);
    }

    fn draw_legend(&self, svg: &mut String) {
        let left = LEFT + AREA_WIDTH + LEGEND_GAP;
        for (number, series) in self.drawn().enumerate() {
            let (style, y) = (Style::of(number), TOP + 10.0 + LEGEND_ROW * number as f64);
            style.line(svg, &[(left, y), (left + LEGEND_KEY - 10.0, y)]);
            style.marker(svg, (left + (LEGEND_KEY - 10.0) / 2.0, y));
            text(svg, (left + LEGEND_KEY, y + 4.0), "start", "", &series.name);
        }
    }
}

fn draw_grid(svg: &mut String, (x, y): &(Scale, Scale)) {
    let (right, bottom) = (LEFT + AREA_WIDTH, TOP + AREA_HEIGHT);
    let line = |svg: &mut String, from: (f64, f64), to: (f64, f64)| {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(coordinate);
        push(svg, format_args!("<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"#dddddd\"/>"));
    };
    for &value in &x.grid {
        line(svg, (x_of(x, value), TOP), (x_of(x, value), bottom));
    }
    for tick in &x.ticks {
        text(svg, (x_of(x, tick.value), bottom + 18.0), "middle", "", &tick.label);
    }
    for &value in &y.grid {
        line(svg, (LEFT, y_of(y, value)), (right, y_of(y, value)));
    }
    for tick in &y.ticks {
        text(svg, (LEFT - 8.0, y_of(y, tick.value) + 4.0), "end", "", &tick.label);
    }
}

/// Draws consecutive points without a gap between them.
fn draw_part(svg: &mut String, (x, y): &(Scale, Scale), style: &Style, points: &[Point]) {
    let places = points.iter().map(|point| (x_of(x, point.x), y_of(y, point.y.median))).collect::<Vec<_>>();
    if places.len() > 1 {
        style.line(svg, &places);
    }
    for (point, &place) in points.iter().zip(&places) {
        let Estimate { low, high, .. } = point.y;
        if low < high && low.is_finite() && high.is_finite() {
            style.whisker(svg, place.0, y_of(y, low), y_of(y, high));
        }
        style.marker(svg, place);
    }
}

fn x_of(scale: &Scale, value: f64) -> f64 {
    LEFT + AREA_WIDTH * scale.part(value)
}

fn y_of(scale: &Scale, value: f64) -> f64 {
    TOP + AREA_HEIGHT * (1.0 - scale.part(value))
}

/// Colour and marker of a line; the first 49 combinations differ.
struct Style {
    colour: &'static str,
    marker: usize,
}

impl Style {
    fn of(number: usize) -> Self {
        let count = COLOURS.len();
        let colour = COLOURS.get(number % count).copied().unwrap_or("#000000");
        Self { colour, marker: (number + number / count) % count }
    }

    fn line(&self, svg: &mut String, places: &[(f64, f64)]) {
        let points = places.iter().map(|&(x, y)| format!("{},{}", coordinate(x), coordinate(y))).collect::<Vec<_>>();
        let (colour, points) = (self.colour, points.join(" "));
        push(
            svg,
            format_args!("<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"/>"),
        );
    }

    fn whisker(&self, svg: &mut String, x: f64, low: f64, high: f64) {
        let [left, right, x, low, high] = [x - MARKER, x + MARKER, x, low, high].map(coordinate);
        let path = format!("M{left} {low}H{right}M{x} {low}V{high}M{left} {high}H{right}");
        push(svg, format_args!("<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.2\"/>", self.colour));
    }

    fn marker(&self, svg: &mut String, (x, y): (f64, f64)) {
        let path = match self.marker {
            0 => return self.circle(svg, (x, y)),
            1 => "m-4 -4h8v8h-8z",
            2 => "m0 -5l5 5l-5 5l-5 -5z",
            3 => "m0 -5l5 9h-10z",
            4 => "m0 5l5 -9h-10z",
            5 => "m-4 -4l8 8m0 -8l-8 8",
            _ => "m0 -5v10m-5 -5h10",
        };
        let (x, y, colour) = (coordinate(x), coordinate(y), self.colour);
        push(
            svg,
            format_args!("<path d=\"M{x} {y}{path}\" fill=\"{colour}\" stroke=\"{colour}\" stroke-width=\"1.8\"/>"),
        );
    }

    fn circle(&self, svg: &mut String, (x, y): (f64, f64)) {
        let (x, y, colour) = (coordinate(x), coordinate(y), self.colour);
        push(svg, format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"{MARKER}\" fill=\"{colour}\"/>"));
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, attributes: &str, text: &str) {
    let (x, y, text) = (coordinate(x), coordinate(y), escape(text));
    let space = if attributes.is_empty() { "" } else { " " };
    push(svg, format_args!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\"{space}{attributes}>{text}</text>"));
}

/// Appends a line to the document.
fn push(svg: &mut String, element: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    writeln!(svg, "{element}").ok();
}

/// A coordinate to a tenth of a px, without a negative zero.
fn coordinate(value: f64) -> String {
    format!("{}", (value * 10.0).round() / 10.0 + 0.0)
}

/// Text escaped for XML, without control characters, which XML cannot express.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars().filter(|char| !char.is_control() && !matches!(char, '\u{fffe}' | '\u{ffff}')) {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exactly(value: f64) -> Estimate {
        Estimate { median: value, low: value, high: value }
    }

    fn chart(is_log: bool, series: &[(&str, &[(f64, f64)])]) -> Chart {
        let of = |&(name, points): &(&str, &[(f64, f64)])| Series {
            name: name.to_owned(),
            points: points.iter().map(|&(x, y)| Point { x, y: exactly(y) }).collect(),
        };
        Chart {
            name: "n".to_owned(),
            title: "Title".to_owned(),
            x: Axis { label: "Services".to_owned(), is_log },
            y: Axis { label: "ms".to_owned(), is_log },
            series: series.iter().map(of).collect(),
        }
    }

    /// Checks that every element is closed and every attribute quoted, which suffices for these documents.
    fn assert_well_formed(svg: &str) {
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("-0\""), "{svg}");
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1).map(|rest| rest.split_once('>').unwrap().0) {
            assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split(' ').next().unwrap());
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn each_series_has_its_line_its_markers_and_its_name() {
        let svg = chart(false, &[("one", &[(1.0, 2.0), (2.0, 3.0)]), ("two", &[(1.0, 5.0), (2.0, 4.0)])]).svg();
        assert_well_formed(&svg);
        assert_eq!(svg.matches("<polyline").count(), 4, "two lines, two keys of the legend");
        assert_eq!(svg.matches("<circle").count(), 3, "the first series' points and its key");
        assert_eq!(svg.matches("h8v8h-8z").count(), 3, "the second series' points and its key");
        assert!(svg.contains(">one</text>") && svg.contains(">Services</text>") && svg.contains(">ms</text>"));
    }

    #[test]
    fn a_distribution_goes_from_the_smallest_to_the_largest() {
        let series = Series::distribution("one", (1..=40).rev().map(f64::from));
        let points = series.points.iter().map(|point| (point.x, point.y.median)).collect::<Vec<_>>();
        assert_eq!((points.len(), points[0], points[1], points[20]), (21, (0.0, 1.0), (5.0, 2.0), (100.0, 40.0)));
        assert!(Series::distribution("none", []).points.is_empty());
        let points = series.without_ends().points;
        assert_eq!((points.len(), points[0].x, points[16].x), (17, 10.0, 90.0));
    }

    #[test]
    fn whiskers_are_drawn_where_there_is_an_interval() {
        let mut chart = chart(false, &[("one", &[(1.0, 2.0), (2.0, 3.0)])]);
        assert!(!chart.svg().contains("<path"));
        chart.series[0].points[0].y = Estimate { median: 2.0, low: 1.0, high: 4.0 };
        chart.series[0].points[1].y = Estimate { median: 3.0, low: f64::NAN, high: 4.0 };
        let svg = chart.svg();
        assert_well_formed(&svg);
        assert_eq!(svg.matches("<path").count(), 1);
    }

    #[test]
    fn nothing_one_point_and_what_is_no_number_are_drawn_as_well() {
        for is_log in [false, true] {
            assert_well_formed(&chart(is_log, &[]).svg());
            let empty = chart(is_log, &[("one", &[])]).svg();
            assert!(empty.contains(">no data</text>"));
            assert_well_formed(&chart(is_log, &[("one", &[(5.0, 5.0)])]).svg());
            assert_well_formed(&chart(is_log, &[("one", &[(0.0, 0.0)])]).svg());
            assert_well_formed(&chart(is_log, &[("one", &[(1.0, 1e300), (2.0, 1e-300), (1e9, -1e9)])]).svg());
            let odd = [(1.0, f64::NAN), (f64::NAN, 1.0), (2.0, f64::INFINITY)];
            let svg = chart(is_log, &[("one", &odd)]).svg();
            assert!(svg.contains(">no data</text>"));
            assert_well_formed(&svg);
        }
    }

    #[test]
    fn a_point_that_is_missing_leaves_a_gap() {
        let points = [(1.0, 1.0), (2.0, 1.0), (3.0, f64::NAN), (4.0, 1.0), (5.0, 1.0)];
        let svg = chart(false, &[("one", &points)]).svg();
        assert_eq!(svg.matches("<polyline").count(), 3, "two parts and the key");
    }

    #[test]
    fn a_line_without_a_point_on_the_chart_is_not_in_the_legend() {
        let below = chart(true, &[("below", &[(1.0, -1.0)]), ("one", &[(1.0, 1.0)])]);
        assert_eq!(below.svg(), chart(true, &[("one", &[(1.0, 1.0)])]).svg());
    }

    #[test]
    fn text_is_escaped() {
        let mut chart = chart(false, &[("a<b> & \"c\"\u{1}", &[(1.0, 1.0)])]);
        chart.title = "</title><script>".to_owned();
        let svg = chart.svg();
        assert_well_formed(&svg);
        assert!(svg.contains("a&lt;b&gt; &amp; &quot;c&quot;</text>") && !svg.contains("<script"));
    }

    #[test]
    fn the_order_of_points_does_not_matter() {
        let there = chart(true, &[("one", &[(1.0, 2.0), (10.0, 3.0)])]);
        let back = chart(true, &[("one", &[(10.0, 3.0), (1.0, 2.0)])]);
        assert_eq!(there.svg(), back.svg());
        assert_eq!(there.svg(), there.clone().svg());
    }

    #[test]
    fn many_lines_look_different() {
        let looks = (0..49).map(Style::of).map(|style| (style.colour, style.marker));
        assert_eq!(looks.collect::<std::collections::HashSet<_>>().len(), 49);
    }

    #[test]
    fn the_data_are_in_the_result() {
        let json = chart(true, &[("one", &[(1.0, 2.0)])]).json();
        assert_eq!(json.pointer("/series/0/points/0/y/median"), Some(&Value::from(2.0)));
        assert_eq!(json.pointer("/x/is_log"), Some(&Value::from(true)));
    }
}
