//! Compact row of a Service, with the addresses and ports that count (kube-proxy 1.36, `pkg/proxy/util/utils.go` and
//! `serviceport.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
    sync::Arc,
};

use super::{
    Address, AddressRange, Family, Problem, Protocol, ServiceName,
    address::parse_address,
    packed::{Packed, Reader, Writer},
    problem::Findings,
};
use crate::api::{LoadBalancerIngress, Service, ServicePortSpec, ServiceSpec};

/// Label of a Service that another proxy serves, whatever the value.
const LABEL_SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// Default time of session affinity in seconds (pkg/apis/core/types.go).
const AFFINITY_DEFAULT_SECONDS: u32 = 10_800;
const AFFINITY_MAX_SECONDS: u32 = 86_400;

/// Room for most packed rows.
const PACKED_BYTES: usize = 64;

/// Compact row of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRow {
    /// Creation time in seconds since 1970; decides which of two Services owns an address that both claim.
    pub created_s: Option<i64>,
    /// ClusterIPs, at most one of each family. A family without one has no frontend at all.
    pub cluster_ips: Vec<Address>,
    /// `spec.externalIPs` in the families of the ClusterIPs.
    pub external_ips: Box<[Address]>,
    /// VIPs of the load balancer in the families of the ClusterIPs.
    pub load_balancer_ips: Box<[Address]>,
    /// Clients that may use the load balancer's VIPs. A family without a range lets all clients in.
    pub source_ranges: Box<[AddressRange]>,
    /// Ports that cproxy can serve.
    pub ports: Vec<ServicePort>,
    /// Time for which a client keeps its backend; `None` without session affinity.
    pub affinity_seconds: Option<u32>,
    /// Internal traffic policy Local: only endpoints on this node get connections.
    pub is_internal_local: bool,
}

/// One port of a Service, identified by name and protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Name of the port, "" if it has none.
    pub name: Arc<str>,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// Port that clients connect to.
    pub port: u16,
    /// Port of the nodes that leads to this port too.
    pub node_port: Option<NonZeroU16>,
}

impl ServiceRow {
    /// Row of a Service, or `None` if cproxy does not serve it (headless, ExternalName, another proxy's). `node` is the
    /// name of this node.
    pub fn from_object(
        name: &ServiceName,
        service: &Service,
        node: Option<&str>,
        problems: &mut Vec<Problem>,
    ) -> Option<Self> {
        let mut findings = Findings::default();
        let row = Self::read(service, node, &mut findings);
        problems.append(&mut findings.into_problems(format_args!("Service {name}")));
        row
    }

    fn read(service: &Service, node: Option<&str>, findings: &mut Findings) -> Option<Self> {
        let spec = match served_spec(service) {
            Ok(spec) => spec,
            Err(skipped) => {
                if let Some(field) = skipped.mistaken_field() {
                    findings.field(field, "missing: this Service is not served");
                }
                return None;
            }
        };
        let cluster_ips = cluster_ips(spec, findings);
        let is_served = |address: Address| cluster_ips.iter().any(|ip| ip.family() == address.family());
        let ingress = &service.status.load_balancer.ingress;
        Some(Self {
            created_s: service.metadata.created.seconds,
            external_ips: external_ips(spec, is_served, findings),
            load_balancer_ips: load_balancer_ips(ingress, is_served, findings),
            source_ranges: source_ranges(spec, findings),
            ports: ports(spec, findings),
            affinity_seconds: affinity_seconds(spec, findings),
            is_internal_local: is_internal_local(spec, node, findings),
            cluster_ips,
        })
    }

    /// The row in packed form.
    pub(super) fn pack(&self) -> Packed {
        let mut writer = Writer::with_capacity(PACKED_BYTES);
        let has_extras = self.has_extras();
        let bits = [self.is_internal_local, self.created_s.is_some(), has_extras];
        writer.byte(bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit)));
        if let Some(seconds) = self.created_s {
            writer.number(seconds as u64);
        }
        writer.list(&self.cluster_ips, |writer, &address| writer.any_address(address));
        if has_extras {
            writer.number(self.affinity_seconds.unwrap_or_default().into());
            for addresses in [&self.external_ips, &self.load_balancer_ips] {
                writer.list(addresses, |writer, &address| writer.any_address(address));
            }
            writer.list(&self.source_ranges, |writer, range| range.pack(writer));
        }
        writer.list(&self.ports, |writer, port| port.pack(writer));
        writer.finish()
    }

    pub(super) fn unpack(packed: &[u8]) -> Self {
        let reader = &mut Reader::new(packed);
        let flags = reader.byte();
        let mut row = Self {
            is_internal_local: flags & 1 != 0,
            created_s: (flags & 2 != 0).then(|| reader.number() as i64),
            cluster_ips: reader.list(Reader::any_address),
            affinity_seconds: None,
            external_ips: Box::default(),
            load_balancer_ips: Box::default(),
            source_ranges: Box::default(),
            ports: Vec::new(),
        };
        if flags & 4 != 0 {
            // An affinity of 0 seconds is no affinity.
            row.affinity_seconds = Some(reader.number() as u32).filter(|&seconds| seconds != 0);
            row.external_ips = reader.list(Reader::any_address);
            row.load_balancer_ips = reader.list(Reader::any_address);
            row.source_ranges = reader.list(AddressRange::unpack);
        }
        row.ports = reader.list(ServicePort::unpack);
        row
    }

    /// Whether the Service has what few have.
    fn has_extras(&self) -> bool {
        let has_addresses = !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty();
        has_addresses || self.affinity_seconds.is_some() || !self.source_ranges.is_empty()
    }
}

impl ServicePort {
    fn pack(&self, writer: &mut Writer) {
        writer.text(&self.name);
        self.protocol.pack(writer);
        writer.number(self.port.into());
        writer.number(self.node_port.map_or(0, NonZeroU16::get).into());
    }

    fn unpack(reader: &mut Reader<'_>) -> Self {
        Self {
            name: reader.text().into(),
            protocol: Protocol::unpack(reader),
            port: reader.port(),
            node_port: NonZeroU16::new(reader.port()),
        }
    }
}

/// Reason why a Service is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Skipped {
    /// The Service has another proxy's label, whatever the value.
    #[error("its label {LABEL_SERVICE_PROXY_NAME} gives it to another proxy")]
    OtherProxy,
    /// Even with a `clusterIP`.
    #[error("its type is ExternalName")]
    ExternalName,
    /// No ClusterIP: an API server assigns one, a manifest must name one.
    #[error("it has no clusterIP")]
    NoClusterIp,
    /// `clusterIP: None`
    #[error("it is headless (clusterIP None)")]
    Headless,
}

impl Skipped {
    /// Field that was probably forgotten, if any.
    fn mistaken_field(self) -> Option<&'static str> {
        match self {
            Self::NoClusterIp => Some("spec.clusterIP"),
            Self::OtherProxy | Self::ExternalName | Self::Headless => None,
        }
    }
}

/// `spec` of a Service that cproxy serves (`ShouldSkipService` and the label selector).
///
/// # Errors
/// The reason why cproxy does not serve it.
pub fn served_spec(service: &Service) -> Result<&ServiceSpec, Skipped> {
    // An API server does not even send such a Service: its mistakes concern the other proxy.
    if service.metadata.labels.contains_key(LABEL_SERVICE_PROXY_NAME) {
        return Err(Skipped::OtherProxy);
    }
    let spec = &service.spec;
    match (&*spec.type_, &*spec.cluster_ip) {
        ("ExternalName", _) => Err(Skipped::ExternalName),
        (_, "") => Err(Skipped::NoClusterIp),
        (_, "None") => Err(Skipped::Headless),
        _ => Ok(spec),
    }
}

fn affinity_seconds(spec: &ServiceSpec, findings: &mut Findings) -> Option<u32> {
    match &*spec.session_affinity {
        "ClientIP" => {}
        "" | "None" => return None,
        other => {
            findings.field("spec.sessionAffinity", &format!("{other:?} is neither None nor ClientIP; None is used"));
            return None;
        }
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let Some(seconds) = config.and_then(|config| config.timeout_seconds) else { return Some(AFFINITY_DEFAULT_SECONDS) };
    let clamped = seconds.clamp(1, AFFINITY_MAX_SECONDS as i32) as u32;
    if i64::from(clamped) != i64::from(seconds) {
        let message = format!("{seconds} is not in 1..{AFFINITY_MAX_SECONDS}; {clamped} is used");
        findings.field("spec.sessionAffinityConfig.clientIP.timeoutSeconds", &message);
    }
    Some(clamped)
}

fn is_internal_local(spec: &ServiceSpec, node: Option<&str>, findings: &mut Findings) -> bool {
    let is_local = match spec.internal_traffic_policy.as_deref() {
        Some("Local") => true,
        None | Some("" | "Cluster") => false,
        Some(other) => {
            findings.field(
                "spec.internalTrafficPolicy",
                &format!("{other:?} is neither Cluster nor Local; Cluster is used"),
            );
            false
        }
    };
    if is_local && node.is_none() {
        let message = "Local, and this node's name is not known: connections are dropped; pass --node-name";
        findings.field("spec.internalTrafficPolicy", message);
    }
    is_local
}

/// `GetClusterIPByFamily`, for both families.
fn cluster_ips(spec: &ServiceSpec, findings: &mut Findings) -> Vec<Address> {
    let families = &spec.ip_families;
    if families.is_empty() && spec.cluster_ips.len() > 1 {
        findings.field("spec.ipFamilies", "missing although clusterIPs has several; only clusterIP is served");
    }
    let mut found = Vec::with_capacity(2);
    for family in [Family::V4, Family::V6] {
        let Some((index, text)) = cluster_ip_of(spec, family) else {
            if families.iter().any(|name| name == family.as_str()) {
                findings.field(
                    "spec.clusterIPs",
                    &format!("no address for the {family} of ipFamilies: this family is not served"),
                );
            }
            continue;
        };
        let field = || index.map_or_else(|| "spec.clusterIP".to_owned(), |index| format!("spec.clusterIPs[{index}]"));
        match parse_address(text.trim()) {
            Some(address) if address.family() == family && address.is_special() => {
                findings.field(&field(), &format!("{text:?}{NO_FRONTEND}"));
            }
            Some(address) if address.family() == family => found.push(address),
            // Without ipFamilies the one clusterIP belongs to one family and is rightly missing in the other.
            Some(_) if index.is_none() => {}
            Some(_) => {
                findings.field(&field(), &format!("{text:?} is no {family} address: this address is not served"));
            }
            None if index.is_none() && family == Family::V6 => {}
            None => {
                findings.field(&field(), &format!("{text:?} is not a valid IP address: this address is not served"));
            }
        }
    }
    found
}

/// Problem of an address that no Service can have.
const NO_FRONTEND: &str = " is a loopback, multicast or unspecified address: this address is not served";

/// `MapIPsByIPFamily` of `spec.externalIPs`.
fn external_ips(spec: &ServiceSpec, is_served: impl Fn(Address) -> bool, findings: &mut Findings) -> Box<[Address]> {
    let texts = spec.external_ips.iter().map(String::as_str).enumerate();
    texts.filter_map(|(index, text)| extra_ip(text, &is_served, ("spec.externalIPs", index, ""), findings)).collect()
}

/// VIPs of the load balancer. Addresses in mode Proxy are left out: their connections go through the load balancer.
fn load_balancer_ips(
    ingress: &[LoadBalancerIngress],
    is_served: impl Fn(Address) -> bool,
    findings: &mut Findings,
) -> Box<[Address]> {
    let mut found = Vec::new();
    for (index, ingress) in ingress.iter().enumerate() {
        let item = |rest: &'static str| ("status.loadBalancer.ingress", index, rest);
        match ingress.ip_mode.as_deref() {
            None | Some("VIP") => {
                found.extend(extra_ip(&ingress.ip, &is_served, item(".ip"), findings));
            }
            Some("Proxy") => {}
            Some(other) => {
                findings.item(
                    item(".ipMode"),
                    format_args!("{other:?}"),
                    " is neither VIP nor Proxy: this address is not served",
                );
            }
        }
    }
    found.into()
}

/// Address besides the ClusterIP. Blanks around it are ignored.
fn extra_ip(
    text: &str,
    is_served: impl Fn(Address) -> bool,
    item: (&str, usize, &'static str),
    findings: &mut Findings,
) -> Option<Address> {
    if text.trim().is_empty() {
        return None;
    }
    match parse_address(text.trim()) {
        Some(address) if address.is_special() => findings.item(item, format_args!("{text:?}"), NO_FRONTEND),
        Some(address) if is_served(address) => return Some(address),
        Some(_) => {
            findings.item(
                item,
                format_args!("{text:?}"),
                ": the Service has no ClusterIP of that family, this address is not served",
            );
        }
        None => findings.item(item, format_args!("{text:?}"), " is not a valid IP address: this address is not served"),
    }
    None
}

/// `MapCIDRsByIPFamily`. A range of all addresses of a family is equivalent to none.
fn source_ranges(spec: &ServiceSpec, findings: &mut Findings) -> Box<[AddressRange]> {
    let mut ranges = Vec::new();
    for (index, text) in spec.load_balancer_source_ranges.iter().enumerate() {
        match AddressRange::parse(text.trim()) {
            Some(range) => ranges.push(range),
            None if text.trim().is_empty() => {}
            None => findings.item(
                ("spec.loadBalancerSourceRanges", index, ""),
                format_args!("{text:?}"),
                " is no range of addresses, such as 10.0.0.0/8: this range is not used",
            ),
        }
    }
    let open: Vec<_> = ranges.iter().filter(|range| range.is_whole()).map(AddressRange::family).collect();
    ranges.retain(|range| !open.contains(&range.family()));
    ranges.into()
}

/// ClusterIP of a family with its index in `clusterIPs`, which the one of a Service without `ipFamilies` does not have.
fn cluster_ip_of(spec: &ServiceSpec, family: Family) -> Option<(Option<usize>, &str)> {
    if spec.ip_families.is_empty() {
        return Some((None, &spec.cluster_ip));
    }
    let index = spec.ip_families.iter().position(|name| name == family.as_str())?;
    let text = spec.cluster_ips.get(index)?;
    Some((Some(index), text))
}

fn ports(spec: &ServiceSpec, findings: &mut Findings) -> Vec<ServicePort> {
    let specs = &spec.ports;
    if specs.is_empty() {
        findings.field("spec.ports", "the Service has no ports; nothing to serve, add one");
    }
    let mut seen = BTreeSet::new();
    // All ports of one unsupported protocol are one problem.
    let mut unserved = BTreeMap::<&str, (usize, usize)>::new();
    let mut ports = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        match service_port(spec) {
            Ok(mut port) if seen.insert((port.name.clone(), port.protocol)) => {
                port.node_port = node_port(spec).unwrap_or_else(|number| {
                    findings.item(("spec.ports", index, ".nodePort"), number, NO_PORT);
                    None
                });
                ports.push(port);
            }
            Ok(port) => findings.item(
                ("spec.ports", index, ""),
                format_args!("{:?}", &*port.name),
                ": another port has the same name and protocol, this port is not served",
            ),
            Err(PortError::Protocol(name)) => unserved.entry(name).or_insert((index, 0)).1 += 1,
            Err(PortError::Number(number)) => {
                findings.item(("spec.ports", index, ""), format_args!("port {number}"), NO_PORT);
            }
        }
    }
    for (protocol, (index, count)) in unserved {
        let more = if count > 1 { format!(", like {} more", count - 1) } else { String::new() };
        let message = format!("protocol {protocol} cannot be served by socket hooks: this port is not served{more}");
        findings.field(&format!("spec.ports[{index}]"), &message);
    }
    ports
}

/// Error in a port.
enum PortError<'a> {
    /// Unsupported protocol.
    Protocol(&'a str),
    /// Number that is no port.
    Number(i32),
}

fn service_port(spec: &ServicePortSpec) -> Result<ServicePort, PortError<'_>> {
    let protocol = parse_protocol(&spec.protocol).map_err(PortError::Protocol)?;
    let port = u16::try_from(spec.port).ok().filter(|&port| port != 0).ok_or(PortError::Number(spec.port))?;
    Ok(ServicePort { name: spec.name.as_str().into(), protocol, port, node_port: None })
}

/// Node port, if there is one: 0 means none. A number that is no port is the error.
fn node_port(spec: &ServicePortSpec) -> Result<Option<NonZeroU16>, i32> {
    u16::try_from(spec.node_port).map(NonZeroU16::new).map_err(|_| spec.node_port)
}

const NO_PORT: &str = " is not in 1..65535: this port is not served";

/// Protocol; empty means TCP. The name of another one is the error.
pub(super) fn parse_protocol(text: &str) -> Result<Protocol, &str> {
    match text {
        "" | "TCP" => Ok(Protocol::Tcp),
        "UDP" => Ok(Protocol::Udp),
        other => Err(other),
    }
}
