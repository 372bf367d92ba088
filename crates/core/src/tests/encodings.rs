//! Rows of arbitrary objects: the same from JSON and from protobuf.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{Event, json, protobuf};
use crate::ObjectRow;

/// Object with some of these members. One that is left out is absent or null.
fn object(members: Vec<(&'static str, BoxedStrategy<Value>)>) -> BoxedStrategy<Value> {
    let member = |(name, value): (&'static str, BoxedStrategy<Value>)| {
        prop_oneof![3 => value.prop_map(Some), 1 => Just(Some(Value::Null)), 1 => Just(None)]
            .prop_map(move |value| value.map(|value| (name.to_owned(), value)))
            .boxed()
    };
    let members: Vec<_> = members.into_iter().map(member).collect();
    members.prop_map(|members| Value::Object(members.into_iter().flatten().collect::<Map<_, _>>())).boxed()
}

fn text(choice: &'static [&'static str]) -> BoxedStrategy<Value> {
    prop_oneof![9 => prop::sample::select(choice).prop_map(Value::from), 1 => ".{0,9}".prop_map(Value::from)].boxed()
}

fn list(item: BoxedStrategy<Value>) -> BoxedStrategy<Value> {
    prop::collection::vec(item, 0..4).prop_map(Value::from).boxed()
}

fn number() -> BoxedStrategy<Value> {
    prop_oneof![4 => 0..70_000_i32, 1 => any::<i32>()].prop_map(Value::from).boxed()
}

fn boolean() -> BoxedStrategy<Value> {
    any::<bool>().prop_map(Value::from).boxed()
}

fn metadata() -> BoxedStrategy<Value> {
    let labels = object(vec![
        ("kubernetes.io/service-name", text(&["", "web"])),
        ("service.kubernetes.io/headless", text(&[""])),
        ("service.kubernetes.io/service-proxy-name", text(&["", "other"])),
        ("topology.kubernetes.io/zone", text(&["", "z1"])),
    ]);
    // No label is null: labels of null have no meaning in Go either.
    let labels = labels.prop_map(|mut labels| {
        labels.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        labels
    });
    object(vec![
        ("name", text(&["", "web", "api"])),
        ("namespace", text(&["", "default", "prod"])),
        ("resourceVersion", text(&["", "7"])),
        (
            "creationTimestamp",
            prop::sample::select(&["1970-01-01T00:00:00Z", "2026-01-02T03:04:05Z"][..]).prop_map(Value::from).boxed(),
        ),
        ("labels", labels.boxed()),
    ])
}

const ADDRESSES: &[&str] = &["", "None", "10.96.0.1", "10.0.0.01", "fd00::1", "::ffff:10.0.0.7", "127.0.0.1", "x"];

fn address() -> BoxedStrategy<Value> {
    text(ADDRESSES)
}

fn protocol() -> BoxedStrategy<Value> {
    text(&["", "TCP", "UDP", "SCTP"])
}

fn of_kind(kind: &'static str, members: Vec<(&'static str, BoxedStrategy<Value>)>) -> BoxedStrategy<Value> {
    object(members)
        .prop_map(move |mut value| {
            value["kind"] = json!(kind);
            value
        })
        .boxed()
}

fn service() -> BoxedStrategy<Value> {
    let port = object(vec![
        ("name", text(&["", "http"])),
        ("protocol", protocol()),
        ("port", number()),
        ("nodePort", number()),
    ]);
    let ingress = object(vec![("ip", address()), ("ipMode", text(&["", "VIP", "Proxy"]))]);
    let timeout = object(vec![("timeoutSeconds", number())]);
    let spec = object(vec![
        ("type", text(&["", "ClusterIP", "LoadBalancer", "ExternalName"])),
        ("clusterIP", address()),
        ("clusterIPs", list(address())),
        ("ipFamilies", list(text(&["", "IPv4", "IPv6"]))),
        ("ports", list(port)),
        ("sessionAffinity", text(&["", "None", "ClientIP"])),
        ("sessionAffinityConfig", object(vec![("clientIP", timeout)])),
        ("internalTrafficPolicy", text(&["", "Cluster", "Local"])),
        ("externalIPs", list(address())),
        ("loadBalancerSourceRanges", list(text(&["", "10.0.0.0/8", "0.0.0.0/0", "::/0", "x"]))),
    ]);
    let status = object(vec![("loadBalancer", object(vec![("ingress", list(ingress))]))]);
    of_kind("Service", vec![("metadata", metadata()), ("spec", spec), ("status", status)])
}

fn slice() -> BoxedStrategy<Value> {
    let conditions = object(vec![("ready", boolean()), ("serving", boolean()), ("terminating", boolean())]);
    let named = || list(object(vec![("name", text(&["", "z1", "here"]))]));
    let endpoint = object(vec![
        ("addresses", list(address())),
        ("conditions", conditions),
        ("nodeName", text(&["", "here", "there"])),
        ("hints", object(vec![("forZones", named()), ("forNodes", named())])),
    ]);
    let port = object(vec![("name", text(&["", "http"])), ("protocol", protocol()), ("port", number())]);
    of_kind(
        "EndpointSlice",
        vec![
            ("metadata", metadata()),
            ("addressType", text(&["", "IPv4", "IPv6", "FQDN"])),
            ("endpoints", list(endpoint)),
            ("ports", list(port)),
        ],
    )
}

fn node() -> BoxedStrategy<Value> {
    let address = object(vec![("type", text(&["", "InternalIP", "Hostname"])), ("address", address())]);
    let status = object(vec![("addresses", list(address))]);
    of_kind("Node", vec![("metadata", metadata()), ("status", status)])
}

/// Row and problems, as seen from a node; none if the object has no name.
fn row(event: &Event) -> Option<String> {
    let row = match event {
        Event::Service(service) => ObjectRow::of_service(service, Some("here")),
        Event::EndpointSlice(slice) => ObjectRow::of_slice(slice, Some("here")),
        Event::Node(node) => ObjectRow::of_node(node),
        other => panic!("{other:?}"),
    };
    row.map(|row| format!("{} {:?}", row.name, row.parsed))
}

proptest! {
    #[test]
    fn the_row_of_an_object_is_the_same_from_json_and_from_protobuf(
        object in prop_oneof![service(), slice(), node()],
    ) {
        let (json, protobuf) = (json(&object), protobuf(&object));
        prop_assert_eq!(row(&json), row(&protobuf), "{}", object);
        prop_assert_eq!(format!("{json:?}"), format!("{protobuf:?}"));
    }
}
