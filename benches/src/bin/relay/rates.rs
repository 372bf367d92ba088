//! Changes at several rates, seen by clients of a relay or of the API server.

use std::time::Duration;

use anyhow::Result;
use cproxy_tests::relay_server::RunningRelay;

use crate::{
    changes::Changer,
    clock::between,
    generator::Generator,
    load::{protocol::Expected, receipts::Latencies},
    place::{Moment, OWN_OBJECTS, Place, Shares, load_average},
};

/// Rates, each with the number of slices that change in turn: at the highest rate few, so that a client that is behind
/// gets several changes of one as the last.
pub(crate) const RATES: [(u32, usize); 3] = [(1, 1_000), (10, 1_000), (100, 20)];

/// Server whose clients are measured.
pub(crate) struct Subject<'a> {
    pub(crate) server: &'static str,
    pub(crate) relay: Option<&'a RunningRelay>,
    /// Peculiarity of the measurement.
    pub(crate) remark: &'static str,
}

/// Result at one rate.
#[derive(Clone, Debug)]
pub(crate) struct AtRate {
    pub(crate) server: &'static str,
    pub(crate) remark: &'static str,
    pub(crate) clients: u32,
    pub(crate) rate_per_s: u32,
    pub(crate) latencies: Latencies,
    /// Of the clients with a process of their own.
    pub(crate) unhurried: Latencies,
    pub(crate) shares: Shares,
    /// Events that clients got, by second.
    pub(crate) events_per_s: f64,
    /// Time from the last answer until all clients had everything.
    pub(crate) rest: Duration,
    pub(crate) load_average: String,
}

/// Changes slices for some seconds.
pub(crate) fn measure(
    place: &Place<'_>,
    subject: &Subject<'_>,
    generator: &mut Generator,
    changer: &mut Changer,
    (rate_per_s, objects): (u32, usize),
    seconds: u32,
) -> Result<AtRate> {
    let objects = objects.min(place.shape.slices() as usize);
    generator.record()?;
    let before = Moment::now(place, subject.relay, generator)?;
    let changes = changer.changes(rate_per_s.into(), rate_per_s * seconds, objects)?;
    let last = changes.iter().map(|change| change.version).max().unwrap_or_default();
    let answered_ns = changes.iter().map(|change| change.answered_ns).max().unwrap_or_default();
    let settled_ns = generator.settle([0, last])?;
    let shares = Moment::now(place, subject.relay, generator)?.since(&before);
    let [latencies, unhurried] = generator.latencies(&changes)?;
    let at_rate = AtRate {
        server: subject.server,
        remark: subject.remark,
        clients: generator.clients,
        rate_per_s,
        events_per_s: latencies.receipts as f64 / between(answered_ns, settled_ns).as_secs_f64().max(seconds.into()),
        latencies,
        unhurried,
        shares,
        rest: between(answered_ns, settled_ns),
        load_average: load_average(),
    };
    eprintln!("{}", at_rate.text());
    Ok(at_rate)
}

/// Compares what clients have with what was written.
pub(crate) fn check(place: &Place<'_>, generator: &mut Generator, changer: &Changer) -> Result<usize> {
    generator.check(&Expected {
        services: place.shape.services as usize + OWN_OBJECTS,
        slices: place.shape.slices() as usize + OWN_OBJECTS,
        changed: changer.changed.clone(),
    })
}

impl AtRate {
    /// One line.
    pub(crate) fn text(&self) -> String {
        let Latencies { p50_ms, p99_ms, max_ms, p50_from_request_ms, receipts, pairs, missing } = self.latencies;
        let Latencies { p50_ms: own_p50_ms, p99_ms: own_p99_ms, max_ms: own_max_ms, .. } = self.unhurried;
        let Shares { relay, generator, api_server } = self.shares;
        format!(
            "{}{}, {} clients, {}/s: p50 {p50_ms:.1} p99 {p99_ms:.1} max {max_ms:.1} ms (p50 from the request \
             {p50_from_request_ms:.1}), in a process of its own p50 {own_p50_ms:.1} p99 {own_p99_ms:.1} max \
             {own_max_ms:.1} ms; CPU relay {relay:.3} generator {generator:.3} apiserver {api_server:.3}; \
             {receipts} events for {pairs} ({missing} missing), {:.0}/s; the rest took {:?}; load {}",
            self.server, self.remark, self.clients, self.rate_per_s, self.events_per_s, self.rest, self.load_average,
        )
    }
}
