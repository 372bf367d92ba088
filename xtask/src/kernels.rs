//! Kernels that guests are started with: those of Debian's packages, and those that are built from Debian's sources
//! with the options that this repository asks for. Each is a directory in the cache: `kernel`, `config` and, where it
//! has some, `vmlinux` and `modules`, these named in the order in which they are to be loaded.

mod build;
mod modules;
mod packages;

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use sha2::{Digest as _, Sha256};

pub(crate) use self::{
    build::built,
    packages::{LINUX_6_1, busybox, for_machines, init_systems, packaged, packaged_for_kube_proxy, programs},
};
use crate::paths;

/// The kernel's image in its directory.
pub(crate) const KERNEL: &str = "kernel";
/// The same as an ELF file, where it was built for x86_64.
pub(crate) const ELF: &str = "vmlinux";
/// Name of its architecture, if that is not this machine's.
const ARCHITECTURE: &str = "architecture";
/// Its configuration.
const CONFIG: &str = "config";

/// A kernel from a file: a bzImage with drivers for virtio's network card on PCI in it, since no modules come along.
pub(crate) fn of_file(file: &Path) -> Result<PathBuf> {
    let file = fs::canonicalize(file).with_context(|| file.display().to_string())?;
    ensure!(file.is_file(), "{}: a bzImage is wanted", file.display());
    let directory = paths::target().join("kernels").join(file.display().to_string().replace('/', "-"));
    fs::remove_dir_all(&directory).ok();
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    symlink(&file, directory.join(KERNEL)).with_context(|| format!("in {}", directory.display()))?;
    Ok(directory)
}

/// Lock for building kernels, which share their object files.
fn lock() -> Result<File> {
    let parent = paths::cache()?.join("kernels");
    fs::create_dir_all(&parent).with_context(|| format!("creating {}", parent.display()))?;
    let path = parent.join("lock");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The directory `name` of the cache. If it is missing, `make` fills it beside its final place, so that an interrupted
/// build never looks finished; one process at a time.
fn cached(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    if let Some(directory) = existing(name)? {
        return Ok(directory);
    }
    let _lock = lock()?;
    // The process that had the lock before may have made it.
    match existing(name)? {
        Some(directory) => Ok(directory),
        None => build_cached(name, make),
    }
}

fn existing(name: &str) -> Result<Option<PathBuf>> {
    Ok(Some(paths::cache()?.join("kernels").join(name)).filter(|directory| directory.is_dir()))
}

/// Fills a directory of the cache, under the [`lock`].
fn build_cached(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let parent = paths::cache()?.join("kernels");
    let directory = parent.join(name);
    let temporary = parent.join(format!("{name}.unfinished"));
    fs::remove_dir_all(&temporary).ok();
    fs::create_dir_all(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
    make(&temporary)?;
    fs::rename(&temporary, &directory).with_context(|| format!("renaming to {}", directory.display()))?;
    Ok(directory)
}

/// Part of a directory's name that changes with `text`, which describes its content.
fn hash(text: &str) -> String {
    Sha256::digest(text).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}
