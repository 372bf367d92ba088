//! Log of refusals: few lines for each origin, so that none hides another's.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cproxy_relay_auth::{Origin, PeerAddress, Refusal};
use tokio::time::Instant;

/// Time between two lines about one origin.
const INTERVAL: Duration = Duration::from_secs(10);

/// Origins whose last line is remembered. Of more at once, others are counted only.
const ORIGINS_MAX: usize = 4096;

/// Last lines.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<HashMap<Origin, Line>>);

#[derive(Debug)]
struct Line {
    at: Instant,
    left_out: u64,
}

impl RefusalLog {
    /// Logs a refusal, unless there was a line about its origin just now.
    pub(crate) fn log(&self, peer: &PeerAddress, refusal: &Refusal) {
        match self.left_out(peer, Instant::now()) {
            Some(0) => tracing::info!("{peer} is refused: {refusal}"),
            Some(count) => tracing::info!("{peer} is refused: {refusal} ({count} refusals from there were left out)"),
            None => {}
        }
    }

    /// Number of lines about the origin that were left out since the last one; `None` if this one is, too.
    fn left_out(&self, peer: &PeerAddress, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let origin = Origin::from(peer);
        match lines.get_mut(&origin) {
            Some(line) if now < line.at + INTERVAL => {
                line.left_out += 1;
                return None;
            }
            Some(line) => {
                line.at = now;
                return Some(std::mem::take(&mut line.left_out));
            }
            None => {}
        }
        if lines.len() >= ORIGINS_MAX {
            lines.retain(|_, line| now < line.at + INTERVAL);
        }
        if lines.len() >= ORIGINS_MAX {
            return None;
        }
        lines.insert(origin, Line { at: now, left_out: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_origin_has_a_line_in_ten_seconds_and_the_rest_is_counted() {
        let (log, now) = (RefusalLog::default(), Instant::now());
        let guest = |cid| PeerAddress::Vsock { cid };
        assert_eq!((0..100).filter_map(|_| log.left_out(&guest(3), now)).collect::<Vec<_>>(), [0]);
        assert_eq!(log.left_out(&guest(4), now), Some(0));
        assert_eq!(log.left_out(&guest(3), now + INTERVAL), Some(99));
        for cid in 5..10_000 {
            log.left_out(&guest(cid), now + INTERVAL);
        }
        assert!(log.0.lock().unwrap().len() <= ORIGINS_MAX);
        assert_eq!(log.left_out(&guest(10_000), now + INTERVAL * 3), Some(0));
    }
}
