//! Requests of clients: paths and parameters as the API server reads them.

use crate::{
    kind::{Kind, served_kinds},
    selector::{Selector, SelectorError},
    wire::Status,
};

/// Longest path and query.
const TARGET_BYTES_MAX: usize = 16 << 10;

/// Request for objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRequest {
    /// Kind of the objects.
    pub kind: Kind,
    /// Namespace in the path; `None`: all.
    pub namespace: Option<String>,
    /// Operation.
    pub operation: Operation,
}

/// Operation on objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// One object.
    Get(String),
    /// All objects that are selected.
    List(ListParameters),
    /// Changes of those objects.
    Watch(WatchParameters),
}

/// Parameters of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListParameters {
    /// Selected objects.
    pub selector: Selector,
    /// Version of the list.
    pub version: VersionWish,
}

/// Version that a client wants a list at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VersionWish {
    /// The latest.
    #[default]
    Latest,
    /// Any.
    Any,
    /// This one or a later one.
    NotOlderThan(u64),
    /// This one.
    Exact(u64),
}

/// Parameters of a watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchParameters {
    /// Selected objects.
    pub selector: Selector,
    /// Version after which it begins; `None`: with the present objects as events.
    pub version: Option<u64>,
    /// The objects come as events first, not older than the version.
    pub sends_initial_events: bool,
    /// They come, and the client wants bookmarks, one of which ends them.
    pub marks_end: bool,
    /// The client wants bookmarks.
    pub wants_bookmarks: bool,
    /// Time after which it ends; `None`: the relay decides.
    pub timeout_seconds: Option<u64>,
}

/// Target of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Objects.
    Objects(ObjectRequest),
    /// The document about the API at this path, if there is one.
    Discovery(String),
    /// Health of the relay.
    Health(&'static str),
    /// Version of the API server.
    Version,
}

/// Paths of health checks.
const HEALTH: [&str; 3] = ["/healthz", "/livez", "/readyz"];

/// Parses a target: path and query. `has_policies`: the kinds of policies are served, too.
///
/// # Errors
/// There is nothing at the path, or a parameter is invalid.
pub fn parse(path: &str, query: &str, has_policies: bool) -> Result<Target, Status> {
    if path.len() + query.len() > TARGET_BYTES_MAX {
        return Err(Status::new(414, "RequestURITooLong", "the request URI is too long"));
    }
    let path = if path.len() > 1 { path.trim_end_matches('/') } else { path };
    if path == "/version" {
        return Ok(Target::Version);
    }
    if let Some(path) = HEALTH.into_iter().find(|other| *other == path) {
        return Ok(Target::Health(path));
    }
    if is_discovery(path) {
        return Ok(Target::Discovery(path.to_owned()));
    }
    let (kind, namespace, name) = objects(path, has_policies).ok_or_else(|| {
        // The same path where policies are served.
        if !has_policies && objects(path, true).is_some() { no_policies() } else { not_found() }
    })?;
    let operation = match name {
        Some(name) => Operation::Get(name.to_owned()),
        None => collection_operation(kind, query)?,
    };
    Ok(Target::Objects(ObjectRequest { kind, namespace: namespace.map(str::to_owned), operation }))
}

/// Error of a path at which there is nothing.
#[must_use]
pub fn not_found() -> Status {
    Status::new(404, "NotFound", "the server could not find the requested resource")
}

/// Error of a kind that this relay does not serve.
fn no_policies() -> Status {
    Status::new(404, "NotFound", "this relay has no policies of pods: it runs without --policies")
}

/// Whether documents about the API have such paths.
fn is_discovery(path: &str) -> bool {
    match path.trim_start_matches('/').split('/').collect::<Vec<_>>()[..] {
        ["api"] | ["api", _] | ["apis"] | ["apis", _] | ["apis", _, _] => true,
        _ => path == "/openapi/v2",
    }
}

/// Kind, namespace and name in a path. Names in Kubernetes need no percent-encoding.
fn objects(path: &str, has_policies: bool) -> Option<(Kind, Option<&str>, Option<&str>)> {
    let mut parts = path.strip_prefix('/')?.splitn(8, '/');
    let group = match parts.next()? {
        "api" => "",
        "apis" => parts.next().filter(|group| !group.is_empty())?,
        _ => return None,
    };
    let version = parts.next()?;
    let rest: Vec<&str> = parts.collect();
    let (namespace, resource, name) = match *rest.as_slice() {
        ["namespaces", namespace, resource] => (Some(namespace), resource, None),
        ["namespaces", namespace, resource, name] => (Some(namespace), resource, Some(name)),
        [resource] => (None, resource, None),
        [resource, name] => (None, resource, Some(name)),
        _ => return None,
    };
    let is_named = |kind: &Kind| (kind.group(), kind.version(), kind.plural()) == (group, version, resource);
    let kind = served_kinds(has_policies).find(is_named)?;
    let has_names = namespace.is_none_or(|namespace| !namespace.is_empty()) && name.is_none_or(|name| !name.is_empty());
    // An object has a namespace exactly if its kind has.
    let is_scoped = if kind.is_namespaced() { name.is_none() || namespace.is_some() } else { namespace.is_none() };
    (has_names && is_scoped).then_some((kind, namespace, name))
}

/// Parameters of a query, decoded.
#[derive(Default)]
struct Parameters {
    watch: bool,
    resource_version: Option<String>,
    version_match: Option<String>,
    labels: String,
    fields: String,
    wants_bookmarks: bool,
    sends_initial_events: bool,
    timeout_seconds: Option<u64>,
    has_continue: bool,
}

fn collection_operation(kind: Kind, query: &str) -> Result<Operation, Status> {
    let parameters = Parameters::parse(query)?;
    if parameters.has_continue {
        let message = "the relay does not page lists: there is no continue token";
        return Err(Status::new(410, "Expired", message));
    }
    let selector = selector(kind, &parameters.labels, &parameters.fields)?;
    let version = parameters.resource_version.as_deref().filter(|version| !version.is_empty());
    let version = version.map(parse_version).transpose()?;
    if parameters.watch {
        return watch(parameters, selector, version).map(Operation::Watch);
    }
    if parameters.sends_initial_events {
        return Err(invalid("sendInitialEvents is forbidden for list"));
    }
    let version = match (version, parameters.version_match.as_deref()) {
        (None, None) => VersionWish::Latest,
        (None, Some(_)) => {
            return Err(invalid("resourceVersionMatch is forbidden unless resourceVersion is provided"));
        }
        (Some(0), None | Some("NotOlderThan")) => VersionWish::Any,
        (Some(version), None | Some("NotOlderThan")) => VersionWish::NotOlderThan(version),
        (Some(version), Some("Exact")) if version > 0 => VersionWish::Exact(version),
        (Some(_), Some(other)) => return Err(unknown_match(other)),
    };
    Ok(Operation::List(ListParameters { selector, version }))
}

/// Rules of apimachinery/pkg/apis/meta/internalversion/validation/validation.go 1.36.
fn watch(parameters: Parameters, selector: Selector, version: Option<u64>) -> Result<WatchParameters, Status> {
    match (parameters.sends_initial_events, parameters.version_match.as_deref()) {
        (true, Some("NotOlderThan")) | (false, None) => {}
        (true, Some(other)) => return Err(unknown_match(other)),
        (true, None) => {
            return Err(invalid("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"));
        }
        (false, Some(_)) => {
            return Err(invalid("resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"));
        }
    }
    let sends_initial_events = parameters.sends_initial_events || version.is_none_or(|version| version == 0);
    Ok(WatchParameters {
        selector,
        version: version.filter(|version| *version > 0),
        sends_initial_events,
        // Also without `sendInitialEvents` (apimachinery/pkg/apis/meta/internalversion/defaults.go 1.36).
        marks_end: sends_initial_events && parameters.wants_bookmarks,
        wants_bookmarks: parameters.wants_bookmarks,
        timeout_seconds: parameters.timeout_seconds,
    })
}

/// Selector of a request, without what all objects of the relay have.
fn selector(kind: Kind, labels: &str, fields: &str) -> Result<Selector, Status> {
    let refused = |error: SelectorError| bad_request(error.to_string());
    let selector = Selector::parse(kind, labels, fields).map_err(refused)?;
    let known = upstream_selectors(kind);
    let known = Selector::parse(kind, known.0, known.1).map_err(refused)?;
    Ok(selector.beyond(&known))
}

/// Label and field selector with which the relay follows a kind.
#[must_use]
pub fn upstream_selectors(kind: Kind) -> (&'static str, &'static str) {
    let selectors = match kind {
        Kind::Services => cproxy_wire::SERVICES,
        Kind::EndpointSlices => cproxy_wire::ENDPOINT_SLICES,
        Kind::Nodes | Kind::PodPolicies | Kind::AddressSlices => return ("", ""),
    };
    (selectors.labels, selectors.fields.text())
}

impl Parameters {
    fn parse(query: &str) -> Result<Self, Status> {
        let mut parameters = Self::default();
        // Of several with one name, the first counts.
        for pair in query.rsplit('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value).ok_or_else(|| bad_request(format!("parameter {name:?} is not UTF-8")))?;
            parameters.set(name, value)?;
        }
        Ok(parameters)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), Status> {
        match name {
            "watch" => self.watch = is_true(&value),
            "resourceVersion" => self.resource_version = Some(value),
            "resourceVersionMatch" => self.version_match = Some(value).filter(|value| !value.is_empty()),
            "labelSelector" => self.labels = value,
            "fieldSelector" => self.fields = value,
            "allowWatchBookmarks" => self.wants_bookmarks = is_true(&value),
            "sendInitialEvents" => self.sends_initial_events = is_true(&value),
            "continue" => self.has_continue = !value.is_empty(),
            "timeoutSeconds" => {
                let seconds =
                    value.parse().map_err(|_| bad_request(format!("timeoutSeconds {value:?} is no number")))?;
                self.timeout_seconds = Some(seconds);
            }
            // A list is never paged.
            "limit" => {
                value.parse::<i64>().map_err(|_| bad_request(format!("limit {value:?} is no number")))?;
            }
            // Others, such as pretty, change nothing here.
            _ => {}
        }
        Ok(())
    }
}

/// Boolean parameter. Any text but these two is true, also an empty one: `Convert_Slice_string_To_bool` in
/// apimachinery/pkg/runtime/conversion.go 1.36.
fn is_true(value: &str) -> bool {
    !matches!(value.to_ascii_lowercase().as_str(), "false" | "0")
}

fn parse_version(text: &str) -> Result<u64, Status> {
    text.parse().map_err(|_| {
        let text: String = text.chars().take(64).collect();
        bad_request(format!("resourceVersion: Invalid value: {text:?}: it must be a number"))
    })
}

fn unknown_match(text: &str) -> Status {
    let text: String = text.chars().take(64).collect();
    invalid(format!("resourceVersionMatch: Unsupported value: {text:?}"))
}

/// Error of parameters that contradict each other, as the API server has it.
fn invalid(message: impl Into<String>) -> Status {
    Status {
        object: Some(Box::new((String::new(), "meta.k8s.io", "ListOptions"))),
        ..Status::new(422, "Invalid", message)
    }
}

fn bad_request(message: impl Into<String>) -> Status {
    Status::new(400, "BadRequest", message)
}

/// Decodes percent-encoding and plus signs; `None` if the result is not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
                u8::try_from(high << 4 | low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects_at(path: &str, query: &str) -> ObjectRequest {
        match parse(path, query, true) {
            Ok(Target::Objects(request)) => request,
            other => panic!("{path}?{query}: {other:?}"),
        }
    }

    fn list(query: &str) -> ListParameters {
        match objects_at("/api/v1/services", query).operation {
            Operation::List(parameters) => parameters,
            other => panic!("{query}: {other:?}"),
        }
    }

    fn watch(query: &str) -> WatchParameters {
        match objects_at("/api/v1/services", &format!("watch=true&{query}")).operation {
            Operation::Watch(parameters) => parameters,
            other => panic!("{query}: {other:?}"),
        }
    }

    fn code(path: &str, query: &str) -> u16 {
        parse(path, query, false).unwrap_err().code
    }

    #[test]
    fn a_path_names_kind_namespace_and_object() {
        let of = |path| {
            let ObjectRequest { kind, namespace, operation } = objects_at(path, "");
            let name = if let Operation::Get(name) = operation { Some(name) } else { None };
            (kind, namespace, name)
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(of("/api/v1/services"), (Kind::Services, None, None));
        assert_eq!(of("/api/v1/nodes/a/"), (Kind::Nodes, None, text("a")));
        let slices = "/apis/discovery.k8s.io/v1/namespaces/a/endpointslices";
        assert_eq!(of(slices), (Kind::EndpointSlices, text("a"), None));
        assert_eq!(of(&format!("{slices}/b")), (Kind::EndpointSlices, text("a"), text("b")));
        for path in [
            "/",
            "",
            "/api/v1/pods",
            "/apis/discovery.k8s.io/v1/services",
            "/api/v1/endpointslices",
            "/api/v2/services",
            "/api/v1/namespaces/a/nodes",
            "/api/v1/namespaces//services",
            "/api/v1/namespaces/a/services/b/status",
            "/api/v1/services/a",
            "/api/v1/namespaces",
            "/api/v1/watch/services",
            "/apis/apps/v1/deployments",
        ] {
            assert_eq!(code(path, ""), 404, "{path}");
        }
        assert_eq!(code(&"/a".repeat(9000), ""), 414);
    }

    #[test]
    fn parameters_of_a_list_are_read_as_the_api_server_reads_them() {
        assert_eq!(list("").version, VersionWish::Latest);
        assert_eq!(list("resourceVersion=0&limit=500").version, VersionWish::Any);
        assert_eq!(list("resourceVersion=7").version, VersionWish::NotOlderThan(7));
        assert_eq!(list("resourceVersion=7&resourceVersionMatch=Exact").version, VersionWish::Exact(7));
        assert!(
            list("labelSelector=%21service.kubernetes.io%2Fservice-proxy-name&fieldSelector=spec.clusterIP!%3DNone")
                .selector
                .is_everything()
        );
        assert_eq!(list("resourceVersion=7&resourceVersion=8").version, VersionWish::NotOlderThan(7));
        assert_eq!(list("fieldSelector=metadata.name%3Dweb").selector.name(), Some("web"));
        for query in [
            "resourceVersionMatch=Exact",
            "resourceVersion=0&resourceVersionMatch=Exact",
            "resourceVersion=7&resourceVersionMatch=Never",
            "sendInitialEvents=true",
        ] {
            assert_eq!(code("/api/v1/services", query), 422, "{query}");
        }
        for query in [
            "resourceVersion=x",
            "limit=x",
            "labelSelector=a%20b",
            "labelSelector=-a",
            "labelSelector=a%3Db-",
            "labelSelector=A/a",
            "labelSelector=a/b/c",
            "fieldSelector=spec.x%3D1",
            "timeoutSeconds=x",
            "labelSelector=%ff",
            "labelSelector=%f",
            "labelSelector=%+f",
        ] {
            assert_eq!(code("/api/v1/services", query), 400, "{query}");
        }
        assert_eq!(code("/api/v1/services", "continue=abc"), 410);
    }

    #[test]
    fn parameters_of_a_watch_are_read_as_the_api_server_reads_them() {
        let parameters = watch("resourceVersion=7&allowWatchBookmarks=true&timeoutSeconds=9");
        let expected = WatchParameters {
            version: Some(7),
            wants_bookmarks: true,
            timeout_seconds: Some(9),
            ..WatchParameters::default()
        };
        assert_eq!(parameters, expected);
        for query in ["", "resourceVersion=0", "sendInitialEvents=true&resourceVersionMatch=NotOlderThan"] {
            assert!(watch(query).sends_initial_events && watch(query).version.is_none(), "{query}");
        }
        let ends = |query| watch(&format!("{query}&allowWatchBookmarks=true")).marks_end;
        for query in ["", "resourceVersion=0", "sendInitialEvents=true&resourceVersionMatch=NotOlderThan"] {
            assert!(ends(query) && !watch(query).marks_end, "{query}");
        }
        assert!(!ends("resourceVersion=7"));
        for query in [
            "resourceVersionMatch=NotOlderThan",
            "sendInitialEvents=true",
            "sendInitialEvents=1&resourceVersionMatch=Exact",
        ] {
            assert_eq!(code("/api/v1/services", &format!("watch=1&{query}")), 422, "{query}");
        }
    }

    #[test]
    fn every_boolean_but_false_and_0_is_true_as_at_the_api_server() {
        let is_watch = |query| matches!(objects_at("/api/v1/services", query).operation, Operation::Watch(_));
        for query in ["watch=true", "watch=1", "watch=", "watch", "watch=maybe", "watch=00", "watch=1&watch=0"] {
            assert!(is_watch(query), "{query}");
        }
        for query in ["", "watch=false", "watch=False", "watch=0", "watch=0&watch=1", "Watch=true"] {
            assert!(!is_watch(query), "{query}");
        }
    }

    #[test]
    fn documents_about_the_api_have_paths() {
        for path in ["/api", "/apis", "/api/v1", "/apis/discovery.k8s.io", "/apis/discovery.k8s.io/v1", "/openapi/v2"] {
            assert_eq!(parse(path, "", false), Ok(Target::Discovery(path.to_owned())));
        }
    }

    #[test]
    fn policies_have_paths_where_they_are_served() {
        let group = "/apis/policy.cproxy.dev/v1alpha1";
        let own = objects_at(&format!("{group}/namespaces/shop/podpolicies/web-0"), "");
        assert_eq!((own.kind, own.namespace.as_deref()), (Kind::PodPolicies, Some("shop")));
        assert_eq!(objects_at(&format!("{group}/addressslices/a-1-0"), "").kind, Kind::AddressSlices);
        for path in [
            "podpolicies/web-0",
            "namespaces/shop/addressslices",
            "namespaces/shop/podpolicies/web-0/status",
            "namespaces//podpolicies/web-0",
            "pods",
        ] {
            let path = format!("{group}/{path}");
            assert_eq!(parse(&path, "", true).unwrap_err().code, 404, "{path}");
        }
        assert_eq!(code(&format!("{group}/podpolicies"), ""), 404, "they are not served");
    }
}
