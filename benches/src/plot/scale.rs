//! Scales of axes: positions of values, and round values for labels.

/// Approximate number of intervals between ticks.
const INTERVALS: f64 = 6.0;

/// Free share at both ends of an axis of places.
const MARGIN: f64 = 0.04;

/// Assumed width of a label's character, with the gap between two labels, in px.
const CHARACTER_WIDTH: f64 = 8.0;
const LABEL_GAP: f64 = 8.0;

/// An axis.
#[derive(Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    /// Values of the grid lines.
    pub(super) grid: Vec<f64>,
    /// Values beside the axis.
    pub(super) ticks: Vec<Tick>,
}

/// A value and its text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: String,
}

impl Scale {
    /// An axis of chosen values, such as numbers of Services. A logarithmic axis has these values themselves as labels,
    /// as far as there is room on `length_px`. `None` if there are no values.
    pub(super) fn of_places(values: impl Iterator<Item = f64>, is_log: bool, length_px: f64) -> Option<Self> {
        let mut values = usable(values, is_log);
        values.dedup();
        let (low, high) = (*values.first()?, *values.last()?);
        if !is_log {
            return Some(Self::linear(low, high));
        }
        let margin = if low < high { (high / low).powf(MARGIN) } else { 2.0 };
        let grid = powers(low / margin, high * margin, &[1.0]);
        let mut scale = Self { low: low / margin, high: high * margin, is_log, grid, ticks: Vec::new() };
        scale.ticks = scale.with_room(&values, length_px);
        Some(scale)
    }

    /// An axis of sizes. A linear axis begins at zero, a logarithmic one at a power of ten or two or five times one.
    /// `None` if there are no values.
    pub(super) fn of_sizes(values: impl Iterator<Item = f64>, is_log: bool) -> Option<Self> {
        let values = usable(values, is_log);
        let (low, high) = (*values.first()?, *values.last()?);
        if !is_log {
            return Some(Self::linear(low.min(0.0), high.max(0.0)));
        }
        let decades = (high / low).log10();
        let factors: &[f64] = if decades <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let (lowest, highest) = (10f64.powf(low.log10().floor()), 10f64.powf(high.log10().ceil()));
        let all = powers(lowest, highest * 1.001, factors);
        let below = all.iter().copied().rfind(|&value| value <= low * 1.000_001).unwrap_or(lowest);
        let above = all.iter().copied().find(|&value| value >= high * 0.999_999).unwrap_or(highest);
        // The range must not be empty if the only value is on a tick.
        let (below, above) = if below < above { (below, above) } else { (below / 10.0, above * 10.0) };
        let grid = powers(below, above * 1.000_001, factors);
        let step = (grid.len() / 12).max(1);
        let ticks = grid.iter().step_by(step).map(|&value| Tick { value, label: label(value, value) }).collect();
        Some(Self { low: below, high: above, is_log, grid, ticks })
    }

    /// A linear axis between two round values.
    fn linear(low: f64, high: f64) -> Self {
        // A single place gets an interval of its own size on both sides.
        let reach = if low.abs() > 0.0 { low.abs() } else { 1.0 };
        let (low, high) = if low < high { (low, high) } else { (low - reach, high + reach) };
        let step = step_for((high / INTERVALS) - (low / INTERVALS));
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        // Ticks are multiples of whole steps, so that rounding errors do not add up.
        let count = (last - first).clamp(1.0, 4.0 * INTERVALS) as u32;
        let grid: Vec<f64> = (0..=count).map(|number| (first + f64::from(number)) * step).collect();
        let ticks = grid.iter().map(|&value| Tick { value, label: label(value, step) }).collect();
        Self { low: first * step, high: last * step, is_log: false, grid, ticks }
    }

    /// Relative position of a value: 0 at the beginning, 1 at the end. Values outside are at the nearer end.
    pub(super) fn part(&self, value: f64) -> f64 {
        let place = |value: f64| if self.is_log { value.max(f64::MIN_POSITIVE).log10() } else { value };
        let (low, high) = (place(self.low), place(self.high));
        // Halved, since the whole range may exceed a float.
        let part = (place(value) / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0);
        if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Ticks of the values, without those that would touch the one before or the last.
    fn with_room(&self, values: &[f64], length_px: f64) -> Vec<Tick> {
        let ticks = values.iter().map(|&value| Tick { value, label: plain(value) }).collect::<Vec<_>>();
        let ends = |tick: &Tick| {
            let half = (tick.label.len() as f64 * CHARACTER_WIDTH + LABEL_GAP) / 2.0;
            let middle = self.part(tick.value) * length_px;
            (middle - half, middle + half)
        };
        let Some((last, others)) = ticks.split_last() else { return Vec::new() };
        let mut free = f64::NEG_INFINITY;
        let mut kept = Vec::new();
        for tick in others {
            let (left, right) = ends(tick);
            if left >= free && right <= ends(last).0 {
                free = right;
                kept.push(tick.clone());
            }
        }
        kept.push(last.clone());
        kept
    }
}

/// The values that the axis can show, in order.
fn usable(values: impl Iterator<Item = f64>, is_log: bool) -> Vec<f64> {
    let mut values = values.filter(|value| value.is_finite() && (*value > 0.0 || !is_log)).collect::<Vec<_>>();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `least`.
fn step_for(least: f64) -> f64 {
    let power = 10f64.powf(least.max(f64::MIN_POSITIVE).log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * 0.999_999).unwrap_or(10.0);
    factor * power
}

/// The powers of ten, times each of `factors`, from `low` to `high`.
fn powers(low: f64, high: f64, factors: &[f64]) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let all = (first..=last).flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    all.filter(|value| (low * 0.999_999..=high).contains(value)).collect()
}

/// Label of a value on an axis with ticks `step` apart.
fn label(value: f64, step: f64) -> String {
    let digits = (-step.abs().log10().floor()).clamp(0.0, 6.0) as usize;
    if (value.abs() > 0.0 && step < 1e-6) || value.abs() >= 1e6 { plain(value) } else { grouped(value, digits) }
}

/// A value with as many digits as it needs, but at most four after the point.
fn plain(value: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e12, " T"), (1e9, " G"), (1e6, " M")];
    let size = value.abs();
    if size >= 1e15 || (size > 0.0 && size < 1e-4) {
        return format!("{value:.0e}");
    }
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| size >= *unit).unwrap_or((1.0, ""));
    let text = grouped(value / unit, 4);
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{name}")
}

/// A value with commas between thousands.
fn grouped(value: f64, digits: usize) -> String {
    let text = format!("{:.digits$}", value.abs());
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let is_zero = text.chars().all(|char| matches!(char, '0' | '.'));
    let mut grouped = String::from(if value < 0.0 && !is_zero { "-" } else { "" });
    for (position, char) in whole.chars().enumerate() {
        if position > 0 && (whole.len() - position).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(char);
    }
    grouped + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    fn sizes(values: &[f64], is_log: bool) -> Scale {
        Scale::of_sizes(values.iter().copied(), is_log).unwrap()
    }

    fn places(values: &[f64], is_log: bool) -> Scale {
        Scale::of_places(values.iter().copied(), is_log, 560.0).unwrap()
    }

    #[test]
    fn ticks_are_round_and_begin_at_zero() {
        assert_eq!(labels(&sizes(&[3.0, 9.7], false)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(
            labels(&sizes(&[0.013, 0.027], false)),
            ["0.000", "0.005", "0.010", "0.015", "0.020", "0.025", "0.030"]
        );
        assert_eq!(labels(&sizes(&[12_345.0], false)), ["0", "5,000", "10,000", "15,000"]);
        assert_eq!(labels(&sizes(&[2.4e6], false)), ["0", "500,000", "1 M", "1.5 M", "2 M", "2.5 M"]);
        assert_eq!(labels(&sizes(&[-3.0, 2.0], false)), ["-3", "-2", "-1", "0", "1", "2"]);
    }

    #[test]
    fn places_need_not_begin_at_zero() {
        assert_eq!(labels(&places(&[2010.0, 2020.0], false)), ["2,010", "2,012", "2,014", "2,016", "2,018", "2,020"]);
    }

    #[test]
    fn a_logarithmic_axis_of_places_names_the_places() {
        let scale = places(&[1.0, 10.0, 50.0, 100.0, 10.0], true);
        assert_eq!(labels(&scale), ["1", "10", "50", "100"]);
        assert_eq!(scale.grid, [1.0, 10.0, 100.0]);
        assert!(scale.part(1.0) > 0.0 && scale.part(100.0) < 1.0);
        assert_eq!(labels(&places(&[5_000.0], true)), ["5,000"]);
    }

    #[test]
    fn places_that_would_touch_each_other_are_not_all_named() {
        let scale = places(&(1..=200).map(f64::from).collect::<Vec<_>>(), true);
        let labels = labels(&scale);
        assert_eq!((labels.first(), labels.last()), (Some(&"1"), Some(&"200")));
        assert!(labels.len() < 20, "{labels:?}");
    }

    #[test]
    fn a_logarithmic_axis_of_sizes_has_powers_of_ten() {
        assert_eq!(labels(&sizes(&[0.3, 4_000.0], true)), ["0.1", "1", "10", "100", "1,000", "10,000"]);
        assert_eq!(labels(&sizes(&[3.0, 40.0], true)), ["2", "5", "10", "20", "50"]);
        assert_eq!(labels(&sizes(&[10.0], true)), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(Scale::of_sizes([0.0, -1.0].into_iter(), true).map(|_| ()), None);
    }

    #[test]
    fn parts_go_from_one_end_to_the_other() {
        let linear = sizes(&[10.0], false);
        assert_eq!([0.0, 5.0, 10.0, 99.0, -1.0].map(|value| linear.part(value)), [0.0, 0.5, 1.0, 1.0, 0.0]);
        let log = sizes(&[1.0, 10_000.0], true);
        assert!((log.part(100.0) - 0.5).abs() < 1e-9 && log.part(0.0) == 0.0);
        assert_eq!(linear.part(f64::NAN), 0.0);
    }

    #[test]
    fn numbers_are_written_as_people_do() {
        assert_eq!(
            [0.0, 1.0, 0.25, 1234.5, 3.2e9, 0.000_01].map(plain),
            ["0", "1", "0.25", "1,234.5", "3.2 G", "1e-5"]
        );
        assert_eq!(grouped(-0.001, 1), "0.0");
    }
}
