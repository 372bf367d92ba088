//! Content of a view: the objects that one client, or several alike, may see.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::{Arc, LazyLock},
};

use cproxy_core::{ResourceKind, ServiceName};
use ring::digest::{Context, SHA256};

/// Objects that a client may see.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientView {
    /// `None`: everything.
    narrowed: Option<Narrowed>,
}

#[derive(Debug, PartialEq, Eq)]
struct Narrowed {
    shown: Shown,
    token: String,
}

/// Namespaces that a view shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Namespaces {
    All,
    Listed(Arc<BTreeSet<Arc<str>>>),
}

/// Content of a view.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    namespaces: Namespaces,
    /// Services that are shown besides those of `namespaces`.
    services: Arc<BTreeSet<ServiceName>>,
    node: Option<String>,
}

/// Bytes of a token: enough that no two contents have the same.
const TOKEN_BYTES: usize = 16;

impl ClientView {
    /// View of everything.
    #[must_use]
    pub fn everything() -> Arc<Self> {
        static EVERYTHING: LazyLock<Arc<ClientView>> = LazyLock::new(|| Arc::new(ClientView { narrowed: None }));
        EVERYTHING.clone()
    }

    pub(super) fn narrowed(shown: Shown, token: String) -> Self {
        Self { narrowed: Some(Narrowed { shown, token }) }
    }

    /// Whether the view shows an object. `service_label` is an EndpointSlice's label `kubernetes.io/service-name`.
    ///
    /// A Node has no namespace; `namespace` is then not used.
    #[must_use]
    pub fn sees(&self, kind: ResourceKind, namespace: &str, name: &str, service_label: Option<&str>) -> bool {
        let Some(Narrowed { shown, .. }) = &self.narrowed else { return true };
        match kind {
            ResourceKind::Nodes => shown.node.as_deref() == Some(name),
            ResourceKind::Services => shown.has_service(namespace, Some(name)),
            ResourceKind::EndpointSlices => shown.has_service(namespace, service_label),
        }
    }

    /// Identifies the content, the same on each relay; `None` for the view of everything.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        self.narrowed.as_ref().map(|narrowed| narrowed.token.as_str())
    }

    /// Node that the view shows; `None` if it shows none, or all.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.narrowed.as_ref()?.shown.node.as_deref()
    }

    #[cfg(test)]
    pub(super) fn shown(&self) -> Option<&Shown> {
        self.narrowed.as_ref().map(|narrowed| &narrowed.shown)
    }
}

impl Namespaces {
    /// These and another one.
    pub(super) fn with(&self, namespace: &str) -> Self {
        match self {
            Self::Listed(listed) if !listed.contains(namespace) => {
                let mut listed = BTreeSet::clone(listed);
                listed.insert(namespace.into());
                Self::Listed(listed.into())
            }
            Self::All | Self::Listed(_) => self.clone(),
        }
    }

    fn contains(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Listed(listed) => listed.contains(namespace),
        }
    }
}

impl Shown {
    /// Content in a form that is the same for all contents that show the same.
    pub(super) fn new(namespaces: Namespaces, services: &Arc<BTreeSet<ServiceName>>, node: Option<String>) -> Self {
        let is_besides = |service: &ServiceName| !namespaces.contains(&service.namespace);
        let services = if services.iter().all(is_besides) {
            services.clone()
        } else {
            Arc::new(services.iter().filter(|service| is_besides(service)).cloned().collect())
        };
        Self { namespaces, services, node }
    }

    /// Whether the view shows a Service, or what belongs to it.
    fn has_service(&self, namespace: &str, name: Option<&str>) -> bool {
        let is_named = |service: &ServiceName| &*service.namespace == namespace && Some(&*service.name) == name;
        self.namespaces.contains(namespace) || self.services.iter().any(is_named)
    }

    /// Hash of all that the content shows.
    pub(super) fn token(&self) -> String {
        let mut hash = Context::new(&SHA256);
        // Lengths keep the parts apart. A change of this form needs another first part.
        let mut add = |part: &str| {
            hash.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
            hash.update(part.as_bytes());
        };
        add("cproxy view 1");
        match &self.namespaces {
            Namespaces::All => add("all"),
            Namespaces::Listed(listed) => {
                add(&format!("listed {}", listed.len()));
                listed.iter().for_each(|namespace| add(namespace));
            }
        }
        add(&format!("services {}", self.services.len()));
        self.services.iter().for_each(|service| add(&service.to_string()));
        add(if self.node.is_some() { "node" } else { "no node" });
        add(self.node.as_deref().unwrap_or_default());
        hex(hash.finish().as_ref())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().take(TOKEN_BYTES).fold(String::with_capacity(2 * TOKEN_BYTES), |mut text, byte| {
        // Writing to a text cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    })
}
