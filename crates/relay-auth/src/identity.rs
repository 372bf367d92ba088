//! Identities of clients.

use std::fmt;

use crate::{
    PeerAddress,
    views::names::{is_label, is_subdomain},
};

/// Identity of a client, as the API server would see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User name; for a local peer without credentials its address.
    pub username: String,
    /// Groups of the user.
    pub groups: Vec<String>,
    /// Node that the credentials are bound to.
    pub node_name: Option<String>,
    /// Namespace of a ServiceAccount.
    pub namespace: Option<String>,
    /// Pod that the credentials are bound to.
    pub pod_name: Option<String>,
    /// Identity of that pod.
    pub pod_uid: Option<String>,
    /// Origin of the identity.
    pub source: Source,
}

/// Origin of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A token that the API server has reviewed.
    Token,
    /// A client certificate.
    Certificate,
    /// The address of a local peer; no user is known.
    Local,
    /// Nothing.
    Anonymous,
}

/// Group of users with any credentials.
const AUTHENTICATED: &str = "system:authenticated";
/// Largest number of bytes of an identity's names.
const NAMES_BYTES_MAX: usize = 64 << 10;

impl Identity {
    /// Identity of credentials; `None` if its names are too long to be kept.
    pub(crate) fn new(username: String, groups: Vec<String>, source: Source) -> Option<Self> {
        let (namespace, node_name) = (service_account_namespace(&username), node_name(&username, &groups));
        let identity = Self { namespace, node_name, pod_name: None, pod_uid: None, username, groups, source };
        (identity.size_bytes() <= NAMES_BYTES_MAX).then_some(identity)
    }

    /// Identity of a client certificate. Like the API server, it adds the group of all users with credentials.
    pub(crate) fn of_certificate(username: String, mut groups: Vec<String>) -> Option<Self> {
        if !groups.iter().any(|group| group == AUTHENTICATED) {
            groups.push(AUTHENTICATED.to_owned());
        }
        Self::new(username, groups, Source::Certificate)
    }

    /// Identity of a local peer without credentials; `None` for peers that need some.
    #[must_use]
    pub fn of_local_peer(address: &PeerAddress) -> Option<Self> {
        match address {
            PeerAddress::Tcp(_) => None,
            PeerAddress::Unix(_) | PeerAddress::Vsock { .. } => {
                Some(Self::without_bindings(address.to_string(), Vec::new(), Source::Local))
            }
        }
    }

    /// Identity of a client without credentials, for a relay that admits such clients.
    #[must_use]
    pub fn anonymous() -> Self {
        let groups = vec!["system:unauthenticated".to_owned()];
        Self::without_bindings("system:anonymous".to_owned(), groups, Source::Anonymous)
    }

    fn without_bindings(username: String, groups: Vec<String>, source: Source) -> Self {
        Self { username, groups, node_name: None, namespace: None, pod_name: None, pod_uid: None, source }
    }

    /// Memory that it takes, about.
    pub(crate) fn size_bytes(&self) -> usize {
        let groups: usize = self.groups.iter().map(|group| group.len() + size_of::<String>()).sum();
        let names = [&self.node_name, &self.namespace, &self.pod_name, &self.pod_uid];
        let names: usize = names.into_iter().flatten().map(String::len).sum();
        size_of::<Self>() + self.username.len() + groups + names
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            Source::Local => f.write_str(&self.username),
            // A certificate's name may have any characters.
            Source::Token | Source::Certificate | Source::Anonymous => write!(f, "user {:?}", self.username),
        }
    }
}

/// The `NAMESPACE` of `system:serviceaccount:NAMESPACE:NAME`.
fn service_account_namespace(username: &str) -> Option<String> {
    let (namespace, name) = username.strip_prefix("system:serviceaccount:")?.split_once(':')?;
    (is_label(namespace) && is_subdomain(name)).then(|| namespace.to_owned())
}

/// The `NAME` of a kubelet's user `system:node:NAME`, which the API server also knows by its group.
fn node_name(username: &str, groups: &[String]) -> Option<String> {
    let name = username.strip_prefix("system:node:")?;
    (is_subdomain(name) && groups.iter().any(|group| group == "system:nodes")).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(username: &str, groups: &[&str]) -> Identity {
        Identity::new(username.to_owned(), groups.iter().map(|&group| group.to_owned()).collect(), Source::Token)
            .unwrap()
    }

    #[test]
    fn a_service_account_has_a_namespace() {
        for (username, namespace) in [
            ("system:serviceaccount:tenant-a:default", Some("tenant-a")),
            ("system:serviceaccount:a:b.c", Some("a")),
            ("system:serviceaccount:a:b:c", None),
            ("system:serviceaccount::b", None),
            ("system:serviceaccount:a:", None),
            ("system:serviceaccount:a", None),
            ("system:serviceaccount:A:b", None),
            ("x:system:serviceaccount:a:b", None),
            ("a", None),
        ] {
            assert_eq!(identity(username, &[]).namespace.as_deref(), namespace, "{username}");
        }
    }

    #[test]
    fn a_kubelet_has_a_node() {
        for (username, groups, node) in [
            ("system:node:n-1.example", &["system:nodes"][..], Some("n-1.example")),
            ("system:node:n", &["system:masters"], None),
            ("system:node:", &["system:nodes"], None),
            ("system:node:a b", &["system:nodes"], None),
            ("n", &["system:nodes"], None),
        ] {
            assert_eq!(identity(username, groups).node_name.as_deref(), node, "{username}");
        }
    }

    #[test]
    fn only_local_peers_need_no_credentials() {
        let unix = PeerAddress::Unix(std::path::Path::new("/run/a").into());
        assert_eq!(Identity::of_local_peer(&unix).unwrap().to_string(), r#"unix "/run/a""#);
        assert_eq!(Identity::of_local_peer(&PeerAddress::Vsock { cid: 3 }).unwrap().to_string(), "vsock 3");
        assert_eq!(Identity::of_local_peer(&PeerAddress::Tcp(([10, 0, 0, 1], 1).into())), None);
    }

    #[test]
    fn names_are_bounded() {
        assert_eq!(Identity::new("a".repeat(NAMES_BYTES_MAX), Vec::new(), Source::Token), None);
        assert_eq!(Identity::new("a".to_owned(), vec![String::new(); 4000], Source::Token), None);
    }
}
