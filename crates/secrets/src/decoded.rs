//! Texts in which others may have written a secret in another way, decoded, with the place of each byte.

use std::ops::Range;

/// Bytes of a text without its escapes, and the part of the text that each stands for.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) bytes: Vec<u8>,
    places: Vec<Range<usize>>,
}

/// Names of HTML's entities that stand for one character each.
const ENTITIES: [(&str, char); 5] = [("amp", '&'), ("lt", '<'), ("gt", '>'), ("quot", '"'), ("apos", '\'')];

impl Decoded {
    /// The text without the escapes of JSON, HTML, URLs and C. `plus_is_space`: as forms have it.
    pub(crate) fn without_escapes(text: &str, plus_is_space: bool) -> Self {
        let mut decoded = Self::default();
        let mut at = 0;
        while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
            let (unit, length) = match escape(rest) {
                Some(unit) => unit,
                None if plus_is_space && rest.starts_with('+') => (Unit::Char(' '), 1),
                None => {
                    let char = rest.chars().next().unwrap_or_default();
                    (Unit::Char(char), char.len_utf8().max(1))
                }
            };
            decoded.push(unit, at..at + length);
            at += length;
        }
        decoded
    }

    /// The bytes that pairs of hexadecimal digits stand for, with or without a colon, blank or dash between them.
    pub(crate) fn from_hexadecimal(text: &str) -> Self {
        let mut decoded = Self::default();
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let pair = bytes.get(at..at + 2).and_then(|pair| byte_of(str::from_utf8(pair).ok()?));
            match pair {
                Some(byte) => {
                    decoded.push(Unit::Byte(byte), at..at + 2);
                    at += 2;
                    at += usize::from(matches!(bytes.get(at), Some(b':' | b' ' | b'-')));
                }
                None => {
                    // Separates the bytes before from those behind.
                    decoded.push(Unit::Byte(0), at..at + 1);
                    at += 1;
                }
            }
        }
        decoded
    }

    fn push(&mut self, unit: Unit, place: Range<usize>) {
        match unit {
            Unit::Byte(byte) => {
                self.bytes.push(byte);
                self.places.push(place);
            }
            Unit::Char(char) => {
                for byte in char.encode_utf8(&mut [0; 4]).bytes() {
                    self.bytes.push(byte);
                    self.places.push(place.clone());
                }
            }
        }
    }

    /// Part of the text that a part of the bytes stands for.
    pub(crate) fn place(&self, range: &Range<usize>) -> Option<Range<usize>> {
        Some(self.places.get(range.start)?.start..self.places.get(range.end.checked_sub(1)?)?.end)
    }
}

/// Meaning of an escape.
#[derive(Clone, Copy)]
enum Unit {
    Byte(u8),
    Char(char),
}

/// The escape at the start of a text, and its length.
fn escape(text: &str) -> Option<(Unit, usize)> {
    let hex = |from: usize, to: usize| u32::from_str_radix(text.get(from..to)?, 16).ok();
    match text.as_bytes() {
        [b'%', ..] => Some((Unit::Byte(byte_of(text.get(1..3)?)?), 3)),
        [b'\\', b'x', ..] => Some((Unit::Byte(byte_of(text.get(2..4)?)?), 4)),
        [b'\\', b'u', ..] => {
            let first = hex(2, 6)?;
            let second = if text.get(6..8) == Some("\\u") { hex(8, 12) } else { None };
            let pair = second.and_then(|second| {
                let is_pair = (0xd800..0xdc00).contains(&first) && (0xdc00..0xe000).contains(&second);
                is_pair.then(|| char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00))).flatten()
            });
            match pair {
                Some(char) => Some((Unit::Char(char), 12)),
                None => Some((Unit::Char(char::from_u32(first)?), 6)),
            }
        }
        [b'\\', b'n', ..] => Some((Unit::Char('\n'), 2)),
        [b'\\', b't', ..] => Some((Unit::Char('\t'), 2)),
        [b'\\', b'r', ..] => Some((Unit::Char('\r'), 2)),
        [b'\\', escaped @ (b'/' | b'"' | b'\'' | b'\\'), ..] => Some((Unit::Byte(*escaped), 2)),
        [b'&', ..] => {
            let (name, _) = text.get(1..)?.split_once(';').filter(|(name, _)| name.len() <= 8)?;
            let char = match name.strip_prefix('#') {
                Some(number) => {
                    let number = match number.strip_prefix(['x', 'X']) {
                        Some(number) => u32::from_str_radix(number, 16).ok()?,
                        None => number.parse().ok()?,
                    };
                    char::from_u32(number)?
                }
                None => ENTITIES.iter().find(|(entity, _)| *entity == name)?.1,
            };
            Some((Unit::Char(char), name.len() + 2))
        }
        _ => None,
    }
}

/// The byte that two hexadecimal digits stand for.
fn byte_of(pair: &str) -> Option<u8> {
    let is_digits = pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_digits.then(|| u8::from_str_radix(pair, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone_and_each_byte_keeps_its_place() {
        let text = r#"a\u0026\u003C\u00e9\ud83d\ude00&lt;&#39;&#x2F;%41\x42\/\n+%zz&nothing;\q"#;
        let decoded = Decoded::without_escapes(text, true);
        let expected = "a&<é😀<'/AB/\n %zz&nothing;\\q";
        assert_eq!(String::from_utf8(decoded.bytes.clone()).unwrap(), expected);
        assert_eq!(decoded.place(&(1..2)), Some(1..7));
        assert_eq!(decoded.place(&(0..decoded.bytes.len())), Some(0..text.len()));
        let hexadecimal = Decoded::from_hexadecimal("x 61:62-63 646566 zz");
        assert!(hexadecimal.bytes.windows(6).any(|window| window == b"abcdef"), "{hexadecimal:?}");
    }
}
