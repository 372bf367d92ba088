//! Desired frontends and sets of one Service.

use std::{collections::BTreeSet, sync::Arc};

use super::{frontends::Frontends, sets::BackendSetKey};
use crate::{
    Family, Frontend, Members, Problem, Protocol, Scope, ServiceName, ServicePort, Store,
    desired::{DesiredFrontend, DesiredRows, desired_problems},
    names::Text,
};

/// Computes the wish of a Service by its name.
pub(super) type Desire<'a> = &'a dyn Fn(&ServiceName) -> DesiredService;

/// Desired frontends and sets of one Service; none if it is gone.
pub(super) struct DesiredService {
    desired: Option<DesiredRows>,
    /// Frontends that the kernel has are left as they are.
    only_missing: bool,
    pub(super) problems: Vec<Problem>,
}

/// One of the sets that a Service wants.
pub(super) struct WantedSet<'a> {
    pub(super) port: &'a ServicePort,
    pub(super) scope: Scope,
    /// The first frontend that leads to it.
    pub(super) frontend: Frontend,
}

impl DesiredService {
    /// All that the store has of it.
    pub(super) fn of(store: &Store, name: &ServiceName) -> Self {
        let desired = DesiredRows::new(store, name);
        let problems = desired.as_ref().map(|desired| desired_problems(store, name, desired)).unwrap_or_default();
        Self { desired, only_missing: false, problems }
    }

    /// Of that, what the kernel does not have.
    pub(super) fn of_missing(store: &Store, name: &ServiceName) -> Self {
        Self { only_missing: true, ..Self::of(store, name) }
    }

    pub(super) fn created_s(&self) -> Option<i64> {
        self.desired.as_ref().and_then(DesiredRows::created_s)
    }

    pub(super) fn affinity_seconds(&self) -> Option<u32> {
        self.desired.as_ref().and_then(DesiredRows::affinity_seconds)
    }

    /// The frontends, one after the other.
    pub(super) fn frontends<'a>(&'a self, frontends: &Frontends) -> impl Iterator<Item = DesiredFrontend<'a>> {
        let all = self.desired.iter().flat_map(DesiredRows::frontends);
        all.filter(|wanted| !self.only_missing || frontends.set(wanted.frontend).is_none())
    }

    /// The sets that these lead to.
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

    /// The desired members of a set.
    pub(super) fn members(&self, set: &WantedSet<'_>) -> Members {
        let members = |desired: &DesiredRows| desired.members(set.port, set.frontend.address.family(), set.scope);
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
