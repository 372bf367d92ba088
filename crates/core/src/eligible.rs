//! Eligible endpoints of a Service port (kube-proxy 1.36, `pkg/proxy/topology.go`).

use std::sync::Arc;

use super::{Backend, Endpoint, Family, NodeHint, Scope, ServicePort, SliceRow};

/// Rule that decides whether an endpoint gets new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Eligible: ready.
    Ready,
    /// Eligible: terminating and serving, while no endpoint of the scope is ready.
    Fallback,
    /// Not eligible: the scope is [`Scope::Denied`].
    Denied,
    /// Not eligible: neither ready nor terminating.
    NotReady,
    /// Not eligible: terminating and no longer serving.
    NotServing,
    /// Not eligible: not on this node, in [`Scope::Local`].
    NotLocal,
    /// Not eligible: terminating, while an endpoint of the scope is ready.
    OthersReady,
    /// Not eligible: ready, but the hints that are followed name another node or zone.
    Hinted,
}

/// Eligible endpoints of a scope: the ready ones that the hints allow. If the scope has none, those that still serve
/// while they terminate.
pub(super) struct Eligibility<'a> {
    scope: Scope,
    zone: Option<&'a Arc<str>>,
    pub(super) hints: FollowedHints,
    falls_back: bool,
}

impl<'a> Eligibility<'a> {
    pub(super) fn new(endpoints: &MergedEndpoints<'_>, scope: Scope, zone: Option<&'a Arc<str>>) -> Self {
        // Hints choose among the endpoints of the whole cluster. They do not apply to the other scopes.
        let hints = if scope == Scope::Cluster { FollowedHints::of(endpoints, zone) } else { FollowedHints::None };
        let ready = Self { scope, zone, hints, falls_back: false };
        let falls_back = !endpoints.values().any(|endpoint| ready.includes(endpoint));
        Self { falls_back, ..ready }
    }

    pub(super) fn includes(&self, endpoint: &SliceEndpoint<'_>) -> bool {
        matches!(self.rule(endpoint), Rule::Ready | Rule::Fallback)
    }

    /// Rule that decides about one of the endpoints.
    pub(super) fn rule(&self, endpoint: &SliceEndpoint<'_>) -> Rule {
        let Endpoint { ready, terminating, local, .. } = *endpoint.endpoint;
        if self.scope == Scope::Denied {
            Rule::Denied
        } else if !endpoint.endpoint.is_usable() {
            if terminating { Rule::NotServing } else { Rule::NotReady }
        } else if self.scope == Scope::Local && !local {
            Rule::NotLocal
        } else if !ready {
            if self.falls_back { Rule::Fallback } else { Rule::OthersReady }
        } else if self.hints.allow(endpoint, self.zone) {
            Rule::Ready
        } else {
            Rule::Hinted
        }
    }
}

/// Hints that are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FollowedHints {
    /// No hints are followed.
    None,
    /// Hints for the zone of this node.
    Zone,
    /// Hints for this node.
    Node,
}

impl FollowedHints {
    /// The result of kube-proxy's `topologyModeFromHints`: hints count only if every ready endpoint has one and at
    /// least one of them names this node or zone.
    fn of(endpoints: &MergedEndpoints<'_>, zone: Option<&Arc<str>>) -> Self {
        let mut ready = endpoints.values().filter(|endpoint| endpoint.endpoint.ready).peekable();
        if ready.peek().is_none() {
            return Self::None;
        }
        let (mut all_name_nodes, mut one_names_node) = (true, false);
        let (mut all_name_zones, mut one_names_zone) = (true, false);
        for endpoint in ready {
            all_name_nodes &= endpoint.has_node_hint();
            one_names_node |= endpoint.names_this_node();
            all_name_zones &= !endpoint.zones().is_empty();
            one_names_zone |= endpoint.names_zone(zone);
        }
        match (all_name_nodes && one_names_node, all_name_zones && one_names_zone) {
            (true, _) => Self::Node,
            (false, true) => Self::Zone,
            (false, false) => Self::None,
        }
    }

    fn allow(self, endpoint: &SliceEndpoint<'_>, zone: Option<&Arc<str>>) -> bool {
        match self {
            Self::None => true,
            Self::Zone => endpoint.names_zone(zone),
            Self::Node => endpoint.names_this_node(),
        }
    }
}

/// Endpoints of one Service port in one family, sorted.
pub(super) struct MergedEndpoints<'a>(Vec<(Backend, SliceEndpoint<'a>)>);

impl<'a> MergedEndpoints<'a> {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Addresses and ports of those endpoints that match.
    pub(super) fn backends(&self, matches: impl Fn(&SliceEndpoint<'a>) -> bool) -> impl Iterator<Item = Backend> {
        self.0.iter().filter(move |(_, endpoint)| matches(endpoint)).map(|&(backend, _)| backend)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &SliceEndpoint<'a>> {
        self.0.iter().map(|(_, endpoint)| endpoint)
    }

    pub(super) fn get(&self, backend: &Backend) -> Option<&SliceEndpoint<'a>> {
        let index = self.0.binary_search_by_key(backend, |(other, _)| *other).ok()?;
        self.0.get(index).map(|(_, endpoint)| endpoint)
    }
}

/// Endpoint and the slice that contains it.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceEndpoint<'a> {
    pub(super) slice: &'a SliceRow,
    pub(super) endpoint: &'a Endpoint,
}

impl Endpoint {
    /// Whether the endpoint is ready, or serves while it terminates.
    pub(super) fn is_usable(&self) -> bool {
        self.ready || self.serving && self.terminating
    }
}

impl SliceEndpoint<'_> {
    pub(super) fn zones(&self) -> &[Arc<str>] {
        self.slice.zones(self.endpoint)
    }

    pub(super) fn has_node_hint(&self) -> bool {
        self.endpoint.node_hint != NodeHint::None
    }

    fn names_this_node(&self) -> bool {
        self.endpoint.node_hint == NodeHint::ThisNode
    }

    fn names_zone(&self, zone: Option<&Arc<str>>) -> bool {
        zone.is_some_and(|zone| self.zones().contains(zone))
    }

    /// Whether the endpoint replaces an earlier one with the same address and port, by the rules of
    /// [`merged_endpoints`].
    fn replaces(&self, earlier: &Self) -> bool {
        let is_same_slice = std::ptr::eq(earlier.slice, self.slice);
        !self.endpoint.terminating && (earlier.endpoint.terminating || is_same_slice)
    }
}

/// Union of the endpoints of all slices, one for each address and port. As in kube-proxy, one that is not terminating
/// comes before one that is. Among equals of several slices, the first slice by name wins. Within one slice, the last
/// one that is not terminating wins; if all terminate, the first.
pub(super) fn merged_endpoints<'a>(
    slices: impl IntoIterator<Item = &'a SliceRow>,
    port: &ServicePort,
    family: Family,
) -> MergedEndpoints<'a> {
    let mut merged = Vec::new();
    for slice in slices.into_iter().filter(|slice| slice.family == family) {
        for number in slice.numbers(&port.name, port.protocol) {
            let backend = |endpoint: &Endpoint| Backend { address: endpoint.address, port: number };
            let endpoints = slice.endpoints.iter();
            merged.extend(endpoints.map(|endpoint| (backend(endpoint), SliceEndpoint { slice, endpoint })));
        }
    }
    // The stable sort keeps endpoints with the same key in the order of their slices.
    merged.sort_by_key(|(backend, _)| *backend);
    merged.dedup_by(|(backend, endpoint), (earlier_backend, earlier)| {
        let is_same = backend == earlier_backend;
        if is_same && endpoint.replaces(earlier) {
            *earlier = *endpoint;
        }
        is_same
    });
    MergedEndpoints(merged)
}
