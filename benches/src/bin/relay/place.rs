//! The control plane, its objects, and relays in front of it.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_benches::node;
use cproxy_tests::{
    control_plane::{ADDRESS_V6, ControlPlane, PORT},
    manifest,
    population::Shape,
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
    usage::{Memory, cpu_time},
    writer::Writer,
};

use crate::{generator::Generator, load::protocol::Start, pin};

/// Addresses of the relays for clients, and for metrics.
const RELAYS: [(&str, &str); 2] = [("127.0.0.1:7443", "127.0.0.1:9443"), ("127.0.0.2:7443", "127.0.0.2:9443")];

/// Services of a new cluster, and their slices: default/kubernetes.
pub(crate) const OWN_OBJECTS: usize = 1;

/// Clients that decode everything, and clients that follow their Node.
const CHECKED: u32 = 50;
const NODES: u32 = 200;

/// The sandbox, its control plane, and its objects.
pub(crate) struct Place<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    pub(crate) shape: Shape,
    /// Kubeconfig of relays.
    relay_kubeconfig: PathBuf,
}

impl<'s> Place<'s> {
    /// Starts a control plane with this population.
    pub(crate) fn prepare(sandbox: &'s Sandbox, shape: Shape) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        node::create(sandbox, &control_plane);
        eprintln!("{shape}: creating the objects");
        Writer::new(&control_plane).create(shape.objects(0..shape.services));
        // Nothing else uses this address, so that the relay's way to the API server can be cut.
        let upstream = control_plane.kubeconfig_at("admin", &format!("https://[{ADDRESS_V6}]:{PORT}"));
        let text = fs::read_to_string(&upstream).unwrap_or_default();
        let relay_kubeconfig = manifest::write_text(sandbox.dir(), "relay.kubeconfig", &text);
        control_plane.admin_kubeconfig();
        Self { sandbox, control_plane, shape, relay_kubeconfig }
    }

    /// Creates the Services that are missing.
    pub(crate) fn grow(&mut self, shape: Shape) {
        eprintln!("{shape}: creating the objects");
        let writer = Writer::new(&self.control_plane);
        writer.create(shape.objects(self.shape.services..shape.services));
        self.shape = shape;
    }

    /// Starts a relay on its CPU, with further arguments, and waits until it is ready.
    pub(crate) fn start_relay(&self, number: usize, args: &[&str]) -> Result<RunningRelay> {
        let (listen, metrics) = RELAYS.get(number).context("there are two addresses for relays")?;
        let relay = RelayServer::new(self.sandbox).kubeconfig(&self.relay_kubeconfig).listen(listen);
        let mut relay = relay.metrics(metrics.parse()?).without_authentication().args(args).spawn();
        pin::to_cpu(relay.pid(), pin::RELAY_CPU)?;
        relay.wait_ready(Duration::from_secs(60));
        Ok(relay)
    }

    /// Clients of the first relays, or of the API server without any.
    pub(crate) fn clients(&self, relays: usize, count: u32, spread: Duration) -> Start {
        let servers: Vec<_> = RELAYS.iter().take(relays).map(|(listen, _)| format!("http://{listen}")).collect();
        let servers = if servers.is_empty() { vec![self.control_plane.server_url()] } else { servers };
        Start {
            count,
            checked: CHECKED,
            nodes: NODES,
            has_policies: false,
            spread_ms: spread.as_millis() as u64,
            kubeconfig: self.control_plane.agent_kubeconfig().display().to_string(),
            servers,
        }
    }

    /// Process ID of the API server.
    pub(crate) fn api_server(&self) -> Result<u32> {
        self.control_plane.api_server_pid().context("the API server does not run")
    }

    /// Watches of Services, EndpointSlices and Nodes that the API server serves, as it counts them.
    pub(crate) fn upstream_watches(&self) -> Vec<(String, f64)> {
        let text = self.control_plane.kubectl(&["get", "--raw", "/metrics"], "");
        let lines = text.lines().filter(|line| line.starts_with("apiserver_longrunning_requests{"));
        let of = |line: &str| {
            let resource = line.split_once("resource=\"")?.1.split_once('"')?.0.to_owned();
            let count: f64 = line.rsplit_once(' ')?.1.parse().ok()?;
            ["services", "endpointslices", "nodes"].contains(&&*resource).then_some((resource, count))
        };
        lines.filter_map(of).collect()
    }

    /// Address of the first relay.
    pub(crate) fn relay_address() -> &'static str {
        let [(listen, _), _] = RELAYS;
        listen
    }
}

/// CPU time of the processes, at a moment.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    at: Instant,
    relay: Duration,
    generator: Duration,
    api_server: Duration,
}

/// Share of a CPU that each process took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    pub(crate) relay: f64,
    pub(crate) generator: f64,
    pub(crate) api_server: f64,
}

impl Moment {
    /// Now. Without a relay, its share is 0.
    pub(crate) fn now(place: &Place<'_>, relay: Option<&RunningRelay>, generator: &Generator) -> Result<Self> {
        Ok(Self {
            at: Instant::now(),
            relay: relay.map(|relay| cpu_time(relay.pid())).unwrap_or_default(),
            generator: generator.cpu_time(),
            api_server: cpu_time(place.api_server()?),
        })
    }

    /// Shares since an earlier moment.
    pub(crate) fn since(&self, earlier: &Self) -> Shares {
        let seconds = (self.at - earlier.at).as_secs_f64();
        let share = |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64() / seconds;
        Shares {
            relay: share(self.relay, earlier.relay),
            generator: share(self.generator, earlier.generator),
            api_server: share(self.api_server, earlier.api_server),
        }
    }
}

/// Memory of a process after a moment of rest.
pub(crate) fn memory_at_rest(pid: u32) -> Memory {
    thread::sleep(Duration::from_secs(1));
    Memory::of(pid)
}

/// Memory of all TCP sockets' buffers of this machine, both ends of each connection, in bytes.
pub(crate) fn socket_buffers_bytes() -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let text = fs::read_to_string(Path::new("/proc/thread-self/net/sockstat")).unwrap_or_default();
    let pages = text.lines().find_map(|line| line.strip_prefix("TCP:")?.rsplit_once("mem ")?.1.parse::<u64>().ok());
    pages.unwrap_or_default() * PAGE_BYTES
}

/// Average number of processes that want a CPU, over the last minute.
pub(crate) fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
