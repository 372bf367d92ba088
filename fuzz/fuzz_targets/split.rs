//! Splits an API server's response into objects. The first byte of the input is the length of chunks and, with its
//! highest bit set, says that the response is protobuf; the rest is the response.

#![no_main]

use cproxy_wire::split::{Part, Piece, SplitError, json, protobuf};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, from_slice};

/// Limit on an object, short enough that an input can exceed it.
const LONGEST_BYTES: usize = 200;

/// Parts of a response, and the error after them.
type Parts = (Vec<Vec<u8>>, Result<(), SplitError>);

fuzz_target!(|input: &[u8]| {
    let Some((first, sent)) = input.split_first() else { return };
    let size = usize::from(*first % 32) + 1;
    let chunks: Vec<_> = sent.chunks(size).collect();
    if *first & 0x80 != 0 {
        assert_eq!(protobuf_items(&[sent]), protobuf_items(&chunks), "chunks make no difference");
        assert_eq!(frames(&[sent]), frames(&chunks), "chunks make no difference");
        return;
    }
    let whole = items(&[sent]);
    assert_eq!(whole, items(&chunks), "chunks make no difference");
    if let Ok(Value::Object(list)) = from_slice(sent) {
        check(&list, sent, &whole);
    }
    assert_eq!(lines(&[sent]), lines(&chunks), "chunks make no difference");
});

/// Compares a list without duplicate members with another parser's result.
fn check(list: &serde_json::Map<String, Value>, sent: &[u8], parts: &Result<Vec<Vec<u8>>, SplitError>) {
    let is_plain =
        !sent.contains(&b'\\') && [&b"\"items\""[..], b"\"metadata\""].iter().all(|name| count(sent, name) <= 1);
    let are_whole = parts.iter().flatten().all(|part| !part.ends_with(b"\0"));
    if let (true, Some(Value::Array(items)), Ok(parts)) = (is_plain && are_whole, list.get("items"), parts) {
        let parts: Vec<Value> = parts.iter().map(|part| from_slice(part).unwrap()).collect();
        assert_eq!(parts.len(), items.len() + usize::from(list.contains_key("metadata")));
        assert!(items.iter().all(|item| parts.contains(item)));
    }
}

fn count(sent: &[u8], name: &[u8]) -> usize {
    sent.windows(name.len()).filter(|bytes| *bytes == name).count()
}

fn items(chunks: &[&[u8]]) -> Result<Vec<Vec<u8>>, SplitError> {
    let mut items = json::Items::new(LONGEST_BYTES);
    let mut parts = Vec::new();
    for mut chunk in chunks.iter().copied() {
        while let Some(Part::Metadata(part) | Part::Item(part)) = items.next(&mut chunk)? {
            parts.push(bytes(part));
        }
    }
    items.finish().map(|()| parts)
}

fn protobuf_items(chunks: &[&[u8]]) -> Parts {
    let (mut items, mut parts) = (protobuf::Items::new(LONGEST_BYTES), Vec::new());
    for mut chunk in chunks.iter().copied() {
        loop {
            match items.next(&mut chunk) {
                Ok(Some(Part::Type(part) | Part::Metadata(part) | Part::Item(part))) => parts.push(bytes(part)),
                Ok(None) => break,
                Err(error) => return (parts, Err(error)),
            }
        }
    }
    (parts, items.finish())
}

fn frames(chunks: &[&[u8]]) -> Parts {
    let (mut frames, mut parts) = (protobuf::Frames::new(LONGEST_BYTES), Vec::new());
    for mut chunk in chunks.iter().copied() {
        loop {
            match frames.next(&mut chunk) {
                Ok(Some(frame)) => parts.push(bytes(frame)),
                Ok(None) => break,
                Err(error) => return (parts, Err(error)),
            }
        }
    }
    (parts, frames.finish())
}

/// Bytes of a piece. A beginning ends in a NUL, which is not JSON.
fn bytes(piece: Piece<'_>) -> Vec<u8> {
    let (Piece::Whole(bytes) | Piece::Head(bytes)) = piece;
    assert!(bytes.len() <= LONGEST_BYTES);
    let end: &[u8] = if matches!(piece, Piece::Head(_)) { b"\0" } else { b"" };
    [bytes, end].concat()
}

fn lines(chunks: &[&[u8]]) -> Result<Vec<Vec<u8>>, SplitError> {
    let mut lines = json::Lines::new(LONGEST_BYTES);
    let mut seen = Vec::new();
    for mut chunk in chunks.iter().copied() {
        while let Some(line) = lines.next(&mut chunk)? {
            seen.push(bytes(line));
        }
    }
    seen.push(bytes(lines.rest()));
    Ok(seen)
}
