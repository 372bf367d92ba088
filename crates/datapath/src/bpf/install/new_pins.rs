//! Pins that an attempt to install has made.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Pins that were not there before this attempt. It removes them if it fails.
#[derive(Default)]
pub(super) struct NewPins {
    paths: Vec<PathBuf>,
    /// They stay: programs that use them have taken the place of an older layout's. The next attempt goes on.
    pub(super) stay: bool,
}

impl NewPins {
    /// Adds a pin that is about to be made.
    pub(super) fn add(&mut self, path: &Path) {
        self.paths.push(path.to_owned());
    }

    /// Adds a pin that is about to be made, unless it is there.
    pub(super) fn add_if_missing(&mut self, path: &Path) {
        if !path.exists() {
            self.add(path);
        }
    }

    /// Removes them, unless they stay.
    pub(super) fn remove(self) {
        for path in self.paths.into_iter().filter(|_| !self.stay) {
            // The reason for removing is the error that is being reported; another one would hide it.
            fs::remove_file(path).ok();
        }
    }
}
