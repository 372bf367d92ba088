//! Objects as the relay keeps them: trimmed protobuf, and what selectors and views look at.

use std::{any::type_name, fmt, marker::PhantomData};

use bytes::Bytes;
use cproxy_core::api::{EndpointSlice, Metadata, Node, Object as Api, Service};
use cproxy_protobuf::{FieldError, fields, push_field, push_header, push_number};
use cproxy_wire::WatchedResource;
use prost::{
    Message,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType, decode_varint},
};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::kind::Kind;

/// Annotations that clients act on: the hints of kube-proxy before 1.33 depend on these.
const KEPT_ANNOTATIONS: [&[u8]; 2] =
    [b"service.kubernetes.io/topology-mode", b"service.kubernetes.io/topology-aware-hints"];

/// Labels of an object that are kept. The API server has no bound of its own, and each takes several times its size in
/// the cache and the history.
const LABELS_MAX: usize = 64;

/// Starts of labels that are kept besides.
const KEPT_LABELS: [&[u8]; 3] =
    [b"kubernetes.io/service-name", b"service.kubernetes.io/", b"endpointslice.kubernetes.io/"];

/// Field number of `resourceVersion` in metav1.ObjectMeta.
const RESOURCE_VERSION: u32 = 6;

/// Field numbers of metav1.ObjectMeta that are left out, labels and annotations in part.
const LABELS: u32 = 11;
const ANNOTATIONS: u32 = 12;
const OWNER_REFERENCES: u32 = 13;
const MANAGED_FIELDS: u32 = 17;

/// Field numbers of the objects.
pub(crate) const METADATA: u32 = 1;
const SPEC: u32 = 2;
/// Fields of v1.ServiceSpec that field selectors may name.
const CLUSTER_IP: u32 = 3;
const SERVICE_TYPE: u32 = 4;

/// Kind that the relay passes on as the API server has it.
pub trait Relayed: WatchedResource {
    /// The kind.
    const RELAYED: Kind;
    /// Its tables for JSON.
    const TABLES: cproxy_transcode::Kind;
}

impl Relayed for Service {
    const RELAYED: Kind = Kind::Services;
    const TABLES: cproxy_transcode::Kind = cproxy_transcode::Kind::Service;
}

impl Relayed for EndpointSlice {
    const RELAYED: Kind = Kind::EndpointSlices;
    const TABLES: cproxy_transcode::Kind = cproxy_transcode::Kind::EndpointSlice;
}

impl Relayed for Node {
    const RELAYED: Kind = Kind::Nodes;
    const TABLES: cproxy_transcode::Kind = cproxy_transcode::Kind::Node;
}

/// Object as it arrives: its protobuf without the fields that no client needs. Fields that are not known are verbatim.
pub struct Upstream<K> {
    metadata: Metadata,
    trimmed: Vec<u8>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Upstream<K> {
    /// Metadata and trimmed protobuf.
    #[must_use]
    pub fn into_parts(self) -> (Metadata, Vec<u8>) {
        (self.metadata, self.trimmed)
    }
}

impl<K> Default for Upstream<K> {
    fn default() -> Self {
        Self { metadata: Metadata::default(), trimmed: Vec::new(), kind: PhantomData }
    }
}

impl<K> fmt::Debug for Upstream<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", type_name::<K>(), self.metadata.namespace, self.metadata.name)
    }
}

/// JSON becomes the same protobuf, without fields that [`cproxy_transcode`] does not know.
impl<'de, K: Relayed> Deserialize<'de> for Upstream<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = serde_json::Value::deserialize(deserializer)?;
        let protobuf = cproxy_transcode::read_json(K::TABLES, &json).map_err(D::Error::custom)?;
        Self::decode(&*protobuf).map_err(D::Error::custom)
    }
}

impl<K: Relayed> Message for Upstream<K> {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        buf.put_slice(&self.trimmed);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), prost::DecodeError> {
        if wire_type != WireType::LengthDelimited {
            return copy_number(&mut self.trimmed, tag, wire_type, buf, context);
        }
        let length = decode_varint(buf)?;
        // The error is prost's own for a field that is cut.
        if length > buf.remaining() as u64 {
            return prost::encoding::skip_field(wire_type, tag, &mut &[0xff, 0x7f][..], context);
        }
        let value = buf.copy_to_bytes(usize::try_from(length).unwrap_or(usize::MAX));
        if tag != METADATA {
            push_field(&mut self.trimmed, tag, &value);
            return Ok(());
        }
        let trimmed = match trim_metadata(&value) {
            Ok(trimmed) => trimmed.into(),
            // It is read once more, for the error.
            Err(_) => value,
        };
        self.metadata.merge(&*trimmed)?;
        push_field(&mut self.trimmed, tag, &trimmed);
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.trimmed.len()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl<K: Relayed> Api for Upstream<K> {
    const GROUP: &'static str = K::GROUP;
    const VERSION: &'static str = K::VERSION;
    const KIND: &'static str = K::KIND;
    const PLURAL: &'static str = K::PLURAL;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

/// Copies a field without a length.
fn copy_number(
    to: &mut Vec<u8>,
    tag: u32,
    wire_type: WireType,
    buf: &mut impl Buf,
    context: DecodeContext,
) -> Result<(), prost::DecodeError> {
    match wire_type {
        WireType::Varint => {
            push_number(to, tag, decode_varint(buf)?);
            Ok(())
        }
        // Kubernetes has no other numbers at the top of an object, and groups nowhere.
        _ => prost::encoding::skip_field(wire_type, tag, buf, context),
    }
}

/// Metadata without managedFields, ownerReferences, annotations that nobody acts on, and labels beyond a bound.
fn trim_metadata(metadata: &[u8]) -> Result<Vec<u8>, FieldError> {
    let mut trimmed = Vec::new();
    let mut labels = 0;
    for field in fields(metadata) {
        let field = field?;
        let is_kept = match field.number {
            LABELS => {
                labels += 1;
                labels <= LABELS_MAX || has_kept_prefix(field.payload())?
            }
            OWNER_REFERENCES | MANAGED_FIELDS => false,
            ANNOTATIONS => is_kept_annotation(field.payload())?,
            _ => true,
        };
        if is_kept {
            trimmed.extend_from_slice(field.encoded);
        }
    }
    Ok(trimmed)
}

/// Whether a label is one of Kubernetes' own, which clients act on.
fn has_kept_prefix(entry: &[u8]) -> Result<bool, FieldError> {
    for field in fields(entry) {
        let field = field?;
        if field.number == 1 {
            let key = field.payload();
            return Ok(KEPT_LABELS.iter().any(|prefix| key.starts_with(prefix)) && key.len() < 64);
        }
    }
    Ok(false)
}

fn is_kept_annotation(entry: &[u8]) -> Result<bool, FieldError> {
    for field in fields(entry) {
        let field = field?;
        if field.number == 1 {
            return Ok(KEPT_ANNOTATIONS.contains(&field.payload()));
        }
    }
    Ok(false)
}

/// Error in an object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// It has no name.
    #[error("it has no name")]
    NoName,
    /// Its version cannot be compared.
    #[error("resourceVersion {0:?} is not a number")]
    Version(String),
    /// It is not valid protobuf.
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// Names, version and selectable fields of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Namespace; empty for a Node.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// resourceVersion.
    pub version: u64,
    /// Labels, sorted by key.
    pub labels: Box<[(Box<str>, Box<str>)]>,
    /// `spec.clusterIP` of a Service.
    pub cluster_ip: Box<str>,
    /// `spec.type` of a Service.
    pub service_type: Box<str>,
}

impl Meta {
    /// Value of a label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        let index = self.labels.binary_search_by(|(name, _)| (**name).cmp(key)).ok()?;
        self.labels.get(index).map(|(_, value)| &**value)
    }

    /// Whether selectors and views that see the object see another state of it, too.
    pub(crate) fn is_seen_like(&self, other: &Self) -> bool {
        (&self.labels, &self.cluster_ip, &self.service_type) == (&other.labels, &other.cluster_ip, &other.service_type)
    }

    /// Bytes that it takes, roughly.
    pub(crate) fn size_bytes(&self) -> usize {
        let labels: usize = self.labels.iter().map(|(key, value)| key.len() + value.len() + 64).sum();
        let selectable = self.cluster_ip.len() + self.service_type.len();
        labels + self.name.len() + self.namespace.len() + selectable + size_of::<Self>()
    }
}

/// Object of the cache.
#[derive(Clone, Debug)]
pub struct Object {
    /// Kind.
    pub kind: Kind,
    /// Names, version and selectable fields.
    pub meta: Meta,
    /// Trimmed protobuf.
    pub protobuf: Bytes,
}

impl Object {
    /// Reads names and selectable fields of a trimmed object.
    ///
    /// # Errors
    /// It lacks a name or a version, or a field cannot be read.
    pub fn new(kind: Kind, metadata: Metadata, protobuf: Bytes) -> Result<Self, ObjectError> {
        if metadata.name.is_empty() {
            return Err(ObjectError::NoName);
        }
        let version = parse_version(&metadata.resource_version)?;
        let (mut cluster_ip, mut service_type) = Default::default();
        if kind == Kind::Services {
            (cluster_ip, service_type) = service_fields(&protobuf)?;
        }
        let labels = metadata.labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        let (namespace, name) = (metadata.namespace.into(), metadata.name.into());
        Ok(Self { kind, meta: Meta { namespace, name, version, labels, cluster_ip, service_type }, protobuf })
    }

    /// Topic of its events: its name, or that of the set that a slice is a part of.
    pub(crate) fn topic(&self) -> &str {
        match self.kind {
            Kind::AddressSlices => self.meta.name.split_once('-').map_or(&*self.meta.name, |(set, _)| set),
            _ => &self.meta.name,
        }
    }

    /// Bytes that the object takes, roughly.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.protobuf.len() + self.meta.size_bytes() + size_of::<Self>()
    }
}

/// Reads a version.
///
/// # Errors
/// It is not a number. Kubernetes compares versions as numbers, too (apimachinery/pkg/util/resourceversion 1.36).
pub fn parse_version(text: &str) -> Result<u64, ObjectError> {
    text.parse().map_err(|_| ObjectError::Version(text.chars().take(64).collect()))
}

/// `spec.clusterIP` and `spec.type`.
fn service_fields(service: &[u8]) -> Result<(Box<str>, Box<str>), FieldError> {
    let (mut cluster_ip, mut service_type) = ("", "");
    for field in fields(service) {
        let field = field?;
        if field.number != SPEC {
            continue;
        }
        for field in fields(field.payload()) {
            let field = field?;
            match field.number {
                CLUSTER_IP => cluster_ip = str::from_utf8(field.payload())?,
                SERVICE_TYPE => service_type = str::from_utf8(field.payload())?,
                _ => {}
            }
        }
    }
    Ok((cluster_ip.into(), service_type.into()))
}

/// The object at another version: that of its deletion.
pub(crate) fn with_version(object: &Object, version: u64) -> Object {
    let protobuf = replace_version(&object.protobuf, version).unwrap_or_else(|_| object.protobuf.to_vec());
    Object { kind: object.kind, meta: Meta { version, ..object.meta.clone() }, protobuf: protobuf.into() }
}

fn replace_version(object: &[u8], version: u64) -> Result<Vec<u8>, FieldError> {
    let mut replaced = Vec::with_capacity(object.len() + 8);
    for field in fields(object) {
        let field = field?;
        if field.number != METADATA {
            replaced.extend_from_slice(field.encoded);
            continue;
        }
        let mut metadata = Vec::with_capacity(field.payload().len() + 8);
        for field in fields(field.payload()) {
            let field = field?;
            match field.number {
                RESOURCE_VERSION => push_field(&mut metadata, RESOURCE_VERSION, version.to_string().as_bytes()),
                _ => metadata.extend_from_slice(field.encoded),
            }
        }
        push_field(&mut replaced, METADATA, &metadata);
    }
    Ok(replaced)
}

/// Appends the object as an item of a list.
pub(crate) fn push_item(list: &mut Vec<u8>, object: &[u8]) {
    push_field(list, 2, object);
}

/// Bytes of the object as an item of a list.
pub(crate) fn item_bytes(object: &[u8]) -> usize {
    let mut header = Vec::with_capacity(12);
    push_header(&mut header, 2, object.len());
    header.len() + object.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str) -> Vec<u8> {
        let mut entry = Vec::new();
        push_field(&mut entry, 1, key.as_bytes());
        push_field(&mut entry, 2, b"value");
        entry
    }

    /// A Service with a field of every kind that is trimmed, and some that no version of Kubernetes has.
    fn service() -> Vec<u8> {
        let mut metadata = Vec::new();
        push_field(&mut metadata, 1, b"web");
        push_field(&mut metadata, 3, b"default");
        push_field(&mut metadata, 6, b"17");
        push_field(&mut metadata, 11, &entry("app"));
        push_field(&mut metadata, 12, &entry("kubectl.kubernetes.io/last-applied-configuration"));
        push_field(&mut metadata, 12, &entry("service.kubernetes.io/topology-mode"));
        push_field(&mut metadata, 13, b"");
        push_field(&mut metadata, 17, b"");
        push_field(&mut metadata, 99, b"new");
        let mut spec = Vec::new();
        push_field(&mut spec, 3, b"10.96.0.1");
        push_field(&mut spec, 4, b"ClusterIP");
        push_field(&mut spec, 98, b"new");
        let mut service = Vec::new();
        push_field(&mut service, 1, &metadata);
        push_field(&mut service, 2, &spec);
        service.extend([0x88, 0x06, 7]);
        service
    }

    #[test]
    fn an_object_is_trimmed_and_keeps_what_is_not_known() {
        let (metadata, trimmed) = Upstream::<Service>::decode(&*service()).unwrap().into_parts();
        let object = Object::new(Kind::Services, metadata, trimmed.into()).unwrap();
        let numbers = |message: &[u8]| fields(message).map(|field| field.unwrap().number).collect::<Vec<_>>();
        assert_eq!(numbers(&object.protobuf), [1, 2, 97]);
        let metadata = fields(&object.protobuf).next().unwrap().unwrap().payload();
        assert_eq!(numbers(metadata), [1, 3, 6, 11, 12, 99]);
        let meta = &object.meta;
        assert_eq!((&*meta.namespace, &*meta.name, meta.version), ("default", "web", 17));
        assert_eq!((&*meta.cluster_ip, &*meta.service_type), ("10.96.0.1", "ClusterIP"));
        assert_eq!((meta.label("app"), meta.label("none")), (Some("value"), None));
    }

    #[test]
    fn an_object_that_is_cut_is_an_error() {
        let service = service();
        for end in 0..service.len() {
            Upstream::<Service>::decode(&service[..end]).map(|object| object.encoded_len()).ok();
        }
        assert!(Upstream::<Service>::decode(&service[..service.len() - 5]).is_err());
    }

    #[test]
    fn a_version_is_a_number() {
        assert!(parse_version("18446744073709551615").is_ok());
        for wrong in ["", "-1", "1a", "18446744073709551616", " 1"] {
            assert!(parse_version(wrong).is_err(), "{wrong:?}");
        }
    }
}
