//! Propagation time of a cluster's changes: from an EndpointSlice's change on a real API server to the first
//! `connect()` that follows it.
//!
//! One endpoint of one Service is replaced again and again, beside other Services. The hooks themselves show the state
//! of the kernel's table: a UDP socket that connects to the Service sends nothing, and its local address then
//! identifies the backend that the hook has chosen. A thread polls with short pauses, because polling without pause
//! would take one of the CPUs from the agent and the API server.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    pin::pin,
    sync::mpsc as blocking,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use cproxy_benches::{
    report::{Report, Table, check_output},
    summary::Summary,
};
use cproxy_tests::{
    control_plane::ControlPlane,
    manifest::{self, Endpoint},
    process::{Agent, cproxy_binary},
    sandbox::Sandbox,
};
use futures_util::TryStreamExt as _;
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

const PREFIX: &str = "cproxy-bench";

/// The measured Service, and its endpoint before and after a change.
const SUBJECT: &str = "subject";
const VIP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 255, 1)), 80);
const BACKENDS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 244, 0, 2))];

/// Number of endpoints of each other Service.
const ENDPOINTS: usize = 10;

/// Number of objects that are created at the same time.
const CREATED_AT_ONCE: usize = 16;

/// Number of changes that do not count, since connections and caches are cold.
const WARM_UP: usize = 5;

/// Pause between two polls of the table. The kernel's timers add about half as much.
const PAUSE: Duration = Duration::from_micros(100);

/// Pause between two changes, so that each meets a machine at rest.
const REST: Duration = Duration::from_millis(20);

/// Changes and other Services of `--quick`.
const QUICK: (u32, u32) = (10, 20);

/// Limit on every wait, longer than any change takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Command line.
#[derive(Parser)]
#[command(name = "propagation", about = "Time from an EndpointSlice's change until connections follow it")]
struct Arguments {
    /// Number of changes
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Number of other Services, with ten endpoints each
    #[arg(long, value_name = "N", default_value_t = 100)]
    services: u32,
    /// Few changes beside few other Services: only shows that everything works
    #[arg(long, conflicts_with_all = ["changes", "services"])]
    quick: bool,
    /// File for all samples; default: bench/propagation.json in cargo's output directory
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Times of one change, in milliseconds until a connection follows it. A time is negative if the change is in force
/// before the API server's answer arrives.
#[derive(Clone, Copy)]
struct Sample {
    from_sending: f64,
    from_answer: f64,
    from_event: f64,
    answer: f64,
    resolution: f64,
}

/// A column of samples.
struct Clock {
    name: &'static str,
    meaning: &'static str,
    of: fn(&Sample) -> f64,
}

const CLOCKS: [Clock; 5] = [
    Clock { name: "from_sending", meaning: "since the change was sent", of: |sample| sample.from_sending },
    Clock { name: "from_answer", meaning: "since the API server answered", of: |sample| sample.from_answer },
    Clock { name: "from_event", meaning: "since another client's watch reported it", of: |sample| sample.from_event },
    Clock { name: "answer", meaning: "(the API server's answer to the change)", of: |sample| sample.answer },
    Clock { name: "resolution", meaning: "(between two readings of the table)", of: |sample| sample.resolution },
];

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    check_output(arguments.output.as_deref())?;
    if arguments.quick {
        (arguments.changes, arguments.services) = QUICK;
    }
    let sandbox = Sandbox::new(PREFIX);
    sandbox.add_addresses(BACKENDS);
    let control_plane = ControlPlane::start(&sandbox);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting tokio")?;
    let samples = runtime.block_on(async {
        let client = control_plane.client().await;
        create_objects(&client, arguments.services).await?;
        let agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig()).start();
        let samples = measure(&client, arguments.changes as usize).await;
        samples.with_context(|| format!("the agent's log: {}", agent.tail()))
    })?;
    let mut report = report(&arguments, &samples)?;
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    report.add_version("API server", control_plane.binary("kube-apiserver"), &["--version"]);
    report.finish(arguments.quick, arguments.output.as_deref())
}

/// Creates the measured Service and all others.
async fn create_objects(client: &Client, others: u32) -> Result<()> {
    create(client, objects(SUBJECT, Some(VIP), &[BACKENDS[0]])).await?;
    let mut creating = JoinSet::new();
    for other in 0..others {
        if creating.len() >= CREATED_AT_ONCE {
            creating.join_next().await.context("nothing is being created")???;
        }
        let first = other * ENDPOINTS as u32;
        let addresses = (first..).map(|n| IpAddr::V4(Ipv4Addr::from_bits(0x0a80_0001 + n)));
        let objects = objects(&format!("other-{other}"), None, &addresses.take(ENDPOINTS).collect::<Vec<_>>());
        let client = client.clone();
        creating.spawn(async move { create(&client, objects).await });
    }
    while let Some(created) = creating.join_next().await {
        created??;
    }
    Ok(())
}

/// A Service with one port, and its slice.
fn objects(name: &str, vip: Option<SocketAddr>, endpoints: &[IpAddr]) -> (Value, Value) {
    let port = vip.map_or(80, |vip| vip.port());
    let service = manifest::Service::new(name).udp("port", port, 8080);
    let service = vip.into_iter().fold(service, |service, vip| service.cluster_ips([vip.ip()]));
    (service.into(), manifest::Slice::v4(name).udp("port", 8080).ready(endpoints).into())
}

async fn create(client: &Client, (service, slice): (Value, Value)) -> Result<()> {
    let params = PostParams::default();
    let service: Service = serde_json::from_value(service).context("making a Service")?;
    let slice: EndpointSlice = serde_json::from_value(slice).context("making an EndpointSlice")?;
    Api::default_namespaced(client.clone()).create(&params, &service).await.context("creating a Service")?;
    Api::default_namespaced(client.clone()).create(&params, &slice).await.context("creating an EndpointSlice")?;
    Ok(())
}

/// Changes the endpoint repeatedly.
async fn measure(client: &Client, changes: usize) -> Result<Vec<Sample>> {
    let api = Api::<EndpointSlice>::default_namespaced(client.clone());
    let name = format!("{SUBJECT}-ipv4");
    // The object's own version is too old to watch from after thousands of other objects.
    let listed = api.list(&ListParams::default().limit(1)).await.context("asking for the present version")?;
    let (heard, mut events) = mpsc::unbounded_channel();
    let watching = watch(api.clone(), listed.metadata.resource_version.unwrap_or_default(), heard);
    let watcher = tokio::spawn(async {
        if let Err(error) = watching.await {
            eprintln!("the watch beside the agent's: {error:#}");
        }
    });
    let prober = Prober::start();
    prober.wait_for(BACKENDS[0]).await.context("waiting for the first backend")?;
    let mut samples = Vec::with_capacity(changes);
    for (change, backend) in (1..=WARM_UP + changes).zip(BACKENDS.into_iter().cycle().skip(1)) {
        tokio::time::sleep(REST).await;
        let sample = tokio::time::timeout(TIMEOUT, follow(&api, &name, backend, &prober, &mut events)).await;
        let sample = sample.with_context(|| format!("change {change} does not arrive within {TIMEOUT:?}"))??;
        if change > WARM_UP {
            samples.push(sample);
        }
    }
    watcher.abort();
    Ok(samples)
}

/// Makes one change and times it.
async fn follow(
    api: &Api<EndpointSlice>,
    name: &str,
    backend: IpAddr,
    prober: &Prober,
    events: &mut mpsc::UnboundedReceiver<(Instant, String)>,
) -> Result<Sample> {
    let endpoint = Value::from(manifest::Slice::v4(SUBJECT).endpoint(Endpoint::ready(backend)));
    let patch = json!({"endpoints": endpoint.get("endpoints")});
    let seen = prober.wait_for(backend);
    let sent = Instant::now();
    let change = async {
        let changed = api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        changed.map(|_| Instant::now()).context("changing the EndpointSlice")
    };
    let event = async {
        let address = backend.to_string();
        while let Some((at, told)) = events.recv().await {
            if told == address {
                return Ok(at);
            }
        }
        bail!("the watch has ended")
    };
    let (answered, told, seen) = tokio::try_join!(change, event, seen)?;
    Ok(Sample {
        from_sending: milliseconds(sent, seen.at),
        from_answer: milliseconds(answered, seen.at),
        from_event: milliseconds(told, seen.at),
        answer: milliseconds(sent, answered),
        resolution: milliseconds(seen.last_look, seen.at),
    })
}

/// Time from one moment to another, negative if the second is earlier.
fn milliseconds(from: Instant, to: Instant) -> f64 {
    let signed = to.checked_duration_since(from).map(|time| time.as_secs_f64());
    signed.unwrap_or_else(|| -(from - to).as_secs_f64()) * 1e3
}

/// Reports the API server's watch event of each change: the earliest time at which any client can know of it.
async fn watch(
    api: Api<EndpointSlice>,
    mut version: String,
    heard: mpsc::UnboundedSender<(Instant, String)>,
) -> Result<()> {
    let params = WatchParams::default().fields(&format!("metadata.name={SUBJECT}-ipv4"));
    loop {
        let mut stream = pin!(api.watch(&params, &version).await?);
        while let Some(event) = stream.try_next().await? {
            let at = Instant::now();
            let slice = match event {
                WatchEvent::Modified(slice) => slice,
                WatchEvent::Error(error) => bail!("{error:?}"),
                _ => continue,
            };
            version = slice.resource_version().unwrap_or_default();
            let address = slice.endpoints.unwrap_or_default().into_iter().find_map(|e| e.addresses.into_iter().next());
            heard.send((at, address.unwrap_or_default()))?;
        }
    }
}

/// Times of the first choice of a backend.
#[derive(Clone, Copy)]
struct Seen {
    /// End of the poll that found it.
    at: Instant,
    /// Start of the poll before, which did not find it.
    last_look: Instant,
}

/// A backend to wait for, and the channel for the result.
type Wanted = (IpAddr, oneshot::Sender<std::io::Result<Seen>>);

/// Thread that polls the kernel. It ends when this value is dropped.
struct Prober {
    wanted: blocking::Sender<Wanted>,
}

impl Prober {
    fn start() -> Self {
        let (wanted, orders) = blocking::channel::<Wanted>();
        thread::spawn(move || {
            for (backend, answer) in orders {
                // The receiver may have given up.
                drop(answer.send(wait_until_chosen(backend)));
            }
        });
        Self { wanted }
    }

    /// Starts to poll at once, not when the result is awaited.
    fn wait_for(&self, backend: IpAddr) -> impl Future<Output = Result<Seen>> {
        let (answer, answered) = oneshot::channel();
        let ordered = self.wanted.send((backend, answer));
        async move {
            ordered.context("the probing thread has ended")?;
            answered.await.context("the probing thread has ended")?.context("connecting to the Service")
        }
    }
}

fn wait_until_chosen(backend: IpAddr) -> std::io::Result<Seen> {
    let deadline = Instant::now() + TIMEOUT;
    let mut last_look = Instant::now();
    while last_look < deadline {
        let look = Instant::now();
        if chosen_backend()? == backend {
            return Ok(Seen { at: Instant::now(), last_look });
        }
        last_look = look;
        thread::sleep(PAUSE);
    }
    Err(std::io::Error::other(format!("{VIP} does not lead to {backend} within {TIMEOUT:?}")))
}

/// Backend of a new connection. The backends are addresses of this host, so the kernel gives the client the backend's
/// own address.
fn chosen_backend() -> std::io::Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(VIP)?;
    Ok(socket.local_addr()?.ip())
}

fn report(arguments: &Arguments, samples: &[Sample]) -> Result<Report> {
    let Arguments { changes, services, .. } = arguments;
    let mut rows = Vec::new();
    let mut summaries = serde_json::Map::new();
    for Clock { name, meaning, of } in CLOCKS {
        let summary = Summary::of(samples.iter().map(of)).context("there are no samples")?;
        rows.push((meaning.to_owned(), summary.cells(2)));
        summaries.insert(name.to_owned(), summary.json());
    }
    let mut report = Report::new("propagation");
    report.tables.push(Table {
        title: "From an EndpointSlice's change on the API server to the first connect() that follows it, ms".to_owned(),
        columns: Summary::COLUMNS.map(str::to_owned).into(),
        rows,
    });
    report.notes.push(format!(
        "{changes} changes of the only endpoint of one Service, one after the other, after {WARM_UP} for warm-up. The \
         cluster has {services} other Services with {ENDPOINTS} endpoints each. API server, agent and client share the \
         machine's CPUs."
    ));
    report.notes.push(
        "The clock stops when a reading of the table shows the new backend, so a time is too long by at most the time \
         between two readings. A time is negative where connections followed the change before the other client's \
         watch or the API server's answer reported it."
            .to_owned(),
    );
    report.samples = json!({
        "unit": "ms", "changes": changes, "services": services, "endpoints_per_service": ENDPOINTS,
        "summary": summaries, "changes_ms": samples.iter().map(json_of).collect::<Vec<_>>(),
    });
    Ok(report)
}

fn json_of(sample: &Sample) -> Value {
    CLOCKS.iter().map(|clock| (clock.name.to_owned(), Value::from((clock.of)(sample)))).collect()
}
