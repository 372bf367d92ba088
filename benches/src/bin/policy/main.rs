//! Cost of a network policy for the pod: calls that it allows and calls that it denies, beside the kernel's packet
//! filters, and for the agent: start, load and changes.
//!
//! Each subject has a pod of its own: a network namespace with a link to the servers, a cgroup, and an agent whose
//! programs translate addresses of Services. So subjects differ by the policy alone. One process makes all calls and
//! answers them; it enters a pod's cgroup and network namespace for as long as it makes sockets there.

mod calls;
mod changes;
mod cluster;
mod engine;
mod place;
mod programs;
mod rounds;
mod starts;
mod watch;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use cproxy_benches::{
    calls::{CALL_TIMEOUT, CALLS},
    kube_proxy::LEGACY_IPTABLES,
    paired::Estimate,
    pod::enter,
    report::{Figure, Report, Table, Target, Verdict, check_output},
};
use cproxy_tests::{process::cproxy_binary, relay_server::relay_binary, sandbox::Sandbox};
use serde_json::json;

use crate::{
    calls::{ACCEPT, Answer, CONNECT, STREAM, UDP},
    cluster::{Cluster, Scene},
    engine::{ALLOWED, DENIED, Engine, Subject},
    place::{Servers, Stand},
};

const PREFIX: &str = "cproxy-bench";

/// Numbers of peers of the policies.
const PEERS: [u32; 3] = [10, 1_000, 10_000];
const QUICK_PEERS: [u32; 3] = [2, 20, 50];
/// Denied calls of each pod whose policy answers.
const DENIALS: usize = 50;

/// Aims for figures that are no ratios.
const DENIAL_MAX_MS: f64 = 1.0;
const CHANGE_MAX_MS: f64 = 10.0;
const START_MAX_MS: f64 = 5.0;
/// The same with the most peers.
const LATE_START_MAX_MS: f64 = 30.0;
const LOAD_MAX_MS: f64 = 20.0;
const LOAD_MAX_KIB: f64 = 2_048.0;

/// Command line.
#[derive(Parser)]
#[command(name = "policy", about = "Cost of a network policy, beside packet filters of the kernel")]
struct Arguments {
    /// Number of rounds, in each of which every subject has a turn
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of starts of the agent with each policy
    #[arg(long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// Number of changes of a label with each policy
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Measures only this part
    #[arg(long, value_name = "PART")]
    only: Option<Part>,
    /// Few peers, rounds, starts and changes: only shows that everything works
    #[arg(long, conflicts_with_all = ["rounds", "starts", "changes"])]
    quick: bool,
    /// File for all samples; default: bench/policy.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Calls of pods and to them.
    Calls,
    /// Starts of the agent, and changes, with an API server and a relay.
    Agent,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.rounds, arguments.starts, arguments.changes) = (3, 2, 2);
    }
    let mut report = Report::new("policy");
    report.samples = json!({});
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    let peers = if arguments.quick { QUICK_PEERS } else { PEERS };
    let mut verdicts = Vec::new();
    if arguments.only != Some(Part::Agent) {
        report.add_version("nft", "nft", &["--version"]);
        report.add_version("ipset", "ipset", &["--version"]);
        report.add_version("iptables", LEGACY_IPTABLES, &["iptables", "--version"]);
        report.add_version("kube-network-policies", engine::engines()?, &["-version"]);
        verdicts.extend(calls(&mut report, &arguments, peers)?);
    }
    if arguments.only != Some(Part::Calls) {
        report.add_version("cproxy-relay", relay_binary(), &["version"]);
        verdicts.extend(agent(&mut report, &arguments, peers)?);
    }
    if !arguments.quick {
        report.tables.push(Verdict::table(&verdicts));
        report.add_samples("verdicts", verdicts.iter().map(Verdict::json).collect());
    }
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// The subjects of one run.
fn subjects(peers: [u32; 3]) -> Vec<Subject> {
    let control = Subject::new(Engine::Nobody, 0);
    let [.., most] = peers;
    let mut subjects = vec![control, Subject { is_again: true, ..control }, Subject::new(Engine::CproxyNotIsolated, 0)];
    subjects.extend(peers.map(|peers| Subject::new(Engine::Cproxy, peers)));
    subjects.push(Subject::new(Engine::CproxyRanges, most));
    for engine in [Engine::Nftables, Engine::Ipset, Engine::Iptables, Engine::Queue] {
        subjects.extend(peers.map(|peers| Subject::new(engine, peers)));
    }
    subjects
}

/// Measures calls.
fn calls(report: &mut Report, arguments: &Arguments, peers: [u32; 3]) -> Result<Vec<Verdict>> {
    let sandbox = Sandbox::new(PREFIX);
    place::add_peers(&sandbox);
    let (outside, _denied) = (Servers::outside(&sandbox, ALLOWED)?, Servers::outside(&sandbox, DENIED)?);
    let start = |(subject, number)| {
        eprintln!("starting {subject}");
        Stand::start(&sandbox, number, subject).with_context(|| subject.to_string())
    };
    let stands = subjects(peers).into_iter().zip(0..).map(start).collect::<Result<Vec<_>>>()?;
    let (tags, is_same) = programs::comparison(&stands)?;
    if !is_same {
        report.failures.push("a pod that no policy selects has other programs than one without --policy".to_owned());
    }
    eprintln!("measuring {} rounds", arguments.rounds);
    let rounds = rounds::measure(&sandbox, &stands, &outside, arguments.rounds as usize)?;
    let (denials, mut verdicts) = denials(report, &sandbox, &stands)?;
    let runs = programs::runs(&sandbox, &stands, &outside)?;
    report.summary.push(rounds.summary(&[
        (CONNECT, "connect()"),
        (ACCEPT, "connect() to the pod"),
        (UDP, "datagram and answer"),
        (STREAM, "stream"),
    ]));
    report.tables.push(rounds.table("TCP connections", &[0, 1, 7]));
    report.tables.push(rounds.table("TCP connections to the pod", &[4, 5]));
    report.tables.push(rounds.table("Datagrams and streams", &[2, 8, 6, 3]));
    report.tables.extend([denials, tags, runs]);
    verdicts.extend(rounds.verdicts());
    report.add_samples("calls", rounds.json());
    report.notes.push(format!(
        "A turn is {CALLS} calls of each kind, one after the other, and {} rounds gave every subject one turn. Each \
         subject has a pod of its own, and an agent whose programs translate; what enforces the policy is the only \
         difference. `no policy` is the control of all ratios, and `no policy, again` a second one: it shows also how \
         far pods differ by their places in memory. A policy isolates the pod in both directions and allows one TCP \
         and one UDP port of its peers; the peer that is called, or calls, stands in the middle of them. Packet \
         filters have the rules in the pod's network namespace, after one that accepts what belongs to an established \
         connection; `rules` has one for each peer and protocol, and kube-network-policies' hand the first packet \
         of each connection to its process, which is the only one that runs beside the benchmark: the agents have \
         ended before the first round.",
        arguments.rounds
    ));
    report.notes.push(
        "A connection of the pod, or to it, passes one program of the policy. A datagram and its answer pass two. The \
         table of their runs has their times, which include those of the kernel's clock. The first calls of a turn \
         come after all other turns, so that their memory is cold. Time of a stream is for writes and reads of 16 KiB \
         in turn by one thread, so that it is the kernel's work without waits: 1,000,000 divided by it is MiB/s."
            .to_owned(),
    );
    Ok(verdicts)
}

/// Measures denied calls. Those that are dropped are made once.
fn denials(report: &mut Report, sandbox: &Sandbox, stands: &[Stand]) -> Result<(Table, Vec<Verdict>)> {
    let (mut rows, mut verdicts, mut samples) = (Vec::new(), Vec::new(), Vec::new());
    let most = stands.iter().map(|stand| stand.subject.peers).max().unwrap_or_default();
    for stand in stands.iter().filter(|stand| stand.subject.engine.isolates()) {
        let count = if stand.subject.engine.is_of_cproxy() { DENIALS } else { 1 };
        let answers = (0..count).map(|_| calls::denied(sandbox, stand)).collect::<Result<Vec<_>>>();
        let answers = answers.with_context(|| stand.subject.to_string())?;
        let times = [0, 1].map(|direction| {
            let time = |answer: &[Answer; 2]| match answer.get(direction) {
                Some(Answer::Error(time)) => Some(*time),
                _ => None,
            };
            answers.iter().map(time).collect::<Option<Vec<f64>>>()
        });
        let cell = |times: &Option<Vec<f64>>| match times.clone().and_then(Estimate::of) {
            Some(time) => format!("{time:.3} ms"),
            None => format!("silence for {} s", CALL_TIMEOUT.as_secs()),
        };
        rows.push((stand.subject.to_string(), times.iter().map(cell).collect()));
        if stand.subject.engine.is_of_cproxy() && stand.subject.peers == most {
            for (times, call) in times.iter().zip(["of the pod", "to the pod"]) {
                let parts = times.clone().context("cproxy answers")?.into_iter().map(|time| time / DENIAL_MAX_MS);
                let what = format!("answer to a denied call {call} / {DENIAL_MAX_MS} ms: {}", stand.subject);
                let found = Estimate::of(parts).context("there are calls")?;
                verdicts.push(Verdict { what, found, target: Target::AtMost(1.0) });
            }
        }
        samples
            .push(json!({"subject": stand.subject.to_string(), "of_the_pod_ms": times[0], "to_the_pod_ms": times[1]}));
    }
    report.add_samples("denials", samples.into());
    let title = "Answer to a call that the policy denies".to_owned();
    let columns = ["connect()", "connect() to the pod"].map(str::to_owned).into();
    Ok((Table { title, columns, rows }, verdicts))
}

/// Measures the agent.
fn agent(report: &mut Report, arguments: &Arguments, peers: [u32; 3]) -> Result<Vec<Verdict>> {
    let sandbox = Sandbox::new(PREFIX);
    let [few, _, many] = peers;
    let scenes = [Scene::Off, Scene::NotIsolated, Scene::Isolated(few), Scene::Isolated(many)];
    place::add_peers(&sandbox);
    let mut cluster = Cluster::start(&sandbox, &scenes)?;
    eprintln!("measuring {} starts", arguments.starts);
    let starts = starts::measure(&sandbox, &cluster, &scenes, arguments.starts)?;
    eprintln!("measuring {} changes", arguments.changes);
    let changes =
        [few, many].map(|peers| changes::measure(&sandbox, &mut cluster, Scene::Isolated(peers), arguments.changes));
    let changes = changes.into_iter().collect::<Result<Vec<_>>>()?;
    enter(sandbox.cgroup())?;
    let title = "Starts of the agent through a relay".to_owned();
    report.tables.push(Figure::table(&starts::FIGURES, title, &starts, |of| of.scene.title()));
    let title = "A change of a pod's label, until the verdict on its address is another one".to_owned();
    report.tables.push(Figure::table(&changes::FIGURES, title, &changes, |of| of.scene.title()));
    let samples = starts.iter().map(|of| (of.scene.title(), Figure::samples(&starts::FIGURES, of).into()));
    report.add_samples("starts", samples.collect::<serde_json::Map<_, _>>().into());
    let samples = changes.iter().map(|of| (of.scene.title(), Figure::samples(&changes::FIGURES, of).into()));
    report.add_samples("changes", samples.collect::<serde_json::Map<_, _>>().into());
    report.notes.push(
        "Starts are in turn, each in a pod without pins or files of cproxy. Times are those of the agent's log; CPU \
         time is that of a cgroup with the agent and its children alone. The relay's event is the time at which \
         another client of the same slices has got it. The API server tells the relay of a change before it answers."
            .to_owned(),
    );
    let [off, open, few_starts, many_starts] = &*starts else { anyhow::bail!("all scenes are started") };
    let mut verdicts = Vec::new();
    let mut add = |what: String, found: Option<Estimate>| {
        verdicts.extend(found.map(|found| Verdict { what, found, target: Target::AtMost(1.0) }));
    };
    for (starts, limit) in [(open, START_MAX_MS), (few_starts, START_MAX_MS), (many_starts, LATE_START_MAX_MS)] {
        let what = format!("later start / {limit} ms: {} over {}", starts.scene.title(), off.scene.title());
        add(what, starts.added(off, "ready_ms", limit));
    }
    add(
        format!("CPU time to load {many} addresses / {LOAD_MAX_MS} ms"),
        many_starts.added(few_starts, "cpu_ms", LOAD_MAX_MS),
    );
    add(
        format!("memory of the agent for {many} addresses / {LOAD_MAX_KIB} KiB"),
        many_starts.added(few_starts, "anonymous_kib", LOAD_MAX_KIB),
    );
    add(
        format!("memory of the agent and its maps for {many} addresses / {LOAD_MAX_KIB} KiB"),
        many_starts.added(few_starts, "all_kib", LOAD_MAX_KIB),
    );
    for changes in &changes {
        let parts = Figure::named(&changes::FIGURES, "of_event_ms").map(|figure| (figure.of)(changes));
        let parts = parts.unwrap_or_default().into_iter().map(|time| time / CHANGE_MAX_MS);
        add(format!("change of a label / {CHANGE_MAX_MS} ms: {}", changes.scene.title()), Estimate::of(parts));
    }
    Ok(verdicts)
}
