//! Views: which objects a client may see.

mod file;
mod interned;
pub(crate) mod names;
mod pattern;
mod policy;
mod view;

use std::sync::Arc;

pub use self::{
    file::ViewsError,
    pattern::{Pattern, PatternError},
    policy::PolicyClient,
    view::ClientView,
};
use self::{
    file::{Entry, File},
    interned::InternedViews,
    policy::PolicyOf,
    view::{Namespaces, Shown},
};
use crate::{Identity, PeerAddress, Reason, Refusal};

/// Views of all clients, as a file or the default has them.
#[derive(Debug)]
pub struct Views {
    file: File,
    interned: Arc<InternedViews>,
}

impl Views {
    /// Views of a relay without a file: every client sees everything.
    #[must_use]
    pub fn everything() -> Self {
        Self { file: File::everything(), interned: Arc::default() }
    }

    /// Views of a file. `file` only names it in errors.
    ///
    /// # Errors
    /// The text is neither YAML nor JSON, or an entry cannot be used: one line that names file, place and remedy.
    pub fn parse(file: &str, text: &str) -> Result<Self, ViewsError> {
        Ok(Self { file: File::parse(file, text)?, interned: Arc::default() })
    }

    /// Views of the file's new text. Equal views are shared with those that clients already have.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    pub fn reparse(&self, file: &str, text: &str) -> Result<Self, ViewsError> {
        Ok(Self { file: File::parse(file, text)?, interned: self.interned.clone() })
    }

    /// View of a client. Clients with equal views get the same one.
    ///
    /// # Errors
    /// No view matches, or the one that does shows the client's own namespace and the client has none.
    pub fn select(&self, peer: &PeerAddress, identity: &Identity) -> Result<Arc<ClientView>, Refusal> {
        let Some(entry) = self.file.entry(peer, identity) else {
            return if self.file.shows_everything {
                Ok(ClientView::everything())
            } else {
                Err(no_view(peer, identity))
            };
        };
        let namespaces = entry.namespaces(identity.namespace.as_deref());
        let namespaces = namespaces.ok_or_else(|| no_namespace(entry, peer, identity))?;
        let node = entry.node.as_deref().or(identity.node_name.as_deref()).map(str::to_owned);
        Ok(self.interned.share(Shown::new(namespaces, &self.file.always_shown, node)))
    }
}

impl Views {
    /// Pods whose network policies a client gets. Without a file of views each client gets its own pod's.
    ///
    /// # Errors
    /// The view gives it none, or the client has no pod or node.
    pub fn policy(&self, peer: &PeerAddress, identity: &Identity) -> Result<PolicyClient, Refusal> {
        let entry = self.file.entry(peer, identity);
        let policy = entry.map_or(PolicyOf::Own, |entry| entry.policy.clone());
        policy.of(peer, identity).map_err(|(reason, given)| {
            let view = entry.map_or_else(|| "the relay".to_owned(), |entry| format!("view {:?}", entry.name));
            Refusal::new(reason, format!("{view} gives {} {given}", client(peer, identity)))
        })
    }
}

fn no_view(peer: &PeerAddress, identity: &Identity) -> Refusal {
    let message = format!(
        "no view of the relay matches {}; add one that does to its file of views, or `default: everything`",
        client(peer, identity)
    );
    Refusal::new(Reason::NoView, message)
}

fn no_namespace(entry: &Entry, peer: &PeerAddress, identity: &Identity) -> Refusal {
    let message = format!(
        "view {:?} shows a ServiceAccount's own namespace, but {} is none; name the namespaces in the view instead of \
         `own`",
        entry.name,
        client(peer, identity)
    );
    Refusal::new(Reason::NoNamespace, message)
}

/// Client with its address, which is also the name of one without credentials.
fn client(peer: &PeerAddress, identity: &Identity) -> String {
    let (address, client) = (peer.to_string(), identity.to_string());
    if address == client { address } else { format!("{client} at {address}") }
}

impl Entry {
    fn namespaces(&self, own: Option<&str>) -> Option<Namespaces> {
        if !self.shows_own_namespace {
            return Some(self.namespaces.clone());
        }
        Some(self.namespaces.with(own?))
    }
}

#[cfg(test)]
mod tests;
