//! Tests of whole objects.

use proptest::{collection::vec, prelude::*};

use super::*;

/// Field with a length.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

fn written(kind: Kind, protobuf: &[u8]) -> String {
    let mut out = Vec::new();
    write_json(kind, protobuf, false, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn error(kind: Kind, protobuf: &[u8]) -> String {
    let mut out = b"before".to_vec();
    let error = write_json(kind, protobuf, true, &mut out).unwrap_err();
    assert_eq!(out, b"before");
    error.to_string()
}

#[test]
fn an_empty_object_has_the_fields_that_go_always_writes() {
    assert_eq!(written(Kind::Service, b""), r#"{"metadata":{},"spec":{},"status":{"loadBalancer":{}}}"#);
    assert_eq!(written(Kind::EndpointSlice, b""), r#"{"metadata":{},"addressType":"","endpoints":null,"ports":null}"#);
    let info = "\"machineID\":\"\",\"systemUUID\":\"\",\"bootID\":\"\",\"kernelVersion\":\"\",\"osImage\":\"\",\
        \"containerRuntimeVersion\":\"\",\"kubeletVersion\":\"\",\"kubeProxyVersion\":\"\",\
        \"operatingSystem\":\"\",\"architecture\":\"\"";
    let status = format!("{{\"daemonEndpoints\":{{\"kubeletEndpoint\":{{\"Port\":0}}}},\"nodeInfo\":{{{info}}}}}");
    assert_eq!(written(Kind::Node, b""), format!("{{\"metadata\":{{}},\"spec\":{{}},\"status\":{status}}}"));
}

#[test]
fn the_type_comes_first() {
    let mut out = b"[".to_vec();
    write_json(Kind::EndpointSlice, b"", true, &mut out).unwrap();
    let json = r#"[{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":{},"#;
    assert!(out.starts_with(json.as_bytes()));
}

#[test]
fn zero_is_left_out_unless_go_has_a_pointer() {
    let port = [field(1, b""), field(2, b""), vec![0x18, 0], field(4, b"")].concat();
    assert!(
        written(Kind::EndpointSlice, &field(3, &port))
            .ends_with(r#""ports":[{"name":"","protocol":"","port":0,"appProtocol":""}]}"#)
    );
    let port = [field(1, b""), field(2, b""), vec![0x18, 0], field(4, b"\x08\x00\x10\x00"), vec![0x28, 0]].concat();
    assert!(
        written(Kind::Service, &field(2, &field(1, &port))).contains(r#""spec":{"ports":[{"port":0,"targetPort":0}]}"#)
    );
}

#[test]
fn a_creation_time_of_zero_is_left_out_but_not_a_condition_s() {
    assert!(written(Kind::Service, &field(1, &field(8, b""))).starts_with(r#"{"metadata":{},"#));
    let time = field(8, b"\x08\x05\x10\x00");
    assert!(written(Kind::Service, &field(1, &time)).contains(r#"{"creationTimestamp":"1970-01-01T00:00:05Z"}"#));
    let condition = field(2, b"");
    let json = r#""conditions":[{"type":"","status":"","lastTransitionTime":null,"reason":"","message":""}]"#;
    assert!(written(Kind::Service, &field(3, &condition)).contains(json));
}

#[test]
fn a_map_is_sorted_and_its_last_entry_counts() {
    let entry = |key: &[u8], value: &[u8]| field(12, &[field(1, key), field(2, value)].concat());
    let annotations =
        [entry(b"b", b"1"), entry(b"a/b", b"<"), entry("ä".as_bytes(), b""), entry(b"b", b"2"), field(12, b"")];
    assert!(
        written(Kind::Service, &field(1, &annotations.concat()))
            .contains(r#"{"annotations":{"":"","a/b":"\u003c","b":"2","ä":""}}"#)
    );
}

#[test]
fn a_quantity_is_a_text() {
    let capacity = field(1, &[field(1, b"cpu"), field(2, &field(1, b"1500m"))].concat());
    let nothing = field(1, &field(1, b"memory"));
    let json = written(Kind::Node, &field(3, &[nothing, capacity].concat()));
    assert!(json.contains(r#""status":{"capacity":{"cpu":"1500m","memory":"0"},"#), "{json}");
}

#[test]
fn other_fields_are_skipped() {
    let unknown = [field(15, b"abc"), vec![0xfd, 0x01, 0, 0, 0, 0]].concat();
    assert_eq!(written(Kind::Service, &unknown), written(Kind::Service, b""));
}

#[test]
fn an_error_names_the_field() {
    let port = |port: &[u8]| field(2, &[field(1, b""), field(1, port)].concat());
    let replaced = written(Kind::Service, &port(&field(1, b"a\xff")));
    assert!(replaced.contains("\"name\":\"a\u{fffd}\""), "as Go does: {replaced}");
    let wrong_type = "another type of field was expected";
    assert_eq!(error(Kind::Service, &port(&field(3, b""))), format!("Service.spec.ports[1].port: {wrong_type}"));
    assert_eq!(error(Kind::Service, &port(b"\x08\x00")), format!("Service.spec.ports[1].name: {wrong_type}"));
    assert_eq!(error(Kind::Service, &port(b"\x0a\x01")), "Service.spec.ports[1]: the message ends within a field");
    let key = field(1, &field(11, &field(1, b"\xff")));
    assert!(written(Kind::Node, &key).contains("\"labels\":{\"\u{fffd}\":\"\"}"));
    assert_eq!(error(Kind::Node, b"\x0a"), "Node: failed to decode Protobuf message: invalid varint");
    let target = field(4, b"\x08\x02");
    let reason = "2 is neither the type of a number nor that of a text";
    assert_eq!(error(Kind::Service, &port(&target)), format!("Service.spec.ports[1].targetPort: {reason}"));
}

/// Bytes that are often a message: fields with small numbers, whose bytes are messages again.
fn messages() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![vec(any::<u8>(), 0..6), "[a-z<\"\\\\]{0,5}".prop_map(String::into_bytes)];
    leaf.prop_recursive(6, 48, 6, |inner| {
        let bytes = (1_u8..16, inner).prop_map(|(number, bytes)| match u8::try_from(bytes.len()) {
            Ok(length @ ..128) => [&[number << 3 | 2, length], &*bytes].concat(),
            _ => Vec::new(),
        });
        let number = (1_u8..16, 0_u8..128).prop_map(|(number, value)| vec![number << 3, value]);
        vec(prop_oneof![4 => bytes, 1 => number], 0..6).prop_map(|fields| fields.concat())
    })
}

#[test]
fn json_becomes_the_protobuf_that_has_the_same_json() {
    for (kind, json) in [
        (
            Kind::Service,
            r#"{"metadata":{"name":"a","resourceVersion":"7","creationTimestamp":"2026-01-02T03:04:05Z","labels":{"":"",
            "b":"ä"},"annotations":{"c":"<"},
            "managedFields":[{"manager":"m","fieldsV1":{"f:spec":{}}}]},"spec":{"ports":
            [{"name":"http","port":80,"targetPort":"web","nodePort":30000},{"port":443,"targetPort":-1,
            "appProtocol":""}],
            "clusterIP":"10.0.0.1","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":0}},"internalTrafficPolicy":
            "Local"},"status":{"loadBalancer":{"ingress":[{"ip":"1.2.3.4","ports":[{"port":1,"protocol":"TCP"}]}]}}}"#,
        ),
        (
            Kind::EndpointSlice,
            r#"{"metadata":{},"addressType":"IPv4","endpoints":[{"addresses":["1.2.3.4"],"conditions":{"ready":false},
            "nodeName":"","hints":{"forZones":[{"name":"z"}]}}],"ports":[{"name":"","port":0}]}"#,
        ),
        (
            Kind::Node,
            r#"{"metadata":{"name":"n"},"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]},"status":{"capacity":{
            "cpu":"2"},"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":null,"lastTransitionTime":
            "1970-01-01T00:00:00Z"}],"addresses":[{"type":"InternalIP","address":"10.0.0.2"}],"images":[{"names":null,
            "sizeBytes":5}]}}"#,
        ),
    ] {
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        let protobuf = read_json(kind, &value).unwrap();
        let again: serde_json::Value = serde_json::from_str(&written(kind, &protobuf)).unwrap();
        assert!(contains(&again, &value), "{again}\n{value}");
    }
}

/// Whether a value has all of another one. Go writes more: fields without `omitempty`.
fn contains(whole: &serde_json::Value, part: &serde_json::Value) -> bool {
    use serde_json::Value::{Array, Object};
    match (whole, part) {
        (Object(whole), Object(part)) => {
            part.iter().all(|(key, part)| whole.get(key).is_some_and(|whole| contains(whole, part)))
        }
        (Array(whole), Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        _ => whole == part,
    }
}

/// A field that is null is the same as none.
fn without_nulls(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value::{Array, Object};
    match value {
        Object(fields) => fields
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key, without_nulls(value)))
            .collect(),
        Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

#[test]
fn a_quantity_may_be_a_number() {
    let node = serde_json::json!({"status": {"capacity": {"cpu": 2, "memory": "1Gi"}}});
    let json = written(Kind::Node, &read_json(Kind::Node, &node).unwrap());
    assert!(json.contains(r#""capacity":{"cpu":"2","memory":"1Gi"}"#), "{json}");
}

#[test]
fn json_of_another_type_is_an_error_that_names_the_field() {
    use serde_json::json;
    for (json, expected) in [
        (json!([]), "Service: an object was expected"),
        (json!({"kind": "Pod"}), "Service: Pod is the kind of another object"),
        (json!({"spec": {"ports": {}}}), "Service.spec.ports: a list was expected"),
        (
            json!({"spec": {"ports": [{"port": 1}, {"port": "80"}]}}),
            "Service.spec.ports[1].port: a whole number of 32 bits was expected",
        ),
        (
            json!({"spec": {"ports": [{"port": 2_147_483_648_u64}]}}),
            "Service.spec.ports[0].port: a whole number of 32 bits was expected",
        ),
        (
            json!({"spec": {"ports": [{"targetPort": 1.5}]}}),
            "Service.spec.ports[0].targetPort: a number or a text was expected",
        ),
        (json!({"spec": {"clusterIP": 1}}), "Service.spec.clusterIP: a text was expected"),
        (
            json!({"spec": {"publishNotReadyAddresses": "x"}}),
            "Service.spec.publishNotReadyAddresses: true or false was expected",
        ),
        (json!({"metadata": {"labels": ["a"]}}), "Service.metadata.labels: an object was expected"),
        (
            json!({"metadata": {"creationTimestamp": "today"}}),
            "Service.metadata.creationTimestamp: a time as in RFC 3339 was expected",
        ),
    ] {
        assert_eq!(read_json(Kind::Service, &json).unwrap_err().to_string(), expected);
    }
}

fn check(protobuf: &[u8]) {
    for (kind, with_type) in Kind::ALL.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let mut out = b"1,".to_vec();
        match write_json(kind, protobuf, with_type, &mut out) {
            Ok(()) => {
                let json = str::from_utf8(out.strip_prefix(b"1,").unwrap()).unwrap();
                // A time may be out of the range that is read.
                if let Ok(again) = read_json(kind, &serde_json::from_str(json).unwrap()) {
                    let mut twice = Vec::new();
                    write_json(kind, &again, with_type, &mut twice).unwrap();
                    let [first, second] = [json, str::from_utf8(&twice).unwrap()]
                        .map(|json| without_nulls(serde_json::from_str(json).unwrap()));
                    assert_eq!(first, second);
                }
            }
            Err(error) => {
                assert_eq!(out, b"1,");
                assert!(error.to_string().starts_with(kind.name()) && !error.to_string().contains('\n'));
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_give_json_or_an_error(protobuf in vec(any::<u8>(), 0..200)) {
        check(&protobuf);
    }

    #[test]
    fn any_message_gives_json_or_an_error(protobuf in messages()) {
        check(&protobuf);
    }

    #[test]
    fn a_part_of_a_message_gives_json_or_an_error(protobuf in messages(), end: prop::sample::Index) {
        check(protobuf.get(..end.index(protobuf.len() + 1)).unwrap());
    }
}
