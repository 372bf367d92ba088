//! Fields of a protobuf message, verbatim: for messages of which only some fields are read or left out.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, encode_varint, skip_field};

/// Error in a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// It is not protobuf.
    #[error(transparent)]
    Protobuf(#[from] prost::DecodeError),
    /// A field is longer than its message.
    #[error("a field is longer than its message")]
    Cut,
    /// A text is not UTF-8.
    #[error("a text is not UTF-8")]
    NotUtf8(#[from] std::str::Utf8Error),
}

/// Field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Field<'a> {
    pub(crate) number: u32,
    /// The whole field, with its key.
    pub(crate) encoded: &'a [u8],
    /// Value of a field with a length; empty for a number.
    pub(crate) value: &'a [u8],
}

/// Iterator over the fields of a message. It ends after the first error.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

/// Fields of `message`.
pub(crate) fn fields(message: &[u8]) -> Fields<'_> {
    Fields { rest: message }
}

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<Field<'a>, FieldError> {
        let start = self.rest;
        let (number, wire_type) = decode_key(&mut self.rest)?;
        let mut value: &[u8] = &[];
        if wire_type == WireType::LengthDelimited {
            let length = decode_varint(&mut self.rest)?;
            let length = usize::try_from(length).ok().filter(|length| *length <= self.rest.len());
            let Some((bytes, rest)) = length.and_then(|length| self.rest.split_at_checked(length)) else {
                return Err(FieldError::Cut);
            };
            (value, self.rest) = (bytes, rest);
        } else {
            skip_field(wire_type, number, &mut self.rest, DecodeContext::default())?;
        }
        let encoded = start.get(..start.len() - self.rest.len()).unwrap_or_default();
        Ok(Field { number, encoded, value })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, FieldError>;

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

/// Appends a field with a length.
pub(crate) fn push_field(message: &mut Vec<u8>, number: u32, value: &[u8]) {
    push_header(message, number, value.len());
    message.extend_from_slice(value);
}

/// Appends key and length of a field.
pub(crate) fn push_header(message: &mut Vec<u8>, number: u32, length: usize) {
    encode_varint(u64::from(number << 3 | 2), message);
    encode_varint(length as u64, message);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fields_are_verbatim() {
        let mut message = vec![0x08, 0x96, 0x01];
        push_field(&mut message, 200, b"text");
        message.extend([0x1d, 1, 2, 3, 4]);
        let fields: Vec<_> = fields(&message).map(Result::unwrap).collect();
        assert_eq!(fields.iter().map(|field| field.number).collect::<Vec<_>>(), [1, 200, 3]);
        assert_eq!(fields.iter().map(|field| field.encoded).collect::<Vec<_>>().concat(), message);
        assert_eq!(fields[1].value, b"text");
    }

    proptest! {
        #[test]
        fn wrong_bytes_are_an_error(message in prop::collection::vec(any::<u8>(), 0..64)) {
            let read: Vec<_> = fields(&message).collect();
            prop_assert!(read.iter().rev().skip(1).all(Result::is_ok), "nothing comes after an error");
        }
    }
}
