//! Steps of the wall clock: after a restore, a guest's agent, chrony or a VMM sets it.

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::{Errno, read, retry_on_intr},
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Timer that never expires, and is cancelled when the wall clock is set (timerfd_create(2)) or the machine was
/// suspended.
pub(super) struct ClockSteps(AsyncFd<OwnedFd>);

impl ClockSteps {
    /// Starts to watch the clock. Call it inside a tokio runtime.
    pub(super) fn open() -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let never = Timespec { tv_sec: i64::MAX, tv_nsec: 0 };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: never };
        timerfd_settime(&timer, TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET, &once)?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nothing else closes it.
        let timer = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) };
        timer.map(Self).map_err(io::Error::from)
    }

    /// Waits for a step. Steps since the last call count as one.
    pub(super) async fn step(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match retry_on_intr(|| read(self.0.get_ref(), &mut [0u8; size_of::<u64>()][..])) {
                // The timer stays in force.
                Err(Errno::CANCELED) => return Ok(()),
                Err(Errno::WOULDBLOCK) => ready.clear_ready(),
                Ok(_) => return Err(io::Error::other("the end of time")),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_clock_that_is_not_set_is_no_sign() {
        let steps = ClockSteps::open().unwrap();
        assert!(timeout(Duration::ZERO, steps.step()).await.is_err());
    }
}
