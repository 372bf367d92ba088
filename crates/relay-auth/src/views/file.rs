//! The file of views, YAML or JSON.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use cproxy_core::ServiceName;
use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

use super::{
    names::{is_label, is_subdomain},
    pattern::{CidRange, PathPattern, Pattern},
    policy::PolicyOf,
    view::Namespaces,
};
use crate::{Identity, PeerAddress, Source, review::short};

/// Largest file.
const FILE_BYTES_MAX: usize = 4 << 20;
/// Most Services that every client sees.
const SERVICES_MAX: usize = 64;

const NO_VIEW: &str =
    "there is no view, so every client would be refused; add one to `views`, or write `default: everything`";

/// Error in a file of views: one line that names file, place and remedy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{file}: {message}")]
pub struct ViewsError {
    file: String,
    message: String,
}

/// Content of a file of views.
#[derive(Debug, Deserialize)]
#[serde(try_from = "FileFields")]
pub(super) struct File {
    /// Whether a client that matches no view sees everything.
    pub(super) shows_everything: bool,
    /// Services that every client sees.
    pub(super) always_shown: Arc<BTreeSet<ServiceName>>,
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileFields {
    #[serde(default)]
    default: Unmatched,
    dns: Option<Vec<NamedService>>,
    #[serde(default)]
    views: Vec<Entry>,
}

/// Treatment of a client that matches no view.
#[derive(Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unmatched {
    #[default]
    Refuse,
    Everything,
}

/// One view of the file.
#[derive(Debug, Deserialize)]
#[serde(try_from = "EntryFields")]
pub(super) struct Entry {
    pub(super) name: String,
    clients: Clients,
    /// Namespaces, except the client's own.
    pub(super) namespaces: Namespaces,
    /// Whether the namespace of the client's ServiceAccount is shown.
    pub(super) shows_own_namespace: bool,
    /// The only Node that is shown; `None`: the one that the identity names.
    pub(super) node: Option<String>,
    /// Pods whose network policies the client gets.
    pub(super) policy: PolicyOf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryFields {
    name: String,
    #[serde(rename = "match")]
    clients: Clients,
    namespaces: NamespacesField,
    node: Option<NodeName>,
    #[serde(default)]
    policy: PolicyOf,
}

/// Clients that a view is for: those that match any of the patterns.
#[derive(Debug, Deserialize)]
#[serde(try_from = "ClientsFields")]
struct Clients(ClientsFields);

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct ClientsFields {
    usernames: Vec<Pattern>,
    groups: Vec<Pattern>,
    #[serde(rename = "vsockCIDs")]
    vsock_cids: Vec<CidRange>,
    unix_paths: Vec<PathPattern>,
}

impl File {
    /// File that shows everything to all.
    pub(super) fn everything() -> Self {
        Self { shows_everything: true, always_shown: Arc::default(), entries: Vec::new() }
    }

    pub(super) fn parse(file: &str, text: &str) -> Result<Self, ViewsError> {
        let error = |message| ViewsError { file: file.to_owned(), message };
        if text.len() > FILE_BYTES_MAX {
            return Err(error(format!("{} bytes; at most {FILE_BYTES_MAX} are read", text.len())));
        }
        // JSON is YAML too, except for some escapes.
        let json = text.trim_start().starts_with('{').then(|| serde_json::from_str(text).ok()).flatten();
        json.map_or_else(|| from_yaml(text).map_err(error), Ok)
    }

    /// First view that is for the client.
    pub(super) fn entry(&self, peer: &PeerAddress, identity: &Identity) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.clients.contain(peer, identity))
    }
}

fn from_yaml(text: &str) -> Result<File, String> {
    let mut path = String::new();
    let read = |deserializer: serde_saphyr::Deserializer<'_, '_>| {
        serde_path_to_error::deserialize(deserializer).map_err(|error| {
            path = error.path().to_string();
            error.into_inner()
        })
    };
    let file = serde_saphyr::with_deserializer_from_str_with_options(text, cproxy_yaml::options(), read);
    file.map_err(|error| message(&error, &path))
}

/// An error with its place first, as one line.
fn message(error: &serde_saphyr::Error, path: &str) -> String {
    if matches!(error, serde_saphyr::Error::Eof { .. }) {
        return NO_VIEW.to_owned();
    }
    let location = error.location().map(|location| format!("line {}, column {}: ", location.line(), location.column()));
    let path = if matches!(path, "" | "." | "?") { String::new() } else { format!("{}: ", short(path)) };
    let message = error.render_with_formatter(&serde_saphyr::UserMessageFormatter.with_localizer(&PlaceFirst));
    let message = match message.lines().next() {
        Some("expected sequence start") => "expected a list, such as [x]",
        message => message.unwrap_or("not YAML"),
    };
    format!("{}{path}{message}", location.unwrap_or_default())
}

/// Leaves the place out of the parser's messages.
struct PlaceFirst;

impl serde_saphyr::localizer::Localizer for PlaceFirst {
    fn attach_location<'a>(&self, base: Cow<'a, str>, _: serde_saphyr::Location) -> Cow<'a, str> {
        base
    }
}

impl TryFrom<FileFields> for File {
    type Error = String;

    fn try_from(FileFields { default, dns, views }: FileFields) -> Result<Self, String> {
        let shows_everything = default == Unmatched::Everything;
        if views.is_empty() && !shows_everything {
            return Err(NO_VIEW.to_owned());
        }
        let mut places = BTreeMap::new();
        for (index, view) in views.iter().enumerate() {
            if let Some(first) = places.insert(&view.name, index) {
                return Err(format!("views[{first}] and views[{index}] are both named {:?}; rename one", view.name));
            }
        }
        Ok(Self { shows_everything, always_shown: Arc::new(always_shown(dns)?), entries: views })
    }
}

/// Services that every pod needs.
fn always_shown(dns: Option<Vec<NamedService>>) -> Result<BTreeSet<ServiceName>, String> {
    let dns = dns.unwrap_or_else(|| vec![NamedService(ServiceName::new("kube-system", "kube-dns"))]);
    if dns.len() > SERVICES_MAX {
        return Err(format!("dns: {} Services; at most {SERVICES_MAX} are allowed", dns.len()));
    }
    let api_server = ServiceName::new("default", "kubernetes");
    Ok(dns.into_iter().map(|service| service.0).chain([api_server]).collect())
}

impl TryFrom<EntryFields> for Entry {
    type Error = String;

    fn try_from(EntryFields { name, clients, namespaces, node, policy }: EntryFields) -> Result<Self, String> {
        if name.is_empty() {
            return Err("the view's name is empty; log messages need one".to_owned());
        }
        let NamespacesField { namespaces, has_own } = namespaces;
        Ok(Self { name, clients, namespaces, shows_own_namespace: has_own, node: node.map(|node| node.0), policy })
    }
}

impl TryFrom<ClientsFields> for Clients {
    type Error = String;

    fn try_from(fields: ClientsFields) -> Result<Self, String> {
        let ClientsFields { usernames, groups, vsock_cids, unix_paths } = &fields;
        if usernames.is_empty() && groups.is_empty() && vsock_cids.is_empty() && unix_paths.is_empty() {
            return Err(
                "it has no pattern, so no client would match; add one to `usernames`, `groups`, `vsockCIDs` or \
                        `unixPaths`"
                    .to_owned(),
            );
        }
        Ok(Self(fields))
    }
}

impl Clients {
    fn contain(&self, peer: &PeerAddress, identity: &Identity) -> bool {
        let ClientsFields { usernames, groups, vsock_cids, unix_paths } = &self.0;
        let is_address = match peer {
            PeerAddress::Tcp(_) => false,
            PeerAddress::Vsock { cid } => vsock_cids.iter().any(|range| range.0.contains(cid)),
            PeerAddress::Unix(path) => {
                path.to_str().is_some_and(|path| unix_paths.iter().any(|pattern| pattern.0.matches(path)))
            }
        };
        // The name of a local peer without credentials is only its address.
        let has_user = identity.source != Source::Local;
        let is_user = || usernames.iter().any(|pattern| pattern.matches(&identity.username));
        let is_in_group = || identity.groups.iter().any(|group| groups.iter().any(|pattern| pattern.matches(group)));
        is_address || has_user && (is_user() || is_in_group())
    }
}

/// `NAMESPACE/NAME` of a Service.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct NamedService(ServiceName);

impl TryFrom<String> for NamedService {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if is_label(namespace) && is_label(name) => {
                Ok(Self(ServiceName::new(namespace, name)))
            }
            _ => Err(format!("{text:?} is not the name of a Service; write NAMESPACE/NAME")),
        }
    }
}

/// Name of a Node.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct NodeName(String);

impl TryFrom<String> for NodeName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if is_subdomain(&name) { Ok(Self(name)) } else { Err(format!("{name:?} is not the name of a Node")) }
    }
}

/// `all`, or a list of namespaces.
struct NamespacesField {
    namespaces: Namespaces,
    has_own: bool,
}

impl<'de> Deserialize<'de> for NamespacesField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NamespacesVisitor)
    }
}

struct NamespacesVisitor;

impl<'de> Visitor<'de> for NamespacesVisitor {
    type Value = NamespacesField;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`all`, or a list of namespaces such as [tenant-a, own]")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<NamespacesField, E> {
        if text == "all" {
            return Ok(NamespacesField { namespaces: Namespaces::All, has_own: false });
        }
        Err(E::custom(format!("{text:?} is neither `all` nor a list of namespaces; write [{text}] for one")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<NamespacesField, A::Error> {
        let (mut listed, mut has_own) = (BTreeSet::new(), false);
        while let Some(item) = items.next_element()? {
            match item {
                NamespaceItem::Own => has_own = true,
                NamespaceItem::Named(name) => drop(listed.insert(name)),
            }
        }
        Ok(NamespacesField { namespaces: Namespaces::Listed(Arc::new(listed)), has_own })
    }
}

/// Item of a list of namespaces.
#[derive(Deserialize)]
#[serde(try_from = "String")]
enum NamespaceItem {
    /// The namespace of the client's ServiceAccount.
    Own,
    Named(Arc<str>),
}

impl TryFrom<String> for NamespaceItem {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.as_str() {
            "own" => Ok(Self::Own),
            "all" => Err("`all` is not for a list; write `namespaces: all`".to_owned()),
            name if is_label(name) => Ok(Self::Named(name.into())),
            name => Err(format!("{name:?} is not the name of a namespace, and patterns are only for `match`")),
        }
    }
}
