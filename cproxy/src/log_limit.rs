//! A bound on what is logged, whatever objects and servers do: a serial console writes some 10 KiB a second, and the one
//! thread of the agent waits for it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::runtime::Handle;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// So many messages pass at once.
const BURST: u32 = 256;
/// After that, one in this time.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long messages are left out before that is said.
const SILENCE: Duration = Duration::from_secs(10);

/// Leaves out messages that come too fast, and says how many.
#[derive(Clone, Default)]
pub(crate) struct LogLimit(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// When the next message would be due if there were no burst.
    due: Option<Instant>,
    left_out: u64,
    /// Somebody is about to say so.
    is_reporting: bool,
}

impl State {
    fn lets_pass(&mut self, now: Instant) -> bool {
        let due = self.due.unwrap_or(now).max(now);
        let passes = due.saturating_duration_since(now) < INTERVAL * BURST;
        if passes {
            self.due = Some(due + INTERVAL);
        } else {
            self.left_out += 1;
        }
        passes
    }
}

impl LogLimit {
    fn lets_pass(&self, metadata: &Metadata<'_>) -> bool {
        if metadata.target() == module_path!() {
            return true;
        }
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passes = state.lets_pass(Instant::now());
        if !passes
            && !state.is_reporting
            && let Ok(runtime) = Handle::try_current()
        {
            state.is_reporting = true;
            drop(runtime.spawn(self.clone().report()));
        }
        passes
    }

    async fn report(self) {
        tokio::time::sleep(SILENCE).await;
        let left_out = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.is_reporting = false;
            std::mem::take(&mut state.left_out)
        };
        tracing::warn!(
            "{left_out} messages were left out: more than {BURST} at once, or one each second; --log-level debug leaves out none"
        );
    }
}

impl<S: Subscriber> Layer<S> for LogLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        self.lets_pass(event.metadata())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_at_a_time() {
        let (mut state, start) = (State::default(), Instant::now());
        let passed = (0..20_000).filter(|_| state.lets_pass(start)).count();
        assert_eq!((passed, state.left_out), (BURST as usize, 20_000 - u64::from(BURST)));
        let later = start + INTERVAL * 3;
        assert_eq!((0..100).filter(|_| state.lets_pass(later)).count(), 3);
        let much_later = start + INTERVAL * BURST * 2;
        assert_eq!((0..20_000).filter(|_| state.lets_pass(much_later)).count(), BURST as usize);
    }
}
