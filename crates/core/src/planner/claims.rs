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
    desired::{ClaimRank, DesiredFrontend, precedence},
    names::{Text, Texts},
    problem::{FRONTENDS_NAMED_MAX, some_of},
    store::refill,
};

/// Claims of all Services.
#[derive(Debug)]
pub(super) struct Claims {
    services: BTreeMap<Arc<ServiceName>, ServiceClaims>,
    port_names: Texts,
    pub(super) frontends: Frontends,
    pub(super) cluster_ips: ClusterIps,
    /// Frontends with several claims.
    contested: BTreeSet<Frontend>,
    /// Raised whenever [`Claims::conflicts`] may have changed.
    pub(super) revision: u64,
}

/// Claims of one Service.
#[derive(Debug, Default, PartialEq, Eq)]
struct ServiceClaims {
    created_s: Option<i64>,
    rows: Box<[ClaimRef]>,
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
    /// Frontends that the Service claimed before or claims now.
    pub(super) frontends: Vec<Frontend>,
    /// ClusterIPs whose claims have changed.
    pub(super) cluster_ips: Vec<Address>,
    /// Sets that the Service no longer needs, with each frontend that led to one.
    pub(super) gone: Vec<(Frontend, BackendSetKey)>,
}

/// Owner of a contested frontend.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Owner<'a> {
    Port(&'a str),
    Service(&'a ServiceName),
}

/// Frontends that one Service loses to one owner.
#[derive(Default)]
struct LostFrontends {
    count: usize,
    first: Vec<Frontend>,
    last: Option<Frontend>,
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

    /// The interned port name.
    pub(super) fn share(&mut self, port_name: &str) -> Text {
        self.port_names.share(port_name)
    }

    /// Replaces the claims of a Service.
    pub(super) fn replace(&mut self, service: &Arc<ServiceName>, desired: &DesiredService) -> ClaimChanges {
        let after = self.desired(desired);
        if self.services.get(service) == Some(&after) {
            return ClaimChanges { frontends: after.frontends().collect(), ..ClaimChanges::default() };
        }
        let before = self.services.remove(service).unwrap_or_default();
        let changes = ClaimChanges {
            frontends: before.frontends().chain(after.frontends()).collect(),
            cluster_ips: before.cluster_ips().chain(after.cluster_ips()).collect(),
            gone: before.sets_without(&after, service),
        };
        self.withdraw(service, &before.rows);
        for claim in &after.rows {
            self.claim(service, claim, after.created_s);
        }
        if !after.rows.is_empty() {
            self.services.insert(service.clone(), after);
        }
        changes
    }

    fn desired(&mut self, desired: &DesiredService) -> ServiceClaims {
        let Self { frontends, port_names, .. } = self;
        let claim = |DesiredFrontend { frontend, port, source, scope }: DesiredFrontend<'_>| ClaimRef {
            frontend,
            port_name: port_names.share(&port.name),
            source,
            scope,
        };
        ServiceClaims { created_s: desired.created_s(), rows: desired.frontends(frontends).map(claim).collect() }
    }

    fn withdraw(&mut self, service: &ServiceName, claims: &[ClaimRef]) {
        for claim in claims {
            self.frontends.remove_claims(claim.frontend, service);
            self.mark_contested(claim.frontend);
            if claim.source == FrontendSource::ClusterIp {
                self.cluster_ips.unclaim(claim.frontend.address);
            }
        }
    }

    fn claim(&mut self, service: &Arc<ServiceName>, claim: &ClaimRef, created_s: Option<i64>) {
        let ClaimRef { frontend, source, scope, .. } = *claim;
        if source == FrontendSource::ClusterIp {
            self.cluster_ips.claim(frontend.address);
        }
        let services = &self.services;
        let rank = ClaimRank { source, created_s, service };
        let claim = Claim { service: service.clone(), port_name: claim.port_name.clone(), source, scope };
        self.frontends.claim(frontend, claim, |other| {
            let created_s = if other.service == *service {
                created_s
            } else {
                services.get(&other.service).and_then(|claims| claims.created_s)
            };
            let other = ClaimRank { source: other.source, created_s, service: &other.service };
            precedence(other, rank).is_le()
        });
        self.mark_contested(frontend);
    }

    fn mark_contested(&mut self, frontend: Frontend) {
        let is_contested = self.frontends.claims(frontend).len() > 1;
        let was_contested =
            if is_contested { !self.contested.insert(frontend) } else { self.contested.remove(&frontend) };
        self.revision += u64::from(is_contested || was_contested);
    }

    /// One problem for each Service that loses frontends, and each owner that it loses them to.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Problem> {
        let mut all = BTreeMap::<(&ServiceName, Owner<'_>), LostFrontends>::new();
        for &frontend in &self.contested {
            let [first, losers @ ..] = self.frontends.claims(frontend) else { continue };
            for claim in losers {
                let is_own = first.service == claim.service;
                let owner = if is_own { Owner::Port(&first.port_name) } else { Owner::Service(&first.service) };
                all.entry((&claim.service, owner)).or_default().add(frontend);
            }
        }
        all.into_iter().map(|((service, owner), lost)| lost.problem(service, &owner))
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
        self.rows.iter().map(|claim| claim.frontend)
    }

    fn cluster_ips(&self) -> impl Iterator<Item = Address> {
        let claims = self.rows.iter().filter(|claim| claim.source == FrontendSource::ClusterIp);
        claims.map(|claim| claim.frontend.address)
    }

    /// Sets that these claims need and `after` does not, each with the frontends that led to it.
    fn sets_without(&self, after: &Self, service: &Arc<ServiceName>) -> Vec<(Frontend, BackendSetKey)> {
        let kept: BTreeSet<_> = after.rows.iter().map(ClaimRef::set).collect();
        let gone = self.rows.iter().filter(|claim| !kept.contains(&claim.set()));
        gone.map(|claim| (claim.frontend, claim.key(service))).collect()
    }
}

impl ClaimRef {
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
            Owner::Port(name) => format!("its own port {name:?}"),
            Owner::Service(name) => format!("Service {name}"),
        };
        let frontends = some_of(&self.first, self.count);
        let message = format!("{frontends} {belong} to {owner}, which comes first");
        Problem::new(format_args!("Service {service}"), "", message)
    }
}
