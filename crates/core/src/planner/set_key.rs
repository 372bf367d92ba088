//! Key of a backend set.

use std::sync::Arc;

use crate::{Affinity, Family, Protocol, Scope, ServiceName, affinity_id, names::Text, store::is_own};

/// Key of a backend set: a Service port in one family, as some of its frontends see it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct BackendSetKey {
    pub(super) service: Arc<ServiceName>,
    pub(super) port_name: Text,
    pub(super) protocol: Protocol,
    pub(super) family: Family,
    pub(super) scope: Scope,
}

impl BackendSetKey {
    /// Whether the programs count the calls to the set: those of the agent's own Services they do not.
    pub(super) fn is_counted(&self) -> bool {
        !is_own(&self.service.namespace)
    }

    /// Session affinity of the set.
    pub(super) fn affinity(&self, seconds: Option<u32>) -> Affinity {
        let id = || affinity_id(&self.service, &self.port_name, self.protocol, self.family);
        seconds.map_or_else(Affinity::default, |seconds| Affinity { id: id(), seconds })
    }
}
