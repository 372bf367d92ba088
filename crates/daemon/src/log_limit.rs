//! Rate limit of the log, whatever objects and servers do: a serial console writes some 10 KiB a second, and the one
//! thread of the agent waits for it. Each place in the code has its own limit, so that a thousand objects with a
//! mistake do not hide the agent's other messages.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::runtime::Handle;
use tracing::{Metadata, callsite::Identifier};

/// Number of messages that pass at once.
const BURST: u32 = 256;
/// Interval between messages after a burst.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time from the first message that is left out to the report of their number.
const REPORT_DELAY: Duration = Duration::from_secs(10);

/// Limit that drops messages above the rate and reports their number.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogLimit(Arc<Mutex<Callsites>>);

/// Message rates by place in the code.
#[derive(Debug, Default)]
struct Callsites {
    /// Time at which each place's next message would be due if there were no burst.
    due: HashMap<Identifier, Instant>,
    left_out: u64,
    /// Whether a report is due.
    is_reporting: bool,
}

impl Callsites {
    fn admits(&mut self, callsite: Identifier, now: Instant) -> bool {
        let due = self.due.entry(callsite).or_insert(now);
        *due = now.max(*due);
        let is_admitted = due.saturating_duration_since(now) < INTERVAL * BURST;
        if is_admitted {
            *due += INTERVAL;
        } else {
            self.left_out += 1;
        }
        is_admitted
    }
}

impl LogLimit {
    /// Counts a message and returns whether it passes.
    pub(crate) fn admits(&self, metadata: &Metadata<'_>) -> bool {
        if metadata.target() == module_path!() {
            return true;
        }
        let mut callsites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_admitted = callsites.admits(metadata.callsite(), Instant::now());
        if !is_admitted
            && !callsites.is_reporting
            && let Ok(runtime) = Handle::try_current()
        {
            callsites.is_reporting = true;
            drop(runtime.spawn(self.clone().report()));
        }
        is_admitted
    }

    async fn report(self) {
        tokio::time::sleep(REPORT_DELAY).await;
        let left_out = {
            let mut callsites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            callsites.is_reporting = false;
            std::mem::take(&mut callsites.left_out)
        };
        tracing::warn!(
            "{left_out} messages were left out: of one kind, {BURST} pass at once and then one each second; \
             --log-level debug leaves out none"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_at_a_time() {
        static PLACES: [Place; 2] = [Place(0), Place(1)];
        let [place, other] = [Identifier(&PLACES[0]), Identifier(&PLACES[1])];
        let (mut callsites, start) = (Callsites::default(), Instant::now());
        let mut passed = |place: &Identifier, count: u32, after: Duration| {
            (0..count).filter(|_| callsites.admits(place.clone(), start + after)).count()
        };
        assert_eq!(passed(&place, 20_000, Duration::ZERO), BURST as usize);
        assert_eq!(passed(&place, 100, INTERVAL * 3), 3);
        assert_eq!(passed(&other, 20_000, INTERVAL * 3), BURST as usize, "others are not hidden");
        assert_eq!(passed(&place, 20_000, INTERVAL * BURST * 2), BURST as usize);
        assert_eq!(callsites.left_out, 3 * (20_000 - u64::from(BURST)) + 97);
    }

    /// Has a size, so that each place has a distinct address.
    struct Place(u8);

    impl tracing::callsite::Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &Metadata<'_> {
            unreachable!("{}", self.0)
        }
    }
}
