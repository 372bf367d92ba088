//! Names that only the agent knows.

use std::{collections::HashMap, net::IpAddr};

use cproxy_core::{Address, Backend, Frontend, KernelTable};

use super::filter::ServiceFilter;
use crate::canary::{PORT, is_canary};

/// Names of frontends, from the rows of a running agent; empty without one.
#[derive(Clone, Debug, Default)]
pub struct Names(HashMap<Frontend, FrontendLabel>);

/// Names of a frontend; `None` if the agent does not have it, or without an agent.
#[derive(Clone, Debug, Default)]
pub(super) struct FrontendLabel {
    /// namespace/name.
    pub(super) service: Option<String>,
    /// Name of the Service's port.
    pub(super) port_name: Option<String>,
    /// Source, such as ClusterIP.
    pub(super) source: Option<String>,
}

impl Names {
    pub(super) fn insert(&mut self, frontend: Frontend, label: FrontendLabel) {
        self.0.insert(frontend, label);
    }

    /// Whether a frontend is one of the agent's canary.
    #[must_use]
    pub fn is_canary(&self, frontend: &Frontend) -> bool {
        is_canary(frontend, self.0.get(frontend).and_then(|label| label.service.as_deref()))
    }

    /// Takes the agent's canary out of a table. Without names, it is known by its port and its listener: other Services
    /// lead to no loopback addresses.
    pub fn hide_canary(&self, table: &mut KernelTable) {
        let KernelTable { frontends, sets, .. } = table;
        let is_listener = |backend: &Backend| IpAddr::from(backend.address).is_loopback();
        let leads_to_listener = |set: &u32| {
            let backends = sets.get(set).map_or(&[][..], |set| set.members.eligible());
            !backends.is_empty() && backends.iter().all(is_listener)
        };
        frontends.retain(|frontend, set| {
            let may_be = self.service(frontend).is_none() && frontend.port == PORT;
            !(self.is_canary(frontend) || may_be && leads_to_listener(set))
        });
    }

    /// Whether a filter shows the rows of a frontend.
    #[must_use]
    pub fn admits(&self, frontend: &Frontend, filter: &ServiceFilter) -> bool {
        filter.admits(self.0.get(frontend).and_then(|label| label.service.as_deref()))
    }

    /// Namespace and name of the frontend's Service.
    #[must_use]
    pub fn service(&self, frontend: &Frontend) -> Option<&str> {
        self.0.get(frontend)?.service.as_deref()
    }

    /// Namespace and name of the Service that has an address.
    pub(super) fn service_at(&self, address: Address) -> Option<&str> {
        let mut labels = self.0.iter().filter(|(frontend, _)| frontend.address == address);
        labels.find_map(|(_, label)| label.service.as_deref())
    }

    pub(super) fn label(&self, frontend: &Frontend) -> FrontendLabel {
        self.0.get(frontend).cloned().unwrap_or_default()
    }
}
