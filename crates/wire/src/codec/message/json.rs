//! Messages in JSON: the items of a list and the lines of a watch.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Change, ListMetadata, Message};
use crate::{
    codec::{
        decode::Decoded,
        error::{CodecError, DecodeError},
        head::Head,
        resource::WatchedResource,
        split::{LONGEST_BYTES, Piece, SplitError},
    },
    located::read_json,
};

#[derive(Deserialize)]
struct RawLine<'a> {
    #[serde(rename = "type")]
    change: Change,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata {
    resource_version: Option<String>,
}

/// Reads the metadata of a list.
pub(crate) fn read_metadata<K: WatchedResource>(piece: Piece<'_>) -> Result<ListMetadata, CodecError> {
    let Piece::Whole(json) = piece else { return Err(CodecError::too_long(LONGEST_BYTES)) };
    read_json(json).map_err(|error| CodecError::unreadable::<K>(error.into(), &<_>::default()))
}

/// Reads an item of a list.
pub(crate) fn read_item<K: WatchedResource>(piece: Piece<'_>) -> Result<Message<K>, CodecError> {
    let object = match piece {
        Piece::Whole(json) => {
            let json = str::from_utf8(json).map_err(|_| SplitError::NotAList("it is not UTF-8"))?;
            Decoded::read_json(json)
                .map_err(|error| CodecError::unreadable::<K>(error.into(), &Head::of_object(json.as_bytes()).names))?
        }
        Piece::Head(json) => Decoded::too_long(Head::of_object(json).names, json.len())?,
    };
    Ok(Message::Applied(object))
}

/// Reads a line of a watch; `None` if it is empty.
pub(crate) fn read_line<K: WatchedResource>(piece: Piece<'_>) -> Result<Option<Message<K>>, CodecError> {
    match piece {
        Piece::Whole(line) if line.trim_ascii().is_empty() => Ok(None),
        Piece::Whole(line) => whole_line(line).map(Some),
        Piece::Head(line) => {
            let Head { change, names } = Head::of_line(line);
            Message::too_long(change.as_deref(), names, line.len()).map(Some)
        }
    }
}

fn whole_line<K: WatchedResource>(line: &[u8]) -> Result<Message<K>, CodecError> {
    let unreadable = |error| CodecError::unreadable::<K>(DecodeError::Json(error), &Head::of_line(line).names);
    let RawLine { change, object } = read_json(line).map_err(unreadable)?;
    let decode = || Decoded::read_json(object.get()).map_err(unreadable);
    Ok(match change {
        Change::Added | Change::Modified => Message::Applied(decode()?),
        Change::Deleted => Message::Deleted(decode()?),
        Change::Bookmark => {
            let Bookmark { metadata } = serde_json::from_str(object.get()).map_err(unreadable)?;
            Message::Bookmark(metadata.resource_version)
        }
        Change::Error => Message::Error(serde_json::from_str(object.get()).map_err(unreadable)?),
    })
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;

    fn read(text: &str) -> Result<Option<Message<Service>>, CodecError> {
        read_line(Piece::Whole(text.as_bytes()))
    }

    fn head(text: &str) -> Result<Option<Message<Service>>, CodecError> {
        read_line(Piece::Head(text.as_bytes()))
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
        let bookmark =
            read(r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7","annotations":{"a":"b"}}}}"#);
        assert!(matches!(bookmark, Ok(Some(Message::Bookmark(Some(version)))) if version == "7"));
        let error = read(r#"{"type":"ERROR","object":{"kind":"Status","code":410}}"#);
        assert!(matches!(error, Ok(Some(Message::Error(status))) if status.code == 410));
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
            let Err(CodecError::Unreadable { name, .. }) = read(text) else { panic!("{text} was read") };
            assert_eq!(name.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_an_unreadable_object_if_it_has_a_name() {
        let named = |change: &str| head(&format!(r#"{{"type":"{change}","object":{{"metadata":{{"name":"a","x":""#));
        assert!(matches!(named("ADDED"), Ok(Some(Message::Applied(Decoded::Unreadable(..))))));
        assert!(matches!(named("DELETED"), Ok(Some(Message::Deleted(Decoded::Unreadable(..))))));
        let is_too_long = |line| matches!(line, Err(CodecError::Split(SplitError::TooLong(_))));
        assert!(is_too_long(named("BOOKMARK")) && is_too_long(head(r#"{"type":"ADDED","object":{"x":""#)));
    }
}
