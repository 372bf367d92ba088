//! Detection of processes with nothing left to do.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

/// A process that uses at most one of this many parts of a CPU is at rest.
const PART: u32 = 50;

/// Waits until `processes` processes, whose CPU time so far is `cpu`, use almost none during `interval`. Returns that
/// time.
///
/// # Errors
/// They do not come to rest within `timeout`.
pub fn wait(processes: u32, interval: Duration, timeout: Duration, cpu: impl Fn() -> Duration) -> Result<Duration> {
    let deadline = Instant::now() + timeout;
    let mut before = cpu();
    loop {
        thread::sleep(interval);
        let now = cpu();
        if now.saturating_sub(before) <= interval / PART * processes {
            return Ok(now);
        }
        ensure!(Instant::now() < deadline, "not at rest within {timeout:?}");
        before = now;
    }
}
