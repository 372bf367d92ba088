//! Text of `/metrics`: kube-proxy's names where the meaning is the same, and cproxy's own for the rest.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cproxy_core::ServiceName;
use cproxy_daemon::{
    Exposition, MetricKind,
    MetricKind::{Counter, Gauge},
    MetricsFormat,
};
use cproxy_datapath::{
    LAYOUT_VERSION,
    bpf::{
        HookTime, PinDir, PolicyPins, PolicyReader, ReceivePins, ServiceCounts, hook_times, read_counters,
        receive_counters,
    },
};

use super::{health::Probes, process, services};
use crate::state::{Measures, ServiceCalls, Status};

/// Numbers that are read from the kernel.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    counters: Vec<(&'static str, u64)>,
    hooks: Vec<HookTime>,
    /// Calls by Service, if the programs count them.
    pub(super) calls: Vec<ServiceCalls>,
}

impl Kernel {
    /// Reads what can be read.
    pub(super) fn read(pins: &PinDir) -> Self {
        let counters = read_counters(pins).map_err(|error| tracing::debug!("metrics: {error}"));
        let of_policy = PolicyReader::new(PolicyPins::new(pins)).map(|policy| policy.counters());
        let of_policy = of_policy.transpose().map_err(|error| tracing::debug!("metrics: {error}"));
        let receive = ReceivePins::new(pins);
        let received = receive.exist().then(|| receive_counters(&receive));
        let received = received.transpose().map_err(|error| tracing::debug!("metrics: {error}"));
        let of_features = [of_policy.unwrap_or_default(), received.unwrap_or_default()];
        let counters = counters.into_iter().chain(of_features.into_iter().flatten()).flatten().collect();
        let hooks = hook_times(pins).map_err(|error| tracing::debug!("metrics: {error}"));
        Self { counters, hooks: hooks.unwrap_or_default(), calls: Vec::new() }
    }
}

/// Metric from a counter of `cproxy get counters`.
struct Row {
    /// Name there.
    counter: &'static str,
    metric: &'static str,
    /// Label and its value, if there is one.
    label: Option<(&'static str, &'static str)>,
    kind: MetricKind,
    help: &'static str,
}

const fn row(counter: &'static str, metric: &'static str, kind: MetricKind, help: &'static str) -> Row {
    Row { counter, metric, label: None, kind, help }
}

const fn entries(counter: &'static str, resource: &'static str) -> Row {
    let help = "Entries of the kernel's tables that are in use.";
    Row { counter, metric: "cproxy_entries", label: Some(("resource", resource)), kind: Gauge, help }
}

const fn limit(counter: &'static str, resource: &'static str) -> Row {
    let help = "Entries that the kernel's tables can have.";
    Row { counter, metric: "cproxy_entries_max", label: Some(("resource", resource)), kind: Gauge, help }
}

const fn denials(counter: &'static str, direction: &'static str) -> Row {
    let help = "Calls, datagrams and connections that the pod's network policy has denied.";
    let label = Some(("direction", direction));
    Row { counter, metric: "cproxy_policy_denied_total", label, kind: Counter, help }
}

const fn audited(counter: &'static str, direction: &'static str) -> Row {
    let help = "Calls, datagrams and connections that it would have denied (--policy audit).";
    let label = Some(("direction", direction));
    Row { counter, metric: "cproxy_policy_audited_total", label, kind: Counter, help }
}

const fn refused(counter: &'static str, reason: &'static str) -> Row {
    let help = "Connections and datagrams to addresses of load balancers that were refused.";
    let label = Some(("reason", reason));
    Row { counter, metric: "cproxy_received_refused_total", label, kind: Counter, help }
}

/// All of them. Rows of one metric follow each other.
const ROWS: [Row; 56] = [
    row(
        "forwarded",
        "cproxy_connections_total",
        Counter,
        "Connects, and first datagrams of flows, that got a backend.",
    ),
    row(
        "refused",
        "cproxy_refusals_total",
        Counter,
        "Calls that failed with ECONNREFUSED, and connects of UDP sockets whose datagrams are refused.",
    ),
    row(
        "dropped",
        "cproxy_drops_total",
        Counter,
        "Calls that failed with EHOSTUNREACH, and connects of UDP sockets that the Service keeps out.",
    ),
    row("state_lost", "cproxy_socket_states_lost_total", Counter, "Sockets for whose state there was no memory."),
    row("affinity_lost", "cproxy_affinities_lost_total", Counter, "Clients whose backend could not be remembered."),
    entries("frontends", "frontends"),
    entries("backends", "backends"),
    entries("affinity_clients", "affinity_clients"),
    entries("tcp_places", "tcp_places"),
    entries("udp_flows", "udp_flows"),
    limit("frontends_max", "frontends"),
    limit("backends_max", "backends"),
    limit("affinity_clients_max", "affinity_clients"),
    limit("tcp_places_max", "tcp_places"),
    limit("udp_flows_max", "udp_flows"),
    row(
        "tcp_places_room",
        "cproxy_tcp_places_room",
        Gauge,
        "Places that there are now: more are added while they are needed.",
    ),
    row("tcp_without_place", "cproxy_tcp_without_place_total", Counter, "Connects that found no place for their peer."),
    row("udp_flows_evicted", "cproxy_udp_flows_evicted", Gauge, "Entries of UDP flows that newer ones have evicted."),
    row("tasks_ended", "cproxy_tasks_ended", Gauge, "Background tasks of the agent that have ended, and should not."),
    row("services_without_room", "cproxy_services_without_room", Gauge, "Services that do not fit into the tables."),
    row("object_problems", "cproxy_object_problems", Gauge, "Errors in objects, one for each object and reason."),
    row("lists_doubted", "cproxy_lists_doubted_total", Counter, "Lists that would have taken most of the table away."),
    row("lists_in_doubt", "cproxy_lists_in_doubt", Gauge, "1 while such a list is held back."),
    row("log_lines_left_out", "cproxy_log_lines_left_out_total", Counter, "Lines of the log that nobody took."),
    row("sockets_closed", "cproxy_sockets_closed_total", Counter, "Stale sockets that were closed."),
    row("sockets_left", "cproxy_sockets_left", Gauge, "Stale sockets that the last search left open."),
    row("sockets_unseen", "cproxy_sockets_unseen", Gauge, "Processes and namespaces that it could not inspect."),
    row("sockets_passes", "cproxy_socket_searches_total", Counter, "Searches for stale sockets."),
    row("tcp_places_freed", "cproxy_tcp_places_freed_total", Counter, "Places of TCP sockets that were freed."),
    row("tcp_places_searches", "cproxy_tcp_place_searches_total", Counter, "Searches for such places."),
    row(
        "tcp_places_unseen",
        "cproxy_tcp_places_unseen",
        Gauge,
        "Processes and namespaces that they could not inspect.",
    ),
    row("hook_checks", "cproxy_hook_checks_total", Counter, "Looks at the programs."),
    row("hook_repairs", "cproxy_reattachments_total", Counter, "Times that the programs were attached again."),
    row("canary_failures", "cproxy_canary_failures_total", Counter, "Looks at which a call did not reach its target."),
    row("services", "cproxy_services", Gauge, "Services that the agent knows."),
    row(
        "api_server_silent_seconds",
        "cproxy_api_server_silent_seconds",
        Gauge,
        "Seconds since the API server last confirmed what the agent knows.",
    ),
    row(
        "policy_in_force",
        "cproxy_policy_in_force",
        Gauge,
        "1 if the pod's network policy is in force, 0 if it is closed.",
    ),
    row("policy_rules", "cproxy_policy_rules", Gauge, "Rules of the pod's network policy."),
    row("policy_addresses", "cproxy_policy_addresses", Gauge, "Single addresses of peers that its rules name."),
    row("policy_changes", "cproxy_policy_changes_total", Counter, "Changes of the policy that were put in force."),
    row(
        "policy_sockets_closed",
        "cproxy_policy_sockets_closed_total",
        Counter,
        "Sockets that were closed because the policy no longer allows them.",
    ),
    row(
        "policy_silent_seconds",
        "cproxy_policy_silent_seconds",
        Gauge,
        "Seconds since the relay last confirmed the pod's network policy.",
    ),
    denials("policy_denied_ingress", "ingress"),
    denials("policy_denied_egress", "egress"),
    audited("policy_audited_ingress", "ingress"),
    audited("policy_audited_egress", "egress"),
    row(
        "policy_denied_sockets",
        "cproxy_policy_denied_sockets_total",
        Counter,
        "Sockets of protocols that cannot be policed, such as SCTP, that were denied.",
    ),
    row(
        "received_ports",
        "cproxy_received_ports",
        Gauge,
        "Ports of addresses of load balancers that the pod receives.",
    ),
    row(
        "received_ports_leaving",
        "cproxy_received_ports_leaving",
        Gauge,
        "Of these, ports that no Service wants any more and sockets still have.",
    ),
    row(
        "received_failures",
        "cproxy_received_failures_total",
        Counter,
        "Failures to change maps or routes of received addresses.",
    ),
    row(
        "received_connections",
        "cproxy_received_connections_total",
        Counter,
        "Connections to addresses of load balancers that were received.",
    ),
    row(
        "received_datagrams",
        "cproxy_received_datagrams_total",
        Counter,
        "Datagrams to addresses of load balancers that were received, but those of connected sockets.",
    ),
    refused("received_other_ports", "other-port"),
    refused("received_no_listener", "no-listener"),
    refused("received_other_sources", "other-client"),
    row(
        "received_listeners_lost",
        "cproxy_received_listeners_lost_total",
        Counter,
        "Sockets that listen and cannot be chosen for received connections.",
    ),
];

/// Meanings of counters that are no metrics, or that say more where the counter stands alone.
const MEANINGS: [(&str, &str); 6] = [
    (
        "frontends",
        "Entries of the map of frontends: of ports, one for each ClusterIP, and six of the agent's own tests.",
    ),
    ("frontends_room", "Entries that it has room for now; it grows up to frontends_max."),
    ("backends_room", "Entries that the map of backends has room for now; it grows up to backends_max."),
    ("udp_flows_inserted", "Entries of UDP flows that were inserted."),
    ("udp_flows_removed", "Entries of UDP flows that were removed."),
    ("last_change_seconds", "Seconds since the backends of a Service have changed."),
];

/// Meaning of a counter of `cproxy get counters`.
#[must_use]
pub fn meaning(counter: &str) -> Option<&'static str> {
    let own = MEANINGS.iter().map(|(name, help)| (*name, *help));
    let mut all = own.chain(ROWS.iter().map(|row| (row.counter, row.help)));
    all.find(|(name, _)| *name == counter).map(|(_, help)| help)
}

/// The text.
pub(super) fn text(
    format: MetricsFormat,
    status: &Status,
    kernel: &Kernel,
    probes: &Probes,
    started: SystemTime,
) -> String {
    let mut metrics = Exposition::new(format);
    write_rows(&mut metrics, |counter| {
        let mut known = kernel.counters.iter().chain(&status.gauges);
        known.find(|(name, _)| *name == counter).map(|(_, value)| *value)
    });
    write_state(&mut metrics, status);
    write_measures(&mut metrics, &status.measures);
    write_hooks(&mut metrics, &kernel.hooks);
    services::write(&mut metrics, &kernel.calls);
    for (name, probe, responses) in [
        ("kubeproxy_proxy_healthz_total", "/healthz", &probes.healthz),
        ("kubeproxy_proxy_livez_total", "/livez", &probes.livez),
    ] {
        metrics.start(name, Counter, &format!("Responses to {probe} by status code."));
        for (code, count) in responses.read() {
            metrics.line(name, &[("code", code)], count);
        }
    }
    process::write(&mut metrics, started);
    metrics.start("cproxy_build_info", Gauge, "1, with the version and that of the table layout.");
    let layout = LAYOUT_VERSION.to_string();
    metrics.line("cproxy_build_info", &[("version", env!("CARGO_PKG_VERSION")), ("layout", &layout)], 1);
    metrics.finish()
}

/// A text with every metric of the agent, for the manual.
#[must_use]
pub fn every_metric() -> String {
    every(MetricsFormat::Text)
}

fn every(format: MetricsFormat) -> String {
    let service = ServiceName { namespace: "default".into(), name: "web".into() };
    let kernel = Kernel {
        counters: ROWS.iter().map(|row| (row.counter, 7)).collect(),
        hooks: vec![HookTime { hook: "connect4", time: Duration::from_millis(5), runs: 9 }],
        calls: vec![ServiceCalls { service, counts: ServiceCounts::default() }],
    };
    text(format, &Status::default(), &kernel, &Probes::default(), UNIX_EPOCH)
}

fn write_rows(metrics: &mut Exposition, value: impl Fn(&str) -> Option<u64>) {
    let mut before = "";
    for row in &ROWS {
        let Some(value) = value(row.counter) else { continue };
        if row.metric != before {
            metrics.start(row.metric, row.kind, row.help);
            before = row.metric;
        }
        metrics.line(row.metric, row.label.as_slice(), value);
    }
}

fn write_state(metrics: &mut Exposition, status: &Status) {
    let is_ready = u8::from(status.pending.is_empty());
    metrics.number("cproxy_ready", Gauge, "1 if /readyz has nothing pending.", is_ready);
    let help = "1 unless the programs are known to have lost their effect.";
    metrics.number("cproxy_programs_effective", Gauge, help, u8::from(!status.has_hook_problem));
}

fn write_measures(metrics: &mut Exposition, measures: &Measures) {
    let help = "Duration of writes of the table in seconds.";
    metrics.histogram("kubeproxy_sync_proxy_rules_duration_seconds", help, &measures.syncs);
    let help = "Duration of writes of the whole table in seconds.";
    metrics.histogram("kubeproxy_sync_full_proxy_rules_duration_seconds", help, &measures.full_syncs);
    for (name, help, time) in [
        (
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "Time of the last change, in seconds since 1970.",
            measures.last_queued,
        ),
        (
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "Time of the last write that succeeded, in seconds since 1970.",
            measures.last_sync,
        ),
    ] {
        let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        metrics.number(name, Gauge, help, since.as_secs_f64());
    }
    for (kind, changes) in [("service", measures.services), ("endpoint", measures.endpoints)] {
        let (start, help) =
            (format!("kubeproxy_sync_proxy_rules_{kind}_changes"), format!("Changes of {kind} objects."));
        metrics.number(&format!("{start}_total"), Counter, &help, changes.total);
        let help = format!("Changes of {kind} objects that are not written yet.");
        metrics.number(&format!("{start}_pending"), Gauge, &help, changes.pending);
    }
    let help = "Writes of the table that failed.";
    metrics.number("cproxy_table_write_failures_total", Counter, help, measures.write_failures);
    metrics.start("cproxy_resumes_total", Counter, "Times that the agent resumed after a sign of a restored VM.");
    for (sign, count) in measures.resumes() {
        metrics.line("cproxy_resumes_total", &[("sign", sign)], count);
    }
}

fn write_hooks(metrics: &mut Exposition, hooks: &[HookTime]) {
    if hooks.is_empty() {
        return;
    }
    metrics.start("cproxy_hook_seconds_total", Counter, "Time that the programs have taken, in seconds.");
    for hook in hooks {
        metrics.line("cproxy_hook_seconds_total", &[("hook", hook.hook)], hook.time.as_secs_f64());
    }
    metrics.start("cproxy_hook_runs_total", Counter, "Runs of the programs.");
    for hook in hooks {
        metrics.line("cproxy_hook_runs_total", &[("hook", hook.hook)], hook.runs);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_metric_has_one_head_even_if_it_has_many_lines() {
        for format in [MetricsFormat::Text, MetricsFormat::OpenMetrics] {
            let text = every(format);
            let heads: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
            assert_eq!(heads.iter().collect::<BTreeSet<_>>().len(), heads.len(), "{text}");
            for line in [
                "cproxy_entries{resource=\"udp_flows\"} 7",
                "cproxy_hook_seconds_total{hook=\"connect4\"} 0.005",
                "cproxy_resumes_total{sign=\"reseed\"} 0",
                "kubeproxy_proxy_healthz_total{code=\"503\"} 0",
                "kubeproxy_sync_proxy_rules_last_timestamp_seconds 0",
            ] {
                assert!(text.lines().any(|other| other == line), "{line} is missing in {text}");
            }
        }
    }

    #[test]
    fn numbers_that_are_not_known_are_left_out() {
        let mut metrics = Exposition::new(MetricsFormat::Text);
        write_rows(&mut metrics, |counter| (counter == "tcp_places").then_some(1));
        let text = metrics.finish();
        assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 1, "{text}");
    }
}
