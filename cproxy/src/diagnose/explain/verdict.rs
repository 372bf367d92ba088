//! Verdict on each call that a destination stands for.

use std::{collections::BTreeMap, net::SocketAddr};

use cproxy_core::{Action, Backend, Frontend, Protocol, ServiceName, parse_address, sort_few_by, sorted_set};
use serde::Serialize;

use super::{
    facts::{AffinityFact, AgentFacts, Facts, KernelFacts},
    findings::{common_obstacle, process_obstacle},
    probe::Probe,
};
use crate::{
    report::{
        BackendAddress, DENIED, EXTERNAL_NAME, EndpointRow, FrontendRow, HEADLESS, ServiceReport, missing_slice, time,
    },
    target::Target,
};

/// Code of the rows of an address and port that another Service has.
const OTHER_SERVICE: &str = "other-service";

/// Maximum number of reasons and ports that a text names.
const NAMED_MAX: usize = 4;

/// Maximum number of unreadable files that a text names.
const UNREAD_MAX: usize = 2;

/// Outcome of a call, in the words of `cproxy trace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It goes to a backend.
    Forwarded,
    /// It fails with ECONNREFUSED.
    Refused,
    /// It fails with EHOSTUNREACH.
    Dropped,
    /// The pod's network policy denies it: it fails with EPERM.
    Denied,
    /// It goes to the address itself.
    Direct,
    /// The source has no Service of the name, or others have all that it claims.
    NotFound,
    /// There is no table, or no agent that knows the name.
    Unknown,
}

impl Outcome {
    /// Word in the output.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
            Self::Denied => "denied",
            Self::Direct => "direct",
            Self::NotFound => "not found",
            Self::Unknown => "unknown",
        }
    }
}

/// Verdict on a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// address:port/protocol, or the destination if no call is known.
    pub call: String,
    /// Outcome.
    pub outcome: Outcome,
    /// Whether the call gets where it should: to a backend that is not known to fail, or to an address that is no
    /// Service's. `None` if that cannot be said.
    pub ok: Option<bool>,
    /// namespace/name, if it is known.
    pub service: Option<String>,
    /// Name of the cause, for scripts.
    pub code: String,
    /// Rest of the sentence that the outcome begins.
    pub reason: String,
    /// Backends for new connections, as the kernel has them.
    pub backends: Vec<BackendAddress>,
    /// Session affinity, if the Service has it.
    pub affinity: Option<AffinityFact>,
}

/// Outcome of a call, and its cause.
struct Ruling {
    outcome: Outcome,
    ok: Option<bool>,
    code: String,
    reason: String,
}

impl Ruling {
    /// The call does not get to a backend.
    fn no(outcome: Outcome, code: &str, reason: String) -> Self {
        Self { outcome, ok: Some(false), code: code.to_owned(), reason }
    }

    /// The call goes to the address itself, which is no Service's.
    fn direct(code: &str, reason: &str) -> Self {
        let reason = format!("to the address itself: {reason}");
        Self { outcome: Outcome::Direct, ok: Some(true), code: code.to_owned(), reason }
    }

    /// The call goes to the address itself, although a Service has it.
    fn untranslated(code: &str, reason: &str) -> Self {
        Self::no(Outcome::Direct, code, format!("without translation: {reason}"))
    }

    fn unknown(code: &str, reason: String) -> Self {
        Self { outcome: Outcome::Unknown, ok: None, code: code.to_owned(), reason }
    }
}

/// Verdicts on all calls that the destination stands for, at least one. They are for a process that cproxy serves,
/// unless one was named.
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
    let affinity = kernel.and_then(|kernel| kernel.affinities.iter().find(|(of, _)| *of == call)).map(|(_, of)| *of);
    let is_in_table = row.is_some() || kernel.is_some_and(|kernel| kernel.refuses_other_ports);
    let served = match (common_obstacle(facts, call).filter(|_| is_in_table), row) {
        (Some((code, obstacle)), _) => Ruling::untranslated(code, &obstacle),
        (None, Some(row)) => of_row(facts, row, service, affinity),
        (None, None) => without_row(facts, call),
    };
    let named = facts.process.as_ref().ok().filter(|process| !process.is_self && is_in_table);
    let ruling = match named.and_then(process_obstacle) {
        Some((code, obstacle)) => Ruling::untranslated(code, &beside(&obstacle, &served)),
        None => served,
    };
    let targets = match ruling.outcome {
        Outcome::Forwarded => row.map(|row| targets(row, affinity)).unwrap_or_default(),
        Outcome::Direct => vec![BackendAddress { address: call.address.into(), port: call.port }],
        _ => Vec::new(),
    };
    let Ruling { outcome, ok, code, reason } = policed(facts, ruling, &targets, call.protocol);
    Verdict {
        call: call.to_string(),
        outcome,
        ok,
        service: service.map(|(service, _)| service.service.clone()),
        code,
        reason,
        backends: row.map_or_else(Vec::new, |row| row.backends.clone()),
        affinity,
    }
}

/// Backends that the next connection may get.
fn targets(row: &FrontendRow, affinity: Option<AffinityFact>) -> Vec<BackendAddress> {
    match affinity.and_then(|affinity| affinity.backend) {
        Some(backend) => vec![backend],
        None => row.backends.clone(),
    }
}

/// The ruling for a call that goes to one of some addresses, with what the pod's network policy says of these.
fn policed(facts: &Facts, mut ruling: Ruling, targets: &[BackendAddress], protocol: Protocol) -> Ruling {
    let policy = match &facts.policy {
        Some(Ok(policy)) => policy,
        Some(Err(error)) => {
            ruling
                .reason
                .push_str(&format!(", unless the pod's network policy denies it, which cannot be read: {error}"));
            return Ruling { ok: None, ..ruling };
        }
        None => return ruling,
    };
    let verdict = |target: &BackendAddress| {
        let call = Frontend { address: target.address.into(), port: target.port, protocol };
        policy.verdicts.get(&call).map(|verdict| (call, verdict))
    };
    let all = targets.iter().filter_map(verdict);
    let mut denied = all.clone().filter(|(_, verdict)| verdict.verdict == DENIED);
    let (count, Some((first, verdict))) = (denied.clone().count(), denied.next()) else {
        let rules = sorted_set(all.filter(|(_, verdict)| verdict.code == "rule").map(|(_, verdict)| &*verdict.reason));
        let mut rules = rules.into_iter();
        if let Some(first) = rules.next() {
            let more = if rules.len() == 0 { String::new() } else { format!(" and {} more", rules.len()) };
            ruling.reason.push_str(&format!("; network policy allows it: {first}{more}"));
        }
        return ruling;
    };
    let why = &verdict.reason;
    if policy.is_audited {
        let of = match targets.len() {
            1 => String::new(),
            all if all == count => format!("all {all} backends, such as "),
            all => format!("{count} of {all} backends, such as "),
        };
        ruling.reason.push_str(&format!("; network policy would deny {of}{first} (--policy audit): {why}"));
        return ruling;
    }
    if count == targets.len() {
        let later = if protocol == Protocol::Udp { " (on a connected socket, by each datagram)" } else { "" };
        let of = match (ruling.outcome, count) {
            (Outcome::Direct, _) => "by network policy".to_owned(),
            (_, 1) => format!("by network policy of backend {first}"),
            _ => format!("by network policy of all {count} backends, such as {first}"),
        };
        return Ruling::no(Outcome::Denied, "policy", format!("with EPERM{later} {of}: {why}"));
    }
    let are = if count == 1 { "is" } else { "are" };
    ruling.reason.push_str(&format!(", of which {count} {are} denied by network policy, such as {first}: {why}"));
    if ruling.code == "forwarded" {
        ruling.code = "some-backends-denied".to_owned();
    }
    ruling
}

/// Why a process is not served and, if that is not all, what the others get.
fn beside(obstacle: &str, others: &Ruling) -> String {
    let Ruling { outcome, ok, reason, .. } = others;
    match ok {
        Some(true) => obstacle.to_owned(),
        _ => format!("{obstacle}; other processes' calls are {} {reason}", outcome.as_str()),
    }
}

/// Ruling for a call to a frontend in the kernel.
fn of_row(
    facts: &Facts,
    row: &FrontendRow,
    service: Option<(&ServiceReport, &FrontendRow)>,
    affinity: Option<AffinityFact>,
) -> Ruling {
    let of_service = service.map(|(service, row)| port_of(service, row));
    if row.action == Action::Forward.as_str() {
        return forwarded(facts, row, of_service, affinity);
    }
    let (outcome, error) = if row.action == Action::Drop.as_str() {
        (Outcome::Dropped, "EHOSTUNREACH")
    } else {
        (Outcome::Refused, "ECONNREFUSED")
    };
    let (code, why) = match service {
        Some((service, wanted)) => why_empty(service, wanted),
        None => ("no-backend", "the kernel has no backend for it, and no agent says why".to_owned()),
    };
    let connected = if row.protocol == "UDP" { CONNECTED } else { "" };
    let of_service = of_service.map_or_else(String::new, |service| format!(", {service}"));
    Ruling::no(outcome, code, format!("with {error}{connected}{of_service}: {why}"))
}

/// Ruling for a call that goes to a backend, with what speaks against that.
fn forwarded(facts: &Facts, row: &FrontendRow, of_service: Option<String>, affinity: Option<AffinityFact>) -> Ruling {
    let targets = targets(row, affinity);
    let is_target = |probe: &&Probe| {
        let Backend { address, port } = probe.backend;
        probe.protocol.to_string() == row.protocol
            && targets.contains(&BackendAddress { address: address.into(), port })
    };
    let called = facts.probes.iter().filter(is_target);
    let not_called = match (called.clone().next(), targets.len()) {
        (Some(_), _) => "",
        (None, 1) => " (not called; --probe calls it)",
        (None, _) => " (not called; --probe calls them)",
    };
    let of_service = of_service.map_or_else(String::new, |service| format!(" of {service}"));
    let mut reason = match (targets.as_slice(), affinity) {
        ([one], None) => format!("to backend {one}{not_called}{of_service}"),
        ([one], Some(affinity)) => format!("to backend {one}{not_called}{of_service}, {}", kept_for(affinity)),
        (many, affinity) => {
            let kept = affinity.map_or_else(String::new, |affinity| format!(", {}", kept_for(affinity)));
            format!("to one of {} backends{not_called}{of_service}{kept}", many.len())
        }
    };
    let mut failures = called.filter(|probe| !probe.outcome.is_good());
    let (count, first) = (failures.clone().count(), failures.next());
    let code = match first {
        Some(Probe { outcome, .. }) if targets.len() == 1 => {
            reason.push_str(&format!(", which {outcome}"));
            "backends-fail"
        }
        Some(Probe { backend, outcome, .. }) if count == targets.len() => {
            reason.push_str(&format!(", which all fail, such as {backend}: it {outcome}"));
            "backends-fail"
        }
        Some(Probe { backend, outcome, .. }) => {
            let fail = if count == 1 { "fails" } else { "fail" };
            reason.push_str(&format!(", of which {count} {fail}, such as {backend}: it {outcome}"));
            "some-backends-fail"
        }
        None => "forwarded",
    };
    let doubt = match &facts.agent {
        Err(error) => Some(&**error),
        Ok(agent) => agent.report.source.is_stale().then_some("the source is stale"),
    };
    reason.extend(doubt.map(|doubt| format!(", unless that has changed: {doubt}")));
    Ruling { outcome: Outcome::Forwarded, ok: Some(code != "backends-fail"), code: code.to_owned(), reason }
}

/// Effect of session affinity on the next connection.
fn kept_for(affinity: AffinityFact) -> String {
    let timeout = u64::from(affinity.timeout_seconds);
    match affinity.idle_seconds {
        Some(idle) => format!(
            "by session affinity of this network namespace for {} more (last new connection {} ago)",
            time(timeout.saturating_sub(idle)),
            time(idle)
        ),
        None => format!("and to the same one for {} (session affinity)", time(timeout)),
    }
}

/// Error of connected UDP sockets whose calls are refused or dropped.
const CONNECTED: &str = " (on a connected socket, by the call after a datagram)";

fn port_of(service: &ServiceReport, row: &FrontendRow) -> String {
    let port = row.port_name.as_deref().filter(|name| !name.is_empty());
    let port = port.map_or_else(String::new, |name| format!(", port {name}"));
    let source = row.source.as_deref().unwrap_or_default();
    format!("Service {}{port} ({source})", service.service)
}

/// Reason why none of a Service's endpoints gets the calls of a frontend.
fn why_empty<'a>(service: &'a ServiceReport, frontend: &FrontendRow) -> (&'a str, String) {
    let is_about = |row: &&EndpointRow| {
        let is_port = row.port_name == frontend.port_name && row.protocol.as_deref() == Some(&*frontend.protocol);
        let is_source = frontend.source.as_ref().is_some_and(|source| row.sources.contains(source));
        // Some rows have no address: they are about a whole slice.
        let is_other_family =
            row.endpoint.parse().is_ok_and(|at: SocketAddr| at.is_ipv4() != frontend.address.is_ipv4());
        // The frontend is the Service's own, and those that it loses are others.
        let is_lost = row.code == OTHER_SERVICE;
        row.protocol.is_none() || is_port && is_source && !is_other_family && !is_lost
    };
    let mut reasons = BTreeMap::<&str, (usize, &EndpointRow)>::new();
    let is_unused = |row: &&EndpointRow| row.used == "no" || row.used == "keeps";
    for row in service.endpoints.iter().filter(is_about).filter(is_unused) {
        reasons.entry(&row.reason).or_insert((0, row)).0 += 1;
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    // Those of a map are in the order of their texts.
    sort_few_by(&mut reasons, |(_, (one, _)), (_, (other, _))| other.cmp(one));
    let Some((_, (_, first))) = reasons.first() else {
        let name = service.service.split_once('/').map(|(namespace, name)| ServiceName::new(namespace, name));
        return match name {
            Some(name) if service.slices == 0 => ("no-endpoint-slice", decapitalized(&missing_slice(&name))),
            _ => ("no-endpoints", "its EndpointSlices have no endpoint".to_owned()),
        };
    };
    let code = &*first.code;
    let others = reasons.len().saturating_sub(NAMED_MAX);
    let named = reasons.into_iter().take(NAMED_MAX).map(|(reason, (count, row))| {
        let of = if row.endpoint == "all" { "slices" } else { "endpoints" };
        if count == 1 { reason.to_owned() } else { format!("{reason} ({count} {of})") }
    });
    let mut named: Vec<_> = named.collect();
    if others != 0 {
        named.push(format!("{others} other reasons"));
    }
    (code, format!("no endpoint can be used: {}", named.join("; ")))
}

fn decapitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// Ruling for a call to an address and port that is no frontend in the kernel.
fn without_row(facts: &Facts, call: Frontend) -> Ruling {
    let kernel = match &facts.kernel {
        Ok(kernel) => kernel,
        Err(error) => return Ruling::unknown("no-table", error.clone()),
    };
    let agent = facts.agent.as_ref().ok();
    let wanted_by = agent.and_then(|agent| agent.service_of(call)).map(|(service, _)| service);
    let (code, reason) = match wanted_by {
        Some(service) => {
            let because = service.problems.first().map_or("the agent has not written it yet; see its log", |of| of);
            let reason = format!("Service {} wants it, but it is not in the table: {because}", service.service);
            ("not-in-table", reason)
        }
        None => ("unknown-port", no_such_port(agent, kernel, call)),
    };
    if kernel.refuses_other_ports {
        let connected = if call.protocol == Protocol::Udp { CONNECTED } else { "" };
        return Ruling::no(Outcome::Refused, code, format!("with ECONNREFUSED{connected}: {reason}"));
    }
    if wanted_by.is_some() || !kernel.frontends.is_empty() {
        return Ruling::untranslated(code, &reason);
    }
    without_service(facts)
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

/// Ruling for a destination that no Service has.
fn without_service(facts: &Facts) -> Ruling {
    let agent = facts.agent.as_ref().ok();
    let kernel = facts.kernel.as_ref().ok();
    if let Some(frontend) = kernel.and_then(|kernel| kernel.backend_of.first()) {
        return Ruling::direct("endpoint", &format!("no Service has it, but it is an endpoint behind {frontend}"));
    }
    if let Some(unserved) = agent.and_then(|agent| agent.report.unserved.as_ref()) {
        let reason = format!("Service {} is not served there: {}", unserved.service, unserved.reason);
        return Ruling::untranslated(&unserved.code, &reason);
    }
    let (knows_all, reason) = match agent {
        Some(agent) => {
            let others = unknown_to(agent);
            (others.is_empty(), format!("no Service has it{}{others}", port_in(&facts.target)))
        }
        None => (false, "the kernel's table does not have it, and no agent runs that knows more".to_owned()),
    };
    Ruling { ok: knows_all.then_some(true), ..Ruling::direct("no-service", &reason) }
}

/// How a port is written behind an IPv6 address that ends like one.
fn port_in(target: &Target) -> String {
    let Target::Address(address) = target else { return String::new() };
    let text = address.to_string();
    match text.rsplit_once(':') {
        Some((host, port)) if parse_address(host).is_some() && port.parse::<u16>().is_ok() => {
            format!(" (with a port it is written [{host}]:{port})")
        }
        _ => String::new(),
    }
}

/// Files that cannot be read, or a stale source, either of which may have what is asked for. Empty if the agent knows
/// all.
fn unknown_to(agent: &AgentFacts) -> String {
    if agent.report.source.is_stale() {
        return ", as far as the agent knows: its source is stale".to_owned();
    }
    let unread = agent.report.unread.as_slice();
    let more = unread.len().saturating_sub(UNREAD_MAX);
    let more = if more == 0 { String::new() } else { format!("; and {more} more: cproxy get problems") };
    match unread.get(..UNREAD_MAX.min(unread.len())) {
        None | Some([]) => String::new(),
        Some(some) => format!("; a file that cannot be read may have it: {}{more}", some.join("; ")),
    }
}

/// Verdict on a destination without any call.
fn unknown(facts: &Facts) -> Verdict {
    let ruling = match (&facts.target, &facts.kernel, &facts.agent) {
        (Target::Service(name, _), _, Ok(agent)) => match (&agent.report.unserved, agent.report.services.first()) {
            (Some(unserved), _) => Ruling {
                outcome: Outcome::Direct,
                ok: Some(unserved.code == HEADLESS || unserved.code == EXTERNAL_NAME),
                code: unserved.code.clone(),
                reason: format!("without translation: {}", unserved.reason),
            },
            (None, Some(service))
                if let Some(lost) = service.endpoints.iter().find(|row| row.code == OTHER_SERVICE) =>
            {
                let reason = format!("others have its addresses and ports: {}", lost.reason);
                Ruling::no(Outcome::NotFound, OTHER_SERVICE, reason)
            }
            (None, Some(_)) => Ruling::untranslated(
                "no-port",
                "it has no address and port that cproxy could serve; `cproxy get problems` has its mistakes, if any",
            ),
            (None, None) => {
                let others = unknown_to(agent);
                let reason = format!("the source of the agent has no Service {name}{others}");
                let ok = others.is_empty().then_some(false);
                Ruling { ok, ..Ruling::no(Outcome::NotFound, "not-found", reason) }
            }
        },
        (Target::Service(name, _), _, Err(error)) => {
            let reason = format!("only a running agent knows Service {name} by name; ask by its address: {error}");
            Ruling::unknown("no-agent", reason)
        }
        (_, Err(error), _) => Ruling::unknown("no-table", error.clone()),
        (_, Ok(_), _) => without_service(facts),
    };
    let service = match &facts.target {
        Target::Service(name, _) => Some(name.to_string()),
        _ => None,
    };
    let Ruling { outcome, ok, code, reason } = ruling;
    Verdict { call: facts.target.to_string(), outcome, ok, service, code, reason, backends: Vec::new(), affinity: None }
}
