//! Eligible endpoints of a Service port (kube-proxy 1.36, `pkg/proxy/topology.go`).

use std::sync::Arc;

use super::{Backend, Endpoint, Family, NodeHint, Scope, ServicePort, SliceRow};

/// Endpoints that get new connections: the ready ones, or, if there is none, those that still serve while they
/// terminate.
pub(super) fn eligible(endpoints: &Merged<'_>, scope: Scope, zone: Option<&Arc<str>>) -> Vec<Backend> {
    let preference = Preference::of(endpoints, zone);
    let is_near = |found: &Found<'_>| match scope {
        Scope::Cluster => true,
        Scope::Local => found.endpoint.local,
        Scope::Denied => false,
    };
    // Hints are for clients in the whole cluster. They do not apply to scopes that are limited to the pod's node.
    let is_hinted = |found: &Found<'_>| scope != Scope::Cluster || preference.allows(found, zone);
    let ready = backends_of(endpoints, |_, found| found.endpoint.ready && is_near(found) && is_hinted(found));
    if !ready.is_empty() {
        return ready;
    }
    backends_of(endpoints, |_, found| found.endpoint.serving && found.endpoint.terminating && is_near(found))
}

/// Hints that are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preference {
    /// None.
    Nothing,
    /// Hints for the pod's zone.
    Zone,
    /// Hints for the pod's node.
    Node,
}

impl Preference {
    /// Port of `topologyModeFromHints`: hints count only if every ready endpoint has one and at least one of them names
    /// this node or zone.
    pub(super) fn of(endpoints: &Merged<'_>, zone: Option<&Arc<str>>) -> Self {
        let mut ready = endpoints.values().filter(|found| found.endpoint.ready).peekable();
        if ready.peek().is_none() {
            return Self::Nothing;
        }
        let (mut all_name_nodes, mut one_names_node) = (true, false);
        let (mut all_name_zones, mut one_names_zone) = (true, false);
        for found in ready {
            all_name_nodes &= found.has_node_hint();
            one_names_node |= found.endpoint.node_hint == NodeHint::ThisNode;
            all_name_zones &= !found.zones().is_empty();
            one_names_zone |= found.names_zone(zone);
        }
        match (all_name_nodes && one_names_node, all_name_zones && one_names_zone) {
            (true, _) => Self::Node,
            (false, true) => Self::Zone,
            (false, false) => Self::Nothing,
        }
    }

    /// Whether the hints allow an endpoint.
    pub(super) fn allows(self, found: &Found<'_>, zone: Option<&Arc<str>>) -> bool {
        match self {
            Self::Nothing => true,
            Self::Zone => found.names_zone(zone),
            Self::Node => found.endpoint.node_hint == NodeHint::ThisNode,
        }
    }
}

pub(super) fn backends_of(endpoints: &Merged<'_>, wanted: impl Fn(&Backend, &Found<'_>) -> bool) -> Vec<Backend> {
    endpoints.0.iter().filter(|(backend, found)| wanted(backend, found)).map(|&(backend, _)| backend).collect()
}

/// Endpoints of one Service port in one family, sorted.
pub(super) struct Merged<'a>(Vec<(Backend, Found<'a>)>);

impl<'a> Merged<'a> {
    pub(super) fn values(&self) -> impl Iterator<Item = &Found<'a>> {
        self.0.iter().map(|(_, found)| found)
    }

    pub(super) fn get(&self, backend: &Backend) -> Option<&Found<'a>> {
        let index = self.0.binary_search_by_key(backend, |(other, _)| *other).ok()?;
        self.0.get(index).map(|(_, found)| found)
    }
}

/// Endpoint and the slice that contains it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) slice: &'a SliceRow,
    pub(super) endpoint: &'a Endpoint,
}

impl Endpoint {
    /// Whether the endpoint is ready, or serves while it terminates.
    pub(super) fn is_usable(&self) -> bool {
        self.ready || self.serving && self.terminating
    }
}

impl Found<'_> {
    pub(super) fn zones(&self) -> &[Arc<str>] {
        self.slice.zones(self.endpoint)
    }

    pub(super) fn has_node_hint(&self) -> bool {
        self.endpoint.node_hint != NodeHint::None
    }

    fn names_zone(&self, zone: Option<&Arc<str>>) -> bool {
        zone.is_some_and(|zone| self.zones().contains(zone))
    }

    /// Whether the endpoint replaces an earlier one with the same address and port.
    fn replaces(&self, known: &Self) -> bool {
        let is_same_slice = std::ptr::eq(known.slice, self.slice);
        !self.endpoint.terminating && (known.endpoint.terminating || is_same_slice)
    }
}

/// Union of the endpoints of all slices, by address and port. Of several with the same key, one that is not terminating
/// wins, else the one of the first slice by name. Within one slice, the last one that is not terminating wins, as in
/// kube-proxy.
pub(super) fn merged_endpoints<'a>(
    slices: impl IntoIterator<Item = &'a SliceRow>,
    port: &ServicePort,
    family: Family,
) -> Merged<'a> {
    let slices = slices.into_iter().filter(|slice| slice.family == family);
    let mut merged: Vec<_> = slices
        .flat_map(|slice| slice.numbers(&port.name, port.protocol).map(move |number| (slice, number)))
        .flat_map(|(slice, number)| {
            let found = move |endpoint| Found { slice, endpoint };
            let backend = move |endpoint: &Endpoint| Backend { address: endpoint.address, port: number };
            slice.endpoints.iter().map(move |endpoint| (backend(endpoint), found(endpoint)))
        })
        .collect();
    // The stable sort keeps endpoints with the same key in the order of their slices.
    merged.sort_by_key(|(backend, _)| *backend);
    merged.dedup_by(|(backend, found), (known, kept)| {
        let is_same = backend == known;
        if is_same && found.replaces(kept) {
            *kept = *found;
        }
        is_same
    });
    Merged(merged)
}
