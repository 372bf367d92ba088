//! Messages in a response: objects and bookmarks, read from the items of a list and the lines of a watch.

use std::collections::BTreeMap;

use kube::core::Status;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    decode::Decoded,
    failure::ApiError,
    head::Head,
    resources::WatchedResource,
    split::{LONGEST_BYTES, Piece, SplitError},
};

/// Annotation of the bookmark that ends a streamed list.
const LIST_END: &str = "k8s.io/initial-events-end";

/// Message of the API server.
#[derive(Debug)]
pub(super) enum Message<K> {
    /// Object that was listed, added or changed.
    Applied(Decoded<K>),
    /// Object that was deleted.
    Deleted(Decoded<K>),
    /// All changes up to this version have been sent.
    Bookmark {
        version: Option<String>,
        /// The streamed list is complete.
        ends_list: bool,
    },
}

/// Metadata of a list or page.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListMetadata {
    pub(super) resource_version: Option<String>,
    /// Continue token of the next page.
    #[serde(rename = "continue")]
    pub(super) next: Option<String>,
}

#[derive(Deserialize)]
struct RawLine<'a> {
    #[serde(rename = "type")]
    change: Change,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Change {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata {
    resource_version: Option<String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl ListMetadata {
    pub(super) fn read<K: WatchedResource>(piece: Piece<'_>) -> Result<Self, ApiError> {
        let Piece::Whole(json) = piece else { return Err(ApiError::too_long(LONGEST_BYTES)) };
        serde_json::from_slice(json).map_err(|error| ApiError::unreadable::<K>(error, &<_>::default()))
    }
}

impl<K: WatchedResource> Message<K> {
    /// Reads an item of a list.
    pub(super) fn read_item(piece: Piece<'_>) -> Result<Self, ApiError> {
        let object = match piece {
            Piece::Whole(json) => {
                let json = str::from_utf8(json).map_err(|_| SplitError::NotAList("it is not UTF-8"))?;
                Decoded::read(json)
                    .map_err(|error| ApiError::unreadable::<K>(error, &Head::of_object(json.as_bytes()).names))?
            }
            Piece::Head(json) => Decoded::too_long(Head::of_object(json).names, json.len())?,
        };
        Ok(Self::Applied(object))
    }

    /// Reads a line of a watch; `None` if it is empty.
    pub(super) fn read_line(piece: Piece<'_>) -> Result<Option<Self>, ApiError> {
        match piece {
            Piece::Whole(line) if line.trim_ascii().is_empty() => Ok(None),
            Piece::Whole(line) => Self::whole_line(line).map(Some),
            Piece::Head(line) => Self::long_line(line).map(Some),
        }
    }

    fn whole_line(line: &[u8]) -> Result<Self, ApiError> {
        let unreadable = |error| ApiError::unreadable::<K>(error, &Head::of_line(line).names);
        let RawLine { change, object } = serde_json::from_slice(line).map_err(unreadable)?;
        let decode = || Decoded::read(object.get()).map_err(unreadable);
        Ok(match change {
            Change::Added | Change::Modified => Self::Applied(decode()?),
            Change::Deleted => Self::Deleted(decode()?),
            Change::Bookmark => {
                let Bookmark { metadata } = serde_json::from_str(object.get()).map_err(unreadable)?;
                let ends_list = metadata.annotations.contains_key(LIST_END);
                Self::Bookmark { version: metadata.resource_version, ends_list }
            }
            Change::Error => {
                return Err(ApiError::ErrorEvent(
                    serde_json::from_str::<Box<Status>>(object.get()).map_err(unreadable)?,
                ));
            }
        })
    }

    fn long_line(line: &[u8]) -> Result<Self, ApiError> {
        let Head { change, names } = Head::of_line(line);
        let decoded = Decoded::too_long(names, line.len())?;
        match change.as_deref() {
            Some("ADDED" | "MODIFIED") => Ok(Self::Applied(decoded)),
            Some("DELETED") => Ok(Self::Deleted(decoded)),
            _ => Err(ApiError::too_long(line.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;

    fn read(text: &str) -> Result<Option<Message<Service>>, ApiError> {
        Message::read_line(Piece::Whole(text.as_bytes()))
    }

    fn head(text: &str) -> Result<Option<Message<Service>>, ApiError> {
        Message::read_line(Piece::Head(text.as_bytes()))
    }

    #[test]
    fn a_line_is_an_object_a_bookmark_or_an_error() {
        for (change, is_put) in [("ADDED", true), ("MODIFIED", true), ("DELETED", false)] {
            let line = read(&format!(r#"{{"type":"{change}","object":{{"metadata":{{"name":"a"}}}}}}"#)).unwrap();
            assert!(
                matches!(line, Some(Message::Applied(_)) if is_put)
                    || matches!(line, Some(Message::Deleted(_)) if !is_put)
            );
        }
        let bookmark = |annotations: &str| {
            let metadata = format!(r#"{{"resourceVersion":"7","annotations":{{{annotations}}}}}"#);
            match read(&format!(r#"{{"type":"BOOKMARK","object":{{"metadata":{metadata}}}}}"#)).unwrap() {
                Some(Message::Bookmark { version, ends_list }) if version.as_deref() == Some("7") => ends_list,
                _ => panic!("no bookmark with a version"),
            }
        };
        assert!(!bookmark("") && bookmark(r#""k8s.io/initial-events-end":"true""#));
        let error = read(r#"{"type":"ERROR","object":{"kind":"Status","code":410}}"#);
        assert!(matches!(error, Err(ApiError::ErrorEvent(status)) if status.code == 410));
        assert!(matches!(read(" \r"), Ok(None)));
    }

    #[test]
    fn the_error_of_an_unreadable_line_has_the_objects_name_if_it_can_be_read() {
        for (text, expected) in [
            (r#"{"type":"ADDED","object":{"metadata":{"name":"a"#, None),
            (r#"{"type":"ADDED","object":{"metadata":{"name":"a","#, Some("Service default/a")),
            (r#"{"type":"SHOUTED","object":{"metadata":{"name":"a"}}}"#, Some("Service default/a")),
            ("<html>", None),
        ] {
            let Err(ApiError::Unreadable(_, name)) = read(text) else { panic!("{text} was read") };
            assert_eq!(name.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_an_unreadable_object_if_it_has_a_name() {
        let named = |change: &str| head(&format!(r#"{{"type":"{change}","object":{{"metadata":{{"name":"a","x":""#));
        assert!(matches!(named("ADDED"), Ok(Some(Message::Applied(Decoded::Unreadable(..))))));
        assert!(matches!(named("DELETED"), Ok(Some(Message::Deleted(Decoded::Unreadable(..))))));
        let is_too_long = |line| matches!(line, Err(ApiError::Split(SplitError::TooLong(_))));
        assert!(is_too_long(named("BOOKMARK")) && is_too_long(head(r#"{"type":"ADDED","object":{"x":""#)));
    }
}
