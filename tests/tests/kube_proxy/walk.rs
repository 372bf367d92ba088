//! Effect of kube-proxy's rules on the first packet of a connection. The chains are followed as in the kernel, for the
//! statements that kube-proxy 1.36 uses (pkg/proxy/nftables/proxier.go). An unknown statement ends the test.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use serde_json::{Value, json};

use crate::{
    cluster::POD_IPS,
    frontends::{Frontend, Outcome, address},
    ruleset::{Ruleset, Table, key, named, text},
};

/// Origin of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// A pod of the node: the packet arrives on an interface.
    Pod,
    /// A process of the node: the source is an address of the node.
    Node,
}

/// The packet that opens a connection.
struct Packet<'f> {
    source: IpAddr,
    origin: Origin,
    to: &'f Frontend,
}

/// Continuation after a statement.
enum Next {
    Rule,
    /// The calling chain goes on.
    Return,
    End(Outcome),
}

/// Outcome of a new connection from the VM, which must be the same for a pod and for the node itself. `None`: the
/// packet keeps its destination.
pub(crate) fn outcome(ruleset: &Ruleset, to: &Frontend) -> Option<Outcome> {
    let table = ruleset.table(to.address.ip()).expect("kube-proxy has a table for each family");
    let source = POD_IPS.map(|ip| ip.parse::<IpAddr>().unwrap());
    let source = source.into_iter().find(|ip| ip.is_ipv4() == to.address.is_ipv4()).expect("an address of the family");
    let [pod, node] = [Origin::Pod, Origin::Node].map(|origin| Packet { source, origin, to }.outcome(table));
    assert_eq!(pod, node, "left is what a pod meets at {to}, right a process of the node");
    pod
}

/// All frontends of kube-proxy's rules.
pub(crate) fn frontends(ruleset: &Ruleset) -> BTreeSet<Frontend> {
    let mut frontends = BTreeSet::new();
    for table in ruleset.tables() {
        for map in ["service-ips", "no-endpoint-services", "firewall-ips"] {
            frontends.extend(table.map(map).iter().map(|(key, _)| frontend(&key[0], &key[1..])));
        }
        for map in ["service-nodeports", "no-endpoint-nodeports"] {
            for (key, _) in table.map(map) {
                frontends.extend(table.set("nodeport-ips").elements.iter().map(|ip| frontend(ip, key)));
            }
        }
    }
    frontends
}

/// Every address that refuses connections to all ports without a Service.
pub(crate) fn cluster_ips(ruleset: &Ruleset) -> BTreeSet<IpAddr> {
    ruleset.tables().flat_map(|table| &table.set("cluster-ips").elements).map(address).collect()
}

fn frontend(ip: &Value, protocol_and_port: &[Value]) -> Frontend {
    Frontend {
        protocol: text(&protocol_and_port[0]).to_uppercase(),
        address: SocketAddr::new(address(ip), port(&protocol_and_port[1])),
    }
}

fn port(value: &Value) -> u16 {
    value.as_u64().and_then(|port| port.try_into().ok()).unwrap_or_else(|| panic!("{value} is no port"))
}

impl Packet<'_> {
    /// Evaluates the hooks in order. Routes, which the rules do not contain, decide whether the packet stays on the
    /// node, so both filters apply. They differ only in packets that just one of them can meet: node ports in one,
    /// ClusterIPs in the other.
    fn outcome(&self, table: &Table) -> Option<Outcome> {
        let hooks = match self.origin {
            Origin::Pod => ["filter-prerouting-pre-dnat", "nat-prerouting", "filter-input", "filter-forward"],
            Origin::Node => ["filter-output-pre-dnat", "nat-output", "filter-output", "filter-input"],
        };
        hooks.iter().find_map(|chain| self.chain(table, chain))
    }

    fn chain(&self, table: &Table, name: &str) -> Option<Outcome> {
        let rules = table.chains.get(name).unwrap_or_else(|| panic!("kube-proxy's table has no chain {name}"));
        let mut remembered = None;
        for rule in rules {
            match self.rule(table, rule, &mut remembered) {
                Next::Rule => {}
                Next::Return => return None,
                Next::End(Outcome::Forward { backends, affinity: None }) => {
                    return Some(Outcome::Forward { backends, affinity: remembered });
                }
                Next::End(outcome) => return Some(outcome),
            }
        }
        None
    }

    /// Evaluates a rule. `remembered` is the duration of the source's affinity in this chain.
    fn rule(&self, table: &Table, statements: &[Value], remembered: &mut Option<u64>) -> Next {
        for statement in statements {
            let (name, body) = named(statement);
            match name {
                "match" => {
                    if !self.matches(table, body) {
                        return Next::Rule;
                    }
                }
                // Marks only select packets to masquerade.
                "mangle" => {}
                "set" => *remembered = table.set(text(&body["set"]).trim_start_matches('@')).timeout,
                "vmap" => match self.vmap(table, body) {
                    Next::Rule => {}
                    next => return next,
                },
                "dnat" => return Next::End(Outcome::Forward { backends: translation(body), affinity: None }),
                _ => match self.evaluate(table, statement) {
                    Next::Rule => {}
                    next => return next,
                },
            }
        }
        Next::Rule
    }

    fn evaluate(&self, table: &Table, statement: &Value) -> Next {
        let (name, body) = named(statement);
        match name {
            "drop" => Next::End(Outcome::Drop),
            "reject" => Next::End(Outcome::Refuse),
            "jump" => self.chain(table, &text(&body["target"])).map_or(Next::Rule, Next::End),
            "goto" => self.chain(table, &text(&body["target"])).map_or(Next::Return, Next::End),
            other => panic!("kube-proxy's rules have a statement {other}: {statement}"),
        }
    }

    fn vmap(&self, table: &Table, body: &Value) -> Next {
        if let Some(map) = body["data"].as_str() {
            let wanted = key(&body["key"]).iter().map(|part| self.value(part)).collect::<Vec<_>>();
            let found = table.map(map.trim_start_matches('@')).iter().find(|(key, _)| *key == wanted);
            return found.map_or(Next::Rule, |(_, verdict)| self.evaluate(table, verdict));
        }
        let all = at_random(body).into_iter().map(|verdict| match self.evaluate(table, &verdict) {
            Next::End(Outcome::Forward { backends, affinity }) => (backends, affinity),
            _ => panic!("a random choice does not lead to an endpoint: {body}"),
        });
        let (backends, affinities): (Vec<_>, BTreeSet<_>) = all.unzip();
        let mut affinities = affinities.into_iter();
        let affinity = affinities.next().flatten();
        assert!(affinities.next().is_none(), "some endpoints are remembered longer than others: {body}");
        Next::End(Outcome::Forward { backends: backends.into_iter().flatten().collect(), affinity })
    }

    fn matches(&self, table: &Table, body: &Value) -> bool {
        let (left, right) = (&body["left"], &body["right"]);
        let is_equal = match right.as_str().and_then(|name| name.strip_prefix('@')) {
            // There was no connection before, so no affinity applies.
            Some(set) if set.starts_with("affinity-") => {
                assert!(table.set(set).elements.is_empty(), "a client has connected: {set}");
                false
            }
            Some(set) => table.set(set).elements.contains(&self.value(left)),
            None => contains(&self.value(left), right),
        };
        match text(&body["op"]).as_str() {
            "==" | "in" => is_equal,
            "!=" => !is_equal,
            other => panic!("kube-proxy's rules compare with {other}: {body}"),
        }
    }

    /// The value of an expression for this packet.
    fn value(&self, expression: &Value) -> Value {
        let payload = &expression["payload"]["field"];
        if payload == "saddr" {
            json!(self.source)
        } else if payload == "daddr" {
            json!(self.to.address.ip())
        } else if payload == "dport" {
            json!(self.to.address.port())
        } else if expression["meta"]["key"] == "l4proto" {
            json!(self.to.protocol.to_lowercase())
        } else if expression["ct"]["key"] == "state" {
            json!("new")
        } else if expression["fib"]["result"] == "type" && contains(&json!("saddr"), &expression["fib"]["flags"]) {
            json!(if self.origin == Origin::Node { "local" } else { "unicast" })
        } else {
            panic!("kube-proxy's rules look at {expression}")
        }
    }
}

/// Targets of `dnat to`: an address and port, or one of several.
fn translation(body: &Value) -> BTreeSet<SocketAddr> {
    let one = |ip: &Value, number: &Value| SocketAddr::new(address(ip), port(number));
    let (ip, number) = (&body["addr"], &body["port"]);
    if ip["map"].is_null() {
        return BTreeSet::from([one(ip, number)]);
    }
    at_random(&ip["map"]).iter().map(key).map(|parts| one(&parts[0], &parts[1])).collect()
}

/// Elements of the map for a random number, all equally probable.
fn at_random(map: &Value) -> Vec<Value> {
    let elements = map["data"]["set"].as_array().expect("a map in place has elements");
    assert_eq!(map["key"]["numgen"]["mod"], elements.len(), "the choice is not even: {map}");
    assert_eq!(map["key"]["numgen"]["mode"], "random", "the choice is not random: {map}");
    elements.iter().map(|element| element[1].clone()).collect()
}

/// Whether a value equals the right side, or is one of its elements.
fn contains(value: &Value, right: &Value) -> bool {
    if let Some(elements) = right["set"].as_array().or(right.as_array()) {
        return elements.iter().any(|element| contains(value, element));
    }
    // A prefix covers the first bits of an address, in both families.
    let bits = |value: &Value| match address(value) {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    };
    if right["prefix"].is_object() {
        let length = u32::try_from(right["prefix"]["len"].as_u64().expect("a prefix has a length")).unwrap();
        let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
        return bits(value) & mask == bits(&right["prefix"]["addr"]) & mask;
    }
    if let Some(ends) = right["range"].as_array() {
        return (bits(&ends[0])..=bits(&ends[1])).contains(&bits(value));
    }
    assert!(right.is_string(), "kube-proxy's rules compare with {right}");
    value == right
}
