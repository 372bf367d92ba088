//! Random Services.

use cproxy_tests::random::Random;
use serde_json::{Value, json};

use crate::cluster::NODE_IPS;

/// Names of ports with their most common protocols.
pub(crate) const PORT_NAMES: [(&str, &str); 4] = [("web", "TCP"), ("dns", "UDP"), ("alt", "TCP"), ("sig", "SCTP")];
const PORT_NUMBERS: [u16; 4] = [53, 80, 443, 8080];

/// First node port. The API server chooses its own from above these.
const NODE_PORTS: usize = 30_000;

/// Ranges with the VM, with the node alone, with neither, and with both. One has blanks, which the API accepts.
const SOURCE_RANGES: [&str; 12] = [
    "10.244.0.0/16",
    " 10.244.255.250/32 ",
    "10.244.0.0/17",
    "192.0.2.0/24",
    "172.16.0.0/12",
    "0.0.0.0/0",
    "fd00:10:244::/48",
    "fd00:10:244::ff:250/128",
    "fd00:10:244::/112",
    "2001:db8::/64",
    "2001:db8:ffff::/48",
    "::/0",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalName,
    Headless,
}

const TYPES: [(usize, Type); 5] = [
    (25, Type::ClusterIp),
    (20, Type::NodePort),
    (45, Type::LoadBalancer),
    (5, Type::ExternalName),
    (5, Type::Headless),
];

const FAMILIES: [&[&str]; 4] = [&["IPv4"], &["IPv6"], &["IPv4", "IPv6"], &["IPv6", "IPv4"]];

#[derive(Clone, Copy, Debug)]
struct Port {
    name: &'static str,
    protocol: &'static str,
    number: u16,
}

/// One change of a Service.
type Change = fn(&mut Service, &mut Random);

/// A Service that exists or not.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) namespace: &'static str,
    pub(crate) name: &'static str,
    pub(crate) exists: bool,
    /// Whether its label assigns it to another proxy.
    is_hidden: bool,
    kind: Type,
    families: &'static [&'static str],
    ports: Vec<Port>,
    affinity: Option<u32>,
    is_internal_local: bool,
    is_external_local: bool,
    /// Traffic distribution, which neither proxy reads; the controller that sets hints does.
    distribution: Option<&'static str>,
    has_node_ports: bool,
    /// Number that determines its addresses and node ports; no other Service has it at the same time.
    pub(crate) number: usize,
    external_ips: Vec<String>,
    source_ranges: Vec<&'static str>,
    ingresses: Vec<Value>,
}

impl Service {
    pub(crate) fn new(namespace: &'static str, name: &'static str) -> Self {
        Self {
            namespace,
            name,
            exists: false,
            is_hidden: false,
            kind: Type::ClusterIp,
            families: FAMILIES[0],
            ports: Vec::new(),
            affinity: None,
            is_internal_local: false,
            is_external_local: false,
            distribution: None,
            has_node_ports: true,
            number: 0,
            external_ips: Vec::new(),
            source_ranges: Vec::new(),
            ingresses: Vec::new(),
        }
    }

    /// Draws a new Service under the same name.
    pub(crate) fn draw(&mut self, random: &mut Random, number: usize) {
        *self = Self { exists: true, number, ..Self::new(self.namespace, self.name) };
        self.kind = random.weighted(&TYPES);
        self.families = random.pick(&FAMILIES);
        self.draw_ports(random);
        self.draw_affinity(random);
        self.is_internal_local = random.percent(30);
        self.is_external_local = random.percent(40);
        self.distribution = random.pick(&[None, Some("PreferSameZone"), Some("PreferSameNode")]);
        self.has_node_ports = random.percent(80);
        self.draw_external_ips(random);
        self.draw_source_ranges(random);
        self.draw_ingresses(random);
    }

    /// Changes one property, possibly to the same value or without visible effect.
    pub(crate) fn change(&mut self, random: &mut Random) {
        let changes: [(usize, Change); 11] = [
            (12, |service, random| service.kind = random.weighted(&TYPES)),
            (8, |service, random| service.families = random.pick(&FAMILIES)),
            (15, Self::draw_ports),
            (8, Self::draw_affinity),
            (10, |service, _| service.is_internal_local ^= true),
            (8, |service, _| service.is_external_local ^= true),
            (4, |service, _| service.has_node_ports ^= true),
            (10, Self::draw_external_ips),
            (12, Self::draw_source_ranges),
            (12, Self::draw_ingresses),
            (6, |service, _| service.is_hidden ^= true),
        ];
        random.weighted(&changes)(self, random);
    }

    fn draw_ports(&mut self, random: &mut Random) {
        let count = random.pick(&[1, 1, 2, 2, 3]);
        let mut names = PORT_NAMES.to_vec();
        self.ports.clear();
        for _ in 0..count {
            let (name, usual) = names.swap_remove(random.below(names.len()));
            let protocol = if random.percent(8) { random.pick(&["TCP", "UDP"]) } else { usual };
            let mut number = random.pick(&PORT_NUMBERS);
            while self.ports.iter().any(|port| port.number == number && port.protocol == protocol) {
                number += 1;
            }
            self.ports.push(Port { name, protocol, number });
        }
        if count == 1 && random.percent(30) {
            self.ports[0].name = "";
        }
    }

    fn draw_affinity(&mut self, random: &mut Random) {
        self.affinity = random.percent(40).then(|| random.pick(&[1, 30, 10_800, 86_400]));
    }

    /// Draws its own external addresses, and sometimes its ClusterIPs, those of its load balancer, or the ClusterIPs of
    /// the Service made before it. Only one Service may have the node's addresses: of two Services that claim an
    /// address, kube-proxy takes any.
    fn draw_external_ips(&mut self, random: &mut Random) {
        let mut all = self.own_external_ips().to_vec();
        if random.percent(20) {
            all.extend(self.cluster_ips());
            all.extend(self.balancer_ips());
        }
        if random.percent(20) {
            all.extend(cluster_ips(self.number - 1));
        }
        if (self.namespace, self.name) == ("default", "a") {
            all.extend(NODE_IPS.map(str::to_owned));
        }
        self.external_ips = random.some(&all, 2);
    }

    fn draw_source_ranges(&mut self, random: &mut Random) {
        let most = random.pick(&[0, 2, 3]);
        self.source_ranges = random.some(&SOURCE_RANGES, most);
    }

    fn draw_ingresses(&mut self, random: &mut Random) {
        let mut ips = self.balancer_ips().to_vec();
        if random.percent(15) {
            ips.extend(self.own_external_ips());
        }
        self.ingresses.clear();
        for ip in ips.iter().filter(|_| random.percent(80)).collect::<Vec<_>>() {
            let mode = random.weighted(&[(5, None), (3, Some("VIP")), (2, Some("Proxy"))]);
            self.ingresses.push(json!({"ip": ip, "ipMode": mode}));
        }
        if random.percent(20) {
            self.ingresses.push(json!({"hostname": "balancer.example.com"}));
        }
    }

    fn own_external_ips(&self) -> [String; 2] {
        [format!("198.51.100.{}", self.number), format!("2001:db8:e::{}", self.number)]
    }

    fn balancer_ips(&self) -> [String; 2] {
        [format!("203.0.113.{}", self.number), format!("2001:db8:f::{}", self.number)]
    }

    fn cluster_ips(&self) -> [String; 2] {
        cluster_ips(self.number)
    }

    /// The object in the API server's form.
    pub(crate) fn object(&self) -> Value {
        let labels =
            if self.is_hidden { json!({"service.kubernetes.io/service-proxy-name": "another"}) } else { json!({}) };
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": labels},
            "spec": if self.kind == Type::ExternalName { external_name() } else { self.spec() },
        })
    }

    /// Ingresses of its load balancer; `None` if it has none.
    pub(crate) fn ingresses(&self) -> Option<Value> {
        (self.kind == Type::LoadBalancer).then(|| json!(self.ingresses))
    }

    fn spec(&self) -> Value {
        let cluster_ips: Vec<_> = match self.kind {
            Type::Headless => vec!["None".to_owned()],
            _ => {
                self.families.iter().map(|family| self.cluster_ips()[usize::from(*family == "IPv6")].clone()).collect()
            }
        };
        let mut spec = json!({
            "type": match self.kind {
                Type::NodePort => "NodePort",
                Type::LoadBalancer => "LoadBalancer",
                _ => "ClusterIP",
            },
            "clusterIP": cluster_ips[0],
            "clusterIPs": cluster_ips,
            "ipFamilies": self.families,
            "ipFamilyPolicy": if self.families.len() == 2 { "RequireDualStack" } else { "SingleStack" },
            "ports": (0..self.ports.len()).map(|index| self.port(index)).collect::<Vec<_>>(),
            "internalTrafficPolicy": policy(self.is_internal_local),
            "trafficDistribution": self.distribution,
            "externalIPs": self.external_ips,
            "sessionAffinity": "None",
        });
        if let Some(seconds) = self.affinity {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": seconds}});
        }
        if matches!(self.kind, Type::NodePort | Type::LoadBalancer) || !self.external_ips.is_empty() {
            spec["externalTrafficPolicy"] = json!(policy(self.is_external_local));
        }
        if self.kind == Type::LoadBalancer {
            spec["loadBalancerSourceRanges"] = json!(self.source_ranges);
            spec["allocateLoadBalancerNodePorts"] = json!(self.has_node_ports);
        }
        spec
    }

    fn port(&self, index: usize) -> Value {
        let Port { name, protocol, number } = self.ports[index];
        let mut port = json!({"name": name, "protocol": protocol, "port": number});
        if self.kind == Type::NodePort || self.kind == Type::LoadBalancer && self.has_node_ports {
            // The API server allows ports of one number and two protocols to share a node port.
            let first = self.ports.iter().position(|port| port.number == number).unwrap();
            port["nodePort"] = json!(NODE_PORTS + 4 * self.number + first);
        }
        port
    }
}

fn policy(is_local: bool) -> &'static str {
    if is_local { "Local" } else { "Cluster" }
}

/// ClusterIPs of the Service with this number.
fn cluster_ips(number: usize) -> [String; 2] {
    [format!("10.96.1.{number}"), format!("fd00:10:96::1{number:02}")]
}

fn external_name() -> Value {
    json!({"type": "ExternalName", "externalName": "example.com"})
}
