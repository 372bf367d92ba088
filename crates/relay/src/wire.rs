//! Encoding of lists, watch events and errors, in protobuf and JSON.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use cproxy_protobuf::{push_field, push_header, push_number};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta_v1;
use serde_json::json;

use crate::kind::Kind;

/// First bytes of a protobuf object of Kubernetes.
const MAGIC: &[u8] = b"k8s\0";

/// Annotation of the bookmark after the initial events of a watch (KEP-3157).
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Encoding of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// `application/json`
    Json,
    /// `application/vnd.kubernetes.protobuf`
    Protobuf,
}

impl Format {
    /// The one that a client likes best, by its header Accept; `None`: neither. Of those with the same weight, the
    /// first counts (RFC 9110, 12.5.1).
    #[must_use]
    pub fn accepted(header: &str) -> Option<Self> {
        let mut best = None;
        for (format, weight) in header.split(',').filter_map(Self::accepted_as) {
            if weight > 0.0 && best.is_none_or(|(_, best)| weight > best) {
                best = Some((format, weight));
            }
        }
        best.map(|(format, _)| format)
    }

    /// Format and weight of a media type.
    fn accepted_as(part: &str) -> Option<(Self, f32)> {
        let mut words = part.split(';').map(str::trim);
        let format = match words.next().unwrap_or_default() {
            "application/vnd.kubernetes.protobuf" => Self::Protobuf,
            "application/json" | "application/*" | "*/*" | "" => Self::Json,
            _ => return None,
        };
        let mut weight = 1.0;
        for parameter in words {
            // Tables and other transformations are not served.
            if parameter.starts_with("as=") {
                return None;
            }
            if let Some(text) = parameter.strip_prefix("q=") {
                weight = text.parse().unwrap_or(0.0);
            }
        }
        Some((format, weight))
    }
}

/// Type of a watch event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// New object.
    Added,
    /// Changed object.
    Modified,
    /// Deleted object, in its last state.
    Deleted,
}

impl Change {
    /// `type` of the event.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// runtime.TypeMeta.
fn type_meta(api_version: &str, kind: &str) -> Vec<u8> {
    let mut meta = Vec::new();
    push_field(&mut meta, 1, api_version.as_bytes());
    push_field(&mut meta, 2, kind.as_bytes());
    meta
}

/// runtime.Unknown up to the object, which has this many bytes.
fn envelope_head(api_version: &str, kind: &str, object_bytes: usize) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    push_field(&mut head, 1, &type_meta(api_version, kind));
    push_header(&mut head, 2, object_bytes);
    head
}

/// The rest of a runtime.Unknown: contentEncoding and contentType.
const ENVELOPE_TAIL: [u8; 4] = [0x1a, 0, 0x22, 0];

/// Object as the body of a response.
#[must_use]
pub fn envelope(kind: Kind, object: &[u8]) -> Vec<u8> {
    enveloped(kind.api_version(), kind.singular(), object)
}

fn enveloped(api_version: &str, kind: &str, object: &[u8]) -> Vec<u8> {
    let mut envelope = envelope_head(api_version, kind, object.len());
    envelope.extend_from_slice(object);
    envelope.extend(ENVELOPE_TAIL);
    envelope
}

/// Frame of a watch in protobuf: its length, then a metav1.WatchEvent.
fn frame(change: &str, envelope: &[u8]) -> Vec<u8> {
    let mut raw = Vec::with_capacity(envelope.len() + 8);
    push_field(&mut raw, 1, envelope);
    let mut event = Vec::with_capacity(raw.len() + 24);
    push_field(&mut event, 1, change.as_bytes());
    push_field(&mut event, 2, &raw);
    let length = u32::try_from(event.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &event].concat()
}

/// Frame of an event in protobuf.
#[must_use]
pub(crate) fn event_frame(change: Change, kind: Kind, object: &[u8]) -> Bytes {
    frame(change.as_str(), &envelope(kind, object)).into()
}

/// Line of an event in JSON. `object` has `kind` and `apiVersion`.
#[must_use]
pub(crate) fn event_line(change: Change, object: &[u8]) -> Bytes {
    [br#"{"type":""#, change.as_str().as_bytes(), br#"","object":"#, object, b"}\n"].concat().into()
}

/// Bookmark at a version. `ends_initial_events`: all objects have been sent as events.
#[must_use]
pub(crate) fn bookmark(format: Format, kind: Kind, version: u64, ends_initial_events: bool) -> Bytes {
    let version = version.to_string();
    match format {
        Format::Protobuf => {
            let mut metadata = Vec::new();
            push_field(&mut metadata, 6, version.as_bytes());
            if ends_initial_events {
                let mut entry = Vec::new();
                push_field(&mut entry, 1, INITIAL_EVENTS_END.as_bytes());
                push_field(&mut entry, 2, b"true");
                push_field(&mut metadata, 12, &entry);
            }
            let mut object = Vec::new();
            push_field(&mut object, 1, &metadata);
            frame("BOOKMARK", &envelope(kind, &object)).into()
        }
        Format::Json => {
            let mut metadata = json!({"resourceVersion": version});
            if ends_initial_events && let Some(metadata) = metadata.as_object_mut() {
                metadata.insert("annotations".to_owned(), json!({INITIAL_EVENTS_END: "true"}));
            }
            let object = json!({"kind": kind.singular(), "apiVersion": kind.api_version(), "metadata": metadata});
            format!("{}\n", json!({"type": "BOOKMARK", "object": object})).into()
        }
    }
}

/// Body of a list up to its first item. The items together have `items_bytes` in protobuf.
#[must_use]
pub(crate) fn list_head(format: Format, kind: Kind, version: u64, items_bytes: usize) -> Vec<u8> {
    let (api_version, list_kind) = (kind.api_version(), format!("{}List", kind.singular()));
    let version = version.to_string();
    match format {
        Format::Protobuf => {
            let mut metadata = Vec::new();
            push_field(&mut metadata, 2, version.as_bytes());
            let mut head = Vec::new();
            push_field(&mut head, 1, &metadata);
            [envelope_head(api_version, &list_kind, head.len() + items_bytes), head].concat()
        }
        Format::Json => {
            let metadata = json!({"resourceVersion": version});
            format!(r#"{{"kind":"{list_kind}","apiVersion":"{api_version}","metadata":{metadata},"items":["#).into()
        }
    }
}

/// Body of a list after its last item.
#[must_use]
pub(crate) fn list_tail(format: Format) -> &'static [u8] {
    match format {
        Format::Protobuf => &ENVELOPE_TAIL,
        Format::Json => b"]}\n",
    }
}

/// Error, as a metav1.Status has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// HTTP status code.
    pub code: u16,
    /// `reason`: a word for programs.
    pub reason: &'static str,
    /// `message`: a sentence for people.
    pub message: String,
    /// `details.retryAfterSeconds` and the header Retry-After; 0: none.
    pub retry_after_seconds: u32,
    /// `details.causes`: reason and message of one.
    pub cause: Option<(&'static str, &'static str)>,
    /// `details.name`, `details.group` and `details.kind` of the object that is missing.
    pub object: Option<Box<(String, &'static str, &'static str)>>,
}

impl Status {
    /// An error without details.
    #[must_use]
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), retry_after_seconds: 0, cause: None, object: None }
    }

    /// Body of a response.
    #[must_use]
    pub fn body(&self, format: Format) -> Bytes {
        match format {
            Format::Json => format!("{}\n", json!(self.json())).into(),
            Format::Protobuf => enveloped("v1", "Status", &self.protobuf()).into(),
        }
    }

    /// Event that ends a watch.
    #[must_use]
    pub fn event(&self, format: Format) -> Bytes {
        match format {
            Format::Json => format!("{}\n", json!({"type": "ERROR", "object": self.json()})).into(),
            Format::Protobuf => frame("ERROR", &enveloped("v1", "Status", &self.protobuf())).into(),
        }
    }

    fn json(&self) -> meta_v1::Status {
        meta_v1::Status {
            status: Some("Failure".to_owned()),
            message: Some(self.message.clone()),
            reason: Some(self.reason.to_owned()),
            details: self.details(),
            code: Some(self.code.into()),
            metadata: meta_v1::ListMeta::default(),
        }
    }

    fn details(&self) -> Option<meta_v1::StatusDetails> {
        let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let (name, group, kind) = match self.object.as_deref() {
            Some((name, group, kind)) => (some(name), some(group), some(kind)),
            None => (None, None, None),
        };
        let cause = |(reason, message): (&str, &str)| meta_v1::StatusCause {
            reason: some(reason),
            message: some(message),
            ..meta_v1::StatusCause::default()
        };
        let details = meta_v1::StatusDetails {
            name,
            group,
            kind,
            causes: self.cause.map(|of| vec![cause(of)]),
            retry_after_seconds: Some(i32::try_from(self.retry_after_seconds).unwrap_or(i32::MAX)).filter(|of| *of > 0),
            ..meta_v1::StatusDetails::default()
        };
        (details != meta_v1::StatusDetails::default()).then_some(details)
    }

    /// metav1.Status (apimachinery/pkg/apis/meta/v1/generated.proto 1.36).
    fn protobuf(&self) -> Vec<u8> {
        let mut details = Vec::new();
        if let Some((name, group, kind)) = self.object.as_deref() {
            push_field(&mut details, 1, name.as_bytes());
            push_field(&mut details, 2, group.as_bytes());
            push_field(&mut details, 3, kind.as_bytes());
        }
        if let Some((reason, message)) = self.cause {
            let mut cause = Vec::new();
            push_field(&mut cause, 1, reason.as_bytes());
            push_field(&mut cause, 2, message.as_bytes());
            push_field(&mut details, 4, &cause);
        }
        if self.retry_after_seconds > 0 {
            push_number(&mut details, 5, self.retry_after_seconds.into());
        }
        let mut status = Vec::new();
        push_field(&mut status, 1, &[]);
        push_field(&mut status, 2, b"Failure");
        push_field(&mut status, 3, self.message.as_bytes());
        push_field(&mut status, 4, self.reason.as_bytes());
        if !details.is_empty() {
            push_field(&mut status, 5, &details);
        }
        push_number(&mut status, 6, self.code.into());
        status
    }
}
