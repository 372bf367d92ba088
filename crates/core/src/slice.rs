//! Compact row of an EndpointSlice (kube-proxy 1.36, `pkg/proxy/endpointslicecache.go`).

use std::sync::Arc;

use super::{
    Address, Family, ObjectName, Problem, Protocol,
    address::parse_address,
    packed::{Packed, Reader, Writer},
    problem::Findings,
    service::parse_protocol,
    sort_few_by,
};
use crate::api::{EndpointHints, EndpointPortSpec, EndpointSlice, EndpointSpec};

/// Label with the name of a slice's Service; owner references do not matter.
pub const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of the slices of headless Services, whatever the value.
const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";

/// Number of a slice's sets of zones that a further one is compared with.
const ZONES_COMPARED_MAX: usize = 32;

/// Room for most packed rows.
const PACKED_BYTES: usize = 128;

/// Compact row of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceRow {
    /// Service of the slice, in the slice's namespace.
    pub service: Arc<str>,
    /// Family of all endpoints.
    pub family: Family,
    /// Ports that each endpoint has, sorted by name and protocol: there may be twenty thousand.
    pub ports: Vec<SlicePort>,
    /// Endpoints that may ever be used.
    pub endpoints: Vec<Endpoint>,
    /// Sets of zones that hints name.
    zones: Vec<Box<[Arc<str>]>>,
}

/// A port of a slice: matched with the Service's by name and protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// Name of the port, "" if it has none.
    pub name: Arc<str>,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// Port on which the endpoints listen.
    pub port: u16,
}

/// An endpoint of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// First address of the endpoint.
    pub address: Address,
    /// The condition `ready`, which is true if it is absent.
    pub ready: bool,
    /// The condition `serving`, which is true if it is absent.
    pub serving: bool,
    /// The condition `terminating`, which is false if it is absent.
    pub terminating: bool,
    /// Whether the endpoint runs on this node.
    pub local: bool,
    /// Nodes that the hints name.
    pub node_hint: NodeHint,
    /// Zones that the hints name: index of their set in the slice's list, from 1; 0 without hints for zones.
    zones: u16,
}

/// Nodes that an endpoint's hints name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeHint {
    /// No nodes.
    None,
    /// This node, perhaps besides others.
    ThisNode,
    /// Only other nodes.
    Others,
}

impl SliceRow {
    /// Row of a slice, or `None` if cproxy does not use it (headless, FQDN, no Service). `node` is the name of
    /// this node: without one, no endpoint is local.
    pub fn from_object(
        name: &ObjectName,
        slice: &EndpointSlice,
        node: Option<&str>,
        problems: &mut Vec<Problem>,
    ) -> Option<Self> {
        let mut findings = Findings::default();
        let row = Self::read(slice, node, &mut findings);
        problems.append(&mut findings.into_problems(format_args!("EndpointSlice {name}")));
        row
    }

    fn read(slice: &EndpointSlice, node: Option<&str>, findings: &mut Findings) -> Option<Self> {
        // An API server does not even send such a slice: its mistakes do not matter.
        if is_headless(slice) {
            return None;
        }
        let family = match &*slice.address_type {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            "FQDN" => return None,
            other => {
                findings.field(
                    "addressType",
                    &format!("{:?} is not IPv4, IPv6 or FQDN: this EndpointSlice is not used", other),
                );
                return None;
            }
        };
        let service = service_of(slice, findings)?;
        let mut row = Self { service, family, ports: ports(slice, findings), endpoints: Vec::new(), zones: Vec::new() };
        row.add_endpoints(slice, node, findings);
        Some(row)
    }

    /// The row in packed form. The Service comes first, since it is also read alone.
    pub(super) fn pack(&self) -> Packed {
        let mut writer = Writer::with_capacity(PACKED_BYTES);
        writer.text(&self.service);
        let one_state = self.one_state();
        writer.byte(u8::from(self.family == Family::V6) | u8::from(one_state.is_some()) << 1);
        writer.list(&self.ports, |writer, port| port.pack(writer));
        if let Some(endpoint) = one_state {
            endpoint.pack_state(&mut writer);
        }
        writer.list(&self.endpoints, |writer, endpoint| {
            writer.address(endpoint.address, self.family);
            if one_state.is_none() {
                endpoint.pack_state(writer);
            }
        });
        writer.list(&self.zones, |writer, zones| writer.list(zones, |writer, zone| writer.text(zone)));
        writer.finish()
    }

    pub(super) fn unpack(packed: &[u8]) -> Self {
        let reader = &mut Reader::new(packed);
        let service = reader.text().into();
        let flags = reader.byte();
        let family = if flags & 1 == 0 { Family::V4 } else { Family::V6 };
        let ports = reader.list(SlicePort::unpack);
        let one_state = (flags & 2 != 0).then(|| Endpoint::unpack_state(reader));
        let endpoint = |reader: &mut Reader<'_>| {
            let address = reader.address(family);
            Endpoint { address, ..one_state.unwrap_or_else(|| Endpoint::unpack_state(reader)) }
        };
        Self {
            service,
            family,
            ports,
            endpoints: reader.list(endpoint),
            zones: reader.list(|reader| reader.list(|reader| reader.text().into())),
        }
    }

    /// An endpoint whose state, all but the address, is that of each endpoint.
    fn one_state(&self) -> Option<&Endpoint> {
        let first = self.endpoints.first()?;
        let is_same = |other: &Endpoint| Endpoint { address: first.address, ..*other } == *first;
        self.endpoints.iter().all(is_same).then_some(first)
    }

    /// Service of a packed row.
    pub(super) fn packed_service(packed: &[u8]) -> &str {
        Reader::new(packed).text()
    }

    /// Number of endpoints of a packed row, times that of its ports.
    pub(super) fn packed_backends(packed: &[u8]) -> usize {
        let reader = &mut Reader::new(packed);
        reader.text();
        let flags = reader.byte();
        let ports = reader.number();
        (0..ports).for_each(|_| SlicePort::skip(reader));
        if flags & 2 != 0 {
            Endpoint::unpack_state(reader);
        }
        ports.saturating_mul(reader.number()) as usize
    }

    /// Port numbers of the endpoints for a port of the Service.
    pub fn numbers<'a>(&'a self, name: &'a str, protocol: Protocol) -> impl Iterator<Item = u16> + 'a {
        let key = (name, protocol);
        let first = self.ports.partition_point(|port| port.key() < key);
        let same = self.ports.get(first..).unwrap_or_default().iter().take_while(move |port| port.key() == key);
        same.map(|port| port.port)
    }

    /// Zones that an endpoint's hints name; empty without hints for zones.
    #[must_use]
    pub fn zones(&self, endpoint: &Endpoint) -> &[Arc<str>] {
        let index = usize::from(endpoint.zones).checked_sub(1);
        index.and_then(|index| self.zones.get(index)).map_or(&[], |zones| zones)
    }

    fn add_endpoints(&mut self, slice: &EndpointSlice, node: Option<&str>, findings: &mut Findings) {
        self.endpoints.reserve_exact(slice.endpoints.len());
        for (index, spec) in slice.endpoints.iter().enumerate() {
            let Some(text) = spec.addresses.first() else { continue };
            match parse_endpoint_address(text, self.family) {
                Ok(address) => {
                    let zones = self.zones_of(spec.hints.as_ref());
                    self.endpoints.push(Endpoint { zones, ..endpoint(spec, address, node) });
                }
                Err(message) => findings.item(
                    ("endpoints", index, ".addresses[0]"),
                    format_args!("{text:?}"),
                    &format!(" {message}: this endpoint is not used"),
                ),
            }
        }
    }

    /// Endpoints of one slice mostly share a few sets of zones.
    fn zones_of(&mut self, hints: Option<&EndpointHints>) -> u16 {
        let Some(hints) = hints.filter(|hints| !hints.for_zones.is_empty()) else { return 0 };
        let names = || hints.for_zones.iter().map(|zone| &*zone.name);
        let same = |zones: &[Arc<str>]| zones.iter().map(|zone| &**zone).eq(names());
        let recent = self.zones.iter().enumerate().rev().take(ZONES_COMPARED_MAX);
        let index = recent.into_iter().find(|(_, zones)| same(zones)).map(|(index, _)| index).unwrap_or_else(|| {
            self.zones.push(names().map(Into::into).collect());
            self.zones.len() - 1
        });
        // A slice has far fewer endpoints than this has room for.
        u16::try_from(index + 1).unwrap_or(0)
    }
}

impl SlicePort {
    fn key(&self) -> (&str, Protocol) {
        (&self.name, self.protocol)
    }

    fn pack(&self, writer: &mut Writer) {
        writer.text(&self.name);
        self.protocol.pack(writer);
        writer.number(self.port.into());
    }

    fn unpack(reader: &mut Reader<'_>) -> Self {
        Self { name: reader.text().into(), protocol: Protocol::unpack(reader), port: reader.port() }
    }

    fn skip(reader: &mut Reader<'_>) {
        reader.text();
        reader.byte();
        reader.port();
    }
}

impl Endpoint {
    /// Writes all but the address.
    fn pack_state(&self, writer: &mut Writer) {
        let bits = [
            self.ready,
            self.serving,
            self.terminating,
            self.local,
            self.node_hint != NodeHint::None,
            self.node_hint == NodeHint::ThisNode,
            self.zones != 0,
        ];
        writer.byte(bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit)));
        if self.zones != 0 {
            writer.number(self.zones.into());
        }
    }

    /// Reads all but the address.
    fn unpack_state(reader: &mut Reader<'_>) -> Self {
        let bits = reader.byte();
        let has = |bit: u8| bits & 1 << bit != 0;
        Self {
            address: Address::from_octets([0; 16]),
            ready: has(0),
            serving: has(1),
            terminating: has(2),
            local: has(3),
            node_hint: match (has(4), has(5)) {
                (false, _) => NodeHint::None,
                (true, false) => NodeHint::Others,
                (true, true) => NodeHint::ThisNode,
            },
            zones: if has(6) { reader.number() as u16 } else { 0 },
        }
    }
}

/// Address of an endpoint; the error is the reason why it is unusable.
pub(super) fn parse_endpoint_address(text: &str, family: Family) -> Result<Address, &'static str> {
    // Blanks are rare.
    match parse_address(text).or_else(|| parse_address(text.trim())) {
        Some(address) if address.family() == family => Ok(address),
        Some(_) => Err("is not of the slice's addressType"),
        None => Err("is not a valid IP address"),
    }
}

/// Service that the slice's label names.
pub(super) fn service_label(slice: &EndpointSlice) -> Option<&str> {
    label(slice, LABEL_SERVICE_NAME)
}

/// Whether the Service has no ClusterIP, by the label.
pub(super) fn is_headless(slice: &EndpointSlice) -> bool {
    label(slice, LABEL_HEADLESS).is_some()
}

fn label<'a>(slice: &'a EndpointSlice, key: &str) -> Option<&'a str> {
    slice.metadata.labels.get(key).map(String::as_str)
}

fn service_of(slice: &EndpointSlice, findings: &mut Findings) -> Option<Arc<str>> {
    match service_label(slice).unwrap_or_default() {
        "" => {
            findings.field(
                "metadata.labels",
                &format!("no label {LABEL_SERVICE_NAME} names its Service: this EndpointSlice is not used"),
            );
            None
        }
        service => Some(service.into()),
    }
}

fn ports(slice: &EndpointSlice, findings: &mut Findings) -> Vec<SlicePort> {
    let mut ports: Vec<SlicePort> = Vec::with_capacity(slice.ports.len());
    for (index, spec) in slice.ports.iter().enumerate() {
        match slice_port(spec) {
            Ok(port) => ports.extend(port),
            Err(number) => {
                findings.item(
                    ("ports", index, ""),
                    format_args!("port {number}"),
                    " is not in 1..65535: this port is not used",
                );
            }
        }
    }
    // Ports with the same name stay in their order.
    sort_few_by(&mut ports, |a, b| a.key().cmp(&b.key()));
    ports
}

/// Port of a slice. One without a name or a number, or with number 0, is ignored and no mistake. A number that is no
/// port is the error.
fn slice_port(spec: &EndpointPortSpec) -> Result<Option<SlicePort>, i32> {
    let Some(port) = spec.port.filter(|&port| port != 0) else { return Ok(None) };
    let Some(name) = spec.name.as_deref() else { return Ok(None) };
    let port = u16::try_from(port).map_err(|_| port)?;
    // SCTP is reported where the Service asks for it.
    let Ok(protocol) = parse_protocol(spec.protocol.as_deref().unwrap_or_default()) else { return Ok(None) };
    Ok(Some(SlicePort { name: name.into(), protocol, port }))
}

fn endpoint(spec: &EndpointSpec, address: Address, node: Option<&str>) -> Endpoint {
    let conditions = &spec.conditions;
    Endpoint {
        address,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        local: node.is_some() && spec.node_name.as_deref() == node,
        node_hint: node_hint(spec, node),
        zones: 0,
    }
}

fn node_hint(spec: &EndpointSpec, node: Option<&str>) -> NodeHint {
    let nodes = spec.hints.as_ref().map(|hints| &*hints.for_nodes).unwrap_or_default();
    match node {
        _ if nodes.is_empty() => NodeHint::None,
        Some(node) if nodes.iter().any(|hint| hint.name == node) => NodeHint::ThisNode,
        _ => NodeHint::Others,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As if all ports were looked at one by one.
        #[test]
        fn numbers_are_found_by_name_and_protocol(
            ports in prop::collection::vec((0..4u8, any::<bool>(), 1..9u16), 0..24),
            name in 0..4u8,
            is_udp in any::<bool>(),
            is_ready in prop::collection::vec(any::<bool>(), 0..4),
        ) {
            let endpoints: Vec<_> = is_ready.iter().map(|ready| serde_json::json!(
                {"addresses": ["10.0.0.1"], "conditions": {"ready": ready}})).collect();
            let protocol = |is_udp: bool| if is_udp { "UDP" } else { "TCP" };
            let specs: Vec<_> = ports.iter().map(|(name, is_udp, port)| serde_json::json!(
                {"name": format!("p{name}"), "protocol": protocol(*is_udp), "port": port})).collect();
            let slice = serde_json::from_value(serde_json::json!({
                "metadata": {"name": "a", "labels": {"kubernetes.io/service-name": "web"}},
                "addressType": "IPv4", "ports": specs, "endpoints": endpoints,
            })).unwrap();
            let row = SliceRow::from_object(&ObjectName::new("n", "a"), &slice, None, &mut Vec::new()).unwrap();
            prop_assert_eq!(SliceRow::packed_backends(&row.pack()), ports.len() * endpoints.len());
            let row = SliceRow::unpack(&row.pack());
            let protocol = if is_udp { Protocol::Udp } else { Protocol::Tcp };
            let naive = ports.iter().filter(|port| (port.0, port.1) == (name, is_udp)).map(|port| port.2);
            prop_assert!(row.numbers(&format!("p{name}"), protocol).eq(naive), "{row:?}");
        }
    }
}
