//! Names of a JSON object that is too long or broken, read from its beginning. The API server writes them before any
//! long field.

use std::{borrow::Cow, fmt};

use cproxy_core::api::Metadata;
use serde::{
    Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
};

/// Fields at the beginning of an object or of a line.
#[derive(Debug, Default)]
pub(crate) struct Head {
    /// Type of the watch event.
    pub(crate) change: Option<String>,
    pub(crate) names: Metadata,
}

/// Nesting level of the reader.
#[derive(Clone, Copy)]
enum Level {
    Line,
    Object,
    Metadata,
}

/// Visitor of the members of a JSON object at this level.
struct Members<'a>(&'a mut Head, Level);

impl Head {
    /// Reads a line of a watch up to its end or to an error.
    pub(crate) fn of_line(json: &[u8]) -> Self {
        Self::read(json, Level::Line)
    }

    /// Reads an object up to its end or to an error.
    pub(crate) fn of_object(json: &[u8]) -> Self {
        Self::read(json, Level::Object)
    }

    fn read(json: &[u8], level: Level) -> Self {
        let mut head = Self::default();
        // The fields before an error count, and a cut within a character is one.
        let json = String::from_utf8_lossy(json);
        Members(&mut head, level).deserialize(&mut serde_json::Deserializer::from_str(&json)).ok();
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
    fn names_are_read_up_to_the_end_of_the_text() {
        let of = |end| Head::of_line(LINE.as_bytes().get(..end).unwrap());
        let end_of = |text: &str| LINE.find(text).unwrap() + text.len();
        for end in 0..=LINE.len() {
            let head = of(end);
            assert_eq!(head.change.is_some(), end >= end_of("\"MODIFIED\""), "{end}");
            assert_eq!(!head.names.name.is_empty(), end >= end_of("\"web\""), "{end}");
            assert_eq!(!head.names.namespace.is_empty(), end >= end_of("\"default\""), "{end}");
            assert_eq!(!head.names.resource_version.is_empty(), end >= end_of("\"7\""), "{end}");
        }
        let whole = of(LINE.len());
        assert_eq!((whole.change.as_deref(), &*whole.names.name), (Some("MODIFIED"), "web"));
        let object = Head::of_object(br#"{"metadata":{"name":"a","namespace":"b","labels":{"x":"#);
        assert_eq!((&*object.names.name, &*object.names.namespace), ("a", "b"));
    }

    #[test]
    fn text_that_is_not_an_object_has_no_name() {
        for text in ["", "\0", "<html>", "[]", "7", r#"{"object":7}"#, r#"{"object":{"metadata":{"name":["#] {
            assert_eq!(Head::of_line(text.as_bytes()).names, Metadata::default(), "{text}");
        }
    }
}
