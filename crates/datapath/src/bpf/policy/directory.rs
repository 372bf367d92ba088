//! Directory of the policy's pins.

use std::{
    fs, io,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
};

use cproxy_ebpf::policy::POLICY_LAYOUT_VERSION;

use super::{error::PolicyError, names::MAPS, program::PolicyProgram};
use crate::bpf::{
    pins::{PinDir, remove_with_pins},
    syscalls::{link_detach, obj_get_if_any},
};

/// Pins of network policy, beside those of the table.
#[derive(Clone, Debug)]
pub struct PolicyPins {
    dir: PathBuf,
}

impl PolicyPins {
    /// The pins beside a table's; nothing is touched yet.
    #[must_use]
    pub fn new(pins: &PinDir) -> Self {
        Self { dir: pins.directory().join(format!("policy-v{POLICY_LAYOUT_VERSION}")) }
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    pub(super) fn object(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(super) fn create(&self) -> Result<(), PolicyError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|error| PolicyError::Io(self.dir.clone(), error))
    }

    /// Whether policy has been installed there.
    #[must_use]
    pub fn exist(&self) -> bool {
        self.dir.exists()
    }

    /// Whether all maps and programs are pinned.
    #[must_use]
    pub fn are_complete(&self) -> bool {
        let programs = PolicyProgram::all().map(PolicyProgram::pin);
        MAPS.into_iter().map(str::to_owned).chain(programs).all(|name| self.object(&name).exists())
    }

    /// Removes all pins: nothing is denied any more.
    ///
    /// # Errors
    /// A pin stays.
    pub fn remove(&self) -> io::Result<()> {
        for program in PolicyProgram::all() {
            if let Some(link) = obj_get_if_any(&self.object(program.link))? {
                // It may be detached already. Without its pin, the kernel detaches it a moment later.
                link_detach(link.as_fd()).ok();
            }
        }
        remove_with_pins(&self.dir)
    }
}
