//! Objects from which policies follow, as they arrive.

use std::sync::OnceLock;

use cproxy_core::{
    ObjectName, Problem,
    api::{Metadata, Object},
};
use cproxy_policy::{Event, Namespace, Pod, Policy, Read, api, served};
use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType},
};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};

use super::input::{PolicyChange, PolicyInput};

/// Kind of object from which policies follow.
pub trait PolicyKind: Message + DeserializeOwned + Default + 'static {
    /// API group; empty for the core group.
    const GROUP: &'static str;
    /// `kind` of an object.
    const KIND: &'static str;
    /// Version within the group.
    const VERSION: &'static str;
    /// Resource name in URLs.
    const PLURAL: &'static str;
    /// The kind among the inputs.
    const INPUT: PolicyInput;

    /// Namespace, name and version.
    fn names(&self) -> (&str, &str, &str);

    /// The object as a change, and its mistakes.
    ///
    /// # Errors
    /// It cannot be read.
    fn change(&self) -> Result<(PolicyChange, Vec<Problem>), String>;
}

/// Object of a kind from which policies follow, with the metadata that a watch needs.
#[derive(Debug, Default)]
pub struct PolicyObject<K> {
    object: K,
    metadata: OnceLock<Metadata>,
}

impl<K: PolicyKind> PolicyObject<K> {
    /// The object as a change, and its mistakes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn change(&self) -> Result<(PolicyChange, Vec<Problem>), String> {
        self.object.change()
    }
}

/// Name of an object by its metadata, as [`PolicyKind::change`] has it.
#[must_use]
pub fn policy_object_name(metadata: &Metadata) -> ObjectName {
    ObjectName::new(&metadata.namespace, &*metadata.name)
}

/// Deletion of an object.
#[must_use]
pub fn policy_deletion<K: PolicyKind>(metadata: &Metadata) -> PolicyChange {
    PolicyChange::gone(K::INPUT, policy_object_name(metadata))
}

impl<'de, K: PolicyKind> Deserialize<'de> for PolicyObject<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self { object: K::deserialize(deserializer)?, metadata: OnceLock::new() })
    }
}

impl<K: PolicyKind> Message for PolicyObject<K> {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.object.encode_raw(buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        self.object.merge_field(tag, wire_type, buf, context)
    }

    fn encoded_len(&self) -> usize {
        self.object.encoded_len()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl<K: PolicyKind> Object for PolicyObject<K> {
    const GROUP: &'static str = K::GROUP;
    const VERSION: &'static str = K::VERSION;
    const KIND: &'static str = K::KIND;
    const PLURAL: &'static str = K::PLURAL;

    fn metadata(&self) -> &Metadata {
        self.metadata.get_or_init(|| {
            let (namespace, name, version) = self.object.names();
            Metadata {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                resource_version: version.to_owned(),
                ..Metadata::default()
            }
        })
    }
}

macro_rules! kind {
    ($type:ty, $group:expr, $version:expr, $kind:expr, $plural:expr, $input:ident, |$object:ident| $change:expr) => {
        impl PolicyKind for $type {
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const KIND: &'static str = $kind;
            const PLURAL: &'static str = $plural;
            const INPUT: PolicyInput = PolicyInput::$input;

            fn names(&self) -> (&str, &str, &str) {
                let metadata = &self.metadata;
                (&metadata.namespace, &metadata.name, &metadata.resource_version)
            }

            fn change(&self) -> Result<(PolicyChange, Vec<Problem>), String> {
                let $object = self;
                $change
            }
        }
    };
}

const NO_NAME: &str = "it has no name";

kind!(api::Pod, "", "v1", "Pod", "pods", Pods, |object| {
    let Read { value, problems } = Pod::read(object).ok_or(NO_NAME)?;
    Ok((PolicyChange::Resolved(Event::Pod(Box::new(value))), problems))
});

kind!(api::Namespace, "", "v1", "Namespace", "namespaces", Namespaces, |object| {
    let namespace = Namespace::read(object).ok_or(NO_NAME)?;
    Ok((PolicyChange::Resolved(Event::Namespace(namespace)), Vec::new()))
});

kind!(api::NetworkPolicy, "networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", NetworkPolicies, |object| {
    let Read { value, problems } = Policy::read(object).ok_or(NO_NAME)?;
    Ok((PolicyChange::Resolved(Event::Policy(Box::new(value))), problems))
});

kind!(
    served::PodPolicy,
    served::GROUP,
    served::VERSION,
    <served::PodPolicy as Object>::KIND,
    <served::PodPolicy as Object>::PLURAL,
    PodPolicies,
    |object| {
        let policy = object.read().map_err(|error| error.to_string())?;
        Ok((PolicyChange::Policy(Box::new(policy)), Vec::new()))
    }
);

kind!(
    served::AddressSlice,
    served::GROUP,
    served::VERSION,
    <served::AddressSlice as Object>::KIND,
    <served::AddressSlice as Object>::PLURAL,
    AddressSlices,
    |object| {
        let slice = object.read().map_err(|error| error.to_string())?;
        Ok((PolicyChange::Slice(slice), Vec::new()))
    }
);
