//! The measurements of one fleet.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_benches::{rest, subject};
use cproxy_tests::{
    control_plane::ControlPlane,
    sandbox::Sandbox,
    usage::{Memory, cpu_time},
    writer::Writer,
};

use crate::fleet::{Fleet, Kind};

/// Pause between two changes, longer than the second that kube-proxy leaves between two syncs.
const PAUSE: Duration = Duration::from_millis(1_200);

/// Extent of the measurements.
pub(crate) struct Plan {
    pub(crate) changes: u32,
    /// Time without CPU use after which clients count as at rest.
    pub(crate) rest: Duration,
    /// Length of the measurement of the idle API server.
    pub(crate) idle: Duration,
    /// Kinds of clients that follow an API server through a crash and restart.
    pub(crate) returning: &'static [Kind],
}

/// The sandbox and its control plane.
pub(crate) struct Place<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    pub(crate) writer: Writer,
    /// Number of changes of the Service so far.
    pub(crate) made: usize,
}

/// Results for one fleet.
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) count: u32,
    /// Time from the first client's start until each was ready.
    pub(crate) ready: Vec<Duration>,
    /// Cost of starting all clients.
    pub(crate) start: Cost,
    /// Growth of the API server's memory with the clients.
    pub(crate) server_growth_bytes: f64,
    /// Memory of each client at rest.
    pub(crate) resident_bytes: Vec<u64>,
    /// Time from sending each change until the first, and until the last client has it.
    pub(crate) first_follows: Vec<Duration>,
    pub(crate) last_follows: Vec<Duration>,
    /// Cost of all changes.
    pub(crate) changes: Cost,
    /// Time from a restarted API server's readiness until each client follows a change.
    pub(crate) returns: Vec<Duration>,
    /// Bytes sent to the clients until then.
    pub(crate) return_bytes: u64,
}

/// Cost between two moments, of all clients together.
pub(crate) struct Cost {
    /// CPU time of the API server beyond that of an idle one.
    pub(crate) server_cpu_s: f64,
    pub(crate) clients_cpu: Duration,
    pub(crate) sent_bytes: u64,
}

/// Counters at one moment.
struct Moment {
    at: Instant,
    server_cpu: Duration,
    clients_cpu: Duration,
    received_bytes: u64,
}

pub(crate) fn measure(place: &mut Place<'_>, kind: Kind, count: u32, plan: &Plan) -> Result<Found> {
    let server = place.server()?;
    let idle = idle_rate(server, plan.idle);
    let (memory_before, cpu_before, started) = (Memory::of(server), cpu_time(server), Instant::now());
    let (fleet, ready) = Fleet::start(kind, count, place.sandbox, &place.control_plane, place.made)?;
    wait_for_rest(&fleet, plan.rest)?;
    let before = Moment { at: started, server_cpu: cpu_before, clients_cpu: Duration::ZERO, received_bytes: 0 };
    let start = Moment::now(server, &fleet)?.since(&before, idle);
    let server_growth_bytes = Memory::of(server).anonymous as f64 - memory_before.anonymous as f64;
    let resident_bytes = fleet.pids().into_iter().map(|pid| Memory::of(pid).resident).collect();
    // The first change meets cold caches and connections, so it does not count.
    place.change(&fleet)?;
    wait_for_rest(&fleet, plan.rest)?;
    let before = Moment::now(server, &fleet)?;
    let (mut first_follows, mut last_follows) = (Vec::new(), Vec::new());
    for _ in 0..plan.changes {
        thread::sleep(PAUSE);
        let follows = place.change(&fleet)?;
        first_follows.extend(follows.iter().min());
        last_follows.extend(follows.iter().max());
    }
    wait_for_rest(&fleet, plan.rest)?;
    let changes = Moment::now(server, &fleet)?.since(&before, idle);
    let received_before = fleet.received_bytes()?;
    let returns = if plan.returning.contains(&kind) { place.restart(&fleet)? } else { Vec::new() };
    wait_for_rest(&fleet, plan.rest)?;
    let return_bytes = fleet.received_bytes()?.saturating_sub(received_before);
    Ok(Found {
        kind,
        count,
        ready,
        start,
        server_growth_bytes,
        resident_bytes,
        first_follows,
        last_follows,
        changes,
        returns,
        return_bytes,
    })
}

impl Place<'_> {
    fn server(&self) -> Result<u32> {
        self.control_plane.api_server_pid().context("the API server does not run")
    }

    /// Makes one change and returns the time from sending it until each client has it.
    fn change(&mut self, fleet: &Fleet) -> Result<Vec<Duration>> {
        self.made += 1;
        let looking = fleet.look_for(subject::backend(self.made));
        let sent = Instant::now();
        self.writer.replace([subject::slice(self.made)]);
        let seen = looking.wait().with_context(|| format!("change {}", self.made))?;
        Ok(seen.into_iter().map(|seen| seen.saturating_duration_since(sent)).collect())
    }

    /// Crashes and restarts the API server. Returns the time from its readiness until each client follows it again.
    fn restart(&mut self, fleet: &Fleet) -> Result<Vec<Duration>> {
        self.control_plane.kill_api_server();
        self.control_plane.start_api_server();
        self.writer = Writer::new(&self.control_plane);
        self.change(fleet).context("after the API server's restart")
    }
}

impl Moment {
    fn now(server: u32, fleet: &Fleet) -> Result<Self> {
        let received_bytes = fleet.received_bytes()?;
        Ok(Self { at: Instant::now(), server_cpu: cpu_time(server), clients_cpu: fleet.cpu(), received_bytes })
    }

    /// Cost since `before`. `idle` is the share of a CPU that an idle API server takes.
    fn since(&self, before: &Self, idle: f64) -> Cost {
        let interval = self.at.saturating_duration_since(before.at).as_secs_f64();
        let server_cpu = self.server_cpu.saturating_sub(before.server_cpu).as_secs_f64();
        Cost {
            server_cpu_s: server_cpu - idle * interval,
            clients_cpu: self.clients_cpu.saturating_sub(before.clients_cpu),
            sent_bytes: self.received_bytes.saturating_sub(before.received_bytes),
        }
    }
}

/// Share of a CPU that a process takes.
fn idle_rate(pid: u32, interval: Duration) -> f64 {
    let (before, started) = (cpu_time(pid), Instant::now());
    thread::sleep(interval);
    (cpu_time(pid) - before).as_secs_f64() / started.elapsed().as_secs_f64()
}

/// Waits until the clients have nothing left to do.
fn wait_for_rest(fleet: &Fleet, interval: Duration) -> Result<()> {
    rest::wait(fleet.pids().len() as u32, interval, subject::TIMEOUT, || fleet.cpu()).map(drop)
}
