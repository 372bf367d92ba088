//! The measurements of one peer.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_benches::{rest, subject};
use cproxy_tests::{
    pinned::{self, MapMemory},
    usage::{Memory, Sleeps, cpu_time, forget_peak},
};

use crate::peer::{Peer, Place, Running};

/// Pause between two single changes, longer than the second that kube-proxy leaves between two syncs.
const PAUSE: Duration = Duration::from_millis(1_200);

/// Extent of the measurements.
pub(crate) struct Plan {
    pub(crate) starts: u32,
    pub(crate) changes: u32,
    /// Number of slices that change at the same time, and number of times.
    pub(crate) burst: usize,
    pub(crate) bursts: u32,
    /// Time without CPU use after which a peer counts as at rest.
    pub(crate) rest: Duration,
    /// Length of the quiet interval.
    pub(crate) quiet: Duration,
}

/// Results for one peer.
pub(crate) struct Found {
    pub(crate) peer: Peer,
    pub(crate) bytes_on_disk: u64,
    pub(crate) starts: Vec<Start>,
    /// Times from sending a change to the first connection that follows it.
    pub(crate) changes: Vec<Duration>,
    pub(crate) cpu_per_change: Duration,
    pub(crate) bursts: Vec<Burst>,
    pub(crate) quiet: Quiet,
    /// Memory of cproxy's maps; empty for kube-proxy.
    pub(crate) maps: Vec<MapMemory>,
}

/// Cost from the start until the peer is at rest.
pub(crate) struct Start {
    pub(crate) to_ready: Duration,
    pub(crate) cpu: Duration,
    pub(crate) memory: Memory,
}

/// Cost of changing many slices at once.
pub(crate) struct Burst {
    /// Time that sending them took.
    pub(crate) sending: Duration,
    /// Time from the API server's last answer until all changes are in the kernel.
    pub(crate) lag: Duration,
    pub(crate) cpu: Duration,
    pub(crate) peak_bytes: u64,
    /// Resident memory once it is at rest again.
    pub(crate) resident_bytes: u64,
}

/// Cost of a minute without changes.
pub(crate) struct Quiet {
    pub(crate) sleeps: f64,
    pub(crate) cpu: Duration,
}

pub(crate) fn measure(place: &Place<'_>, peer: Peer, plan: &Plan) -> Result<Found> {
    // After earlier changes the Service has its first backend again.
    let mut made = 0;
    let mut starts = Vec::new();
    for _ in 1..plan.starts {
        let (running, to_ready) = peer.start(place, made)?;
        starts.push(Start::of(&running, to_ready, plan.rest)?);
    }
    let (running, to_ready) = peer.start(place, made)?;
    starts.push(Start::of(&running, to_ready, plan.rest)?);
    let maps = if peer.is_cproxy() { pinned::maps(place.sandbox) } else { Vec::new() };
    let (changes, cpu_per_change) = single_changes(place, &running, plan, &mut made)?;
    let quiet = quiet(&running, plan.quiet)?;
    let bursts = (0..plan.bursts).map(|_| burst(place, &running, plan, &mut made)).collect::<Result<_>>()?;
    place.writer.replace([subject::slice(0)]);
    let bytes_on_disk = peer.bytes_on_disk(place)?;
    Ok(Found { peer, bytes_on_disk, starts, changes, cpu_per_change, bursts, quiet, maps })
}

impl Start {
    fn of(running: &Running<'_>, to_ready: Duration, rest: Duration) -> Result<Self> {
        let cpu = cpu_at_rest(running, rest)?;
        running.scrape()?;
        Ok(Self { to_ready, cpu, memory: Memory::of(running.pid()) })
    }
}

/// CPU time so far, once the peer has nothing left to do.
fn cpu_at_rest(running: &Running<'_>, rest: Duration) -> Result<Duration> {
    rest::wait(1, rest, subject::TIMEOUT, || cpu_time(running.pid()))
}

fn single_changes(
    place: &Place<'_>,
    running: &Running<'_>,
    plan: &Plan,
    made: &mut usize,
) -> Result<(Vec<Duration>, Duration)> {
    // The first change meets cold caches and connections, so it does not count.
    one_change(place, running, made)?;
    let before = cpu_at_rest(running, plan.rest)?;
    let mut changes = Vec::new();
    for _ in 0..plan.changes {
        thread::sleep(PAUSE);
        changes.push(one_change(place, running, made)?);
    }
    Ok((changes, (cpu_at_rest(running, plan.rest)? - before) / plan.changes))
}

fn one_change(place: &Place<'_>, running: &Running<'_>, made: &mut usize) -> Result<Duration> {
    *made += 1;
    let seen = subject::look_for(&running.netns, subject::backend(*made));
    let sent = Instant::now();
    place.writer.replace([subject::slice(*made)]);
    Ok(seen.wait().with_context(|| format!("change {made}"))?.saturating_duration_since(sent))
}

fn quiet(running: &Running<'_>, interval: Duration) -> Result<Quiet> {
    let now = || (Sleeps::of(running.pid()), cpu_time(running.pid()));
    let (sleeps_before, cpu_before) = now();
    running.pass(interval)?;
    let (sleeps_after, cpu_after) = now();
    let part_of_minute = interval.as_secs_f64() / 60.0;
    Ok(Quiet {
        sleeps: sleeps_after.since(&sleeps_before) as f64 / part_of_minute,
        cpu: (cpu_after - cpu_before).div_f64(part_of_minute),
    })
}

/// Makes a burst of changes. The last one is to the Service that is probed: a watch reports changes in order, so a peer
/// that has the last one in the kernel has them all.
fn burst(place: &Place<'_>, running: &Running<'_>, plan: &Plan, made: &mut usize) -> Result<Burst> {
    let before = cpu_at_rest(running, plan.rest)?;
    forget_peak(running.pid());
    *made += 1;
    let replacements = *made as u32;
    let seen = subject::look_for(&running.netns, subject::backend(*made));
    let slices =
        place.shape.cycle().take(plan.burst).zip(0..).map(|(slice, n)| place.shape.slice(slice, replacements + n));
    let slices = slices.collect::<Vec<_>>();
    let sent = Instant::now();
    place.writer.replace(slices);
    let sending = sent.elapsed();
    place.writer.replace([subject::slice(*made)]);
    let answered = Instant::now();
    let lag = seen.wait().context("the burst")?.saturating_duration_since(answered);
    let cpu = cpu_at_rest(running, plan.rest)? - before;
    let memory = Memory::of(running.pid());
    Ok(Burst { sending, lag, cpu, peak_bytes: memory.peak, resident_bytes: memory.resident })
}
