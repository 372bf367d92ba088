//! The measurements of one fleet.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_tests::{population::Shape, usage::Memory};

use crate::{
    fleet::{Fleet, Kind},
    place::{Cost, Moment, Place},
};

/// Pause between two changes, longer than the second that kube-proxy leaves between two syncs.
const PAUSE: Duration = Duration::from_millis(1_200);

/// Time after which no further change is made. Many kube-proxies take half a minute for each.
const CHANGES_TIME: Duration = Duration::from_secs(60);

/// Extent of the measurements.
pub(crate) struct Plan {
    pub(crate) changes: u32,
    /// Number of starts of a single client, whose cost chance would otherwise hide.
    pub(crate) starts_of_one: u32,
    /// Time without noticeable work after which API server and clients count as at rest.
    pub(crate) rest: Duration,
    /// The same after a crash, from which clients may come back in several steps.
    pub(crate) rest_after_crash: Duration,
    /// Length of a measurement without clients.
    pub(crate) idle: Duration,
}

/// Clients of one kind that start together.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub(crate) kind: Kind,
    pub(crate) shape: Shape,
    /// The number of clients that is asked for.
    pub(crate) wanted: u32,
    /// The number of clients for which there is memory.
    pub(crate) count: u32,
}

/// Results for one fleet.
pub(crate) struct Found {
    pub(crate) group: Group,
    pub(crate) starts: Vec<Start>,
    /// Growth of the API server's live memory with the clients.
    pub(crate) server_live_bytes: f64,
    /// Memory of each client at rest.
    pub(crate) resident_bytes: Vec<u64>,
    /// Connections to the API server that the clients hold at rest.
    pub(crate) open_connections: u64,
    /// Time from sending each change until the first, and until the last client has it.
    pub(crate) first_follows: Vec<Duration>,
    pub(crate) last_follows: Vec<Duration>,
    /// Cost of all changes.
    pub(crate) changes: Cost,
    pub(crate) crash: Crash,
}

/// A crash and restart of the API server under its clients.
pub(crate) struct Crash {
    /// Time until the API server is ready again beyond that of a restart without clients.
    pub(crate) delay_s: f64,
    /// Time from its readiness until each client follows a change.
    pub(crate) returns: Vec<Duration>,
    /// CPU time of the API server is that beyond the restart without clients.
    pub(crate) cost: Cost,
}

/// One start of all clients.
pub(crate) struct Start {
    /// Time from the first client's start until each was ready.
    pub(crate) ready: Vec<Duration>,
    pub(crate) cost: Cost,
    /// Growth of the API server's resident memory to its peak.
    pub(crate) server_peak_bytes: f64,
}

/// A restart of the API server without clients.
pub(crate) struct Alone {
    ready: Duration,
    server_cpu_s: f64,
    /// Share of a CPU that the API server takes afterwards.
    idle: f64,
}

pub(crate) fn measure(place: &mut Place<'_>, group: Group, plan: &Plan) -> Result<Found> {
    let alone = restart_alone(place, plan)?;
    let live_before = place.live_bytes()?;
    let (fleet, starts) = start(place, group, plan, alone.idle)?;
    let server_live_bytes = place.live_bytes()? as f64 - live_before as f64;
    let resident_bytes = fleet.pids().into_iter().map(|pid| Memory::of(pid).resident).collect();
    let open_connections = fleet.open_connections()?;
    let (first_follows, last_follows, changes) = change(place, &fleet, plan, alone.idle)?;
    let crash = crash(place, &fleet, plan, &alone)?;
    drop(fleet);
    place.clear()?;
    Ok(Found {
        group,
        starts,
        server_live_bytes,
        resident_bytes,
        open_connections,
        first_follows,
        last_follows,
        changes,
        crash,
    })
}

/// Restarts the API server while there are no clients, so that each fleet meets one that has served none. Otherwise
/// this does what [`crash`] does.
pub(crate) fn restart_alone(place: &mut Place<'_>, plan: &Plan) -> Result<Alone> {
    let crashed = place.moment(None)?;
    let ready = place.restart();
    place.change_unseen();
    let now = place.rest(None, plan.rest_after_crash)?;
    let idle = place.idle_rate(plan.idle)?;
    let cost = now.since(&Moment { server_cpu: Duration::ZERO, ..crashed }, idle);
    Ok(Alone { ready, server_cpu_s: cost.server_cpu_s, idle })
}

fn start(place: &Place<'_>, group: Group, plan: &Plan, idle: f64) -> Result<(Fleet, Vec<Start>)> {
    let others = if group.count == 1 { plan.starts_of_one - 1 } else { 0 };
    let mut starts = Vec::new();
    for _ in 0..others {
        starts.push(start_once(place, group, plan.rest, idle)?.1);
        place.clear()?;
        place.rest(None, plan.rest)?;
    }
    let (fleet, last) = start_once(place, group, plan.rest, idle)?;
    starts.push(last);
    Ok((fleet, starts))
}

pub(crate) fn start_once(place: &Place<'_>, group: Group, rest: Duration, idle: f64) -> Result<(Fleet, Start)> {
    let resident_before = place.forget_peak()?;
    let before = place.moment(None)?;
    let (fleet, ready) = Fleet::start(group.kind, group.count, place)?;
    let cost = place.rest(Some(&fleet), rest)?.since(&before, idle);
    let server_peak_bytes = place.memory()?.peak as f64 - resident_before as f64;
    Ok((fleet, Start { ready, cost, server_peak_bytes }))
}

/// Changes the Service several times. Returns the times of the first and of the last client, and the cost of all
/// changes.
fn change(
    place: &mut Place<'_>,
    fleet: &Fleet,
    plan: &Plan,
    idle: f64,
) -> Result<(Vec<Duration>, Vec<Duration>, Cost)> {
    // The first change meets cold caches and connections, so it does not count.
    place.change(fleet)?;
    let before = place.rest(Some(fleet), plan.rest)?;
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let deadline = Instant::now() + CHANGES_TIME;
    for _ in 0..plan.changes {
        thread::sleep(PAUSE);
        let follows = place.change(fleet)?;
        first.extend(follows.iter().min());
        last.extend(follows.iter().max());
        if Instant::now() > deadline {
            break;
        }
    }
    Ok((first, last, place.rest(Some(fleet), plan.rest)?.since(&before, idle)))
}

/// Crashes the API server under its clients.
fn crash(place: &mut Place<'_>, fleet: &Fleet, plan: &Plan, alone: &Alone) -> Result<Crash> {
    let before = place.moment(Some(fleet))?;
    let ready = place.restart();
    let returns = place.change(fleet).context("after the API server's crash")?;
    let now = place.rest(Some(fleet), plan.rest_after_crash)?;
    let cost = now.since(&Moment { server_cpu: Duration::ZERO, ..before }, alone.idle);
    let cost = Cost { server_cpu_s: cost.server_cpu_s - alone.server_cpu_s, ..cost };
    Ok(Crash { delay_s: ready.as_secs_f64() - alone.ready.as_secs_f64(), returns, cost })
}
