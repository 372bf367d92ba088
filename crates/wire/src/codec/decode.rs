//! Decoding of one object. An object that cannot be decoded neither ends its list or watch nor affects other objects.

use cproxy_core::{
    api::{Metadata, Object},
    object_name,
};
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::{
    codec::{error::CodecError, protobuf},
    located::locate,
};

/// Object, as far as it could be decoded.
#[derive(Debug)]
pub enum Decoded<T> {
    /// The object.
    Object(Box<T>),
    /// Names and version, if it has any, and the error with the path of its field.
    Unreadable(Box<Metadata>, String),
}

/// Names and version of a JSON object that cannot be decoded.
fn names(object: &Value) -> Metadata {
    let field = |name: &str| {
        let value = object.pointer(&format!("/metadata/{name}")).and_then(Value::as_str);
        value.unwrap_or_default().to_owned()
    };
    Metadata {
        name: field("name"),
        namespace: field("namespace"),
        resource_version: field("resourceVersion"),
        ..Metadata::default()
    }
}

impl<T: Object> Decoded<T> {
    /// Decodes an object from JSON.
    ///
    /// # Errors
    /// The text is not JSON, or the object is of another kind. Such a response cannot be trusted.
    pub(crate) fn read_json(json: &str) -> serde_json::Result<Self> {
        match serde_json::from_str(json) {
            Ok(object) => Ok(Self::Object(object)),
            Err(error) => {
                serde_json::from_str::<IgnoredAny>(json)?;
                let object: Value = serde_json::from_str(json).unwrap_or_default();
                if object.get("kind").and_then(Value::as_str).is_some_and(|kind| kind != T::KIND) {
                    return Err(error);
                }
                let names = names(&object);
                Ok(Self::Unreadable(Box::new(names), locate(json, &error).to_string()))
            }
        }
    }

    /// Decodes an object from protobuf.
    pub(crate) fn read_protobuf(bytes: &[u8]) -> Self {
        match T::decode(bytes) {
            Ok(object) => Self::Object(Box::new(object)),
            Err(error) => Self::Unreadable(Box::new(protobuf::names(bytes)), error.to_string()),
        }
    }

    /// Object that is too long to be decoded. `names` are from its beginning.
    ///
    /// # Errors
    /// There is no name.
    pub(crate) fn too_long(names: Metadata, longest_bytes: usize) -> Result<Self, CodecError> {
        if object_name(&names).is_none() {
            return Err(CodecError::too_long(longest_bytes));
        }
        Ok(Self::Unreadable(Box::new(names), format!("longer than {longest_bytes} bytes")))
    }

    /// Metadata of the object: only names and version if it is unreadable.
    #[must_use]
    pub fn meta(&self) -> &Metadata {
        match self {
            Self::Object(object) => object.metadata(),
            Self::Unreadable(metadata, _) => metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;

    #[test]
    fn an_unreadable_object_keeps_its_name() {
        let read = |json| Decoded::<Service>::read_json(json).unwrap();
        let a = read(
            r#"{"metadata": {"name": "a", "namespace": "n", "resourceVersion": "5"},
                "spec": {"ports": [{"port": "high"}]}}"#,
        );
        assert!(
            matches!(&a, Decoded::Unreadable(_, message) if message.starts_with("spec.ports[0].port: invalid type"))
        );
        assert_eq!((&*a.meta().name, &*a.meta().resource_version), ("a", "5"));
        let b = read(r#"{"metadata": {"name": "b"}, "spec": {"ports": [{"port": 80}]}}"#);
        assert!(matches!(&b, Decoded::Object(_)) && b.meta().name == "b");
        let c = read(r#"{"metadata": {"name": "c", "labels": {"x": 5}}}"#);
        assert!(matches!(&c, Decoded::Unreadable(..)) && c.meta().name == "c");
        for nameless in ["7", "null", "[7]"] {
            let object = read(nameless);
            assert!(matches!(&object, Decoded::Unreadable(..)) && object.meta().name.is_empty(), "{nameless}");
        }
    }

    #[test]
    fn an_object_of_another_kind_is_an_error() {
        let of = |kind| format!(r#"{{"kind": "{kind}", "metadata": {{"name": "a"}}}}"#);
        assert!(matches!(Decoded::<Service>::read_json(&of("Service")), Ok(Decoded::Object(_))));
        let error = Decoded::<Service>::read_json(&of("Pod")).unwrap_err().to_string();
        assert!(error.starts_with("Pod where Service is asked for"), "{error}");
    }

    #[test]
    fn text_that_is_not_json_is_an_error() {
        for text in ["", "{", r#"{"metadata": [}"#, r#"{"a": 1} {"#, "nul"] {
            assert!(Decoded::<Service>::read_json(text).is_err(), "{text}");
        }
    }
}
