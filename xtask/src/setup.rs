//! `cargo xtask setup`: prepares a machine for building and testing the agent. Tools that are there are left as they
//! are, so every other command calls this first.

mod compiler;
mod go;
mod linker;
pub(crate) mod packages;
mod services;
pub(crate) mod tool;
mod toolchain;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use self::tool::Tool;
use crate::{architecture::Architecture, run};

/// The host's side of a guest's vsock device, for QEMU. It moves a few megabytes and is compiled fast, not to be fast.
const VSOCK_DEVICE: Tool = Tool {
    name: "vhost-device-vsock",
    version: "0.3.0",
    duration: "half a minute",
    options: &["--config", "profile.release.opt-level=0"],
};

/// Options of `setup`.
#[derive(Args)]
pub(crate) struct SetupArguments {
    /// Leaves out the tools for this part of the tests
    #[arg(long, value_name = "PART")]
    without: Vec<SetupPart>,
}

/// A part that a contributor may not want to set up.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SetupPart {
    /// The tests against a real Kubernetes control plane, which is built with Go
    Cluster,
    /// The tests with programs in Go, Java, JavaScript and C, with redis and with Prometheus
    Programs,
    /// The tests that check images with other tools
    Images,
    /// The tests in virtual machines
    Guests,
    /// The tests of packages and of all else in a release
    Packages,
}

/// Sets up the machine and reports each step.
pub(crate) fn run(arguments: &SetupArguments) -> Result<()> {
    for_building()?;
    let is_wanted = |part| !arguments.without.contains(&part);
    if is_wanted(SetupPart::Cluster) {
        for_cluster()?;
    }
    if is_wanted(SetupPart::Programs) {
        packages::ensure_programs()?;
    }
    if is_wanted(SetupPart::Images) {
        for_image_tests()?;
    }
    if is_wanted(SetupPart::Packages) {
        for_dist_tests()?;
    }
    if is_wanted(SetupPart::Guests) {
        for_guests()?;
        vsock_device()?;
    }
    if is_wanted(SetupPart::Cluster) || is_wanted(SetupPart::Programs) {
        go::check()?;
    }
    Ok(())
}

/// The part of the setup that every build needs.
pub(crate) fn for_building() -> Result<()> {
    packages::ensure_commands()?;
    toolchain::ensure()
}

/// Whether an earlier setup has found or built what every build needs.
pub(crate) fn is_ready_to_build() -> bool {
    toolchain::is_recorded()
}

/// [`for_building`] and `others`. Where the toolchain is still to be set up, `build` compiles meanwhile as much as it
/// can; it fails where it needs the toolchain before that is there.
pub(crate) fn beside<T>(build: &mut Command, others: impl FnOnce() -> T) -> Result<T> {
    let ahead = match is_ready_to_build() {
        true => None,
        false => Some(run::Logged::spawn(build, "compiling dependencies")?),
    };
    for_building()?;
    let others = others();
    if let Some(ahead) = ahead {
        ahead.wait()?;
    }
    Ok(others)
}

/// The part of the setup that building for another architecture needs.
pub(crate) fn for_cross(target: Architecture) -> Result<()> {
    packages::ensure_cross(target)?;
    let triple = target.triple();
    let sysroot = run::capture(Command::new("rustc").args(["--print", "sysroot"]))?;
    if !Path::new(sysroot.trim()).join("lib/rustlib").join(&triple).is_dir() {
        run::report(format!("Rust: adding the target {triple}"));
        let added = run::run(Command::new("rustup").args(["target", "add", &triple]));
        return added.with_context(|| format!("install Rust's standard library for {triple}"));
    }
    run::report(format!("Rust: found the target {triple}"));
    Ok(())
}

/// The part of the setup that building releases of other projects needs.
pub(crate) fn for_releases() -> Result<()> {
    go::check()
}

/// The part of the setup that running against the control plane needs.
pub(crate) fn for_cluster() -> Result<()> {
    packages::ensure_cluster()
}

/// The part of the setup that benchmarks with other programs need.
pub(crate) fn for_benches() -> Result<()> {
    packages::ensure_benches()
}

/// The part of the setup that making images needs.
pub(crate) fn for_images() -> Result<()> {
    packages::ensure_images()
}

/// The part of the setup that the tests of images need.
pub(crate) fn for_image_tests() -> Result<()> {
    packages::ensure_images()?;
    packages::ensure_image_tests()
}

/// The part of the setup that making a release needs.
pub(crate) fn for_dist() -> Result<()> {
    packages::ensure_images()?;
    packages::ensure_dist()
}

/// The part of the setup that signing a release needs.
pub(crate) fn for_signing() -> Result<()> {
    packages::ensure_signing()
}

/// The part of the setup that the tests of a release need.
pub(crate) fn for_dist_tests() -> Result<()> {
    for_dist()?;
    packages::ensure_dist_tests()
}

/// The part of the setup that guests need.
pub(crate) fn for_guests() -> Result<()> {
    packages::ensure_guests()
}

/// The part of the setup that guests of another architecture need, and the agent in them.
pub(crate) fn for_guests_of(target: Architecture) -> Result<()> {
    for_guests()?;
    packages::ensure_emulator(target)?;
    for_cross(target)
}

/// Finds or builds the program that gives guests of tests a vsock device.
pub(crate) fn vsock_device() -> Result<PathBuf> {
    let program = VSOCK_DEVICE.ensure()?;
    run::report(format!("vsock: found {}", program.display()));
    Ok(program)
}

/// The part of the setup that building guest kernels needs.
pub(crate) fn for_kernels(target: Architecture) -> Result<()> {
    packages::ensure_kernels()?;
    if target.is_of_host() { Ok(()) } else { packages::ensure_cross(target) }
}

/// The part of the setup that the tests with programs need.
pub(crate) fn for_programs() -> Result<()> {
    packages::ensure_programs()?;
    go::check()
}
