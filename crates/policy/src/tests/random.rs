//! Random histories of random clusters.

use std::net::IpAddr;

use cproxy_core::ObjectName;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{
    oracle::Traffic,
    world::{Gone, Object, World},
};
use crate::{
    Action, Direction, Directions, LabelSelector, Peers, PodSelection, Policy, PortName, Ports, Protocol, Rule, Scope,
    Tier, api::Pod,
};

const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];
const PORTS: [u16; 6] = [53, 80, 81, 90, 8080, 9000];
/// Addresses of pods, of nodes and of neither.
const PROBES: [&str; 11] = [
    "10.0.0.1",
    "10.0.0.2",
    "10.0.1.1",
    "10.0.1.2",
    "10.9.0.7",
    "fd00::1",
    "fd00::2",
    "192.0.2.1",
    "192.0.2.2",
    "198.51.100.1",
    "127.0.0.1",
];

/// Change of the cluster.
#[derive(Clone, Debug)]
enum Step {
    Namespace {
        name: usize,
        team: Option<usize>,
    },
    Pod(PodStep),
    /// One part of a pod changes, if it is there.
    PodPart(PodStep, u8),
    Policy {
        namespace: usize,
        name: u8,
        spec: Value,
    },
    NamespaceGone {
        name: usize,
    },
    PodGone {
        namespace: usize,
        name: u8,
    },
    PolicyGone {
        namespace: usize,
        name: u8,
    },
    ClusterPolicy(Policy),
    ClusterPolicyGone {
        name: u8,
    },
}

#[derive(Clone, Debug)]
struct PodStep {
    namespace: usize,
    name: u8,
    labels: (Option<usize>, Option<usize>),
    /// Addresses, from the first of [`PROBES`].
    addresses: Vec<usize>,
    /// Number of addresses besides, from 10.9.0.0.
    more: u32,
    node: usize,
    /// 80 or 8080 as http, and as the number of the port with the same name of UDP.
    http: Option<bool>,
    state: u8,
    created: u8,
}

fn step() -> impl Strategy<Value = Step> {
    let (namespace, name) = (|| 0..NAMESPACES.len(), || 0..3_u8);
    prop_oneof![
        2 => (namespace(), prop::option::of(0..2_usize)).prop_map(|(name, team)| Step::Namespace { name, team }),
        8 => pod().prop_map(Step::Pod),
        6 => (pod(), 0..5_u8).prop_map(|(pod, part)| Step::PodPart(pod, part)),
        6 => (namespace(), name(), spec()).prop_map(|(namespace, name, spec)| Step::Policy { namespace, name, spec }),
        1 => namespace().prop_map(|name| Step::NamespaceGone { name }),
        2 => (namespace(), name()).prop_map(|(namespace, name)| Step::PodGone { namespace, name }),
        2 => (namespace(), name()).prop_map(|(namespace, name)| Step::PolicyGone { namespace, name }),
    ]
}

/// Change of a cluster that has cluster-wide policies, too.
fn tiered_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => step(),
        2 => cluster_policy().prop_map(Step::ClusterPolicy),
        1 => (0..3_u8).prop_map(|name| Step::ClusterPolicyGone { name }),
    ]
}

fn cluster_policy() -> impl Strategy<Value = Policy> {
    let selector = || {
        let texts = &["", "app=0", "tier!=1", "team in (0,1)", "!app"][..];
        prop::sample::select(texts).prop_map(|text| LabelSelector::parse(text).unwrap())
    };
    let selection =
        move || (selector(), selector()).prop_map(|(of, pods)| PodSelection { scope: Scope::Namespaces(of), pods });
    let action = prop::sample::select(&[Action::Accept, Action::Deny, Action::Pass][..]);
    let ports = prop_oneof![
        Just(Ports::All),
        Just(Ports::Some {
            ranges: [].into(),
            names: [PortName { name: "http".into(), protocol: Protocol::Tcp }].into(),
        }),
    ];
    let rule = (any::<bool>(), action, ports, selection()).prop_map(|(is_ingress, action, ports, peer)| Rule {
        direction: if is_ingress { Direction::Ingress } else { Direction::Egress },
        index: 0,
        action,
        ports,
        peers: Peers::Some { pods: [peer].into(), blocks: [].into() },
    });
    let tier = prop_oneof![(0..2_u16).prop_map(Tier::Admin), (0..2_u16).prop_map(Tier::Baseline)];
    (0..3_u8, tier, selection(), prop::collection::vec(rule, 0..3)).prop_map(|(name, tier, subject, rules)| Policy {
        name: ObjectName::new("", name.to_string()),
        uid: "".into(),
        tier,
        subject: Some(subject),
        isolates: Directions::default(),
        rules: rules.into(),
    })
}

fn pod() -> impl Strategy<Value = PodStep> {
    let labels = || prop::option::of(0..2_usize);
    let more = prop_oneof![5 => Just(0), 1 => 0..300_u32];
    let names = (0..NAMESPACES.len(), 0..3_u8, labels(), labels());
    let addresses = prop::collection::vec(0..7_usize, 0..3);
    (names, addresses, more, 0..2_usize, prop::option::of(any::<bool>()), 0..10_u8, 0..3_u8).prop_map(
        |((namespace, name, app, tier), addresses, more, node, http, state, created)| PodStep {
            namespace,
            name,
            labels: (app, tier),
            addresses,
            more,
            node,
            http,
            state,
            created,
        },
    )
}

fn selector() -> impl Strategy<Value = Value> {
    let label = || prop_oneof![Just("app"), Just("tier"), Just("team"), Just("kubernetes.io/metadata.name")];
    let value = || prop::sample::select(&["0", "1", "a", "b"][..]);
    let operator = prop::sample::select(&["In", "NotIn", "Exists", "DoesNotExist", "In", "NotIn", "Like"][..]);
    let expression = (label(), operator, prop::collection::vec(value(), 1..3)).prop_map(|(key, operator, values)| {
        let values = if operator.contains("Exist") { vec![] } else { values };
        json!({"key": key, "operator": operator, "values": values})
    });
    let labels = (label(), value()).prop_map(|(key, value)| json!({"matchLabels": {key: value}}));
    prop_oneof![
        2 => Just(json!({})),
        3 => labels,
        2 => prop::collection::vec(expression, 1..3).prop_map(|expressions| json!({"matchExpressions": expressions})),
    ]
}

fn peer() -> impl Strategy<Value = Value> {
    const RANGES: [&str; 7] =
        ["10.0.0.0/8", "10.0.0.0/24", "10.0.0.1/32", "0.0.0.0/0", "fd00::/16", "::/0", "fd00::2/128"];
    let block = (0..RANGES.len(), prop::collection::vec(0..RANGES.len(), 0..2)).prop_map(|(cidr, except)| {
        json!({"ipBlock": {"cidr": RANGES[cidr], "except": except.iter().map(|&at| RANGES[at]).collect::<Vec<_>>()}})
    });
    prop_oneof![
        3 => block,
        3 => selector().prop_map(|pods| json!({"podSelector": pods})),
        2 => selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        2 => (selector(), selector())
            .prop_map(|(pods, namespaces)| json!({"podSelector": pods, "namespaceSelector": namespaces})),
    ]
}

fn port() -> impl Strategy<Value = Value> {
    let protocol = prop::option::of(prop::sample::select(&PROTOCOLS[..]));
    let number = prop_oneof![4 => prop::sample::select(&PORTS[..]).prop_map(i64::from), 1 => Just(0)];
    let port = prop_oneof![
        2 => Just(json!({})),
        4 => number.prop_map(|port| json!({"port": port})),
        2 => (prop::sample::select(&PORTS[..]), 0..2000_i32)
            .prop_map(|(port, more)| json!({"port": port, "endPort": i32::from(port) - 1 + more})),
        3 => Just(json!({"port": "http"})),
    ];
    (protocol, port).prop_map(|(protocol, mut port)| {
        protocol.into_iter().for_each(|protocol| port["protocol"] = protocol.into());
        port
    })
}

fn spec() -> impl Strategy<Value = Value> {
    let rule = |side: &'static str| {
        let lists = (prop::collection::vec(port(), 0..3), prop::collection::vec(peer(), 0..3));
        lists.prop_map(move |(ports, peers)| json!({"ports": ports, side: peers}))
    };
    let types = prop::sample::subsequence(vec!["Ingress", "Egress"], 0..3);
    let rules = (prop::collection::vec(rule("from"), 0..3), prop::collection::vec(rule("to"), 0..3));
    (selector(), types, rules).prop_map(|(pods, types, (ingress, egress))| {
        json!({"podSelector": pods, "policyTypes": types, "ingress": ingress, "egress": egress})
    })
}

impl PodStep {
    fn object(&self) -> Pod {
        let labels = [("app", self.labels.0), ("tier", self.labels.1)];
        let labels = labels.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_string().into())));
        let few = self.addresses.iter().map(|&at| PROBES[at].to_owned());
        let ips = few.chain((0..self.more).map(|index| format!("10.9.{}.{}", index / 256, index % 256)));
        let ports = self.http.map_or(json!([]), |is_low| {
            let (tcp, udp) = if is_low { (80, 8080) } else { (8080, 80) };
            json!([
                {"name": "http", "containerPort": tcp},
                {"name": "http", "containerPort": udp, "protocol": "UDP"},
                {"name": "http", "containerPort": 9000},
            ])
        });
        let mut pod = json!({
            "metadata": {
                "namespace": NAMESPACES[self.namespace], "name": self.name.to_string(), "uid": "u",
                "labels": labels.collect::<Map<_, _>>(),
                "creationTimestamp": format!("2026-01-01T00:00:0{}Z", self.created),
            },
            "spec": {"containers": [{"ports": ports}], "hostNetwork": self.state == 0},
            "status": {
                "phase": if self.state == 1 { "Failed" } else { "Running" },
                "podIPs": ips.map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
                "hostIPs": [{"ip": PROBES[7 + self.node]}],
            },
        });
        if self.state == 2 {
            pod["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z".into();
        }
        serde_json::from_value(pod).unwrap()
    }
}

/// The pod with one part of another.
fn with_part(mut pod: Pod, other: Pod, part: u8) -> Pod {
    match part {
        0 => pod.metadata.labels = other.metadata.labels,
        1 => pod.spec.containers = other.spec.containers,
        2 => pod.metadata.created = other.metadata.created,
        3 => pod.status.phase = other.status.phase,
        _ => pod.spec.host_network = other.spec.host_network,
    }
    pod
}

fn apply(world: &mut World, step: &Step) {
    let namespace = |index: &usize| NAMESPACES[*index].to_owned();
    match step {
        Step::Pod(pod) => drop(world.put(&Object::Pod(pod.object()))),
        Step::PodPart(pod, part) => {
            let other = pod.object();
            let key = (other.metadata.namespace.clone(), other.metadata.name.clone());
            if let Some(pod) = world.cluster.pods.get(&key).cloned() {
                drop(world.put(&Object::Pod(with_part(pod, other, *part))));
            }
        }
        Step::Namespace { name, team } => {
            let labels = team.map_or(json!({}), |team| json!({"team": team.to_string()}));
            let object = json!({"metadata": {"name": NAMESPACES[*name], "labels": labels}});
            drop(world.put(&Object::Namespace(serde_json::from_value(object).unwrap())));
        }
        Step::Policy { namespace, name, spec } => {
            let metadata = json!({"namespace": NAMESPACES[*namespace], "name": name.to_string()});
            let object = json!({"metadata": metadata, "spec": spec});
            drop(world.put(&Object::Policy(serde_json::from_value(object).unwrap())));
        }
        Step::ClusterPolicy(policy) => world.put_cluster_policy(policy.clone()),
        Step::ClusterPolicyGone { name } => world.remove_cluster_policy(&ObjectName::new("", name.to_string())),
        Step::NamespaceGone { name } => drop(world.remove(&Gone::Namespace(namespace(name)))),
        Step::PodGone { namespace: at, name } => drop(world.remove(&Gone::Pod(namespace(at), name.to_string()))),
        Step::PolicyGone { namespace: at, name } => drop(world.remove(&Gone::Policy(namespace(at), name.to_string()))),
    }
}

/// Compares all verdicts with the oracle's.
fn check_verdicts(world: &World) -> Result<(), String> {
    for ((namespace, name), pod) in &world.cluster.pods {
        let compiled = world.compiled(&ObjectName::new(namespace, &**name));
        for peer in PROBES.map(|text| text.parse::<IpAddr>().unwrap()) {
            for is_ingress in [true, false] {
                for protocol in PROTOCOLS {
                    for port in PORTS {
                        world.allows(pod, &compiled, Traffic { is_ingress, peer, protocol, port })?;
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn every_history_gives_the_verdicts_of_the_rules(steps in prop::collection::vec(step(), 1..24)) {
        let mut world = World::default();
        for step in &steps {
            apply(&mut world, step);
            if let Err(error) = world.check() {
                return Err(TestCaseError::fail(error));
            }
        }
        if let Err(error) = check_verdicts(&world) {
            return Err(TestCaseError::fail(error));
        }
    }

    #[test]
    fn every_history_of_tiers_gives_the_policies_of_a_full_recomputation(
        steps in prop::collection::vec(tiered_step(), 1..24),
    ) {
        let mut world = World::default();
        for step in &steps {
            apply(&mut world, step);
            if let Err(error) = world.check() {
                return Err(TestCaseError::fail(error));
            }
        }
    }
}
