//! Splitters of protobuf as the API server writes it: a watch into frames, a list into items.
//!
//! A list is four magic bytes and a `runtime.Unknown` whose field `raw` is the list. Only this frame is read here, byte
//! by byte as it arrives; prost decodes messages that are in memory as a whole.

use super::{Buffer, Part, Piece, SplitError};

/// First bytes of a protobuf object of Kubernetes.
pub const MAGIC: [u8; 4] = *b"k8s\0";

/// Splitter of a watch into frames: a length of four bytes, most significant first, and the bytes of one event.
#[derive(Debug)]
pub struct Frames {
    buffer: Buffer,
    length: [u8; 4],
    /// Bytes of the length that have been read.
    length_read: usize,
    /// Bytes of the frame that are still to come.
    missing_bytes: u64,
}

impl Frames {
    /// A splitter that keeps only the beginning of frames longer than `longest_bytes`.
    #[must_use]
    pub fn new(longest_bytes: usize) -> Self {
        Self { buffer: Buffer::new(longest_bytes), length: [0; 4], length_read: 0, missing_bytes: 0 }
    }

    /// Reads from `chunk` up to the end of a frame; `None` if `chunk` ends first.
    ///
    /// # Errors
    /// The frame is empty or too long. The rest of the response cannot be split.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<Piece<'_>>, SplitError> {
        while let Some(byte) = self.length.get_mut(self.length_read) {
            let Some(next) = chunk.split_off_first() else { return Ok(None) };
            *byte = *next;
            self.length_read += 1;
            if self.length_read == self.length.len() {
                self.missing_bytes = u32::from_be_bytes(self.length).into();
                self.buffer.expect(self.missing_bytes)?;
            }
        }
        if self.missing_bytes == 0 {
            return Err(SplitError::NotAWatch("a frame is empty"));
        }
        self.buffer.add(split_off(chunk, &mut self.missing_bytes))?;
        if self.missing_bytes > 0 {
            return Ok(None);
        }
        self.length_read = 0;
        Ok(Some(self.buffer.piece()))
    }

    /// Checks that the response does not end inside a frame.
    ///
    /// # Errors
    /// It does.
    pub fn finish(&self) -> Result<(), SplitError> {
        match self.length_read {
            0 => Ok(()),
            _ => Err(SplitError::NotAWatch("it ends in the middle of a frame")),
        }
    }
}

/// Splitter of a list into items.
#[derive(Debug)]
pub struct Items {
    state: ParserState,
    number: Varint,
    buffer: Buffer,
    /// Bytes of the value that are still to come.
    missing_bytes: u64,
    list: List,
    has_type: bool,
}

/// Position in the response: the syntax that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    /// This byte of the magic ones.
    Magic(usize),
    /// Number and wire type of a field.
    Key,
    /// Length of a value.
    Length(Member),
    /// Value that is a varint.
    Varint,
    /// Value with a known length.
    Value(Member),
}

/// State of the list, the field `raw` of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    Ahead,
    /// Bytes of the list that are still to come.
    Inside(u64),
    Over,
}

/// Field that a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Type,
    List,
    ContentEncoding,
    Metadata,
    Item,
    Other,
}

/// Number of seven bits to a byte, least significant first.
#[derive(Clone, Copy, Debug, Default)]
struct Varint {
    value: u64,
    bits: u32,
}

impl Varint {
    /// Reads a byte. Returns the number at its end.
    fn read(&mut self, byte: u8) -> Result<Option<u64>, SplitError> {
        let part = u64::from(byte & 0x7f);
        if self.bits >= u64::BITS || part << self.bits >> self.bits != part {
            return Err(SplitError::NotAList("a number has more than 64 bits"));
        }
        self.value |= part << self.bits;
        self.bits += 7;
        if byte < 0x80 { Ok(Some(std::mem::take(self).value)) } else { Ok(None) }
    }
}

impl Items {
    /// A splitter that keeps only the beginning of items longer than `longest_bytes`.
    #[must_use]
    pub fn new(longest_bytes: usize) -> Self {
        Self {
            state: ParserState::Magic(0),
            number: Varint::default(),
            buffer: Buffer::new(longest_bytes),
            missing_bytes: 0,
            list: List::Ahead,
            has_type: false,
        }
    }

    /// Reads from `chunk` up to the end of a part; `None` if `chunk` ends first.
    ///
    /// # Errors
    /// A part is too long, or this is not a list. The rest of the response cannot be split.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<Part<'_>>, SplitError> {
        loop {
            let ended = match self.state {
                // An empty value ends where it begins.
                ParserState::Value(member) => self.read_value(chunk, member)?.then_some(member),
                _ => match chunk.split_off_first() {
                    Some(byte) => {
                        self.read_byte(*byte)?;
                        continue;
                    }
                    None => None,
                },
            };
            return Ok(match ended {
                None if chunk.is_empty() => None,
                Some(Member::Type) => Some(Part::Type(self.buffer.piece())),
                Some(Member::Metadata) => Some(Part::Metadata(self.buffer.piece())),
                Some(Member::Item) => Some(Part::Item(self.buffer.piece())),
                _ => continue,
            });
        }
    }

    /// Checks that the list is complete at the end of the response.
    ///
    /// # Errors
    /// The list is not complete, or there is none.
    pub fn finish(&self) -> Result<(), SplitError> {
        let is_between_fields = self.state == ParserState::Key && self.number.bits == 0;
        match self.list {
            List::Over if is_between_fields => Ok(()),
            List::Ahead if is_between_fields => Err(SplitError::NotAList("it has no items")),
            _ => Err(SplitError::NotAList("it ends in the middle")),
        }
    }

    /// Reads one byte of the magic ones, of a key, a length or a number.
    fn read_byte(&mut self, byte: u8) -> Result<(), SplitError> {
        if let ParserState::Magic(index) = self.state {
            if MAGIC.get(index) != Some(&byte) {
                return Err(SplitError::NotAList("it is not protobuf of Kubernetes"));
            }
            self.state = if index + 1 == MAGIC.len() { ParserState::Key } else { ParserState::Magic(index + 1) };
            return Ok(());
        }
        self.consume(1)?;
        let Some(number) = self.number.read(byte)? else { return Ok(()) };
        match self.state {
            ParserState::Length(Member::List) => self.begin_list(number)?,
            ParserState::Length(member) => self.begin_value(member, number)?,
            ParserState::Varint => self.state = ParserState::Key,
            _ => self.begin_field(number)?,
        }
        self.end_list();
        Ok(())
    }

    fn begin_field(&mut self, key: u64) -> Result<(), SplitError> {
        let member = match (self.list, key >> 3) {
            (_, 0) => return Err(SplitError::NotAList("a field has the number 0")),
            (List::Inside(_), 1) => Member::Metadata,
            (List::Inside(_), 2) => Member::Item,
            (List::Ahead | List::Over, 1) => Member::Type,
            (List::Ahead | List::Over, 2) => Member::List,
            (List::Ahead | List::Over, 3) => Member::ContentEncoding,
            _ => Member::Other,
        };
        self.state = match (key & 7, member) {
            (2, Member::List) if !self.has_type => return Err(SplitError::NotAList("its type does not come first")),
            (2, Member::List) if self.list == List::Over => return Err(SplitError::NotAList("it has two lists")),
            (2, member) => ParserState::Length(member),
            (0, Member::Other) => ParserState::Varint,
            (1, Member::Other) => return self.begin_value(Member::Other, 8),
            (5, Member::Other) => return self.begin_value(Member::Other, 4),
            (0 | 1 | 5, _) => return Err(SplitError::NotAList("a field has the wrong wire type")),
            (3 | 4, _) => return Err(SplitError::NotAList("a field is a group")),
            _ => return Err(SplitError::NotAList("a field has an unknown wire type")),
        };
        Ok(())
    }

    fn begin_list(&mut self, length: u64) -> Result<(), SplitError> {
        (self.list, self.state) = (List::Inside(length), ParserState::Key);
        Ok(())
    }

    fn begin_value(&mut self, member: Member, length: u64) -> Result<(), SplitError> {
        self.has_type |= member == Member::Type;
        if member == Member::ContentEncoding && length > 0 {
            return Err(SplitError::NotAList("its contentEncoding is not empty"));
        }
        self.consume(length)?;
        if member != Member::Other {
            self.buffer.expect(length)?;
        }
        (self.state, self.missing_bytes) = (ParserState::Value(member), length);
        Ok(())
    }

    /// Reads more of a value. Returns true at its end.
    fn read_value(&mut self, chunk: &mut &[u8], member: Member) -> Result<bool, SplitError> {
        let bytes = split_off(chunk, &mut self.missing_bytes);
        if member != Member::Other {
            self.buffer.add(bytes)?;
        }
        let has_ended = self.missing_bytes == 0;
        if has_ended {
            self.state = ParserState::Key;
            self.end_list();
        }
        Ok(has_ended)
    }

    /// Counts bytes of the list that are read, or will be.
    fn consume(&mut self, bytes: u64) -> Result<(), SplitError> {
        if let List::Inside(missing) = &mut self.list {
            let rest = missing.checked_sub(bytes);
            *missing = rest.ok_or(SplitError::NotAList("a field is longer than the list"))?;
        }
        Ok(())
    }

    /// Leaves the list at its end.
    fn end_list(&mut self) {
        if self.list == List::Inside(0) && self.state == ParserState::Key && self.number.bits == 0 {
            self.list = List::Over;
        }
    }
}

/// Splits off what `chunk` has of `missing_bytes`, and subtracts it from them.
fn split_off<'a>(chunk: &mut &'a [u8], missing_bytes: &mut u64) -> &'a [u8] {
    let count = usize::try_from(*missing_bytes).unwrap_or(usize::MAX).min(chunk.len());
    let (head, tail) = chunk.split_at(count);
    *chunk = tail;
    *missing_bytes -= count as u64;
    head
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::split::LONGEST_BYTES;

    /// Parts of a list that comes in these chunks.
    fn split(chunks: &[&[u8]], longest_bytes: usize) -> Result<Vec<String>, SplitError> {
        let mut items = Items::new(longest_bytes);
        let mut parts = Vec::new();
        for mut chunk in chunks.iter().copied() {
            while let Some(part) = items.next(&mut chunk)? {
                parts.push(match part {
                    Part::Type(piece) => format!("type {}", text(piece)),
                    Part::Metadata(piece) => format!("metadata {}", text(piece)),
                    Part::Item(piece) => text(piece),
                });
            }
            assert!(chunk.is_empty(), "all of a chunk is read");
        }
        items.finish().map(|()| parts)
    }

    /// Text of a piece. A beginning ends with three dots.
    fn text(piece: Piece<'_>) -> String {
        match piece {
            Piece::Whole(bytes) => str::from_utf8(bytes).unwrap().to_owned(),
            Piece::Head(bytes) => format!("{}...", str::from_utf8(bytes).unwrap()),
        }
    }

    fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
        let mut field = Vec::new();
        prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut field);
        prost::encoding::encode_varint(bytes.len() as u64, &mut field);
        [field, bytes.to_vec()].concat()
    }

    fn unknown(fields: &[Vec<u8>]) -> Vec<u8> {
        [MAGIC.to_vec(), fields.concat()].concat()
    }

    fn envelope(list: &[u8]) -> Vec<u8> {
        unknown(&[field(1, b"T"), field(2, list), field(3, b""), field(4, b"")])
    }

    /// A list with fields of every wire type that is not refused.
    fn list() -> Vec<u8> {
        let numbers = [&[0x98, 0x06, 0x80, 0x01][..], &[0x1d, 1, 2, 3, 4], &[0x19, 1, 2, 3, 4, 5, 6, 7, 8]].concat();
        let long = "long ".repeat(40);
        let list = [field(1, b"M"), numbers.clone(), field(2, b"a"), field(2, b""), field(2, long.as_bytes())];
        let list = [list.concat(), field(9, b"unknown"), field(2, b"z"), numbers].concat();
        unknown(&[field(1, b"T"), field(2, &list), field(3, b""), field(4, b"json"), field(77, b"more")])
    }

    #[test]
    fn a_list_is_split_alike_wherever_its_chunks_end() {
        let (bytes, long) = (list(), "long ".repeat(40));
        let parts = ["type T", "metadata M", "a", "", &long, "z"];
        assert_eq!(split(&[&bytes], 1000).unwrap(), parts);
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let chunks = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(split(&chunks, 1000).unwrap(), parts, "chunks end at {first} and {second}");
            }
        }
        assert_eq!(split(&bytes.chunks(1).collect::<Vec<_>>(), 1000).unwrap(), parts);
    }

    #[test]
    fn an_item_that_is_too_long_is_cut_and_the_next_one_is_whole() {
        let items = [field(2, b"0123456789a"), field(2, b""), field(2, b"0123456789")].concat();
        let bytes = envelope(&items);
        let parts = ["type T", "0123456789...", "", "0123456789"];
        assert_eq!(split(&[&bytes], 10).unwrap(), parts);
        assert_eq!(split(&bytes.chunks(1).collect::<Vec<_>>(), 10).unwrap(), parts);
    }

    #[test]
    fn a_response_that_is_not_a_list_is_an_error() {
        let typed = |rest: &[u8]| unknown(&[field(1, b"T"), rest.to_vec()]);
        let listed = |list: &[u8]| typed(&field(2, list));
        for (bytes, why) in [
            (Vec::new(), "it ends in the middle"),
            (b"k8s".to_vec(), "it ends in the middle"),
            (b"{\"kind\":\"List\"}".to_vec(), "it is not protobuf of Kubernetes"),
            (unknown(&[]), "it has no items"),
            (typed(&[]), "it has no items"),
            (unknown(&[field(2, b"")]), "its type does not come first"),
            (typed(&[field(2, b""), field(2, b"")].concat()), "it has two lists"),
            (typed(&field(3, b"gzip")), "its contentEncoding is not empty"),
            ([listed(b""), field(3, b"gzip")].concat(), "its contentEncoding is not empty"),
            (listed(&[0x12, 5, b'a']), "a field is longer than the list"),
            (listed(&[0x12, 0x80]), "it ends in the middle"),
            ([listed(&[0x12, 0x80]), field(4, b"")].concat(), "a field is longer than the list"),
            (
                listed(&[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
                "a field is longer than the list",
            ),
            (
                listed(&[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]),
                "a number has more than 64 bits",
            ),
            (listed(&[0xff; 20]), "a number has more than 64 bits"),
            (listed(&[0x02, 0]), "a field has the number 0"),
            (typed(&[0x00, 0]), "a field has the number 0"),
            (listed(&[0x10, 7]), "a field has the wrong wire type"),
            (typed(&[0x10, 7]), "a field has the wrong wire type"),
            (typed(&[0x0d, 1, 2, 3, 4]), "a field has the wrong wire type"),
            (listed(&[0x13, 0x14]), "a field is a group"),
            (listed(&[0x4b, 0x4c]), "a field is a group"),
            (listed(&[0x16, 0]), "a field has an unknown wire type"),
            (listed(b"")[..6].to_vec(), "it ends in the middle"),
        ] {
            assert_eq!(split(&[&bytes], 100), Err(SplitError::NotAList(why)), "{bytes:?}");
        }
        let whole = list();
        for end in 0..whole.len() {
            let is_a_field_missing = matches!(split(&[&whole[..end]], 1000), Ok(_) | Err(SplitError::NotAList(_)));
            assert!(is_a_field_missing, "{end}");
        }
    }

    #[test]
    fn a_length_that_no_object_has_is_an_error_at_once() {
        for longest_bytes in [10, LONGEST_BYTES] {
            let mut begun = unknown(&[field(1, b"T")]);
            begun.extend([0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
            assert_eq!(split(&[&begun], longest_bytes), Err(SplitError::TooLong(longest_bytes)));
            let mut frames = Frames::new(longest_bytes);
            assert_eq!(frames.next(&mut &b"HTTP"[..]), Err(SplitError::TooLong(longest_bytes)));
        }
    }

    #[test]
    fn frames_are_split_alike_wherever_chunks_end() {
        let frame = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
        let sent = [frame("one"), frame("two three"), frame("4")].concat();
        for first in 0..=sent.len() {
            for second in first..=sent.len() {
                let mut frames = Frames::new(5);
                let mut seen = Vec::new();
                for mut chunk in [&sent[..first], &sent[first..second], &sent[second..]] {
                    while let Some(frame) = frames.next(&mut chunk).unwrap() {
                        seen.push(text(frame));
                    }
                }
                assert_eq!((seen, frames.finish()), (vec!["one".into(), "two t...".into(), "4".into()], Ok(())));
            }
        }
    }

    #[test]
    fn a_frame_that_is_empty_or_cut_is_an_error() {
        assert_eq!(Frames::new(9).next(&mut &[0; 4][..]), Err(SplitError::NotAWatch("a frame is empty")));
        for cut in [&[0][..], &[0, 0, 0, 2], &[0, 0, 0, 2, b'a']] {
            let mut frames = Frames::new(9);
            assert_eq!(frames.next(&mut &cut[..]), Ok(None));
            assert_eq!(frames.finish(), Err(SplitError::NotAWatch("it ends in the middle of a frame")));
        }
    }

    #[test]
    fn a_long_object_leaves_no_long_buffer_behind() {
        let sent = [&(4_u32 << 20).to_be_bytes()[..], &vec![b'x'; 4 << 20], &[0, 0, 0, 1, b'y']].concat();
        let (mut frames, mut rest) = (Frames::new(LONGEST_BYTES), &sent[..]);
        assert!(matches!(frames.next(&mut rest), Ok(Some(Piece::Whole(frame))) if frame.len() == 4 << 20));
        assert_eq!(frames.next(&mut rest), Ok(Some(Piece::Whole(b"y"))));
        assert!(frames.buffer.bytes.capacity() <= crate::split::KEPT_BYTES);
    }

    proptest! {
        #[test]
        fn no_part_of_garbage_exceeds_the_bound(bytes in prop::collection::vec(prop_oneof![
            prop::sample::select(&[0x0a, 0x12, 0x1a, 0x08, 0, 1, 2, 3, 5, 9, 0x80][..]), any::<u8>()], 0..80)) {
            let bytes = [&MAGIC[..], &field(1, b"T"), &bytes].concat();
            let whole = split_bounded(&[&bytes]);
            let single: Vec<_> = bytes.chunks(1).collect();
            prop_assert_eq!(whole, split_bounded(&single));
        }
    }

    /// Number of parts, and the error.
    fn split_bounded(chunks: &[&[u8]]) -> (usize, Result<(), SplitError>) {
        let (mut items, mut count) = (Items::new(16), 0);
        for mut chunk in chunks.iter().copied() {
            loop {
                match items.next(&mut chunk) {
                    Ok(None) => break,
                    Ok(Some(Part::Type(piece) | Part::Metadata(piece) | Part::Item(piece))) => {
                        let (Piece::Whole(part) | Piece::Head(part)) = piece;
                        assert!(part.len() <= 16);
                        count += 1;
                    }
                    Err(error) => return (count, Err(error)),
                }
            }
        }
        (count, items.finish())
    }
}
