//! Debian's packages of kernels and of their sources, unpacked without being installed.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use super::{ARCHITECTURE, CONFIG, KERNEL, cached, hash, modules};
use crate::{architecture::Architecture, paths, run, setup::packages as system};

/// iproute2 and the packages of its libraries.
const IPROUTE2: [&str; 9] =
    ["iproute2", "libbpf1", "libbsd0", "libc6", "libcap2", "libelf1", "libmd0", "libmnl0", "zlib1g"];
/// OpenRC, runit, s6 and logrotate, and the packages of their libraries.
const INIT_SYSTEMS: [&str; 22] = [
    "openrc",
    "insserv",
    "runit",
    "s6",
    "execline",
    "logrotate",
    "libacl1",
    "libaudit1",
    "libc6",
    "libcap-ng0",
    "libcap2",
    "libcrypt1",
    "libeinfo1",
    "libexecline2.9",
    "libpam0g",
    "libpcre2-8-0",
    "libpopt0",
    "librc1",
    "libs6-2.11",
    "libselinux1",
    "libskarnet2.13",
    "libgcc-s1",
];
/// Archive of programs.
const PROGRAMS: &str = "programs.tar";

/// The package that depends on Debian 12's kernel for virtual machines.
pub(crate) const LINUX_6_1: &str = "linux-image-cloud-amd64";
/// The same of its newer kernel.
pub(crate) const LINUX_6_12: &str = "linux-image-6.12-cloud-amd64";

/// Debian's kernels for virtual machines, for an architecture: 6.1 and 6.12.
pub(crate) fn for_machines(target: Architecture) -> [&'static str; 2] {
    match target {
        Architecture::X86_64 => [LINUX_6_1, LINUX_6_12],
        Architecture::Aarch64 => ["linux-image-cloud-arm64:arm64", "linux-image-6.12-cloud-arm64:arm64"],
    }
}

/// A static busybox for another architecture.
pub(crate) fn busybox(target: Architecture) -> Result<PathBuf> {
    let package = format!("busybox-static:{}", target.debian());
    let version = version(&package)?;
    let directory = cached(&format!("{package}_{version}"), |directory| {
        let root = directory.join("root");
        unpack(&package, &root)?;
        move_file(&root.join("bin/busybox"), &directory.join("busybox"))?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
    })?;
    Ok(directory.join("busybox"))
}

/// An archive with iproute2 and its libraries for another architecture.
pub(crate) fn programs(target: Architecture) -> Result<PathBuf> {
    archive(&format!("programs-{}", target.debian()), &IPROUTE2.map(|name| format!("{name}:{}", target.debian())))
}

/// An archive with other init systems than this machine's and logrotate, which tests unpack into roots of their own.
pub(crate) fn init_systems() -> Result<PathBuf> {
    archive("init-systems", &INIT_SYSTEMS.map(str::to_owned))
}

/// An archive with the files of packages.
fn archive(name: &str, packages: &[String]) -> Result<PathBuf> {
    let versions = packages.iter().map(|package| version(package)).collect::<Result<Vec<_>>>()?;
    let directory = cached(&format!("{name}-{}", hash(&versions.join(" "))), |directory| {
        let root = directory.join("root");
        packages.iter().try_for_each(|package| unpack(package, &root))?;
        let archive = directory.join(PROGRAMS);
        run::run(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
    })?;
    Ok(directory.join(PROGRAMS))
}

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
        if let Some((_, architecture)) = package.split_once(':') {
            let target = Architecture::of_debian(architecture).context("an architecture of no kernel here")?;
            let file = directory.join(ARCHITECTURE);
            fs::write(&file, target.name()).with_context(|| format!("writing {}", file.display()))?;
        }
        modules::copy_with_dependencies(&root.join("lib/modules"), &directory.join("modules"), wanted)?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
    })
}

/// The kernel's package on which an empty package depends.
fn dependency(meta: &str) -> Result<String> {
    let find = || {
        let depends = run::capture(apt("apt-cache", meta).args(["depends", meta])).unwrap_or_default();
        let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned);
        package.filter(|package| package.starts_with("linux-"))
    };
    if !system::is_debian() {
        bail!("{meta} is a Debian package, and this machine does not run Debian: pass a kernel's file with --kernel");
    }
    if let Some(package) = find() {
        return Ok(package);
    }
    update(meta)?;
    find().with_context(|| format!("no package {meta} in apt's lists"))
}

/// The version that apt would install.
pub(super) fn version(package: &str) -> Result<String> {
    let show = || run::capture(apt("apt-cache", package).args(["show", "--no-all-versions", package]));
    let show = show().or_else(|_| update(package).and_then(|()| show()))?;
    let version = show.lines().find_map(|line| line.strip_prefix("Version: "));
    Ok(version.with_context(|| format!("{package} has no version in apt's lists"))?.to_owned())
}

/// Downloads a package and unpacks its files to `root`.
pub(super) fn unpack(package: &str, root: &Path) -> Result<()> {
    fs::create_dir_all(root).with_context(|| format!("creating {}", root.display()))?;
    let download = |step| run::run_logged(apt("apt-get", package).args(["download", package]).current_dir(root), step);
    // The lists may be older than the archive, which then no longer has the package's file.
    download("downloading a kernel's package")
        .or_else(|_| update(package).and_then(|()| download("downloading a kernel's package again")))?;
    let archive = find(root, package.split(':').next().unwrap_or(package))?;
    run::run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(root))?;
    fs::remove_file(&archive).with_context(|| format!("removing {}", archive.display()))
}

/// One of apt's programs. For a package of another architecture, `NAME:ARCHITECTURE`, it has lists of its own, so that
/// the machine's packages stay as they are.
fn apt(program: &str, package: &str) -> Command {
    let mut command = Command::new(program);
    if let (Some((_, architecture)), Ok(cache)) = (package.split_once(':'), paths::cache()) {
        let lists = cache.join("apt").join(architecture);
        fs::create_dir_all(lists.join("partial")).ok();
        command.arg("-o").arg(format!("APT::Architectures::={architecture}"));
        command.arg("-o").arg(format!("Dir::State::Lists={}", lists.display()));
        command.args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]);
    }
    command
}

/// Updates the lists that have a package.
fn update(package: &str) -> Result<()> {
    if package.contains(':') {
        return run::run_logged(
            apt("apt-get", package).args(["-qq", "update"]),
            "updating lists of another architecture",
        );
    }
    system::update()
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
