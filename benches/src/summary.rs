//! Summary of many samples in four numbers.

use serde_json::{Value, json};

/// Percentiles by nearest rank, so that each is an actual sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest sample.
    pub max: f64,
}

impl Summary {
    /// The headings of a table's columns.
    pub const COLUMNS: [&str; 4] = ["p50", "p90", "p99", "max"];

    /// Summary of samples; `None` if there are none.
    #[must_use]
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let [p50, p90, p99, max] = percentiles(samples, [500, 900, 990, 1000])?;
        Some(Self { p50, p90, p99, max })
    }

    /// Cells of a table with `digits` digits after the point.
    #[must_use]
    pub fn cells(&self, digits: usize) -> Vec<String> {
        [self.p50, self.p90, self.p99, self.max].map(|value| format!("{value:.digits$}")).into()
    }

    /// JSON for a file of results.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max})
    }
}

/// Percentiles by nearest rank, given in thousandths. `None` if there are no samples.
#[must_use]
pub fn percentiles<const N: usize>(samples: impl IntoIterator<Item = f64>, permille: [usize; N]) -> Option<[f64; N]> {
    let mut sorted = samples.into_iter().collect::<Vec<_>>();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let rank = |permille: usize| (sorted.len() * permille).div_ceil(1000).saturating_sub(1).min(last);
    Some(permille.map(|permille| sorted.get(rank(permille)).copied().unwrap_or(f64::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let hundred = Summary::of((1..=100).rev().map(f64::from)).unwrap();
        assert_eq!(hundred, Summary { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(Summary::of([-1.0]).unwrap(), Summary { p50: -1.0, p90: -1.0, p99: -1.0, max: -1.0 });
        assert_eq!(Summary::of([]), None);
        assert_eq!(percentiles((1..=2000).map(f64::from), [0, 999, 2000]), Some([1.0, 1998.0, 2000.0]));
    }

    #[test]
    fn each_column_has_its_cell() {
        let cells = Summary::of([1.0, 1234.5]).unwrap().cells(2);
        assert_eq!(cells.len(), Summary::COLUMNS.len());
        assert_eq!(cells.last().map(String::as_str), Some("1234.50"));
    }
}
