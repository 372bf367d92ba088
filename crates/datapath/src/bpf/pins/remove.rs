//! Removal of all that cproxy has pinned, of any layout.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use cproxy_core::sort_few_by;

use super::{
    dir::{PinDir, PinError, TRACE_DIRECTORY, list, remove_if_empty, remove_with_pins},
    lock::lock_directory,
};
use crate::{
    bpf::{
        environment::is_bpffs,
        map_spec::{RESIZABLE, SERVICE_COUNTS, TCP_LEVELS},
        program::Program,
        syscalls::{link_detach, obj_get},
    },
    owned_dir,
};

/// Outcome of the removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Objects that were removed.
    pub objects: Vec<PathBuf>,
    /// Files there that are not ours, and stay.
    pub foreign: Vec<PathBuf>,
}

impl PinDir {
    /// Removes every object of ours, of any layout: the hooks are detached with their links. `first` removes what lies
    /// beside the tables, once it is known that no agent runs.
    ///
    /// # Errors
    /// An agent is running, or a file could not be removed.
    pub fn remove(&self, first: impl FnOnce() -> io::Result<()>) -> Result<Removed, PinError> {
        if self.directory().exists() && !is_bpffs(self.directory()) {
            return Err(PinError::NoBpffs(self.directory().to_owned()));
        }
        let dirs = self.layouts()?.into_iter().map(|version| self.directory().join(version));
        let locked = |dir: PathBuf| lock_directory(self, &dir).map(|lock| (dir, lock));
        let locked = dirs.map(locked).collect::<Result<Vec<_>, _>>()?;
        first().map_err(|error| PinError::Io(self.directory().to_owned(), error))?;
        let mut removed = Removed::default();
        for (dir, lock) in locked {
            removed.remove_objects(&lock, &dir, dir == self.versioned())?;
            drop(lock);
            remove_if_empty(&dir)?;
        }
        remove_if_empty(self.directory())?;
        Ok(removed)
    }
}

impl Removed {
    /// Removes what is ours from a locked directory of a layout.
    fn remove_objects(&mut self, lock: &OwnedFd, dir: &Path, is_own_layout: bool) -> Result<(), PinError> {
        // Its user may have led it elsewhere by now.
        let opened = |name: &str| owned_dir::path_in(lock, name);
        if !is_bpffs(&opened(".")) {
            return Err(PinError::NoBpffs(dir.to_owned()));
        }
        // Links first: no program may look into maps that are going.
        let mut objects = list(&opened("."))?;
        sort_few_by(&mut objects, |a, b| Program::has_link(b).cmp(&Program::has_link(a)));
        for name in objects {
            let path = dir.join(&name);
            if name == TRACE_DIRECTORY {
                remove_with_pins(&opened(&name)).map_err(|error| PinError::Io(path.clone(), error))?;
            } else if !is_own_layout || is_ours(&name) {
                // Of a map this is an error, and of a link on a cgroup that is gone.
                obj_get(&opened(&name), 0).and_then(|object| link_detach(object.as_fd())).ok();
                fs::remove_file(opened(&name)).map_err(|error| PinError::Io(path.clone(), error))?;
                self.objects.push(path);
            } else {
                self.foreign.push(path);
            }
        }
        Ok(())
    }
}

/// Whether we pin something under this name.
fn is_ours(name: &str) -> bool {
    let levels = TCP_LEVELS.iter().flat_map(|level| level.pins);
    let inner = RESIZABLE.iter().flat_map(|map| map.pins).chain(levels);
    Program::has_link(name) || PinDir::map_names().chain([SERVICE_COUNTS]).chain(inner).any(|pin| pin == name)
}
