//! `cargo xtask vm`: guests with kernels of their own, in QEMU, which emulates the processor and so needs nothing of
//! the machine.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::{
    architecture::Architecture,
    binary::{AGENT, RELAY},
    image,
    kernels::{self, LINUX_6_1},
    paths,
    releases::KUBERNETES,
    run, setup,
    test::summary::{Counts, Outcomes},
};

/// Variables by which tests find the files of a guest.
pub(crate) const KERNEL_VARIABLE: &str = "CPROXY_GUEST_KERNEL";
const INITRAMFS_VARIABLE: &str = "CPROXY_INITRAMFS";
const ROOTFS_VARIABLE: &str = "CPROXY_ROOTFS";
const OCI_VARIABLE: &str = "CPROXY_OCI";
const VSOCK_DEVICE_VARIABLE: &str = "CPROXY_VSOCK_DEVICE";
/// Kernels that lack what cproxy needs, each behind the name of the option that it lacks.
const LACKING_VARIABLE: &str = "CPROXY_LACKING_KERNELS";
/// The program with the tests of every socket call, to be run in a guest.
const MATRIX_VARIABLE: &str = "CPROXY_MATRIX";
/// Directory of a kernel with IPVS, for the machine in front of guests.
const BALANCER_VARIABLE: &str = "CPROXY_BALANCER_KERNEL";
/// File to which a test writes the facts about its kernel.
const REPORT_VARIABLE: &str = "CPROXY_GUEST_REPORT";

/// Part of the names of tests that start other kernels than the tested one.
const LACKING: &str = "lacking::";

/// Part of the names of tests with a container runtime in the guest. It needs more of a kernel than cproxy does;
/// Debian's kernels have it.
const CONTAINERS: &str = "containers::";

/// Part of the names of tests that enter an ELF kernel directly. Debian's kernels have no drivers for that machine.
const MICROVM: &str = "microvm::";

/// Parts of the names of tests that need nothing of this machine in the guest.
const FOREIGN: [&str; 4] = ["start::", "bad::", "long::cost::", "long::matrix::"];
/// Archive with programs for guests of another architecture.
const PROGRAMS_VARIABLE: &str = "CPROXY_GUEST_PROGRAMS";

/// Prefix of the names of Debian's kernels.
const PACKAGED: &str = "debian-";

/// Options that stock guest kernels leave out and cproxy can do without.
const LEAN: [&str; 1] = ["BPF_JIT"];
/// Options that it cannot do without.
const NEEDED: [&str; 2] = ["CGROUP_BPF", "CGROUPS"];

/// Subcommands for guests.
#[derive(Subcommand)]
pub(crate) enum GuestVerb {
    /// Boots each kernel and tests every socket call and the agent in it, with an API server outside (needs root)
    Test(GuestTestArguments),
    /// Shows how a microVM starts, with an API server outside (needs root)
    Demo(GuestDemoArguments),
}

/// Kernels to test.
#[derive(Args)]
pub(crate) struct GuestTestArguments {
    /// A kernel's file, in addition to Debian's 6.1 and 6.12 for virtual machines and one that `image kernel` builds.
    /// It gets no modules: virtio's network card on PCI, a serial console (8250), gzip for the initramfs, devtmpfs
    /// and all options of images/kernel/cproxy.config must be built in; `image kernel` builds them all in
    #[arg(long, value_name = "FILE")]
    kernel: Vec<PathBuf>,
    /// Tests only the kernels that are named
    #[arg(long, requires = "kernel")]
    only: bool,
    /// Architecture of the guests; for another one than this machine's, without container runtimes and systemd
    #[arg(long, value_name = "ARCHITECTURE", conflicts_with = "kernel")]
    target: Option<Architecture>,
}

/// Kernel to show.
#[derive(Args)]
pub(crate) struct GuestDemoArguments {
    /// A kernel's file, as for `vm test`; default: Debian's 6.1 for virtual machines
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
}

pub(crate) fn run(verb: &GuestVerb) -> Result<ExitCode> {
    match verb {
        GuestVerb::Test(arguments) => test_all(arguments),
        GuestVerb::Demo(arguments) => demo(arguments).map(|()| ExitCode::SUCCESS),
    }
}

/// Files that every guest is started with, besides its kernel.
#[derive(Clone)]
pub(crate) struct GuestFiles {
    agent: PathBuf,
    initramfs: PathBuf,
    rootfs: PathBuf,
    oci: PathBuf,
    control_plane: PathBuf,
    /// For tests alone.
    vsock_device: Option<PathBuf>,
}

impl GuestFiles {
    pub(crate) fn new(agent: &Path) -> Result<Self> {
        setup::for_guests()?;
        setup::for_cluster()?;
        let initramfs = image::initramfs_of(Architecture::of_host()?, agent)?;
        let rootfs = image::rootfs_of(agent)?;
        let oci = image::oci_of(agent)?;
        let control_plane = KUBERNETES.ensure()?;
        Ok(Self { agent: agent.to_owned(), initramfs, rootfs, oci, control_plane, vsock_device: None })
    }

    /// The same with the program of vsock devices.
    pub(crate) fn for_tests(agent: &Path) -> Result<Self> {
        Ok(Self { vsock_device: Some(setup::vsock_device()?), ..Self::new(agent)? })
    }

    /// The kernel that guests have where one is enough.
    pub(crate) fn kernel() -> Result<PathBuf> {
        kernels::packaged(LINUX_6_1)
    }

    /// Sets the variables of a command by which tests find the files.
    pub(crate) fn set_variables(&self, command: &mut Command, kernel: &Path) {
        command.env(AGENT.variable, &self.agent).env(KUBERNETES.variable, &self.control_plane);
        command.env(INITRAMFS_VARIABLE, &self.initramfs).env(KERNEL_VARIABLE, kernel);
        command.env(ROOTFS_VARIABLE, &self.rootfs).env(OCI_VARIABLE, &self.oci);
        command.envs(self.vsock_device.iter().map(|program| (VSOCK_DEVICE_VARIABLE, program)));
    }
}

/// The variable with the kernel of a balancer.
pub(crate) fn balancer() -> Result<[(&'static str, PathBuf); 1]> {
    Ok([(BALANCER_VARIABLE, kernels::packaged_for_kube_proxy(LINUX_6_1)?)])
}

fn demo(arguments: &GuestDemoArguments) -> Result<()> {
    run::require_root("the demonstration")?;
    let files = GuestFiles::new(&AGENT.build()?.shipped)?;
    let kernel = arguments.kernel.as_deref().map_or_else(GuestFiles::kernel, kernels::of_file)?;
    let mut command = run::cargo();
    command.args(["run", "--quiet", "--package", "cproxy-tests", "--bin", "vm-demo"]);
    files.set_variables(&mut command, &kernel);
    run::run(&mut command)
}

fn test_all(arguments: &GuestTestArguments) -> Result<ExitCode> {
    run::require_root("tests of guests")?;
    let host = Architecture::of_host()?;
    let target = arguments.target.unwrap_or(host);
    if target != host {
        return test_foreign(arguments, target);
    }
    let files = GuestFiles::for_tests(&AGENT.build()?.shipped)?;
    let relay = RELAY.build()?.shipped;
    let matrix = matrix(host)?;
    let reports = paths::target().join("vm");
    fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let mut outcomes = Outcomes::default();
    let start = Instant::now();
    let mut rows = Vec::new();
    for (name, kernel) in wanted(arguments, host)? {
        let report = reports.join(format!("{name}.json"));
        fs::remove_file(&report).ok();
        let mut skipped = vec!["--skip", LACKING];
        if !name.starts_with(PACKAGED) {
            skipped.extend(["--skip", CONTAINERS]);
        }
        if !kernel.join(kernels::ELF).exists() {
            skipped.extend(["--skip", MICROVM]);
        }
        let mut command = tests(&files, &kernel, &skipped);
        command.env(MATRIX_VARIABLE, &matrix).env(RELAY.variable, &relay).env(REPORT_VARIABLE, &report);
        command.envs(balancer()?);
        run_tests(&mut outcomes, &name, &mut command);
        rows.push(row(&name, &report));
    }
    if !arguments.only {
        let mut lacking = Vec::new();
        for option in NEEDED {
            lacking.push(format!("{option}={}", kernels::built(host, &[option.to_owned()])?.display()));
        }
        let mut command = tests(&files, &GuestFiles::kernel()?, &[LACKING]);
        run_tests(&mut outcomes, "lacking", command.env(LACKING_VARIABLE, lacking.join(",")));
    }
    print_table(&rows);
    let total = outcomes.print(start.elapsed(), false);
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tests every socket call and the agent in guests of another architecture. Programs of this machine do not run there,
/// and so the tests with container runtimes and with systemd are left out.
fn test_foreign(arguments: &GuestTestArguments, target: Architecture) -> Result<ExitCode> {
    setup::for_guests_of(target)?;
    setup::for_cluster()?;
    let agent = AGENT.build_for(target)?.shipped;
    let initramfs = image::initramfs_of(target, &agent)?;
    let control_plane = KUBERNETES.ensure()?;
    let (matrix, programs) = (matrix(target)?, kernels::programs(target)?);
    let reports = paths::target().join("vm").join(target.name());
    fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let mut outcomes = Outcomes::default();
    let start = Instant::now();
    let mut rows = Vec::new();
    for (name, kernel) in wanted(arguments, target)? {
        let report = reports.join(format!("{name}.json"));
        fs::remove_file(&report).ok();
        let mut command = cargo_test(&FOREIGN);
        command.env(AGENT.variable, &agent).env(KUBERNETES.variable, &control_plane);
        command.env(INITRAMFS_VARIABLE, &initramfs).env(KERNEL_VARIABLE, &kernel).env(REPORT_VARIABLE, &report);
        command.env(MATRIX_VARIABLE, &matrix).env(PROGRAMS_VARIABLE, &programs);
        run_tests(&mut outcomes, &name, &mut command);
        rows.push(row(&format!("{name}, {}", target.name()), &report));
    }
    print_table(&rows);
    let total = outcomes.print(start.elapsed(), false);
    Ok(if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Debian's kernels with their names.
fn packaged(target: Architecture) -> Result<Vec<(String, PathBuf)>> {
    let names = [format!("{PACKAGED}6.1"), format!("{PACKAGED}6.12")];
    names.into_iter().zip(kernels::for_machines(target)).map(|(name, of)| Ok((name, kernels::packaged(of)?))).collect()
}

/// The kernels with their names.
fn wanted(arguments: &GuestTestArguments, target: Architecture) -> Result<Vec<(String, PathBuf)>> {
    let mut wanted = Vec::new();
    if !arguments.only {
        wanted.extend(packaged(target)?);
        wanted.push(("built-6.1".to_owned(), kernels::built(target, &[])?));
    }
    if arguments.kernel.is_empty() {
        wanted.push(("interpreting-6.1".to_owned(), kernels::built(target, &LEAN.map(str::to_owned))?));
    }
    for file in &arguments.kernel {
        let directory = file.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        wanted.push((directory.unwrap_or("other").to_owned(), kernels::of_file(file)?));
    }
    Ok(wanted)
}

fn cargo_test(filter: &[&str]) -> Command {
    let mut command = run::cargo();
    command.args(["test", "--workspace", "--test", "guests", "--", "--test-threads=1", "--no-capture"]).args(filter);
    command
}

fn tests(files: &GuestFiles, kernel: &Path, filter: &[&str]) -> Command {
    let mut command = cargo_test(filter);
    files.set_variables(&mut command, kernel);
    command
}

/// Runs the tests of one kernel and adds their counts.
fn run_tests(outcomes: &mut Outcomes, name: &str, command: &mut Command) {
    run::report(format!("vm: {name}"));
    let start = Instant::now();
    match stream(command) {
        Ok((counts, status)) if status.success() || counts.failed > 0 => {
            outcomes.add_counts(name, counts, start.elapsed());
        }
        Ok((_, status)) => outcomes.fail_test(name, name, format!("ended before its tests did ({status})")),
        Err(error) => outcomes.fail_test(name, name, format!("{error:#}")),
    }
}

/// Runs tests with their output passed on line by line, and counts them on the way. Both output streams share a pipe,
/// so that messages of cargo and of the tests stay in order.
fn stream(command: &mut Command) -> Result<(Counts, ExitStatus)> {
    let (output, input) = io::pipe().context("making a pipe")?;
    let twin = input.try_clone().context("sharing a pipe")?;
    let mut child = command.stdout(input).stderr(twin).spawn().with_context(|| run::cannot_start(command))?;
    command.stdout(Stdio::null()).stderr(Stdio::null()); // closes this side's ends, or the output would never end
    let mut counts = Counts::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("reading the tests' output")?;
        counts += Counts::parse(&String::from_utf8_lossy(&line));
        let mut stdout = io::stdout().lock();
        stdout.write_all(&line).and_then(|()| stdout.write_all(b"\n")).context("writing the tests' output")?;
    }
    Ok((counts, child.wait().context("waiting for the tests")?))
}

/// The file of the tests of every socket call; static for another architecture.
fn matrix(target: Architecture) -> Result<PathBuf> {
    let mut command = run::cargo();
    command.args(["test", "--workspace", "--test", "matrix", "--no-run"]);
    if !target.is_of_host() {
        command.args(["--target", &target.triple()]);
        command.env(target.linker_variable(), target.tool("gcc"));
        command.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    }
    run::executables(&mut command)?.remove("matrix").context("cargo names no file of the test `matrix`")
}

/// Facts about a kernel, by their names.
type Row = BTreeMap<String, String>;

fn row(name: &str, report: &Path) -> Row {
    let text = fs::read_to_string(report).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let facts = lines.filter_map(|fact| {
        let word = |name: &str| fact.get(name)?.as_str().map(str::to_owned);
        Some((word("what")?, word("is")?))
    });
    facts.chain([("kernel".to_owned(), name.to_owned())]).collect()
}

/// Prints the table of docs/kernels.md.
fn print_table(rows: &[Row]) {
    let mut facts: Vec<&String> = rows.iter().flat_map(BTreeMap::keys).filter(|fact| *fact != "kernel").collect();
    facts.sort();
    facts.dedup();
    let cells = |fact: &str| -> String {
        rows.iter().map(|row| format!(" {} |", row.get(fact).map_or("", String::as_str))).collect()
    };
    println!("\n| |{}", cells("kernel"));
    println!("|---|{}", "---|".repeat(rows.len()));
    for fact in facts {
        // The number in front of a fact is its position in the table.
        println!("| {} |{}", fact.trim_start_matches(|char: char| char.is_ascii_digit() || char == ' '), cells(fact));
    }
    println!();
}
