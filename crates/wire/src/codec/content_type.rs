//! Encodings that the agent asks for, and the encoding of a response.

use http::{HeaderMap, HeaderValue, header::CONTENT_TYPE};

pub(crate) const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// Error of a response in an encoding that was not asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the Content-Type of the response is {0:?}, which was not asked for")]
pub(crate) struct ContentTypeError(pub(crate) String);

/// Encoding of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentType {
    /// JSON: an object, or the lines of a watch.
    Json,
    /// One object in protobuf.
    Protobuf,
    /// The frames of a watch in protobuf.
    ProtobufStream,
}

impl ContentType {
    /// Encoding that the headers name; JSON if they name none.
    ///
    /// # Errors
    /// They name another one.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, ContentTypeError> {
        let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(Self::Json) };
        let text = String::from_utf8_lossy(value.as_bytes());
        let mut parts = text.split(';').map(str::trim);
        match parts.next() {
            Some(JSON) => Ok(Self::Json),
            Some(PROTOBUF) if parts.any(|parameter| parameter == "stream=watch") => Ok(Self::ProtobufStream),
            Some(PROTOBUF) => Ok(Self::Protobuf),
            _ => Err(ContentTypeError(text.into_owned())),
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::Protobuf => PROTOBUF,
            Self::ProtobufStream => "application/vnd.kubernetes.protobuf;stream=watch",
        }
    }

    /// Value of the Accept header, for lists and for watches.
    pub(crate) fn accepted(with_protobuf: bool) -> HeaderValue {
        let both = "application/vnd.kubernetes.protobuf, application/json";
        HeaderValue::from_static(if with_protobuf { both } else { JSON })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_json_or_protobuf_and_nothing_else() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::try_from(text).unwrap());
            ContentType::of(&headers)
        };
        assert_eq!(ContentType::of(&HeaderMap::new()), Ok(ContentType::Json));
        assert_eq!(of("application/json; charset=utf-8"), Ok(ContentType::Json));
        assert_eq!(of("application/json;stream=watch"), Ok(ContentType::Json));
        for content_type in [ContentType::Json, ContentType::Protobuf, ContentType::ProtobufStream] {
            assert_eq!(of(content_type.as_str()), Ok(content_type));
        }
        assert_eq!(of("application/vnd.kubernetes.protobuf; stream=watch"), Ok(ContentType::ProtobufStream));
        for other in ["text/html", "", "application/cbor-seq", "application/jsonp"] {
            assert_eq!(of(other), Err(ContentTypeError(other.to_owned())));
        }
    }
}
