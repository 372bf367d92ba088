//! Announcement of a complete table: the file `ready`, the message to the init system and a line in the log.

use std::time::Instant;

use cproxy_daemon::notify;

use super::{
    policy::PolicyState,
    timeline::{Phase, Timeline},
};
use crate::run_dir::{RunDir, RunDirError};

/// Announcement that is due after the first complete write of the table, and again after it was withdrawn.
///
/// Only [`Self::publish`] makes a [`Ready`], without which the agent cannot go on to follow changes: so the
/// announcement cannot be forgotten. Dropping this announces nothing and removes the files of the run directory.
#[derive(Debug)]
pub(super) struct Readiness {
    run_dir: RunDir,
    state: State,
    /// Reason why the pod's policy is not in force, if it has one.
    policy: PolicyState,
}

#[derive(Debug)]
enum State {
    /// The announcement is due.
    Starting(Timeline),
    /// The table is complete, with so many Services and frontends, and the policy is not in force.
    Held(Timeline, (usize, usize)),
    Announced,
    /// The file `ready` has gone, since this time.
    Withdrawn(Instant),
}

/// Proof that the announcement was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ready(());

impl Readiness {
    pub(super) fn new(run_dir: RunDir, timeline: Timeline) -> Self {
        Self { run_dir, state: State::Starting(timeline), policy: Ok(()) }
    }

    /// Takes the state of the pod's policy. What was held back for it is announced.
    ///
    /// # Errors
    /// The file cannot be written. Nothing is announced then.
    pub(super) fn set_policy(&mut self, policy: PolicyState) -> Result<(), RunDirError> {
        self.policy = policy;
        self.run_dir.set_closed(self.missing_policy())?;
        if self.policy.is_ok()
            && let State::Held(timeline, counts) = &self.state
        {
            announce(&self.run_dir, timeline, *counts)?;
            self.state = State::Announced;
        }
        Ok(())
    }

    /// Reason why the pod's policy is not in force, if it has one.
    pub(super) fn missing_policy(&self) -> Option<&str> {
        self.policy.as_ref().err().map(String::as_str)
    }

    /// Whether the announcement waits for nothing but the policy.
    pub(super) fn is_held_by_policy(&self) -> bool {
        matches!(self.state, State::Held(..))
    }

    /// Ends a phase of the start. After the announcement, this has no effect.
    pub(super) fn end_phase(&mut self, phase: Phase) {
        if let State::Starting(timeline) = &mut self.state {
            timeline.end(phase);
        }
    }

    /// Announces that the table is complete, if that is due, with the numbers of Services and frontends. After a
    /// withdrawal it is due once the table `is_compared` with its source.
    ///
    /// # Errors
    /// The file cannot be written. Nothing is announced then.
    pub(super) fn publish(
        &mut self,
        count: impl FnOnce() -> (usize, usize),
        is_compared: bool,
    ) -> Result<Ready, RunDirError> {
        match &mut self.state {
            State::Starting(timeline) if self.policy.is_err() => {
                self.state = State::Held(std::mem::replace(timeline, Timeline::start()), count());
            }
            State::Starting(timeline) => {
                announce(&self.run_dir, timeline, count())?;
                self.state = State::Announced;
            }
            State::Withdrawn(since) if is_compared && self.policy.is_ok() => {
                self.run_dir.set_ready()?;
                let time = since.elapsed();
                tracing::info!(name: "ready", "ready again after {time:.1?}: the table is that of the API server");
                self.state = State::Announced;
            }
            State::Held(..) | State::Withdrawn(_) | State::Announced => {}
        }
        Ok(Ready(()))
    }

    /// Whether the announcement was withdrawn and is due again.
    pub(super) fn is_withdrawn(&self) -> bool {
        matches!(self.state, State::Withdrawn(_))
    }

    /// Makes the file again if somebody has removed it.
    pub(super) fn restore(&self) {
        if let State::Announced = self.state
            && let Err(error) = self.run_dir.restore_ready()
        {
            tracing::warn!("{error}");
        }
    }

    /// Withdraws the announcement: the table may be out of date. An init system is not told.
    pub(super) fn withdraw(&mut self) {
        if let State::Announced = self.state {
            self.state = State::Withdrawn(Instant::now());
            if let Err(error) = self.run_dir.clear_ready() {
                tracing::warn!("{error}");
            }
        }
    }
}

fn announce(run_dir: &RunDir, timeline: &Timeline, (services, frontends): (usize, usize)) -> Result<(), RunDirError> {
    run_dir.set_ready()?;
    notify::ready();
    timeline.log_ready(services, frontends);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;

    const READY: &str = "ready";

    fn readiness(name: &str) -> (Readiness, PathBuf) {
        let dir = std::env::temp_dir().join(format!("cproxy-readiness-{}-{name}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        (Readiness::new(RunDir::claim(&dir).unwrap(), Timeline::start()), dir)
    }

    #[test]
    fn ready_is_announced_once_and_withdrawn_at_the_end() {
        let (mut readiness, dir) = readiness("once");
        readiness.end_phase(Phase::Write);
        assert!(!dir.join(READY).exists());
        readiness.publish(|| (1, 1), true).unwrap();
        assert!(dir.join(READY).exists());
        fs::remove_file(dir.join(READY)).unwrap();
        readiness.publish(|| (2, 2), true).unwrap();
        assert!(!dir.join(READY).exists(), "announced twice");
        readiness.restore();
        assert!(dir.join(READY).exists());
        drop(readiness);
        assert!(!dir.join(READY).exists());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_withdrawn_announcement_comes_back_with_a_comparison() {
        let (mut readiness, dir) = readiness("withdrawn");
        let is_ready = || dir.join(READY).exists();
        readiness.withdraw();
        readiness.publish(|| (1, 1), false).unwrap();
        assert!(is_ready(), "there was nothing to withdraw");
        readiness.withdraw();
        assert!(!is_ready());
        readiness.restore();
        assert!(!is_ready(), "restored although it was withdrawn");
        readiness.withdraw();
        readiness.publish(|| (1, 1), false).unwrap();
        assert!(!is_ready());
        readiness.publish(|| (1, 1), true).unwrap();
        assert!(is_ready());
        drop(readiness);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn an_agent_that_ends_early_announces_nothing() {
        let (readiness, dir) = readiness("early");
        let ends = std::panic::catch_unwind(|| {
            let _readiness = readiness;
            panic!("an early end");
        });
        assert!(ends.is_err() && !dir.join(READY).exists());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_failed_announcement_can_be_repeated() {
        let (mut readiness, dir) = readiness("failed");
        fs::create_dir(dir.join(READY)).unwrap();
        assert!(readiness.publish(|| (1, 1), true).is_err());
        fs::remove_dir(dir.join(READY)).unwrap();
        readiness.publish(|| (1, 1), true).unwrap();
        assert!(dir.join(READY).exists());
        drop(readiness);
        fs::remove_dir_all(&dir).unwrap();
    }
}
