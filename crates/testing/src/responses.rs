//! Responses of an API server: errors, lists and events, in JSON and in protobuf.

use serde_json::{Value, json};

use crate::encoding::{self, envelope, field};

/// A `Status`, as the API server sends it for an error.
pub fn status(code: u16, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code})
}

/// A list in JSON.
pub fn list(version: &str, items: &[Value]) -> String {
    json!({"kind": "List", "metadata": {"resourceVersion": version}, "items": items}).to_string()
}

/// A list of objects of a kind in protobuf.
pub fn protobuf_list(kind: &str, version: &str, items: &[Value]) -> Vec<u8> {
    let items = items.iter().flat_map(|item| field(2, &encoding::object(item)));
    let metadata = field(1, &field(2, version.as_bytes()));
    envelope(&format!("{kind}List"), &metadata.into_iter().chain(items).collect::<Vec<_>>())
}

/// An event of a watch in JSON.
pub fn event(change: &str, object: &Value) -> Vec<u8> {
    format!("{}\n", json!({"type": change, "object": object})).into_bytes()
}
