//! Directory of the policy's pins.

use std::{
    io,
    path::{Path, PathBuf},
};

use cproxy_ebpf::policy::{EXEMPT_CGROUPS_MAX, POLICY_LAYOUT_VERSION};

use super::{names::MAPS, program::policy_programs};
use crate::bpf::{linked::LinkedPins, pins::PinDir};

/// Pins of network policy, beside those of the table.
#[derive(Clone, Debug)]
pub struct PolicyPins(pub(in crate::bpf) LinkedPins);

impl PolicyPins {
    /// Exempt cgroups, at most.
    pub const EXEMPT_CGROUPS_MAX: usize = EXEMPT_CGROUPS_MAX;

    /// The pins beside a table's; nothing is touched yet.
    #[must_use]
    pub fn new(pins: &PinDir) -> Self {
        Self(LinkedPins::new(pins.directory().join(format!("policy-v{POLICY_LAYOUT_VERSION}"))))
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.0.directory()
    }

    pub(super) fn object(&self, name: &str) -> PathBuf {
        self.0.object(name)
    }

    /// Whether policy has been installed there.
    #[must_use]
    pub fn exist(&self) -> bool {
        self.0.directory().exists()
    }

    /// Whether all maps and programs are pinned.
    #[must_use]
    pub fn are_complete(&self) -> bool {
        self.0.have(&MAPS, policy_programs())
    }

    /// Removes all pins: nothing is denied any more.
    ///
    /// # Errors
    /// A pin stays.
    pub fn remove(&self) -> io::Result<()> {
        self.0.remove(policy_programs())
    }
}
