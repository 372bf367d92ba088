//! Encoder of Kubernetes objects in protobuf, from their JSON, for tests: as the API server writes them, with every
//! field that is no pointer in Go, even if it is empty or zero. Independent of the decoder under test.

use serde_json::Value;

/// Field of a message: its number, its name in JSON and its type.
type Field = (u32, &'static str, Type);

/// Type of a field.
#[derive(Clone, Copy)]
enum Type {
    /// Text that is always written.
    Text,
    /// Number that is always written.
    Number,
    /// Message that is always written.
    Message(&'static [Field]),
    /// Text, number, boolean or message that is written if it is there.
    Pointer(&'static [Field]),
    /// List of texts or messages.
    List(&'static [Field]),
    /// Texts by name.
    Map,
    /// Time as an RFC 3339 text; an empty message if it is not there.
    Time,
    /// Time that is written if it is there.
    TimePointer,
    /// Number or text that is written if it is there.
    IntOrString,
}

use Type::{IntOrString, List, Map, Message, Number, Pointer, Text, Time, TimePointer};

const METADATA: &[Field] = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (7, "generation", Number),
    (8, "creationTimestamp", Time),
    (9, "deletionTimestamp", TimePointer),
    (11, "labels", Map),
    (12, "annotations", Map),
];
const SERVICE: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (
        2,
        "spec",
        Message(&[
            (
                1,
                "ports",
                List(&[
                    (1, "name", Text),
                    (2, "protocol", Text),
                    (3, "port", Number),
                    (5, "nodePort", Number),
                    (6, "appProtocol", Pointer(&[])),
                ]),
            ),
            (2, "selector", Map),
            (3, "clusterIP", Text),
            (4, "type", Text),
            (5, "externalIPs", List(&[])),
            (7, "sessionAffinity", Text),
            (8, "loadBalancerIP", Text),
            (9, "loadBalancerSourceRanges", List(&[])),
            (10, "externalName", Text),
            (11, "externalTrafficPolicy", Text),
            (12, "healthCheckNodePort", Number),
            (14, "sessionAffinityConfig", Pointer(&[(1, "clientIP", Pointer(&[(1, "timeoutSeconds", Pointer(&[]))]))])),
            (18, "clusterIPs", List(&[])),
            (19, "ipFamilies", List(&[])),
            (22, "internalTrafficPolicy", Pointer(&[])),
        ]),
    ),
    (
        3,
        "status",
        Message(&[(
            1,
            "loadBalancer",
            Message(&[(1, "ingress", List(&[(1, "ip", Text), (2, "hostname", Text), (3, "ipMode", Pointer(&[]))]))]),
        )]),
    ),
];
const NAMED: &[Field] = &[(1, "name", Text)];
const ENDPOINT_SLICE: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (
        2,
        "endpoints",
        List(&[
            (1, "addresses", List(&[])),
            (
                2,
                "conditions",
                Message(&[(1, "ready", Pointer(&[])), (2, "serving", Pointer(&[])), (3, "terminating", Pointer(&[]))]),
            ),
            (3, "hostname", Pointer(&[])),
            (6, "nodeName", Pointer(&[])),
            (7, "zone", Pointer(&[])),
            (8, "hints", Pointer(&[(1, "forZones", List(NAMED)), (2, "forNodes", List(NAMED))])),
        ]),
    ),
    (3, "ports", List(&[(1, "name", Pointer(&[])), (2, "protocol", Pointer(&[])), (3, "port", Pointer(&[]))])),
    (4, "addressType", Text),
];
const NODE: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (2, "spec", Message(&[(1, "podCIDR", Text), (4, "unschedulable", Pointer(&[]))])),
    (3, "status", Message(&[(3, "phase", Text), (5, "addresses", List(&[(1, "type", Text), (2, "address", Text)]))])),
];
const NAMESPACE: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (2, "spec", Message(&[(1, "finalizers", List(&[]))])),
    (3, "status", Message(&[(1, "phase", Text)])),
];
const CONTAINERS: Type = List(&[
    (1, "name", Text),
    (2, "image", Text),
    (
        6,
        "ports",
        List(&[
            (1, "name", Text),
            (2, "hostPort", Number),
            (3, "containerPort", Number),
            (4, "protocol", Text),
            (5, "hostIP", Text),
        ]),
    ),
    (7, "env", List(&[(1, "name", Text), (2, "value", Text)])),
    (24, "restartPolicy", Pointer(&[])),
]);
const POD: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (
        2,
        "spec",
        Message(&[
            (2, "containers", CONTAINERS),
            (3, "restartPolicy", Text),
            (10, "nodeName", Text),
            (11, "hostNetwork", Pointer(&[])),
            (20, "initContainers", CONTAINERS),
        ]),
    ),
    (
        3,
        "status",
        Message(&[
            (1, "phase", Text),
            (5, "hostIP", Text),
            (6, "podIP", Text),
            (12, "podIPs", List(&[(1, "ip", Text)])),
            (16, "hostIPs", List(&[(1, "ip", Text)])),
        ]),
    ),
];
const LABEL_SELECTOR: &[Field] = &[
    (1, "matchLabels", Map),
    (2, "matchExpressions", List(&[(1, "key", Text), (2, "operator", Text), (3, "values", List(&[]))])),
];
const POLICY_PORTS: Type =
    List(&[(1, "protocol", Pointer(&[])), (2, "port", IntOrString), (3, "endPort", Pointer(&[]))]);
const POLICY_PEERS: Type = List(&[
    (1, "podSelector", Pointer(LABEL_SELECTOR)),
    (2, "namespaceSelector", Pointer(LABEL_SELECTOR)),
    (3, "ipBlock", Pointer(&[(1, "cidr", Text), (2, "except", List(&[]))])),
]);
const NETWORK_POLICY: &[Field] = &[
    (1, "metadata", Message(METADATA)),
    (
        2,
        "spec",
        Message(&[
            (1, "podSelector", Message(LABEL_SELECTOR)),
            (2, "ingress", List(&[(1, "ports", POLICY_PORTS), (2, "from", POLICY_PEERS)])),
            (3, "egress", List(&[(1, "ports", POLICY_PORTS), (2, "to", POLICY_PEERS)])),
            (4, "policyTypes", List(&[])),
        ]),
    ),
];
const STATUS: &[Field] = &[
    (1, "metadata", Message(&[])),
    (2, "status", Text),
    (3, "message", Text),
    (4, "reason", Text),
    (5, "details", Pointer(&[(1, "name", Text), (5, "retryAfterSeconds", Number)])),
    (6, "code", Number),
];

/// The object in protobuf, without its kind.
pub fn object(value: &Value) -> Vec<u8> {
    let fields = match value["kind"].as_str() {
        Some("Service") => SERVICE,
        Some("EndpointSlice") => ENDPOINT_SLICE,
        Some("Node") => NODE,
        Some("Namespace") => NAMESPACE,
        Some("Pod") => POD,
        Some("NetworkPolicy") => NETWORK_POLICY,
        Some("Status") => STATUS,
        _ => &[(1, "metadata", Message(METADATA))],
    };
    message(fields, value)
}

/// Field with a length.
pub fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    let mut field = varint(u64::from(number << 3 | 2));
    field.extend(varint(bytes.len() as u64));
    field.extend_from_slice(bytes);
    field
}

/// A number, least significant seven bits first.
pub fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// An encoded object as the API server sends it: magic bytes, its kind, and its fields.
pub fn envelope(kind: &str, object: &[u8]) -> Vec<u8> {
    [envelope_start(kind), field(2, object), field(3, b""), field(4, b"")].concat()
}

/// The first bytes of that, before the object.
pub fn envelope_start(kind: &str) -> Vec<u8> {
    [b"k8s\0".to_vec(), field(1, &[field(1, b"v1"), field(2, kind.as_bytes())].concat())].concat()
}

/// An event of a watch as the API server sends it: its length, and the event with an object in its envelope.
pub fn frame(change: &str, envelope: &[u8]) -> Vec<u8> {
    let event = [field(1, change.as_bytes()), field(2, &field(1, envelope))].concat();
    [u32::try_from(event.len()).unwrap().to_be_bytes().to_vec(), event].concat()
}

/// Seconds since 1970 of a time like `2026-01-02T03:04:05Z`.
fn seconds(text: &str) -> i64 {
    let numbers: Vec<i64> =
        text.trim_end_matches('Z').split(['-', 'T', ':']).map(|part| part.parse().unwrap()).collect();
    let [year, month, day, hour, minute, second] = numbers[..] else { panic!("{text} is no time") };
    // Years begin in March, so that a leap day is the last day of one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
    ((days * 24 + hour) * 60 + minute) * 60 + second
}

fn message(fields: &[Field], value: &Value) -> Vec<u8> {
    fields.iter().flat_map(|&(number, name, kind)| encode(number, kind, &value[name])).collect()
}

fn encode(number: u32, kind: Type, value: &Value) -> Vec<u8> {
    match kind {
        Text => field(number, value.as_str().unwrap_or_default().as_bytes()),
        Number => [varint(u64::from(number << 3)), varint(value.as_i64().unwrap_or_default() as u64)].concat(),
        Message(fields) => field(number, &message(fields, value)),
        List(fields) => {
            let items = value.as_array().into_iter().flatten();
            items
                .flat_map(|item| encode(number, if fields.is_empty() { Text } else { Message(fields) }, item))
                .collect()
        }
        Map => {
            let entries = value.as_object().into_iter().flatten();
            let entry = |(name, value): (&String, &Value)| {
                field(number, &[field(1, name.as_bytes()), encode(2, Text, value)].concat())
            };
            entries.flat_map(entry).collect()
        }
        Time => match value.as_str() {
            Some(text) => {
                field(number, &[encode(1, Number, &seconds(text).into()), encode(2, Number, &Value::Null)].concat())
            }
            None => field(number, b""),
        },
        TimePointer if value.is_null() => Vec::new(),
        TimePointer => encode(number, Time, value),
        IntOrString => match value {
            Value::Null => Vec::new(),
            Value::String(_) => field(
                number,
                &[encode(1, Number, &1.into()), encode(2, Number, &0.into()), encode(3, Text, value)].concat(),
            ),
            _ => field(
                number,
                &[encode(1, Number, &0.into()), encode(2, Number, value), encode(3, Text, &"".into())].concat(),
            ),
        },
        Pointer(fields) => match value {
            Value::Null => Vec::new(),
            Value::Bool(bool) => encode(number, Number, &i64::from(*bool).into()),
            Value::Number(_) => encode(number, Number, value),
            Value::String(_) => encode(number, Text, value),
            _ => encode(number, Message(fields), value),
        },
    }
}
