//! Objects with and without mistakes, in JSON and in protobuf.

use cproxy_core::parse_address;
use cproxy_testing::encoding;
use prost::Message;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::{
    api,
    model::{ContainerPort, Direction, Directions, Node, Peers, PortName, PortRange, Ports},
};

/// The object from JSON, which is the same from protobuf.
fn object<T: DeserializeOwned + Message + Default + PartialEq + std::fmt::Debug>(kind: &str, mut value: Value) -> T {
    let from_json: T = serde_json::from_value(value.clone()).unwrap();
    value["kind"] = kind.into();
    assert_eq!(T::decode(&*encoding::object(&value)).unwrap(), from_json);
    from_json
}

fn policy(spec: Value) -> Read<Policy> {
    let metadata = json!({"name": "p", "namespace": "shop", "uid": "u"});
    Policy::read(&object::<NetworkPolicy>("NetworkPolicy", json!({"metadata": metadata, "spec": spec}))).unwrap()
}

fn texts(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

#[test]
fn a_pod_is_read_without_what_policies_do_not_need() {
    let pod: api::Pod = object(
        "Pod",
        json!({
            "metadata": {
                "name": "web-0", "namespace": "shop", "uid": "a-b", "labels": {"app": "web"},
                "creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": "2026-01-02T03:05:05Z",
                "annotations": {"secret": "planted"},
            },
            "spec": {
                "nodeName": "n1", "hostNetwork": true, "restartPolicy": "Always",
                "containers": [
                    {"name": "a", "env": [{"name": "KEY", "value": "planted"}], "ports": [
                        {"name": "http", "containerPort": 8080}, {"containerPort": 9},
                        {"name": "dns", "containerPort": 53, "protocol": "UDP"},
                        {"name": "bad", "containerPort": 0},
                    ]},
                    {"name": "b", "ports": [{"name": "http", "containerPort": 8081}]},
                ],
                "initContainers": [
                    {"name": "c", "restartPolicy": "Always", "ports": [
                        {"name": "mesh", "containerPort": 15000}, {"name": "http", "containerPort": 8082},
                    ]},
                    {"name": "d", "ports": [{"name": "once", "containerPort": 1}]},
                ],
            },
            "status": {
                "phase": "Running", "podIP": "10.1.0.1", "hostIP": "192.0.2.1",
                "podIPs": [{"ip": "10.1.0.1"}, {"ip": "fd00::1"}, {"ip": "10.1.0.1"}, {"ip": "127.0.0.1"}],
            },
        }),
    );
    assert!(!format!("{pod:?}").contains("planted"));
    let Read { value, problems } = Pod::read(&pod).unwrap();
    let port = |name: &str, protocol, number| ContainerPort { name: PortName { name: name.into(), protocol }, number };
    let expected = Pod {
        name: ObjectName::new("shop", "web-0"),
        uid: "a-b".into(),
        labels: Labels::new(&[("app".to_owned(), "web".to_owned())].into()),
        addresses: ["10.1.0.1", "fd00::1"].map(|text| parse_address(text).unwrap()).into(),
        node: Node { name: "n1".into(), addresses: [parse_address("192.0.2.1").unwrap()].into() },
        ports: [port("dns", Protocol::Udp, 53), port("http", Protocol::Tcp, 8080), port("mesh", Protocol::Tcp, 15000)]
            .into(),
        is_host_network: true,
        has_ended: false,
        is_terminating: true,
        created_seconds: 1_767_323_045,
    };
    assert_eq!(value, expected);
    assert_eq!(
        texts(&problems),
        [
            "Pod shop/web-0: status.podIPs[3].ip: \"127.0.0.1\" is no address of a host; ignored",
            "Pod shop/web-0: spec.containers: port \"bad\" has no valid protocol and number; no rule has it",
        ]
    );
}

#[test]
fn a_namespace_has_the_label_of_its_name() {
    let read = |labels: Value| {
        Namespace::read(&object("Namespace", json!({"metadata": {"name": "shop", "labels": labels}}))).unwrap()
    };
    assert_eq!(read(json!({"team": "a"})).labels.get(NAMESPACE_NAME), Some("shop"));
    assert_eq!(read(json!({NAMESPACE_NAME: "other"})).labels.get(NAMESPACE_NAME), Some("shop"));
    assert_eq!(Namespace::read(&api::Namespace::default()), None);
}

#[test]
fn policy_types_have_the_defaults_of_the_api_server() {
    for (spec, ingress, egress) in [
        (json!({}), true, false),
        (json!({"egress": []}), true, false),
        (json!({"egress": [{}]}), true, true),
        (json!({"policyTypes": ["Egress"], "ingress": [{}]}), false, true),
        (json!({"policyTypes": ["Ingress"], "egress": [{}]}), true, false),
    ] {
        let Read { value, problems } = policy(spec.clone());
        assert_eq!((value.isolates, problems), (Directions { ingress, egress }, vec![]), "{spec}");
        assert!(value.rules.iter().all(|rule| value.isolates.has(rule.direction)), "{spec}");
    }
}

#[test]
fn each_form_of_port_is_read() {
    let Read { value, problems } = policy(json!({"ingress": [{"ports": [
        {"port": 80}, {"protocol": "UDP", "port": 53}, {"protocol": "SCTP"}, {"port": 8000, "endPort": 9000},
        {"port": "http"}, {"protocol": "UDP", "port": "http"}, {"port": 80, "protocol": "TCP"},
    ]}]}));
    assert_eq!(texts(&problems), [""; 0]);
    let name = |protocol| PortName { name: "http".into(), protocol };
    let ranges = [
        PortRange::single(Protocol::Tcp, 80),
        PortRange { protocol: Protocol::Tcp, first: 8000, last: 9000 },
        PortRange::single(Protocol::Udp, 53),
        PortRange::all(Protocol::Sctp),
    ];
    let expected = Ports::Some { ranges: ranges.into(), names: [name(Protocol::Tcp), name(Protocol::Udp)].into() };
    assert_eq!(value.rules[0].ports, expected);
}

#[test]
fn a_mistake_is_named_and_matches_nothing() {
    let bad = json!({"matchExpressions": [{"key": "a", "operator": "Is"}]});
    let Read { value, problems } = policy(json!({
        "podSelector": bad,
        "policyTypes": ["Ingress", "egress"],
        "ingress": [
            {"ports": [
                {"port": 0}, {"port": 65536}, {"port": 5, "endPort": 4}, {"port": "a", "endPort": 4}, {"endPort": 4},
                {"port": "UPPER"}, {"protocol": "ICMP"},
            ]},
            {"from": [
                {}, {"podSelector": bad}, {"namespaceSelector": bad, "podSelector": {}},
                {"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}, {"ipBlock": {"cidr": "10.0.0.0"}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}},
                {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["x"]}},
            ]},
        ],
    }));
    assert_eq!(value.subject, None);
    assert_eq!(value.rules[0].ports, Ports::Some { ranges: [].into(), names: [].into() });
    assert_eq!(value.rules[1].peers, Peers::Some { pods: [].into(), blocks: [].into() });
    let problem = |field: &str, message: &str| format!("NetworkPolicy shop/p: spec.{field}: {message}");
    let port = |field: &str, message: &str| {
        problem(&format!("ingress[0].ports[{field}"), &format!("{message}; it matches no port"))
    };
    let peer = |field: &str, message: &str| problem(&format!("ingress[1].from[{field}"), message);
    const OPERATOR: &str = "\"Is\" is not In, NotIn, Exists or DoesNotExist; it matches no peer";
    assert_eq!(
        texts(&problems),
        [
            problem("policyTypes[1]", "\"egress\" is not Ingress or Egress; ignored"),
            problem("podSelector", "\"Is\" is not In, NotIn, Exists or DoesNotExist; the policy selects no pod"),
            port("0].port", "0 is not in 1 to 65535"),
            port("1].port", "65536 is not in 1 to 65535"),
            port("2].endPort", "4 is lower than port 5"),
            port("3].endPort", "the port has a name"),
            port("4].endPort", "there is no port"),
            port("5].port", "\"UPPER\" is no name of a port"),
            port("6].protocol", "\"ICMP\" is not TCP, UDP or SCTP"),
            peer("0]", "has no selector and no ipBlock; it matches no peer"),
            peer("1].podSelector", OPERATOR),
            peer("2].namespaceSelector", OPERATOR),
            peer("3]", "has an ipBlock and a selector; it matches no peer"),
            peer("4].ipBlock.cidr", "\"10.0.0.0\" is no range of addresses; the peer matches nothing"),
            peer("5].ipBlock.except[0]", "11.0.0.0/16 is no part of 10.0.0.0/8; the peer matches nothing"),
            peer("6].ipBlock.except[0]", "10.0.0.0/8 is no part of 10.0.0.0/8; the peer matches nothing"),
            peer("7].ipBlock.except[0]", "\"x\" is no range of addresses; the peer matches nothing"),
        ]
    );
}

#[test]
fn old_ranges_are_read_leniently() {
    let Read { value, problems } = policy(json!({"policyTypes": ["Egress"], "egress": [{"to": [
        {"ipBlock": {"cidr": "010.1.2.3/8", "except": ["10.1.2.3/16"]}}, {"ipBlock": {"cidr": "FD00::/8"}},
    ]}]}));
    assert_eq!(
        texts(&problems),
        [
            "NetworkPolicy shop/p: spec.egress[0].to[0].ipBlock.cidr: \"010.1.2.3/8\" is read as 10.0.0.0/8",
            "NetworkPolicy shop/p: spec.egress[0].to[0].ipBlock.except[0]: \"10.1.2.3/16\" is read as 10.1.0.0/16",
        ]
    );
    let Peers::Some { blocks, .. } = &value.rules[0].peers else { panic!("{value:?}") };
    let texts: Vec<_> = blocks.iter().map(|block| format!("{} except {:?}", block.cidr, block.except)).collect();
    assert_eq!(texts, ["10.0.0.0/8 except [10.1.0.0/16]", "fd00::/8 except []"]);
    assert_eq!(value.rules[0].direction, Direction::Egress);
}
