//! Commands of the operating system that builds and tests call, and the Debian packages they come in.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result, bail};

use super::services;
use crate::{architecture::Architecture, paths, run};

/// A command and the Debian packages that bring it.
type Provided = (&'static str, &'static [&'static str]);

/// Commands of builds and of most tests.
static COMMANDS: [Provided; 16] = [
    ("bindfs", &["bindfs"]),
    ("c++", &["g++"]),
    ("cc", &["gcc", "libc6-dev"]),
    ("curl", &["curl"]),
    ("dnsmasq", &["dnsmasq-base"]),
    ("flock", &["util-linux"]),
    ("ip", &["iproute2"]),
    ("ld.bfd", &["binutils"]),
    ("nsenter", &["util-linux"]),
    ("openssl", &["openssl"]),
    ("setarch", &["util-linux"]),
    ("setpriv", &["util-linux"]),
    ("strace", &["strace"]),
    ("strip", &["binutils"]),
    ("umount", &["mount"]),
    ("unshare", &["util-linux"]),
];

/// Commands of kube-proxy, which tests and benchmarks run beside the agent.
static CLUSTER: [Provided; 2] = [("iptables", &["iptables"]), ("nft", &["nftables"])];

/// Programs that tests run through ClusterIPs, those that read metrics, and shells with completions.
static PROGRAMS: [Provided; 12] = [
    ("busybox", &["busybox-static"]),
    ("dig", &["bind9-dnsutils"]),
    ("fish", &["fish"]),
    ("javac", &["default-jdk-headless"]),
    ("musl-gcc", &["musl-tools"]),
    ("nginx", &["nginx-light"]),
    ("node", &["nodejs"]),
    ("prometheus", &["prometheus"]),
    ("promtool", &["prometheus"]),
    ("python3", &["python3"]),
    ("redis-cli", &["redis-tools"]),
    ("zsh", &["zsh"]),
];

/// Clients, servers and peers of benchmarks.
static BENCHES: [Provided; 10] = [
    ("dnsmasq", &["dnsmasq-base"]),
    ("dnsperf", &["dnsperf"]),
    ("iperf3", &["iperf3"]),
    ("ipset", &["ipset"]),
    ("iptables", &["iptables"]),
    ("nft", &["nftables"]),
    ("nginx", &["nginx-light"]),
    ("redis-benchmark", &["redis-tools"]),
    ("redis-server", &["redis-server"]),
    ("wrk", &["wrk"]),
];

/// Commands whose packages have a service of the same name.
const SERVICES: [&str; 3] = ["nginx", "prometheus", "redis-server"];

/// Programs that are put into images.
static IMAGES: [Provided; 1] = [("busybox", &["busybox-static"])];

/// Tools that write releases.
static DIST: [Provided; 2] = [("objcopy", &["binutils"]), ("sqfstar", &["squashfs-tools"])];

/// Tools that sign releases.
static SIGNING: [Provided; 1] = [("minisign", &["minisign"])];

/// Tools that check releases, and make the system in which packages are installed.
static DIST_TESTS: [Provided; 8] = [
    ("cpio", &["cpio"]),
    ("debootstrap", &["debootstrap"]),
    ("dpkg-deb", &["dpkg"]),
    ("minisign", &["minisign"]),
    ("rpm", &["rpm"]),
    ("rpm2cpio", &["rpm2cpio"]),
    ("skopeo", &["skopeo"]),
    ("unsquashfs", &["squashfs-tools"]),
];

/// Tools that check images.
static IMAGE_TESTS: [Provided; 3] = [("skopeo", &["skopeo"]), ("systemd-analyze", &["systemd"]), ("umoci", &["umoci"])];

/// Commands that start guests.
static GUESTS: [Provided; 11] = [
    ("busybox", &["busybox-static"]),
    ("cpio", &["cpio"]),
    ("dnsmasq", &["dnsmasq-base"]),
    ("ipvsadm", &["ipvsadm"]),
    ("mke2fs", &["e2fsprogs"]),
    ("nsenter", &["util-linux"]),
    ("qemu-system-x86_64", &["qemu-system-x86"]),
    ("runc", &["runc"]),
    ("systemctl", &["systemd"]),
    ("tcpdump", &["tcpdump"]),
    ("xz", &["xz-utils"]),
];

/// Commands that build guest kernels, besides a compiler.
static KERNELS: [Provided; 4] = [("bc", &["bc"]), ("bison", &["bison"]), ("flex", &["flex"]), ("xz", &["xz-utils"])];

/// The library that the kernel's own tools are linked with.
const KERNEL_LIBRARY: &str = "libelf-dev";

/// Installs the packages of the commands that are missing.
pub(crate) fn ensure_commands() -> Result<()> {
    ensure("commands", &COMMANDS)
}

/// Installs the packages that kube-proxy needs and that are missing.
pub(crate) fn ensure_cluster() -> Result<()> {
    ensure("cluster", &CLUSTER)
}

/// Installs the packages of the programs that are missing.
pub(crate) fn ensure_programs() -> Result<()> {
    ensure_without_services("programs", &PROGRAMS)
}

/// Installs the packages of the programs that benchmarks run and that are missing.
pub(crate) fn ensure_benches() -> Result<()> {
    ensure_without_services("benches", &BENCHES)
}

/// Installs missing packages, and starts none of their services.
fn ensure_without_services(what: &str, commands: &[Provided]) -> Result<()> {
    let is_new = |command: &str| SERVICES.contains(&command) && paths::program(command).is_none();
    let new: Vec<&str> = commands.iter().map(|(command, _)| *command).filter(|command| is_new(command)).collect();
    let ensure = || ensure(what, commands);
    // Elsewhere it fails with what to install.
    let can_install = is_debian() && run::is_root();
    if new.is_empty() || !can_install { ensure() } else { services::without_starting(&new, ensure) }
}

/// Installs the packages of what is put into images, where it is missing.
pub(crate) fn ensure_images() -> Result<()> {
    ensure("images", &IMAGES)
}

/// Installs the packages that images are tested with and that are missing.
pub(crate) fn ensure_image_tests() -> Result<()> {
    ensure("image tests", &IMAGE_TESTS)
}

/// Installs the packages that releases are made with and that are missing.
pub(crate) fn ensure_dist() -> Result<()> {
    ensure("dist", &DIST)
}

/// Installs the packages that releases are signed with and that are missing.
pub(crate) fn ensure_signing() -> Result<()> {
    ensure("signing", &SIGNING)
}

/// Installs the packages that releases are tested with and that are missing.
pub(crate) fn ensure_dist_tests() -> Result<()> {
    ensure("dist tests", &DIST_TESTS)
}

/// Installs the packages that guests need and that are missing.
pub(crate) fn ensure_guests() -> Result<()> {
    ensure("guests", &GUESTS)
}

/// Installs the emulator of an architecture, if it is missing.
pub(crate) fn ensure_emulator(target: Architecture) -> Result<()> {
    ensure("emulator", &[target.emulator()])
}

/// Installs a cross compiler, if it is missing.
pub(crate) fn ensure_cross(target: Architecture) -> Result<()> {
    ensure("cross compiler", &[target.cross_compiler()])
}

/// Installs the packages that building kernels needs and that are missing.
pub(crate) fn ensure_kernels() -> Result<()> {
    ensure("kernels", &KERNELS)?;
    if is_debian() { install(&missing(&[KERNEL_LIBRARY])) } else { Ok(()) }
}

fn ensure(what: &str, commands: &[Provided]) -> Result<()> {
    let missing = || commands.iter().filter(|(command, _)| paths::program(command).is_none());
    let mut packages: Vec<&str> = missing().flat_map(|(_, packages)| packages.iter().copied()).collect();
    packages.dedup();
    install(&packages)?;
    if let Some((command, _)) = missing().next() {
        bail!("the command `{command}` is still missing: put it in PATH");
    }
    let names: Vec<_> = commands.iter().map(|(command, _)| *command).collect();
    run::report(format!("{what}: found {}", names.join(" ")));
    Ok(())
}

/// Whether this machine's packages are Debian's.
pub(crate) fn is_debian() -> bool {
    paths::program("dpkg-query").is_some() && paths::program("apt-get").is_some()
}

/// The packages of `wanted` that are not installed.
pub(crate) fn missing<'a>(wanted: &[&'a str]) -> Vec<&'a str> {
    wanted.iter().copied().filter(|package| !is_installed(package)).collect()
}

fn is_installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${db:Status-Status}", package]);
    run::capture(&mut query).is_ok_and(|status| status.starts_with("installed"))
}

/// Installs Debian packages, or says which ones to install where this process cannot.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let names = packages.join(" ");
    if !is_debian() {
        bail!("missing on this machine, by their names on Debian: {names}; install them and run this again");
    }
    if !run::is_root() {
        bail!("missing packages: run `apt-get update && apt-get install {names}` as root, then this again");
    }
    run::report(format!("packages: installing {names}"));
    update()?;
    let mut command = apt_get();
    command.args(["install", "--yes", "--no-install-recommends"]).args(packages);
    run::run_logged(&mut command, "installing packages")
}

/// Downloads the package lists, once in this process.
pub(crate) fn update() -> Result<()> {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if !IS_DONE.load(Ordering::Relaxed) {
        run::run_logged(apt_get().arg("update"), "updating the package lists").context("apt-get update")?;
        IS_DONE.store(true, Ordering::Relaxed);
    }
    Ok(())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("-qq").env("DEBIAN_FRONTEND", "noninteractive");
    command
}
