//! Errors of responses that cannot be read.

use cproxy_core::{
    api::{Metadata, Object},
    object_name, printable,
};

use crate::codec::{content_type::ContentTypeError, split::SplitError};

/// Error of a response that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CodecError {
    /// It is in an encoding that was not asked for.
    #[error(transparent)]
    ContentType(#[from] ContentTypeError),
    /// It cannot be split into objects.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A part of it cannot be decoded.
    #[error("the response cannot be read{}", named(.name.as_deref()))]
    Unreadable {
        /// Kind and name of its object, if they can be read.
        name: Option<String>,
        /// Error of the part.
        #[source]
        error: DecodeError,
    },
}

/// Error of a part of a response that cannot be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeError {
    /// It is not JSON, or not in the expected form.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// It is not protobuf, or not in the expected form.
    #[error(transparent)]
    Protobuf(#[from] prost::DecodeError),
    /// The magic bytes of protobuf are missing.
    #[error("not protobuf of Kubernetes")]
    NoMagic,
    /// A field of protobuf is longer than its message.
    #[error("a field is longer than its message")]
    Cut,
    /// A text of protobuf is not UTF-8.
    #[error("a text is not UTF-8")]
    NotUtf8,
    /// The object is encoded once more.
    #[error("contentEncoding {0} is not known")]
    Encoded(String),
    /// The object is of another kind.
    #[error("{0} where {1} is asked for")]
    Kind(String, String),
    /// The type of the watch event is none that Kubernetes has.
    #[error("{0} is no type of a watch event")]
    Change(String),
}

impl CodecError {
    /// Error of a part whose object has these names.
    pub(crate) fn unreadable<K: Object>(error: DecodeError, names: &Metadata) -> Self {
        let name = object_name(names).map(|name| printable(&format!("{} {name}", K::KIND)));
        Self::Unreadable { name, error }
    }

    /// Error of a part of more than `longest_bytes` that has no name.
    pub(crate) fn too_long(longest_bytes: usize) -> Self {
        Self::Split(SplitError::TooLong(longest_bytes))
    }
}

fn named(name: Option<&str>) -> String {
    name.map(|name| format!(" at {name}")).unwrap_or_default()
}
