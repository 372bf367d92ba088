//! The repository's chores as one command, `cargo xtask <verb>`: what a contributor types, what the continuous
//! integration runs and what the documentation names are the same thing, written once and in the project's language.

mod agent;
mod bench;
mod control_plane;
mod demo;
mod fuzz;
mod image;
mod kernels;
mod licences;
mod lint;
mod paths;
mod run;
mod setup;
mod sizes;
mod steps;
mod sweep;
mod test;
mod tidy;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, checks and measures cproxy; each verb first does what it needs of the others.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Finds or installs what the other verbs need; does nothing where it is there already
    Setup(setup::SetupArguments),
    /// Builds the static, stripped agent and prints its size and, last, its path
    Build,
    /// Makes what a platform bakes into its guests: files to unpack, an initramfs, an OCI image or a kernel
    Image(image::ImageArguments),
    /// Starts guests with kernels of their own
    #[command(subcommand)]
    Vm(vm::GuestVerb),
    /// Shows a ClusterIP at work on this machine (needs root)
    Demo(demo::DemoArguments),
    /// Runs every test suite and ends with one line that counts them (needs root)
    Test(test::TestArguments),
    /// Checks format, lints, documentation, licences and repository rules; prints what each dependency costs
    Lint,
    /// Prints what the agent's bytes are for: by crate, and everything that is in the file
    Size,
    /// Runs a benchmark, or all of them (needs root)
    Bench(bench::BenchArguments),
    /// Looks for inputs that break what reads them
    Fuzz(fuzz::FuzzArguments),
    /// Builds the Kubernetes control plane that tests run against and prints its directory
    ControlPlane,
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Setup(arguments) => setup::run(&arguments)?,
        Verb::Build => agent::run()?,
        Verb::Image(arguments) => image::run(&arguments)?,
        Verb::Vm(verb) => return vm::run(&verb),
        Verb::Demo(arguments) => demo::run(&arguments)?,
        Verb::Test(arguments) => return test::run(&arguments),
        Verb::Lint => return lint::run(),
        Verb::Size => sizes::run()?,
        Verb::Bench(arguments) => return bench::run(&arguments),
        Verb::Fuzz(arguments) => return fuzz::run(&arguments),
        Verb::ControlPlane => control_plane::run()?,
    }
    Ok(ExitCode::SUCCESS)
}
