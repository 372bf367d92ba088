//! Kubernetes objects from protobuf to JSON and back: v1 Service, discovery.k8s.io/v1 EndpointSlice and v1 Node, each
//! with the JSON that kube-apiserver 1.36 sends for it, byte for byte.
//!
//! The API server decodes an object into a Go struct and encodes the struct as JSON. The tables in `schema` have all
//! fields of these structs, with the rule by which Go leaves a field out. A field that a table does not have is
//! skipped. If a field that is no list occurs again, its last value counts.

mod encoder;
mod error;
mod fields;
mod leaf;
mod schema;
mod text;
mod time;
mod writer;

pub use error::TranscodeError;
use schema::Schema;

/// Kind of object that can be transcoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// v1 Service.
    Service,
    /// discovery.k8s.io/v1 EndpointSlice.
    EndpointSlice,
    /// v1 Node.
    Node,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Service, Self::EndpointSlice, Self::Node];

    /// `kind` of an object.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
        }
    }

    /// `apiVersion` of an object.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
        }
    }

    fn schema(self) -> &'static Schema {
        match self {
            Self::Service => schema::SERVICE,
            Self::EndpointSlice => schema::ENDPOINT_SLICE,
            Self::Node => schema::NODE,
        }
    }
}

/// Appends the JSON of an object to `out`. `protobuf` is the object itself, which the API server sends inside a
/// runtime.Unknown or as an item of a list.
///
/// `with_type` adds `kind` and `apiVersion`: an object of its own and that of a watch event have both, an item of a
/// list has neither.
///
/// # Errors
/// When the protobuf is broken or not of this kind, or has a text that is not UTF-8. Then `out` is as before.
pub fn write_json(kind: Kind, protobuf: &[u8], with_type: bool, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    let length = out.len();
    let type_meta = with_type.then_some(kind);
    writer::write_object(kind.schema(), type_meta, protobuf, out).map_err(|error| {
        out.truncate(length);
        error.within(kind.name())
    })
}

/// Protobuf of an object in JSON, without the fields that the tables do not have and those that are null.
///
/// # Errors
/// When the JSON is no object, is of another kind, or has a field of another type than Kubernetes has.
pub fn read_json(kind: Kind, json: &serde_json::Value) -> Result<Vec<u8>, TranscodeError> {
    let mut protobuf = Vec::new();
    let found = json.get("kind").and_then(serde_json::Value::as_str);
    let encoded = match found {
        Some(found) if found != kind.name() => Err(error::Reason::OtherKind(found.to_owned()).into()),
        _ => encoder::encode_object(kind.schema(), json, &mut protobuf),
    };
    encoded.map(|()| protobuf).map_err(|error| error.within(kind.name()))
}

#[cfg(test)]
mod tests;
