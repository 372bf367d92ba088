//! Where the time goes from the start until the table is complete.

use std::time::{Duration, Instant};

/// What the agent does before it is ready, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// Reads its input and looks at the machine.
    Prepare,
    /// Has a child load and attach the programs.
    Install,
    /// Opens the maps, reads back what is in them, serves `--bootstrap`, finds its own addresses.
    Open,
    /// Waits for the first complete lists.
    List,
    /// Computes the table and writes it.
    Write,
}

/// How long each phase took.
#[derive(Debug)]
pub(super) struct Timeline {
    started: Instant,
    since: Instant,
    phases: [Duration; 5],
}

impl Timeline {
    /// The first phase begins.
    pub(super) fn start() -> Self {
        let now = Instant::now();
        Self { started: now, since: now, phases: [Duration::ZERO; 5] }
    }

    /// A phase ends, and the next one begins.
    pub(super) fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        if let Some(total) = self.phases.get_mut(phase as usize) {
            *total += now - self.since;
        }
        self.since = now;
    }

    /// Says that all is done.
    pub(super) fn log_ready(&self, services: usize, frontends: usize) {
        let total = self.started.elapsed();
        let [prepare_ms, install_ms, open_ms, list_ms, write_ms] = self.phases.map(milliseconds);
        tracing::info!(
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

/// With one digit after the point.
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
