//! The one time that everything in an image has, so that it does not depend on when it is made.

use std::{env, process::Command};

use anyhow::{Context as _, Result};
use jiff::{SignedDuration, Timestamp};

use crate::{paths, run};

/// The convention of reproducible builds.
const VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// Seconds since 1970.
#[derive(Clone, Copy)]
pub(crate) struct Stamp(u32);

impl Stamp {
    /// The environment's, else the last commit's.
    ///
    /// # Errors
    /// There is neither, or it is no number.
    pub(crate) fn find() -> Result<Self> {
        let seconds = match env::var(VARIABLE) {
            Ok(seconds) => seconds,
            Err(_) => run::capture(git().args(["log", "-1", "--format=%ct"]))
                .with_context(|| format!("no commit to take the time of: set {VARIABLE}"))?,
        };
        seconds.trim().parse().map(Self).with_context(|| format!("{VARIABLE}: {seconds:?} is no number of seconds"))
    }

    #[cfg(test)]
    pub(crate) fn new(seconds: u32) -> Self {
        Self(seconds)
    }

    pub(crate) fn seconds(self) -> u32 {
        self.0
    }

    /// As RFC 3339 has it.
    pub(crate) fn text(self) -> String {
        (Timestamp::UNIX_EPOCH + SignedDuration::from_secs(self.0.into())).to_string()
    }
}

/// The commit that this is made from, with a word if there are changes to it; none outside a repository.
pub(crate) fn revision() -> Option<String> {
    let arguments = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"];
    run::capture(git().args(arguments)).ok().map(|revision| revision.trim().to_owned())
}

fn git() -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(paths::workspace());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_rfc_3339_does() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(Stamp::new(seconds).text(), text);
        }
    }
}
