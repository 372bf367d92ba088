//! Reader of protobuf messages, without copies.

use std::borrow::Cow;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::error::Reason;

/// Value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Number(u64),
    /// Text or message.
    Bytes(&'a [u8]),
    /// A value that no known field has.
    Other,
}

/// Fields of a message with their numbers, in the order of the message, up to the first error.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Value<'a> {
    pub(crate) fn number(self) -> Result<u64, Reason> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Other => Err(Reason::WireType),
        }
    }

    pub(crate) fn bytes(self) -> Result<&'a [u8], Reason> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Other => Err(Reason::WireType),
        }
    }

    /// The text as Go's encoding/json writes it: what is not UTF-8 is replaced.
    pub(crate) fn lossy_text(self) -> Result<Cow<'a, str>, Reason> {
        Ok(String::from_utf8_lossy(self.bytes()?))
    }

    pub(crate) fn text(self) -> Result<&'a str, Reason> {
        str::from_utf8(self.bytes()?).map_err(|_| Reason::NotUtf8)
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// Values of the fields with this number, and the first error of the message.
    pub(crate) fn with_number(self, number: u32) -> impl Iterator<Item = Result<Value<'a>, Reason>> {
        self.filter_map(move |field| match field {
            Ok((found, value)) => (found == number).then_some(Ok(value)),
            Err(error) => Some(Err(error)),
        })
    }

    fn read(&mut self) -> Result<(u32, Value<'a>), Reason> {
        let (number, wire_type) = decode_key(&mut self.rest)?;
        let value = match wire_type {
            WireType::Varint => Value::Number(decode_varint(&mut self.rest)?),
            WireType::LengthDelimited => Value::Bytes(self.read_bytes()?),
            _ => {
                skip_field(wire_type, number, &mut self.rest, DecodeContext::default())?;
                Value::Other
            }
        };
        Ok((number, value))
    }

    fn read_bytes(&mut self) -> Result<&'a [u8], Reason> {
        let length = usize::try_from(decode_varint(&mut self.rest)?).map_err(|_| Reason::Cut)?;
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(Reason::Cut)?;
        self.rest = rest;
        Ok(bytes)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Reason>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.read();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// The last value of the field with this number.
pub(crate) fn last(message: &[u8], number: u32) -> Result<Option<Value<'_>>, Reason> {
    Fields::of(message).with_number(number).try_fold(None, |_, value| value.map(Some))
}

/// The number in the field, or 0.
pub(crate) fn last_number(message: &[u8], number: u32) -> Result<u64, Reason> {
    last(message, number)?.map_or(Ok(0), Value::number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_counts() {
        let message = b"\x08\x01\x12\x01a\x08\x02\x12\x02bc";
        assert_eq!(last(message, 1), Ok(Some(Value::Number(2))));
        assert_eq!(last(message, 2), Ok(Some(Value::Bytes(b"bc"))));
        assert_eq!(last(message, 3), Ok(None));
        assert_eq!(last_number(message, 3), Ok(0));
        assert_eq!(last_number(message, 2), Err(Reason::WireType));
    }

    #[test]
    fn other_types_are_skipped() {
        // Eight bytes, four bytes, and a group with a number.
        let message = b"\x09abcdefgh\x15abcd\x1b\x08\x01\x1c\x20\x07";
        assert_eq!(last(message, 4), Ok(Some(Value::Number(7))));
        assert_eq!(last(message, 1), Ok(Some(Value::Other)));
    }

    #[test]
    fn a_message_that_is_cut_is_an_error_for_every_field() {
        for message in [&b"\x08\x01\x12\x05abc"[..], b"\x08\x01\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01abc"] {
            assert_eq!(last(message, 1), Err(Reason::Cut));
            assert_eq!(last(message, 2), Err(Reason::Cut));
        }
        assert!(matches!(last(b"\x08\x01\x08", 2), Err(Reason::Protobuf(_))));
        assert!(matches!(last(b"\x00\x01", 2), Err(Reason::Protobuf(_))));
    }
}
