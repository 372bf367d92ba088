//! Known differences between cproxy and kube-proxy, with reasons. Everything else must be the same.
//!
//! A wanted difference is declared here as a predicate like the ones below, which `compare.rs` consults, and described
//! in the table of docs/semantics.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use cproxy_tests::control_plane::NODE;
use serde_json::Value;

use crate::{
    api::{full_name, kind, name, service_of},
    frontends::{Frontend, Row},
    universe::Change,
};

/// Whether the port is SCTP, which socket hooks do not see: cproxy skips such ports and says so.
pub(crate) fn is_out_of_reach(frontend: &Frontend) -> bool {
    frontend.protocol == "SCTP"
}

/// Addresses that are a Service's ClusterIP and another's external address. kube-proxy serves both, and takes any of
/// two claims on one port. In cproxy the ClusterIP takes no other claim (CVE-2020-8554).
pub(crate) struct TakenClusterIps(BTreeSet<IpAddr>);

impl TakenClusterIps {
    pub(crate) fn find(objects: &[Value]) -> Self {
        let services = || objects.iter().filter(|object| kind(object) == "Service");
        let of = |service: &Value, at: &str| -> BTreeSet<IpAddr> {
            let texts = service["spec"][at].as_array().into_iter().flatten();
            texts.filter_map(|text| text.as_str()?.parse().ok()).collect()
        };
        let mut taken = BTreeSet::new();
        for service in services() {
            let others = services().filter(|other| full_name(other) != full_name(service));
            let claimed = others.flat_map(|other| of(other, "externalIPs")).collect();
            taken.extend(&of(service, "clusterIPs") & &claimed);
        }
        Self(taken)
    }

    /// Whether kube-proxy may serve this frontend for another Service, and cproxy does as it should: the frontend is
    /// the ClusterIP's, or there is none.
    pub(crate) fn contains(&self, frontend: &Frontend, found: [Option<&Row>; 2]) -> bool {
        self.0.contains(&frontend.address.ip()) && found.iter().flatten().all(|row| row.source == "ClusterIP")
    }
}

/// Whether a slice has changed its label. A kube-proxy that has seen both labels also keeps the slice for its former
/// Service: nothing removes it from that Service's cache (pkg/proxy/endpointslicecache.go, `updatePending`, uses the
/// new label alone). cproxy uses the current label, as does a kube-proxy that has just started.
pub(crate) fn is_half_seen(change: &Change) -> bool {
    change.leaves_service()
}

/// A Service's port in one family: the Service, the port's name, its protocol, the slices' address type.
type ServicePort = (String, String, String, String);

/// Endpoints by slice, in the slice's order.
type BySlice<'o> = BTreeMap<&'o str, Vec<&'o Value>>;

/// Service ports with the same endpoint address and port in several slices, but in different states. kube-proxy uses
/// the slice that it happens to see last (pkg/proxy/endpointslicecache.go, `addEndpoints`: "the result is undefined");
/// cproxy uses the order of the slices' names.
pub(crate) struct Undefined(BTreeSet<ServicePort>);

impl Undefined {
    pub(crate) fn find(objects: &[Value]) -> Self {
        let mut service_ports = BTreeMap::<ServicePort, BTreeMap<String, BySlice<'_>>>::new();
        for slice in objects.iter().filter(|object| kind(object) == "EndpointSlice") {
            let is_headless = slice["metadata"]["labels"]["service.kubernetes.io/headless"].is_string();
            for port in slice["ports"].as_array().into_iter().flatten().filter(|_| !is_headless) {
                let backends = service_ports.entry(service_port(slice, port)).or_default();
                for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
                    let backend = format!("{} {}", endpoint["addresses"][0], port["port"]);
                    backends.entry(backend).or_default().entry(name(slice)).or_default().push(endpoint);
                }
            }
        }
        service_ports.retain(|_, backends| backends.values().any(depends_on_order));
        Self(service_ports.into_keys().collect())
    }

    /// Whether kube-proxy may use other backends for a frontend.
    pub(crate) fn contains(&self, frontend: &Frontend, row: &Row) -> bool {
        let family = if frontend.address.is_ipv4() { "IPv4" } else { "IPv6" };
        self.0.contains(&(row.service.clone(), row.port_name.clone(), frontend.protocol.clone(), family.to_owned()))
    }
}

fn service_port(slice: &Value, port: &Value) -> ServicePort {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (service_of(slice), text(&port["name"]), text(&port["protocol"]), text(&slice["addressType"]))
}

/// Whether the order of the slices matters. Within a slice the last endpoint that is not terminating counts, and any
/// such endpoint comes before terminating ones.
fn depends_on_order(by_slice: &BySlice<'_>) -> bool {
    let is_terminating = |endpoint: &Value| endpoint["conditions"]["terminating"] == true;
    let of_slice = |endpoints: &Vec<&Value>| {
        let running = endpoints.iter().rev().find(|endpoint| !is_terminating(endpoint));
        state(running.unwrap_or(&endpoints[0]))
    };
    let states = by_slice.values().map(of_slice).collect::<BTreeSet<_>>();
    let running = states.iter().filter(|state| !state.terminating).count();
    if running > 0 { running > 1 } else { states.len() > 1 }
}

/// State of an endpoint besides its address.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct State {
    ready: bool,
    serving: bool,
    terminating: bool,
    is_local: bool,
    zones: BTreeSet<String>,
    nodes: BTreeSet<String>,
}

fn state(endpoint: &Value) -> State {
    let names = |hints: &Value| hints.as_array().into_iter().flatten().map(|hint| hint["name"].to_string()).collect();
    State {
        ready: endpoint["conditions"]["ready"] != false,
        serving: endpoint["conditions"]["serving"] != false,
        terminating: endpoint["conditions"]["terminating"] == true,
        is_local: endpoint["nodeName"] == NODE,
        zones: names(&endpoint["hints"]["forZones"]),
        nodes: names(&endpoint["hints"]["forNodes"]),
    }
}
