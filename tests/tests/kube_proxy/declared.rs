//! Where cproxy and kube-proxy are known to differ, and why. Whatever is not here must be the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use cproxy_tests::control_plane::NODE;
use serde_json::Value;

use crate::{
    api::{kind, name, service_of},
    frontends::{Frontend, Row},
    universe::Change,
};

/// SCTP is nothing that socket hooks see: cproxy skips such ports and says so.
pub(crate) fn is_out_of_reach(frontend: &Frontend) -> bool {
    frontend.protocol == "SCTP"
}

/// A ClusterIP all of whose ports are SCTP has no entry in cproxy's table, so that it refuses nothing on its other
/// ports: the network says what comes of a connection there.
pub(crate) fn has_no_port_in_reach(cluster_ip: IpAddr, frontends: &BTreeSet<Frontend>) -> bool {
    frontends.iter().filter(|frontend| frontend.address.ip() == cluster_ip).all(is_out_of_reach)
}

/// A slice that gets another label stays with its former Service, too, for a kube-proxy that has seen both labels:
/// nothing takes it out of the former's cache (pkg/proxy/endpointslicecache.go, `updatePending`, goes by the new label
/// alone). cproxy goes by what the label says now, as does a kube-proxy that has just started.
pub(crate) fn is_half_seen(change: &Change) -> bool {
    change.leaves_service()
}

/// A Service's port in one family: the Service, the port's name, its protocol, the slices' address type.
type ServicePort = (String, String, String, String);

/// Endpoints by slice, in the slice's order.
type BySlice<'o> = BTreeMap<&'o str, Vec<&'o Value>>;

/// Service ports that have an endpoint in several slices, under the same address and port but not in the same state.
/// kube-proxy believes the slice that it happens to see last (pkg/proxy/endpointslicecache.go, `addEndpoints`: "the
/// result is undefined"); cproxy goes by the slices' names.
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

    /// Whether kube-proxy may send a frontend's connections elsewhere.
    pub(crate) fn contains(&self, frontend: &Frontend, row: &Row) -> bool {
        let family = if frontend.address.is_ipv4() { "IPv4" } else { "IPv6" };
        self.0.contains(&(row.service.clone(), row.port_name.clone(), frontend.protocol.clone(), family.to_owned()))
    }
}

fn service_port(slice: &Value, port: &Value) -> ServicePort {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (service_of(slice), text(&port["name"]), text(&port["protocol"]), text(&slice["addressType"]))
}

/// Whether it matters which slice is seen last. In a slice the last endpoint that is not terminating counts, and any
/// such comes before those that are.
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

/// All that matters of an endpoint beside its address.
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
