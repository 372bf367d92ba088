//! Axes for plotters: ranges that begin and end at round values, with ticks where readers look for them. The library's
//! logarithmic axis has ticks at powers of ten alone, so that one from 1.1 to 1.9 has none.

use std::ops::Range;

use plotters::coord::{
    ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter},
    types::RangedCoordf64,
};

/// Largest number of ticks of a linear axis.
const TICKS_MAX: usize = 9;

/// Free share at both ends of a logarithmic axis of places, and the least distance of two labels there.
const MARGIN: f64 = 0.04;
const LABEL_DISTANCE: f64 = 0.08;

/// A linear or logarithmic axis.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    is_log: bool,
    /// First and last position: the value, or its logarithm.
    range: Range<f64>,
    /// Positions of the ticks.
    ticks: Vec<f64>,
}

impl Scale {
    /// An axis of chosen values, such as numbers of Services. A logarithmic axis has these values themselves as ticks,
    /// as far as there is room. `None` if there are no values.
    pub(super) fn of_places(values: impl Iterator<Item = f64>, is_log: bool) -> Option<Self> {
        let (positions, range) = positions(values, is_log)?;
        if !is_log {
            return Some(Self::linear(range));
        }
        let margin = (range.end - range.start) * MARGIN;
        let distance = (range.end - range.start) * LABEL_DISTANCE;
        let mut ticks = Vec::<f64>::new();
        for position in positions.into_iter().rev() {
            if ticks.last().is_none_or(|last| last - position > distance) {
                ticks.push(position);
            }
        }
        Some(Self { is_log, range: range.start - margin..range.end + margin, ticks })
    }

    /// An axis of sizes. A linear axis includes zero, a logarithmic one begins and ends at a tick. `None` if there are
    /// no values.
    pub(super) fn of_sizes(values: impl Iterator<Item = f64>, is_log: bool) -> Option<Self> {
        let (_, range) = positions(values, is_log)?;
        if !is_log {
            return Some(Self::linear(range.start.min(0.0)..range.end.max(0.0)));
        }
        let factors: &[f64] = if range.end - range.start <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let decades = range.start.floor() as i32..=range.end.ceil() as i32;
        let all = decades.flat_map(|decade| factors.iter().map(move |factor| factor.log10() + f64::from(decade)));
        let mut ticks = all.collect::<Vec<_>>();
        // Rounding must not exclude a value that is on a tick.
        let first = ticks.iter().rposition(|&tick| tick <= range.start + 1e-9).unwrap_or(0);
        let last = ticks.iter().position(|&tick| tick >= range.end - 1e-9).unwrap_or(ticks.len());
        ticks.truncate(last.max(first + 1) + 1);
        ticks.drain(..first);
        Some(Self { is_log, range: *ticks.first()?..*ticks.last()?, ticks })
    }

    /// A linear axis that begins and ends at a tick.
    fn linear(range: Range<f64>) -> Self {
        let ticks = RangedCoordf64::from(range.clone()).key_points(TICKS_MAX);
        let step = match ticks.as_slice() {
            [first, second, ..] => second - first,
            _ => 1.0,
        };
        let (first, last) = ((range.start / step).floor(), (range.end / step).ceil());
        let range = first * step..last * step;
        let ticks = RangedCoordf64::from(range.clone()).key_points(TICKS_MAX);
        Self { is_log: false, range, ticks }
    }

    fn value(&self, position: f64) -> f64 {
        if self.is_log { 10f64.powf(position) } else { position }
    }
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(&position(*value, self.is_log), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|&tick| self.value(tick)).collect()
    }

    fn range(&self) -> Range<f64> {
        self.value(self.range.start)..self.value(self.range.end)
    }
}

impl ValueFormatter<f64> for Scale {
    fn format(value: &f64) -> String {
        grouped(*value)
    }
}

fn position(value: f64, is_log: bool) -> f64 {
    if is_log { value.log10() } else { value }
}

/// The positions of values, in order, and a range that holds all of them and is not empty.
fn positions(values: impl Iterator<Item = f64>, is_log: bool) -> Option<(Vec<f64>, Range<f64>)> {
    let mut positions = values.map(|value| position(value, is_log)).collect::<Vec<_>>();
    positions.sort_unstable_by(f64::total_cmp);
    let (first, last) = (*positions.first()?, *positions.last()?);
    let range = if first < last { first..last } else { first - 0.5..last + 0.5 };
    Some((positions, range))
}

/// A value with at most four digits after the point and commas between thousands.
fn grouped(value: f64) -> String {
    let text = format!("{:.4}", value + 0.0);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (position, char) in whole.chars().enumerate() {
        if (whole.len() - position).is_multiple_of(3) && grouped.ends_with(|before: char| before.is_ascii_digit()) {
            grouped.push(',');
        }
        grouped.push(char);
    }
    grouped + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Option<Scale>) -> Vec<String> {
        let scale = scale.unwrap();
        assert!(scale.range.start < scale.range.end, "{scale:?}");
        scale.key_points(TICKS_MAX).iter().map(Scale::format).collect()
    }

    fn sizes(values: &[f64], is_log: bool) -> Vec<String> {
        labels(Scale::of_sizes(values.iter().copied(), is_log))
    }

    #[test]
    fn sizes_begin_at_zero_and_end_at_a_tick() {
        assert_eq!(sizes(&[3.0, 9.7], false), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(sizes(&[12_345.0], false), ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000", "14,000"]);
        assert_eq!(sizes(&[-3.0, 2.0], false), ["-3", "-2", "-1", "0", "1", "2"]);
    }

    #[test]
    fn logarithmic_sizes_have_round_ticks() {
        assert_eq!(sizes(&[0.3, 4_000.0], true), ["0.1", "1", "10", "100", "1,000", "10,000"]);
        assert_eq!(sizes(&[3.0, 40.0], true), ["2", "5", "10", "20", "50"]);
        assert_eq!(sizes(&[0.98, 1.9], true), ["0.5", "1", "2"]);
        assert_eq!(sizes(&[10.0], true), ["2", "5", "10", "20", "50"]);
    }

    #[test]
    fn logarithmic_places_are_their_own_ticks_where_there_is_room() {
        let places = |values: &mut dyn Iterator<Item = f64>| labels(Scale::of_places(values, true));
        assert_eq!(places(&mut [1.0, 10.0, 50.0, 100.0, 10.0].into_iter()), ["100", "50", "10", "1"]);
        assert_eq!(places(&mut [5_000.0].into_iter()), ["5,000"]);
        let many = places(&mut (1..=200).map(f64::from));
        assert!(many.first().is_some_and(|last| last == "200") && many.len() < 15, "{many:?}");
    }

    #[test]
    fn a_linear_axis_of_places_need_not_begin_at_zero() {
        let labels = labels(Scale::of_places([2010.0, 2020.0].into_iter(), false));
        assert_eq!(
            (labels.first().map(String::as_str), labels.last().map(String::as_str)),
            (Some("2,010"), Some("2,020"))
        );
    }

    #[test]
    fn an_axis_without_values_does_not_exist() {
        assert!(Scale::of_sizes([].into_iter(), true).is_none() && Scale::of_places([].into_iter(), false).is_none());
    }

    #[test]
    fn labels_have_the_digits_that_matter() {
        let values = [0.0, -0.0, 1.0, 0.1 + 0.2, 1234.5, 1_500_000.0, -500.0, -1000.0];
        assert_eq!(values.map(grouped), ["0", "0", "1", "0.3", "1,234.5", "1,500,000", "-500", "-1,000"]);
    }
}
