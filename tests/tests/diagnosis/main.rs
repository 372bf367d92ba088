//! Faults made on purpose: the first command that an operator types names the cause.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod first_question;
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

    /// The call gets to a backend.
    #[track_caller]
    fn forwarded(self) -> Self {
        self.says(0, &[": forwarded "])
    }

    /// The call does not get where it should, and the first line has all these words.
    #[track_caller]
    fn fails_because(self, words: &[&str]) -> Self {
        self.says(1, words)
    }

    /// The command ends with this code, and its first line has all these words.
    #[track_caller]
    fn says(self, code: i32, words: &[&str]) -> Self {
        let verdict = self.verdict();
        let has_all = words.iter().all(|word| verdict.contains(word));
        assert!(self.0.code == code && has_all, "{code} {words:?}: {}{}", self.0.stdout, self.0.stderr);
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
