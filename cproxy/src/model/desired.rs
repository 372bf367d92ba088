//! What the table should be: a pure function of the rows.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use super::{
    Address, Backend, Endpoint, Family, Frontend, NodeHint, Problem, ServiceName, ServicePort, ServiceRow, SliceRow,
    Store,
};

/// Where a frontend's address comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// `spec.clusterIP` or `spec.clusterIPs`.
    ClusterIp,
    /// `spec.externalIPs`.
    ExternalIp,
    /// `status.loadBalancer.ingress`.
    LoadBalancerIp,
    /// An address of the own node, with the Service's `nodePort`.
    NodePort,
}

/// Which of a Service port's endpoints a frontend leads to: frontends with the same share a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Those in the whole cluster, as far as hints allow.
    Cluster,
    /// Those on the own node: a ClusterIP with internal traffic policy Local.
    Local,
    /// None: `loadBalancerSourceRanges` do not let this VM in.
    Denied,
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
    /// Which endpoints it leads to.
    pub scope: Scope,
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
            Self::ExternalIp => "ExternalIP",
            Self::LoadBalancerIp => "LoadBalancerIP",
            Self::NodePort => "NodePort",
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

/// The rows of one Service; none if it is unknown. No two have the same frontend for the same port.
#[must_use]
pub fn desired_rows(store: &Store, name: &ServiceName) -> Vec<Row> {
    let Some(service) = store.service_row(name) else { return Vec::new() };
    let places = places(store, &service);
    let node_ips = node_ips(store, &service);
    let slices: Vec<_> = store.slices(name).map(|(_, slice)| slice).collect();
    let mut rows = Vec::with_capacity(service.ports.len() * (places.len() + node_ips.len()));
    for port in &service.ports {
        let mut sets = Sets { slices: &slices, zone: store.zone(), port, members: Vec::new() };
        let mut add = |address: Address, number: u16, source: Source, scope: Scope| {
            let Members { action, backends, serving } = sets.get(address.family(), scope);
            rows.push(Row {
                frontend: Frontend { address, port: number, protocol: port.protocol },
                service: name.clone(),
                port_name: port.name.clone(),
                source,
                scope,
                action,
                session_affinity_seconds: service.affinity_seconds,
                backends,
                serving,
            });
        };
        for (&address, &(source, scope)) in &places {
            add(address, port.port, source, scope);
        }
        for (&address, number) in node_ips.iter().flat_map(|ip| port.node_port.map(|number| (ip, number.get()))) {
            if number != port.port || !places.contains_key(&address) {
                add(address, number, Source::NodePort, Scope::Cluster);
            }
        }
    }
    rows
}

/// What cannot be done for a Service because something about the own place is not known.
#[must_use]
pub(super) fn desired_problems(store: &Store, name: &ServiceName) -> Vec<Problem> {
    let Some(service) = store.service_row(name) else { return Vec::new() };
    let mut problems = Vec::new();
    for family in [Family::V4, Family::V6] {
        let has_vip = service.load_balancer_ips.iter().any(|address| address.family() == family);
        let is_restricted = service.source_ranges.iter().any(|range| range.family() == family);
        if has_vip && is_restricted && !store.pod_ips().iter().any(|address| address.family() == family) {
            let message = format!(
                "the own {family} address is not known: calls to its load balancer's addresses fail; pass --pod-ip"
            );
            problems.push(Problem::new(format_args!("Service {name}"), "spec.loadBalancerSourceRanges", message));
        }
    }
    problems
}

/// The whole table, sorted by frontend: what `cproxy resolve` prints, and the oracle of the incremental path.
#[must_use]
pub fn resolve(store: &Store) -> Vec<Row> {
    let mut table = BTreeMap::<Frontend, (Option<i64>, Row)>::new();
    for (name, service) in store.services() {
        for row in desired_rows(store, name) {
            let claim = Claim { source: row.source, created_s: service.created_s, service: name };
            let beats = |(created_s, other): &(Option<i64>, Row)| {
                let other = Claim { source: other.source, created_s: *created_s, service: &other.service };
                precedence(claim, other) == Ordering::Less
            };
            if table.get(&row.frontend).is_none_or(beats) {
                table.insert(row.frontend, (service.created_s, row));
            }
        }
    }
    table.into_values().map(|(_, row)| row).collect()
}

/// One Service's wish to have an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    pub(super) source: Source,
    pub(super) created_s: Option<i64>,
    pub(super) service: &'a ServiceName,
}

/// Who owns a frontend that several claim: an address of a Service comes before a port of the node; then the older
/// Service, then the first by name. Age unknown counts as youngest.
pub(super) fn precedence(a: Claim<'_>, b: Claim<'_>) -> Ordering {
    let key = |claim: Claim<'_>| (claim.source == Source::NodePort, claim.created_s.unwrap_or(i64::MAX));
    key(a).cmp(&key(b)).then_with(|| a.service.cmp(b.service))
}

/// The addresses of a Service itself. One that it has for several reasons is there for the first of them, but denied if
/// it is denied for any, as kube-proxy's firewall comes before everything else (nftables/proxier.go, `firewall-ips`), and
/// a ClusterIP that is one for outside, too, knows no internal traffic policy (there, the later entry of `service-ips`
/// takes the place of the earlier).
fn places(store: &Store, service: &ServiceRow) -> BTreeMap<Address, (Source, Scope)> {
    let cluster_ip_scope = if service.is_internal_local { Scope::Local } else { Scope::Cluster };
    let cluster_ips = service.cluster_ips.iter().map(|&ip| (ip, Source::ClusterIp, cluster_ip_scope));
    let external_ips = service.external_ips.iter().map(|&ip| (ip, Source::ExternalIp, Scope::Cluster));
    let balancer_ips = service.load_balancer_ips.iter().map(|&ip| {
        (
            ip,
            Source::LoadBalancerIp,
            if may_enter(store, service, ip.family()) { Scope::Cluster } else { Scope::Denied },
        )
    });
    let mut places = BTreeMap::new();
    for (address, source, scope) in cluster_ips.chain(external_ips).chain(balancer_ips) {
        let place = places.entry(address).or_insert((source, scope));
        if scope == Scope::Denied || place.1 == Scope::Local {
            place.1 = scope;
        }
    }
    places
}

/// Whether `loadBalancerSourceRanges` let this VM in, whose address is the source of all that its sockets send.
fn may_enter(store: &Store, service: &ServiceRow, family: Family) -> bool {
    let mut ranges = service.source_ranges.iter().filter(|range| range.family() == family).peekable();
    ranges.peek().is_none() || ranges.any(|range| store.pod_ips().iter().any(|&ip| range.contains(ip)))
}

/// The own node's addresses on which a Service's node ports are served.
fn node_ips(store: &Store, service: &ServiceRow) -> Vec<Address> {
    let is_served = |ip: &&Address| service.cluster_ips.iter().any(|other| other.family() == ip.family());
    store.node_ips().iter().filter(is_served).filter(|ip| !ip.is_special()).copied().collect()
}

/// What a frontend of one Service port leads to.
#[derive(Clone)]
struct Members {
    action: Action,
    backends: Vec<Backend>,
    serving: Vec<Backend>,
}

/// The sets of one Service port, each computed once.
struct Sets<'a> {
    slices: &'a [SliceRow],
    zone: Option<&'a Arc<str>>,
    port: &'a ServicePort,
    members: Vec<((Family, Scope), Members)>,
}

impl Sets<'_> {
    fn get(&mut self, family: Family, scope: Scope) -> Members {
        if let Some((_, members)) = self.members.iter().find(|(key, _)| *key == (family, scope)) {
            return members.clone();
        }
        let members = Members::new(&merged_endpoints(self.slices, self.port, family), scope, self.zone);
        self.members.push(((family, scope), members.clone()));
        members
    }
}

impl Members {
    /// `CategorizeEndpoints` (pkg/proxy/topology.go), and what follows for new connections.
    fn new(endpoints: &Merged<'_>, scope: Scope, zone: Option<&Arc<str>>) -> Self {
        let usable = |endpoint: &Endpoint| endpoint.ready || endpoint.serving && endpoint.terminating;
        let backends = eligible(endpoints, scope, zone);
        let drops = scope == Scope::Denied || endpoints.values().any(|found| usable(found.endpoint));
        let action = Action::of(!backends.is_empty(), drops);
        let serves =
            |backend: &Backend, found: &Found<'_>| found.endpoint.serving && backends.binary_search(backend).is_err();
        Self { action, serving: backends_of(endpoints, serves), backends }
    }
}

/// The endpoints that get new connections: the ready ones, or, if there is none, those that still serve while they
/// terminate.
fn eligible(endpoints: &Merged<'_>, scope: Scope, zone: Option<&Arc<str>>) -> Vec<Backend> {
    let preference = Preference::of(endpoints, zone);
    let is_near = |found: &Found<'_>| match scope {
        Scope::Cluster => true,
        Scope::Local => found.endpoint.local,
        Scope::Denied => false,
    };
    // Hints are for clients in the whole cluster: an endpoint on the own node is near enough whatever they say.
    let is_hinted = |found: &Found<'_>| scope != Scope::Cluster || preference.allows(found, zone);
    let ready = backends_of(endpoints, |_, found| found.endpoint.ready && is_near(found) && is_hinted(found));
    if !ready.is_empty() {
        return ready;
    }
    backends_of(endpoints, |_, found| found.endpoint.serving && found.endpoint.terminating && is_near(found))
}

/// Which hints are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preference {
    /// None.
    Nothing,
    /// For the own zone.
    Zone,
    /// For the own node.
    Node,
}

impl Preference {
    /// `topologyModeFromHints`: every ready endpoint has a hint and one is for here, or hints do not count.
    pub(super) fn of(endpoints: &Merged<'_>, zone: Option<&Arc<str>>) -> Self {
        let mut ready = endpoints.values().filter(|found| found.endpoint.ready).peekable();
        if ready.peek().is_none() {
            return Self::Nothing;
        }
        let (mut all_name_nodes, mut one_names_node) = (true, false);
        let (mut all_name_zones, mut one_names_zone) = (true, false);
        for found in ready {
            all_name_nodes &= found.has_node_hint();
            one_names_node |= found.endpoint.node_hint == NodeHint::Own;
            all_name_zones &= !found.zones().is_empty();
            one_names_zone |= found.names_zone(zone);
        }
        match (all_name_nodes && one_names_node, all_name_zones && one_names_zone) {
            (true, _) => Self::Node,
            (false, true) => Self::Zone,
            (false, false) => Self::Nothing,
        }
    }

    /// Whether an endpoint is meant for here.
    pub(super) fn allows(self, found: &Found<'_>, zone: Option<&Arc<str>>) -> bool {
        match self {
            Self::Nothing => true,
            Self::Zone => found.names_zone(zone),
            Self::Node => found.endpoint.node_hint == NodeHint::Own,
        }
    }
}

fn backends_of(endpoints: &Merged<'_>, wanted: impl Fn(&Backend, &Found<'_>) -> bool) -> Vec<Backend> {
    endpoints.0.iter().filter(|(backend, found)| wanted(backend, found)).map(|&(backend, _)| backend).collect()
}

/// The endpoints of one Service port in one family, sorted.
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

/// An endpoint and the slice that it was found in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
    pub(super) slice: &'a SliceRow,
    pub(super) endpoint: &'a Endpoint,
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

    /// Whether it takes the place of one with the same address and port that comes before it.
    fn replaces(&self, known: &Self) -> bool {
        let is_same_slice = std::ptr::eq(known.slice, self.slice);
        !self.endpoint.terminating && (known.endpoint.terminating || is_same_slice)
    }
}

/// The union over all slices, by address and port. Of several with the same, one that is not terminating wins, else the
/// one of the first slice by name. In one slice it is the last that is not terminating, as in kube-proxy.
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
    // Those that are the same stay in the order of their slices.
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
