//! Names of the policy's maps.

/// Maps of the policy that are pinned.
pub(super) const MAPS: [&str; 8] = [STATE, PEERS, RANGES, INTERVALS, REPLIES, DENIALS, COUNTERS, EVENTS];

pub(super) const STATE: &str = "POLICY_STATE";
pub(super) const PEERS: &str = "POLICY_PEERS";
pub(super) const RANGES: &str = "POLICY_RANGES";
pub(super) const INTERVALS: &str = "POLICY_INTERVALS";
pub(super) const REPLIES: &str = "POLICY_REPLIES";
pub(super) const DENIALS: &str = "POLICY_DENIALS";
pub(super) const COUNTERS: &str = "POLICY_COUNTERS";
pub(super) const EVENTS: &str = "POLICY_EVENTS";
