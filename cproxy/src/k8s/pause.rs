//! How long to wait before the API server is asked again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(800);
const LONGEST: Duration = Duration::from_secs(30);

/// Ever longer pauses between attempts that fail.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(FIRST)
    }

    /// Half of it is left to chance: agents that have failed together do not come back together.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause + jitter(pause)
    }
}

/// Anything up to this.
pub(super) fn jitter(longest: Duration) -> Duration {
    let mut bytes = [0; 2];
    // Without randomness (early in a boot) there is no jitter.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK).ok();
    longest * u32::from(u16::from_ne_bytes(bytes)) / (1 << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound() {
        let mut backoff = Backoff::new();
        for millis in [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
            let (least, pause) = (Duration::from_millis(millis), backoff.next());
            assert!((least..least * 2).contains(&pause), "{pause:?} is not from {least:?} on");
        }
    }
}
