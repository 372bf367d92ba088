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

/// Between two changes: longer than the second that kube-proxy leaves between two syncs.
const PAUSE: Duration = Duration::from_millis(1_200);

/// How much is measured.
pub(crate) struct Plan {
    pub(crate) changes: u32,
    /// How long is looked whether clients are at rest.
    pub(crate) rest: Duration,
    /// For how long the idle API server is measured.
    pub(crate) idle: Duration,
    /// Clients that see the API server crash and come back.
    pub(crate) returning: &'static [Kind],
}

/// Where all of it happens.
pub(crate) struct Place<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    pub(crate) writer: Writer,
    /// How often the Service has been changed.
    pub(crate) made: usize,
}

/// All that was found of one fleet.
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) count: u32,
    /// From the first one's start until each was ready.
    pub(crate) ready: Vec<Duration>,
    /// Cost of starting all clients.
    pub(crate) start: Cost,
    /// How much larger the API server is with them.
    pub(crate) server_growth_bytes: f64,
    /// Each client's, at rest.
    pub(crate) resident_bytes: Vec<u64>,
    /// From sending each change until the first, and until the last, has it.
    pub(crate) first_follows: Vec<Duration>,
    pub(crate) last_follows: Vec<Duration>,
    /// Cost of all changes.
    pub(crate) changes: Cost,
    /// From the moment at which an API server that was started again is ready until each follows a change.
    pub(crate) returns: Vec<Duration>,
    /// Bytes it sent them until then.
    pub(crate) return_bytes: u64,
}

/// Cost between two moments, of all clients together.
pub(crate) struct Cost {
    /// Without that of the idle API server.
    pub(crate) server_cpu_s: f64,
    pub(crate) clients_cpu: Duration,
    pub(crate) sent_bytes: u64,
}

/// A moment.
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
    // The first one meets cold caches and connections.
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

    /// One change; when each client has it, from sending it.
    fn change(&mut self, fleet: &Fleet) -> Result<Vec<Duration>> {
        self.made += 1;
        let looking = fleet.look_for(subject::backend(self.made));
        let sent = Instant::now();
        self.writer.replace([subject::slice(self.made)]);
        let seen = looking.wait().with_context(|| format!("change {}", self.made))?;
        Ok(seen.into_iter().map(|seen| seen.saturating_duration_since(sent)).collect())
    }

    /// The API server crashes and comes back; when each client follows it again, from when it is ready.
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

    /// `idle` is the part of a CPU that the API server takes in any case.
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

/// The part of a CPU that a process takes.
fn idle_rate(pid: u32, interval: Duration) -> f64 {
    let (before, started) = (cpu_time(pid), Instant::now());
    thread::sleep(interval);
    (cpu_time(pid) - before).as_secs_f64() / started.elapsed().as_secs_f64()
}

/// Waits until the clients have nothing left to do.
fn wait_for_rest(fleet: &Fleet, interval: Duration) -> Result<()> {
    rest::wait(fleet.pids().len() as u32, interval, subject::TIMEOUT, || fleet.cpu()).map(drop)
}
