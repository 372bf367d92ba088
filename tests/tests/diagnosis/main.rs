//! Faults made on purpose: the first command that an operator types names the cause.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod programs;
mod services;
mod sockets;
mod source;

use cproxy_tests::{
    process::{Output, cproxy},
    sandbox::Sandbox,
};

/// Answer of `cproxy explain`.
struct Answer(Output);

impl Answer {
    /// Asks about a destination, with more arguments.
    fn to(sandbox: &Sandbox, arguments: &[&str]) -> Self {
        Self(cproxy(sandbox, &[&["explain"], arguments].concat()))
    }

    /// First line, which has the verdict.
    fn verdict(&self) -> &str {
        self.0.stdout.lines().next().unwrap_or_default()
    }

    /// Lines about a fact.
    fn lines(&self, name: &str) -> Vec<&str> {
        self.0.stdout.lines().filter(|line| line.split_whitespace().nth(1) == Some(name)).collect()
    }

    /// The call is answered.
    #[track_caller]
    fn answered(self) -> Self {
        let verdict = self.verdict();
        assert!(self.0.code == 0 && verdict.contains(": answered;"), "{}{}", self.0.stdout, self.0.stderr);
        self
    }

    /// The call is not answered, and the first line has all these words.
    #[track_caller]
    fn not_answered_because(self, words: &[&str]) -> Self {
        let verdict = self.verdict();
        let has_all = words.iter().all(|word| verdict.contains(word));
        let is_not = self.0.code == 1 && verdict.contains(": NOT answered;");
        assert!(is_not && has_all, "{words:?}: {}{}", self.0.stdout, self.0.stderr);
        self
    }

    /// A line about the fact has this state and all these words.
    #[track_caller]
    fn has(self, state: &str, name: &str, words: &[&str]) -> Self {
        let is_it = |line: &&str| line.starts_with(state) && words.iter().all(|word| line.contains(word));
        assert!(self.lines(name).iter().any(is_it), "{state} {name} {words:?}: {}{}", self.0.stdout, self.0.stderr);
        self
    }
}
