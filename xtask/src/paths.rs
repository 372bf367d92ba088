//! Paths of the repository, of cargo's output and of the cache that outlives both.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// The root of the repository. Cargo's run-time variable comes first, because a moved or copied checkout can still
/// hold a binary that was compiled at the old place.
pub(crate) fn workspace() -> PathBuf {
    let here = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&here).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Directory of the Go modules that pin the versions of control planes, one for each release.
pub(crate) fn control_plane_modules() -> PathBuf {
    workspace().join("tests")
}

/// Cargo's output directory.
pub(crate) fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(set) => workspace().join(set),
        None => workspace().join("target"),
    }
}

/// Directory in which cargo keeps the sources of dependencies.
pub(crate) fn cargo_home() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("CARGO_HOME").or_else(|| variable("HOME").map(|home| home.join(".cargo")))
}

/// Directory of tools and control-plane binaries, shared by all runs and checkouts.
pub(crate) fn cache() -> Result<PathBuf> {
    cache_from(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn cache_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
    variable("CPROXY_CACHE_DIR")
        .or_else(|| variable("XDG_CACHE_HOME").map(|base| base.join("cproxy")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/cproxy")))
        .context("no cache directory: set CPROXY_CACHE_DIR, XDG_CACHE_HOME or HOME")
}

/// The file in which the agent's build script finds the eBPF toolchain.
pub(crate) fn toolchain_file() -> Result<PathBuf> {
    Ok(cache()?.join("ebpf-toolchain"))
}

/// The file that this build script makes where it has found none, and that it watches.
pub(crate) fn missing_toolchain_file() -> PathBuf {
    workspace().join("target/ebpf/without-toolchain")
}

/// The program `name` in `PATH`, or in the system directories that a plain user's `PATH` may lack.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|directory| directory.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_follows_the_first_variable_that_is_set() {
        let all = |name: &str| Some(PathBuf::from(format!("/{name}")));
        assert_eq!(cache_from(all).unwrap(), Path::new("/CPROXY_CACHE_DIR"));
        let xdg = |name: &str| (name != "CPROXY_CACHE_DIR").then(|| PathBuf::from("/x"));
        assert_eq!(cache_from(xdg).unwrap(), Path::new("/x/cproxy"));
        let home = |name: &str| (name == "HOME").then(|| PathBuf::from("/h"));
        assert_eq!(cache_from(home).unwrap(), Path::new("/h/.cache/cproxy"));
        assert!(cache_from(|_| None).is_err());
    }
}
