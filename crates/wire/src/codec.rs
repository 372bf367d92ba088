//! From bytes of a response to objects: decompression, single messages, and their decoding.

pub(crate) mod content_type;
pub(crate) mod decode;
pub(crate) mod decompressor;
pub(crate) mod error;
pub(crate) mod head;
pub(crate) mod message;
pub(crate) mod protobuf;
pub(crate) mod resource;
pub mod split;
pub(crate) mod status;
