//! Targets and whether they are met.

use std::fmt;

use serde_json::{Value, json};

use super::Table;
use crate::paired::Estimate;

/// Limit on a ratio's median.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Upper limit.
    AtMost(f64),
    /// Lower limit.
    AtLeast(f64),
}

/// A target with its measured ratio.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Description of the comparison.
    pub what: String,
    /// The measured ratio.
    pub found: Estimate,
    /// The target of the ratio.
    pub target: Target,
}

impl Target {
    fn value(self) -> f64 {
        match self {
            Self::AtMost(value) | Self::AtLeast(value) => value,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.value();
        // Most have two digits.
        let hundredths = value * 100.0;
        let digits = if (hundredths - hundredths.round()).abs() < 1e-9 { 2 } else { 3 };
        match self {
            Self::AtMost(_) => write!(f, "at most {value:.digits$}"),
            Self::AtLeast(_) => write!(f, "at least {value:.digits$}"),
        }
    }
}

impl Verdict {
    /// Whether the target is met.
    #[must_use]
    pub fn is_met(&self) -> bool {
        match self.target {
            Target::AtMost(value) => self.found.median <= value,
            Target::AtLeast(value) => self.found.median >= value,
        }
    }

    /// Whether another run could well have the opposite result.
    fn is_open(&self) -> bool {
        let Estimate { low, high, .. } = self.found;
        (low..=high).contains(&self.target.value())
    }

    /// JSON for a file of results.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "what": self.what, "ratio": self.found.json(), "target": self.target.to_string(), "met": self.is_met(),
            "open": self.is_open(),
        })
    }

    /// A table with a line for each verdict.
    #[must_use]
    pub fn table(verdicts: &[Self]) -> Table {
        let row = |verdict: &Self| {
            let word = if verdict.is_met() { "met" } else { "missed" };
            let open = if verdict.is_open() { ", by less than the noise" } else { "" };
            let cells = vec![format!("{:.3}", verdict.found), verdict.target.to_string(), format!("{word}{open}")];
            (verdict.what.clone(), cells)
        };
        Table {
            title: "Targets".to_owned(),
            columns: ["ratio", "target", ""].map(str::to_owned).into(),
            rows: verdicts.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict([low, median, high]: [f64; 3], target: Target) -> String {
        let found = Estimate { median, low, high };
        let table = Verdict::table(&[Verdict { what: "it".to_owned(), found, target }]);
        table.rows[0].1[2].clone()
    }

    #[test]
    fn a_target_is_shown_with_all_its_digits() {
        let shown = [1.0, 1.02, 1.025, 1.15].map(|value| Target::AtMost(value).to_string());
        assert_eq!(shown, ["at most 1.00", "at most 1.02", "at most 1.025", "at most 1.15"]);
    }

    #[test]
    fn the_median_decides_and_the_interval_says_how_surely() {
        for (found, at_most, at_least) in [
            ([0.9, 1.0, 1.1], "met", "missed"),
            ([1.3, 1.4, 1.5], "missed", "met"),
            ([1.0, 1.1, 1.3], "met, by less than the noise", "missed, by less than the noise"),
            ([1.1, 1.3, 1.4], "missed, by less than the noise", "met, by less than the noise"),
        ] {
            assert_eq!(verdict(found, Target::AtMost(1.2)), at_most, "{found:?}");
            assert_eq!(verdict(found, Target::AtLeast(1.2)), at_least, "{found:?}");
        }
    }
}
