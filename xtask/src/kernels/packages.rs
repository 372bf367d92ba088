//! Debian's packages of kernels and of their sources, unpacked without being installed.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::{CONFIG, KERNEL, cached, hash, modules};
use crate::{run, setup::packages as system};

/// The package that depends on Debian 12's kernel for virtual machines.
pub(crate) const LINUX_6_1: &str = "linux-image-cloud-amd64";
/// The same of its newer kernel.
pub(crate) const LINUX_6_12: &str = "linux-image-6.12-cloud-amd64";

/// The kernel that the package `meta` depends on, with the modules that a guest needs.
pub(crate) fn packaged(meta: &str) -> Result<PathBuf> {
    packaged_with(meta, &modules::GUEST)
}

/// The same with the modules that all modes of kube-proxy need, too.
pub(crate) fn packaged_for_kube_proxy(meta: &str) -> Result<PathBuf> {
    packaged_with(meta, &[modules::GUEST.as_slice(), &modules::KUBE_PROXY].concat())
}

fn packaged_with(meta: &str, wanted: &[&str]) -> Result<PathBuf> {
    let package = dependency(meta)?;
    let version = version(&package)?;
    cached(&format!("{package}_{version}-{}", hash(&wanted.join(" "))), |directory| {
        run::report(format!("kernels: downloading {package} {version} from Debian"));
        let root = directory.join("root");
        unpack(&package, &root)?;
        let boot = root.join("boot");
        move_file(&find(&boot, "vmlinuz-")?, &directory.join(KERNEL))?;
        move_file(&find(&boot, "config-")?, &directory.join(CONFIG))?;
        modules::copy_with_dependencies(&root.join("lib/modules"), &directory.join("modules"), wanted)?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
    })
}

/// The kernel's package on which an empty package depends.
fn dependency(meta: &str) -> Result<String> {
    let find = || {
        let depends = run::capture(Command::new("apt-cache").args(["depends", meta])).unwrap_or_default();
        let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned);
        package.filter(|package| package.starts_with("linux-"))
    };
    if !system::is_debian() {
        bail!("{meta} is a Debian package, and this machine does not run Debian: pass a kernel's file with --kernel");
    }
    if let Some(package) = find() {
        return Ok(package);
    }
    system::update()?;
    find().with_context(|| format!("no package {meta} in apt's lists"))
}

/// The version that apt would install.
pub(super) fn version(package: &str) -> Result<String> {
    let show = run::capture(Command::new("apt-cache").args(["show", "--no-all-versions", package]))?;
    let version = show.lines().find_map(|line| line.strip_prefix("Version: "));
    Ok(version.with_context(|| format!("{package} has no version in apt's lists"))?.to_owned())
}

/// Downloads a package and unpacks its files to `root`.
pub(super) fn unpack(package: &str, root: &Path) -> Result<()> {
    fs::create_dir_all(root).with_context(|| format!("creating {}", root.display()))?;
    let download = |step| run::run_logged(Command::new("apt-get").args(["download", package]).current_dir(root), step);
    // The lists may be older than the archive, which then no longer has the package's file.
    download("downloading a kernel's package")
        .or_else(|_| system::update().and_then(|()| download("downloading a kernel's package again")))?;
    let archive = find(root, package)?;
    run::run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(root))?;
    fs::remove_file(&archive).with_context(|| format!("removing {}", archive.display()))
}

/// The entry of a directory whose name has the prefix.
pub(super) fn find(directory: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let has_prefix = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|n| n.starts_with(prefix));
    paths.find(has_prefix).with_context(|| format!("{} has no {prefix}*", directory.display()))
}

fn move_file(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).with_context(|| format!("moving {} to {}", from.display(), to.display()))
}
