//! Reasons why each endpoint of a Service gets connections or does not: the output of `cproxy resolve --explain` and
//! `cproxy explain`.
//!
//! `resolve` has the slices as the source sent them, so that it can explain unreadable endpoints too. An agent has only
//! the rows of its store.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Address, Backend, Family, Frontend, FrontendSource, ObjectName, Protocol, Row, Scope, ServiceName, ServicePort,
    ServiceRow, SliceRow, Store,
    desired::{desired_rows, may_claim},
    eligible::{Eligibility, FollowedHints, MergedEndpoints, Rule, SliceEndpoint, merged_endpoints},
    slice::{Endpoint, is_headless, parse_endpoint_address, service_label},
};
use crate::{
    api::{EndpointSlice, EndpointSpec},
    sorted::{sorted_map, sorted_set},
};

/// Number of endpoints after which [`explain_stored`] explains no further slice: who asks must not keep the agent from
/// its work.
const EXPLAINED_MAX: usize = 2_000;

/// Code of a node port that is not served, since no address of this node is known.
const NO_NODE_ADDRESS: &str = "no-node-address";

/// Flags that make an address of this node known.
const NODE_FLAGS: &str = "--node-name and its Node, or --node-ip";

/// Use of one endpoint of a slice for one Service port, as seen by some of its frontends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Name of the Service port.
    pub port_name: String,
    /// Protocol of the Service port; `None` if the explanation is about the whole slice.
    pub protocol: Option<Protocol>,
    /// Sources of the frontends that the explanation is about.
    pub sources: BTreeSet<FrontendSource>,
    /// address:port, or a text in its place.
    pub endpoint: String,
    /// Slice of the endpoint; `None` if the explanation is about all slices.
    pub slice: Option<ObjectName>,
    /// Connections that the endpoint gets.
    pub usage: Usage,
    /// Name of the rule that decided, for scripts.
    pub code: &'static str,
    /// Rule that decided.
    pub reason: String,
}

/// Connections that an endpoint gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// New connections.
    New,
    /// No new connections; it keeps those it has.
    Kept,
    /// No connections.
    Unused,
    /// It was not looked at.
    Unexplained,
}

impl Usage {
    /// Name in the output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::New => "yes",
            Self::Kept => "keeps",
            Self::Unused => "no",
            Self::Unexplained => "-",
        }
    }
}

/// Whether a slice's label names the Service.
#[must_use]
pub fn is_slice_of(slice: &EndpointSlice, service: &ServiceName) -> bool {
    let namespace = Some(&*slice.metadata.namespace).filter(|namespace| !namespace.is_empty());
    namespace.unwrap_or("default") == &*service.namespace && service_label(slice) == Some(&*service.name)
}

/// Owner of a frontend in the table; `None` if it is not in the table.
pub type OwnerOf<'a> = &'a dyn Fn(Frontend) -> Option<ServiceName>;

/// Explains every endpoint of those slices that belong to the Service; empty if the Service is not served.
#[must_use]
pub fn explain<'a>(
    store: &Store,
    owner_of: OwnerOf<'_>,
    name: &ServiceName,
    slices: impl IntoIterator<Item = (&'a ObjectName, &'a EndpointSlice)>,
) -> Vec<Explanation> {
    let is_ours = |(_, slice): &(&ObjectName, &EndpointSlice)| is_slice_of(slice, name);
    let slices = sorted_map(slices.into_iter().filter(is_ours).map(|(name, slice)| (name.clone(), Some(slice))));
    explain_slices(store, owner_of, name, &slices)
}

/// As [`explain`], from the rows of the store alone: without endpoints that could not be read, and without the names of
/// other nodes. Slices beyond about 2,000 endpoints are only counted.
#[must_use]
pub fn explain_stored(store: &Store, owner_of: OwnerOf<'_>, name: &ServiceName) -> Vec<Explanation> {
    let (mut slices, mut endpoints, mut left_out) = (BTreeMap::new(), 0, 0_usize);
    for (name, slice) in store.slices(name) {
        if endpoints < EXPLAINED_MAX {
            endpoints += slice.endpoints.len();
            slices.insert(name, None);
        } else {
            left_out += 1;
        }
    }
    let mut explanations = explain_slices(store, owner_of, name, &slices);
    if left_out != 0 {
        explanations.push(Explanation {
            port_name: String::new(),
            protocol: None,
            sources: BTreeSet::new(),
            endpoint: "others".to_owned(),
            slice: None,
            usage: Usage::Unexplained,
            code: "not-explained",
            reason: format!("the endpoints of {left_out} more slices are not explained"),
        });
    }
    explanations
}

/// Service with this node port, if it is not served since no address of this node is known, with the rule's name and
/// text.
pub fn unserved_node_port(store: &Store, number: u16, protocol: Protocol) -> Option<(&ServiceName, &str, String)> {
    if !store.node_ips().is_empty() {
        return None;
    }
    let is_it = |port: &ServicePort| {
        port.protocol == protocol && port.node_port.is_some_and(|node_port| node_port.get() == number)
    };
    let (name, _) = store.services().find(|(_, row)| row.ports.iter().any(is_it))?;
    let why = format!("its nodePort {number} needs an address of this node, and none is known ({NODE_FLAGS})");
    Some((name, NO_NODE_ADDRESS, why))
}

/// Services that have an address, or a node port if the address is the node's, ordered by name.
pub fn services_at(store: &Store, address: Address) -> impl Iterator<Item = &ServiceName> {
    let is_node = store.node_ips().contains(&address);
    let has_address = move |row: &ServiceRow| {
        let own = [&*row.cluster_ips, &row.external_ips, &row.load_balancer_ips];
        let has_node_port = || row.ports.iter().any(|port| port.node_port.is_some());
        own.iter().any(|addresses| addresses.contains(&address)) || is_node && has_node_port()
    };
    store.services().filter(move |(_, row)| has_address(row)).map(|(name, _)| name)
}

fn explain_slices(
    store: &Store,
    owner_of: OwnerOf<'_>,
    name: &ServiceName,
    slices: &BTreeMap<ObjectName, Option<&EndpointSlice>>,
) -> Vec<Explanation> {
    let Some(service) = store.service_row(name) else { return Vec::new() };
    let rows_of_slices: Vec<_> = store.slices(name).collect();
    let (rows, lost) = won_and_lost(store, owner_of, desired_rows(store, name));
    let mut explanations: Vec<_> =
        slices.iter().filter_map(|(slice_name, slice)| whole_slice(store, &service, slice_name, *slice)).collect();
    explanations.extend(service.ports.iter().filter_map(|port| no_node_port(&rows, &lost, port)));
    explanations.extend(no_external_ips(store, &service));
    explanations.extend(lost.iter().map(lost_frontend));
    for port in &service.ports {
        let scopes = rows.iter().filter(|row| is_of(row, port)).map(|row| (row.scope, row.frontend.address.family()));
        let scopes = sorted_set(scopes);
        let views: Vec<_> = scopes
            .into_iter()
            .map(|(scope, family)| View::new(store, &rows_of_slices, port, family, scope, &rows))
            .collect();
        for (slice_name, slice) in slices {
            explanations.extend(join_views(views.iter().map(|view| view.explain_slice(slice_name, *slice)).collect()));
        }
    }
    explanations
}

/// Explanations of one slice from several views, endpoint by endpoint. Views that agree share one explanation.
fn join_views(views: Vec<Vec<Explanation>>) -> Vec<Explanation> {
    let mut views: Vec<_> = views.into_iter().map(Vec::into_iter).collect();
    let mut joined = Vec::<Explanation>::new();
    loop {
        let start = joined.len();
        for explanation in views.iter_mut().filter_map(Iterator::next) {
            let agrees =
                |other: &&mut Explanation| (other.usage, &other.reason) == (explanation.usage, &explanation.reason);
            match joined.iter_mut().skip(start).find(agrees) {
                Some(other) => other.sources.extend(explanation.sources),
                None => joined.push(explanation),
            }
        }
        if joined.len() == start {
            return joined;
        }
    }
}

/// Explanation for a node port that is not served.
fn no_node_port(rows: &[Row], lost: &[LostRow], port: &ServicePort) -> Option<Explanation> {
    let number = port.node_port?;
    let is_there = |row: &Row| row.source == FrontendSource::NodePort && is_of(row, port);
    if rows.iter().chain(lost.iter().map(|lost| &lost.row)).any(is_there) {
        return None;
    }
    Some(Explanation {
        port_name: port.name.to_string(),
        protocol: Some(port.protocol),
        sources: sorted_set([FrontendSource::NodePort]),
        endpoint: "all".to_owned(),
        slice: None,
        usage: Usage::Unused,
        code: NO_NODE_ADDRESS,
        reason: format!("nodePort {number} is not served: no address of this node is known ({NODE_FLAGS})"),
    })
}

/// Row of a Service whose frontend another one has.
struct LostRow {
    row: Row,
    owner: ServiceName,
    why: &'static str,
}

/// Rows that a Service has, and those that it loses to others. A frontend without room is in no table, and nobody
/// else's.
fn won_and_lost(store: &Store, owner_of: OwnerOf<'_>, rows: Vec<Row>) -> (Vec<Row>, Vec<LostRow>) {
    let others = rows.iter().filter(|row| row.source != FrontendSource::ClusterIp);
    let cluster_ips = cluster_ip_owners(store, &sorted_set(others.map(|row| row.frontend.address)));
    let (mut won, mut lost) = (Vec::new(), Vec::new());
    for row in rows {
        let owner = cluster_ips.get(&row.frontend.address).filter(|_| !may_claim(row.source, || true));
        if let Some(owner) = owner.cloned() {
            lost.push(LostRow { row, owner, why: "whose ClusterIP takes no other claim" });
        } else if let Some(owner) = owner_of(row.frontend).filter(|owner| *owner != row.service) {
            lost.push(LostRow { row, owner, why: "which comes first" });
        } else {
            won.push(row);
        }
    }
    (won, lost)
}

/// Rows of a Service that no other has.
#[must_use]
pub fn won_rows(store: &Store, owner_of: OwnerOf<'_>, rows: Vec<Row>) -> Vec<Row> {
    won_and_lost(store, owner_of, rows).0
}

/// Services that have these addresses as their ClusterIPs.
fn cluster_ip_owners(store: &Store, addresses: &BTreeSet<Address>) -> BTreeMap<Address, ServiceName> {
    if addresses.is_empty() {
        return BTreeMap::new();
    }
    let owned = store.services().flat_map(|(name, row)| row.cluster_ips.into_iter().map(move |ip| (ip, name)));
    sorted_map(owned.filter(|(ip, _)| addresses.contains(ip)).map(|(ip, name)| (ip, name.clone())))
}

/// Explanation for external addresses that the settings leave out.
fn no_external_ips(store: &Store, service: &ServiceRow) -> Option<Explanation> {
    (!store.serves_external_ips() && !service.external_ips.is_empty()).then(|| Explanation {
        port_name: String::new(),
        protocol: None,
        sources: sorted_set([FrontendSource::ExternalIp]),
        endpoint: "all".to_owned(),
        slice: None,
        usage: Usage::Unused,
        code: "external-ips-ignored",
        reason: "external addresses are not served (--external-ips ignore)".to_owned(),
    })
}

/// Explanation for a frontend that no endpoint gets connections from.
fn lost_frontend(LostRow { row, owner, why }: &LostRow) -> Explanation {
    Explanation {
        port_name: row.port_name.to_string(),
        protocol: Some(row.frontend.protocol),
        sources: sorted_set([row.source]),
        endpoint: "all".to_owned(),
        slice: None,
        usage: Usage::Unused,
        code: "other-service",
        reason: format!("{} belongs to Service {owner}, {why}", row.frontend),
    }
}

fn is_of(row: &Row, port: &ServicePort) -> bool {
    row.port_name == port.name && row.frontend.protocol == port.protocol
}

/// Explanation for a slice that is left out as a whole.
fn whole_slice(
    store: &Store,
    service: &ServiceRow,
    name: &ObjectName,
    slice: Option<&EndpointSlice>,
) -> Option<Explanation> {
    let (code, reason) = match store.slice(name) {
        Some(row) if service.cluster_ips.iter().any(|ip| ip.family() == row.family) => return None,
        Some(row) => ("ip-family", format!("the Service has no {} ClusterIP", row.family)),
        None if slice.is_none_or(is_headless) => ("headless", "the slice is one of a headless Service".to_owned()),
        None => {
            let kind = slice.map(|slice| &*slice.address_type).unwrap_or_default();
            ("address-type", format!("addressType {kind:?} is not used"))
        }
    };
    Some(Explanation {
        port_name: String::new(),
        protocol: None,
        sources: BTreeSet::new(),
        endpoint: "all".to_owned(),
        slice: Some(name.clone()),
        usage: Usage::Unused,
        code,
        reason,
    })
}

/// Receiver of an endpoint, its use, and the rule that decided.
type AddExplanation<'a> = &'a mut dyn FnMut(String, Usage, (&'static str, String));

/// One Service port in one family, as seen by some of its frontends.
struct View<'a> {
    store: &'a Store,
    /// Parsed slices of the Service.
    slices: &'a [(ObjectName, SliceRow)],
    port: &'a ServicePort,
    family: Family,
    scope: Scope,
    sources: BTreeSet<FrontendSource>,
    backends: &'a [Backend],
    kept_backends: &'a [Backend],
    endpoints: MergedEndpoints<'a>,
    eligibility: Eligibility<'a>,
    /// Reason why hints do not count, if there are any.
    hints_ignored: Option<String>,
}

impl<'a> View<'a> {
    fn new(
        store: &'a Store,
        slices: &'a [(ObjectName, SliceRow)],
        port: &'a ServicePort,
        family: Family,
        scope: Scope,
        rows: &'a [Row],
    ) -> Self {
        let is_seen = |row: &&Row| is_of(row, port) && row.scope == scope && row.frontend.address.family() == family;
        let row = rows.iter().find(is_seen);
        let endpoints = merged_endpoints(slices.iter().map(|(_, slice)| slice), port, family);
        Self {
            store,
            slices,
            port,
            family,
            scope,
            sources: sorted_set(rows.iter().filter(is_seen).map(|row| row.source)),
            backends: row.map_or(&[], Row::backends),
            kept_backends: row.map_or(&[], Row::kept),
            eligibility: Eligibility::new(&endpoints, scope, store.zone()),
            hints_ignored: why_hints_do_not_count(store, &endpoints),
            endpoints,
        }
    }

    /// Explanations for each endpoint of a slice; empty for a slice of the other family.
    fn explain_slice(&self, name: &ObjectName, slice: Option<&EndpointSlice>) -> Vec<Explanation> {
        let mut explanations = Vec::new();
        let row = self.slices.iter().find(|(other, row)| other == name && row.family == self.family);
        let Some((_, row)) = row else { return explanations };
        // Placeholder slice of a selector without matches: no endpoints, no ports.
        if slice.map_or(row.endpoints.is_empty(), |slice| slice.endpoints.is_empty()) {
            return explanations;
        }
        let mut add = |endpoint: String, usage: Usage, (code, reason): (&'static str, String)| {
            explanations.push(Explanation {
                port_name: self.port.name.to_string(),
                protocol: Some(self.port.protocol),
                sources: self.sources.clone(),
                endpoint,
                slice: Some(name.clone()),
                usage,
                code,
                reason,
            });
        };
        let numbers = sorted_set(row.numbers(&self.port.name, self.port.protocol));
        if numbers.is_empty() {
            add("all".to_owned(), Usage::Unused, ("port-name", self.no_port(row)));
            return explanations;
        }
        let explain = |endpoint: &Endpoint, spec: Option<&EndpointSpec>, add: AddExplanation<'_>| {
            for &port in &numbers {
                let backend = Backend { address: endpoint.address, port };
                let Some(found) = self.endpoints.get(&backend) else { continue };
                if !std::ptr::eq(found.endpoint, endpoint) {
                    add(backend.to_string(), Usage::Unused, ("duplicate", self.hidden_by(found, name)));
                    continue;
                }
                add(backend.to_string(), self.usage(&backend), self.reason(found, spec));
            }
        };
        let Some(slice) = slice else {
            row.endpoints.iter().for_each(|endpoint| explain(endpoint, None, &mut add));
            return explanations;
        };
        // The row has one endpoint for each readable one, in the same order.
        let mut endpoints = row.endpoints.iter();
        for (index, spec) in slice.endpoints.iter().enumerate() {
            let Some(text) = spec.addresses.first() else {
                add(format!("endpoints[{index}]"), Usage::Unused, ("no-address", "it has no address".to_owned()));
                continue;
            };
            if let Err(message) = parse_endpoint_address(text, self.family) {
                let reason = ("invalid-address", format!("{text:?} {message}"));
                add(format!("endpoints[{index}]"), Usage::Unused, reason);
                continue;
            }
            let Some(endpoint) = endpoints.next() else { continue };
            explain(endpoint, Some(spec), &mut add);
        }
        explanations
    }

    fn no_port(&self, row: &SliceRow) -> String {
        let port = |name: &str, protocol: Protocol| format!("{:?} {protocol}", name);
        let has: Vec<_> = row.ports.iter().map(|other| port(&other.name, other.protocol)).collect();
        let has = if has.is_empty() { "none".to_owned() } else { has.join(", ") };
        format!("the slice has no port {} (it has: {has})", port(&self.port.name, self.port.protocol))
    }

    fn hidden_by(&self, found: &SliceEndpoint<'_>, name: &ObjectName) -> String {
        let by = self.slices.iter().find(|(_, slice)| std::ptr::eq(slice, found.slice));
        match by {
            Some((by, _)) if by != name => format!("slice {by} has it too, and that one counts"),
            _ => "the slice has it twice, and the other one counts".to_owned(),
        }
    }

    fn usage(&self, backend: &Backend) -> Usage {
        if self.backends.binary_search(backend).is_ok() {
            Usage::New
        } else if self.kept_backends.binary_search(backend).is_ok() {
            Usage::Kept
        } else {
            Usage::Unused
        }
    }

    /// The rule that decides about an endpoint.
    fn reason(&self, endpoint: &SliceEndpoint<'_>, spec: Option<&EndpointSpec>) -> (&'static str, String) {
        let is_local = self.scope == Scope::Local;
        match self.eligibility.rule(endpoint) {
            Rule::Ready if is_local => ("ready", "ready, on this node".to_owned()),
            Rule::Ready => ("ready", format!("ready{}", self.hints())),
            Rule::Fallback if is_local => {
                ("terminating", "terminating on this node and still serving; none there is ready".to_owned())
            }
            Rule::Fallback => ("terminating", "terminating and still serving; none is ready".to_owned()),
            Rule::Denied => {
                ("source-ranges", format!("loadBalancerSourceRanges do not let this VM in ({})", self.own_addresses()))
            }
            Rule::NotReady => ("not-ready", "not ready".to_owned()),
            Rule::NotServing => ("not-serving", "terminating and no longer serving".to_owned()),
            Rule::NotLocal => ("not-local", self.not_local(spec)),
            Rule::OthersReady => ("terminating", "terminating, and others are ready".to_owned()),
            Rule::Hinted if self.eligibility.hints == FollowedHints::Node => {
                ("hints", format!("meant for other nodes than {}", self.store.node_name().unwrap_or_default()))
            }
            Rule::Hinted => ("hints", format!("meant for {}, not for zone {}", zones(endpoint), self.zone())),
        }
    }

    /// Effect of the hints, if there are any.
    fn hints(&self) -> String {
        match self.eligibility.hints {
            FollowedHints::Node => format!(", meant for node {}", self.store.node_name().unwrap_or_default()),
            FollowedHints::Zone => format!(", meant for zone {}", self.zone()),
            FollowedHints::None => self.hints_ignored.as_ref().map(|why| format!("; {why}")).unwrap_or_default(),
        }
    }

    fn zone(&self) -> &str {
        self.store.zone().map_or("unknown", |zone| zone)
    }

    fn not_local(&self, spec: Option<&EndpointSpec>) -> String {
        let Some(spec) = spec else { return self.not_local_as_stored() };
        match (self.store.node_name(), spec.node_name.as_deref()) {
            (None, _) => "internalTrafficPolicy Local, and this node's name is not known (--node-name)".to_owned(),
            (Some(own), None) => format!("internalTrafficPolicy Local, and it names no node (this is {own})"),
            (Some(own), Some(other)) => format!("internalTrafficPolicy Local, and it is on node {other}, not {own}"),
        }
    }

    /// The row does not have the node's name.
    fn not_local_as_stored(&self) -> String {
        match self.store.node_name() {
            None => "internalTrafficPolicy Local, and this node's name is not known (--node-name)".to_owned(),
            Some(own) => format!("internalTrafficPolicy Local, and it is not on this node, {own}"),
        }
    }

    fn own_addresses(&self) -> String {
        let of_family = |ip: &&Address| ip.family() == self.family;
        let ips: Vec<_> = self.store.pod_ips().iter().filter(of_family).map(ToString::to_string).collect();
        if ips.is_empty() { format!("its {} address is not known: --pod-ip", self.family) } else { ips.join(", ") }
    }
}

fn why_hints_do_not_count(store: &Store, endpoints: &MergedEndpoints<'_>) -> Option<String> {
    let ready = || endpoints.values().filter(|found| found.endpoint.ready);
    if !endpoints.values().any(|found| !found.zones().is_empty() || found.has_node_hint()) {
        return None;
    }
    let (zones, nodes) = (ready().all(|found| !found.zones().is_empty()), ready().all(SliceEndpoint::has_node_hint));
    let why = match (zones, nodes, store.zone(), store.node_name()) {
        (false, false, ..) => "not every ready endpoint has one".to_owned(),
        (true, _, Some(zone), _) => format!("none is for zone {zone}"),
        (true, _, None, _) => "the zone of this node is not known (--node-name and its Node)".to_owned(),
        (false, true, _, Some(node)) => format!("none is for node {node}"),
        (false, true, _, None) => "this node's name is not known (--node-name)".to_owned(),
    };
    Some(format!("hints do not count: {why}"))
}

fn zones(found: &SliceEndpoint<'_>) -> String {
    match found.zones() {
        [] => "no zone".to_owned(),
        [zone] => format!("zone {zone}"),
        zones => format!("zones {}", zones.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::{Event, ExternalIps, NodeContext, object_name, parse_address, resolve};

    const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.1
  internalTrafficPolicy: Local
  externalIPs: [203.0.113.1]
  loadBalancerSourceRanges: [10.0.0.0/8]
  ports: [{name: http, port: 80}]
status: {loadBalancer: {ingress: [{ip: 203.0.113.2}]}}
---
apiVersion: v1
kind: Node
metadata: {name: here, labels: {topology.kubernetes.io/zone: z1}}
";

    fn slice(name: &str, fields: &str) -> String {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {name}, labels: {{kubernetes.io/service-name: web}}}}\n{fields}\n"
        )
    }

    /// One line for each explanation of the Service above with these slices, seen from this node.
    fn lines(slices: &[String]) -> Vec<String> {
        lines_on(Some("here"), slices)
    }

    fn lines_on(node: Option<&str>, slices: &[String]) -> Vec<String> {
        lines_in(NodeContext { node_name: node.map(str::to_owned), ..NodeContext::default() }, slices)
    }

    fn lines_in(context: NodeContext, slices: &[String]) -> Vec<String> {
        let web = ObjectName::new("default", "web");
        let own = NodeContext { pod_ips: vec![parse_address("172.16.0.1").unwrap()], ..context };
        let (mut store, mut parsed) = (Store::new(own), Vec::new());
        let text = format!("{SERVICE}{}", slices.concat());
        for object in serde_saphyr::from_multiple::<Value>(&text).unwrap() {
            let event = match object["kind"].as_str().unwrap() {
                "Service" => Event::Service(serde_json::from_value(object).unwrap()),
                "Node" => Event::Node(serde_json::from_value(object).unwrap()),
                _ => {
                    let slice: EndpointSlice = serde_json::from_value(object).unwrap();
                    parsed.push((object_name(&slice.metadata).unwrap(), slice.clone()));
                    Event::EndpointSlice(Box::new(slice))
                }
            };
            drop(store.apply(event));
        }
        let slices = parsed.iter().map(|(name, slice)| (name, slice));
        let line = |explanation: Explanation| {
            let sources: Vec<_> = explanation.sources.iter().map(|source| source.as_str()).collect();
            let Explanation { endpoint, slice, usage, reason, .. } = &explanation;
            let slice = slice.as_ref().map_or("-", |slice| &slice.name);
            format!("{slice}: {} {endpoint} {} {reason}", sources.join(","), usage.as_str())
        };
        let owner = |frontend| resolve(&store).into_iter().find(|row| row.frontend == frontend).map(|row| row.service);
        explain(&store, &owner, &web, slices).into_iter().map(line).collect()
    }

    #[test]
    fn each_endpoint_has_the_rule_that_decided() {
        let endpoints = "addressType: IPv4\nports: [{name: http, port: 8080}]\nendpoints:
- {addresses: [10.1.0.1], nodeName: here, hints: {forZones: [{name: z1}]}}
- {addresses: [10.1.0.2], nodeName: there, hints: {forZones: [{name: z2}]}}
- {addresses: [10.1.0.3], nodeName: here, conditions: {ready: false}}
- {addresses: [10.1.0.4], conditions: {ready: false, terminating: true}}
- {addresses: [10.1.0.5], nodeName: here, conditions: {ready: false, serving: false, terminating: true}}";
        let denied = "loadBalancerSourceRanges do not let this VM in (172.16.0.1)";
        let local = "internalTrafficPolicy Local, and it";
        assert_eq!(
            lines(&[slice("a", endpoints)]),
            [
                "a: ExternalIP 10.1.0.1:8080 yes ready, meant for zone z1".to_owned(),
                "a: ClusterIP 10.1.0.1:8080 yes ready, on this node".to_owned(),
                format!("a: LoadBalancerIP 10.1.0.1:8080 keeps {denied}"),
                "a: ExternalIP 10.1.0.2:8080 keeps meant for zone z2, not for zone z1".to_owned(),
                format!("a: ClusterIP 10.1.0.2:8080 keeps {local} is on node there, not here"),
                format!("a: LoadBalancerIP 10.1.0.2:8080 keeps {denied}"),
                "a: ClusterIP,ExternalIP 10.1.0.3:8080 keeps not ready".to_owned(),
                format!("a: LoadBalancerIP 10.1.0.3:8080 keeps {denied}"),
                "a: ExternalIP 10.1.0.4:8080 keeps terminating, and others are ready".to_owned(),
                format!("a: ClusterIP 10.1.0.4:8080 keeps {local} names no node (this is here)"),
                format!("a: LoadBalancerIP 10.1.0.4:8080 keeps {denied}"),
                "a: ClusterIP,ExternalIP 10.1.0.5:8080 no terminating and no longer serving".to_owned(),
                format!("a: LoadBalancerIP 10.1.0.5:8080 no {denied}"),
            ]
        );
    }

    /// The explanations for the external address, whose scope is the whole cluster, of endpoints with these fields.
    fn cluster_lines(node: Option<&str>, fields: &[&str]) -> Vec<String> {
        let endpoint = |(index, fields): (usize, &&str)| format!("- {{addresses: [10.1.0.{index}], {fields}}}\n");
        let endpoints: String = fields.iter().enumerate().map(endpoint).collect();
        let slice =
            slice("a", &format!("addressType: IPv4\nports: [{{name: http, port: 1}}]\nendpoints:\n{endpoints}"));
        let lines = lines_on(node, &[slice]).into_iter();
        let words = lines.filter_map(|line| {
            line.split_once(' ')?.1.split_once(' ').map(|(sources, rest)| {
                let (_, reason) = rest.split_once(' ').unwrap_or_default();
                (sources.contains("ExternalIP"), reason.to_owned())
            })
        });
        words.filter(|(is_cluster, _)| *is_cluster).map(|(_, reason)| reason).collect()
    }

    #[test]
    fn the_fallback_to_terminating_endpoints_is_explained() {
        let terminating = "conditions: {ready: false, terminating: true}";
        let endpoints = format!(
            "addressType: IPv4\nports: [{{name: http, port: 1}}]\n\
             endpoints: [{{addresses: [10.1.0.1], nodeName: here, {terminating}}}]"
        );
        assert_eq!(
            lines(&[slice("a", &endpoints)])[..2],
            [
                "a: ExternalIP 10.1.0.1:1 yes terminating and still serving; none is ready",
                "a: ClusterIP 10.1.0.1:1 yes terminating on this node and still serving; none there is ready",
            ]
        );
        assert_eq!(
            cluster_lines(Some("here"), &[terminating, "nodeName: there"]),
            ["keeps terminating, and others are ready", "yes ready"]
        );
    }

    #[test]
    fn hints_are_explained_whether_they_are_followed_or_not() {
        let (z1, z2) = ("hints: {forZones: [{name: z1}]}", "hints: {forZones: [{name: z2}]}");
        let (here, there) = ("hints: {forNodes: [{name: here}]}", "hints: {forNodes: [{name: there}]}");
        let followed = cluster_lines(Some("here"), &[here, there]);
        assert_eq!(followed, ["yes ready, meant for node here", "keeps meant for other nodes than here"]);
        let ignored = |node, fields: &[&str]| cluster_lines(node, fields).swap_remove(0);
        let because = |why: &str| format!("yes ready; hints do not count: {why}");
        assert_eq!(ignored(Some("here"), &[z1, ""]), because("not every ready endpoint has one"));
        assert_eq!(ignored(Some("here"), &[z2]), because("none is for zone z1"));
        assert_eq!(ignored(Some("here"), &[there]), because("none is for node here"));
        let no_zone = "the zone of this node is not known (--node-name and its Node)";
        assert_eq!(ignored(None, &[z1]), because(no_zone));
        assert_eq!(ignored(None, &[here]), because("this node's name is not known (--node-name)"));
    }

    #[test]
    fn rejected_endpoints_are_explained_too() {
        let http = "ports: [{name: http, port: 8080}]";
        let all = "ClusterIP,LoadBalancerIP,ExternalIP";
        let bad = format!("addressType: IPv4\n{http}\nendpoints: [{{addresses: [x]}}, {{addresses: []}}]");
        let v6 = format!("addressType: IPv6\n{http}\nendpoints: [{{addresses: ['fd00::1']}}]");
        let named = "addressType: FQDN\nendpoints: [{addresses: [example.org]}]";
        let other = "addressType: IPv4\nports: [{name: web, port: 1}]\nendpoints: [{addresses: [10.1.0.1]}]";
        assert_eq!(
            lines(&[slice("a", &bad), slice("b", &v6), slice("c", named), slice("d", other)]),
            [
                "b:  all no the Service has no IPv6 ClusterIP".to_owned(),
                "c:  all no addressType \"FQDN\" is not used".to_owned(),
                format!("a: {all} endpoints[0] no \"x\" is not a valid IP address"),
                format!("a: {all} endpoints[1] no it has no address"),
                format!("d: {all} all no the slice has no port \"http\" TCP (it has: \"web\" TCP)"),
            ]
        );
    }

    #[test]
    fn a_frontend_that_another_service_has_leads_nowhere() {
        let older =
            "---\napiVersion: v1\nkind: Service\nmetadata: {name: older, creationTimestamp: 2020-01-01T00:00:00Z}
spec: {clusterIP: 10.96.0.2, externalIPs: [203.0.113.1], ports: [{port: 80}]}\n";
        let endpoints =
            "addressType: IPv4\nports: [{name: http, port: 1}]\nendpoints: [{addresses: [10.1.0.1], nodeName: here}]";
        assert_eq!(
            lines(&[older.to_owned(), slice("a", endpoints)]),
            [
                "-: ExternalIP all no 203.0.113.1:80/TCP belongs to Service default/older, which comes first",
                "a: ClusterIP 10.1.0.1:1 yes ready, on this node",
                "a: LoadBalancerIP 10.1.0.1:1 keeps loadBalancerSourceRanges do not let this VM in (172.16.0.1)",
            ]
        );
    }

    #[test]
    fn an_external_address_that_is_not_served_says_why() {
        let owner = "---\napiVersion: v1\nkind: Service\nmetadata: {name: owner}
spec: {clusterIP: 203.0.113.1, ports: [{port: 81}]}\n";
        let claimed = lines(&[owner.to_owned()]);
        let why = "203.0.113.1:80/TCP belongs to Service default/owner, whose ClusterIP takes no other claim";
        assert_eq!(claimed, [format!("-: ExternalIP all no {why}")]);
        let ignored = lines_in(NodeContext { external_ips: ExternalIps::Ignore, ..NodeContext::default() }, &[]);
        assert_eq!(ignored, ["-: ExternalIP all no external addresses are not served (--external-ips ignore)"]);
    }

    #[test]
    fn of_one_endpoint_in_two_slices_the_one_that_counts_is_named() {
        let with = |conditions: &str| {
            format!(
                "addressType: IPv4\nports: [{{name: http, port: 1}}]\n\
                 endpoints: [{{addresses: [10.1.0.1], nodeName: here, conditions: {{{conditions}}}}}]"
            )
        };
        let lines = lines(&[slice("a", &with("ready: false, terminating: true")), slice("b", &with("ready: true"))]);
        assert_eq!(
            lines.first().unwrap(),
            "a: ClusterIP,LoadBalancerIP,ExternalIP 10.1.0.1:1 no slice default/b has it too, and that one counts"
        );
        assert_eq!(lines.get(1).unwrap(), "b: ExternalIP 10.1.0.1:1 yes ready");
    }
}
