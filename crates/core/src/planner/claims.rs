//! Claims of the Services on frontends, the first in precedence first.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    cluster_ips::ClusterIps,
    desired_service::DesiredService,
    frontends::{Claim, Frontends},
    set_key::BackendSetKey,
};
use crate::{
    Address, Family, Frontend, FrontendSource, Problem, Protocol, Scope, ServiceName,
    desired::{ClaimRank, DesiredFrontend, may_claim, precedence},
    names::{Text, Texts},
    problem::{FRONTENDS_NAMED_MAX, some_of},
    sorted_set,
    store::refill,
};

/// Claims of all Services.
#[derive(Debug)]
pub(super) struct Claims {
    services: BTreeMap<Arc<ServiceName>, ServiceClaims>,
    port_names: Texts,
    pub(super) frontends: Frontends,
    pub(super) cluster_ips: ClusterIps,
    /// Frontends with several claims, or with one that does not count.
    contested: BTreeSet<Frontend>,
    /// Raised whenever [`Claims::conflicts`] may have changed.
    pub(super) revision: u64,
}

/// Claims of one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ServiceClaims {
    /// Creation time of the Service: the end of time if it is unknown, 0 without claims on frontends.
    created_s: i64,
    claimed: Claimed,
}

/// Frontends and ClusterIPs that one Service claims: nearly always a single frontend, which needs no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Claimed {
    #[default]
    Nothing,
    One(ClaimRef),
    Several(Box<SeveralClaims>),
}

/// See [`Claimed`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct SeveralClaims {
    rows: Box<[ClaimRef]>,
    /// ClusterIPs that are in no row: those of a Service without a port that is served, and those of a bootstrap that
    /// the kernel has.
    bare_cluster_ips: Box<[Address]>,
}

/// Claim of one frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClaimRef {
    frontend: Frontend,
    port_name: Text,
    source: FrontendSource,
    scope: Scope,
}

/// Difference between the claims of a Service before and after a change.
#[derive(Debug, Default)]
pub(super) struct ClaimChanges {
    /// Frontends that the Service claimed before or claims now, and those whose claims begin or cease to count.
    pub(super) frontends: Vec<Frontend>,
    /// ClusterIPs whose claims have changed.
    pub(super) cluster_ips: Vec<Address>,
    /// Sets that the Service no longer needs, with each frontend that led to one.
    pub(super) gone: Vec<(Frontend, BackendSetKey)>,
}

/// Owner of a contested frontend.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner<'a> {
    Port(&'a str),
    Service(&'a ServiceName),
    /// The Service whose ClusterIP is the frontend's address, which has no such port.
    ClusterIp(&'a ServiceName),
}

/// Frontends that one Service loses to one owner.
#[derive(Default)]
struct LostFrontends {
    count: usize,
    first: Vec<Frontend>,
    last: Option<Frontend>,
    /// Why the other Service comes first, at the first of them.
    why: &'static str,
}

impl Claims {
    /// Claims of a table that has no Services yet, over the kernel's frontends and addresses.
    pub(super) fn new(frontends: Frontends, cluster_ips: ClusterIps) -> Self {
        Self {
            services: BTreeMap::new(),
            port_names: Texts::default(),
            frontends,
            cluster_ips,
            contested: BTreeSet::new(),
            revision: 0,
        }
    }

    /// Services with claims.
    pub(super) fn services(&self) -> impl Iterator<Item = &Arc<ServiceName>> {
        self.services.keys()
    }

    /// Frontends that a Service claims.
    pub(super) fn frontends_of(&self, service: &ServiceName) -> impl Iterator<Item = Frontend> {
        self.services.get(service).into_iter().flat_map(ServiceClaims::frontends)
    }

    /// ClusterIPs of a Service that have a frontend.
    pub(super) fn cluster_ips_of(&self, service: &ServiceName) -> BTreeSet<Address> {
        let claims = self.services.get(service).into_iter().flat_map(|claims| claims.claimed.rows());
        sorted_set(claims.filter(|claim| claim.source == FrontendSource::ClusterIp).map(|claim| claim.frontend.address))
    }

    /// The interned port name.
    pub(super) fn share(&mut self, port_name: &str) -> Text {
        self.port_names.share(port_name)
    }

    /// Replaces the claims of a Service.
    pub(super) fn replace(&mut self, service: &Arc<ServiceName>, desired: &DesiredService<'_>) -> ClaimChanges {
        let after = self.desired(desired);
        let known = self.services.entry(service.clone()).or_default();
        if *known == after && after != ServiceClaims::default() {
            return ClaimChanges { frontends: after.frontends().collect(), ..ClaimChanges::default() };
        }
        let before = std::mem::replace(known, after.clone());
        if after == ServiceClaims::default() {
            self.services.remove(service);
        }
        before.frontends().for_each(|frontend| self.frontends.remove_claims(frontend, service));
        for claim in after.claimed.rows() {
            self.claim(service, claim, after.created_s);
        }
        let mut frontends: Vec<_> = before.frontends().chain(after.frontends()).collect();
        let mut cluster_ips = BTreeMap::<Address, (u32, u32)>::new();
        before.cluster_ips().for_each(|address| cluster_ips.entry(address).or_default().0 += 1);
        after.cluster_ips().for_each(|address| cluster_ips.entry(address).or_default().1 += 1);
        for (&address, &(before, after)) in &cluster_ips {
            if self.cluster_ips.replace_claims(address, before, after) {
                let of_others = |claims: &[Claim]| claims.iter().any(|claim| claim.service != *service);
                let claimed = self.frontends.of_address(address).filter(|(_, claims)| of_others(claims));
                frontends.extend(claimed.map(|(frontend, _)| frontend));
            }
        }
        frontends.iter().for_each(|frontend| self.mark_contested(*frontend));
        let gone = before.sets_without(&after, service);
        ClaimChanges { frontends, cluster_ips: cluster_ips.into_keys().collect(), gone }
    }

    fn desired(&mut self, desired: &DesiredService<'_>) -> ServiceClaims {
        let Self { frontends, port_names, .. } = self;
        let claim = |DesiredFrontend { frontend, port, source, scope }: DesiredFrontend<'_>| ClaimRef {
            frontend,
            port_name: port_names.share(&port.name),
            source,
            scope,
        };
        let rows: Vec<_> = desired.frontends(frontends).map(claim).collect();
        let has_row = |address: &Address| rows.iter().any(|claim| claim.is_of_cluster_ip(*address));
        let bare_cluster_ips = desired.cluster_ips().iter().filter(|address| !has_row(address)).copied().collect();
        // A Service without claims counts as none.
        let created_s = if rows.is_empty() { 0 } else { desired.created_s().unwrap_or(i64::MAX) };
        ServiceClaims { created_s, claimed: Claimed::new(rows, bare_cluster_ips) }
    }

    fn claim(&mut self, service: &Arc<ServiceName>, claim: &ClaimRef, created_s: i64) {
        let ClaimRef { frontend, source, scope, .. } = *claim;
        let services = &self.services;
        let rank = ClaimRank { source, created_s: Some(created_s), service };
        let claim = Claim { service: service.clone(), port_name: claim.port_name.clone(), source, scope };
        self.frontends.claim(frontend, claim, |other| {
            let created_s = if other.service == *service {
                Some(created_s)
            } else {
                services.get(&other.service).map(|claims| claims.created_s)
            };
            let other = ClaimRank { source: other.source, created_s, service: &other.service };
            precedence(other, rank).is_le()
        });
    }

    /// Claims on a frontend that count, the first in precedence first.
    pub(super) fn of(&self, frontend: Frontend) -> &[Claim] {
        self.that_count(frontend.address, self.frontends.claims(frontend))
    }

    /// Those of an address's sorted claims that count: the ClusterIPs' come first.
    pub(super) fn that_count<'a>(&self, address: Address, claims: &'a [Claim]) -> &'a [Claim] {
        let may_all = claims.last().is_none_or(|last| may_claim(last.source, || self.cluster_ips.is_claimed(address)));
        let count = if may_all {
            claims.len()
        } else {
            claims.partition_point(|claim| claim.source == FrontendSource::ClusterIp)
        };
        claims.get(..count).unwrap_or(claims)
    }

    /// Key of the set of the first claim.
    pub(super) fn owner(&self, frontend: Frontend) -> Option<BackendSetKey> {
        self.of(frontend).first().map(|claim| claim.key(frontend))
    }

    fn mark_contested(&mut self, frontend: Frontend) {
        let claims = self.frontends.claims(frontend);
        let is_contested = claims.len() > 1 || self.that_count(frontend.address, claims).len() != claims.len();
        let was_contested =
            if is_contested { !self.contested.insert(frontend) } else { self.contested.remove(&frontend) };
        self.revision += u64::from(is_contested || was_contested);
    }

    /// One problem for each Service that loses frontends, and each owner that it loses them to.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Problem> {
        let mut all = BTreeMap::<(&ServiceName, Owner<'_>), LostFrontends>::new();
        let mut cluster_ip = None;
        for &frontend in &self.contested {
            let claims = self.frontends.claims(frontend);
            let [first, ..] = self.of(frontend) else {
                // The frontends of an address come together.
                if cluster_ip.is_none_or(|(address, _)| address != frontend.address) {
                    cluster_ip = Some((frontend.address, self.owner_of_cluster_ip(frontend.address)));
                }
                let Some((_, Some(service))) = cluster_ip else { continue };
                for claim in claims {
                    all.entry((&claim.service, Owner::ClusterIp(service))).or_default().add(frontend);
                }
                continue;
            };
            for claim in claims.iter().skip(1) {
                let is_own = first.service == claim.service;
                let owner = match is_own {
                    true => Owner::Port(&first.port_name),
                    false => Owner::Service(&first.service),
                };
                let lost = all.entry((&claim.service, owner)).or_default();
                if lost.count == 0 && !is_own {
                    lost.why = self.why_first(first, claim);
                }
                lost.add(frontend);
            }
        }
        all.into_iter().map(|((service, owner), lost)| lost.problem(service, &owner))
    }

    /// Reason why a claim comes before one of another Service (see `precedence`).
    fn why_first(&self, first: &Claim, other: &Claim) -> &'static str {
        let created = |claim: &Claim| self.services.get(&claim.service).map(|claims| claims.created_s);
        match () {
            () if first.source != other.source => "by its kind of address",
            () if created(first) != created(other) => "as the older one",
            () => "by name",
        }
    }

    /// Service that has this ClusterIP.
    fn owner_of_cluster_ip(&self, address: Address) -> Option<&ServiceName> {
        let mut claims = self.frontends.of_address(address).flat_map(|(_, claims)| claims);
        let with_port = claims.find(|claim| claim.source == FrontendSource::ClusterIp).map(|claim| &*claim.service);
        let mut bare = self.services.iter().filter(|(_, claims)| claims.claimed.bare_cluster_ips().contains(&address));
        with_port.or_else(|| bare.next().map(|(service, _)| &**service))
    }

    /// Rebuilds the trees: insertion in ascending order leaves their nodes half empty.
    pub(super) fn refill(&mut self) {
        self.frontends.refill();
        self.cluster_ips.refill();
        refill(&mut self.services);
    }
}

impl ServiceClaims {
    fn frontends(&self) -> impl Iterator<Item = Frontend> {
        self.claimed.rows().iter().map(|claim| claim.frontend)
    }

    /// The Service's ClusterIPs, each as often as it has rows, or once.
    fn cluster_ips(&self) -> impl Iterator<Item = Address> {
        let claims = self.claimed.rows().iter().filter(|claim| claim.source == FrontendSource::ClusterIp);
        claims.map(|claim| claim.frontend.address).chain(self.claimed.bare_cluster_ips().iter().copied())
    }

    /// Sets that these claims need and `after` does not, each with the frontends that led to it.
    fn sets_without(&self, after: &Self, service: &Arc<ServiceName>) -> Vec<(Frontend, BackendSetKey)> {
        let kept = sorted_set(after.claimed.rows().iter().map(ClaimRef::set));
        let gone = self.claimed.rows().iter().filter(|claim| !kept.contains(&claim.set()));
        gone.map(|claim| (claim.frontend, claim.key(service))).collect()
    }
}

impl Claimed {
    fn new(mut rows: Vec<ClaimRef>, bare_cluster_ips: Box<[Address]>) -> Self {
        match (rows.len(), bare_cluster_ips.len()) {
            (0 | 1, 0) => rows.pop().map_or(Self::Nothing, Self::One),
            _ => Self::Several(Box::new(SeveralClaims { rows: rows.into(), bare_cluster_ips })),
        }
    }

    fn rows(&self) -> &[ClaimRef] {
        match self {
            Self::Nothing => &[],
            Self::One(claim) => std::slice::from_ref(claim),
            Self::Several(claims) => &claims.rows,
        }
    }

    fn bare_cluster_ips(&self) -> &[Address] {
        match self {
            Self::Nothing | Self::One(_) => &[],
            Self::Several(claims) => &claims.bare_cluster_ips,
        }
    }
}

impl ClaimRef {
    fn is_of_cluster_ip(&self, address: Address) -> bool {
        self.source == FrontendSource::ClusterIp && self.frontend.address == address
    }

    fn family(&self) -> Family {
        self.frontend.address.family()
    }

    /// Key of the Service's set that the frontend leads to.
    fn set(&self) -> (Protocol, Family, Scope, &Text) {
        (self.frontend.protocol, self.family(), self.scope, &self.port_name)
    }

    fn key(&self, service: &Arc<ServiceName>) -> BackendSetKey {
        let (service, port_name) = (service.clone(), self.port_name.clone());
        BackendSetKey { service, port_name, protocol: self.frontend.protocol, family: self.family(), scope: self.scope }
    }
}

impl LostFrontends {
    fn add(&mut self, frontend: Frontend) {
        if self.last.replace(frontend) == Some(frontend) {
            return;
        }
        self.count += 1;
        if self.first.len() < FRONTENDS_NAMED_MAX {
            self.first.push(frontend);
        }
    }

    fn problem(&self, service: &ServiceName, owner: &Owner<'_>) -> Problem {
        let belong = if self.count == 1 { "belongs" } else { "belong" };
        let owner = match owner {
            Owner::Port(name) => format!("its own port {name:?}, which comes first"),
            Owner::Service(name) => format!("Service {name}, which comes first {}", self.why),
            Owner::ClusterIp(name) => format!("Service {name}, whose ClusterIP takes no other claim"),
        };
        let frontends = some_of(&self.first, self.count);
        let message = format!("{frontends} {belong} to {owner}");
        Problem::new(format_args!("Service {service}"), "", message)
    }
}
