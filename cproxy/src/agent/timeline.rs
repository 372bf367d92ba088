//! Durations of the phases from the start until the table is complete.

use std::time::{Duration, Instant};

/// Phase of the agent's start, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// Reads its input and checks the machine.
    Prepare,
    /// Has a child load and attach the programs.
    Install,
    /// Detects its own addresses, opens the maps, reads back their content, serves `--bootstrap`.
    Open,
    /// Waits for the first complete lists.
    List,
    /// Computes the table and writes it.
    Write,
}

/// Duration of each phase.
#[derive(Debug)]
pub(super) struct Timeline {
    started: Instant,
    since: Instant,
    phases: [Duration; 5],
}

impl Timeline {
    /// Starts the first phase.
    pub(super) fn start() -> Self {
        let now = Instant::now();
        Self { started: now, since: now, phases: [Duration::ZERO; 5] }
    }

    /// Ends a phase and starts the next one.
    pub(super) fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        if let Some(total) = self.phases.get_mut(phase as usize) {
            *total += now - self.since;
        }
        self.since = now;
    }

    /// Logs that the agent is ready, with the duration of each phase.
    pub(super) fn log_ready(&self, services: usize, frontends: usize) {
        let total = self.started.elapsed();
        let [prepare_ms, install_ms, open_ms, list_ms, write_ms] = self.phases.map(milliseconds);
        tracing::info!(
            name: "ready",
            prepare_ms,
            install_ms,
            open_ms,
            list_ms,
            write_ms,
            ready_ms = milliseconds(total),
            services,
            frontends,
            "ready after {total:.1?}",
        );
    }
}

/// Milliseconds with one decimal.
fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_have_one_digit_after_the_point() {
        assert_eq!(milliseconds(Duration::from_micros(12_345)), 12.3);
    }
}
