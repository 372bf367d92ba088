//! Counting tests and showing the counts.

use std::{ops::AddAssign, time::Duration};

const GREEN: &str = "32";
const RED: &str = "31";
const YELLOW: &str = "33";

/// How many tests ended how.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

impl Counts {
    /// The counts of a test binary's closing line, which may be coloured; nothing for any other line.
    pub(crate) fn parse(line: &str) -> Self {
        let Some((_, result)) = line.split_once("test result: ") else { return Self::default() };
        let words: Vec<&str> = result.split_whitespace().map(|word| word.trim_end_matches(';')).collect();
        let number_before = |word: &str| {
            let pair = words.iter().zip(words.iter().skip(1)).find(|(_, next)| **next == word);
            pair.and_then(|(number, _)| number.parse().ok()).unwrap_or(0)
        };
        Self { passed: number_before("passed"), failed: number_before("failed"), skipped: number_before("ignored") }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Outcome of a suite.
pub(crate) struct Outcome {
    name: String,
    counts: Counts,
    seconds: f64,
    /// Why it failed or was left out, where the tests' own output does not say.
    note: String,
}

impl Outcome {
    pub(crate) fn new(name: impl Into<String>, counts: Counts) -> Self {
        Self { name: name.into(), counts, seconds: 0.0, note: String::new() }
    }

    /// A suite that could not be run; it counts as one failure.
    pub(crate) fn failed(name: impl Into<String>, why: String) -> Self {
        Self::new(name, Counts::default()).with_failure(why)
    }

    /// A suite that was not asked for; it counts as one that was skipped.
    pub(crate) fn left_out(name: impl Into<String>) -> Self {
        let counts = Counts { skipped: 1, ..Counts::default() };
        Self { note: "left out with --without".to_owned(), ..Self::new(name, counts) }
    }

    pub(crate) fn with_failure(mut self, why: String) -> Self {
        self.counts.failed += 1;
        self.note = why;
        self
    }

    pub(crate) fn took(self, time: Duration) -> Self {
        Self { seconds: time.as_secs_f64(), ..self }
    }

    fn verdict(&self) -> (&'static str, &'static str) {
        match self.counts {
            Counts { failed: 1.., .. } => ("FAILED", RED),
            Counts { passed: 0, .. } => ("skipped", YELLOW),
            _ => ("ok", GREEN),
        }
    }

    fn row(&self, color: bool) -> String {
        let Counts { passed, failed, skipped } = self.counts;
        let (verdict, code) = self.verdict();
        let verdict = if color { format!("\x1b[{code}m{verdict:<7}\x1b[0m") } else { format!("{verdict:<7}") };
        let row = format!(
            "{:<11} {verdict} {passed:>6} {failed:>6} {skipped:>7} {:>8.1}  {}",
            self.name, self.seconds, self.note
        );
        row.trim_end().to_owned()
    }
}

/// Prints a row for each suite and, last and plain, the sum.
pub(crate) fn print(outcomes: &[Outcome], color: bool) -> Counts {
    println!("\n{:<11} {:<7} {:>6} {:>6} {:>7} {:>8}", "suite", "", "passed", "failed", "skipped", "seconds");
    let mut total = Counts::default();
    for outcome in outcomes {
        println!("{}", outcome.row(color));
        total += outcome.counts;
    }
    println!("{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_counted_with_and_without_colour() {
        let expected = Counts { passed: 12, failed: 1, skipped: 2 };
        let plain =
            "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 3 filtered out; finished in 0.01s";
        assert_eq!(Counts::parse(plain), expected);
        let colored = plain.replace("FAILED", "\x1b[31mFAILED\x1b[0m");
        assert_eq!(Counts::parse(&colored), expected);
    }

    #[test]
    fn other_lines_count_for_nothing() {
        for line in ["", "test a ... ok", "running 3 tests", "5 passed"] {
            assert_eq!(Counts::parse(line), Counts::default(), "{line}");
        }
    }

    #[test]
    fn rows_tell_failed_from_skipped_and_passed() {
        let passed = Outcome::new("unit", Counts { passed: 3, ..Counts::default() });
        assert!(passed.row(false).starts_with("unit        ok           3"));
        assert!(passed.row(true).contains("\x1b[32mok     \x1b[0m"));
        assert!(Outcome::left_out("live").row(false).contains("skipped"));
        let failed = Outcome::failed("live", "not root".to_owned());
        assert!(failed.row(false).contains("FAILED") && failed.row(false).ends_with("not root"));
    }
}
