//! A root file system of Debian with systemd, in which tests install packages. It is made once, and they change only a
//! layer over it.

use std::{
    fs,
    path::PathBuf,
    process::{self, Command},
};

use anyhow::{Context as _, Result};

use crate::{paths, run, setup};

/// Variable with its directory, for tests.
pub(crate) const VARIABLE: &str = "CPROXY_DEBIAN";

/// The release, which guests have, too.
const SUITE: &str = "bookworm";
/// Packages besides the essential ones: systemd as first process, and the tool that asks for processes.
const INCLUDED: &str = "--include=systemd,systemd-sysv,procps";

/// The directory, made if it is missing.
pub(crate) fn root() -> Result<PathBuf> {
    let cache = paths::cache()?.join("debian");
    let directory = cache.join(format!("{SUITE}-systemd"));
    if directory.is_dir() {
        return Ok(directory);
    }
    setup::for_dist_tests()?;
    run::require_root("making a root file system of Debian")?;
    run::report(format!("debian: making a root file system of {SUITE}, a minute (once)"));
    fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
    // Beside its place: an interrupted one never looks like a finished one.
    let temporary = cache.join(format!("building-{}", process::id()));
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", INCLUDED, SUITE]).arg(&temporary);
    let made = run::run_logged(&mut debootstrap, "making a root file system of Debian");
    let renamed = made.and_then(|()| {
        // Only an archive of what is installed already.
        let archives = temporary.join("var/cache/apt/archives");
        fs::remove_dir_all(&archives).with_context(|| format!("removing {}", archives.display()))?;
        fs::rename(&temporary, &directory).with_context(|| format!("writing {}", directory.display()))
    });
    if renamed.is_err() {
        fs::remove_dir_all(&temporary).ok();
    }
    // Another process may have been faster.
    if directory.is_dir() { Ok(directory) } else { renamed.map(|()| directory) }
}
