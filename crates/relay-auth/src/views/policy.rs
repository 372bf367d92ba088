//! Pods whose network policies a client gets, as a view says it.

use serde::Deserialize;

use super::names::{is_label, is_subdomain};
use crate::{Identity, PeerAddress, Reason};

/// Pods whose network policies a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyClient {
    /// One pod, by its name and identity.
    Pod {
        /// Namespace of the pod.
        namespace: String,
        /// Name of the pod.
        name: String,
        /// Identity of the pod; `None`: whatever pod has the name.
        uid: Option<String>,
    },
    /// The pod with this identity.
    Uid(String),
    /// All pods of a node.
    Node(String),
}

/// `policy` of a view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Field")]
pub(super) enum PolicyOf {
    /// Of the pod that the client's token is bound to.
    #[default]
    Own,
    /// Of all pods of the client's node.
    Node,
    /// Of none.
    None,
    /// Of one pod: namespace and name.
    Pod(String, String),
    /// Of the pod whose UID is in the path of the socket, between these texts.
    PathUid(String, String),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `own`, `node`, `none`, {pod: NAMESPACE/NAME} or {podUID: PATH with {}}")]
enum Field {
    Word(String),
    Pod(PodField),
    Uid(UidField),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PodField {
    pod: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UidField {
    #[serde(rename = "podUID")]
    pod_uid: String,
}

impl TryFrom<Field> for PolicyOf {
    type Error = String;

    fn try_from(field: Field) -> Result<Self, String> {
        match field {
            Field::Word(word) => match &*word {
                "own" => Ok(Self::Own),
                "node" => Ok(Self::Node),
                "none" => Ok(Self::None),
                _ => Err(format!(
                    "{word:?} is neither `own`, `node` nor `none`; for one pod write {{pod: NAMESPACE/NAME}}"
                )),
            },
            Field::Pod(PodField { pod }) => match pod.split_once('/') {
                Some((namespace, name)) if is_label(namespace) && is_subdomain(name) => {
                    Ok(Self::Pod(namespace.to_owned(), name.to_owned()))
                }
                _ => Err(format!("{pod:?} is not the name of a pod; write NAMESPACE/NAME")),
            },
            Field::Uid(UidField { pod_uid }) => match pod_uid.split_once("{}") {
                Some((before, after)) if before.starts_with('/') && !after.contains("{}") => {
                    Ok(Self::PathUid(before.to_owned(), after.to_owned()))
                }
                _ => Err(format!(
                    "{pod_uid:?} has no UID; write the path of the socket with {{}} in place of the pod's UID"
                )),
            },
        }
    }
}

impl PolicyOf {
    /// Pods whose network policies a client gets.
    ///
    /// # Errors
    /// None, or the client has no pod or node: the reason, and what the view gives it with the remedy.
    pub(super) fn of(&self, peer: &PeerAddress, identity: &Identity) -> Result<PolicyClient, (Reason, &'static str)> {
        match self {
            Self::Own => own_pod(identity).ok_or((
                Reason::NoPod,
                "its own pod's network policy, but its credentials are bound to no pod; use a token that is bound to \
                 the pod, or write `policy: {pod: NAMESPACE/NAME}`, `policy: {podUID: PATH}` or `policy: node` in the \
                 view",
            )),
            Self::Node => identity.node_name.clone().map(PolicyClient::Node).ok_or((
                Reason::NoPod,
                "the network policies of its node's pods, but its credentials name no node; use a token that is bound \
                 to a node or to a pod, or a kubelet's certificate",
            )),
            Self::None => Err((Reason::NoPolicy, "no network policy; write `policy: own` in the view")),
            Self::Pod(namespace, name) => {
                Ok(PolicyClient::Pod { namespace: namespace.clone(), name: name.clone(), uid: None })
            }
            Self::PathUid(before, after) => {
                let path = if let PeerAddress::Unix(path) = peer { path.to_str() } else { None };
                let uid = path.and_then(|path| path.strip_prefix(&**before)?.strip_suffix(&**after));
                let uid = uid.filter(|uid| !uid.is_empty() && !uid.contains('/'));
                uid.map(|uid| PolicyClient::Uid(uid.to_owned()))
                    .ok_or((Reason::NoPod, "the policy of the pod whose UID is in its socket's path, which has none"))
            }
        }
    }
}

/// The pod that credentials are bound to.
fn own_pod(identity: &Identity) -> Option<PolicyClient> {
    let Identity { namespace, pod_name, pod_uid, .. } = identity;
    Some(PolicyClient::Pod { namespace: namespace.clone()?, name: pod_name.clone()?, uid: Some(pod_uid.clone()?) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Source, Views};

    fn identity() -> Identity {
        let mut identity =
            Identity::new("system:serviceaccount:shop:web".to_owned(), Vec::new(), Source::Token).unwrap();
        identity.pod_name = Some("web-0".to_owned());
        identity.pod_uid = Some("u-0".to_owned());
        identity.node_name = Some("node-1".to_owned());
        identity
    }

    fn views(policy: &str) -> Views {
        let clients = "{usernames: ['*'], unixPaths: ['/run/*']}";
        let text = format!("views: [{{name: v, match: {clients}, namespaces: [own], policy: {policy}}}]");
        Views::parse("views.yaml", &text).unwrap()
    }

    #[test]
    fn a_client_gets_the_policy_that_its_view_says() {
        let tcp = PeerAddress::Vsock { cid: 3 };
        let own =
            PolicyClient::Pod { namespace: "shop".to_owned(), name: "web-0".to_owned(), uid: Some("u-0".to_owned()) };
        for (views, expected) in [
            (Views::everything(), Ok(own.clone())),
            (views("own"), Ok(own)),
            (views("node"), Ok(PolicyClient::Node("node-1".to_owned()))),
            (views("none"), Err(Reason::NoPolicy)),
            (
                views("{pod: shop/db}"),
                Ok(PolicyClient::Pod { namespace: "shop".to_owned(), name: "db".to_owned(), uid: None }),
            ),
            (views("{podUID: '/run/{}/v.sock'}"), Err(Reason::NoPod)),
        ] {
            let policy = views.policy(&tcp, &identity());
            assert_eq!(policy.map_err(|refusal| refusal.reason()), expected);
        }
        let socket = |path: &str| PeerAddress::Unix(std::path::Path::new(path).into());
        let of_path = |path: &str| views("{podUID: '/run/{}/v.sock'}").policy(&socket(path), &identity()).ok();
        assert_eq!(of_path("/run/u-7/v.sock"), Some(PolicyClient::Uid("u-7".to_owned())));
        assert_eq!([of_path("/run//v.sock"), of_path("/run/a/b/v.sock"), of_path("/tmp/u/v.sock")], [None, None, None]);
    }

    #[test]
    fn a_token_that_is_bound_to_no_pod_gets_a_remedy() {
        let mut unbound = identity();
        unbound.pod_uid = None;
        let refusal = Views::everything().policy(&PeerAddress::Vsock { cid: 3 }, &unbound).unwrap_err();
        assert_eq!((refusal.reason(), refusal.status()), (Reason::NoPod, 403));
        assert!(refusal.message().contains("use a token that is bound to the pod"), "{}", refusal.message());
    }

    #[test]
    fn a_wrong_policy_is_named() {
        for (policy, error) in [
            ("all", "\"all\" is neither"),
            ("{pod: web}", "\"web\" is not the name of a pod"),
            ("{podUID: '/run/v.sock'}", "has no UID"),
            ("{node: a}", "expected `own`"),
        ] {
            let text = format!("views: [{{name: v, match: {{usernames: ['*']}}, namespaces: all, policy: {policy}}}]");
            let message = Views::parse("views.yaml", &text).unwrap_err().to_string();
            assert!(message.contains(error), "{message}");
        }
    }
}
