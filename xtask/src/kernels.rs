//! Kernels that guests are started with: those of Debian's packages, and those that are built from Debian's sources with
//! the options that this repository asks for. Each is a directory in the cache: `kernel`, `config` and, where it has some,
//! `modules`, named in the order in which they are to be loaded.

mod build;
mod modules;
mod packages;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context as _, Result, ensure};

pub(crate) use self::build::built;
pub(crate) use self::packages::{LINUX_6_1, LINUX_6_12, packaged};
use crate::paths;

/// The kernel's image in its directory.
const KERNEL: &str = "kernel";
/// Its configuration.
const CONFIG: &str = "config";

/// A kernel from a file: a bzImage, beside which there may be its configuration, `config`.
pub(crate) fn of_file(file: &Path) -> Result<PathBuf> {
    let file = fs::canonicalize(file).with_context(|| file.display().to_string())?;
    ensure!(file.is_file(), "{}: a bzImage is wanted", file.display());
    let directory = paths::target().join("kernels").join(file.display().to_string().replace('/', "-"));
    fs::remove_dir_all(&directory).ok();
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    symlink(&file, directory.join(KERNEL)).with_context(|| format!("in {}", directory.display()))?;
    Ok(directory)
}

/// The directory `name` of the cache, which `make` fills if it is not there yet: beside its final place, so that what was
/// interrupted never looks like what is finished.
fn cached(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let parent = paths::cache()?.join("kernels");
    let directory = parent.join(name);
    if directory.is_dir() {
        return Ok(directory);
    }
    let temporary = parent.join(format!("building-{}", process::id()));
    fs::remove_dir_all(&temporary).ok();
    fs::create_dir_all(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
    let made = make(&temporary);
    if made.is_err() {
        fs::remove_dir_all(&temporary).ok();
    }
    made?;
    fs::rename(&temporary, &directory).with_context(|| format!("renaming to {}", directory.display()))?;
    Ok(directory)
}
