//! Splitters of responses into single objects: a watch into events, a list into items. They work on chunks as these
//! arrive and hold one object at most.

pub mod json;
pub mod protobuf;

/// Longest object: five times etcd's default limit, since JSON is longer than the stored form.
pub const LONGEST_BYTES: usize = 8 << 20;

/// Capacity that a buffer keeps between objects. Few objects are longer.
const KEPT_BYTES: usize = 256 << 10;

/// Bytes of an object that is too long that are skipped, as a multiple of the bound. Beyond that, the splitter gives
/// up: the object may be endless.
const SKIPPED_TIMES: usize = 3;

/// Error in splitting a response.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// One object is longer than the bound.
    #[error("one object is longer than {0} bytes")]
    TooLong(usize),
    /// The response is not a list.
    #[error("not a list: {0}")]
    NotAList(&'static str),
    /// The response is not a watch.
    #[error("not a watch: {0}")]
    NotAWatch(&'static str),
}

/// Bytes of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// The whole object.
    Whole(&'a [u8]),
    /// The beginning of an object that is longer than the bound.
    Head(&'a [u8]),
}

/// Bytes received of one object.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    longest_bytes: usize,
    skipped_bytes: usize,
}

impl Buffer {
    fn new(longest_bytes: usize) -> Self {
        Self { bytes: Vec::new(), longest_bytes, skipped_bytes: 0 }
    }

    fn clear(&mut self) {
        self.skipped_bytes = 0;
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_BYTES);
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), SplitError> {
        let room = self.longest_bytes.saturating_sub(self.bytes.len());
        let (kept, skipped) = bytes.split_at(room.min(bytes.len()));
        self.bytes.extend_from_slice(kept);
        self.skipped_bytes += skipped.len();
        if self.skipped_bytes > self.longest_bytes.saturating_mul(SKIPPED_TIMES) {
            return Err(SplitError::TooLong(self.longest_bytes));
        }
        Ok(())
    }

    /// Clears the buffer for an object whose length is known.
    fn expect(&mut self, bytes: u64) -> Result<(), SplitError> {
        self.clear();
        let read_bytes_max = self.longest_bytes.saturating_mul(1 + SKIPPED_TIMES);
        if bytes > read_bytes_max as u64 { Err(SplitError::TooLong(self.longest_bytes)) } else { Ok(()) }
    }

    fn piece(&self) -> Piece<'_> {
        if self.skipped_bytes == 0 { Piece::Whole(&self.bytes) } else { Piece::Head(&self.bytes) }
    }
}

/// Part of a list.
#[derive(Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Type of the list; in protobuf alone, where it comes first.
    Type(Piece<'a>),
    /// Metadata of the list.
    Metadata(Piece<'a>),
    /// One of its items.
    Item(Piece<'a>),
}
