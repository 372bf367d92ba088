//! A Service as a compact row: which of its addresses and ports count (kube-proxy 1.36, `pkg/proxy/util/utils.go` and
//! `serviceport.go`).

use std::{collections::HashSet, sync::Arc};

use super::{Address, Family, Problem, Protocol, ServiceName, address::parse_address};
use crate::k8s::objects::{Service, ServicePortSpec, ServiceSpec};

/// Another proxy serves a Service with this label, whatever its value.
const LABEL_SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// For how long a client is remembered where the Service does not say (pkg/apis/core/types.go).
const AFFINITY_DEFAULT_SECONDS: u32 = 10_800;
const AFFINITY_MAX_SECONDS: u32 = 86_400;

/// What is kept of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRow {
    /// When it was created, in seconds since 1970; decides who owns an address that two Services claim.
    pub created_s: Option<i64>,
    /// Its ClusterIPs, at most one of each family.
    pub cluster_ips: Vec<Address>,
    /// Its ports that can be served.
    pub ports: Vec<ServicePort>,
    /// For how long a client keeps its backend; `None` without session affinity.
    pub affinity_seconds: Option<u32>,
    /// Internal traffic policy Local: only endpoints on the own node get connections.
    pub is_internal_local: bool,
}

/// One port of a Service; known by name and protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, "" if it has none.
    pub name: Arc<str>,
    /// Its protocol.
    pub protocol: Protocol,
    /// The port clients connect to.
    pub port: u16,
}

impl ServiceRow {
    /// The row of a Service, or `None` if cproxy does not serve it (headless, ExternalName, another proxy's). `node` is
    /// the own node's name.
    pub fn from_object(
        name: &ServiceName,
        service: &Service,
        node: Option<&str>,
        problems: &mut Vec<Problem>,
    ) -> Option<Self> {
        let report = &mut |field: &str, message: &str| {
            problems.push(Problem::new(format_args!("Service {name}"), field, message));
        };
        let Some(spec) = service.spec.as_ref() else {
            report("spec", "missing; the Service is not served");
            return None;
        };
        if has_label(service, LABEL_SERVICE_PROXY_NAME) || is_without_cluster_ip(spec, report) {
            return None;
        }
        Some(Self {
            created_s: service.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            cluster_ips: cluster_ips(spec, report),
            ports: ports(spec, report),
            affinity_seconds: affinity_seconds(spec, report),
            is_internal_local: is_internal_local(spec, node, report),
        })
    }
}

fn has_label(service: &Service, key: &str) -> bool {
    service.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(key))
}

/// `ShouldSkipService`: no `clusterIP`, "None", or ExternalName even with one.
fn is_without_cluster_ip(spec: &ServiceSpec, report: &mut impl FnMut(&str, &str)) -> bool {
    if spec.type_.as_deref() == Some("ExternalName") {
        return true;
    }
    let cluster_ip = spec.cluster_ip.as_deref().unwrap_or_default();
    if cluster_ip.is_empty() {
        // An API server assigns one; in a file somebody has to.
        report("spec.clusterIP", "missing; the Service is not served");
    }
    matches!(cluster_ip, "" | "None")
}

fn affinity_seconds(spec: &ServiceSpec, report: &mut impl FnMut(&str, &str)) -> Option<u32> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let Some(seconds) = config.and_then(|config| config.timeout_seconds) else { return Some(AFFINITY_DEFAULT_SECONDS) };
    let clamped = seconds.clamp(1, AFFINITY_MAX_SECONDS.into()) as u32;
    if i64::from(clamped) != seconds {
        let message = format!("{seconds} is not in 1..{AFFINITY_MAX_SECONDS}; {clamped} is used");
        report("spec.sessionAffinityConfig.clientIP.timeoutSeconds", &message);
    }
    Some(clamped)
}

fn is_internal_local(spec: &ServiceSpec, node: Option<&str>, report: &mut impl FnMut(&str, &str)) -> bool {
    let is_local = spec.internal_traffic_policy.as_deref() == Some("Local");
    if is_local && node.is_none() {
        let message = "Local, and the own node is not known: connections are dropped; pass --node-name";
        report("spec.internalTrafficPolicy", message);
    }
    is_local
}

/// `GetClusterIPByFamily`, for both families.
fn cluster_ips(spec: &ServiceSpec, report: &mut impl FnMut(&str, &str)) -> Vec<Address> {
    let families = spec.ip_families.as_deref().unwrap_or_default();
    if families.is_empty() && spec.cluster_ips.as_ref().is_some_and(|addresses| addresses.len() > 1) {
        report("spec.ipFamilies", "missing although clusterIPs has several; only clusterIP is served");
    }
    let mut found = Vec::with_capacity(2);
    for (family, family_name) in [(Family::V4, "IPv4"), (Family::V6, "IPv6")] {
        let Some((field, text)) = cluster_ip_of(spec, family_name) else { continue };
        match parse_address(text.trim()) {
            Some(address) if address.family() == family => found.push(address),
            // Without ipFamilies the one clusterIP belongs to one family and is rightly missing in the other.
            Some(_) if field == "spec.clusterIP" => {}
            Some(_) => report(&field, &format!("{text:?} is no {family_name} address; not served")),
            None if field == "spec.clusterIP" && family == Family::V6 => {}
            None => report(&field, &format!("{text:?} is no IP address; not served")),
        }
    }
    found
}

fn cluster_ip_of<'a>(spec: &'a ServiceSpec, family_name: &str) -> Option<(String, &'a str)> {
    let families = spec.ip_families.as_deref().unwrap_or_default();
    if families.is_empty() {
        return spec.cluster_ip.as_deref().map(|text| ("spec.clusterIP".to_owned(), text));
    }
    let index = families.iter().position(|name| name == family_name)?;
    let text = spec.cluster_ips.as_deref().unwrap_or_default().get(index)?;
    Some((format!("spec.clusterIPs[{index}]"), text))
}

fn ports(spec: &ServiceSpec, report: &mut impl FnMut(&str, &str)) -> Vec<ServicePort> {
    let specs = spec.ports.as_deref().unwrap_or_default();
    if specs.is_empty() {
        report("spec.ports", "the Service has no ports; nothing to serve, add one");
    }
    let mut seen = HashSet::new();
    let mut ports = Vec::with_capacity(specs.len());
    for (index, spec) in specs.iter().enumerate() {
        match service_port(spec) {
            Ok(port) if seen.insert((port.name.clone(), port.protocol)) => ports.push(port),
            Ok(_) => report(&format!("spec.ports[{index}]"), "another port has the same name and protocol; not served"),
            Err(message) => report(&format!("spec.ports[{index}]"), &message),
        }
    }
    ports
}

fn service_port(spec: &ServicePortSpec) -> Result<ServicePort, String> {
    let protocol = parse_protocol(spec.protocol.as_deref())?;
    let port = spec.port.ok_or("it has no port number; not served")?;
    let port = u16::try_from(port).ok().filter(|&port| port != 0);
    let port = port.ok_or_else(|| format!("port {} is not in 1..65535; not served", spec.port.unwrap_or_default()))?;
    Ok(ServicePort { name: spec.name.as_deref().unwrap_or_default().into(), protocol, port })
}

/// Reads a protocol; nothing means TCP.
pub(super) fn parse_protocol(text: Option<&str>) -> Result<Protocol, String> {
    match text {
        None | Some("" | "TCP") => Ok(Protocol::Tcp),
        Some("UDP") => Ok(Protocol::Udp),
        Some(other) => Err(format!("protocol {other} cannot be served by socket hooks; skipped")),
    }
}
