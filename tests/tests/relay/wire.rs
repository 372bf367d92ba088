//! Responses of both servers in a form that can be compared: without what the relay leaves out, and without versions of
//! lists and bookmarks, which depend on the time.

use std::fmt::Write as _;

use cproxy_protobuf::{fields, last_number};
use serde_json::{Value, json};

use crate::client::Response;

/// Annotations that the relay keeps.
const KEPT: [&str; 2] = ["service.kubernetes.io/topology-mode", "service.kubernetes.io/topology-aware-hints"];

/// Response without what may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Canonical {
    pub(crate) code: u16,
    content_type: String,
    lines: Vec<String>,
}

impl Canonical {
    /// First difference; `None`: there is none.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let pairs = || (0..self.lines.len().max(other.lines.len())).map(|at| (self.lines.get(at), other.lines.get(at)));
        let line = || pairs().find(|(own, other)| own != other).map_or_else(String::new, |pair| format!("{pair:#?}"));
        let head = |one: &Self| format!("{} {}, {} lines", one.code, one.content_type, one.lines.len());
        (self != other).then(|| format!("{} / {}: {}", head(self), head(other), line()))
    }
}

/// A response, whose messages of errors are left out.
pub(crate) fn canonical(response: &Response) -> Canonical {
    let content_type = response.header("content-type").to_owned();
    let lines = match (response.code, content_type.as_str()) {
        (_, "application/json") => json_lines(&response.body),
        (_, "application/vnd.kubernetes.protobuf") => protobuf_lines(&response.body),
        (200, "application/vnd.kubernetes.protobuf;stream=watch") => frames(&response.body),
        _ => vec![String::from_utf8_lossy(&response.body).into_owned()],
    };
    Canonical { code: response.code, content_type, lines }
}

fn json_lines(body: &[u8]) -> Vec<String> {
    let text = std::str::from_utf8(body).expect("JSON is UTF-8");
    let documents = serde_json::Deserializer::from_str(text).into_iter::<Value>().map(Result::unwrap);
    documents.flat_map(json_document).collect()
}

fn json_document(mut document: Value) -> Vec<String> {
    if let Some(items) = document.get_mut("items").map(Value::take) {
        document["metadata"]["resourceVersion"] = json!("of the list");
        let items = items.as_array().cloned().unwrap_or_default();
        return std::iter::once(document.to_string()).chain(items.into_iter().map(trimmed)).collect();
    }
    if document["type"] == "BOOKMARK" {
        // Others come when the time is right.
        let ends_initial_events = document["object"]["metadata"]["annotations"].is_object();
        return ends_initial_events.then(|| format!("end of {}", document["object"]["kind"])).into_iter().collect();
    }
    if document["type"].is_string() && document["object"].is_object() {
        let object = document["object"].take();
        return vec![format!("{} {}", document["type"], trimmed(object))];
    }
    vec![trimmed(document)]
}

/// An object or a Status.
pub(crate) fn trimmed(mut object: Value) -> String {
    if object["kind"] == "Status" {
        object["message"] = Value::Null;
        match object["details"].as_object_mut() {
            Some(details) => drop(details.remove("causes")),
            None => object["details"] = json!({}),
        }
        return object.to_string();
    }
    trim(&mut object);
    object.to_string()
}

/// Removes what the relay leaves out.
pub(crate) fn trim(object: &mut Value) {
    let Some(metadata) = object["metadata"].as_object_mut() else { return };
    metadata.remove("managedFields");
    metadata.remove("ownerReferences");
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|name, _| KEPT.contains(&name.as_str()));
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
}

/// Value of a message's first field with this number.
fn value(message: &[u8], number: u32) -> &[u8] {
    fields(message).map(Result::unwrap).find(|field| field.number == number).map_or(&[], |field| field.payload())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Kind and message in an envelope.
fn open(envelope: &[u8]) -> (String, &[u8]) {
    let unknown = envelope.strip_prefix(b"k8s\0").expect("the first bytes of a protobuf object");
    let type_meta = value(unknown, 1);
    (format!("{} {}", text(value(type_meta, 1)), text(value(type_meta, 2))), value(unknown, 2))
}

fn protobuf_lines(body: &[u8]) -> Vec<String> {
    let (kind, message) = open(body);
    if kind.ends_with("List") {
        let items = fields(message).map(Result::unwrap).filter(|field| field.number == 2);
        return std::iter::once(kind).chain(items.map(|field| trimmed_protobuf(field.payload()))).collect();
    }
    vec![protobuf_object(&kind, message)]
}

fn protobuf_object(kind: &str, message: &[u8]) -> String {
    if kind == "v1 Status" {
        return format!("{kind} {} {:?}", text(value(message, 4)), last_number(message, 6));
    }
    format!("{kind} {}", trimmed_protobuf(message))
}

fn trimmed_protobuf(object: &[u8]) -> String {
    let mut line = String::new();
    for field in fields(object).map(Result::unwrap) {
        if field.number != 1 {
            write!(line, "{:02x?}", field.encoded).unwrap();
            continue;
        }
        for field in fields(field.payload()).map(Result::unwrap) {
            let is_kept = match field.number {
                13 | 17 => false,
                12 => KEPT.contains(&text(value(field.payload(), 1)).as_str()),
                _ => true,
            };
            if is_kept {
                write!(line, "{:?}", text(field.encoded)).unwrap();
            }
        }
    }
    line
}

fn frames(mut body: &[u8]) -> Vec<String> {
    let mut lines = Vec::new();
    while let Some((length, rest)) = body.split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_be_bytes(*length)).unwrap();
        let event = &rest[..length];
        body = &rest[length..];
        let (change, raw) = (text(value(event, 1)), value(value(event, 2), 1));
        let (kind, object) = open(raw);
        if change != "BOOKMARK" {
            lines.push(format!("{change} {}", protobuf_object(&kind, object)));
        } else if fields(value(object, 1)).any(|field| field.unwrap().number == 12) {
            lines.push(format!("{change} {kind} after the initial events"));
        }
    }
    lines
}
