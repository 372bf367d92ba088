//! One document of a file, reduced while it is read: what is kept of an object of many kilobytes, or of a List of ten
//! thousand of them, is the parts that cproxy uses.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

use crate::{
    k8s::objects::{EndpointSlice, Node, Service},
    model::{Kind, ObjectName},
};

/// A document, or an item of a List.
#[derive(Default)]
pub(super) struct Document {
    /// `apiVersion`; empty if there is none.
    pub(super) version: String,
    /// `kind`; empty if there is none.
    pub(super) kind: String,
    pub(super) content: Content,
}

/// What a document is.
#[derive(Default)]
pub(super) enum Content {
    /// Empty.
    Null,
    /// Nothing that is used.
    #[default]
    Unused,
    /// It does not say what it is; the list that it is in may.
    Untyped(Map<String, Value>),
    /// A list, and its items, if it has any.
    List(Option<Vec<Document>>),
    Service(Object<Service>),
    Slice(Object<EndpointSlice>),
    Node(Object<Node>),
}

/// An object, or why it is none.
pub(super) type Object<T> = Result<Box<T>, Refused>;

/// Why an object cannot be used.
pub(super) enum Refused {
    /// It has no name; what is wrong.
    Nameless(String),
    /// It cannot be read; its name and what is wrong.
    Unreadable(ObjectName, String),
}

impl Document {
    fn new(fields: Map<String, Value>, items: Option<Vec<Self>>) -> Self {
        let field = |name: &str| fields.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (field("apiVersion"), field("kind"));
        let content = match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => Content::Service(object(fields, Kind::Services)),
            ("discovery.k8s.io/v1", "EndpointSlice") => Content::Slice(object(fields, Kind::EndpointSlices)),
            ("v1", "Node") => Content::Node(object(fields, Kind::Nodes)),
            (_, kind) if kind.ends_with("List") => Content::List(items),
            ("", _) | (_, "") => Content::Untyped(fields),
            _ => Content::Unused,
        };
        Self { version, kind, content }
    }

    /// The items of a typed list (`kind: ServiceList`) need not say what they are.
    pub(super) fn of_list(self, version: &str, kind: &str) -> Self {
        match self.content {
            Content::Untyped(mut fields) if !kind.is_empty() => {
                fields.entry("kind").or_insert_with(|| kind.into());
                fields.entry("apiVersion").or_insert_with(|| version.into());
                Self::new(fields, None)
            }
            content => Self { content, ..self },
        }
    }
}

fn object<T: DeserializeOwned>(fields: Map<String, Value>, kind: Kind) -> Object<T> {
    let document = Value::Object(fields);
    let value = |name: &str| document.pointer(&format!("/metadata/{name}"));
    let metadata = |name: &str| value(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let Some(name) = metadata("name") else {
        let kind = kind.singular();
        return Err(Refused::Nameless(match value("name") {
            Some(name) if !name.is_null() && !name.is_string() => {
                format!("{kind} with metadata.name {name}, which is no string (put it in quotes); ignored")
            }
            _ => format!("{kind} without metadata.name; ignored"),
        }));
    };
    let name = ObjectName::new(metadata("namespace").unwrap_or("default"), name);
    serde_path_to_error::deserialize(document).map_err(|error| Refused::Unreadable(name, error.to_string()))
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentVisitor)
    }
}

struct DocumentVisitor;

/// What is neither map nor null says nothing.
macro_rules! nothing {
    ($type:ty: $($visit:ident($($value:ty)?),)*) => {
        $(
            fn $visit<E>(self $(, _: $value)?) -> Result<$type, E> {
                Ok(<$type>::default())
            }
        )*
    };
}

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        let (mut fields, mut items) = (Map::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            if key == "items" {
                items = map.next_value::<Items>()?.0;
            } else {
                fields.insert(key, map.next_value()?);
            }
        }
        Ok(Document::new(fields, items))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Document, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Document::default())
    }

    fn visit_unit<E>(self) -> Result<Document, E> {
        Ok(Document { content: Content::Null, ..Document::default() })
    }

    nothing!(Document: visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str),);
}

/// `items`, if it is a list.
#[derive(Default)]
struct Items(Option<Vec<Document>>);

impl<'de> Deserialize<'de> for Items {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemsVisitor)
    }
}

struct ItemsVisitor;

impl<'de> Visitor<'de> for ItemsVisitor {
    type Value = Items;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Kubernetes objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Items(Some(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Items, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Items::default())
    }

    nothing!(
        Items: visit_unit(), visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str),
    );
}
