//! Events of `cproxy trace`, and its summary.

use std::{collections::HashMap, net::IpAddr};

use cproxy_core::{printable, sort_few_by};
use cproxy_datapath::bpf::{PolicyDecision, ServiceCounters, ServiceCounts, TraceEvent, TracedDenial};
use cproxy_policy::Direction;
use serde::Serialize;

use super::{
    address::BackendAddress,
    columns::{align_columns, or_dash},
    names::Names,
    pod_policy::PodPolicyReport,
    table::{Layout, NAME_CHARS_MIN, chars, cut, pad},
};

/// Event in the output of `cproxy trace`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceRow {
    /// Seconds since 1970, with microseconds.
    pub time: f64,
    /// forwarded, refused, dropped, direct, reversed, closed, denied or audited.
    pub verdict: &'static str,
    /// Reason of the verdict, if there is one. Of a denial: the rule, or the policies of which none has one.
    pub reason: Option<String>,
    /// `Ingress` or `Egress` of a denial by network policy. The address is then the peer's, and the port the one that
    /// was called: for ingress the pod's own.
    pub direction: Option<String>,
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
    /// User of the process; `None` for ingress.
    pub uid: Option<u32>,
    /// Id of the process's cgroup: the inode number of its directory; `None` for ingress.
    pub cgroup: Option<u64>,
    /// Cookie of the network namespace; `None` for ingress.
    pub netns_cookie: Option<u64>,
    /// Cookie of the socket; `None` for ingress.
    pub socket_cookie: Option<u64>,
}

/// Columns of a terminal from which on a line has the address of a Service beside its name.
const WIDE: usize = 120;
/// Width of a verdict.
const VERDICT_CHARS: usize = 9;
/// Width of a process, which is the last cell.
const PROCESS_CHARS: usize = 16;
/// Width of an IPv4 address with its port, protocol and backend, where there is room for more.
const ROUTE_CHARS: usize = 44;
/// Least width of a Service and a reason in a file or pipe.
const SERVICE_CHARS: usize = 28;
/// Columns between cells.
const GAP: &str = "  ";

/// Widths of a line's cells.
struct Widths {
    time: usize,
    route: usize,
    /// `None`: the Service is part of the route.
    service: Option<usize>,
    /// Columns of the line; `None`: names are whole.
    columns: Option<usize>,
}

impl Widths {
    const fn of(layout: Layout) -> Self {
        const TIME: usize = "09:41:07".len();
        const TIME_WIDE: usize = "09:41:07.215".len();
        const REST: usize = VERDICT_CHARS + PROCESS_CHARS + 3 * GAP.len();
        match layout {
            Layout::Columns(columns) if columns < WIDE => {
                Self { time: TIME, route: columns.saturating_sub(TIME + REST), service: None, columns: Some(columns) }
            }
            Layout::Columns(columns) => {
                let taken = TIME_WIDE + ROUTE_CHARS + REST + GAP.len();
                let service = Some(columns.saturating_sub(taken));
                Self { time: TIME_WIDE, route: ROUTE_CHARS, service, columns: Some(columns) }
            }
            Layout::Plain | Layout::Wide => {
                Self { time: TIME_WIDE, route: ROUTE_CHARS, service: Some(SERVICE_CHARS), columns: None }
            }
        }
    }

    fn line(&self, time: &str, verdict: &str, route: String, service: String, process: &str) -> String {
        let mut line = pad(time.get(..self.time).unwrap_or(time).to_owned(), self.time) + GAP;
        line += &(pad(verdict.to_owned(), VERDICT_CHARS) + GAP);
        line += &(pad(route, self.route) + GAP);
        if let Some(width) = self.service {
            line += &(pad(service, width) + GAP);
        }
        let room = |columns: usize| columns.saturating_sub(chars(&line)).max(NAME_CHARS_MIN);
        let process = cut(process, self.columns.map_or(usize::MAX, room));
        line + &process
    }
}

/// Line with the titles of the columns.
#[must_use]
pub fn trace_header(layout: Layout) -> String {
    let (route, service) = ("DESTINATION -> BACKEND".to_owned(), "SERVICE (WHY)".to_owned());
    Widths::of(layout).line("TIME UTC", "VERDICT", route, service, "PROCESS") + "\n"
}

/// A name, and the text behind it. The name is cut so that both have room.
fn named(name: &str, rest: &str, room: usize) -> String {
    cut(name, room.saturating_sub(chars(rest)).max(NAME_CHARS_MIN)) + rest
}

impl TraceRow {
    /// Row of an event. The offset is `CLOCK_REALTIME` at the start of `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn new(event: &TraceEvent, names: &Names, policy: Option<&PodPolicyReport>, clock_offset_ns: i128) -> Self {
        let of_frontend = names.service(&event.frontend);
        let time_us = (clock_offset_ns + i128::from(event.time_ns)) / 1_000;
        // Ingress denials: neither process nor socket.
        let has_caller = event.denial.as_ref().is_none_or(|denial| denial.direction == Direction::Egress);
        Self {
            time: time_us as f64 / 1e6,
            verdict: event.verdict,
            reason: match event.denial {
                Some(TracedDenial { direction, rule }) => {
                    let decision = PolicyDecision { is_allowed: false, rule };
                    Some(PodPolicyReport::verdict(policy, direction, event.frontend.address, decision).reason)
                }
                None => event.reason.map(str::to_owned),
            },
            direction: event.denial.map(|denial| denial.direction.to_string()),
            call: event.call,
            protocol: event.frontend.protocol.to_string(),
            address: event.frontend.address.into(),
            port: event.frontend.port,
            // A call to a port that a ClusterIP does not have belongs to the Service of the address.
            service: of_frontend.or_else(|| names.service_at(event.frontend.address)).map(str::to_owned),
            backend: event.backend.as_ref().map(BackendAddress::from),
            pid: event.pid,
            command: event.command.clone(),
            uid: has_caller.then_some(event.uid),
            cgroup: has_caller.then_some(event.cgroup_id),
            netns_cookie: has_caller.then_some(event.netns_cookie),
            socket_cookie: has_caller.then_some(event.socket_cookie),
        }
    }

    /// Line of text, without its end.
    #[must_use]
    pub fn text(&self, layout: Layout) -> String {
        let widths = Widths::of(layout);
        let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let process = format!("{}[{pid}]", or_dash(self.command.as_deref()));
        let name = or_dash(self.service.as_deref());
        let to = self.backend.as_ref().map_or_else(String::new, |backend| format!(" -> {backend}"));
        let why = self.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
        let mut address = format!("{}/{}", BackendAddress { address: self.address, port: self.port }, self.protocol);
        if self.direction.as_deref() == Some("Ingress") {
            address = format!("from {} to :{}/{}", self.address, self.port, self.protocol);
        }
        let (route, service) = match (widths.service, &self.backend) {
            (Some(_), _) if widths.columns.is_none() => (address + &to, name + &why),
            (Some(width), _) => (address + &to, named(&name, &why, width)),
            // The reason tells most where there is no backend, and the name more than the address.
            (None, backend) => {
                let rest = if backend.is_some() { to } else { why };
                let route = match self.service {
                    Some(_) => named(&name, &format!(":{}/{}{rest}", self.port, self.protocol), widths.route),
                    None => address + &rest,
                };
                (route, String::new())
            }
        };
        widths.line(&time_of_day(self.time), self.verdict, route, service, &process)
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
    sort_few_by(&mut rows, |one, other| {
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
    use crate::report::names::FrontendLabel;

    #[test]
    fn a_time_is_that_of_the_day() {
        assert_eq!(time_of_day(86_400.0 + 3_661.25), "01:01:01.250");
    }

    /// A row of a call to this Service.
    fn row(service: Option<&str>, backend: Option<&str>, reason: Option<&'static str>) -> TraceRow {
        let backend = backend.map(|text| text.parse::<std::net::SocketAddr>().unwrap());
        TraceRow {
            time: 34_867.215,
            verdict: if backend.is_some() { "forwarded" } else { "refused" },
            reason: reason.map(str::to_owned),
            direction: None,
            call: "connect",
            protocol: "TCP".to_owned(),
            address: "10.105.210.110".parse().unwrap(),
            port: 8080,
            service: service.map(str::to_owned),
            backend: backend.map(|at| BackendAddress { address: at.ip(), port: at.port() }),
            pid: Some(41_812),
            command: Some("kube-state-metr".to_owned()),
            uid: Some(0),
            cgroup: Some(1),
            netns_cookie: Some(1),
            socket_cookie: Some(1),
        }
    }

    #[test]
    fn a_line_fits_the_terminal_and_names_are_whole_elsewhere() {
        let long = "monitoring/kube-prometheus-stack-prometheus-node-exporter";
        let rows = [
            row(Some("default/web"), Some("10.244.0.3:8080"), Some("random")),
            row(Some(long), Some("10.244.100.103:8080"), Some("round-robin")),
            row(Some(long), None, Some("unknown-port")),
            row(None, None, Some("no-endpoint")),
        ];
        for columns in [80, 100, 120, 160] {
            let layout = Layout::Columns(columns);
            for line in rows.iter().map(|row| row.text(layout)).chain([trace_header(layout).trim_end().to_owned()]) {
                assert!(chars(&line) <= columns, "{columns}: {line}");
            }
        }
        let narrow = Layout::Columns(80);
        assert_eq!(trace_header(narrow), format!("TIME UTC  VERDICT    {:41}  PROCESS\n", "DESTINATION -> BACKEND"));
        let line = |route: &str| format!("09:41:07  forwarded  {route:41}  kube-sta…[41812]");
        assert_eq!(rows[0].text(narrow), line("default/web:8080/TCP -> 10.244.0.3:8080"));
        let refused = rows[2].text(narrow);
        assert!(refused.contains("exporter:8080/TCP (unknown-port)  kube"), "{refused}");
        assert!(rows[3].text(narrow).contains("  10.105.210.110:8080/TCP (no-endpoint)  "));
        assert_eq!(
            rows[1].text(Layout::Plain),
            format!(
                "09:41:07.215  forwarded  10.105.210.110:8080/TCP -> 10.244.100.103:8080  {long} (round-robin)  \
                 kube-state-metr[41812]"
            )
        );
    }

    #[test]
    fn a_call_to_an_unknown_port_names_the_service_of_the_address() {
        let at = |port| Frontend { address: parse_address("10.96.0.1").unwrap(), port, protocol: Protocol::Tcp };
        let mut names = Names::default();
        let label = FrontendLabel { service: Some("default/web".to_owned()), ..FrontendLabel::default() };
        names.insert(at(80), label);
        let event = |port| TraceEvent {
            time_ns: 0,
            pid: None,
            command: None,
            uid: 0,
            cgroup_id: 1,
            netns_cookie: 1,
            socket_cookie: 1,
            frontend: at(port),
            backend: None,
            verdict: "refused",
            call: "connect",
            reason: Some("unknown-port"),
            denial: None,
        };
        assert_eq!(TraceRow::new(&event(81), &names, None, 0).service.as_deref(), Some("default/web"));
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
