//! Messages in a response: objects and bookmarks, read from the items of a list and the events of a watch.

pub(crate) mod json;
pub(crate) mod protobuf;

use cproxy_core::api::Metadata;
use serde::Deserialize;

use crate::codec::{decode::Decoded, error::CodecError, resource::WatchedResource, status::Status};

/// Message of the API server.
#[derive(Debug)]
pub(crate) enum Message<K> {
    /// Object that was listed, added or changed.
    Applied(Decoded<K>),
    /// Object that was deleted.
    Deleted(Decoded<K>),
    /// All changes up to this version have been sent.
    Bookmark(Option<String>),
    /// The server ends the watch with this error.
    Error(Box<Status>),
}

/// Metadata of a list.
#[derive(Deserialize, prost::Message)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListMetadata {
    #[prost(string, optional, tag = "2")]
    pub(crate) resource_version: Option<String>,
}

/// Type of a watch event.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Change {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

impl<K: WatchedResource> Message<K> {
    /// Event with an object that is too long to be decoded. `change` and `names` are from its beginning.
    fn too_long(change: Option<&str>, names: Metadata, longest_bytes: usize) -> Result<Self, CodecError> {
        let decoded = Decoded::too_long(names, longest_bytes)?;
        match change {
            Some("ADDED" | "MODIFIED") => Ok(Self::Applied(decoded)),
            Some("DELETED") => Ok(Self::Deleted(decoded)),
            _ => Err(CodecError::too_long(longest_bytes)),
        }
    }
}
