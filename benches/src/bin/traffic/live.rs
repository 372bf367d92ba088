//! connect(2) beside live connections of the same pod, and to many Services in random order.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_benches::{
    arena::{Arena, Cluster, Peer},
    paired::Estimate,
    report::{Report, Table, Target, Verdict},
};
use cproxy_tests::{
    manifest::{Service, Slice},
    sandbox::Sandbox,
    world::counter,
};
use serde_json::{Map, Value, json};

use crate::{
    PREFIX, Plan,
    connect::{BATCH, METRICS, P50, ROUNDS, figures},
    contest::{self, Measured},
    servers,
};

/// Numbers of live connections.
const LIVE: [u32; 5] = [0, 1_000, 6_000, 20_000, 50_000];
const LIVE_QUICK: [u32; 2] = [0, 100];

/// Services that are called in random order.
const TOUR: u32 = 5_000;
const TOUR_QUICK: u32 = 10;
/// ClusterIP of the first of them; the others follow.
const FIRST_TOUR_VIP: Ipv4Addr = Ipv4Addr::new(10, 97, 0, 0);

/// Limit on what live connections may add to a call, in microseconds.
const ADDED_MAX_US: f64 = 0.1;
/// Limit on the ratio to the direct connection in random order.
const TOUR_MAX: f64 = 1.03;

/// Limit on the wait for places, and the pause between two looks.
const PLACES_MAX: Duration = Duration::from_secs(90);
const PLACES_PAUSE: Duration = Duration::from_millis(500);

/// Runs only this part of the benchmark.
pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let mut report = Report::new("connect");
    report.samples = json!({});
    let verdicts = add(&mut report, plan)?;
    contest::add_verdicts(&mut report, &verdicts);
    Ok(report)
}

/// Adds this part to the benchmark's report, and returns its verdicts; none if it only shows that it works.
pub(crate) fn add(report: &mut Report, plan: &Plan) -> Result<Vec<Verdict>> {
    let sandbox = Sandbox::new(PREFIX);
    servers::sink(&sandbox, &servers::SINK)?;
    let _kept = servers::keeper(&sandbox, &servers::KEPT)?;
    let subjects = [servers::SINK, servers::KEPT];
    let mut arena = Arena::new(&sandbox, Cluster::Manifests, &[Peer::Direct, Peer::Cproxy], &subjects)?;
    let (live, tour): (&[u32], u32) = if plan.quick { (&LIVE_QUICK, TOUR_QUICK) } else { (&LIVE, TOUR) };
    let tour = measure_tour(&mut arena, plan, tour)?;
    let all = measure_live(&sandbox, &mut arena, plan, live)?;
    let verdicts = [add_tour(report, &tour), add_live(report, &all, plan)];
    Ok(verdicts.into_iter().flatten().filter(|_| !plan.quick).collect())
}

/// Measures beside each number of live connections, which all participants have.
fn measure_live(sandbox: &Sandbox, arena: &mut Arena<'_>, plan: &Plan, live: &[u32]) -> Result<Vec<(u32, Measured)>> {
    let (mut all, mut open) = (Vec::new(), 0);
    for &count in live {
        eprintln!("{count} live connections: measuring");
        for stand in &mut arena.stands {
            let address = stand.address(&servers::KEPT);
            // The direct connections go to all backends in turn, as those through the ClusterIP do by chance.
            let backends = if stand.peer == Peer::Direct { servers::KEPT.backends } else { &[address] };
            for (backend, share) in backends.iter().zip(shares(count - open, backends.len() as u32)) {
                stand.worker.keep(share, *backend).with_context(|| format!("{count} live connections"))?;
            }
        }
        open = count;
        wait_for_places(sandbox, arena)?;
        arena.wait_for_rest()?;
        arena.stop();
        let participants = contest::participants_and_bystanders(arena);
        let measured =
            contest::measure(arena, &participants, &servers::SINK, &METRICS, plan.rounds(ROUNDS), |stand, address| {
                figures(&stand.worker.connect(BATCH, address)?)
            });
        arena.resume();
        all.push((count, measured));
    }
    Ok(all)
}

/// Waits until new connections find places for their peers, or cproxy has had the time to make some.
fn wait_for_places(sandbox: &Sandbox, arena: &mut Arena<'_>) -> Result<()> {
    let Some(stand) = arena.stands.iter_mut().find(|stand| stand.peer == Peer::Cproxy) else { return Ok(()) };
    let (deadline, address) = (Instant::now() + PLACES_MAX, stand.address(&servers::SINK));
    loop {
        let before = counter(sandbox, "tcp_without_place");
        stand.worker.connect(BATCH, address)?;
        if counter(sandbox, "tcp_without_place") == before || Instant::now() > deadline {
            return Ok(());
        }
        thread::sleep(PLACES_PAUSE);
    }
}

/// `count` in `parts` parts that differ by one at most.
fn shares(count: u32, parts: u32) -> impl Iterator<Item = u32> {
    (0..parts).map(move |part| count / parts + u32::from(part < count % parts))
}

/// Measures connections to `services` Services in another random order each round.
fn measure_tour(arena: &mut Arena<'_>, plan: &Plan, services: u32) -> Result<Measured> {
    let vips: Vec<_> = (0..services).map(tour_vip).collect();
    let objects = (0..services).flat_map(tour_objects);
    arena.add("tour", objects, vips.last().copied().unwrap_or(servers::SINK.vip))?;
    eprintln!("{services} Services in random order: measuring");
    arena.stop();
    let (participants, mut random) = (contest::participants(arena), Random(1));
    let subject = &servers::SINK;
    let measured = contest::measure(arena, &participants, subject, &METRICS, plan.rounds(ROUNDS), |stand, address| {
        if stand.peer == Peer::Direct {
            return figures(&stand.worker.connect_each(&vec![address; BATCH as usize])?);
        }
        let tour: Vec<_> = (0..BATCH).filter_map(|_| vips.get(random.below(vips.len())).copied()).collect();
        figures(&stand.worker.connect_each(&tour)?)
    });
    arena.resume();
    Ok(measured)
}

fn tour_vip(service: u32) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(FIRST_TOUR_VIP.to_bits() + service)), 80)
}

/// A Service, all of whose endpoints are the same server.
fn tour_objects(service: u32) -> [Value; 2] {
    let name = format!("tour-{service:05}");
    let sink = servers::SINK.backends.iter();
    let port = servers::SINK.backends.first().map_or(0, SocketAddr::port);
    [
        Service::new(&name).cluster_ips([tour_vip(service).ip()]).tcp("tcp", 80, port).into(),
        Slice::v4(&name).tcp("tcp", port).ready(sink.map(SocketAddr::ip)).into(),
    ]
}

/// Numbers by the generator splitmix64, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as usize % bound.max(1)
    }
}

fn add_tour(report: &mut Report, measured: &Measured) -> Option<Verdict> {
    let when = format!("connect(2), {TOUR} Services in random order");
    report.tables.push(measured.table(when.clone()));
    report.failures.extend(measured.failures(&when));
    add_samples(report, "random order", measured.json());
    let what = format!("connect(2), p50, {TOUR} Services in random order: cproxy over direct");
    Some(Verdict { what, found: measured.of_cproxy(Peer::Direct, P50)?, target: Target::AtMost(TOUR_MAX) })
}

fn add_live(report: &mut Report, all: &[(u32, Measured)], plan: &Plan) -> Option<Verdict> {
    for (count, measured) in all {
        let when = format!("connect(2), {count} live connections");
        report.tables.push(measured.table(when.clone()));
        report.failures.extend(measured.failures(&when));
    }
    let samples = all.iter().map(|(count, measured)| (count.to_string(), measured.json()));
    add_samples(report, "live connections", samples.collect::<Map<_, _>>().into());
    report.summary.push(added(all));
    report.notes.push(format!(
        "Beside live connections: each participant keeps that many connections to another Service open while it makes \
         those that are measured; {}.",
        plan.rounds(ROUNDS)
    ));
    growth(all)
}

/// Table of the time that cproxy adds to the direct connection's, a line for each number of live connections.
fn added(all: &[(u32, Measured)]) -> Table {
    let row = |(count, measured): &(u32, Measured)| {
        let added = measured.added_by_cproxy(Peer::Direct, P50);
        (format!("{count} live connections"), vec![added.map_or_else(|| "-".to_owned(), |added| format!("{added:.2}"))])
    };
    Table {
        title: "What cproxy adds to connect(2), p50, us".to_owned(),
        columns: vec!["cproxy".to_owned()],
        rows: all.iter().map(row).collect(),
    }
}

/// Verdict on what the most live connections add to what cproxy adds without any.
fn growth(all: &[(u32, Measured)]) -> Option<Verdict> {
    let [(_, none), .., (most, last)] = all else { return None };
    let (none, last) = (none.added_by_cproxy(Peer::Direct, P50)?, last.added_by_cproxy(Peer::Direct, P50)?);
    let found = Estimate { median: last.median - none.median, low: last.low - none.high, high: last.high - none.low };
    let what = format!("connect(2), p50, us: what cproxy adds with {most} live connections, over that without");
    Some(Verdict { what, found, target: Target::AtMost(ADDED_MAX_US) })
}

fn add_samples(report: &mut Report, key: &str, samples: Value) {
    if let Value::Object(object) = &mut report.samples {
        object.insert(key.to_owned(), samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up() {
        for (count, parts) in [(0, 5), (7, 5), (1_000, 1), (50_000, 5)] {
            let shares: Vec<_> = shares(count, parts).collect();
            assert_eq!((shares.iter().sum::<u32>(), shares.len()), (count, parts as usize));
            assert!(shares.iter().max().zip(shares.iter().min()).is_some_and(|(max, min)| max - min <= 1));
        }
    }
}
