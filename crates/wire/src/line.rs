//! One line of a watch.

use std::collections::BTreeMap;

use kube::core::Status;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{decode::Decoded, failure::Cause, head::Head, resources::WatchedResource, split::Piece};

/// The annotation of the bookmark that ends a streamed list.
const LIST_END: &str = "k8s.io/initial-events-end";

/// One parsed line of a watch.
pub(super) enum Line<K> {
    /// An object is so now.
    Put(Decoded<K>),
    /// It is gone.
    Gone(Decoded<K>),
    /// Until here everything has been said.
    Bookmark {
        version: Option<String>,
        /// Of the list that a watch begins with.
        ends_list: bool,
    },
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

impl<K: WatchedResource> Line<K> {
    /// Reads a line; nothing if it is empty.
    pub(super) fn read(piece: Piece<'_>) -> Result<Option<Self>, Cause> {
        match piece {
            Piece::Whole(line) if line.trim_ascii().is_empty() => Ok(None),
            Piece::Whole(line) => Self::whole(line).map(Some),
            Piece::Head(line) => Self::too_long(line).map(Some),
        }
    }

    fn whole(line: &[u8]) -> Result<Self, Cause> {
        let unreadable = |error| Cause::unreadable::<K>(error, &Head::of_line(line).names);
        let RawLine { change, object } = serde_json::from_slice(line).map_err(unreadable)?;
        let sent = || Decoded::read(object.get()).map_err(unreadable);
        Ok(match change {
            Change::Added | Change::Modified => Self::Put(sent()?),
            Change::Deleted => Self::Gone(sent()?),
            Change::Bookmark => {
                let Bookmark { metadata } = serde_json::from_str(object.get()).map_err(unreadable)?;
                let ends_list = metadata.annotations.contains_key(LIST_END);
                Self::Bookmark { version: metadata.resource_version, ends_list }
            }
            Change::Error => {
                return Err(Cause::Event(serde_json::from_str::<Box<Status>>(object.get()).map_err(unreadable)?));
            }
        })
    }

    fn too_long(line: &[u8]) -> Result<Self, Cause> {
        let Head { change, names } = Head::of_line(line);
        let sent = Decoded::too_long(names, line.len())?;
        match change.as_deref() {
            Some("ADDED" | "MODIFIED") => Ok(Self::Put(sent)),
            Some("DELETED") => Ok(Self::Gone(sent)),
            _ => Err(Cause::too_long(line.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;
    use crate::split::SplitError;

    fn read(text: &str) -> Result<Option<Line<Service>>, Cause> {
        Line::read(Piece::Whole(text.as_bytes()))
    }

    fn head(text: &str) -> Result<Option<Line<Service>>, Cause> {
        Line::read(Piece::Head(text.as_bytes()))
    }

    #[test]
    fn a_line_is_an_object_a_bookmark_or_an_error() {
        for (change, is_put) in [("ADDED", true), ("MODIFIED", true), ("DELETED", false)] {
            let line = read(&format!(r#"{{"type":"{change}","object":{{"metadata":{{"name":"a"}}}}}}"#)).unwrap();
            assert!(matches!(line, Some(Line::Put(_)) if is_put) || matches!(line, Some(Line::Gone(_)) if !is_put));
        }
        let bookmark = |annotations: &str| {
            let metadata = format!(r#"{{"resourceVersion":"7","annotations":{{{annotations}}}}}"#);
            match read(&format!(r#"{{"type":"BOOKMARK","object":{{"metadata":{metadata}}}}}"#)).unwrap() {
                Some(Line::Bookmark { version, ends_list }) if version.as_deref() == Some("7") => ends_list,
                _ => panic!("no bookmark with a version"),
            }
        };
        assert!(!bookmark("") && bookmark(r#""k8s.io/initial-events-end":"true""#));
        let error = read(r#"{"type":"ERROR","object":{"kind":"Status","code":410}}"#);
        assert!(matches!(error, Err(Cause::Event(status)) if status.code == 410));
        assert!(matches!(read(" \r"), Ok(None)));
    }

    #[test]
    fn what_cannot_be_read_is_named_if_it_can_be() {
        for (text, expected) in [
            (r#"{"type":"ADDED","object":{"metadata":{"name":"a"#, None),
            (r#"{"type":"ADDED","object":{"metadata":{"name":"a","#, Some("Service default/a")),
            (r#"{"type":"SHOUTED","object":{"metadata":{"name":"a"}}}"#, Some("Service default/a")),
            ("<html>", None),
        ] {
            let Err(Cause::Unreadable(_, name)) = read(text) else { panic!("{text} was read") };
            assert_eq!(name.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn of_what_is_too_long_the_name_is_enough() {
        let named = |change: &str| head(&format!(r#"{{"type":"{change}","object":{{"metadata":{{"name":"a","x":""#));
        assert!(matches!(named("ADDED"), Ok(Some(Line::Put(Decoded::Unreadable(..))))));
        assert!(matches!(named("DELETED"), Ok(Some(Line::Gone(Decoded::Unreadable(..))))));
        let is_too_long = |line| matches!(line, Err(Cause::Split(SplitError::TooLong(_))));
        assert!(is_too_long(named("BOOKMARK")) && is_too_long(head(r#"{"type":"ADDED","object":{"x":""#)));
    }
}
