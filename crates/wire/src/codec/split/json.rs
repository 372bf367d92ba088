//! Splitters of JSON: a watch into lines, a list into items.

use super::{Buffer, Part, Piece, SplitError};

/// Splitter of a watch into lines.
#[derive(Debug)]
pub struct Lines {
    buffer: Buffer,
    is_whole: bool,
}

impl Lines {
    /// A splitter that keeps only the beginning of lines longer than `longest_bytes`.
    #[must_use]
    pub fn new(longest_bytes: usize) -> Self {
        Self { buffer: Buffer::new(longest_bytes), is_whole: false }
    }

    /// Reads from `chunk` up to the end of a line; `None` if `chunk` ends first.
    ///
    /// # Errors
    /// The line is too long. The rest of the response cannot be split.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<Piece<'_>>, SplitError> {
        if self.is_whole {
            self.buffer.clear();
        }
        let end = chunk.iter().position(|byte| *byte == b'\n');
        self.is_whole = end.is_some();
        let (head, tail) = chunk.split_at(end.unwrap_or(chunk.len()));
        *chunk = tail.strip_prefix(b"\n").unwrap_or(tail);
        self.buffer.add(head)?;
        Ok(self.is_whole.then(|| self.buffer.piece()))
    }

    /// Line after the last line feed.
    #[must_use]
    pub fn rest(&self) -> Piece<'_> {
        if self.is_whole { Piece::Whole(&[]) } else { self.buffer.piece() }
    }
}

/// Splitter of a list into items. It only finds where they begin and end.
#[derive(Debug)]
pub struct Items {
    state: ParserState,
    member: Member,
    value: Value,
    buffer: Buffer,
    has_items: bool,
}

/// Position in the list: the syntax that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    Start,
    /// A member's name, or the end of the object.
    Name,
    InName,
    Colon,
    /// A member's value.
    Value,
    InValue,
    /// A comma, or the end of the object.
    Comma,
    /// An item, or the end of the items.
    Item,
    InItem,
    /// A comma, or the end of the items.
    ItemComma,
    End,
}

/// Member of the list that a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Metadata,
    Items,
    Other,
}

/// State of a value that is being read.
#[derive(Clone, Copy, Debug, Default)]
struct Value {
    is_scalar: bool,
    is_in_string: bool,
    is_escaped: bool,
    depth: usize,
}

impl Value {
    fn starting_with(byte: u8) -> Self {
        Self { is_scalar: !matches!(byte, b'"' | b'{' | b'['), ..Self::default() }
    }

    /// Offset of the value's end; `None` if the value goes on after these bytes.
    fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        if self.is_scalar {
            return bytes.iter().position(|byte| matches!(byte, b',' | b'}' | b']') || byte.is_ascii_whitespace());
        }
        bytes.iter().position(|byte| self.ends_with(*byte)).map(|last| last + 1)
    }

    fn ends_with(&mut self, byte: u8) -> bool {
        if self.is_in_string {
            let is_escape = byte == b'\\' && !self.is_escaped;
            self.is_in_string = byte != b'"' || self.is_escaped;
            self.is_escaped = is_escape;
        } else {
            match byte {
                b'"' => self.is_in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        !self.is_in_string && self.depth == 0
    }
}

impl Items {
    /// A splitter that keeps only the beginning of items longer than `longest_bytes`.
    #[must_use]
    pub fn new(longest_bytes: usize) -> Self {
        Self {
            state: ParserState::Start,
            member: Member::Other,
            value: Value::default(),
            buffer: Buffer::new(longest_bytes),
            has_items: false,
        }
    }

    /// Reads from `chunk` up to the end of a part; `None` if `chunk` ends first.
    ///
    /// # Errors
    /// A part is too long, or this is not a list. The rest of the response cannot be split.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<Part<'_>>, SplitError> {
        while !chunk.is_empty() {
            let is_inside = matches!(self.state, ParserState::InName | ParserState::InValue | ParserState::InItem);
            let ended = if is_inside { self.read_value(chunk)? } else { self.read_mark(chunk)? };
            match ended {
                Some(Member::Metadata) => return Ok(Some(Part::Metadata(self.buffer.piece()))),
                Some(Member::Items) => return Ok(Some(Part::Item(self.buffer.piece()))),
                Some(Member::Other) | None => {}
            }
        }
        Ok(None)
    }

    /// Checks that the list is complete at the end of the response.
    ///
    /// # Errors
    /// The list is not complete, or has no member `items`. An empty list has that member, too.
    pub fn finish(&self) -> Result<(), SplitError> {
        match (self.state, self.has_items) {
            (ParserState::End, true) => Ok(()),
            (ParserState::End, false) => Err(SplitError::NotAList("it has no items")),
            _ => Err(SplitError::NotAList("it ends in the middle")),
        }
    }

    /// Reads more of a name or value. Returns the member at the end of a value.
    fn read_value(&mut self, chunk: &mut &[u8]) -> Result<Option<Member>, SplitError> {
        let end = self.value.end(chunk);
        let (head, tail) = chunk.split_at(end.unwrap_or(chunk.len()));
        *chunk = tail;
        if self.state == ParserState::InName || self.member != Member::Other {
            self.buffer.add(head)?;
        }
        if end.is_none() {
            return Ok(None);
        }
        match self.state {
            ParserState::InName => {
                self.member = member(&self.buffer.bytes);
                self.state = ParserState::Colon;
                return Ok(None);
            }
            ParserState::InItem => self.state = ParserState::ItemComma,
            _ => self.state = ParserState::Comma,
        }
        if self.state == ParserState::Comma && self.member == Member::Items {
            // Go writes an empty list as null.
            self.has_items = self.buffer.bytes == b"null";
            return if self.has_items { Ok(None) } else { Err(SplitError::NotAList("its items are not an array")) };
        }
        Ok(Some(self.member))
    }

    /// Reads one punctuation mark, or the first byte of a name or value.
    fn read_mark(&mut self, chunk: &mut &[u8]) -> Result<Option<Member>, SplitError> {
        *chunk = chunk.trim_ascii_start();
        let Some((byte, rest)) = chunk.split_first() else { return Ok(None) };
        let state = match (self.state, byte) {
            (ParserState::Start, b'{') | (ParserState::Comma, b',') => ParserState::Name,
            (ParserState::Name | ParserState::Comma, b'}') => ParserState::End,
            (ParserState::Colon, b':') => ParserState::Value,
            (ParserState::Value, b'[') if self.member == Member::Items => {
                self.has_items = true;
                ParserState::Item
            }
            (ParserState::ItemComma, b',') => ParserState::Item,
            (ParserState::Item | ParserState::ItemComma, b']') => ParserState::Comma,
            (ParserState::Name, b'"') => return Ok(self.begin(ParserState::InName, *byte)),
            (ParserState::Value | ParserState::Item, b',' | b':' | b'}' | b']') => {
                return Err(SplitError::NotAList("a value is missing"));
            }
            (ParserState::Value, _) => return Ok(self.begin(ParserState::InValue, *byte)),
            (ParserState::Item, _) => return Ok(self.begin(ParserState::InItem, *byte)),
            (ParserState::End, _) => return Err(SplitError::NotAList("there is text after its end")),
            _ => return Err(SplitError::NotAList("it is not JSON")),
        };
        (self.state, *chunk) = (state, rest);
        Ok(None)
    }

    fn begin(&mut self, state: ParserState, first: u8) -> Option<Member> {
        self.state = state;
        self.value = Value::starting_with(first);
        self.buffer.clear();
        None
    }
}

fn member(name: &[u8]) -> Member {
    match name {
        b"\"metadata\"" => Member::Metadata,
        b"\"items\"" => Member::Items,
        _ => Member::Other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::split::{KEPT_BYTES, LONGEST_BYTES};

    /// Parts of a list that comes in these chunks.
    fn split(chunks: &[&[u8]], longest_bytes: usize) -> Result<Vec<String>, SplitError> {
        let mut items = Items::new(longest_bytes);
        let mut parts = Vec::new();
        for mut chunk in chunks.iter().copied() {
            while let Some(part) = items.next(&mut chunk)? {
                parts.push(match part {
                    Part::Metadata(piece) => format!("metadata {}", text(piece)),
                    Part::Item(piece) => text(piece),
                    Part::Type(_) => unreachable!("JSON has no such part"),
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

    const LIST: &str = r#" {"kind" : "L\"[ist", "metadata":{"resourceVersion":"7", "items": [1]},
        "unknown": [[{}], "]"],
        "items": [ {"a":[1,{"b":"}]\\"}],"c":"\"]"} ,[],"s,]}\\", 7 , null,{}, true],"more": -1.5e3 } "#;
    const PARTS: [&str; 8] = [
        r#"metadata {"resourceVersion":"7", "items": [1]}"#,
        r#"{"a":[1,{"b":"}]\\"}],"c":"\"]"}"#,
        "[]",
        r#""s,]}\\""#,
        "7",
        "null",
        "{}",
        "true",
    ];

    #[test]
    fn a_list_is_split_alike_wherever_its_chunks_end() {
        let bytes = LIST.as_bytes();
        assert_eq!(split(&[bytes], 100).unwrap(), PARTS);
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let chunks = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(split(&chunks, 100).unwrap(), PARTS, "chunks end at {first} and {second}");
            }
        }
        let single: Vec<_> = bytes.chunks(1).collect();
        assert_eq!(split(&single, 100).unwrap(), PARTS);
    }

    #[test]
    fn an_empty_list_has_three_forms_and_members_any_order() {
        for list in [r#"{"items":[]}"#, r#"{"items":null}"#, r#"{"items":[ ] , "x":null}"#] {
            assert_eq!(split(&[list.as_bytes()], 100).unwrap(), [""; 0], "{list}");
        }
        let turned = r#"{"items":[1],"metadata":{}}"#;
        assert_eq!(split(&[turned.as_bytes()], 100).unwrap(), ["1", "metadata {}"]);
    }

    #[test]
    fn a_response_that_is_not_a_list_is_an_error() {
        for (text, why) in [
            ("", "it ends in the middle"),
            ("[]", "it is not JSON"),
            ("<html>", "it is not JSON"),
            ("{}", "it has no items"),
            (r#"{"kind":"Status","code":404}"#, "it has no items"),
            (r#"{"items":{}}"#, "its items are not an array"),
            (r#"{"items":5}"#, "its items are not an array"),
            (r#"{"items":[1"#, "it ends in the middle"),
            (r#"{"items":[1 2]}"#, "it is not JSON"),
            (r#"{"items":[,]}"#, "a value is missing"),
            (r#"{"items":}"#, "a value is missing"),
            (r#"{"items":[]"#, "it ends in the middle"),
            (r#"{"items":[]}}"#, "there is text after its end"),
            (r#"{"items":[]} {"items":[]}"#, "there is text after its end"),
            (r#"{items:[]}"#, "it is not JSON"),
        ] {
            assert_eq!(split(&[text.as_bytes()], 100), Err(SplitError::NotAList(why)), "{text}");
        }
    }

    #[test]
    fn no_buffer_grows_without_bound() {
        let endless = |start: &str, more: &[u8], rounds: usize| {
            let mut items = Items::new(1000);
            let mut chunks = std::iter::once(start.as_bytes()).chain(std::iter::repeat_n(more, rounds));
            let all = |mut chunk: &[u8]| {
                while items.next(&mut chunk)?.is_some() {}
                Ok(())
            };
            let error = chunks.try_for_each(all);
            (error, items.buffer.bytes.capacity())
        };
        for (start, more) in
            [(r#"{"items":[{"#, r#""a":[["#), (r#"{"items":[""#, "aa"), (r#"{"metadata":{"#, " "), (r#"{""#, "x")]
        {
            let (end, capacity) = endless(start, more.as_bytes(), 100_000);
            assert_eq!(end, Err(SplitError::TooLong(1000)), "{start}");
            assert!(capacity <= 2000, "{start}: {capacity}");
        }
        // Members that are ignored may have any length, and there may be any number of items.
        for (start, more) in [(r#"{"x":{""#, "aaaaa"), (r#"{"items":[1"#, ",{},[]  ")] {
            assert_eq!(endless(start, more.as_bytes(), 100_000).0, Ok(()), "{start}");
        }
        let mut lines = Lines::new(1000);
        let end = std::iter::repeat_n(&[b'x'; 64], 1000).try_for_each(|bytes| lines.next(&mut &bytes[..]).map(drop));
        assert_eq!((end, lines.buffer.bytes.capacity() <= 2000), (Err(SplitError::TooLong(1000)), true));
    }

    #[test]
    fn a_long_object_leaves_no_long_buffer_behind() {
        let mut lines = Lines::new(LONGEST_BYTES);
        let long = [vec![b'x'; 4 << 20], b"\nshort\n".to_vec()].concat();
        let mut rest = &long[..];
        assert_eq!(lines.next(&mut rest).unwrap(), long.get(..4 << 20).map(Piece::Whole));
        assert_eq!(lines.next(&mut rest).unwrap(), Some(Piece::Whole(b"short")));
        assert!(lines.buffer.bytes.capacity() <= KEPT_BYTES);
    }

    #[test]
    fn an_object_that_is_too_long_is_cut_and_the_next_one_is_whole() {
        let list = r#"{"metadata":{"a":"0123456789"},"items":[{"b":"0123456789"},{},"01234567890"]}"#;
        let parts = [r#"metadata {"a":"012345..."#, r#"{"b":"012345..."#, "{}", r#""01234567890..."#];
        let single: Vec<_> = list.as_bytes().chunks(1).collect();
        assert_eq!(split(&[list.as_bytes()], 12).unwrap(), parts);
        assert_eq!(split(&single, 12).unwrap(), parts);
        for size in 1..20 {
            let mut lines = Lines::new(4);
            let mut seen = Vec::new();
            for mut chunk in b"1234\n12345\n123456789\n1\n12345".chunks(size) {
                while let Some(line) = lines.next(&mut chunk).unwrap() {
                    seen.push(text(line));
                }
            }
            assert_eq!(seen, ["1234", "1234...", "1234...", "1"]);
            assert_eq!(lines.rest(), Piece::Head(b"1234"));
        }
    }

    #[test]
    fn lines_are_split_alike_wherever_chunks_end() {
        let sent = b"one\n\ntwo three\r\nfour";
        for cut in 0..=sent.len() {
            let mut lines = Lines::new(100);
            let mut seen = Vec::new();
            for mut chunk in [&sent[..cut], &sent[cut..]] {
                while let Some(line) = lines.next(&mut chunk).unwrap() {
                    seen.push(text(line));
                }
            }
            assert_eq!(seen, ["one", "", "two three\r"]);
            assert_eq!(lines.rest(), Piece::Whole(b"four"));
        }
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i32>().prop_map(Into::into),
            "[a\\[\\]{}\",:\\\\\u{e9}\n]{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            let name = "[ai\"\\\\]{0,3}";
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::vec((name, inner), 0..4).prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn items_are_split_unchanged(
            items in prop::collection::vec(json(), 0..6),
            metadata in json(),
            is_pretty in any::<bool>(),
            sizes in prop::collection::vec(1..9_usize, 1..9),
        ) {
            let list = serde_json::json!({"apiVersion": "v1", "items": items, "metadata": metadata, "z": items});
            let to_string = if is_pretty { serde_json::to_string_pretty } else { serde_json::to_string };
            let text = to_string(&list).unwrap();
            let mut rest = text.as_bytes();
            let mut chunks = Vec::new();
            for size in sizes.iter().cycle() {
                let (chunk, tail) = rest.split_at((*size).min(rest.len()));
                chunks.push(chunk);
                rest = tail;
                if rest.is_empty() {
                    break;
                }
            }
            let parts = split(&chunks, LONGEST_BYTES).unwrap();
            prop_assert_eq!(&parts, &split(&[text.as_bytes()], LONGEST_BYTES).unwrap());
            let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
            let (last, first) = parts.split_last().unwrap();
            prop_assert_eq!(first.iter().map(|item| read(item)).collect::<Vec<_>>(), items);
            prop_assert_eq!(read(last.strip_prefix("metadata ").unwrap()), metadata);
        }

        #[test]
        fn no_part_of_garbage_exceeds_the_bound(bytes in prop::collection::vec(prop_oneof![
            prop::sample::select(&b"{}[]\",:\\ \nnul1"[..]), any::<u8>()], 0..60)) {
            let mut items = Items::new(16);
            let mut chunk = &bytes[..];
            while let Ok(Some(Part::Metadata(piece) | Part::Item(piece))) = items.next(&mut chunk) {
                let (Piece::Whole(part) | Piece::Head(part)) = piece;
                prop_assert!(!part.is_empty() && part.len() <= 16);
            }
        }
    }
}
