//! The run directory: `ready` says that the table has been complete since this agent started.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::AgentError;
use crate::admin;

const READY: &str = "ready";

/// The run directory of this agent; what it put there goes with it.
#[derive(Debug)]
pub(super) struct RunDir(PathBuf);

impl RunDir {
    /// Makes it, and takes away what a dead agent left.
    pub(super) fn create(dir: &Path) -> Result<Self, AgentError> {
        let failed = |error| AgentError::RunDir(dir.to_owned(), error);
        fs::create_dir_all(dir).map_err(failed)?;
        let run_dir = Self(dir.to_owned());
        run_dir.clear();
        Ok(run_dir)
    }

    /// Lets `ready` appear, whole at once.
    pub(super) fn set_ready(&self) -> Result<(), AgentError> {
        let temporary = self.0.join(".ready");
        let failed = |error| AgentError::RunDir(self.0.clone(), error);
        fs::write(&temporary, "").map_err(failed)?;
        fs::rename(&temporary, self.0.join(READY)).map_err(failed)
    }

    fn clear(&self) {
        for name in [READY, admin::SOCKET] {
            // Not being there is what is wanted.
            drop(fs::remove_file(self.0.join(name)));
        }
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        self.clear();
    }
}
