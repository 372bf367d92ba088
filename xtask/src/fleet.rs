//! `cargo xtask fleet`: a cluster whose node is the example of a virtual-kubelet provider, which starts a microVM for
//! each pod.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};

use crate::{
    architecture::Architecture,
    binary::{AGENT, RELAY},
    image, kernels, paths,
    releases::{CONTROLLERS, COREDNS, KUBERNETES},
    run, setup,
    vm::KERNEL_VARIABLE,
};

/// Variables by which the demonstration and the tests find files.
const PROVIDER_VARIABLE: &str = "CPROXY_FLEET_PROVIDER";
const IMAGES_VARIABLE: &str = "CPROXY_FLEET_IMAGES";
const INITRAMFS_VARIABLE: &str = "CPROXY_INITRAMFS";

/// Subcommands for the fleet.
#[derive(Subcommand)]
pub(crate) enum FleetVerb {
    /// Shows Deployments, a Service and clients in microVMs of their own, with times (needs root)
    Demo(FleetDemoArguments),
}

/// Kernel and size of the fleet.
#[derive(Args)]
pub(crate) struct FleetDemoArguments {
    /// A kernel's file, as for `vm test`; default: one that `image kernel` builds
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Number of VMs of the largest Deployment
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=16))]
    vms: u32,
}

pub(crate) fn run(verb: &FleetVerb) -> Result<()> {
    let FleetVerb::Demo(arguments) = verb;
    run::require_root("the demonstration")?;
    let kernel = match &arguments.kernel {
        Some(file) => kernels::of_file(file)?,
        None => kernels::built(Architecture::of_host()?, &[])?,
    };
    let (agent, relay) = (AGENT.build()?.shipped, RELAY.build()?.shipped);
    let files = FleetFiles::new(&agent, &relay)?;
    let mut command = run::cargo();
    command.args(["run", "--quiet", "--package", "cproxy-tests", "--bin", "fleet-demo", "--"]);
    files.set_variables(&mut command, &kernel);
    run::run(command.arg(arguments.vms.to_string()))
}

/// Everything that a fleet is started from, besides a kernel.
#[derive(Clone)]
pub(crate) struct FleetFiles {
    relay: PathBuf,
    initramfs: PathBuf,
    images: PathBuf,
    provider: PathBuf,
    control_plane: PathBuf,
    controllers: PathBuf,
}

impl FleetFiles {
    pub(crate) fn new(agent: &Path, relay: &Path) -> Result<Self> {
        setup::for_guests()?;
        let control_plane = KUBERNETES.ensure()?;
        let controllers = CONTROLLERS.ensure()?;
        let coredns = COREDNS.ensure()?.join("coredns");
        Ok(Self {
            relay: relay.to_owned(),
            initramfs: image::initramfs_of(Architecture::of_host()?, agent)?,
            images: image::fleet_images(&coredns)?,
            provider: build_provider()?,
            control_plane,
            controllers,
        })
    }

    /// Sets the variables of a command by which tests find the files.
    pub(crate) fn set_variables(&self, command: &mut Command, kernel: &Path) {
        command.env(KUBERNETES.variable, &self.control_plane).env(CONTROLLERS.variable, &self.controllers);
        command.env(RELAY.variable, &self.relay).env(KERNEL_VARIABLE, kernel);
        command.env(INITRAMFS_VARIABLE, &self.initramfs).env(IMAGES_VARIABLE, &self.images);
        command.env(PROVIDER_VARIABLE, &self.provider);
    }
}

/// Builds the example. Go has a cache of its own.
fn build_provider() -> Result<PathBuf> {
    setup::for_releases()?;
    let directory = paths::target().join("fleet");
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let program = directory.join("virtual-kubelet");
    let mut command = Command::new("go");
    command.current_dir(paths::workspace().join("images/virtual-kubelet")).env("CGO_ENABLED", "0");
    command.args(["build", "-trimpath", "-buildvcs=false", "-o"]).arg(&program).arg(".");
    run::run_logged(&mut command, "building the virtual-kubelet provider")?;
    Ok(program)
}
