//! Verdict on each call that a destination stands for.

use std::{collections::BTreeMap, net::SocketAddr};

use cproxy_core::{Action, Backend, Frontend, Protocol, ServiceName};
use serde::Serialize;

use super::{
    facts::{AgentFacts, Facts, KernelFacts},
    findings::obstacle,
    probe::Probe,
};
use crate::{
    report::{BackendAddress, EndpointRow, FrontendRow, ServiceReport, missing_slice},
    target::Target,
};

/// Maximum number of reasons and ports that a text names.
const NAMED_MAX: usize = 4;

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It goes to a backend.
    Forwarded,
    /// It fails with ECONNREFUSED.
    Refused,
    /// It fails with EHOSTUNREACH.
    Dropped,
    /// It goes to the address itself.
    Direct,
    /// The destination is a name that no agent can tell.
    Unknown,
}

/// Verdict on a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// address:port/protocol, or the destination if no call is known.
    pub call: String,
    /// Outcome.
    pub outcome: Outcome,
    /// Whether cproxy leads the call to a backend, unless all of them are known to fail.
    pub answered: bool,
    /// namespace/name, if it is known.
    pub service: Option<String>,
    /// Outcome and its reason.
    pub reason: String,
    /// Backends for new connections, as the kernel has them.
    pub backends: Vec<BackendAddress>,
}

/// Verdicts on all calls that the destination stands for, at least one.
#[must_use]
pub fn verdicts(facts: &Facts) -> Vec<Verdict> {
    let calls = facts.calls();
    if calls.is_empty() { vec![unknown(facts)] } else { calls.into_iter().map(|call| verdict(facts, call)).collect() }
}

fn verdict(facts: &Facts, call: Frontend) -> Verdict {
    let agent = facts.agent.as_ref().ok();
    let service = agent.and_then(|agent| agent.service_of(call));
    let kernel = facts.kernel.as_ref().ok();
    let row = kernel.and_then(|kernel| kernel.frontends.iter().find(|row| row.frontend() == Some(call)));
    let (outcome, reason) = match (obstacle(facts, call), row) {
        (Some(obstacle), Some(_)) => (Outcome::Direct, format!("it is not translated: {obstacle}")),
        (None, Some(row)) => of_row(row, service),
        (_, None) => without_row(facts, call),
    };
    let (answered, reason) = match row.filter(|_| outcome == Outcome::Forwarded) {
        Some(row) => with_doubts(facts, row, reason),
        None => (false, reason),
    };
    Verdict {
        call: call.to_string(),
        outcome,
        answered,
        service: service.map(|(service, _)| service.service.clone()),
        reason,
        backends: row.map_or_else(Vec::new, |row| row.backends.clone()),
    }
}

/// Whether a call that goes to a backend is answered, and the reason with what speaks against it.
fn with_doubts(facts: &Facts, row: &FrontendRow, reason: String) -> (bool, String) {
    let is_of_row = |probe: &&Probe| {
        let Backend { address, port } = probe.backend;
        let is_backend = |backend: &BackendAddress| (backend.address, backend.port) == (address.into(), port);
        probe.protocol.to_string() == row.protocol && row.backends.iter().any(is_backend)
    };
    let failures: Vec<_> = facts.probes.iter().filter(is_of_row).filter(|probe| !probe.outcome.is_good()).collect();
    match (failures.as_slice(), row.backends.len()) {
        ([only], 1) => (false, format!("{reason}, but that {}", only.outcome)),
        ([first, ..], count) => {
            let failing = failures.len();
            let fail = if failing == 1 { "fails" } else { "fail" };
            let detail = format!("{reason}, but {failing} of them {fail}: {} {}", first.backend, first.outcome);
            (failing < count, detail)
        }
        ([], _) => match &facts.agent {
            Err(error) => (true, format!("{reason}, unless that has changed: {error}")),
            Ok(agent) if agent.report.source.is_stale() => {
                (true, format!("{reason}, unless that has changed: the source is stale"))
            }
            Ok(_) => (true, reason),
        },
    }
}

/// Error of connected UDP sockets whose calls are refused or dropped.
const CONNECTED: &str = "on a connected socket, the call after a datagram fails with ECONNREFUSED";

/// Outcome of a call to a frontend in the kernel.
fn of_row(row: &FrontendRow, service: Option<(&ServiceReport, &FrontendRow)>) -> (Outcome, String) {
    let of_service = service.map_or_else(String::new, |(service, row)| format!(" of {}", port_of(service, row)));
    if row.action == Action::Forward.as_str() {
        let backends = match row.backends.as_slice() {
            [one] => format!("backend {one}"),
            many => format!("one of {} backends", many.len()),
        };
        return (Outcome::Forwarded, format!("it goes to {backends}{of_service}"));
    }
    let (outcome, error) = if row.action == Action::Drop.as_str() {
        (Outcome::Dropped, "EHOSTUNREACH")
    } else {
        (Outcome::Refused, "ECONNREFUSED")
    };
    let why = match service {
        Some((service, wanted)) => why_empty(service, wanted),
        None => "the kernel has no backend for it, and no agent says why".to_owned(),
    };
    let error = if row.protocol == "UDP" { format!("{error} ({CONNECTED})") } else { error.to_owned() };
    (outcome, format!("it fails with {error}{of_service}: {why}", of_service = prefixed(&of_service)))
}

/// The same text as a sentence's part behind a comma.
fn prefixed(of_service: &str) -> String {
    of_service.strip_prefix(" of ").map_or_else(String::new, |service| format!(", {service}"))
}

fn port_of(service: &ServiceReport, row: &FrontendRow) -> String {
    let port = row.port_name.as_deref().filter(|name| !name.is_empty());
    let port = port.map_or_else(String::new, |name| format!(", port {name}"));
    let source = row.source.as_deref().unwrap_or_default();
    format!("Service {}{port} ({source})", service.service)
}

/// Reason why none of a Service's endpoints gets the calls of a frontend.
fn why_empty(service: &ServiceReport, frontend: &FrontendRow) -> String {
    let is_about = |row: &&EndpointRow| {
        let is_port = row.port_name == frontend.port_name && row.protocol.as_deref() == Some(&*frontend.protocol);
        let is_source = frontend.source.as_ref().is_some_and(|source| row.sources.contains(source));
        // Some rows have no address: they are about a whole slice.
        let is_other_family =
            row.endpoint.parse().is_ok_and(|at: SocketAddr| at.is_ipv4() != frontend.address.is_ipv4());
        row.protocol.is_none() || is_port && is_source && !is_other_family
    };
    let mut reasons = BTreeMap::<&str, usize>::new();
    let is_unused = |row: &&EndpointRow| row.used == "no" || row.used == "keeps";
    let rows = service.endpoints.iter().filter(is_about).filter(is_unused);
    rows.for_each(|row| *reasons.entry(&row.reason).or_default() += 1);
    if reasons.is_empty() {
        let name = service.service.split_once('/').map(|(namespace, name)| ServiceName::new(namespace, name));
        return match name {
            Some(name) if service.slices == 0 => decapitalized(&missing_slice(&name)),
            _ => "its EndpointSlices have no endpoint".to_owned(),
        };
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let others = reasons.len().saturating_sub(NAMED_MAX);
    let mut named: Vec<_> =
        reasons.into_iter().take(NAMED_MAX).map(|(reason, count)| format!("{count} x {reason}")).collect();
    if others != 0 {
        named.push(format!("{others} other reasons"));
    }
    format!("no endpoint can be used: {}", named.join("; "))
}

fn decapitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// Outcome of a call to an address and port that is no frontend in the kernel.
fn without_row(facts: &Facts, call: Frontend) -> (Outcome, String) {
    if let Err(error) = &facts.kernel {
        return (Outcome::Direct, format!("it is not translated: {error}"));
    }
    let agent = facts.agent.as_ref().ok();
    if let Some((service, _)) = agent.and_then(|agent| agent.service_of(call)) {
        let because = service
            .problems
            .first()
            .map_or_else(|| "the agent has not written it yet; see its log".to_owned(), Clone::clone);
        return (
            Outcome::Direct,
            format!("it is not in the table, though Service {} wants it: {because}", service.service),
        );
    }
    let Ok(kernel) = &facts.kernel else { return (Outcome::Direct, String::new()) };
    if kernel.refuses_other_ports {
        return match obstacle(facts, call) {
            Some(obstacle) => (Outcome::Direct, format!("it is not translated: {obstacle}")),
            None => {
                let error = match call.protocol {
                    Protocol::Tcp => "ECONNREFUSED".to_owned(),
                    Protocol::Udp => format!("ECONNREFUSED ({CONNECTED})"),
                };
                (Outcome::Refused, format!("it fails with {error}: {}", no_such_port(agent, kernel, call)))
            }
        };
    }
    if !kernel.frontends.is_empty() {
        let reason = format!("it goes to the address itself: {}", no_such_port(agent, kernel, call));
        return (Outcome::Direct, reason);
    }
    (Outcome::Direct, format!("it goes to the address itself: {}", no_service(facts)))
}

/// Ports that a Service's address has, for a call to another one.
fn no_such_port(agent: Option<&AgentFacts>, kernel: &KernelFacts, call: Frontend) -> String {
    let services = agent.map(|agent| agent.report.services.as_slice()).unwrap_or_default();
    let who = match services.first() {
        Some(service) => format!("Service {}", service.service),
        None => "its Service".to_owned(),
    };
    let mut ports: BTreeMap<(u16, Protocol), Option<&str>> = BTreeMap::new();
    let wanted = services.iter().flat_map(|service| &service.frontends);
    for row in kernel.frontends.iter().chain(wanted) {
        if let Some(frontend) = row.frontend().filter(|frontend| frontend.address == call.address) {
            let name = ports.entry((frontend.port, frontend.protocol)).or_default();
            *name = name.or(row.port_name.as_deref().filter(|name| !name.is_empty()));
        }
    }
    let others = ports.len().saturating_sub(NAMED_MAX);
    let shown = ports.into_iter().take(NAMED_MAX).map(|((port, protocol), name)| {
        let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
        format!("{port}/{protocol}{name}")
    });
    let mut shown: Vec<_> = shown.collect();
    if others != 0 {
        shown.push(format!("{others} more"));
    }
    let Frontend { port, protocol, .. } = call;
    if shown.is_empty() {
        return format!("{who} has no port that cproxy serves");
    }
    format!("{who} has no port {port}/{protocol}; it has {}", shown.join(", "))
}

/// Reason why no Service has the destination.
fn no_service(facts: &Facts) -> String {
    let agent = facts.agent.as_ref().ok();
    if let Some(unserved) = agent.and_then(|agent| agent.report.unserved.as_ref()) {
        return format!("Service {} is not served: {}", unserved.service, unserved.reason);
    }
    let kernel = facts.kernel.as_ref().ok();
    if let Some(frontend) = kernel.and_then(|kernel| kernel.backend_of.first()) {
        return format!("it is no Service's, but that of an endpoint behind {frontend}");
    }
    match (agent, kernel) {
        (_, Some(kernel)) if !kernel.frontends.is_empty() => String::new(),
        (Some(agent), _) if agent.report.source.is_stale() => {
            "no Service that the agent knows has it, and its source is stale".to_owned()
        }
        (Some(agent), _) => format!("no Service has it{}", may_be_unread(agent)),
        (None, _) => "the kernel's table does not have it, and no agent runs that could know more".to_owned(),
    }
}

/// Files that cannot be read and may have what is asked for.
fn may_be_unread(agent: &AgentFacts) -> String {
    match agent.report.unread.as_slice() {
        [] => String::new(),
        unread => format!("; what cannot be read may have it: {}", unread.join("; ")),
    }
}

/// Verdict on a destination without any call.
fn unknown(facts: &Facts) -> Verdict {
    let reason = match (&facts.target, &facts.kernel, &facts.agent) {
        (Target::Service(name), _, Ok(agent)) => match (&agent.report.unserved, agent.report.services.first()) {
            (Some(unserved), _) => format!("it is not served: {}", unserved.reason),
            (None, Some(_)) => "it has no address and port that cproxy could serve".to_owned(),
            (None, None) => format!("the source of the agent has no Service {name}{}", may_be_unread(agent)),
        },
        (Target::Service(name), _, Err(error)) => {
            format!("only a running agent knows the addresses of Service {name}: {error}")
        }
        (_, Err(error), _) => format!("calls to it are not translated: {error}"),
        (_, Ok(_), _) => format!("calls go to the address itself: {}", no_service(facts)),
    };
    let service = matches!(facts.target, Target::Service(_)).then(|| facts.target.to_string());
    let outcome = match (&facts.target, &facts.agent) {
        (Target::Service(_), Err(_)) => Outcome::Unknown,
        _ => Outcome::Direct,
    };
    let (call, backends) = (facts.target.to_string(), Vec::new());
    Verdict { call, outcome, answered: false, service, reason, backends }
}
