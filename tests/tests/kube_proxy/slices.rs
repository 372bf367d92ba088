//! Random EndpointSlices.

use cproxy_tests::{control_plane::NODE, random::Random};
use serde_json::{Value, json};

use crate::{cluster::ZONES, services::PORT_NAMES};

/// Limit on the endpoints of a slice. The addresses of a Service's first slice are mostly not those of its second.
const ENDPOINTS_MAX: usize = 4;

/// Topology hints of a Service's endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hints {
    None,
    Zones,
    Nodes,
    Both,
    /// Random hints for each endpoint.
    Mixed,
}

pub(crate) const HINTS: [(usize, Hints); 5] =
    [(30, Hints::None), (25, Hints::Zones), (15, Hints::Nodes), (15, Hints::Both), (15, Hints::Mixed)];

#[derive(Clone, Debug)]
struct Endpoint {
    address: usize,
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
    node: Option<&'static str>,
    zones: Vec<&'static str>,
    nodes: Vec<&'static str>,
}

#[derive(Clone, Copy, Debug)]
struct Port {
    name: &'static str,
    protocol: &'static str,
    number: Option<u16>,
}

/// A slice that exists or not.
#[derive(Clone, Debug)]
pub(crate) struct Slice {
    pub(crate) namespace: &'static str,
    /// Service that it is named after, and that Service's number among all.
    origin: &'static str,
    pub(crate) number: usize,
    family: &'static str,
    /// Number among the slices with the same origin and family.
    part: usize,
    pub(crate) exists: bool,
    /// Service in its label.
    pub(crate) service: Option<&'static str>,
    is_headless: bool,
    ports: Vec<Port>,
    endpoints: Vec<Endpoint>,
}

impl Slice {
    /// All slices of one Service.
    pub(crate) fn all(namespace: &'static str, origin: &'static str, number: usize) -> [Self; 5] {
        [("IPv4", 0), ("IPv4", 1), ("IPv6", 0), ("IPv6", 1), ("FQDN", 0)].map(|(family, part)| Self {
            namespace,
            origin,
            number,
            family,
            part,
            exists: false,
            service: Some(origin),
            is_headless: false,
            ports: Vec::new(),
            endpoints: Vec::new(),
        })
    }

    /// Draws a new slice under the same name.
    pub(crate) fn draw(&mut self, random: &mut Random, hints: Hints) {
        (self.exists, self.service, self.is_headless) = (true, Some(self.origin), false);
        self.draw_ports(random);
        self.draw_endpoints(random, hints);
    }

    /// Service to which both proxies assign it.
    pub(crate) fn visible_service(&self) -> Option<&'static str> {
        self.service.filter(|name| self.exists && !self.is_headless && !name.is_empty())
    }

    /// Changes one property, possibly to the same value.
    pub(crate) fn change(&mut self, random: &mut Random, hints: Hints, services: &[&'static str]) {
        match random.weighted(&[(30, 0), (30, 1), (15, 2), (12, 3), (5, 4), (3, 5), (5, 6)]) {
            0 => self.draw_endpoints(random, hints),
            1 => self.change_endpoint(random, Endpoint::draw_conditions),
            2 => self.change_endpoint(random, |endpoint, random| endpoint.draw_place(random, hints)),
            3 => self.draw_ports(random),
            4 => self.endpoints.clear(),
            5 => {
                let another = random.pick(services);
                self.service = random.pick(&[None, Some(""), Some(another), Some(self.origin)]);
            }
            _ => self.is_headless ^= true,
        }
    }

    /// Whether both have the addresses of the same pods; each is its own sibling.
    pub(crate) fn is_sibling(&self, other: &Self) -> bool {
        (self.number, self.family) == (other.number, other.family)
    }

    /// Copies an endpoint of a sibling, as if the endpoint were about to move.
    pub(crate) fn copy_from(&mut self, random: &mut Random, sibling: &Self) {
        if !sibling.endpoints.is_empty() {
            self.endpoints.push(sibling.endpoints[random.below(sibling.endpoints.len())].clone());
        }
    }

    fn change_endpoint(&mut self, random: &mut Random, change: impl Fn(&mut Endpoint, &mut Random)) {
        if !self.endpoints.is_empty() {
            let index = random.below(self.endpoints.len());
            change(&mut self.endpoints[index], random);
        }
    }

    fn draw_endpoints(&mut self, random: &mut Random, hints: Hints) {
        self.endpoints.clear();
        for _ in 0..random.below(ENDPOINTS_MAX + 1) {
            let own = self.part * ENDPOINTS_MAX + random.below(ENDPOINTS_MAX);
            let address = if random.percent(90) { own } else { random.below(2 * ENDPOINTS_MAX) };
            // The same address twice in one slice is rare.
            if random.percent(10) || self.endpoints.iter().all(|endpoint| endpoint.address != address) {
                self.endpoints.push(Endpoint::random(random, address, hints));
            }
        }
    }

    fn draw_ports(&mut self, random: &mut Random) {
        self.ports.clear();
        for (index, (name, usual)) in (0..).zip([("", "TCP")].into_iter().chain(PORT_NAMES)) {
            if random.percent(90) {
                let protocol = if random.percent(5) { random.pick(&["TCP", "UDP"]) } else { usual };
                let number =
                    random.weighted(&[(80, Some(8_080 + index)), (12, Some(9_090 + index)), (4, Some(0)), (4, None)]);
                self.ports.push(Port { name, protocol, number });
            }
        }
    }

    /// The object in the API server's form.
    pub(crate) fn object(&self) -> Value {
        let mut labels = json!({});
        if let Some(service) = self.service {
            labels["kubernetes.io/service-name"] = json!(service);
        }
        if self.is_headless {
            labels["service.kubernetes.io/headless"] = json!("");
        }
        let port = |port: &Port| json!({"name": port.name, "protocol": port.protocol, "port": port.number});
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": self.namespace,
                "name": format!("{}-{}-{}", self.origin, self.family.to_lowercase(), self.part),
                "labels": labels,
            },
            "addressType": self.family,
            "ports": self.ports.iter().map(port).collect::<Vec<_>>(),
            "endpoints": self.endpoints.iter().map(|endpoint| self.endpoint(endpoint)).collect::<Vec<_>>(),
        })
    }

    fn endpoint(&self, endpoint: &Endpoint) -> Value {
        // Only the first address counts.
        let addresses = [endpoint.address + 1, endpoint.address + 101].map(|last| match self.family {
            "IPv4" => format!("10.244.{}.{last}", self.number),
            "IPv6" => format!("fd00:10:244::{}:{last}", self.number + 1),
            _ => format!("pod-{last}.example.com"),
        });
        let hints = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
        json!({
            "addresses": addresses[..1 + endpoint.address % 2],
            "conditions": {
                "ready": endpoint.ready,
                "serving": endpoint.serving,
                "terminating": endpoint.terminating,
            },
            "nodeName": endpoint.node,
            "hints": {"forZones": hints(&endpoint.zones), "forNodes": hints(&endpoint.nodes)},
        })
    }
}

impl Endpoint {
    fn random(random: &mut Random, address: usize, hints: Hints) -> Self {
        let (zones, nodes) = (Vec::new(), Vec::new());
        let mut endpoint = Self { address, ready: None, serving: None, terminating: None, node: None, zones, nodes };
        endpoint.draw_conditions(random);
        endpoint.draw_place(random, hints);
        endpoint
    }

    fn draw_conditions(&mut self, random: &mut Random) {
        self.ready = random.weighted(&[(20, None), (40, Some(true)), (40, Some(false))]);
        self.serving = random.weighted(&[(30, None), (40, Some(true)), (30, Some(false))]);
        self.terminating = random.weighted(&[(30, None), (30, Some(false)), (40, Some(true))]);
    }

    fn draw_place(&mut self, random: &mut Random, hints: Hints) {
        const NODES: [&str; 2] = [NODE, "another"];
        self.node = random.weighted(&[(35, Some(NODE)), (45, Some("another")), (20, None)]);
        (self.zones, self.nodes) = (random.some(&ZONES, 2), random.some(&NODES, 2));
        if matches!(hints, Hints::Zones | Hints::Both) && self.zones.is_empty() {
            self.zones.push(random.pick(&ZONES));
        }
        if matches!(hints, Hints::Nodes | Hints::Both) && self.nodes.is_empty() {
            self.nodes.push(random.pick(&NODES));
        }
        if matches!(hints, Hints::None | Hints::Nodes) {
            self.zones.clear();
        }
        if matches!(hints, Hints::None | Hints::Zones) {
            self.nodes.clear();
        }
    }
}
