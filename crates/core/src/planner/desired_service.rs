//! Desired frontends and sets of one Service.

use std::{collections::BTreeSet, sync::Arc};

use super::{frontends::Frontends, set_key::BackendSetKey};
use crate::{
    Address, Family, Frontend, Members, Problem, Protocol, Scope, ServiceName, ServicePort, Store,
    desired::{DesiredFrontend, DesiredRows, desired_problems},
    names::Text,
};

/// Desired frontends and sets of one Service; none if it is gone.
pub(super) struct DesiredService<'s> {
    desired: Option<DesiredRows<'s>>,
    /// Frontends that the kernel has do not change.
    only_missing: bool,
    pub(super) problems: Vec<Problem>,
}

/// One of a Service's desired sets.
pub(super) struct WantedSet<'a> {
    pub(super) port: &'a ServicePort,
    pub(super) scope: Scope,
    /// First frontend that leads to the set.
    pub(super) frontend: Frontend,
}

impl<'s> DesiredService<'s> {
    /// Desired state of a Service of the store.
    pub(super) fn new(store: &'s Store, name: &ServiceName) -> Self {
        let desired = DesiredRows::new(store, name);
        let problems = desired.as_ref().map(|desired| desired_problems(store, name, desired)).unwrap_or_default();
        Self { desired, only_missing: false, problems }
    }

    /// Desired state of the frontends that the kernel does not have.
    pub(super) fn missing(store: &'s Store, name: &ServiceName) -> Self {
        Self { only_missing: true, ..Self::new(store, name) }
    }

    pub(super) fn created_s(&self) -> Option<i64> {
        self.desired.as_ref().and_then(DesiredRows::created_s)
    }

    pub(super) fn affinity_seconds(&self) -> Option<u32> {
        self.desired.as_ref().and_then(DesiredRows::affinity_seconds)
    }

    /// The Service's ClusterIPs.
    pub(super) fn cluster_ips(&self) -> &[Address] {
        self.desired.as_ref().map(DesiredRows::cluster_ips).unwrap_or_default()
    }

    /// Desired frontends, one at a time.
    pub(super) fn frontends<'a>(&'a self, frontends: &Frontends) -> impl Iterator<Item = DesiredFrontend<'a>> {
        let all = self.desired.iter().flat_map(DesiredRows::frontends);
        all.filter(|wanted| !self.only_missing || frontends.set(wanted.frontend).is_none())
    }

    /// Sets of the desired frontends.
    pub(super) fn sets<'a>(&'a self, frontends: &Frontends) -> Vec<WantedSet<'a>> {
        let mut known = BTreeSet::<(&str, Protocol, Family, Scope)>::new();
        let mut sets = Vec::new();
        for DesiredFrontend { frontend, port, scope, .. } in self.frontends(frontends) {
            if known.insert((&port.name, port.protocol, frontend.address.family(), scope)) {
                sets.push(WantedSet { port, scope, frontend });
            }
        }
        sets
    }

    /// Desired members of a set.
    pub(super) fn members(&self, set: &WantedSet<'_>) -> Members {
        let members = |desired: &DesiredRows<'_>| desired.members(set.port, set.frontend.address.family(), set.scope);
        self.desired.as_ref().map(members).unwrap_or_default()
    }
}

impl WantedSet<'_> {
    pub(super) fn key(&self, service: &Arc<ServiceName>, port_name: Text) -> BackendSetKey {
        BackendSetKey {
            service: service.clone(),
            port_name,
            protocol: self.port.protocol,
            family: self.frontend.address.family(),
            scope: self.scope,
        }
    }
}
