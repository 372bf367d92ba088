//! A rolling update: the pods of a Deployment are replaced one after the other, as its controller does it by default
//! (a new pod is ready before an old one ends), while a client makes one short request after the other.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{
    arena::{Arena, Peer, Stand, Subject, worker::Load},
    report::{Report, Table},
};
use cproxy_tests::{
    echo::Server,
    http,
    manifest::{Endpoint, Slice},
    sandbox::Sandbox,
};
use serde_json::{Map, Value, json};

use crate::{PREFIX, Plan, servers};

const SERVICES: [u32; 2] = [10, 5_000];
const PEERS: [Peer; 3] = [Peer::Cproxy, Peer::Iptables, Peer::Nftables];

/// Number of updates of each peer, with each time that a pod takes to end.
const ROUNDS: u32 = 5;

/// How long a pod goes on after the API server has been told that it ends: not at all, and with a short `preStop`.
const ENDINGS: [(&str, Duration); 2] = [("at once", Duration::ZERO), ("after 2 s", Duration::from_secs(2))];

/// Number of pods.
const PODS: u8 = 3;
/// Between two steps of an update.
const STEP: Duration = Duration::from_secs(1);
/// Between two requests.
const PAUSE: Duration = Duration::from_millis(1);
/// Number of requests of a client, whose time is longer than that of an update.
const REQUESTS: u32 = 1_000;

/// Answers without a failure after which a peer counts as up to date, and the limit on waiting for them.
const CALM: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let sandbox = Sandbox::new(PREFIX);
    let peers = if plan.peers.is_empty() { &PEERS } else { plan.peers.as_slice() };
    ensure!(!peers.contains(&Peer::Direct), "--peer direct: a direct connection does not follow a Service");
    let mut deployment = Deployment::start(&sandbox, servers::ROLLED);
    let mut arena = plan.arena_of(&sandbox, peers, &[servers::ROLLED])?;
    let mut report = servers::report("rolling", &arena);
    let rounds = plan.rounds(crate::contest::Rounds::of_all(ROUNDS)).of_all;
    for services in plan.services(&SERVICES) {
        arena.grow(plan.shape(services))?;
        arena.stop();
        for (ending, grace) in ENDINGS {
            eprintln!("{services} Services: pods end {ending}");
            let loads = measure(&mut arena, &mut deployment, grace, rounds)?;
            add(&mut report, services, ending, &loads);
        }
        arena.resume();
    }
    report.summary = report.tables.clone();
    report.notes.push(format!(
        "{PODS} pods are replaced one after the other, {rounds} times for each peer; a new pod is ready before an old \
         one ends, {} s between the steps. A pod's EndpointSlice says that it ends, and the pod closes its port at \
         once or 2 s later, as with `preStop`. A client makes one request after the other, each on a connection of its \
         own, with a pause of {} ms. kube-proxy has its default configuration, with at least 1 s between two \
         synchronisations. Other peers are stopped meanwhile.",
        STEP.as_secs(),
        PAUSE.as_millis()
    ));
    Ok(report)
}

/// Updates the Deployment in rounds, with one peer's turn after the other's.
fn measure(
    arena: &mut Arena<'_>,
    deployment: &mut Deployment<'_>,
    grace: Duration,
    rounds: u32,
) -> Result<Vec<(Peer, Load)>> {
    let mut loads: Vec<_> = arena.stands.iter().map(|stand| (stand.peer, Load::default())).collect();
    for _ in 0..rounds {
        for (index, (peer, sum)) in loads.iter_mut().enumerate() {
            let turn = turn(arena, index, deployment, grace);
            *sum = added(*sum, turn.with_context(|| format!("{peer} during an update"))?);
        }
    }
    Ok(loads)
}

/// One update under one peer's load.
fn turn(arena: &mut Arena<'_>, index: usize, deployment: &mut Deployment<'_>, grace: Duration) -> Result<Load> {
    let (stand, source) = arena.stand_and_source(index).context("no such peer")?;
    stand.resume();
    wait_until_calm(stand, deployment.subject.vip)?;
    let vip = deployment.subject.vip;
    let load = thread::scope(|scope| -> Result<Load> {
        let client = scope.spawn(|| -> Result<Load> {
            let started = Instant::now();
            let mut load = Load::default();
            while started.elapsed() < Deployment::time_of_update(grace) {
                load = added(load, stand.worker.load(REQUESTS, PAUSE, vip)?);
            }
            Ok(load)
        });
        deployment.update(grace, &|object| source.replace([object]));
        client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?
    })?;
    stand.stop();
    Ok(load)
}

/// Waits until a peer that was stopped meanwhile has caught up.
fn wait_until_calm(stand: &mut Stand<'_>, vip: SocketAddr) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while stand.worker.load(CALM, PAUSE, vip)?.answered < CALM {
        ensure!(Instant::now() < deadline, "not up to date within {PATIENCE:?}");
    }
    Ok(())
}

fn added(one: Load, other: Load) -> Load {
    Load {
        answered: one.answered + other.answered,
        refused: one.refused + other.refused,
        late: one.late + other.late,
        broken: one.broken + other.broken,
    }
}

fn add(report: &mut Report, services: u32, ending: &str, loads: &[(Peer, Load)]) {
    let row = |name: &str, of: fn(&Load) -> u32| {
        (name.to_owned(), loads.iter().map(|(_, load)| of(load).to_string()).collect())
    };
    report.tables.push(Table {
        title: format!("requests during rolling updates, {services} Services, pods end {ending}"),
        columns: loads.iter().map(|(peer, _)| peer.to_string()).collect(),
        rows: vec![
            row("answered", |load| load.answered),
            row("refused", |load| load.refused),
            row("not answered in 2 s", |load| load.late),
            row("broken off", |load| load.broken),
        ],
    });
    let json = |load: &Load| {
        let Load { answered, refused, late, broken } = load;
        json!({"answered": answered, "refused": refused, "late": late, "broken": broken})
    };
    let samples: Map<_, Value> = loads.iter().map(|(peer, load)| (peer.to_string(), json(load))).collect();
    report.add_samples(&format!("{services}, {ending}"), samples.into());
}

/// Pods behind a Service, in the sandbox's namespace.
struct Deployment<'s> {
    sandbox: &'s Sandbox,
    subject: Subject,
    /// The running pods and their addresses.
    pods: Vec<(IpAddr, Server)>,
    /// Number of updates so far.
    updates: u8,
}

impl<'s> Deployment<'s> {
    /// Starts the pods that the Service has from its beginning.
    fn start(sandbox: &'s Sandbox, subject: Subject) -> Self {
        for half in [0, 1] {
            sandbox.add_addresses((0..PODS).map(|number| address(half, number)));
        }
        let mut deployment = Self { sandbox, subject, pods: Vec::new(), updates: 0 };
        deployment.pods = (0..PODS).map(|number| deployment.pod(address(0, number))).collect();
        deployment
    }

    fn pod(&self, address: IpAddr) -> (IpAddr, Server) {
        (address, http::serve(self.sandbox, SocketAddr::new(address, self.port()), "pod"))
    }

    fn port(&self) -> u16 {
        self.subject.backends.first().map_or(0, SocketAddr::port)
    }

    fn time_of_update(grace: Duration) -> Duration {
        (STEP * 2 + grace) * u32::from(PODS)
    }

    /// Replaces every pod; `replace` replaces an object on the API server.
    fn update(&mut self, grace: Duration, replace: &dyn Fn(Value)) {
        self.updates = self.updates.wrapping_add(1);
        for number in 0..PODS {
            thread::sleep(STEP);
            self.pods.push(self.pod(address(self.updates % 2, number)));
            replace(self.slice(None));
            thread::sleep(STEP);
            let (ending, server) = self.pods.remove(0);
            replace(self.slice(Some(ending)));
            thread::sleep(grace);
            drop(server);
            replace(self.slice(None));
        }
    }

    fn slice(&self, ending: Option<IpAddr>) -> Value {
        let ready = self.pods.iter().map(|(address, _)| Endpoint::ready(address));
        let ending = ending.map(|address| Endpoint::terminating(address, true));
        let slice = Slice::v4(self.subject.name).tcp("tcp", self.port());
        ready.chain(ending).fold(slice, Slice::endpoint).into()
    }
}

/// Addresses of two generations of pods.
fn address(half: u8, number: u8) -> IpAddr {
    Ipv4Addr::new(10, 244, 8 + half, 1 + number).into()
}
