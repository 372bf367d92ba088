//! Random clusters with every field of policies, and random traffic in them. All objects are as an API server accepts
//! them.

use cproxy_tests::random::Random;
use serde_json::{Map, Value, json};

pub(crate) const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];

const NAMESPACES: [&str; 2] = ["a", "b"];
const KEYS: [&str; 3] = ["app", "tier", "team"];
/// Values of labels.
pub(crate) const VALUES: [&str; 3] = ["", "0", "1"];
const PORT_NAMES: [&str; 2] = ["http", "dns"];
const PORTS: [u16; 6] = [53, 80, 81, 90, 8080, 9000];
const NODES: [&str; 2] = ["192.0.2.1", "192.0.2.2"];
/// Ranges, each with some that are parts of it.
const RANGES: [(&str, &[&str]); 6] = [
    ("0.0.0.0/0", &["10.0.0.0/8", "10.0.0.2/32", "192.0.2.0/24"]),
    ("10.0.0.0/8", &["10.0.0.0/29", "10.0.0.4/30", "10.0.0.1/32"]),
    ("10.0.0.0/29", &["10.0.0.2/31", "10.0.0.5/32"]),
    ("192.0.2.1/32", &[]),
    ("::/0", &["fd00::/16", "fd00::2/128"]),
    ("fd00::/125", &["fd00::2/127", "fd00::4/128"]),
];
/// Addresses outside the cluster, and loopback.
const OTHERS: [&str; 4] = ["198.51.100.1", "2001:db8::1", "127.0.0.1", "::1"];
/// Traffic of a cluster.
const TRAFFIC: usize = 400;

/// Objects as JSON, and traffic.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) namespaces: Vec<Value>,
    pub(crate) pods: Vec<Value>,
    pub(crate) policies: Vec<Value>,
    pub(crate) traffic: Vec<Traffic>,
}

/// A call or datagram.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
}

impl Cluster {
    /// The form that the Go program reads.
    pub(crate) fn json(&self) -> Value {
        let traffic = self.traffic.iter().map(
            |Traffic { from, to, protocol, port }| json!({"from": from, "to": to, "protocol": protocol, "port": port}),
        );
        json!({
            "namespaces": self.namespaces, "pods": self.pods, "networkPolicies": self.policies,
            "traffic": traffic.collect::<Vec<_>>(),
        })
    }
}

pub(crate) fn cluster(random: &mut Random) -> Cluster {
    let namespaces = NAMESPACES.map(|name| namespace(random, name)).into();
    // No two pods have one address.
    let mut free: Vec<String> = (1..=8).flat_map(|n| [format!("10.0.0.{n}"), format!("fd00::{n}")]).collect();
    free = random.shuffled(&free);
    let pods: Vec<Value> = (0..2 + random.below(6)).map(|index| pod(random, index, &mut free)).collect();
    let policies = (0..random.below(6)).map(|index| policy(random, index)).collect();
    let traffic = traffic(random, &pods);
    Cluster { namespaces, pods, policies, traffic }
}

fn namespace(random: &mut Random, name: &str) -> Value {
    let mut labels = labels(random);
    labels.insert("kubernetes.io/metadata.name".to_owned(), name.into());
    json!({"metadata": {"name": name, "labels": labels}})
}

fn labels(random: &mut Random) -> Map<String, Value> {
    random.some(&KEYS, 3).into_iter().map(|key| (key.to_owned(), random.pick(&VALUES).into())).collect()
}

fn pod(random: &mut Random, index: usize, free: &mut Vec<String>) -> Value {
    let node = random.pick(&NODES);
    let is_host_network = random.percent(10);
    let addresses = match is_host_network {
        true => vec![node.to_owned()],
        false => free.split_off(free.len().saturating_sub(random.below(4))),
    };
    let ips: Vec<_> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let containers: Vec<_> =
        (0..random.weighted(&[(2, 0), (3, 1), (2, 2)])).map(|index| container(random, index)).collect();
    let mut init = container(random, 9);
    if random.percent(80) {
        init["restartPolicy"] = "Always".into();
    }
    let metadata = json!({
        "namespace": random.pick(&NAMESPACES), "name": format!("p{index}"), "uid": format!("u{index}"),
        "labels": labels(random), "creationTimestamp": "2026-01-01T00:00:00Z",
    });
    json!({
        "metadata": metadata,
        "spec": {
            "hostNetwork": is_host_network, "nodeName": node, "containers": containers,
            "initContainers": if random.percent(50) { vec![init] } else { vec![] },
        },
        "status": {
            "phase": random.weighted(&[(12, "Running"), (2, "Pending"), (1, "Failed"), (1, "Succeeded")]),
            "podIP": addresses.first(), "podIPs": ips, "hostIP": node, "hostIPs": [{"ip": node}],
        },
    })
}

/// A container, in which each name of a port is there once.
fn container(random: &mut Random, index: usize) -> Value {
    let ports = random.shuffled(&PORT_NAMES).into_iter().map(|name| {
        let mut port = json!({"name": name, "containerPort": random.pick(&PORTS)});
        set_protocol(random, &mut port);
        port
    });
    let ports: Vec<_> = ports.collect();
    json!({"name": format!("c{index}"), "ports": ports})
}

fn set_protocol(random: &mut Random, port: &mut Value) {
    if random.percent(30) {
        port["protocol"] = random.pick(&PROTOCOLS).into();
    }
}

fn policy(random: &mut Random, index: usize) -> Value {
    let mut spec = json!({"podSelector": selector(random)});
    let types = random.some(&["Ingress", "Egress"], 2);
    if !types.is_empty() {
        spec["policyTypes"] = json!(types);
    }
    for (list, side) in [("ingress", "from"), ("egress", "to")] {
        // An empty list differs from none for some.
        if random.percent(80) {
            let rules: Vec<_> = (0..random.weighted(&[(1, 0), (4, 1), (3, 2)])).map(|_| rule(random, side)).collect();
            spec[list] = rules.into();
        }
    }
    json!({"metadata": {"namespace": random.pick(&NAMESPACES), "name": format!("n{index}")}, "spec": spec})
}

fn rule(random: &mut Random, side: &str) -> Value {
    let mut rule = json!({});
    if random.percent(60) {
        rule["ports"] = (0..random.below(3)).map(|_| port(random)).collect::<Vec<_>>().into();
    }
    if random.percent(75) {
        rule[side] = (0..random.below(3)).map(|_| peer(random)).collect::<Vec<_>>().into();
    }
    rule
}

fn port(random: &mut Random) -> Value {
    let number = random.pick(&PORTS);
    let mut port = match random.below(8) {
        0 => json!({}),
        1 | 2 => json!({"port": number, "endPort": usize::from(number) + random.below(2_000)}),
        3..=6 => json!({"port": random.pick(&PORT_NAMES)}),
        _ => json!({"port": number}),
    };
    set_protocol(random, &mut port);
    port
}

fn peer(random: &mut Random) -> Value {
    match random.below(4) {
        0 => {
            let (cidr, parts) = random.pick(&RANGES);
            json!({"ipBlock": {"cidr": cidr, "except": random.some(parts, 2)}})
        }
        1 => json!({"podSelector": selector(random)}),
        2 => json!({"namespaceSelector": selector(random)}),
        _ => json!({"podSelector": selector(random), "namespaceSelector": selector(random)}),
    }
}

fn selector(random: &mut Random) -> Value {
    let mut selector = json!({});
    if random.percent(25) {
        selector["matchLabels"] = json!({random.pick(&KEYS): random.pick(&VALUES)});
    }
    if random.percent(25) {
        let expressions: Vec<_> = (0..=random.below(2)).map(|_| expression(random)).collect();
        selector["matchExpressions"] = expressions.into();
    }
    selector
}

fn expression(random: &mut Random) -> Value {
    let operator = random.pick(&["In", "NotIn", "Exists", "DoesNotExist"]);
    let (key, values) = match random.percent(20) {
        true => ("kubernetes.io/metadata.name", &NAMESPACES[..]),
        false => (random.pick(&KEYS), &VALUES[..]),
    };
    let mut values = random.shuffled(values);
    values.truncate(if operator.ends_with("In") { 1 + random.below(2) } else { 0 });
    json!({"key": key, "operator": operator, "values": values})
}

fn traffic(random: &mut Random, pods: &[Value]) -> Vec<Traffic> {
    let ips = pods.iter().flat_map(|pod| pod["status"]["podIPs"].as_array().unwrap());
    let mut sources: Vec<_> = ips.map(|ip| ip["ip"].as_str().unwrap().to_owned()).collect();
    sources.extend(NODES.iter().chain(&OTHERS[..2]).map(|&text| text.to_owned()));
    let mut targets = sources.clone();
    targets.extend(OTHERS[2..].iter().map(|&text| text.to_owned()));
    let mut traffic = Vec::new();
    while traffic.len() < TRAFFIC {
        let [from, to] = [&sources, &targets].map(|all| all[random.below(all.len())].clone());
        if from.contains(':') == to.contains(':') {
            traffic.push(Traffic {
                from,
                to,
                protocol: random.weighted(&[(3, "TCP"), (1, "UDP"), (1, "SCTP")]),
                port: random.pick(&PORTS),
            });
        }
    }
    traffic
}
