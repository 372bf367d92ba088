//! Name of an object that is cut off or broken, read from its beginning. The API server writes it before
//! anything that is long.

use std::{borrow::Cow, fmt};

use cproxy_core::api::Metadata;
use serde::{
    Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
};

/// Fields found so far.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// Type of a watch event.
    pub(super) change: Option<String>,
    pub(super) names: Metadata,
}

/// Nesting level of the reader.
#[derive(Clone, Copy)]
enum Level {
    Line,
    Object,
    Metadata,
}

struct Members<'a>(&'a mut Head, Level);

impl Head {
    /// Reads the line of a watch as far as it goes.
    pub(super) fn of_line(json: &[u8]) -> Self {
        Self::read(json, Level::Line)
    }

    /// Reads an object as far as it goes.
    pub(super) fn of_object(json: &[u8]) -> Self {
        Self::read(json, Level::Object)
    }

    fn read(json: &[u8], level: Level) -> Self {
        let mut head = Self::default();
        // An error is the end of what can be read.
        Members(&mut head, level).deserialize(&mut serde_json::Deserializer::from_slice(json)).ok();
        head
    }
}

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self(head, level) = self;
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            match (level, &*name) {
                (Level::Line, "type") => head.change = map.next_value()?,
                (Level::Line, "object") => map.next_value_seed(Members(head, Level::Object))?,
                (Level::Object, "metadata") => map.next_value_seed(Members(head, Level::Metadata))?,
                (Level::Metadata, "name") => head.names.name = map.next_value()?,
                (Level::Metadata, "namespace") => head.names.namespace = map.next_value()?,
                (Level::Metadata, "resourceVersion") => head.names.resource_version = map.next_value()?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"type":"MODIFIED","object":{"kind":"Service","metadata":{"name":"web","namespace":"default",
        "uid":"1","resourceVersion":"7","annotations":{"name":"long"}},"spec":{}}}"#;

    #[test]
    fn names_are_read_wherever_the_text_breaks_off() {
        let of = |end| Head::of_line(LINE.as_bytes().get(..end).unwrap());
        let end_of = |text: &str| LINE.find(text).unwrap() + text.len();
        for end in 0..=LINE.len() {
            let head = of(end);
            assert_eq!(head.change.is_some(), end >= end_of("\"MODIFIED\""), "{end}");
            assert_eq!(head.names.name.is_some(), end >= end_of("\"web\""), "{end}");
            assert_eq!(head.names.namespace.is_some(), end >= end_of("\"default\""), "{end}");
            assert_eq!(head.names.resource_version.is_some(), end >= end_of("\"7\""), "{end}");
        }
        let whole = of(LINE.len());
        assert_eq!((whole.change.as_deref(), whole.names.name.as_deref()), (Some("MODIFIED"), Some("web")));
        let object = Head::of_object(br#"{"metadata":{"name":"a","namespace":"b","labels":{"x":"#);
        assert_eq!((object.names.name.as_deref(), object.names.namespace.as_deref()), (Some("a"), Some("b")));
    }

    #[test]
    fn nonsense_has_no_name() {
        for text in ["", "\0", "<html>", "[]", "7", r#"{"object":7}"#, r#"{"object":{"metadata":{"name":["#] {
            assert_eq!(Head::of_line(text.as_bytes()).names, Metadata::default(), "{text}");
        }
    }
}
