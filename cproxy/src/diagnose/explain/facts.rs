//! Facts about a destination, and about the process that asks.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use cproxy_core::{Backend, Frontend, FrontendSource, Protocol, sorted_set};
use serde::Serialize;

use super::probe::Probe;
use crate::{
    report::{AgentReport, BackendAddress, FrontendRow, HealthReport, PolicyVerdict, ServiceReport, SocketRow},
    target::{Target, TargetPort},
};

/// All facts. A part that could not be had is its reason.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The destination.
    pub target: Target,
    /// The table in the kernel.
    pub kernel: Result<KernelFacts, String>,
    /// The agent's view.
    pub agent: Result<AgentFacts, String>,
    /// The programs.
    pub programs: ProgramFacts,
    /// The process that calls.
    pub process: Result<ProcessFacts, String>,
    /// The pod's network policy; `None` if none concerns the process's calls.
    pub policy: Option<Result<PolicyFacts, String>>,
    /// Sockets that are connected to the destination now.
    pub sockets: Result<SocketFacts, String>,
    /// Calls to the backends themselves or, if none were tried, the backends without a route.
    pub probes: Vec<Probe>,
}

/// Part of the kernel's table.
#[derive(Clone, Debug, Default)]
pub struct KernelFacts {
    /// Frontends with the destination's addresses, without names.
    pub frontends: Vec<FrontendRow>,
    /// Whether calls to other ports of the address are refused.
    pub refuses_other_ports: bool,
    /// Frontends that have the address as a backend.
    pub backend_of: Vec<Frontend>,
    /// Session affinity of the frontends that have it.
    pub affinities: Vec<(Frontend, AffinityFact)>,
}

/// Session affinity of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AffinityFact {
    /// Time from a client's last new connection until it is forgotten.
    pub timeout_seconds: u32,
    /// The backend that the process's network namespace has; `None` if the next connection chooses one.
    pub backend: Option<BackendAddress>,
    /// Seconds since its last new connection; `None` without a backend.
    pub idle_seconds: Option<u64>,
}

/// A running agent.
#[derive(Clone, Debug)]
pub struct AgentFacts {
    /// Its process, if that is known.
    pub pid: Option<u32>,
    /// Its view of the destination.
    pub report: AgentReport,
}

impl AgentFacts {
    /// The Service of that frontend, if the agent wants one to have it.
    #[must_use]
    pub fn service_of(&self, frontend: Frontend) -> Option<(&ServiceReport, &FrontendRow)> {
        let row = |service: &&ServiceReport| service.frontends.iter().any(|row| row.frontend() == Some(frontend));
        let service = self.report.services.iter().find(row)?;
        Some((service, service.frontends.iter().find(|row| row.frontend() == Some(frontend))?))
    }
}

/// The programs.
#[derive(Clone, Debug)]
pub enum ProgramFacts {
    /// A running agent has just looked at them.
    Looked(HealthReport),
    /// Without an agent: links of ours that are not attached anywhere.
    Detached(Vec<&'static str>),
}

/// The process that calls.
#[derive(Clone, Debug)]
pub struct ProcessFacts {
    /// Its id.
    pub pid: u32,
    /// Whether this is `cproxy explain` itself, for want of another one.
    pub is_self: bool,
    /// Name.
    pub command: String,
    /// User.
    pub uid: u32,
    /// Directory of its cgroup; the reason if it is unknown.
    pub cgroup: Result<PathBuf, String>,
    /// Cookie of its network namespace, if it can be had.
    pub netns_cookie: Option<u64>,
    /// Links of ours whose programs do not run for it.
    pub missing_programs: Vec<&'static str>,
    /// Whether none of our programs run for it.
    pub has_no_programs: bool,
    /// Whether its user is excluded.
    pub has_excluded_uid: bool,
    /// Whether its cgroup, or one above it, is excluded.
    pub has_excluded_cgroup: bool,
    /// Whether its network namespace is excluded.
    pub has_excluded_netns: bool,
    /// Ids of its cgroup and those above it.
    pub cgroup_ids: Vec<u64>,
    /// Excluded ports.
    pub excluded_ports: Vec<u16>,
}

/// The pod's network policy in the kernel.
#[derive(Clone, Debug, Default)]
pub struct PolicyFacts {
    /// Whether denials are only recorded.
    pub is_audited: bool,
    /// Its verdicts on calls to backends, and to the destination itself.
    pub verdicts: BTreeMap<Frontend, PolicyVerdict>,
}

/// Sockets that are connected to the destination.
#[derive(Clone, Debug, Default)]
pub struct SocketFacts {
    /// Those that cproxy has translated.
    pub translated: Vec<SocketRow>,
    /// Those that are connected to the frontend itself.
    pub direct: Vec<DirectFact>,
}

/// Socket that is connected to a frontend itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectFact {
    /// The frontend.
    pub frontend: Frontend,
    /// Its own end.
    pub local: Backend,
    /// A process that has it, and its name.
    pub process: Option<(u32, String)>,
}

impl Facts {
    /// Frontends that the destination stands for.
    #[must_use]
    pub fn calls(&self) -> BTreeSet<Frontend> {
        let kernel = self.kernel.iter().flat_map(|kernel| &kernel.frontends);
        let services = self.agent.iter().flat_map(|agent| &agent.report.services);
        match &self.target {
            Target::Frontend(frontend) => sorted_set([*frontend]),
            Target::Address(address) => {
                let known = kernel.chain(services.flat_map(|service| &service.frontends));
                sorted_set(known.filter_map(FrontendRow::frontend).filter(|frontend| frontend.address == *address))
            }
            Target::Service(name, port) => {
                let name = name.to_string();
                let own = services.filter(|service| service.service == name).flat_map(|service| &service.frontends);
                let rows: Vec<_> = own.filter_map(|row| Some((row.frontend()?, row))).collect();
                calls_of(&rows, *port)
            }
        }
    }
}

/// Frontends of a Service with that port. If it does not have the port, those that a client would try.
fn calls_of(rows: &[(Frontend, &FrontendRow)], port: Option<TargetPort>) -> BTreeSet<Frontend> {
    let Some(port) = port else { return sorted_set(rows.iter().map(|(of, _)| *of)) };
    let found = sorted_set(rows.iter().map(|(of, _)| *of).filter(|of| port.is_of(of)));
    if !found.is_empty() {
        return found;
    }
    let TargetPort { number, protocol } = port;
    let protocol = protocol.unwrap_or(Protocol::Tcp);
    let cluster_ips = rows.iter().filter(|(_, row)| row.source.as_deref() == Some(FrontendSource::ClusterIp.as_str()));
    sorted_set(cluster_ips.map(|(of, _)| Frontend { port: number, protocol, ..*of }))
}
