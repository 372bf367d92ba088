//! Changes of sets, for those who ask when a Service has changed.

use std::sync::Arc;

use super::TablePlanner;
use crate::ServiceName;

/// Maximum number of changes that are kept until they are taken.
pub const CHANGES_MAX: usize = 512;

/// Change of one of a Service's sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetChange {
    /// The Service.
    pub service: Arc<ServiceName>,
    /// Number of backends for new connections before the change; `None` if the set is new.
    pub before: Option<u32>,
    /// Number of backends for new connections since then.
    pub after: u32,
}

impl TablePlanner {
    /// Records a change of a set. Changes of those that a Service keeps for old connections alone count, too.
    pub(super) fn record_change(&mut self, service: &Arc<ServiceName>, before: Option<u32>, after: u32) {
        if self.changes.len() < CHANGES_MAX {
            self.changes.push(SetChange { service: service.clone(), before, after });
        }
    }
}
