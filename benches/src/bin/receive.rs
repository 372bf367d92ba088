//! Cost of `--receive` for those who call the pod from outside: through the address of a load balancer and straight to
//! the pod, beside a pod whose agent does not receive.
//!
//! Each subject has a pod of its own: a network namespace with a link to the clients, a cgroup, and an agent. One
//! thread makes all calls and answers them.

use std::{
    fmt, fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use cproxy_benches::{
    bpf::links,
    calls::{CALLS, accept, connects, new_sockets, requests, stream_to},
    paired::{Estimate, turns},
    pod::{Pod, enter},
    report::{Report, Table, Target, Verdict, check_output},
};
use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{cproxy_binary, eventually},
    sandbox::Sandbox,
    world::SYNC,
};
use serde_json::{Map, Value, json};

/// The clients' address, and that of the load balancer with its range.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
const BALANCER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
const RANGE: &str = "203.0.113.0/24";
/// Ports of the Service; the pod's is the second one.
const PORT: u16 = 80;
const POD_PORT: u16 = 8080;

/// Aims for calls through the address: connect() as a ratio of times, requests and bytes as ratios of rates.
const CONNECT_MAX: f64 = 1.03;
const RATE_MIN: f64 = 0.99;

/// Command line.
#[derive(Parser)]
#[command(name = "receive", about = "Cost of calls from outside to the address of a load balancer")]
struct Arguments {
    /// Number of rounds, in each of which every subject has a turn
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Few rounds: only shows that everything works
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
    /// File for all samples; default: bench/receive.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Calls of one kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// To the pod, whose agent does not receive.
    Off,
    /// The same with another pod, to show the effect of chance.
    OffAgain,
    /// To the pod, whose agent receives.
    Straight,
    /// To the address, at the pod's port.
    EqualPort,
    /// To the address, at another port.
    OtherPort,
}

const SUBJECTS: [Subject; 5] =
    [Subject::Off, Subject::OffAgain, Subject::Straight, Subject::EqualPort, Subject::OtherPort];

/// Figures of a turn: medians of connect(), the first connect(), a request, and a MiB of a stream.
const METRICS: [(&str, &str, usize); 4] = [
    ("connect_us", "connect(), p50, us", 2),
    ("connect_first_us", "connect(), the first of a turn, us", 1),
    ("request_us", "request and answer, p50, us", 2),
    ("stream_us_per_mib", "established stream, us for each MiB", 1),
];

impl Subject {
    fn receives(self) -> bool {
        !matches!(self, Self::Off | Self::OffAgain)
    }

    fn is_through_the_address(self) -> bool {
        matches!(self, Self::EqualPort | Self::OtherPort)
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "without --receive",
            Self::OffAgain => "without --receive, again",
            Self::Straight => "--receive, to the pod",
            Self::EqualPort => "--receive, to the address, equal ports",
            Self::OtherPort => "--receive, to the address, port 80 to 8080",
        })
    }
}

/// A pod, its server, and where it is called.
struct Stand {
    subject: Subject,
    pod: Pod,
    server: TcpListener,
    target: SocketAddr,
    samples: [Vec<f64>; METRICS.len()],
}

impl Stand {
    fn start(sandbox: &Sandbox, number: u8, subject: Subject) -> Result<Self> {
        let pod = Pod::new(sandbox, number, CLIENT)?;
        // Each pod has the address of a balancer of its own.
        let balancer = Ipv4Addr::from_bits(BALANCER.to_bits() + u32::from(number));
        sandbox.ip(&format!("route add {balancer} dev pod-{number} src {CLIENT}\n"));
        let manifests = sandbox.dir().join(format!("manifests-{number}"));
        fs::create_dir(&manifests).context("creating a directory for manifests")?;
        let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", PORT, POD_PORT);
        let service = service.tcp("alt", POD_PORT, POD_PORT).load_balancer_ip(balancer);
        let slice = Slice::v4("web").tcp("http", POD_PORT).tcp("alt", POD_PORT).ready([pod.address]);
        manifest::write(&manifests, "all.json", [Value::from(service), slice.into()]);
        let agent = pod.agent(sandbox).manifests(&manifests);
        let agent = if subject.receives() { agent.args(["--receive", RANGE]) } else { agent };
        let mut agent = agent.start();
        let server = pod.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, POD_PORT)))?.context("a listener")?;
        enter(sandbox.cgroup_beside())?;
        let target = match subject {
            Subject::EqualPort => SocketAddr::from((balancer, POD_PORT)),
            Subject::OtherPort => SocketAddr::from((balancer, PORT)),
            _ => SocketAddr::from((pod.address, POD_PORT)),
        };
        eventually(SYNC, "calls arrive", || {
            sandbox.netns().run(|| std::net::TcpStream::connect_timeout(&target, SYNC).map(drop))
        });
        server.accept().context("the first call")?;
        // Programs, maps and routes stay, and the kernel's work alone is measured.
        agent.stop();
        Ok(Self { subject, pod, server, target, samples: Default::default() })
    }

    fn turn(&self, sandbox: &Sandbox) -> Result<[f64; METRICS.len()]> {
        sandbox.netns().run(|| {
            let sockets = new_sockets()?;
            let (connect, first) = connects(&sockets, self.target)?;
            accept(&self.server)?;
            drop(sockets);
            let (request, stream) = (requests(self.target, &self.server)?, stream_to(self.target, &self.server)?);
            Ok([connect, first, request, stream])
        })
    }

    /// Tags of the programs that translate, by their links.
    fn tags(&self) -> Result<Vec<(String, String)>> {
        let links = links(&self.pod.pin_dir.join(format!("v{LAYOUT_VERSION}"))).context("reading pins")?;
        links.into_iter().map(|(name, link)| Ok((name, link.program_tag().context("asking for a tag")?))).collect()
    }
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        arguments.rounds = 3;
    }
    let mut report = Report::new("receive");
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    let sandbox = Sandbox::new("cproxy-bench");
    sandbox.add_addresses([CLIENT]);
    let start = |(subject, number): (Subject, u8)| {
        eprintln!("starting {subject}");
        Stand::start(&sandbox, number, subject).with_context(|| subject.to_string())
    };
    let mut stands = SUBJECTS.into_iter().zip(0..).map(start).collect::<Result<Vec<_>>>()?;
    eprintln!("measuring {} rounds", arguments.rounds);
    for round in 0..=arguments.rounds as usize {
        for index in turns(stands.len(), round) {
            let stand = stands.get_mut(index).context("each has a turn")?;
            let figures = stand.turn(&sandbox).with_context(|| stand.subject.to_string())?;
            // The first round warms up.
            if round > 0 {
                stand.samples.iter_mut().zip(figures).for_each(|(samples, figure)| samples.push(figure));
            }
        }
    }
    let [off, ..] = &*stands else { anyhow::bail!("all subjects are started") };
    let tags = stands.iter().map(Stand::tags).collect::<Result<Vec<_>>>()?;
    let is_same = tags.windows(2).all(|pair| pair.first() == pair.last()) && tags.iter().all(|tags| !tags.is_empty());
    if !is_same {
        report.failures.push("--receive changes the programs that translate".to_owned());
    }
    let has_links = |stand: &Stand| stand.pod.pin_dir.join("policy-v1").exists();
    if stands.iter().any(|stand| has_links(stand) != stand.subject.receives()) {
        report.failures.push("a pod whose agent does not receive has a program for what comes in".to_owned());
    }
    let ratio =
        |stand: &Stand, metric: usize| Estimate::of_ratios(stand.samples.get(metric)?, off.samples.get(metric)?);
    report.tables.push(table(&stands, ratio));
    report.summary.push(summary(&stands, ratio));
    if !arguments.quick {
        report.tables.push(Verdict::table(&verdicts(&stands, ratio)));
    }
    report.notes.push(format!(
        "A turn is {CALLS} connections, {CALLS} requests of 100 bytes with answers of 1,000, and 8 MiB of a stream, \
         one after the other; {} rounds gave every subject one turn. The agents have ended before. Ratios are to a pod \
         whose agent does not receive; `again` is a second one, and shows the effect of chance. The tags of the nine \
         programs that translate are {} in all pods, and without --receive there is no program for what comes in.",
        arguments.rounds,
        if is_same { "the same" } else { "not the same" }
    ));
    let samples = stands.iter().map(|stand| {
        let of_metric = METRICS.iter().zip(&stand.samples);
        (stand.subject.to_string(), of_metric.map(|((key, ..), samples)| ((*key).to_owned(), json!(samples))).collect())
    });
    report.samples = json!({"calls": samples.collect::<Map<String, Value>>()});
    report.finish(arguments.quick, arguments.output.as_deref())
}

fn table(stands: &[Stand], ratio: impl Fn(&Stand, usize) -> Option<Estimate>) -> Table {
    let row = |stand: &Stand| {
        let cells = METRICS.iter().enumerate().zip(&stand.samples).flat_map(|((index, (_, _, digits)), samples)| {
            let own = Estimate::of(samples.iter().copied());
            let own = own.map_or_else(|| "-".to_owned(), |own| format!("{:.digits$}", own.median));
            [own, ratio(stand, index).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"))]
        });
        (stand.subject.to_string(), cells.collect())
    };
    Table {
        title: "Calls to the pod from outside".to_owned(),
        columns: METRICS.iter().flat_map(|(_, meaning, _)| [(*meaning).to_owned(), "ratio".to_owned()]).collect(),
        rows: stands.iter().map(row).collect(),
    }
}

fn summary(stands: &[Stand], ratio: impl Fn(&Stand, usize) -> Option<Estimate>) -> Table {
    let row = |stand: &Stand| {
        let cell =
            |metric: usize| ratio(stand, metric).map_or_else(|| "-".to_owned(), |ratio| format!("{:.3}", ratio.median));
        (stand.subject.to_string(), [0, 2, 3].map(cell).into())
    };
    Table {
        title: "Traffic from outside, time of calls, ratio to a pod whose agent does not receive".to_owned(),
        columns: ["connect()", "request", "stream"].map(str::to_owned).into(),
        rows: stands.iter().skip(1).map(row).collect(),
    }
}

/// The aims for calls through the address.
fn verdicts(stands: &[Stand], ratio: impl Fn(&Stand, usize) -> Option<Estimate>) -> Vec<Verdict> {
    let verdicts = stands.iter().filter(|stand| stand.subject.is_through_the_address()).flat_map(|stand| {
        [(0, true), (2, false), (3, false)]
            .into_iter()
            .filter_map(|(metric, is_time)| {
                let time = ratio(stand, metric)?;
                let rate = Estimate { median: 1.0 / time.median, low: 1.0 / time.high, high: 1.0 / time.low };
                let (_, meaning, _) = METRICS.get(metric)?;
                let (found, target) =
                    if is_time { (time, Target::AtMost(CONNECT_MAX)) } else { (rate, Target::AtLeast(RATE_MIN)) };
                let what = if is_time { (*meaning).to_owned() } else { format!("rate of: {meaning}") };
                Some(Verdict { what: format!("{what}: {}", stand.subject), found, target })
            })
            .collect::<Vec<_>>()
    });
    verdicts.collect()
}
