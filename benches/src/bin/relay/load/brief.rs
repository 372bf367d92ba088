//! Objects of which clients read names and version only, so that thousands of clients cost little.

use std::{fmt, marker::PhantomData};

use cproxy_core::api::{Metadata, Object};
use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field, string},
};
use serde::{Deserialize, Deserializer, de::Error as _};

/// Field number of `metadata` in all objects.
const METADATA: u32 = 1;
/// Field numbers of metav1.ObjectMeta.
const NAME: u32 = 1;
const RESOURCE_VERSION: u32 = 6;

/// Name and version of an object of a kind.
pub(crate) struct Brief<K> {
    metadata: Metadata,
    kind: PhantomData<fn() -> K>,
}

impl<K> Default for Brief<K> {
    fn default() -> Self {
        Self { metadata: Metadata::default(), kind: PhantomData }
    }
}

impl<K> fmt::Debug for Brief<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.metadata.name)
    }
}

/// The server is never asked for JSON.
impl<'de, K> Deserialize<'de> for Brief<K> {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(D::Error::custom("these clients read protobuf only"))
    }
}

impl<K: Object + 'static> Message for Brief<K> {
    /// It is only read.
    fn encode_raw(&self, _: &mut impl BufMut) {}

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if tag != METADATA || wire_type != WireType::LengthDelimited {
            return skip_field(wire_type, tag, buf, context);
        }
        let length = usize::try_from(decode_varint(buf)?).unwrap_or(usize::MAX);
        let end = buf.remaining().saturating_sub(length);
        while buf.remaining() > end {
            let (tag, wire_type) = decode_key(buf)?;
            match tag {
                NAME => string::merge(wire_type, &mut self.metadata.name, buf, context.clone())?,
                RESOURCE_VERSION => {
                    string::merge(wire_type, &mut self.metadata.resource_version, buf, context.clone())?;
                }
                _ => skip_field(wire_type, tag, buf, context.clone())?,
            }
        }
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        0
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl<K: Object + 'static> Object for Brief<K> {
    const GROUP: &'static str = K::GROUP;
    const VERSION: &'static str = K::VERSION;
    const KIND: &'static str = K::KIND;
    const PLURAL: &'static str = K::PLURAL;
    const LOST_WITHOUT: Option<&'static str> = K::LOST_WITHOUT;

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;

    #[test]
    fn name_and_version_are_read() {
        let mut service = Service::default();
        service.metadata.name = "web".to_owned();
        service.metadata.resource_version = "17".to_owned();
        service.metadata.labels.insert("app".to_owned(), "web".to_owned());
        service.spec.cluster_ip = "10.96.0.1".to_owned();
        let brief = Brief::<Service>::decode(&*service.encode_to_vec()).unwrap();
        assert_eq!((&*brief.metadata.name, &*brief.metadata.resource_version), ("web", "17"));
    }
}
