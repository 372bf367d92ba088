//! Messages in protobuf: the items of a list and the frames of a watch.

use cproxy_core::printable;
use prost::Message as _;

use super::{Change, ListMetadata, Message};
use crate::codec::{
    decode::Decoded,
    error::{CodecError, DecodeError},
    protobuf::{Event, check_type, names},
    resource::WatchedResource,
    split::{LONGEST_BYTES, Piece},
    status::Status,
};

#[derive(prost::Message)]
struct Bookmark {
    #[prost(message, required, tag = "1")]
    metadata: BookmarkMetadata,
}

#[derive(prost::Message)]
struct BookmarkMetadata {
    #[prost(string, optional, tag = "6")]
    resource_version: Option<String>,
}

/// Checks the type of a list.
pub(crate) fn check_list<K: WatchedResource>(piece: Piece<'_>) -> Result<(), CodecError> {
    check_type(whole(piece)?, &format!("{}List", K::KIND)).map_err(nameless::<K>)
}

/// Reads the metadata of a list.
pub(crate) fn read_metadata<K: WatchedResource>(piece: Piece<'_>) -> Result<ListMetadata, CodecError> {
    ListMetadata::decode(whole(piece)?).map_err(|error| nameless::<K>(error.into()))
}

/// Reads an item of a list.
pub(crate) fn read_item<K: WatchedResource>(piece: Piece<'_>) -> Result<Message<K>, CodecError> {
    Ok(Message::Applied(match piece {
        Piece::Whole(bytes) => Decoded::read_protobuf(bytes),
        Piece::Head(bytes) => Decoded::too_long(names(bytes), bytes.len())?,
    }))
}

/// Reads a frame of a watch.
pub(crate) fn read_frame<K: WatchedResource>(piece: Piece<'_>) -> Result<Message<K>, CodecError> {
    let mut event = Event::default();
    match piece {
        Piece::Whole(bytes) => {
            let read = event.read(bytes);
            let unreadable = |error| CodecError::unreadable::<K>(error, &names(event.object.raw));
            match read.and_then(|()| change(event.change)).map_err(unreadable)? {
                Change::Error => Ok(Message::Error(Box::new(Status::of(&event.object).map_err(unreadable)?))),
                change => message(change, event.object.object(K::KIND).map_err(unreadable)?).map_err(unreadable),
            }
        }
        Piece::Head(bytes) => {
            // The fields before the cut count.
            event.read(bytes).ok();
            Message::too_long(Some(event.change), names(event.object.raw), bytes.len())
        }
    }
}

fn message<K: WatchedResource>(change: Change, object: &[u8]) -> Result<Message<K>, DecodeError> {
    Ok(match change {
        Change::Deleted => Message::Deleted(Decoded::read_protobuf(object)),
        Change::Bookmark => {
            let Bookmark { metadata } = Bookmark::decode(object)?;
            Message::Bookmark(metadata.resource_version)
        }
        _ => Message::Applied(Decoded::read_protobuf(object)),
    })
}

fn change(text: &str) -> Result<Change, DecodeError> {
    Ok(match text {
        "ADDED" => Change::Added,
        "MODIFIED" => Change::Modified,
        "DELETED" => Change::Deleted,
        "BOOKMARK" => Change::Bookmark,
        "ERROR" => Change::Error,
        other => return Err(DecodeError::Change(format!("{:?}", printable(other)))),
    })
}

fn whole(piece: Piece<'_>) -> Result<&[u8], CodecError> {
    match piece {
        Piece::Whole(bytes) => Ok(bytes),
        Piece::Head(_) => Err(CodecError::too_long(LONGEST_BYTES)),
    }
}

fn nameless<K: WatchedResource>(error: DecodeError) -> CodecError {
    CodecError::unreadable::<K>(error, &<_>::default())
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::{Metadata, Service};
    use proptest::prelude::*;
    use prost::encoding::{WireType, encode_key, encode_varint};

    use super::*;
    use crate::codec::split::{SplitError, protobuf::MAGIC};

    fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
        let mut field = Vec::new();
        encode_key(number, WireType::LengthDelimited, &mut field);
        encode_varint(bytes.len() as u64, &mut field);
        [field, bytes.to_vec()].concat()
    }

    fn envelope(kind: &str, raw: &[u8]) -> Vec<u8> {
        [MAGIC.to_vec(), field(1, &field(2, kind.as_bytes())), field(2, raw), field(3, b""), field(4, b"")].concat()
    }

    fn event(change: &str, object: &[u8]) -> Vec<u8> {
        [field(1, change.as_bytes()), field(2, &field(1, object))].concat()
    }

    fn service(name: &str) -> Vec<u8> {
        let metadata = Metadata { name: name.to_owned(), resource_version: "7".to_owned(), ..Metadata::default() };
        let mut service = Service::default();
        service.metadata = metadata;
        service.encode_to_vec()
    }

    fn read(frame: &[u8]) -> Result<Message<Service>, CodecError> {
        read_frame(Piece::Whole(frame))
    }

    #[test]
    fn a_frame_is_an_object_a_bookmark_or_an_error() {
        for (change, is_put) in [("ADDED", true), ("MODIFIED", true), ("DELETED", false)] {
            let message = read(&event(change, &envelope("Service", &service("a")))).unwrap();
            let (Message::Applied(object) | Message::Deleted(object)) = &message else { panic!("{message:?}") };
            assert_eq!((&*object.meta().name, matches!(message, Message::Applied(_))), ("a", is_put));
        }
        let metadata = [field(6, b"7"), field(12, b"")].concat();
        let bookmark = read(&event("BOOKMARK", &envelope("Service", &field(1, &metadata))));
        assert!(matches!(bookmark, Ok(Message::Bookmark(Some(version))) if version == "7"));
        let status = Status { message: "old".to_owned(), code: 410, details: None }.encode_to_vec();
        let error = read(&event("ERROR", &envelope("Status", &status)));
        assert!(matches!(error, Ok(Message::Error(status)) if status.code == 410 && status.message == "old"));
    }

    #[test]
    fn an_unreadable_object_keeps_its_name_and_harms_no_other() {
        // A spec whose clusterIP is not UTF-8, is longer than the spec, is a group, or has a number of 11 bytes.
        for spec in [
            &[0x1a, 1, 0xff][..],
            &[0x1a, 9, b'1'],
            &[0x1b, 0x08],
            &[0x10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
            &[0x18, 1],
            &[0, 1],
            &[0x0b; 200],
        ] {
            let object = [service("a"), field(2, spec)].concat();
            let message = read(&event("ADDED", &envelope("Service", &object))).unwrap();
            let Message::Applied(Decoded::Unreadable(names, error)) = message else { panic!("{spec:?}: {message:?}") };
            assert_eq!((&*names.name, &*names.resource_version), ("a", "7"), "{spec:?}");
            assert!(error.contains("Service.spec"), "{error}");
        }
        // A group of a field that is not known is skipped, however deprecated it is.
        let grouped = [service("a"), vec![0x9b, 0x06, 0x08, 1, 0x9c, 0x06]].concat();
        let message = read(&event("ADDED", &envelope("Service", &grouped)));
        assert!(matches!(message, Ok(Message::Applied(Decoded::Object(_)))), "{message:?}");
    }

    #[test]
    fn a_broken_frame_is_an_error_that_names_its_object_if_it_can_be_read() {
        let good = envelope("Service", &service("a"));
        let encoded = [MAGIC.to_vec(), field(1, &field(2, b"Service")), field(2, &service("a")), field(3, b"gzip")];
        for (frame, expected, name) in [
            (event("ADDED", &envelope("Pod", &service("a"))), "Pod where Service is asked for", Some("a")),
            (event("ADDED", &envelope("", b"")), "no kind where Service is asked for", None),
            (event("ADDED", &encoded.concat()), "contentEncoding gzip is not known", Some("a")),
            (event("ERROR", &good), "Service where Status is asked for", Some("a")),
            (event("ADDED", b"{}"), "not protobuf of Kubernetes", None),
            (event("ADDED", b""), "not protobuf of Kubernetes", None),
            (event("SHOUTED", &good), "\"SHOUTED\" is no type of a watch event", Some("a")),
            (event("", &good), "\"\" is no type of a watch event", Some("a")),
            ([event("ADDED", &good), vec![0x0a, 9]].concat(), "a field is longer than its message", Some("a")),
            (field(1, &[0xff]), "a text is not UTF-8", None),
            (vec![0, 1], "failed to decode Protobuf message: invalid tag value: 0", None),
            (vec![0xff; 20], "failed to decode Protobuf message: invalid varint", None),
            (vec![0x0b; 200], "failed to decode Protobuf message: recursion limit reached", None),
        ] {
            let Err(CodecError::Unreadable { name: named, error }) = read(&frame) else {
                panic!("{expected}: it is read")
            };
            assert_eq!((&*error.to_string(), named.as_deref()), (expected, name.map(|_| "Service default/a")));
        }
        for end in 0..good.len() {
            let frame = event("ADDED", &good[..end]);
            assert!(matches!(read(&frame), Err(CodecError::Unreadable { .. }) | Ok(Message::Applied(_))), "{end}");
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_an_unreadable_object_if_it_has_a_name() {
        let long = [service("a"), field(12, &[b'x'; 100])].concat();
        let head = |change: &str, object: &[u8]| {
            let frame = event(change, &envelope("Service", object));
            read_frame::<Service>(Piece::Head(&frame[..frame.len() - 50]))
        };
        assert!(
            matches!(head("ADDED", &long), Ok(Message::Applied(Decoded::Unreadable(names, _))) if names.name == "a")
        );
        assert!(matches!(head("DELETED", &long), Ok(Message::Deleted(Decoded::Unreadable(..)))));
        let is_too_long = |read| matches!(read, Err(CodecError::Split(SplitError::TooLong(_))));
        assert!(is_too_long(head("BOOKMARK", &long)) && is_too_long(head("ADDED", &[b'x'; 100])));
        // A name that is cut is no name.
        assert!(is_too_long(head("ADDED", &service(&"a".repeat(100)))));
    }

    #[test]
    fn a_list_is_of_the_kind_that_is_asked_for() {
        let check = |kind: &str| check_list::<Service>(Piece::Whole(&field(2, kind.as_bytes())));
        assert!(check("ServiceList").is_ok());
        for (kind, expected) in [("PodList", "PodList"), ("Status", "Status"), ("", "no kind")] {
            let Err(CodecError::Unreadable { name: None, error }) = check(kind) else { panic!("{kind} is accepted") };
            assert_eq!(error.to_string(), format!("{expected} where ServiceList is asked for"));
        }
    }

    proptest! {
        #[test]
        fn a_frame_with_wrong_bytes_is_an_object_or_an_error(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
            end in any::<prop::sample::Index>(),
            is_whole in any::<bool>(),
        ) {
            let mut frame = event("ADDED", &envelope("Service", &service("web")));
            for (index, byte) in changes {
                *index.get_mut(&mut frame) = byte;
            }
            let frame = &frame[..end.index(frame.len() + 1)];
            let piece = if is_whole { Piece::Whole(frame) } else { Piece::Head(frame) };
            let is_named = |names: &Metadata| names.name.len() <= frame.len();
            match read_frame::<Service>(piece) {
                Ok(Message::Applied(object) | Message::Deleted(object)) => prop_assert!(is_named(object.meta())),
                Ok(Message::Bookmark(_) | Message::Error(_)) | Err(_) => {}
            }
        }
    }
}
