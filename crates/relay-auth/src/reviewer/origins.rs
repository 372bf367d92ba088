//! Limits for each origin of tokens, so that no client uses up the reviews of the others.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::Instant};

use super::table::Table;
use crate::Origin;

/// Most reviews of unknown tokens under way for an origin. A host with translated addresses may have as many guests.
const UNDER_WAY_MAX: u32 = 256;
/// Reviews that run at once for an origin, of those under way: the API server may take long for some tokens.
const RUNNING_MAX: usize = 16;
/// Number of refused tokens that an origin has at once.
const REFUSED_BURST: u32 = 64;
/// Time in which an origin has one more refused token.
const REFUSED_INTERVAL: Duration = Duration::from_secs(1);
/// Largest number of origins with refused tokens that are remembered.
const ORIGINS_MAX: usize = 16_384;

/// Use of the limits.
#[derive(Debug)]
pub(super) struct Origins {
    under_way: HashMap<Origin, UnderWay>,
    /// Time at which all refused tokens are forgotten.
    forgotten_at: Table<Origin, Instant>,
}

/// Reviews of one origin.
#[derive(Debug)]
struct UnderWay {
    count: u32,
    running: Arc<Semaphore>,
}

impl Origins {
    pub(super) fn new() -> Self {
        Self { under_way: HashMap::new(), forgotten_at: Table::new(ORIGINS_MAX, usize::MAX) }
    }

    /// Counts another review, unless there are too many. Returns the permits of the reviews that run, or fails with the
    /// time until there are not too many.
    pub(super) fn begin(&mut self, origin: &Origin, now: Instant) -> Result<Arc<Semaphore>, Duration> {
        let full = REFUSED_INTERVAL * (REFUSED_BURST - 1);
        let forgotten_in = self.forgotten_at.get(origin).map(|time| time.saturating_duration_since(now));
        if let Some(excess) = forgotten_in.and_then(|time| time.checked_sub(full)).filter(|time| !time.is_zero()) {
            return Err(excess);
        }
        let under_way = self.under_way.entry(origin.clone());
        let under_way =
            under_way.or_insert_with(|| UnderWay { count: 0, running: Arc::new(Semaphore::new(RUNNING_MAX)) });
        if under_way.count >= UNDER_WAY_MAX {
            return Err(Duration::from_secs(1));
        }
        under_way.count += 1;
        Ok(under_way.running.clone())
    }

    /// Counts the end of a review.
    pub(super) fn end(&mut self, origin: &Origin) {
        if let Some(under_way) = self.under_way.get_mut(origin) {
            under_way.count = under_way.count.saturating_sub(1);
            if under_way.count == 0 {
                self.under_way.remove(origin);
            }
        }
    }

    /// Remembers a refused token.
    pub(super) fn refused(&mut self, origin: Origin, now: Instant) {
        self.forgotten_at.remove_oldest_while(|time| *time <= now);
        let forgotten_at = self.forgotten_at.get(&origin).map_or(now, |time| now.max(*time));
        self.forgotten_at.insert(origin, forgotten_at + REFUSED_INTERVAL, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_tokens_are_forgotten_one_by_one() {
        let (mut origins, origin, now) = (Origins::new(), Origin::Vsock(3), Instant::now());
        for _ in 0..REFUSED_BURST {
            origins.begin(&origin, now).unwrap();
            origins.end(&origin);
            origins.refused(origin.clone(), now);
        }
        assert_eq!(origins.begin(&origin, now).err(), Some(REFUSED_INTERVAL));
        origins.begin(&Origin::Vsock(4), now).unwrap();
        origins.begin(&origin, now + REFUSED_INTERVAL).unwrap();
    }

    #[test]
    fn reviews_under_way_are_bounded_for_each_origin() {
        let (mut origins, origin, now) = (Origins::new(), Origin::Vsock(3), Instant::now());
        (0..UNDER_WAY_MAX).for_each(|_| drop(origins.begin(&origin, now).unwrap()));
        assert!(origins.begin(&origin, now).is_err());
        (0..UNDER_WAY_MAX).for_each(|_| origins.end(&origin));
        assert!(origins.begin(&origin, now).is_ok() && origins.under_way.len() == 1);
    }
}
