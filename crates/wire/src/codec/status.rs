//! Error of the API server: metav1.Status with only the fields that cproxy reads.

use prost::Message as _;
use serde::Deserialize;

use crate::{
    codec::{content_type::ContentType, error::DecodeError, protobuf::Envelope},
    located::read_json,
};

/// Error of the API server.
#[derive(Clone, Deserialize, prost::Message)]
#[serde(default)]
pub(crate) struct Status {
    /// Message for people.
    #[prost(string, tag = "3")]
    pub(crate) message: String,
    #[prost(message, optional, tag = "5")]
    pub(crate) details: Option<StatusDetails>,
    /// Status code of HTTP.
    #[prost(int32, tag = "6")]
    pub(crate) code: i32,
}

/// `details` of a Status.
#[derive(Clone, Copy, Deserialize, prost::Message)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct StatusDetails {
    /// Pause that the server asks for.
    #[prost(int32, tag = "5")]
    pub(crate) retry_after_seconds: i32,
}

impl Status {
    /// Status in the body of an error response. A proxy in front of the server may send text instead, whose first line
    /// is the message then.
    pub(crate) fn read(body: &[u8], content_type: Option<ContentType>) -> Self {
        let status = match content_type {
            Some(ContentType::Protobuf | ContentType::ProtobufStream) => Self::read_protobuf(body).ok(),
            _ => read_json(body).ok(),
        };
        status.unwrap_or_else(|| {
            let text = String::from_utf8_lossy(body);
            let message = text.trim().lines().next().unwrap_or_default().to_owned();
            Self { message, ..Self::default() }
        })
    }

    /// Status in an event of a protobuf watch.
    pub(crate) fn of(envelope: &Envelope<'_>) -> Result<Self, DecodeError> {
        Ok(Self::decode(envelope.object("Status")?)?)
    }

    fn read_protobuf(body: &[u8]) -> Result<Self, DecodeError> {
        let mut envelope = Envelope::default();
        envelope.read(body)?;
        Self::of(&envelope)
    }
}
