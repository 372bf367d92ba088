//! Reader of a response, one message at a time.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    codec::{
        content_type::{ContentType, ContentTypeError},
        error::CodecError,
        message::{ListMetadata, Message, json, protobuf},
        resource::WatchedResource,
        split::{self, LONGEST_BYTES, Part},
    },
    transport::link::Link,
    watch::{
        failure::{ApiError, Operation},
        io::Input,
        response::Response,
    },
};

/// Response of a list or watch.
pub(crate) struct MessageReader {
    response: Response,
    splitter: Splitter,
    /// Last chunk of the body, of which `read_bytes` have been read.
    chunk: Bytes,
    read_bytes: usize,
    /// A message was returned. From the next call on, silence is measured between messages.
    has_returned: bool,
    has_ended: bool,
}

/// Form of the body.
enum Splitter {
    /// List in JSON, and its metadata once received.
    JsonList(split::json::Items, ListMetadata),
    /// List in protobuf.
    ProtobufList(split::protobuf::Items, ListMetadata),
    /// Lines of a watch.
    JsonWatch(split::json::Lines),
    /// Frames of a watch in protobuf.
    ProtobufWatch(split::protobuf::Frames),
}

impl MessageReader {
    pub(crate) fn new(operation: Operation, response: Response) -> Result<Self, ApiError> {
        let content_type = response.content_type().map_err(CodecError::from)?;
        let splitter = Splitter::new(operation == Operation::List, content_type).map_err(CodecError::from)?;
        Ok(Self { response, splitter, chunk: Bytes::new(), read_bytes: 0, has_returned: false, has_ended: false })
    }

    /// Connection of the response.
    pub(crate) fn link(&self) -> &Link {
        self.response.link()
    }

    /// The next message, or the end of the response.
    pub(crate) async fn next<K: WatchedResource>(&mut self, silence_max: Duration) -> Result<Input<K>, ApiError> {
        if std::mem::replace(&mut self.has_returned, true) {
            self.response.allow_silence(silence_max);
        }
        while !self.has_ended {
            let mut rest = self.chunk.get(self.read_bytes..).unwrap_or_default();
            let part = self.splitter.next::<K>(&mut rest)?;
            self.read_bytes = self.chunk.len() - rest.len();
            match part {
                Some(Some(message)) => return Ok(Input::Received(message)),
                Some(None) => self.response.allow_silence(silence_max),
                None => match self.response.chunk().await? {
                    Some(chunk) => (self.chunk, self.read_bytes) = (chunk, 0),
                    None => {
                        self.has_ended = true;
                        if let Some(message) = self.splitter.finish()? {
                            return Ok(Input::Received(message));
                        }
                    }
                },
            }
        }
        Ok(Input::Ended(self.splitter.metadata()))
    }
}

impl Splitter {
    /// Splitter of a list or watch. The response says how it is encoded.
    fn new(is_list: bool, content_type: ContentType) -> Result<Self, ContentTypeError> {
        Ok(match (is_list, content_type) {
            (true, ContentType::Json) => {
                Self::JsonList(split::json::Items::new(LONGEST_BYTES), ListMetadata::default())
            }
            (true, ContentType::Protobuf) => {
                Self::ProtobufList(split::protobuf::Items::new(LONGEST_BYTES), ListMetadata::default())
            }
            (false, ContentType::Json) => Self::JsonWatch(split::json::Lines::new(LONGEST_BYTES)),
            (false, ContentType::ProtobufStream) => Self::ProtobufWatch(split::protobuf::Frames::new(LONGEST_BYTES)),
            (true, ContentType::ProtobufStream) | (false, ContentType::Protobuf) => {
                return Err(ContentTypeError(content_type.as_str().to_owned()));
            }
        })
    }

    /// Reads the next part of `chunk`. `Some(None)` is a part without a message; `None` means that more chunks are
    /// needed.
    fn next<K: WatchedResource>(&mut self, chunk: &mut &[u8]) -> Result<Option<Option<Message<K>>>, CodecError> {
        Ok(match self {
            Self::JsonWatch(lines) => match lines.next(chunk)? {
                Some(line) => Some(json::read_line(line)?),
                None => None,
            },
            Self::ProtobufWatch(frames) => match frames.next(chunk)? {
                Some(frame) => Some(Some(protobuf::read_frame(frame)?)),
                None => None,
            },
            Self::JsonList(items, metadata) => match items.next(chunk)? {
                Some(Part::Item(item)) => Some(Some(json::read_item(item)?)),
                Some(Part::Metadata(piece)) => {
                    *metadata = json::read_metadata::<K>(piece)?;
                    Some(None)
                }
                Some(Part::Type(_)) | None => None,
            },
            Self::ProtobufList(items, metadata) => match items.next(chunk)? {
                Some(Part::Item(item)) => Some(Some(protobuf::read_item(item)?)),
                Some(Part::Metadata(piece)) => {
                    *metadata = protobuf::read_metadata::<K>(piece)?;
                    Some(None)
                }
                Some(Part::Type(piece)) => {
                    protobuf::check_list::<K>(piece)?;
                    Some(None)
                }
                None => None,
            },
        })
    }

    /// Reads the end of the body. The last line of a watch may have no line feed.
    fn finish<K: WatchedResource>(&mut self) -> Result<Option<Message<K>>, CodecError> {
        match self {
            Self::JsonWatch(lines) => return json::read_line(lines.rest()),
            Self::JsonList(items, _) => items.finish()?,
            Self::ProtobufWatch(frames) => frames.finish()?,
            Self::ProtobufList(items, _) => items.finish()?,
        }
        Ok(None)
    }

    fn metadata(&mut self) -> ListMetadata {
        match self {
            Self::JsonWatch(_) | Self::ProtobufWatch(_) => ListMetadata::default(),
            Self::JsonList(_, metadata) | Self::ProtobufList(_, metadata) => std::mem::take(metadata),
        }
    }
}
