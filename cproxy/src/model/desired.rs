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
    /// The backends that get new connections, sorted, no duplicates.
    pub backends: Vec<Backend>,
}

impl Row {
    /// What a new connection gets.
    #[must_use]
    pub fn action(&self) -> Action {
        if self.backends.is_empty() { Action::Refuse } else { Action::Forward }
    }
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
    /// Its name in the JSON contract.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Refuse => "refuse",
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
            rows.push(Row {
                frontend: Frontend { address, port: port.port, protocol: port.protocol },
                service: name.clone(),
                port_name: port.name.clone(),
                source: Source::ClusterIp,
                backends: eligible_backends(store.slices(name), port, address.family()),
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

/// `CategorizeEndpoints` (pkg/proxy/topology.go) for traffic policy Cluster: the ready endpoints, or, if there is none,
/// those that still serve while they terminate.
fn eligible_backends<'a>(
    slices: impl Iterator<Item = &'a SliceRow>,
    port: &ServicePort,
    family: Family,
) -> Vec<Backend> {
    let endpoints = merged_endpoints(slices, port, family);
    let backends = |wanted: fn(&Endpoint) -> bool| -> Vec<Backend> {
        endpoints.iter().filter(|(_, endpoint)| wanted(endpoint)).map(|(&backend, _)| backend).collect()
    };
    let ready = backends(|endpoint| endpoint.ready);
    if ready.is_empty() { backends(|endpoint| endpoint.serving && endpoint.terminating) } else { ready }
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
