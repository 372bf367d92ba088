//! Gathering of the facts: from the kernel, the agent and /proc. Changes nothing.

use std::{collections::BTreeSet, fs, io, path::Path, thread, time::Duration};

use cproxy_core::{Address, Backend, Frontend, KernelSet, KernelTable, Protocol, sorted_map, sorted_set};
use cproxy_datapath::{
    bpf::{
        ClientAffinities, KernelReader, PinDir, PolicyError, PolicyPins, PolicyReader, ProcessCgroup, Program,
        attached, in_netns_of, missing_programs, netns_cookie, read_exclusions,
    },
    sockets::{self, DirectSocket},
};
use cproxy_policy::Direction;

use super::{
    facts::{
        AffinityFact, AgentFacts, DirectFact, Facts, KernelFacts, PolicyFacts, ProcessFacts, ProgramFacts, SocketFacts,
    },
    probe::{probe, without_route},
};
use crate::{
    agent::socket_setup,
    report::{BackendAddress, FrontendRow, Names, PodPolicyReport, SocketRow},
    run_dir::{self, explain_silence, fetch_explanation, fetch_health},
    target::Target,
};

/// Pause before a second look, if agent and kernel differ: the agent may be about to write.
const SETTLING: Duration = Duration::from_millis(100);

/// Gathers the facts about a destination, and about the process with this id; about this one without it. With `probes`
/// it also calls the backends.
#[must_use]
pub fn gather(target: Target, pid: Option<u32>, probes: bool, pins: &PinDir, run_dir: &Path) -> Facts {
    let programs = match fetch_health(run_dir) {
        Ok(report) => ProgramFacts::Looked(report),
        Err(_) => ProgramFacts::Detached(detached(pins)),
    };
    let mut facts = Facts {
        agent: agent(&target, run_dir),
        kernel: Err(String::new()),
        programs,
        process: process(pid, pins),
        policy: None,
        sockets: Ok(SocketFacts::default()),
        probes: Vec::new(),
        target,
    };
    facts.kernel = kernel(&facts, pins);
    if differs(&facts) {
        thread::sleep(SETTLING);
        facts.agent = agent(&facts.target, run_dir);
        facts.kernel = kernel(&facts, pins);
    }
    let calls = facts.calls();
    if facts.kernel.is_ok() && !calls.is_empty() {
        facts.sockets = sockets(pins, &calls);
    }
    let backends = backends(&facts, &calls);
    facts.policy = policy(&facts, &backends, &calls, pins, run_dir);
    let setup = socket_setup(pins);
    let look = || if probes { probe(&backends) } else { without_route(&backends, &setup) };
    facts.probes = match pid {
        None => look(),
        Some(pid) => in_netns_of(pid, look).unwrap_or_default(),
    };
    facts
}

/// Links of ours that are not attached.
fn detached(pins: &PinDir) -> Vec<&'static str> {
    let is_gone = |id: &io::Result<u64>| id.as_ref().map_or(true, |id| *id == 0);
    attached(pins).into_iter().filter(|(_, id)| is_gone(id)).map(|(program, _)| program.link).collect()
}

fn agent(target: &Target, run_dir: &Path) -> Result<AgentFacts, String> {
    let pid = run_dir::agent(run_dir).ok().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    match fetch_explanation(run_dir, target) {
        Ok(report) => Ok(AgentFacts { pid, report }),
        Err(error) => Err(explain_silence(run_dir, &error)),
    }
}

fn kernel(facts: &Facts, pins: &PinDir) -> Result<KernelFacts, String> {
    pins.check_installed().map_err(|error| error.to_string())?;
    let table = KernelReader::read_table(pins).map_err(|error| error.to_string())?;
    let services = facts.agent.iter().flat_map(|agent| &agent.report.services);
    let addresses: BTreeSet<Address> = match &facts.target {
        Target::Address(address) | Target::Frontend(Frontend { address, .. }) => sorted_set([*address]),
        Target::Service(..) => {
            sorted_set(services.flat_map(|service| &service.frontends).map(|row| row.address.into()))
        }
    };
    let empty = KernelSet::default();
    let of_addresses: Vec<_> = table
        .frontends
        .iter()
        .filter(|(frontend, _)| addresses.contains(&frontend.address))
        .map(|(frontend, set)| (*frontend, table.sets.get(set).unwrap_or(&empty)))
        .collect();
    let cookie = facts.process.as_ref().ok().and_then(|process| process.netns_cookie);
    let clients = ClientAffinities::open(pins).ok().zip(cookie);
    let affinity = |(frontend, set): &(Frontend, &KernelSet)| Some((*frontend, affinity(set, clients.as_ref())?));
    Ok(KernelFacts {
        frontends: of_addresses.iter().map(|(frontend, set)| FrontendRow::unnamed(*frontend, set)).collect(),
        affinities: of_addresses.iter().filter_map(affinity).collect(),
        refuses_other_ports: addresses.iter().any(|address| table.addresses.contains(address)),
        backend_of: backend_of(&table, &facts.target),
    })
}

/// Session affinity of a set, and what it keeps for the network namespace with this cookie.
fn affinity(set: &KernelSet, clients: Option<&(ClientAffinities, u64)>) -> Option<AffinityFact> {
    let timeout_seconds = set.affinity.seconds()?;
    let client = clients.and_then(|(clients, cookie)| clients.of(set, *cookie).ok().flatten());
    Some(AffinityFact {
        timeout_seconds,
        backend: client.map(|client| BackendAddress::from(&client.backend)),
        idle_seconds: client.map(|client| client.idle_seconds),
    })
}

/// Frontends that lead to the address, or to the address and port.
fn backend_of(table: &KernelTable, target: &Target) -> Vec<Frontend> {
    let leads_there = |frontend: &Frontend, set: &u32| {
        let mut backends = table.sets.get(set).into_iter().flat_map(|set| set.members.backends.iter());
        match target {
            Target::Service(..) => false,
            Target::Address(address) => backends.any(|backend| backend.address == *address),
            Target::Frontend(Frontend { address, port, protocol }) => {
                frontend.protocol == *protocol && backends.any(|of| (of.address, of.port) == (*address, *port))
            }
        }
    };
    table.frontends.iter().filter(|(frontend, set)| leads_there(frontend, set)).map(|(of, _)| *of).collect()
}

/// Whether the kernel has other backends than the agent wants.
fn differs(facts: &Facts) -> bool {
    super::findings(facts).iter().any(|finding| finding.name == "table" && finding.state != super::State::Ok)
}

fn process(pid: Option<u32>, pins: &PinDir) -> Result<ProcessFacts, String> {
    let name = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let status = fs::read_to_string(format!("/proc/{name}/status"))
        .map_err(|error| format!("process {name} cannot be read: {error}"))?;
    let field = |field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.map(str::trim).unwrap_or_default()
    };
    // The programs see the real user id.
    let uid = field("Uid").split_whitespace().next().and_then(|uid| uid.parse().ok()).unwrap_or_default();
    let cgroup = ProcessCgroup::of(pid).map_err(|error| error.to_string());
    let exclusions = read_exclusions(pins).unwrap_or_default();
    let installed = cgroup.as_ref().ok().filter(|_| pins.check_installed().is_ok());
    let cookie = match pid {
        None => netns_cookie(),
        Some(pid) => in_netns_of(pid, netns_cookie).and_then(|cookie| cookie),
    };
    let cookie = cookie.ok();
    let missing = installed.and_then(|cgroup| missing_programs(pins, &cgroup.dir).ok());
    let ids = cgroup.as_ref().map(|cgroup| cgroup.ids.as_slice()).unwrap_or_default();
    Ok(ProcessFacts {
        pid: pid.unwrap_or_else(std::process::id),
        is_self: pid.is_none(),
        command: field("Name").to_owned(),
        uid,
        netns_cookie: cookie,
        has_no_programs: missing.as_ref().is_some_and(|missing| missing.len() == Program::ALL.len()),
        missing_programs: missing.unwrap_or_default(),
        has_excluded_uid: exclusions.uids.contains(&uid),
        has_excluded_cgroup: exclusions.cgroups.iter().any(|cgroup| ids.contains(&cgroup.id)),
        has_excluded_netns: exclusions.netns_others_than.is_some_and(|own| cookie.is_some_and(|cookie| cookie != own)),
        excluded_ports: exclusions.ports,
        cgroup_ids: ids.to_vec(),
        cgroup: cgroup.map(|cgroup| cgroup.dir),
    })
}

/// Verdicts of the pod's network policy on calls to these backends and destinations.
fn policy(
    facts: &Facts,
    backends: &[(Backend, Protocol)],
    calls: &BTreeSet<Frontend>,
    pins: &PinDir,
    run_dir: &Path,
) -> Option<Result<PolicyFacts, String>> {
    let reader = PolicyReader::new(PolicyPins::new(pins))?;
    let state = match reader.state() {
        Ok(state) => state,
        Err(error) => return Some(Err(error.to_string())),
    };
    let is_concerned = facts.process.as_ref().is_ok_and(|process| {
        process.is_self
            || process.netns_cookie == Some(state.netns_cookie)
                && !state.exempt_cgroups.iter().any(|id| process.cgroup_ids.contains(id))
    });
    if !state.directions.egress || !is_concerned {
        return None;
    }
    let report = run_dir::fetch_policy(run_dir).ok().flatten();
    let backends = backends.iter().map(|&(Backend { address, port }, protocol)| Frontend { address, port, protocol });
    let verdict = |call: Frontend| {
        let Frontend { address, port, protocol } = call;
        let decision = reader.decide(&state, Direction::Egress, address, protocol.into(), port)?;
        Ok((call, PodPolicyReport::verdict(report.as_ref(), Direction::Egress, address, decision)))
    };
    let verdicts = backends.chain(calls.iter().copied()).map(verdict).collect::<Result<Vec<_>, PolicyError>>();
    let facts = verdicts.map(|verdicts| PolicyFacts { is_audited: state.is_audited, verdicts: sorted_map(verdicts) });
    Some(facts.map_err(|error| error.to_string()))
}

fn sockets(pins: &PinDir, calls: &BTreeSet<Frontend>) -> Result<SocketFacts, String> {
    let listing = sockets::list(pins).map_err(|error| error.to_string())?;
    let frontends: Vec<_> = calls.iter().copied().collect();
    let direct = sockets::list_direct(pins, &frontends).map_err(|error| error.to_string())?;
    let is_ours = |socket: &&sockets::TranslatedSocket| calls.contains(&socket.frontend);
    let names = Names::default();
    Ok(SocketFacts {
        translated: listing.sockets.iter().filter(is_ours).map(|socket| SocketRow::new(socket, &names)).collect(),
        direct: direct.into_iter().map(direct_fact).collect(),
    })
}

fn direct_fact(DirectSocket { frontend, local, pid }: DirectSocket) -> DirectFact {
    let command = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned();
    DirectFact { frontend, local, process: pid.map(|pid| (pid, command(pid))) }
}

/// Backends of the calls for new connections, in the kernel or, without an agent's table there, as the agent has them.
fn backends(facts: &Facts, calls: &BTreeSet<Frontend>) -> Vec<(Backend, Protocol)> {
    let kernel = facts.kernel.iter().flat_map(|kernel| &kernel.frontends);
    let of_calls =
        kernel.filter_map(|row| Some((row.frontend()?, row))).filter(|(frontend, _)| calls.contains(frontend));
    let backends = of_calls
        .flat_map(|(frontend, row)| row.backends.iter().map(move |backend| (backend, frontend.protocol)))
        .map(|(backend, protocol)| (Backend { address: backend.address.into(), port: backend.port }, protocol));
    sorted_set(backends).into_iter().collect()
}
