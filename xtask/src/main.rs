//! Tasks of the repository as one command, `cargo xtask <verb>`, for contributors, continuous integration and the
//! documentation alike.

mod advisories;
mod architecture;
mod bench;
mod binary;
mod debian;
mod demo;
mod dist;
mod docs;
mod fleet;
mod fuzz;
mod image;
mod kernels;
mod licences;
mod lint;
mod manual;
mod older;
mod paths;
mod publisher;
mod releases;
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

/// Builds, checks and measures cproxy. Each command first runs those it depends on.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Finds or installs the tools that the other commands need
    Setup(setup::SetupArguments),
    /// Builds the agent and the relay, static and stripped; prints their sizes, their paths and, last, the agent's
    Build(binary::BuildArguments),
    /// Builds an image for guests: files to unpack, an initramfs, an OCI image or a kernel
    Image(image::ImageArguments),
    /// Makes a release directory for all architectures; prints its path last
    Dist(dist::DistArguments),
    /// Writes the agent's man pages and shell completions into a directory
    Manual(manual::ManualArguments),
    /// Builds the site of all documents, with generated reference pages, and checks its links; prints its first page
    Docs(docs::DocsArguments),
    /// Starts guests with kernels of their own
    #[command(subcommand)]
    Vm(vm::GuestVerb),
    /// Starts a cluster whose pods are microVMs
    #[command(subcommand)]
    Fleet(fleet::FleetVerb),
    /// Shows a ClusterIP at work on this machine (needs root)
    Demo(demo::DemoArguments),
    /// Runs all test suites and counts their tests (needs root)
    Test(test::TestArguments),
    /// Checks format, lints, documentation, licences and rules of the repository; prints the size of each dependency
    Lint(lint::LintArguments),
    /// Looks for known vulnerabilities of dependencies in a database that it downloads
    Advisories,
    /// Prints the agent's size by crate and by part of the file, and the relay's
    Size(sizes::SizeArguments),
    /// Runs a benchmark, or all of them (needs root)
    Bench(bench::BenchArguments),
    /// Runs the fuzz targets
    Fuzz(fuzz::FuzzArguments),
    /// Builds the Kubernetes control plane for tests and prints its directory
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
        Verb::Build(arguments) => binary::run(&arguments)?,
        Verb::Image(arguments) => image::run(&arguments)?,
        Verb::Dist(arguments) => dist::run(&arguments)?,
        Verb::Manual(arguments) => manual::run(&arguments)?,
        Verb::Docs(arguments) => docs::run(&arguments)?,
        Verb::Vm(verb) => return vm::run(&verb),
        Verb::Fleet(verb) => fleet::run(&verb)?,
        Verb::Demo(arguments) => demo::run(&arguments)?,
        Verb::Test(arguments) => return test::run(&arguments),
        Verb::Lint(arguments) => return lint::run(&arguments),
        Verb::Advisories => advisories::run()?,
        Verb::Size(arguments) => sizes::run(&arguments)?,
        Verb::Bench(arguments) => return bench::run(&arguments),
        Verb::Fuzz(arguments) => return fuzz::run(&arguments),
        Verb::ControlPlane => releases::run()?,
    }
    Ok(ExitCode::SUCCESS)
}
