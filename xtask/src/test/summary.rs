//! Counting tests and showing the counts.

use std::{collections::BTreeMap, ops::AddAssign, time::Duration};

use super::{
    job::Ended,
    suites::{self, SUITES},
};

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

/// Results by suite.
#[derive(Default)]
pub(crate) struct Outcomes {
    suites: BTreeMap<String, Outcome>,
    /// How often each test that failed has failed, and why if it did not say so itself.
    failed: BTreeMap<String, (u32, String)>,
    runs: BTreeMap<String, u32>,
}

/// Results of a suite.
#[derive(Default)]
struct Outcome {
    counts: Counts,
    /// Sum of the tests' times; several run at once.
    seconds: f64,
    cpu_seconds: f64,
}

impl Outcomes {
    /// Adds a test that has ended.
    pub(super) fn add(&mut self, suite: &str, test: &str, ended: &Ended) {
        let outcome = self.suites.entry(suite.to_owned()).or_default();
        outcome.counts += ended.counts;
        outcome.seconds += ended.elapsed.as_secs_f64();
        outcome.cpu_seconds += ended.cpu.as_secs_f64();
        *self.runs.entry(test.to_owned()).or_default() += 1;
        if ended.counts.failed > 0 {
            self.note_failure(test, ended.note.clone().unwrap_or_default());
        }
    }

    /// Adds the counts of test binaries that were run by another command.
    pub(crate) fn add_counts(&mut self, suite: &str, counts: Counts, elapsed: Duration) {
        let outcome = self.suites.entry(suite.to_owned()).or_default();
        outcome.counts += counts;
        outcome.seconds += elapsed.as_secs_f64();
        if counts.failed > 0 {
            self.note_failure(suite, String::new());
        }
    }

    /// Adds a test that could not be run.
    pub(crate) fn fail_test(&mut self, suite: &str, test: &str, why: String) {
        self.suites.entry(suite.to_owned()).or_default().counts.failed += 1;
        *self.runs.entry(test.to_owned()).or_default() += 1;
        self.note_failure(test, why);
    }

    /// Adds a suite that was left out; it counts as one that was skipped.
    pub(super) fn leave_out(&mut self, suite: &str) {
        self.suites.entry(suite.to_owned()).or_default().counts.skipped += 1;
    }

    fn note_failure(&mut self, test: &str, why: String) {
        let failed = self.failed.entry(test.to_owned()).or_default();
        *failed = (failed.0 + 1, why);
    }

    /// Prints a row for each suite, what failed and, last and plain, the sum.
    pub(crate) fn print(&self, elapsed: Duration, color: bool) -> Counts {
        let columns = ["suite", "", "passed", "failed", "skipped", "seconds", "CPU s", "budget"];
        let [suite, verdict, passed, failed, skipped, seconds, cpu, budget] = columns;
        println!("\n{suite:<11} {verdict:<7} {passed:>6} {failed:>6} {skipped:>7} {seconds:>8} {cpu:>7} {budget:>7}");
        let mut total = Outcome::default();
        for (name, outcome) in self.in_order() {
            println!("{}", outcome.row(name, color));
            total.counts += outcome.counts;
            total.seconds += outcome.seconds;
            total.cpu_seconds += outcome.cpu_seconds;
        }
        println!(
            "{:<11} {:<7} {:>6} {:>6} {:>7} {:>8.0} {:>7.0}  in {} s\n",
            "all",
            "",
            total.counts.passed,
            total.counts.failed,
            total.counts.skipped,
            total.seconds,
            total.cpu_seconds,
            elapsed.as_secs()
        );
        for (test, (times, why)) in &self.failed {
            println!("{}", self.failure(test, *times, why));
        }
        let Counts { passed, failed, skipped } = total.counts;
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        total.counts
    }

    fn failure(&self, test: &str, times: u32, why: &str) -> String {
        let runs = self.runs.get(test).copied().unwrap_or_default();
        let often = if runs > 1 { format!(" ({times} of {runs} times)") } else { String::new() };
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!("FAILED: cargo xtask test {test}{often}{why}")
    }

    /// The suites in the order of their list, others behind.
    fn in_order(&self) -> Vec<(&String, &Outcome)> {
        let mut rows: Vec<_> = self.suites.iter().collect();
        rows.sort_by_key(|(name, _)| SUITES.iter().position(|suite| suite.name == *name).unwrap_or(SUITES.len()));
        rows
    }
}

impl Outcome {
    fn verdict(&self) -> (&'static str, &'static str) {
        match self.counts {
            Counts { failed: 1.., .. } => ("FAILED", RED),
            Counts { passed: 0, .. } => ("skipped", YELLOW),
            _ => ("ok", GREEN),
        }
    }

    fn row(&self, name: &str, color: bool) -> String {
        let Counts { passed, failed, skipped } = self.counts;
        let (verdict, code) = self.verdict();
        let verdict = if color { format!("\x1b[{code}m{verdict:<7}\x1b[0m") } else { format!("{verdict:<7}") };
        let budget = suites::find(name).map(|suite| suite.budget_cpu_seconds).filter(|_| self.cpu_seconds > 0.0);
        let over = budget.filter(|budget| self.cpu_seconds > f64::from(*budget)).map_or("", |_| "  over its budget");
        let budget = budget.map(|budget| budget.to_string()).unwrap_or_default();
        let (seconds, cpu) = (self.seconds, self.cpu_seconds);
        format!("{name:<11} {verdict} {passed:>6} {failed:>6} {skipped:>7} {seconds:>8.1} {cpu:>7.1} {budget:>7}{over}")
    }
}

/// Prints how long each part of a run took, and each product that was built beside the tests.
pub(super) fn print_times<'a>(parts: &[(&str, Duration)], products: impl Iterator<Item = (&'a str, Duration)>) {
    println!("\n{:<32} {:>8}", "part", "seconds");
    for (name, time) in parts {
        println!("{name:<32} {:>8.1}", time.as_secs_f64());
    }
    for (name, time) in products {
        println!("  beside the tests: {name:<12} {:>8.1}", time.as_secs_f64());
    }
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

    fn row(counts: Counts, color: bool) -> String {
        Outcome { counts, seconds: 1.5, cpu_seconds: 1e6 }.row("live", color)
    }

    #[test]
    fn rows_tell_failed_from_skipped_and_passed() {
        let none = Counts::default();
        assert!(row(Counts { passed: 3, ..none }, false).starts_with("live        ok           3"));
        assert!(row(Counts { passed: 3, ..none }, true).contains("\x1b[32mok     \x1b[0m"));
        assert!(row(Counts { skipped: 1, ..none }, false).contains("skipped"));
        assert!(row(Counts { passed: 3, failed: 1, ..none }, false).contains("FAILED"));
    }

    #[test]
    fn a_suite_that_takes_more_cpu_time_than_its_budget_is_named() {
        assert!(row(Counts::default(), false).ends_with("over its budget"));
        assert!(!Outcome::default().row("live", false).contains("over its budget"));
    }

    #[test]
    fn a_failure_says_how_to_repeat_it_and_how_often_it_was_seen() {
        let mut outcomes = Outcomes::default();
        outcomes.fail_test("live", "live::a", "not root".to_owned());
        assert_eq!(outcomes.failure("live::a", 1, "not root"), "FAILED: cargo xtask test live::a: not root");
        outcomes.fail_test("live", "live::a", String::new());
        assert_eq!(outcomes.failure("live::a", 2, ""), "FAILED: cargo xtask test live::a (2 of 2 times)");
    }
}
