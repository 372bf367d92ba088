//! Tests of the encodings, by tables.

use prost::Message;
use serde_json::{Value, from_slice};

use super::*;
use crate::object::{item_bytes, push_item};

/// metav1.Status (apimachinery/pkg/apis/meta/v1/generated.proto 1.36)
#[derive(Clone, PartialEq, Message)]
struct ReadStatus {
    #[prost(string, tag = "2")]
    status: String,
    #[prost(string, tag = "3")]
    message: String,
    #[prost(string, tag = "4")]
    reason: String,
    #[prost(message, optional, tag = "5")]
    details: Option<Details>,
    #[prost(int32, tag = "6")]
    code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Details {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    group: String,
    #[prost(string, tag = "3")]
    kind: String,
    #[prost(message, repeated, tag = "4")]
    causes: Vec<Cause>,
    #[prost(int32, tag = "5")]
    retry_after_seconds: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Cause {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    message: String,
}

fn statuses() -> [Status; 3] {
    [
        Status::new(410, "Expired", "too old resource version: 7"),
        Status {
            object: Some(Box::new(("web".to_owned(), "discovery.k8s.io", "endpointslices"))),
            ..Status::new(404, "NotFound", "endpointslices.discovery.k8s.io \"web\" not found")
        },
        Status {
            retry_after_seconds: 1,
            cause: Some(("ResourceVersionTooLarge", "Too large resource version")),
            ..Status::new(504, "Timeout", "Timeout: Too large resource version: 9, current: 7")
        },
    ]
}

#[test]
fn an_error_is_a_status_in_json() {
    let expected = [
        r#"{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410,
            "reason": "Expired", "message": "too old resource version: 7"}"#,
        r#"{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404,
            "reason": "NotFound", "message": "endpointslices.discovery.k8s.io \"web\" not found",
            "details": {"name": "web", "group": "discovery.k8s.io", "kind": "endpointslices"}}"#,
        r#"{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 504,
            "reason": "Timeout",
            "message": "Timeout: Too large resource version: 9, current: 7",
            "details": {"retryAfterSeconds": 1,
                        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}}"#,
    ];
    for (status, expected) in statuses().iter().zip(expected) {
        let expected: Value = from_slice(expected.as_bytes()).unwrap();
        assert_eq!(from_slice::<Value>(&status.body(Format::Json)).unwrap(), expected);
        let event: Value = from_slice(&status.event(Format::Json)).unwrap();
        assert_eq!((&event["type"], &event["object"]), (&json!("ERROR"), &expected));
        assert!(status.event(Format::Json).ends_with(b"}\n"), "a line ends an event");
    }
}

#[test]
fn an_error_is_a_status_in_protobuf() {
    let details = [
        None,
        Some(Details {
            name: "web".to_owned(),
            group: "discovery.k8s.io".to_owned(),
            kind: "endpointslices".to_owned(),
            ..Details::default()
        }),
        Some(Details {
            retry_after_seconds: 1,
            causes: vec![Cause {
                reason: "ResourceVersionTooLarge".to_owned(),
                message: "Too large resource version".to_owned(),
            }],
            ..Details::default()
        }),
    ];
    for (status, details) in statuses().iter().zip(details) {
        let body = status.body(Format::Protobuf);
        let object = body.strip_prefix(b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\x12").unwrap();
        let object = object.strip_suffix(&ENVELOPE_TAIL).unwrap();
        let read = ReadStatus::decode_length_delimited(object).unwrap();
        let expected = ReadStatus {
            status: "Failure".to_owned(),
            message: status.message.clone(),
            reason: status.reason.to_owned(),
            details,
            code: status.code.into(),
        };
        assert_eq!(read, expected);
        let event = status.event(Format::Protobuf);
        assert_eq!(event.get(4..11), Some(&b"\x0a\x05ERROR"[..]));
        assert!(event.ends_with(&body), "an event ends with its object");
        assert_eq!(event.get(..4), Some(&u32::try_from(event.len() - 4).unwrap().to_be_bytes()[..]));
    }
}

#[test]
fn a_bookmark_has_a_version_and_may_end_the_initial_events() {
    let of = |format, ends| bookmark(format, Kind::Services, 7, ends);
    let plain = b"\0\0\0\x2c\x0a\x08BOOKMARK\x12\x20\x0a\x1ek8s\0\x0a\x0d\x0a\x02v1\x12\x07Service\x12\x05\
        \x0a\x03\x32\x017\x1a\0\x22\0";
    assert_eq!(&*of(Format::Protobuf, false), plain);
    let end = b"\0\0\0\x4f\x0a\x08BOOKMARK\x12\x43\x0a\x41k8s\0\x0a\x0d\x0a\x02v1\x12\x07Service\x12\x28\
        \x0a\x26\x32\x017\x62\x21\x0a\x19k8s.io/initial-events-end\x12\x04true\x1a\0\x22\0";
    assert_eq!(&*of(Format::Protobuf, true), end);
    let plain = json!({"type": "BOOKMARK", "object":
        {"kind": "Service", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}}});
    assert_eq!(from_slice::<Value>(&of(Format::Json, false)).unwrap(), plain);
    let end = from_slice::<Value>(&of(Format::Json, true)).unwrap();
    assert_eq!(end["object"]["metadata"]["annotations"], json!({"k8s.io/initial-events-end": "true"}));
    assert!(of(Format::Json, true).ends_with(b"}\n"));
}

#[test]
fn an_event_is_a_frame_or_a_line() {
    let frame = b"\0\0\0\x29\x0a\x07DELETED\x12\x1e\x0a\x1ck8s\0\x0a\x0a\x0a\x02v1\x12\x04Node\x12\x06\
        object\x1a\0\x22\0";
    assert_eq!(&*event_frame(Change::Deleted, Kind::Nodes, b"object"), frame);
    assert_eq!(&*event_line(Change::Added, b"{}"), b"{\"type\":\"ADDED\",\"object\":{}}\n");
}

#[test]
fn a_list_begins_with_its_version() {
    let head = |format, kind| list_head(format, kind, 9, 3);
    assert_eq!(
        String::from_utf8(head(Format::Json, Kind::EndpointSlices)).unwrap(),
        r#"{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","metadata":{"resourceVersion":"9"},"items":["#
    );
    // Its metadata takes five bytes, and the items take three.
    let expected = b"k8s\0\x0a\x0e\x0a\x02v1\x12\x08NodeList\x12\x08\x0a\x03\x12\x019";
    assert_eq!(head(Format::Protobuf, Kind::Nodes), expected);
    let mut item = Vec::new();
    push_item(&mut item, b"o");
    assert_eq!((&*item, item_bytes(b"o")), (&b"\x12\x01o"[..], 3));
    for bytes in [0, 127, 128, 20_000] {
        let (object, mut item) = (vec![0; bytes], Vec::new());
        push_item(&mut item, &object);
        assert_eq!(item_bytes(&object), item.len());
    }
    assert_eq!((list_tail(Format::Json), list_tail(Format::Protobuf)), (&b"]}\n"[..], &b"\x1a\0\x22\0"[..]));
}

#[test]
fn a_client_gets_the_format_that_it_likes_best() {
    const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
    for (header, expected) in [
        ("", Some(Format::Json)),
        ("*/*", Some(Format::Json)),
        ("application/json", Some(Format::Json)),
        (PROTOBUF, Some(Format::Protobuf)),
        (&format!("{PROTOBUF},application/json"), Some(Format::Protobuf)),
        (&format!("application/json, {PROTOBUF}"), Some(Format::Json)),
        (&format!("application/json;q=0.5, {PROTOBUF};q=0.9"), Some(Format::Protobuf)),
        (&format!("{PROTOBUF};q=0,*/*"), Some(Format::Json)),
        (&format!("{PROTOBUF};stream=watch"), Some(Format::Protobuf)),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Some(Format::Json)),
        ("application/json;as=Table;v=v1;g=meta.k8s.io", None),
        ("application/yaml", None),
        ("application/json;q=x", None),
    ] {
        assert_eq!(Format::accepted(header), expected, "{header}");
    }
}
