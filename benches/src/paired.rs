//! Comparison of two variants, round by round: a disturbance that lasts longer than a round affects both, so ratios are
//! stable where times are not.

use std::fmt;

use serde_json::{Value, json};

/// A median, and the interval that holds the true one with a probability of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The median of the samples.
    pub median: f64,
    /// The interval's lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

impl Estimate {
    /// Estimate from samples that are independent of each other, with any distribution; `None` if there are none. The
    /// ends are samples whose ranks follow from the binomial distribution (with few samples: the smallest and the
    /// largest).
    #[must_use]
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted = samples.into_iter().collect::<Vec<_>>();
        sorted.sort_unstable_by(f64::total_cmp);
        let count = sorted.len();
        let margin = 1.96 * (count as f64).sqrt() / 2.0;
        let low = ((count as f64 / 2.0 - margin).floor() as usize).min(count / 2);
        let median = (sorted.get(count.checked_sub(1)? / 2)? + sorted.get(count / 2)?) / 2.0;
        Some(Self { median, low: *sorted.get(low)?, high: *sorted.get(count - 1 - low)? })
    }

    /// Estimate of the differences between two columns, sample by sample.
    #[must_use]
    pub fn of_differences(samples: &[f64], baseline: &[f64]) -> Option<Self> {
        Self::of(samples.iter().zip(baseline).map(|(sample, base)| sample - base))
    }

    /// Estimate of the ratios between two columns, sample by sample.
    #[must_use]
    pub fn of_ratios(samples: &[f64], baseline: &[f64]) -> Option<Self> {
        Self::of(samples.iter().zip(baseline).map(|(sample, base)| sample / base))
    }

    /// Ratio to another estimate, made in other rounds. Its interval includes the uncertainty of both.
    #[must_use]
    pub fn over(self, other: Self) -> Self {
        Self { median: self.median / other.median, low: self.low / other.high, high: self.high / other.low }
    }

    /// JSON for a file of results.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"median": self.median, "low": self.low, "high": self.high})
    }
}

/// Order of turns in a round: each participant is first as often as any other, and follows each other one equally
/// often, as far as their number has no divisors.
pub fn turns(count: usize, round: usize) -> impl Iterator<Item = usize> {
    let steps = (1..count.max(2)).filter(|&step| has_no_common_divisor(step, count)).collect::<Vec<_>>();
    let step = steps.get(round % steps.len()).copied().unwrap_or(1);
    (0..count).map(move |place| (round + place * step) % count)
}

/// Whether two numbers have no common divisor but 1.
fn has_no_common_divisor(one: usize, other: usize) -> bool {
    (2..=one).all(|divisor| !(one.is_multiple_of(divisor) && other.is_multiple_of(divisor)))
}

/// `median (low .. high)`, with the formatter's precision.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, low, high } = self;
        let precision = f.precision().unwrap_or(2);
        write!(f, "{median:.precision$} ({low:.precision$} .. {high:.precision$})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_between_the_middle_samples() {
        assert_eq!(Estimate::of([3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(Estimate::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Estimate::of([]), None);
        let one = Estimate::of([7.0]).unwrap();
        assert_eq!((one.median, one.low, one.high), (7.0, 7.0, 7.0));
    }

    /// The ranks of the textbook's table for n = 100: the 40th and the 61st sample.
    #[test]
    fn the_interval_has_the_ranks_of_the_binomial_distribution() {
        let hundred = Estimate::of((1..=100).map(f64::from)).unwrap();
        assert!((40.0..=41.0).contains(&hundred.low) && (60.0..=61.0).contains(&hundred.high), "{hundred:?}");
        let few = Estimate::of([1.0, 2.0, 3.0]).unwrap();
        assert_eq!((few.low, few.high), (1.0, 3.0));
    }

    #[test]
    fn a_disturbance_of_both_sides_of_a_round_leaves_the_ratio_alone() {
        let baseline = [10.0, 20.0, 1000.0];
        let ratio = Estimate::of_ratios(&[11.0, 22.0, 1100.0], &baseline).unwrap();
        assert!((ratio.low - 1.1).abs() < 1e-9 && (ratio.high - 1.1).abs() < 1e-9, "{ratio:?}");
        assert_eq!(Estimate::of_differences(&[11.0, 22.0, 1100.0], &baseline).unwrap().median, 2.0);
    }

    #[test]
    fn a_quotient_of_other_rounds_is_as_uncertain_as_both() {
        let (above, below) =
            (Estimate { median: 4.0, low: 2.0, high: 6.0 }, Estimate { median: 2.0, low: 1.0, high: 4.0 });
        assert_eq!(above.over(below), Estimate { median: 2.0, low: 0.5, high: 6.0 });
    }

    #[test]
    fn it_is_printed_with_the_precision_asked_for() {
        let estimate = Estimate { median: 1.0, low: 0.5, high: 1.25 };
        assert_eq!(format!("{estimate:.1}"), "1.0 (0.5 .. 1.2)");
        assert_eq!(format!("{estimate}"), "1.00 (0.50 .. 1.25)");
    }

    #[test]
    fn all_have_a_turn_in_each_round_and_is_behind_many_others() {
        for count in 1..9 {
            let mut behind = std::collections::BTreeSet::new();
            for round in 0..count * count {
                let order = turns(count, round).collect::<Vec<_>>();
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                behind.extend(order.windows(2).filter(|pair| pair[1] == 0).map(|pair| pair[0]));
            }
            let steps = [0, 1, 2, 2, 4, 2, 6, 4];
            assert_eq!(Some(&behind.len()), steps.get(count - 1), "of {count}");
        }
    }
}
