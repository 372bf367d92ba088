//! Charts as SVG, drawn from cells of the results: lines over a logarithmic axis with their names at their ends, or
//! bars with their values. Pure.
//!
//! The same chart always has the same bytes. Colours are classes, so that a viewer's dark mode has its own, on a
//! background that belongs to the chart. Each name has one colour in all charts; lines also differ by their markers.

use std::fmt::Write as _;

use super::results::{Estimate, grouped};

/// Width in px. At 400 px, the text is still 10 px high.
const WIDTH: f64 = 600.0;
/// Height of the plot area of lines.
const LINES_HEIGHT: f64 = 260.0;
/// Top of the plot area, below title and quantity.
const TOP: f64 = 66.0;
/// Room for the ticks of the axis and its name.
const BOTTOM: f64 = 56.0;
/// Room for the ticks beside lines, and for the names at their ends.
const LINES_LEFT: f64 = 56.0;
const LINES_RIGHT: f64 = 124.0;
/// Characters of a name that fit there in one line.
const LABEL_CHARS_MAX: usize = 14;
/// Room for the names beside bars, and for the values at their ends.
const BARS_LEFT: f64 = 182.0;
const BARS_RIGHT: f64 = 66.0;
/// Heights of a bar with its gap, of a heading, and of a line of text.
const BAR: f64 = 22.0;
const HEADING: f64 = 28.0;
const LINE: f64 = 17.0;
/// Distance of the names of two lines.
const GAP: f64 = 3.0;

/// Names with their colours for a light and a dark background.
const COLOURS: [(&str, &str, &str); 10] = [
    ("cproxy", "#0067a8", "#58b4f5"),
    ("kube-proxy, iptables", "#c04f00", "#ff9b5c"),
    ("kube-proxy, nftables", "#007a58", "#45cfa5"),
    ("kube-proxy, IPVS", "#a63f78", "#f09cc8"),
    ("direct", "#6b7280", "#a8b0bb"),
    ("cproxy, round robin", "#3f9bd8", "#a9d8fb"),
    ("nftables, set", "#7a5cc8", "#b9a5f5"),
    ("iptables, ipset", "#8a6a00", "#e3c04d"),
    ("iptables, rules", "#a1122a", "#ff8a94"),
    ("kube-network-policies", "#3c6e1f", "#8fd16a"),
];

const STYLE: &str = "\
text{font:15px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1f2328}\
.t{font-weight:600;font-size:17px}.q,.k{fill:#57606a}.k{font-size:14px}.h{font-weight:600}\
.g{stroke:#d8dee4}.o{stroke:#57606a;stroke-dasharray:4 3}.w{stroke:#1f2328;stroke-width:1.5}.b{fill:#fff}\
.v{paint-order:stroke;stroke:#fff;stroke-width:4px}\
polyline{fill:none;stroke-linejoin:round}";
const DARK_STYLE: &str = "\
text{fill:#e6edf3}.q,.k{fill:#9da7b1}.g{stroke:#30363d}.o{stroke:#9da7b1}.w{stroke:#e6edf3}.b{fill:#0d1117}\
.v{stroke:#0d1117}";

/// A chart, with the cells of one quantity.
pub(super) struct Chart {
    /// Heading above the chart.
    pub(super) title: String,
    /// The quantity with its unit.
    pub(super) quantity: String,
    pub(super) kind: Kind,
    /// Groups of bars, or places on the horizontal axis.
    pub(super) rows: Vec<String>,
    /// Bars of a group, or lines, each with a cell for each row.
    pub(super) series: Vec<(String, Vec<Option<Estimate>>)>,
}

/// How the cells are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Horizontal bars.
    Bars,
    /// Lines over numbers, with the name of their axis.
    Lines(&'static str),
}

impl Chart {
    /// The chart as an SVG document.
    pub(super) fn svg(&self) -> String {
        let (body, height) = match self.kind {
            Kind::Bars => self.bars(),
            Kind::Lines(axis) => self.lines(axis),
        };
        let (title, quantity) = (escaped(&self.title), escaped(&self.quantity));
        let (mut light, mut dark) = (STYLE.to_owned(), DARK_STYLE.to_owned());
        for (number, (_, on_light, on_dark)) in COLOURS.iter().enumerate() {
            for (style, colour) in [(&mut light, on_light), (&mut dark, on_dark)] {
                style.push_str(&format!(".f{number}{{fill:{colour}}}.s{number}{{stroke:{colour}}}"));
            }
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{title}: {quantity}</title>\n<style>{light}\n\
             @media(prefers-color-scheme:dark){{{dark}}}</style>\n<rect class=\"b\" width=\"100%\" height=\"100%\"/>\n\
             <text class=\"t\" x=\"12\" y=\"26\">{title}</text>\n\
             <text class=\"q\" x=\"12\" y=\"48\">{quantity}</text>\n\
             {body}</svg>\n"
        )
    }

    fn sizes(&self) -> impl Iterator<Item = f64> {
        let all = self.series.iter().flat_map(|(_, cells)| cells).flatten();
        all.flat_map(|cell| [cell.low, cell.median, cell.high])
    }

    /// A group of bars for each row.
    fn bars(&self) -> (String, f64) {
        let scale = Scale::of(self.sizes().chain([0.0]));
        let width = WIDTH - BARS_LEFT - BARS_RIGHT;
        let x = |value: f64| BARS_LEFT + scale.share(value) * width;
        let (mut bars, mut y) = (String::new(), TOP);
        for (number, row) in self.rows.iter().enumerate() {
            let cells = self.series.iter().enumerate();
            let cells = cells.filter_map(|(series, (name, cells))| Some((series, name, cells.get(number)?.as_ref()?)));
            let cells: Vec<_> = cells.collect();
            if cells.is_empty() {
                continue;
            }
            y += HEADING;
            write_text(&mut bars, "h", (12.0, y - 8.0), "start", row);
            for (series, name, cell) in cells {
                let (end, colour) = (x(cell.median), colour(series, name));
                let (left, length, middle) = (end.min(x(0.0)), (end - x(0.0)).abs(), y + BAR / 2.0);
                writeln!(
                    bars,
                    "<rect class=\"f{colour}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{length:.1}\" height=\"{:.1}\"/>",
                    y + 3.0,
                    BAR - 6.0
                )
                .ok();
                let is_wide = x(cell.high) - x(cell.low) > 3.0;
                if is_wide {
                    write_line(&mut bars, "w", (x(cell.low), middle), (x(cell.high), middle));
                }
                write_text(&mut bars, "", (BARS_LEFT - 8.0, middle + 5.0), "end", name);
                let after = if is_wide { x(cell.high).max(end) } else { end.max(x(0.0)) };
                write_text(&mut bars, "v", (after + 6.0, middle + 5.0), "start", &cell.text);
                y += BAR;
            }
        }
        let mut axis = String::new();
        for tick in &scale.ticks {
            write_line(&mut axis, "g", (x(*tick), TOP), (x(*tick), y + 6.0));
            write_text(&mut axis, "k", (x(*tick), y + 22.0), "middle", &grouped(*tick));
        }
        if self.quantity.contains("ratio") && scale.has(1.0) {
            write_line(&mut axis, "o", (x(1.0), TOP), (x(1.0), y + 6.0));
        }
        (axis + &bars, y + 36.0)
    }

    /// A line for each series. The first is drawn last and thinnest, so that it is seen on others with the same values.
    fn lines(&self, axis: &str) -> (String, f64) {
        let scale = Scale::of(self.sizes());
        let places: Vec<f64> = self.rows.iter().map(|row| row.replace(',', "").parse().unwrap_or(1.0)).collect();
        let logs: Vec<f64> = places.iter().map(|place| place.log10()).collect();
        let (first, last) = ends(logs.iter().copied()).unwrap_or((0.0, 1.0));
        let width = WIDTH - LINES_LEFT - LINES_RIGHT;
        let x = |log: f64| LINES_LEFT + 16.0 + (log - first) / (last - first).max(1e-9) * (width - 16.0);
        let y = |value: f64| TOP + (1.0 - scale.share(value)) * LINES_HEIGHT;
        let (right, bottom) = (WIDTH - LINES_RIGHT, TOP + LINES_HEIGHT);
        let mut text = String::new();
        for tick in &scale.ticks {
            write_line(&mut text, "g", (LINES_LEFT, y(*tick)), (right, y(*tick)));
            write_text(&mut text, "k", (LINES_LEFT - 8.0, y(*tick) + 5.0), "end", &grouped(*tick));
        }
        for (place, log) in places.iter().zip(&logs) {
            write_line(&mut text, "g", (x(*log), bottom), (x(*log), bottom + 5.0));
            write_text(&mut text, "k", (x(*log), bottom + 20.0), "middle", &short(*place));
        }
        write_text(&mut text, "q", ((LINES_LEFT + right) / 2.0, bottom + 42.0), "middle", axis);
        if self.quantity.contains("ratio") && scale.has(1.0) {
            write_line(&mut text, "o", (LINES_LEFT, y(1.0)), (right, y(1.0)));
        }
        let mut labels = Vec::new();
        for (number, (name, cells)) in self.series.iter().enumerate().rev() {
            let points = logs.iter().zip(cells).filter_map(|(log, cell)| Some((x(*log), cell.as_ref()?)));
            let points: Vec<_> = points.collect();
            let Some((end, cell)) = points.last() else { continue };
            let colour = colour(number, name);
            labels.push((y(cell.median), end + 12.0, name, colour));
            let thickness = 2.5 + number as f64;
            for (x, cell) in points.iter().filter(|(_, cell)| y(cell.low) - y(cell.high) > 2.0) {
                write_line(&mut text, &format!("s{colour}"), (*x, y(cell.low)), (*x, y(cell.high)));
            }
            let line: Vec<_> = points.iter().map(|(x, cell)| format!("{x:.1},{:.1}", y(cell.median))).collect();
            let line = line.join(" ");
            writeln!(text, "<polyline class=\"s{colour}\" stroke-width=\"{thickness}\" points=\"{line}\"/>").ok();
            let markers: String = points.iter().map(|(x, cell)| marker(number, *x, y(cell.median))).collect();
            writeln!(text, "<path class=\"f{colour}\" d=\"{markers}\"/>").ok();
        }
        write_labels(&mut text, labels);
        (text, bottom + BOTTOM)
    }
}

/// A name in one line or two: parted behind its comma, or its last hyphen if it is long.
fn halves(name: &str) -> (&str, Option<&str>) {
    let at = match name.find(", ") {
        Some(comma) => Some(comma + 1),
        None if name.len() > LABEL_CHARS_MAX => name.rfind('-').map(|hyphen| hyphen + 1),
        None => None,
    };
    at.and_then(|at| name.split_at_checked(at)).map_or((name, None), |(one, other)| (one, Some(other.trim_start())))
}

/// Writes names at the ends of lines, apart from each other.
fn write_labels(text: &mut String, mut labels: Vec<(f64, f64, &String, usize)>) {
    labels.sort_by(|one, other| one.0.total_cmp(&other.0));
    let height = |name: &str| if halves(name).1.is_some() { 2.0 * LINE } else { LINE };
    let total: f64 = labels.iter().map(|(_, _, name, _)| height(name) + GAP).sum();
    let mut free = f64::NEG_INFINITY;
    let mut left = total;
    for (y, x, name, colour) in labels {
        // No label lies on the one above, and those below have room.
        let top = (y - height(name) / 2.0).max(free).min(TOP + LINES_HEIGHT + LINE - left);
        (free, left) = (top + height(name) + GAP, left - height(name) - GAP);
        let (first, second) = halves(name);
        let class = format!("f{colour}");
        write_text(text, &class, (x, top + LINE - 4.0), "start", first);
        if let Some(second) = second {
            write_text(text, &class, (x, top + 2.0 * LINE - 4.0), "start", second);
        }
    }
}

/// A linear axis that begins and ends at a tick.
struct Scale {
    ticks: Vec<f64>,
}

impl Scale {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        const STEPS_MAX: f64 = 6.0;
        let (low, high) = ends(values.filter(|value| value.is_finite())).unwrap_or((0.0, 1.0));
        let range = if high > low { high - low } else { low.abs().max(1.0) };
        let decade = 10f64.powf((range / STEPS_MAX).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * decade).into_iter();
        let count = |step: f64| (high / step - 1e-9).ceil() - (low / step + 1e-9).floor();
        let step = step.clone().find(|step| count(*step) <= STEPS_MAX).unwrap_or(10.0 * decade);
        let first = (low / step + 1e-9).floor();
        let ticks = 0..=(count(step).max(1.0) as u32);
        Self { ticks: ticks.map(|tick| (first + f64::from(tick)) * step).collect() }
    }

    fn ends(&self) -> (f64, f64) {
        (self.ticks.first().copied().unwrap_or(0.0), self.ticks.last().copied().unwrap_or(1.0))
    }

    fn has(&self, value: f64) -> bool {
        (self.ends().0..=self.ends().1).contains(&value)
    }

    /// The value's place between the first tick and the last, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let (first, last) = self.ends();
        (value - first) / (last - first)
    }
}

/// Number of a series' colour. What is no peer has those of cproxy.
fn colour(number: usize, name: &str) -> usize {
    COLOURS.iter().position(|(of, ..)| *of == name).unwrap_or(if number == 0 { 0 } else { 5 })
}

/// A marker's outline around a point.
fn marker(number: usize, x: f64, y: f64) -> String {
    match number % 4 {
        0 => format!("M{:.1},{y:.1}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z", x - 5.0),
        1 => format!("M{:.1},{:.1}h10v10h-10z", x - 5.0, y - 5.0),
        2 => format!("M{x:.1},{:.1}l7,7l-7,7l-7,-7z", y - 7.0),
        _ => format!("M{x:.1},{:.1}l7,12h-14z", y - 7.0),
    }
}

fn write_text(to: &mut String, class: &str, (x, y): (f64, f64), anchor: &str, text: &str) {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    let anchor = if anchor == "start" { String::new() } else { format!(" text-anchor=\"{anchor}\"") };
    writeln!(to, "<text{class}{anchor} x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(text)).ok();
}

fn write_line(to: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    writeln!(to, "<path class=\"{class}\" d=\"M{x1:.1},{y1:.1}L{x2:.1},{y2:.1}\"/>").ok();
}

fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |ends, value| {
        let (low, high) = ends.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

/// A number in few characters.
fn short(value: f64) -> String {
    if value >= 10_000.0 { format!("{}k", grouped(value / 1_000.0)) } else { grouped(value) }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(median: f64) -> Option<Estimate> {
        Some(Estimate { median, low: median, high: median, text: grouped(median) })
    }

    fn chart(kind: Kind, rows: &[&str], series: &[(&str, &[Option<Estimate>])]) -> String {
        let series = series.iter().map(|(name, cells)| ((*name).to_owned(), cells.to_vec())).collect();
        let rows = rows.iter().map(|row| (*row).to_owned()).collect();
        let chart = Chart { title: "Title <1>".into(), quantity: "time (ms)".into(), kind, rows, series };
        let svg = chart.svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains(">Title &lt;1></text>"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(svg, chart.svg());
        svg
    }

    const LINES: Kind = Kind::Lines("Services");

    #[test]
    fn a_name_has_its_colour_in_every_chart() {
        let name = "kube-proxy, nftables";
        let one: &[_] = &[estimate(1.0), estimate(2.0)];
        for svg in
            [chart(LINES, &["10", "100"], &[(name, one)]), chart(Kind::Bars, &["a", "b"], &[("x", one), (name, one)])]
        {
            assert!(svg.contains("class=\"f2\"") || svg.contains("class=\"s2\""), "{svg}");
        }
        assert!(STYLE.contains(".b{fill:#fff}") && DARK_STYLE.contains(".b{fill:#0d1117}"));
    }

    #[test]
    fn lines_have_their_names_at_their_ends_and_gaps_where_cells_are_missing() {
        let svg = chart(
            LINES,
            &["10", "1,000", "20,000"],
            &[
                ("cproxy", &[estimate(1.0), estimate(1.0), estimate(1.0)]),
                ("a, b", &[estimate(1.5), estimate(2.0), None]),
            ],
        );
        let points = |class: &str| {
            let line = svg.lines().find(|line| line.starts_with(&format!("<polyline class=\"{class}\""))).unwrap();
            line.split_once("points=\"").unwrap().1.split(' ').count()
        };
        assert_eq!((points("s0"), points("s5")), (3, 2));
        for text in [">cproxy</text>", ">a,</text>", ">b</text>", ">Services</text>", ">1,000</text>", ">20k</text>"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn names_of_lines_that_end_at_one_place_do_not_cover_each_other() {
        let same: &[_] = &[estimate(1.0), estimate(1.0)];
        let svg = chart(LINES, &["10", "100"], &[("one", same), ("two, 2", same), ("three", same)]);
        let height = |name: &str| {
            let line = svg.lines().find(|line| line.ends_with(&format!(">{name}</text>"))).unwrap();
            line.split_once(" y=\"").unwrap().1.split_once('"').unwrap().0.parse::<f64>().unwrap()
        };
        let mut heights = ["one", "two,", "2", "three"].map(height);
        heights.sort_by(f64::total_cmp);
        assert!(heights.windows(2).all(|pair| pair[1] - pair[0] >= LINE), "{heights:?}");
    }

    #[test]
    fn bars_have_their_values_and_a_heading_for_each_row_with_any() {
        let svg = chart(Kind::Bars, &["few", "many", "none"], &[("cproxy", &[estimate(0.0), estimate(1234.5), None])]);
        assert!(svg.contains(">0</text>") && svg.contains(">1,234.5</text>"), "{svg}");
        assert!(svg.contains(">many</text>") && !svg.contains(">none</text>"), "{svg}");
    }

    #[test]
    fn charts_of_nothing_of_one_value_and_of_extreme_values_are_drawn() {
        for kind in [Kind::Bars, LINES] {
            chart(kind, &[], &[]);
            chart(kind, &["1"], &[("a", &[None])]);
            chart(kind, &["1"], &[("a", &[estimate(5.0)])]);
            chart(kind, &["1", "2"], &[("a", &[estimate(1e12), estimate(-1e-12)])]);
        }
    }

    #[test]
    fn an_axis_has_few_round_ticks_around_its_values() {
        let ticks =
            |values: &[f64]| Scale::of(values.iter().copied()).ticks.into_iter().map(grouped).collect::<Vec<_>>();
        assert_eq!(ticks(&[1.01, 1.88]), ["1", "1.2", "1.4", "1.6", "1.8", "2"]);
        assert_eq!(ticks(&[0.0, 12_345.0]), ["0", "5,000", "10,000", "15,000"]);
        assert_eq!(ticks(&[0.75, 1.0]), ["0.75", "0.8", "0.85", "0.9", "0.95", "1"]);
    }
}
