//! Events of `cproxy trace`, and its summary.

use std::{collections::HashMap, net::IpAddr};

use cproxy_core::printable;
use cproxy_datapath::bpf::{ServiceCounters, ServiceCounts, TraceEvent};
use serde::Serialize;

use super::{
    address::BackendAddress,
    columns::{align_columns, or_dash},
    names::Names,
};

/// Event in the output of `cproxy trace`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceRow {
    /// Seconds since 1970, with microseconds.
    pub time: f64,
    /// translated, refused, dropped, excluded, reversed or closed.
    pub verdict: &'static str,
    /// Reason of the verdict, if there is one.
    pub reason: Option<&'static str>,
    /// System call.
    pub call: &'static str,
    /// TCP or UDP.
    pub protocol: String,
    /// Address that the application names.
    pub address: IpAddr,
    /// Port that the application names.
    pub port: u16,
    /// namespace/name; `None` without an agent.
    pub service: Option<String>,
    /// Backend, if there is one.
    pub backend: Option<BackendAddress>,
    /// Id of the process; `None` before Linux 6.1.
    pub pid: Option<u32>,
    /// Name of the thread; `None` before Linux 6.1.
    pub command: Option<String>,
    /// User of the process.
    pub uid: u32,
    /// Id of the process's cgroup: the inode number of its directory.
    pub cgroup: u64,
    /// Cookie of the network namespace.
    pub netns_cookie: u64,
    /// Cookie of the socket.
    pub socket_cookie: u64,
}

/// Widths of the columns of text, but for the last one.
macro_rules! line {
    ($($cell:expr),+) => { format!("{:12}  {:10}  {:22}  {:27}  {}", $($cell),+) };
}

/// Line with the titles of the columns.
#[must_use]
pub fn trace_header() -> String {
    line!("TIME (UTC)", "VERDICT", "PROCESS", "DESTINATION", "SERVICE, BACKEND (WHY)") + "\n"
}

impl TraceRow {
    /// Row of an event. The offset is `CLOCK_REALTIME` at the start of `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn new(event: &TraceEvent, names: &Names, clock_offset_ns: i128) -> Self {
        let time_us = (clock_offset_ns + i128::from(event.time_ns)) / 1_000;
        Self {
            time: time_us as f64 / 1e6,
            verdict: event.verdict,
            reason: event.reason,
            call: event.call,
            protocol: event.frontend.protocol.to_string(),
            address: event.frontend.address.into(),
            port: event.frontend.port,
            service: names.service(&event.frontend).map(str::to_owned),
            backend: event.backend.as_ref().map(BackendAddress::from),
            pid: event.pid,
            command: event.command.clone(),
            uid: event.uid,
            cgroup: event.cgroup_id,
            netns_cookie: event.netns_cookie,
            socket_cookie: event.socket_cookie,
        }
    }

    /// Line of text, without its end.
    #[must_use]
    pub fn text(&self) -> String {
        let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let process = format!("{}[{pid}]", or_dash(self.command.as_deref()));
        let destination = format!("{}/{}", BackendAddress { address: self.address, port: self.port }, self.protocol);
        let mut rest = or_dash(self.service.as_deref());
        if let Some(backend) = &self.backend {
            rest.push_str(&format!(", {backend}"));
        }
        if let Some(reason) = self.reason {
            rest.push_str(&format!(" ({reason})"));
        }
        line!(time_of_day(self.time), self.verdict, process, destination, rest)
    }
}

/// Time of day in UTC, with milliseconds.
fn time_of_day(seconds: f64) -> String {
    let milliseconds = (seconds * 1_000.0) as u64;
    let (seconds, milliseconds) = (milliseconds / 1_000 % 86_400, milliseconds % 1_000);
    format!("{:02}:{:02}:{:02}.{milliseconds:03}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// Counters of a Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SummaryRow {
    /// namespace/name; `None` without an agent: there is then a row for each destination.
    pub service: Option<String>,
    /// Destination; `None` for a Service.
    pub destination: Option<String>,
    /// Connects, and first datagrams of a flow, that were sent to a backend.
    pub connections: u64,
    /// Calls that failed with ECONNREFUSED.
    pub refused: u64,
    /// Calls that failed with EHOSTUNREACH.
    pub dropped: u64,
}

/// Counters by Service, most first. Calls to unknown ports of a ClusterIP count for the Service that has it.
#[must_use]
pub fn summary_rows(counters: &ServiceCounters, names: &Names) -> Vec<SummaryRow> {
    let mut sums = HashMap::<(Option<String>, Option<String>), ServiceCounts>::new();
    let mut add = |service: Option<&str>, destination: String, counts: ServiceCounts| {
        let destination = service.is_none().then_some(destination);
        *sums.entry((service.map(str::to_owned), destination)).or_default() += counts;
    };
    for (frontend, counts) in counters.frontends.iter().filter(|(frontend, _)| !names.is_canary(frontend)) {
        add(names.service(frontend), frontend.to_string(), *counts);
    }
    for (address, counts) in &counters.addresses {
        add(names.service_at(*address), address.to_string(), *counts);
    }
    let row = |((service, destination), counts): (_, ServiceCounts)| {
        let ServiceCounts { connections, refusals: refused, drops: dropped } = counts;
        SummaryRow { service, destination, connections, refused, dropped }
    };
    let mut rows: Vec<_> = sums.into_iter().map(row).collect();
    rows.sort_by(|one, other| {
        let total = |row: &SummaryRow| row.connections + row.refused + row.dropped;
        let name = |row: &SummaryRow| (row.service.clone(), row.destination.clone());
        total(other).cmp(&total(one)).then_with(|| name(one).cmp(&name(other)))
    });
    rows
}

/// The rows as aligned columns.
#[must_use]
pub fn summary_text(rows: &[SummaryRow]) -> String {
    let header = ["SERVICE", "CONNECTIONS", "REFUSED", "DROPPED"].map(str::to_owned);
    let cells = |row: &SummaryRow| {
        let name = row.service.as_deref().or(row.destination.as_deref()).map(printable).unwrap_or_default();
        [name, row.connections.to_string(), row.refused.to_string(), row.dropped.to_string()]
    };
    align_columns(&std::iter::once(header).chain(rows.iter().map(cells)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Frontend, Protocol, parse_address};

    use super::*;

    #[test]
    fn a_time_is_that_of_the_day() {
        assert_eq!(time_of_day(86_400.0 + 3_661.25), "01:01:01.250");
    }

    #[test]
    fn a_summary_begins_with_the_most_used() {
        let at = |port| Frontend { address: parse_address("10.96.0.1").unwrap(), port, protocol: Protocol::Tcp };
        let some = |connections| ServiceCounts { connections, ..ServiceCounts::default() };
        let frontends = [(at(80), some(1)), (at(81), some(3))].into();
        let counters = ServiceCounters { frontends, ..ServiceCounters::default() };
        let rows = summary_rows(&counters, &Names::default());
        let totals: Vec<_> = rows.iter().map(|row| (row.destination.as_deref(), row.connections)).collect();
        assert_eq!(totals, [(Some("10.96.0.1:81/TCP"), 3), (Some("10.96.0.1:80/TCP"), 1)]);
    }
}
