//! What the table should be: a pure function of the rows.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use super::{
    Backend, Endpoint, Family, Frontend, ObjectName, Protocol, ServiceName, ServicePort, ServiceRow, SliceRow, Store,
};

/// Where a frontend's address comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `spec.clusterIP` or `spec.clusterIPs`.
    ClusterIp,
}

/// What a new connection to a frontend gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// One of the backends.
    Forward,
    /// ECONNREFUSED.
    Refuse,
    /// EHOSTUNREACH: there are endpoints, but the Service's traffic policy rules them out.
    Drop,
}

/// One frontend with everything that is known about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What clients connect to.
    pub frontend: Frontend,
    /// The Service.
    pub service: ServiceName,
    /// The name of the Service's port.
    pub port_name: Arc<str>,
    /// Why the Service has this frontend.
    pub source: Source,
    /// What a new connection gets.
    pub action: Action,
    /// For how long a client keeps its backend; `None` without session affinity.
    pub session_affinity_seconds: Option<u32>,
    /// The backends that get new connections, sorted, no duplicates; none unless `action` is [`Action::Forward`].
    pub backends: Vec<Backend>,
    /// Endpoints that get no new connections but still serve those they have; sorted.
    pub serving: Vec<Backend>,
}

impl Source {
    /// Its name in the JSON contract.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
        }
    }
}

impl Action {
    /// What a set with or without eligible backends does.
    #[must_use]
    pub fn of(has_eligible: bool, drops: bool) -> Self {
        match (has_eligible, drops) {
            (true, _) => Self::Forward,
            (false, true) => Self::Drop,
            (false, false) => Self::Refuse,
        }
    }

    /// Its name in the JSON contract.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Refuse => "refuse",
            Self::Drop => "drop",
        }
    }
}

/// The rows of one Service; none if it is unknown.
#[must_use]
pub fn desired_rows(store: &Store, name: &ServiceName) -> Vec<Row> {
    let Some(service) = store.service_row(name) else { return Vec::new() };
    let mut rows = Vec::with_capacity(service.ports.len() * service.cluster_ips.len());
    for &address in &service.cluster_ips {
        for port in &service.ports {
            let endpoints = merged_endpoints(store.slices(name), port, address.family());
            let (action, backends) = eligible_backends(&endpoints, service.is_internal_local);
            rows.push(Row {
                frontend: Frontend { address, port: port.port, protocol: port.protocol },
                service: name.clone(),
                port_name: port.name.clone(),
                source: Source::ClusterIp,
                action,
                session_affinity_seconds: service.affinity_seconds,
                serving: backends_of(&endpoints, |backend, endpoint| {
                    endpoint.serving && backends.binary_search(backend).is_err()
                }),
                backends,
            });
        }
    }
    rows
}

/// The whole table, sorted by frontend: what `cproxy resolve` prints, and the oracle of the incremental path.
#[must_use]
pub fn resolve(store: &Store) -> Vec<Row> {
    let mut table = BTreeMap::<Frontend, (&ServiceRow, Row)>::new();
    for (name, service) in store.services() {
        for row in desired_rows(store, name) {
            let beats = |(other, of): &(&ServiceRow, Row)| {
                precedence((service.created_s, name), (other.created_s, &of.service)) == Ordering::Less
            };
            if table.get(&row.frontend).is_none_or(beats) {
                table.insert(row.frontend, (service, row));
            }
        }
    }
    table.into_values().map(|(_, row)| row).collect()
}

/// Who owns an address that several Services claim: the older, then the first by name. Age unknown counts as youngest.
pub(super) fn precedence(a: (Option<i64>, &ObjectName), b: (Option<i64>, &ObjectName)) -> Ordering {
    let age = |created_s: Option<i64>| created_s.unwrap_or(i64::MAX);
    age(a.0).cmp(&age(b.0)).then_with(|| a.1.cmp(b.1))
}

/// `CategorizeEndpoints` (pkg/proxy/topology.go) for ClusterIPs: the ready endpoints, or, if there is none, those that
/// still serve while they terminate; with internal traffic policy Local only those on the own node.
fn eligible_backends(endpoints: &BTreeMap<Backend, Endpoint>, local_only: bool) -> (Action, Vec<Backend>) {
    let usable = |local_only: bool| {
        let may = |endpoint: &Endpoint| endpoint.local || !local_only;
        let ready = backends_of(endpoints, |_, endpoint| endpoint.ready && may(endpoint));
        let ends = |endpoint: &Endpoint| endpoint.serving && endpoint.terminating;
        if ready.is_empty() { backends_of(endpoints, |_, endpoint| ends(endpoint) && may(endpoint)) } else { ready }
    };
    let eligible = usable(local_only);
    let drops = local_only && eligible.is_empty() && !usable(false).is_empty();
    (Action::of(!eligible.is_empty(), drops), eligible)
}

fn backends_of(endpoints: &BTreeMap<Backend, Endpoint>, wanted: impl Fn(&Backend, &Endpoint) -> bool) -> Vec<Backend> {
    endpoints.iter().filter(|(backend, endpoint)| wanted(backend, endpoint)).map(|(&backend, _)| backend).collect()
}

/// The union over all slices, by address and port. Of two with the same, one that is not terminating wins, else the
/// one of the first slice by name.
fn merged_endpoints<'a>(
    slices: impl Iterator<Item = &'a SliceRow>,
    port: &ServicePort,
    family: Family,
) -> BTreeMap<Backend, Endpoint> {
    let mut merged = BTreeMap::<Backend, Endpoint>::new();
    for slice in slices.filter(|slice| slice.family == family) {
        for number in slice_ports(slice, &port.name, port.protocol) {
            for endpoint in &slice.endpoints {
                let backend = Backend { address: endpoint.address, port: number };
                let known = merged.entry(backend).or_insert(*endpoint);
                if known.terminating && !endpoint.terminating {
                    *known = *endpoint;
                }
            }
        }
    }
    merged
}

fn slice_ports(slice: &SliceRow, name: &str, protocol: Protocol) -> impl Iterator<Item = u16> {
    let matches = move |port: &&super::SlicePort| *port.name == *name && port.protocol == protocol;
    slice.ports.iter().filter(matches).map(|port| port.port)
}
