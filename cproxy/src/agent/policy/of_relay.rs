//! Objects that only relays serve, which send them in protobuf. A decoder of JSON would make the agent larger for
//! nothing.

use cproxy_core::api::{Metadata, Object};
use prost::{
    DecodeError, Message,
    bytes::{Buf, BufMut},
    encoding::{DecodeContext, WireType},
};
use serde::{Deserialize, Deserializer, de::Error as _};

/// Object of a relay.
#[derive(Debug, Default)]
pub(super) struct OfRelay<K>(pub(super) K);

impl<'de, K> Deserialize<'de> for OfRelay<K> {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(D::Error::custom("a relay sends it in protobuf alone"))
    }
}

impl<K: Object> Message for OfRelay<K> {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.0.encode_raw(buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        self.0.merge_field(tag, wire_type, buf, context)
    }

    fn encoded_len(&self) -> usize {
        self.0.encoded_len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

impl<K: Object> Object for OfRelay<K> {
    const GROUP: &'static str = K::GROUP;
    const VERSION: &'static str = K::VERSION;
    const KIND: &'static str = K::KIND;
    const PLURAL: &'static str = K::PLURAL;

    fn metadata(&self) -> &Metadata {
        self.0.metadata()
    }
}
