//! Charts as SVG: lines with markers, whiskers for the interval of each point, and a legend beside them.
//!
//! The same chart always has the same bytes. It has a white background of its own for viewers with a dark one, and
//! colours that colour-blind readers can tell apart (those of Okabe and Ito), each with a different marker.

mod scale;

use anyhow::{Context as _, Result};
use plotters::{coord::Shift, prelude::*};
use scale::Scale;
use serde_json::{Value, json};

use crate::{paired::Estimate, summary::percentiles};

/// Size of the plot area with its title and axes, in px.
const WIDTH: u32 = 700;
const HEIGHT: u32 = 400;
/// Width of the legend without its names, and of a character of a name.
const LEGEND_WIDTH: u32 = 60;
const CHARACTER_WIDTH: u32 = 8;
/// Place of the first marker of the legend, and the distance of its rows.
const LEGEND_LEFT: i32 = 22;
const LEGEND_TOP: i32 = 46;
const LEGEND_ROW: i32 = 22;

const FONT: (&str, i32) = ("sans-serif", 16);
const TITLE_FONT: (&str, i32, FontStyle) = ("sans-serif", 19, FontStyle::Bold);

const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x00, 0x00),
];

/// Polygons around a point. Their number and that of the colours have no common divisor, so that 35 lines differ.
const MARKERS: [&[(i32, i32)]; 5] = [
    &[(-2, -5), (2, -5), (5, -2), (5, 2), (2, 5), (-2, 5), (-5, 2), (-5, -2)],
    &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
    &[(0, -6), (6, 0), (0, 6), (-6, 0)],
    &[(0, -6), (6, 5), (-6, 5)],
    &[(0, 6), (6, -5), (-6, -5)],
];

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

/// An unfinished SVG document.
type Drawing<'s> = DrawingArea<SVGBackend<'s>, Shift>;
/// The plot area of a chart.
type Plot<'s> = ChartContext<'s, SVGBackend<'s>, Cartesian2d<Scale, Scale>>;
/// Result of drawing on it.
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

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

    /// Whether the value has a place on the axis.
    fn has(&self, value: f64) -> bool {
        value.is_finite() && (value > 0.0 || !self.is_log)
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
    ///
    /// # Errors
    /// The library cannot draw it.
    pub fn svg(&self) -> Result<String> {
        let longest = self.drawn().map(|series| series.name.chars().count()).max().unwrap_or(0) as u32;
        let size = (WIDTH + LEGEND_WIDTH + CHARACTER_WIDTH * longest, HEIGHT);
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        self.draw(&root).with_context(|| format!("drawing the chart {}", self.name))?;
        // The text is borrowed until then.
        drop(root);
        Ok(svg)
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

    /// The lines that have any point on the chart.
    fn drawn(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|series| series.points.iter().any(|point| self.is_drawable(point)))
    }

    fn is_drawable(&self, point: &Point) -> bool {
        self.x.has(point.x) && self.y.has(point.y.median)
    }

    /// Both axes; `None` when the chart is empty.
    fn scales(&self) -> Option<(Scale, Scale)> {
        let points = || self.series.iter().flat_map(|series| &series.points).filter(|point| self.is_drawable(point));
        let sizes = points().flat_map(|Point { y, .. }| [y.median, y.low, y.high]).filter(|&size| self.y.has(size));
        Some((Scale::of_places(points().map(|point| point.x), self.x.is_log)?, Scale::of_sizes(sizes, self.y.is_log)?))
    }

    fn draw(&self, root: &Drawing<'_>) -> Drawn {
        root.fill(&WHITE)?;
        let Some((x, y)) = self.scales() else {
            root.titled(&self.title, TITLE_FONT)?.draw(&Text::new("no data", (80, 80), FONT))?;
            return root.present();
        };
        let (left, right) = root.split_horizontally(WIDTH);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, TITLE_FONT)
            .margin(10)
            .x_label_area_size(50)
            .y_label_area_size(76)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(FONT)
            .x_desc(&self.x.label)
            .y_desc(&self.y.label)
            .draw()?;
        for (number, series) in (0..).zip(self.drawn()) {
            let style = Style::of(number);
            self.draw_series(&mut chart, style, series)?;
            let line = PathElement::new([(-12, 0), (12, 0)], style.line());
            let name = Text::new(series.name.clone(), (20, -6), FONT);
            let place = (LEGEND_LEFT, LEGEND_TOP + LEGEND_ROW * number);
            right.draw(&(EmptyElement::at(place) + line + style.marker() + name))?;
        }
        root.present()
    }

    fn draw_series<'s>(&self, chart: &mut Plot<'s>, style: Style, series: &Series) -> Drawn {
        let mut points = series.points.clone();
        points.sort_by(|one, other| one.x.total_cmp(&other.x));
        let place = |point: &Point| (point.x, point.y.median);
        for part in points.split(|point| !self.is_drawable(point)) {
            chart.draw_series(LineSeries::new(part.iter().map(place), style.line()))?;
        }
        points.retain(|point| self.is_drawable(point));
        let has_interval = |Point { y, .. }: &&Point| y.low < y.high && self.y.has(y.low) && self.y.has(y.high);
        let whiskers = points.iter().filter(has_interval);
        chart.draw_series(
            whiskers.map(|&Point { x, y }| ErrorBar::new_vertical(x, y.low, y.median, y.high, style.colour, 8)),
        )?;
        chart.draw_series(points.iter().map(|point| EmptyElement::at(place(point)) + style.marker()))?;
        Ok(())
    }
}

/// Colour and marker of a line.
#[derive(Clone, Copy, Debug)]
struct Style {
    colour: RGBColor,
    corners: &'static [(i32, i32)],
}

impl Style {
    fn of(number: i32) -> Self {
        let number = usize::try_from(number).unwrap_or_default();
        let colour = COLOURS.get(number % COLOURS.len()).copied().unwrap_or(BLACK);
        let corners = MARKERS.get(number % MARKERS.len()).copied().unwrap_or_default();
        Self { colour, corners }
    }

    fn line(self) -> ShapeStyle {
        self.colour.stroke_width(2)
    }

    /// The marker, relative to the place of its element.
    fn marker(self) -> Polygon<(i32, i32)> {
        Polygon::new(self.corners, self.colour)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exactly(value: f64) -> Estimate {
        Estimate { median: value, low: value, high: value }
    }

    fn svg(chart: &Chart) -> String {
        let svg = chart.svg().unwrap();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
        svg
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

    #[test]
    fn each_series_has_its_line_its_markers_and_its_name() {
        let svg = svg(&chart(false, &[("one", &[(1.0, 2.0), (2.0, 3.0)]), ("two", &[(1.0, 5.0), (2.0, 4.0)])]));
        let polylines =
            |colour: &str| svg.lines().filter(|line| line.starts_with("<polyline") && line.contains(colour)).count();
        assert_eq!((polylines("#0072B2"), polylines("#D55E00")), (2, 2), "each has a line and a key in the legend");
        assert_eq!(svg.matches("<polygon").count(), 6, "each has two points and a key in the legend");
        for text in ["Title", "one", "two", "Services", "ms"] {
            assert!(svg.contains(&format!("\n{text}\n</text>")), "{text}: {svg}");
        }
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
        let whiskers = |chart: &Chart| svg(chart).matches("<circle").count();
        assert_eq!(whiskers(&chart), 0);
        chart.series[0].points[0].y = Estimate { median: 2.0, low: 1.0, high: 4.0 };
        chart.series[0].points[1].y = Estimate { median: 3.0, low: f64::NAN, high: 4.0 };
        assert_eq!(whiskers(&chart), 1);
    }

    #[test]
    fn a_chart_without_drawable_points_says_so() {
        let odd: &[(f64, f64)] = &[(1.0, f64::NAN), (f64::NAN, 1.0), (2.0, f64::INFINITY)];
        for points in [&[], odd] {
            for is_log in [false, true] {
                assert!(svg(&chart(is_log, &[("one", points)])).contains("no data"));
            }
        }
        assert!(svg(&chart(true, &[("one", &[(1.0, 0.0)])])).contains("no data"));
    }

    #[test]
    fn one_point_and_extreme_points_are_drawn() {
        for is_log in [false, true] {
            for points in [&[(5.0, 5.0)][..], &[(1.0, 1e300), (2.0, 1e-300), (1e9, 1.0)]] {
                let svg = svg(&chart(is_log, &[("one", points)]));
                assert!(svg.contains("<polygon") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn a_point_that_is_missing_leaves_a_gap() {
        let points = [(1.0, 1.0), (2.0, 1.0), (3.0, f64::NAN), (4.0, 1.0), (5.0, 1.0)];
        let svg = svg(&chart(false, &[("one", &points)]));
        assert_eq!(svg.matches("stroke=\"#0072B2\" stroke-width=\"2\"").count(), 3, "two parts and the key");
    }

    #[test]
    fn a_line_without_a_point_on_the_chart_is_not_in_the_legend() {
        let below = chart(true, &[("below", &[(1.0, -1.0)]), ("one", &[(1.0, 1.0)])]);
        assert_eq!(svg(&below), svg(&chart(true, &[("one", &[(1.0, 1.0)])])));
    }

    #[test]
    fn the_order_of_points_does_not_matter() {
        let there = chart(true, &[("one", &[(1.0, 2.0), (10.0, 3.0)])]);
        let back = chart(true, &[("one", &[(10.0, 3.0), (1.0, 2.0)])]);
        assert_eq!(svg(&there), svg(&back));
    }

    #[test]
    fn many_lines_look_different() {
        let looks = (0..35).map(Style::of).map(|Style { colour, corners }| (colour.0, colour.1, colour.2, corners));
        assert_eq!(looks.collect::<std::collections::HashSet<_>>().len(), 35);
    }

    #[test]
    fn the_data_are_in_the_result() {
        let json = chart(true, &[("one", &[(1.0, 2.0)])]).json();
        assert_eq!(json.pointer("/series/0/points/0/y/median"), Some(&Value::from(2.0)));
        assert_eq!(json.pointer("/x/is_log"), Some(&Value::from(true)));
    }
}
