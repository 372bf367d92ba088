//! Findings that concern all calls to a destination: programs, process, agent, source, table and sockets.

use std::{collections::BTreeMap, fmt};

use cproxy_core::{Frontend, printable, sorted_map};
use serde::Serialize;

use super::{
    facts::{Facts, ProcessFacts, ProgramFacts, SocketFacts},
    probe::Probe,
};
use crate::report::{ChangeRow, Colour, FrontendRow, ServiceReport, SocketRow, time};

/// Number of retransmissions from which on a socket counts as one whose peer does not answer.
const RETRANSMITS_MIN: u8 = 2;

/// Maximum number of processes and backends that a text names.
const NAMED_MAX: usize = 3;

/// State of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Calls are translated, with less certainty.
    Degraded,
    /// Calls are not translated.
    Broken,
}

/// One fact and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// State.
    pub state: State,
    /// Name of the fact.
    pub name: &'static str,
    /// The fact.
    pub detail: String,
}

impl State {
    /// Colour in the output.
    pub(super) fn colour(self) -> Colour {
        match self {
            Self::Ok => Colour::Green,
            Self::Degraded => Colour::Yellow,
            Self::Broken => Colour::Red,
        }
    }

    /// Name in the output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Broken => "broken",
        }
    }
}

fn finding(state: State, name: &'static str, detail: impl fmt::Display) -> Finding {
    Finding { state, name, detail: printable(&detail.to_string()) }
}

/// All findings, in the order in which one would look for a cause.
#[must_use]
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = vec![programs(facts), process(facts), agent(facts)];
    if let Ok(agent) = &facts.agent {
        let state = if agent.report.source.is_good() { State::Ok } else { State::Degraded };
        all.push(finding(state, "source", &agent.report.source));
        all.extend(agent.report.unread.iter().map(|problem| finding(State::Degraded, "unread", problem)));
        all.extend(node(facts));
        all.extend(table(facts));
        let problems = agent.report.services.iter().flat_map(|service| &service.problems);
        all.extend(problems.map(|problem| finding(State::Degraded, "problem", problem)));
        all.extend(changed(facts));
    }
    all.extend(sockets(facts));
    all.extend(backends(facts));
    all
}

/// Reason why no process's call to a destination of the table is translated: its name for scripts, and a text.
pub(super) fn common_obstacle(facts: &Facts, call: Frontend) -> Option<(&'static str, String)> {
    let process = facts.process.as_ref().ok();
    match process.filter(|process| process.excluded_ports.contains(&call.port)) {
        Some(_) => {
            Some(("excluded-port", format!("port {} is excluded (--exclude-port: see cproxy get config)", call.port)))
        }
        None => programs_obstacle(&facts.programs).map(|obstacle| ("programs", obstacle)),
    }
}

/// Reason why no call of this process is translated: its name for scripts, and a text.
pub(super) fn process_obstacle(process: &ProcessFacts) -> Option<(&'static str, String)> {
    if process.has_excluded_cgroup {
        return Some((
            "excluded-cgroup",
            "its cgroup is excluded (--exclude-cgroup: see cproxy get config)".to_owned(),
        ));
    }
    if process.has_excluded_netns {
        return Some((
            "excluded-netns",
            "its network namespace is excluded (--exclude-netns: see cproxy get config)".to_owned(),
        ));
    }
    if process.has_excluded_uid {
        return Some((
            "excluded-uid",
            format!("its user {} is excluded (--exclude-uid: see cproxy get config)", process.uid),
        ));
    }
    let missing = process.missing_programs.iter().any(|link| !link.starts_with("sock_"));
    missing.then(|| {
        let cgroup = process.cgroup.as_ref().map_or_else(|_| "?".to_owned(), |dir| dir.display().to_string());
        let text = if process.has_no_programs {
            format!("its cgroup {cgroup} is not in or below the one that cproxy is attached to (--cgroup)")
        } else {
            format!("{} not run in its cgroup {cgroup}", programs_named(&process.missing_programs))
        };
        ("outside-cgroup", text)
    })
}

fn programs_named(links: &[&str]) -> String {
    match links {
        [link] => format!("program {link} does"),
        links => format!("programs {} do", links.join(", ")),
    }
}

fn programs_obstacle(programs: &ProgramFacts) -> Option<String> {
    match programs {
        ProgramFacts::Looked(report) if report.is_good() => None,
        ProgramFacts::Looked(report) => Some(format!("the programs have no effect: {report}")),
        ProgramFacts::Detached(links) if links.is_empty() => None,
        ProgramFacts::Detached(links) => {
            Some(format!("{} not run: detached; `cproxy run` attaches them", programs_named(links)))
        }
    }
}

fn programs(facts: &Facts) -> Finding {
    match (&facts.kernel, programs_obstacle(&facts.programs), &facts.programs) {
        (Err(error), ..) => finding(State::Broken, "programs", error),
        (_, Some(obstacle), _) => finding(State::Broken, "programs", obstacle),
        (_, None, ProgramFacts::Looked(report)) => finding(State::Ok, "programs", report),
        (_, None, ProgramFacts::Detached(_)) if facts.agent.is_ok() => {
            finding(State::Degraded, "programs", "attached; the agent does not say whether they have their effect")
        }
        (_, None, ProgramFacts::Detached(_)) => finding(State::Ok, "programs", "attached"),
    }
}

fn process(facts: &Facts) -> Finding {
    let process = match &facts.process {
        Ok(process) => process,
        Err(error) => return finding(State::Degraded, "process", error),
    };
    let ProcessFacts { pid, is_self, command, uid, cgroup, .. } = process;
    let of = if *is_self { " (this one; --pid names another)" } else { "" };
    let cgroup = match cgroup {
        Ok(dir) => format!("cgroup {}", dir.display()),
        Err(error) => format!("cgroup unknown: {error}"),
    };
    let subject = format!("{pid}/{command}{of}, uid {uid}, {cgroup}");
    match process_obstacle(process) {
        // A shell outside: the verdicts are those of another process.
        Some(_) if *is_self => finding(State::Ok, "process", format!("{subject}: not served itself")),
        Some(_) => finding(State::Broken, "process", format!("{subject}: its calls are not translated")),
        None if facts.kernel.is_ok() => finding(State::Ok, "process", format!("{subject}: its calls are translated")),
        None => finding(State::Ok, "process", subject),
    }
}

fn agent(facts: &Facts) -> Finding {
    match &facts.agent {
        Ok(agent) => {
            let pid = agent.pid.map_or_else(|| "it".to_owned(), |pid| format!("process {pid}"));
            match agent.report.synced_seconds {
                Some(seconds) => finding(State::Ok, "agent", format!("{pid}, ready for {}", time(seconds))),
                None => finding(State::Degraded, "agent", format!("{pid} has no complete list of its objects yet")),
            }
        }
        Err(error) if facts.kernel.is_ok() => {
            finding(State::Degraded, "agent", format!("{error}; the table stays as it is until then"))
        }
        Err(error) => finding(State::Degraded, "agent", error),
    }
}

/// A node's name that the source does not know.
fn node(facts: &Facts) -> Option<Finding> {
    let report = &facts.agent.as_ref().ok()?.report;
    let name = report.node_name.as_ref().filter(|_| !report.has_node)?;
    let detail = format!(
        "the source has no Node {name} (--node-name), or the agent may not read it: Services with \
         internalTrafficPolicy Local have no endpoint here, and hints for zones do not count"
    );
    Some(finding(State::Degraded, "node", detail))
}

/// Whether the kernel has what the agent wants.
fn table(facts: &Facts) -> Option<Finding> {
    let (kernel, agent) = (facts.kernel.as_ref().ok()?, facts.agent.as_ref().ok()?);
    // Before that, the agent wants nothing.
    agent.report.synced_seconds?;
    let calls = facts.calls();
    let services = agent.report.services.iter().flat_map(|service| &service.frontends);
    let wanted = services.filter_map(|row| Some((row.frontend()?, row)));
    let wanted = sorted_map(wanted.filter(|(frontend, _)| calls.contains(frontend)));
    let known = sorted_map(kernel.frontends.iter().filter_map(|row| Some((row.frontend()?, row))));
    let agree = |wanted: Option<&&FrontendRow>, known: Option<&&FrontendRow>| match (wanted, known) {
        (Some(wanted), Some(known)) => wanted.action == known.action && wanted.backends == known.backends,
        (None, None) => true,
        _ => false,
    };
    let differing: Vec<_> =
        calls.iter().filter(|call| !agree(wanted.get(call), known.get(call))).map(ToString::to_string).collect();
    if differing.is_empty() {
        return (!wanted.is_empty()).then(|| finding(State::Ok, "table", "the kernel has what the agent wants"));
    }
    let some = differing.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    let detail = format!(
        "the kernel has something else than the agent wants, at {some}: the agent is about to write it, or cannot \
         (see its log)"
    );
    Some(finding(State::Degraded, "table", detail))
}

fn changed(facts: &Facts) -> Vec<Finding> {
    let Ok(agent) = &facts.agent else { return Vec::new() };
    let detail = |service: &ServiceReport| {
        let ChangeRow { seconds_ago, before, after } = service.last_change?;
        let before = before.map_or_else(|| "new, with".to_owned(), |before| format!("{before} ->"));
        Some(format!("{} {} ago: {before} {after} backends", service.service, time(seconds_ago)))
    };
    let details = agent.report.services.iter().filter_map(detail);
    details.map(|detail| finding(State::Ok, "changed", detail)).collect()
}

fn sockets(facts: &Facts) -> Vec<Finding> {
    let SocketFacts { translated, direct } = match &facts.sockets {
        Ok(sockets) => sockets,
        Err(error) => return vec![finding(State::Degraded, "sockets", error)],
    };
    let mut all = Vec::new();
    let count = |state: &str| translated.iter().filter(|socket| socket.state == state).count();
    let (open, stale, refused) = (translated.len(), count("stale"), count("refused"));
    if open != 0 {
        let stale_text = if stale == 0 {
            String::new()
        } else {
            format!(", {stale} of them stale: their backends have left, or they were refused before there was one")
        };
        let refused_text = if refused == 0 { String::new() } else { format!(", {refused} of them refused") };
        let state = if stale == 0 { State::Ok } else { State::Degraded };
        all.push(finding(state, "sockets", format!("{open} connected{stale_text}{refused_text}")));
    }
    let mut silent = BTreeMap::<String, Vec<&SocketRow>>::new();
    for socket in translated.iter().filter(|socket| socket.retransmits >= RETRANSMITS_MIN) {
        silent.entry(socket.backend.to_string()).or_default().push(socket);
    }
    for (backend, sockets) in silent {
        let most = sockets.iter().map(|socket| socket.retransmits).max().unwrap_or_default();
        let detail = format!(
            "backend {backend} does not acknowledge what {} of its sockets send, up to {most} times: it is gone, or \
             the way to it loses packets, perhaps large ones alone (MTU)",
            sockets.len()
        );
        all.push(finding(State::Degraded, "sockets", detail));
    }
    if !direct.is_empty() {
        let named = direct.iter().filter_map(|socket| socket.process.as_ref());
        let named: Vec<_> = named.take(NAMED_MAX).map(|(pid, command)| format!("{pid}/{command}")).collect();
        let of = if named.is_empty() { String::new() } else { format!(" (of {})", named.join(", ")) };
        let detail = format!(
            "{} connected, or connecting, to the ClusterIP itself{of}: from before the programs were attached, or of \
             a process that is not translated; they must connect anew",
            direct.len()
        );
        all.push(finding(State::Degraded, "sockets", detail));
    }
    all
}

/// Outcome of the calls to backends, as far as they are known to fail if none was made.
fn backends(facts: &Facts) -> Vec<Finding> {
    let finding_of = |Probe { backend, outcome, .. }: &Probe| {
        let state = if outcome.is_good() { State::Ok } else { State::Degraded };
        finding(state, "backend", format!("{backend} {outcome}"))
    };
    facts.probes.iter().map(finding_of).collect()
}
