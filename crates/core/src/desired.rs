//! Desired table, as a pure function of the store's rows.

use std::{cell::OnceCell, cmp::Ordering, collections::BTreeMap, sync::Arc};

use super::{
    Address, Backend, Family, Frontend, Members, Problem, Scope, ServiceName, ServicePort, ServiceRow, SliceRow, Store,
    eligible::{Eligibility, merged_endpoints},
};

/// Origin of a frontend's address, in the order of precedence: by who allocates the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendSource {
    /// `spec.clusterIP` or `spec.clusterIPs`, which the API server allocates.
    ClusterIp,
    /// `status.loadBalancer.ingress`, which a controller writes.
    LoadBalancerIp,
    /// `spec.externalIPs`, which the Service's owner writes.
    ExternalIp,
    /// An address of this node, with the Service's `nodePort`.
    NodePort,
}

/// Result of a new connection to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Connection to one of the backends.
    Forward,
    /// ECONNREFUSED.
    Refuse,
    /// EHOSTUNREACH: there are endpoints, but the Service's traffic policy rules them out.
    Drop,
}

/// One frontend with its Service, action and backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Address, port and protocol that clients connect to.
    pub frontend: Frontend,
    /// Service of the frontend.
    pub service: ServiceName,
    /// Name of the Service's port.
    pub port_name: Arc<str>,
    /// Origin of the frontend's address.
    pub source: FrontendSource,
    /// Endpoints that the frontend leads to.
    pub scope: Scope,
    /// Result of a new connection.
    pub action: Action,
    /// Time for which a client keeps its backend; `None` without session affinity.
    pub session_affinity_seconds: Option<u32>,
    /// Backends, shared by all frontends of one set; none of them is eligible unless `action` is [`Action::Forward`].
    pub members: Members,
}

impl FrontendSource {
    /// Name in the JSON contract.
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

impl Row {
    /// Backends that get new connections, sorted, without duplicates.
    #[must_use]
    pub fn backends(&self) -> &[Backend] {
        self.members.eligible()
    }

    /// Backends that get no new connections but keep those they have; sorted.
    #[must_use]
    pub fn kept(&self) -> &[Backend] {
        self.members.kept()
    }
}

impl Action {
    /// Action of a set with or without eligible backends.
    #[must_use]
    pub fn of(has_eligible: bool, drops: bool) -> Self {
        match (has_eligible, drops) {
            (true, _) => Self::Forward,
            (false, true) => Self::Drop,
            (false, false) => Self::Refuse,
        }
    }

    /// Name in the JSON contract.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Refuse => "refuse",
            Self::Drop => "drop",
        }
    }
}

/// Maximum number of frontends of one Service, equal to the number of ports. ClusterIPs come first, so that a Service
/// with very many external addresses keeps its own.
pub const SERVICE_FRONTENDS_MAX: usize = 65_536;

/// Frontends of a Service and the sets that they lead to. Each is computed on demand: all of them would be ports times
/// addresses times endpoints.
pub(super) struct DesiredRows<'a> {
    store: &'a Store,
    name: &'a Arc<ServiceName>,
    row: ServiceRow,
    /// Addresses of the Service: ClusterIPs first, each part sorted by address.
    addresses: Vec<(Address, FrontendSource, Scope)>,
    node_ips: Vec<Address>,
    /// Slices, once members are asked for.
    slices: OnceCell<Vec<SliceRow>>,
}

/// One frontend of a Service.
pub(super) struct DesiredFrontend<'a> {
    pub(super) frontend: Frontend,
    pub(super) port: &'a ServicePort,
    pub(super) source: FrontendSource,
    pub(super) scope: Scope,
}

impl<'a> DesiredRows<'a> {
    /// Desired rows of a Service of the store; `None` if the store does not have it.
    pub(super) fn new(store: &'a Store, name: &ServiceName) -> Option<Self> {
        let (name, row) = store.named_service(name)?;
        let (addresses, node_ips) = (addresses(store, &row), node_ips(store, &row));
        Some(Self { store, name, addresses, node_ips, slices: OnceCell::new(), row })
    }

    /// Creation time of the Service in seconds since 1970.
    pub(super) fn created_s(&self) -> Option<i64> {
        self.row.created_s
    }

    /// ClusterIPs of the Service.
    pub(super) fn cluster_ips(&self) -> &[Address] {
        &self.row.cluster_ips
    }

    /// Time for which a client keeps its backend.
    pub(super) fn affinity_seconds(&self) -> Option<u32> {
        self.row.affinity_seconds
    }

    /// The frontends, [`SERVICE_FRONTENDS_MAX`] at most. One port never has the same frontend twice.
    pub(super) fn frontends(&self) -> impl Iterator<Item = DesiredFrontend<'_>> {
        let split = self.addresses.partition_point(|&(_, source, _)| source == FrontendSource::ClusterIp);
        let (cluster, others) = self.addresses.split_at_checked(split).unwrap_or((&self.addresses, &[]));
        let of_service = [cluster, others].into_iter().flat_map(|addresses| {
            self.row.ports.iter().flat_map(move |port| {
                addresses.iter().map(move |&(address, source, scope)| {
                    let frontend = Frontend { address, port: port.port, protocol: port.protocol };
                    DesiredFrontend { frontend, port, source, scope }
                })
            })
        });
        of_service.chain(self.node_frontends()).take(SERVICE_FRONTENDS_MAX)
    }

    /// Node ports on the addresses of this node, except those that are frontends already.
    fn node_frontends(&self) -> impl Iterator<Item = DesiredFrontend<'_>> {
        let has_address = |address: Address| self.addresses.iter().any(|&(other, ..)| other == address);
        let ips = self.node_ips.iter().map(move |&address| (address, has_address(address)));
        ips.flat_map(|(address, has_address)| {
            self.row.ports.iter().filter_map(move |port| {
                let number = port.node_port?.get();
                let frontend = Frontend { address, port: number, protocol: port.protocol };
                let is_new = number != port.port || !has_address;
                is_new.then_some(DesiredFrontend {
                    frontend,
                    port,
                    source: FrontendSource::NodePort,
                    scope: Scope::Cluster,
                })
            })
        })
    }

    /// Members of one of the Service's sets.
    pub(super) fn members(&self, port: &ServicePort, family: Family, scope: Scope) -> Members {
        let slices = self.slices.get_or_init(|| self.store.slice_rows(self.name).collect());
        let endpoints = merged_endpoints(slices, port, family);
        let eligibility = Eligibility::new(&endpoints, scope, self.store.zone());
        let mut backends = Vec::with_capacity(endpoints.len());
        backends.extend(endpoints.backends(|endpoint| eligibility.includes(endpoint)));
        let eligible = backends.len();
        backends.extend(endpoints.backends(|endpoint| endpoint.endpoint.serving && !eligibility.includes(endpoint)));
        let drops = scope == Scope::Denied || endpoints.values().any(|endpoint| endpoint.endpoint.is_usable());
        Members { backends: backends.into(), eligible, drops: drops && eligible == 0 }
    }

    /// Problem of a Service with more frontends than [`SERVICE_FRONTENDS_MAX`].
    fn problem(&self, name: &ServiceName) -> Option<Problem> {
        let addresses = self.addresses.len().saturating_add(self.node_ips.len());
        let most = self.row.ports.len().saturating_mul(addresses);
        // `most` may count node ports that are not served.
        if most <= SERVICE_FRONTENDS_MAX || self.frontends().count() < SERVICE_FRONTENDS_MAX {
            return None;
        }
        let message = format!(
            "{} ports on {addresses} addresses are more than the {SERVICE_FRONTENDS_MAX} frontends of one \
             Service; the last external addresses are not served",
            self.row.ports.len()
        );
        Some(Problem::new(format_args!("Service {name}"), "", message))
    }
}

/// Rows of one Service; none if the store does not have it. One port never has the same frontend twice.
#[must_use]
pub fn desired_rows(store: &Store, name: &ServiceName) -> Vec<Row> {
    let Some(service) = DesiredRows::new(store, name) else { return Vec::new() };
    let mut sets = BTreeMap::new();
    let row = |DesiredFrontend { frontend, port, source, scope }: DesiredFrontend<'_>| {
        let family = frontend.address.family();
        let key = (port.name.clone(), port.protocol, family, scope);
        let members = sets.entry(key).or_insert_with(|| service.members(port, family, scope)).clone();
        Row {
            frontend,
            service: name.clone(),
            port_name: port.name.clone(),
            source,
            scope,
            action: Action::of(members.eligible != 0, members.drops),
            session_affinity_seconds: service.affinity_seconds(),
            members,
        }
    };
    service.frontends().map(row).collect()
}

/// Problems of a Service that come from missing facts about the node or the VM.
#[must_use]
pub(super) fn desired_problems(store: &Store, name: &ServiceName, desired: &DesiredRows<'_>) -> Vec<Problem> {
    let service = &desired.row;
    let mut problems = Vec::from_iter(desired.problem(name));
    for family in [Family::V4, Family::V6] {
        let has_vip = service.load_balancer_ips.iter().any(|address| address.family() == family);
        let is_restricted = service.source_ranges.iter().any(|range| range.family() == family);
        if has_vip && is_restricted && !store.pod_ips().iter().any(|address| address.family() == family) {
            let message = format!(
                "the VM's {family} address is not known: calls to its load balancer's addresses fail; pass --pod-ip"
            );
            problems.push(Problem::new(format_args!("Service {name}"), "spec.loadBalancerSourceRanges", message));
        }
    }
    let of_balancer = service.load_balancer_ips.iter().map(|ip| ("status.loadBalancer.ingress", ip));
    let external = served_external_ips(store, service).iter().map(|ip| ("spec.externalIPs", ip));
    for (field, address) in of_balancer.chain(external).filter(|(_, ip)| is_own(store, **ip)) {
        let message = format!("{address} is an address of this VM: this address is not served");
        problems.push(Problem::new(format_args!("Service {name}"), field, message));
    }
    problems
}

/// The whole table, sorted by frontend: the output of `cproxy resolve`, and the oracle of the incremental path.
#[must_use]
pub fn resolve(store: &Store) -> Vec<Row> {
    let mut table = BTreeMap::<Frontend, (Option<i64>, Row)>::new();
    let cluster_ips = super::sorted_set(store.services().flat_map(|(_, service)| service.cluster_ips));
    for (name, service) in store.services() {
        let rows = desired_rows(store, name).into_iter();
        for row in rows.filter(|row| may_claim(row.source, || cluster_ips.contains(&row.frontend.address))) {
            let claim = ClaimRank { source: row.source, created_s: service.created_s, service: name };
            let beats = |(created_s, other): &(Option<i64>, Row)| {
                let other = ClaimRank { source: other.source, created_s: *created_s, service: &other.service };
                precedence(claim, other) == Ordering::Less
            };
            if table.get(&row.frontend).is_none_or(beats) {
                table.insert(row.frontend, (service.created_s, row));
            }
        }
    }
    table.into_values().map(|(_, row)| row).collect()
}

/// Claim of one Service on an address, as far as it decides precedence.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClaimRank<'a> {
    pub(super) source: FrontendSource,
    pub(super) created_s: Option<i64>,
    pub(super) service: &'a ServiceName,
}

/// Order of the claims on one frontend; the first owns it: by source, then the older Service, then the first by name. A
/// Service of unknown age counts as the youngest.
pub(super) fn precedence(a: ClaimRank<'_>, b: ClaimRank<'_>) -> Ordering {
    let key = |claim: ClaimRank<'_>| (claim.source, claim.created_s.unwrap_or(i64::MAX));
    key(a).cmp(&key(b)).then_with(|| a.service.cmp(b.service))
}

/// Whether a claim counts. A ClusterIP of any Service takes no other claim, on any port: external addresses are written
/// by whoever may write a Service (CVE-2020-8554).
pub(super) fn may_claim(source: FrontendSource, is_cluster_ip: impl FnOnce() -> bool) -> bool {
    source == FrontendSource::ClusterIp || !is_cluster_ip()
}

/// Addresses of the Service itself: ClusterIPs first, each part sorted by address. An address with several sources
/// keeps the first one. It is denied if any source denies it, as kube-proxy's firewall comes before everything else
/// (nftables/proxier.go, `firewall-ips`). A ClusterIP that is also an external address ignores the internal traffic
/// policy (in kube-proxy, the later entry of `service-ips` replaces the earlier one).
fn addresses(store: &Store, service: &ServiceRow) -> Vec<(Address, FrontendSource, Scope)> {
    let cluster_ip_scope = if service.is_internal_local { Scope::Local } else { Scope::Cluster };
    let cluster_ips = service.cluster_ips.iter().map(|&ip| (ip, FrontendSource::ClusterIp, cluster_ip_scope));
    let balancer_ips = service.load_balancer_ips.iter().map(|&ip| {
        (
            ip,
            FrontendSource::LoadBalancerIp,
            if may_enter(store, service, ip.family()) { Scope::Cluster } else { Scope::Denied },
        )
    });
    let external_ips = served_external_ips(store, service).iter();
    let external_ips = external_ips.map(|&ip| (ip, FrontendSource::ExternalIp, Scope::Cluster));
    let from_outside = balancer_ips.chain(external_ips).filter(|(ip, ..)| !is_own(store, *ip));
    let mut addresses: Vec<_> = cluster_ips.chain(from_outside).collect();
    addresses.sort_unstable_by_key(|&(address, source, _)| (address, source));
    addresses.dedup_by(|&mut (address, _, scope), (first, _, first_scope)| {
        let is_same = address == *first;
        if is_same && (scope == Scope::Denied || *first_scope == Scope::Local) {
            *first_scope = scope;
        }
        is_same
    });
    let (mut sorted, others): (Vec<_>, _) =
        addresses.into_iter().partition(|&(_, source, _)| source == FrontendSource::ClusterIp);
    sorted.extend::<Vec<_>>(others);
    sorted
}

/// External addresses of the Service, if any are served.
fn served_external_ips<'a>(store: &Store, service: &'a ServiceRow) -> &'a [Address] {
    if store.serves_external_ips() { &service.external_ips } else { &[] }
}

/// Whether the address is the VM's own, and no node's: calls to it stay in the VM, whatever Services claim. A node's
/// address as a Service's external address is ordinary use.
fn is_own(store: &Store, address: Address) -> bool {
    store.pod_ips().contains(&address) && !store.node_ips().contains(&address)
}

/// Whether `loadBalancerSourceRanges` let this VM in. The VM's address is the source of everything that its sockets
/// send.
fn may_enter(store: &Store, service: &ServiceRow, family: Family) -> bool {
    let mut ranges = service.source_ranges.iter().filter(|range| range.family() == family).peekable();
    ranges.peek().is_none() || ranges.any(|range| store.pod_ips().iter().any(|&ip| range.contains(ip)))
}

/// Addresses of this node on which the Service's node ports are served.
fn node_ips(store: &Store, service: &ServiceRow) -> Vec<Address> {
    let is_served = |ip: &&Address| service.cluster_ips.iter().any(|other| other.family() == ip.family());
    store.node_ips().iter().filter(is_served).filter(|ip| !ip.is_special()).copied().collect()
}
