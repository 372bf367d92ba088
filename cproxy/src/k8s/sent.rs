//! An object as it was sent, whether it can be read or not: one that cannot be must not end the list or watch that it
//! comes in, nor take others with it.

use std::borrow::Cow;

use kube::core::{ObjectMeta, Resource};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Value, value::RawValue};

/// An object, or what is wrong with it.
#[derive(Clone, Debug)]
pub(super) enum Sent<T> {
    /// It could be read.
    Read(Box<T>),
    /// It could not; its names could, if it has any, and the field that is wrong.
    Unreadable(Box<ObjectMeta>, String),
}

/// Of an object only what it is called, whatever else is wrong with it.
fn names(object: &Value) -> ObjectMeta {
    let field = |name: &str| {
        let value = object.pointer(&format!("/metadata/{name}")).and_then(Value::as_str);
        value.map(str::to_owned)
    };
    ObjectMeta {
        name: field("name"),
        namespace: field("namespace"),
        resource_version: field("resourceVersion"),
        ..ObjectMeta::default()
    }
}

/// What is wrong with an object, and where.
fn why<T: DeserializeOwned>(object: Value) -> Option<String> {
    serde_path_to_error::deserialize::<_, T>(object).err().map(|error| error.to_string())
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Sent<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        Ok(match serde_json::from_str(text.get()) {
            Ok(object) => Self::Read(object),
            Err(error) => {
                let object: Value = serde_json::from_str(text.get()).unwrap_or_default();
                let names = names(&object);
                Self::Unreadable(Box::new(names), why::<T>(object).unwrap_or_else(|| error.to_string()))
            }
        })
    }
}

impl<T: Resource> Resource for Sent<T> {
    type DynamicType = T::DynamicType;
    type Scope = T::Scope;

    fn kind(dynamic: &T::DynamicType) -> Cow<'_, str> {
        T::kind(dynamic)
    }
    fn group(dynamic: &T::DynamicType) -> Cow<'_, str> {
        T::group(dynamic)
    }
    fn version(dynamic: &T::DynamicType) -> Cow<'_, str> {
        T::version(dynamic)
    }
    fn plural(dynamic: &T::DynamicType) -> Cow<'_, str> {
        T::plural(dynamic)
    }
    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Read(object) => object.meta(),
            Self::Unreadable(metadata, _) => metadata,
        }
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Read(object) => object.meta_mut(),
            Self::Unreadable(metadata, _) => metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::{ObjectList, WatchEvent};

    use super::*;
    use crate::k8s::objects::Service;

    #[test]
    fn an_object_that_cannot_be_read_is_named_and_its_neighbours_are_read() {
        let list = r#"{"apiVersion": "v1", "kind": "ServiceList", "metadata": {"resourceVersion": "7"}, "items": [
            {"metadata": {"name": "a", "namespace": "n", "resourceVersion": "5"}, "spec": {"ports": [{"port": "high"}]}},
            {"metadata": {"name": "b"}, "spec": {"ports": [{"port": 80}]}},
            {"metadata": {"name": "c", "labels": {"x": 5}}}, 7]}"#;
        let list: ObjectList<Sent<Service>> = serde_json::from_str(list).unwrap();
        let [a, b, c, d] = list.items.try_into().unwrap();
        assert!(matches!(&a, Sent::Unreadable(_, message) if message.starts_with("spec.ports[0].port: invalid type")));
        assert_eq!((a.meta().name.as_deref(), a.meta().resource_version.as_deref()), (Some("a"), Some("5")));
        assert!(matches!(&b, Sent::Read(_)) && b.meta().name.as_deref() == Some("b"));
        assert!(
            matches!((&c, &d), (Sent::Unreadable(..), Sent::Unreadable(..))) && c.meta().name.as_deref() == Some("c")
        );
    }

    #[test]
    fn a_watch_goes_on_after_it() {
        let event = r#"{"type": "MODIFIED", "object": {"metadata": {"name": "a"}, "spec": 5}}"#;
        let event: WatchEvent<Sent<Service>> = serde_json::from_str(event).unwrap();
        assert!(matches!(event, WatchEvent::Modified(Sent::Unreadable(..))));
    }
}
