//! Consequences of an event that are still to be drawn.

use std::collections::BTreeSet;

use cproxy_core::ObjectName;

use crate::address_set::SliceName;

/// Parts of the resolver that an event has touched.
#[derive(Default)]
pub(super) struct Work {
    /// Slices whose addresses have changed, or that have come or gone.
    pub(super) slices: BTreeSet<SliceName>,
    /// Sets whose addresses have changed.
    pub(super) sets: BTreeSet<u32>,
    /// Groups that have got or lost a set.
    pub(super) groups: BTreeSet<u32>,
    /// Selections that are new.
    pub(super) new_selections: BTreeSet<u32>,
    /// Selections whose pods have other policies now.
    pub(super) selections: BTreeSet<u32>,
    /// Profiles that have another selection.
    pub(super) profiles: BTreeSet<u32>,
    /// Pods that have another policy for reasons of their own.
    pub(super) pods: BTreeSet<ObjectName>,
}
