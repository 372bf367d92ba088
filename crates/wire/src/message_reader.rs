//! Reader of a response, one message at a time.

use std::time::Duration;

use bytes::Bytes;

use super::{
    failure::{ApiError, Operation},
    message::{ListMetadata, Message},
    resources::WatchedResource,
    response::Response,
    split::{Items, LONGEST_BYTES, Lines, Part},
    step::Input,
    transport::Link,
};

/// Response of a list or watch.
pub(super) struct MessageReader {
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
    /// List, or a page of it, and its metadata once received.
    List(Items, ListMetadata),
    /// Lines of a watch.
    Watch(Lines),
}

impl MessageReader {
    pub(super) fn new(operation: Operation, response: Response) -> Self {
        let splitter = match operation {
            Operation::CachedList => Splitter::List(Items::new(LONGEST_BYTES), ListMetadata::default()),
            Operation::StreamedList | Operation::Watch => Splitter::Watch(Lines::new(LONGEST_BYTES)),
        };
        Self { response, splitter, chunk: Bytes::new(), read_bytes: 0, has_returned: false, has_ended: false }
    }

    /// Connection of the response.
    pub(super) fn link(&self) -> &Link {
        self.response.link()
    }

    /// The next message, or the end of the response.
    pub(super) async fn next<K: WatchedResource>(&mut self, silence_max: Duration) -> Result<Input<K>, ApiError> {
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
    /// Reads the next part of `chunk`. `Some(None)` is a part without a message; `None` means that more chunks are
    /// needed.
    fn next<K: WatchedResource>(&mut self, chunk: &mut &[u8]) -> Result<Option<Option<Message<K>>>, ApiError> {
        Ok(match self {
            Self::Watch(lines) => match lines.next(chunk)? {
                Some(line) => Some(Message::read_line(line)?),
                None => None,
            },
            Self::List(items, metadata) => match items.next(chunk)? {
                Some(Part::Item(item)) => Some(Some(Message::read_item(item)?)),
                Some(Part::Metadata(piece)) => {
                    *metadata = ListMetadata::read::<K>(piece)?;
                    Some(None)
                }
                None => None,
            },
        })
    }

    /// Reads the end of the body. The last line of a watch may have no line feed.
    fn finish<K: WatchedResource>(&mut self) -> Result<Option<Message<K>>, ApiError> {
        match self {
            Self::Watch(lines) => Message::read_line(lines.rest()),
            Self::List(items, _) => {
                items.finish()?;
                Ok(None)
            }
        }
    }

    fn metadata(&mut self) -> ListMetadata {
        match self {
            Self::Watch(_) => ListMetadata::default(),
            Self::List(_, metadata) => std::mem::take(metadata),
        }
    }
}
