//! Cost of looking for stale sockets: CPU time of the agent while endpoints leave, and its memory when it starts beside
//! many connected sockets.
//!
//! The agent reads manifests, so that no network takes part. TCP endpoints are the baseline: they leave in the same
//! way, but with the agent's defaults none of their sockets is closed, so that no pass is made.

use std::{
    env,
    fs::File,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    ops::Range,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Parser;
use cproxy_benches::{
    paired::Estimate,
    report::{Report, Table, cell, check_output},
    rest,
};
use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Daemon, RunningAgent, cproxy, cproxy_binary, eventually},
    sandbox::{Placement, Sandbox},
    usage::{Memory, cpu_time},
    world::{counter, start_agent},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

const PREFIX: &str = "cproxy-bench";

/// The Service's ClusterIP and port, for both protocols.
const VIP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)), 80);
const TARGET_PORT: u16 = 8080;
/// Endpoint that stays, to which sockets are connected.
const STAYS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// Endpoints of which each change removes one and adds the other.
const LEAVE: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 244, 0, 2), Ipv4Addr::new(10, 244, 0, 3)];

/// Pause between two changes: ten a second.
const PAUSE: Duration = Duration::from_millis(100);
/// Time without CPU use after which the agent counts as at rest.
const REST: Duration = Duration::from_millis(500);
/// Limit on every wait, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Local addresses and ports of the sockets: this many for each address, from the first port on.
const PORTS: u32 = 50_000;
const FIRST_PORT: u32 = 10_000;
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);

/// Largest number of sockets of one process, below the limit of descriptors that most machines set.
const SOCKETS_MAX: u32 = 19_000;
/// Output of a process that has opened everything.
const OPENED: &str = "opened";

/// Command line.
#[derive(Parser)]
#[command(name = "sockets", about = "Cost of looking for stale sockets")]
struct Arguments {
    /// Number of rounds, each with every measurement once
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of each measurement while endpoints leave
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Number of open descriptors beside which endpoints leave
    #[arg(long, value_name = "N", default_value_t = 19_900)]
    descriptors: u32,
    /// Number of connected sockets beside which the agent starts
    #[arg(long, value_name = "N", default_value_t = 95_000)]
    sockets: u32,
    /// One short round with few descriptors and sockets: only shows that everything works
    #[arg(long, conflicts_with_all = ["rounds", "seconds", "descriptors", "sockets"])]
    quick: bool,
    /// File for all samples; default: bench/sockets.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Opens so many files and the sockets with these numbers, and waits to be killed
    #[arg(long, hide = true, num_args = 3, value_names = ["FILES", "FIRST", "END"])]
    hold: Vec<u32>,
}

/// Protocol whose endpoints leave, and whether they do beside many descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scene {
    is_udp: bool,
    is_crowded: bool,
}

const SCENES: [Scene; 4] = [
    Scene { is_udp: false, is_crowded: false },
    Scene { is_udp: false, is_crowded: true },
    Scene { is_udp: true, is_crowded: false },
    Scene { is_udp: true, is_crowded: true },
];

/// Samples of a scene, one for each round.
#[derive(Clone, Debug, Default)]
struct Leaving {
    /// CPU time of the agent, in percent of one CPU.
    cpu_percent: Vec<f64>,
    passes: Vec<f64>,
}

/// Samples of restarts beside a number of sockets, one for each round.
#[derive(Clone, Debug, Default)]
struct Restarts {
    peak_mib: Vec<f64>,
    /// CPU time until the first pass has ended.
    cpu_ms: Vec<f64>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    if let [files, first, end] = *arguments.hold {
        return hold(files, first..end);
    }
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        arguments = Arguments { rounds: 1, seconds: 1, descriptors: 500, sockets: 2_000, ..arguments };
    }
    let sandbox = Sandbox::new(PREFIX);
    sandbox.add_addresses([STAYS].into_iter().chain(LEAVE));
    write(&sandbox, None, true);
    let mut agent = start_agent(&sandbox);
    let mut leaving: [Leaving; SCENES.len()] = Default::default();
    let mut restarts: [Restarts; 2] = Default::default();
    for round in 1..=arguments.rounds {
        eprintln!("round {round} of {}", arguments.rounds);
        for (scene, samples) in SCENES.iter().zip(&mut leaving) {
            scene.measure(&sandbox, &agent, &arguments, samples)?;
        }
        for (sockets, samples) in [0, arguments.sockets].into_iter().zip(&mut restarts) {
            let _holders = start_holders(&sandbox, sockets)?;
            agent.kill();
            agent = start_agent(&sandbox);
            samples.add(&sandbox, &agent)?;
        }
    }
    drop(agent);
    cproxy(&sandbox, &["cleanup"]).success();
    report(&arguments, &leaving, &restarts).finish(arguments.quick, arguments.output.as_deref())
}

/// Holds open files and connected sockets until this process is killed.
fn hold(files: u32, sockets: Range<u32>) -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).context("allowing more descriptors")?;
    let _files =
        (0..files).map(|_| File::open("/dev/null")).collect::<io::Result<Vec<_>>>().context("opening files")?;
    let _sockets = sockets.map(connect).collect::<io::Result<Vec<_>>>().context("connecting sockets")?;
    println!("{OPENED}");
    loop {
        thread::park();
    }
}

/// A UDP socket that is connected through the Service; each has another number.
fn connect(number: u32) -> io::Result<UdpSocket> {
    let address = Ipv4Addr::from_bits(FIRST_ADDRESS.to_bits() + number / PORTS);
    let port = u16::try_from(FIRST_PORT + number % PORTS).map_err(io::Error::other)?;
    let socket = UdpSocket::bind((address, port))?;
    socket.connect(VIP)?;
    Ok(socket)
}

/// A process that holds open files and the sockets with these numbers.
fn start_holder(sandbox: &Sandbox, files: u32, sockets: Range<u32>) -> Result<Daemon> {
    let mut command = Command::new(env::current_exe().context("this program has no path")?);
    command.arg("--hold").args([files, sockets.start, sockets.end].map(|number| number.to_string()));
    let mut holder = Daemon::spawn(sandbox, "holder", Placement::Hooked, command);
    holder.wait_log(OPENED, TIMEOUT);
    Ok(holder)
}

/// As many processes as it takes to hold that many sockets.
fn start_holders(sandbox: &Sandbox, sockets: u32) -> Result<Vec<Daemon>> {
    let first = (0..sockets).step_by(SOCKETS_MAX as usize);
    first.map(|first| start_holder(sandbox, 0, first..sockets.min(first + SOCKETS_MAX))).collect()
}

/// Writes the Service with the endpoint that stays and, after some changes, for one protocol another.
fn write(sandbox: &Sandbox, changes: Option<usize>, is_udp: bool) {
    let service = Service::new("web").cluster_ips([VIP.ip()]);
    let service = service.tcp("http", VIP.port(), TARGET_PORT).udp("dns", VIP.port(), TARGET_PORT);
    let other = changes.and_then(|changes| LEAVE.get(changes % LEAVE.len()));
    let ready = |has_other: bool| [Some(&STAYS), other.filter(|_| has_other)].into_iter().flatten();
    let tcp = Slice::v4("web").name("web-tcp").tcp("http", TARGET_PORT).ready(ready(!is_udp));
    let udp = Slice::v4("web").name("web-udp").udp("dns", TARGET_PORT).ready(ready(is_udp));
    manifest::write(&sandbox.manifest_dir(), "web.json", [Value::from(service), tcp.into(), udp.into()]);
}

impl Scene {
    fn name(self, descriptors: u32) -> String {
        let protocol = if self.is_udp { "UDP" } else { "TCP" };
        let place = if self.is_crowded { format!(", beside {descriptors} open descriptors") } else { String::new() };
        format!("{protocol} endpoints leave{place}")
    }

    /// Changes endpoints for a while. Each change removes the one that the last change added.
    fn measure(self, sandbox: &Sandbox, agent: &RunningAgent, plan: &Arguments, samples: &mut Leaving) -> Result<()> {
        // A socket that is connected now is connected to the endpoint that stays.
        rest::wait(1, REST, TIMEOUT, || cpu_time(agent.pid()))?;
        let _holder = self.is_crowded.then(|| start_holder(sandbox, plan.descriptors, 0..1)).transpose()?;
        let cpu_before = rest::wait(1, REST, TIMEOUT, || cpu_time(agent.pid()))?;
        let passes_before = counter(sandbox, "sockets_passes");
        let start = Instant::now();
        for (number, change) in (1..=plan.seconds * 10).zip(1..) {
            thread::sleep((start + PAUSE * number).saturating_duration_since(Instant::now()));
            write(sandbox, Some(change), self.is_udp);
        }
        thread::sleep(PAUSE);
        let (cpu, time) = (cpu_time(agent.pid()) - cpu_before, start.elapsed());
        samples.cpu_percent.push(100.0 * cpu.as_secs_f64() / time.as_secs_f64());
        samples.passes.push((counter(sandbox, "sockets_passes") - passes_before) as f64);
        write(sandbox, None, self.is_udp);
        Ok(())
    }
}

impl Restarts {
    /// Adds a sample of an agent that has just started on the pins of another.
    fn add(&mut self, sandbox: &Sandbox, agent: &RunningAgent) -> Result<()> {
        eventually(TIMEOUT, "the first pass", || match counter(sandbox, "sockets_passes") {
            0 => Err("it has not ended"),
            _ => Ok(()),
        });
        let cpu = rest::wait(1, REST, TIMEOUT, || cpu_time(agent.pid()))?;
        self.peak_mib.push(Memory::of(agent.pid()).peak as f64 / f64::from(1 << 20));
        self.cpu_ms.push(cpu.as_secs_f64() * 1e3);
        Ok(())
    }
}

fn report(arguments: &Arguments, leaving: &[Leaving], restarts: &[Restarts; 2]) -> Report {
    let mut report = Report::new("sockets");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    report.tables = vec![leaving_table(arguments, leaving), restarts_table(arguments.sockets, restarts)];
    let scenes = SCENES.iter().zip(leaving).map(|(scene, samples)| {
        let Leaving { cpu_percent, passes } = samples;
        json!({"scene": scene.name(arguments.descriptors), "cpu_percent": cpu_percent, "passes": passes})
    });
    let restarted = [0, arguments.sockets].into_iter().zip(restarts).map(|(sockets, samples)| {
        let Restarts { peak_mib, cpu_ms } = samples;
        json!({"sockets": sockets, "peak_mib": peak_mib, "cpu_ms": cpu_ms})
    });
    report.samples = json!({"leaving": scenes.collect::<Vec<_>>(), "restarts": restarted.collect::<Vec<_>>()});
    report.notes.push(format!(
        "{} rounds. Ten times a second an endpoint leaves and another comes, for {} s. The agent closes UDP sockets, \
         its default, so no pass is made for TCP endpoints: what UDP endpoints cost more than TCP endpoints is the \
         cost of passes. The process with the descriptors also has a UDP socket that is connected to an endpoint that \
         stays. The sockets beside which the agent starts again are connected through the Service and none is stale, \
         but its first pass has to look at each.",
        arguments.rounds, arguments.seconds
    ));
    report
}

fn leaving_table(arguments: &Arguments, leaving: &[Leaving]) -> Table {
    let baseline = leaving.first().map(|samples| samples.cpu_percent.as_slice()).unwrap_or_default();
    let row = |(scene, samples): (&Scene, &Leaving)| {
        let cells =
            [cell(samples.cpu_percent.clone()), ratio(&samples.cpu_percent, baseline), cell(samples.passes.clone())];
        (scene.name(arguments.descriptors), cells.into())
    };
    Table {
        title: "CPU time of the agent while endpoints leave".to_owned(),
        columns: ["% of a CPU", "ratio to the first line", "passes"].map(str::to_owned).into(),
        rows: SCENES.iter().zip(leaving).map(row).collect(),
    }
}

fn restarts_table(sockets: u32, [without, with]: &[Restarts; 2]) -> Table {
    let row = |name: &str, without: &[f64], with: &[f64]| {
        (name.to_owned(), vec![cell(without.to_vec()), cell(with.to_vec()), ratio(with, without)])
    };
    Table {
        title: "The agent started again, beside connected UDP sockets".to_owned(),
        columns: vec!["no sockets".to_owned(), format!("{sockets} sockets"), "ratio".to_owned()],
        rows: vec![
            row("peak resident memory, MiB", &without.peak_mib, &with.peak_mib),
            row("CPU time until its first pass has ended, ms", &without.cpu_ms, &with.cpu_ms),
        ],
    }
}

fn ratio(samples: &[f64], baseline: &[f64]) -> String {
    Estimate::of_ratios(samples, baseline).map_or_else(|| "-".to_owned(), |estimate| estimate.to_string())
}
