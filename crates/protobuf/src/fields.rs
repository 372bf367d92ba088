//! Reader of the fields of a message, without copies.

use std::borrow::Cow;

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Error in a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// It is not protobuf.
    #[error(transparent)]
    Protobuf(#[from] prost::DecodeError),
    /// The field with this number is longer than its message.
    #[error("a field is longer than its message")]
    Cut(u32),
    /// A field has another type than the one that is read.
    #[error("another type of field was expected")]
    WireType,
    /// A text is not UTF-8.
    #[error("a text is not UTF-8")]
    NotUtf8(#[from] std::str::Utf8Error),
}

/// Field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// Its number, which is never 0.
    pub number: u32,
    /// Its value.
    pub value: Value<'a>,
    /// The whole field, with its key.
    pub encoded: &'a [u8],
}

/// Value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// Number of variable length.
    Number(u64),
    /// Text, bytes or message.
    Bytes(&'a [u8]),
    /// Number of fixed length or group. Kubernetes has neither.
    Other,
}

/// Iterator over the fields of a message, in their order. It ends after the first error.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

/// Fields of `message`.
#[must_use]
pub fn fields(message: &[u8]) -> Fields<'_> {
    Fields { rest: message }
}

impl<'a> Field<'a> {
    /// Splits the first field off `message`, which is not empty.
    ///
    /// # Errors
    /// The field cannot be read. After [`FieldError::Cut`], `message` is the beginning of its value.
    #[inline]
    pub fn split_off(message: &mut &'a [u8]) -> Result<Self, FieldError> {
        let start = *message;
        let (number, wire_type) = decode_key(message)?;
        let value = match wire_type {
            WireType::Varint => Value::Number(decode_varint(message)?),
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(message)?).unwrap_or(usize::MAX);
                Value::Bytes(message.split_off(..length).ok_or(FieldError::Cut(number))?)
            }
            _ => {
                skip_field(wire_type, number, message, DecodeContext::default())?;
                Value::Other
            }
        };
        let encoded = start.get(..start.len() - message.len()).unwrap_or_default();
        Ok(Self { number, value, encoded })
    }

    /// The text, bytes or message; empty for another type.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.value.bytes().unwrap_or_default()
    }
}

impl<'a> Value<'a> {
    /// The number.
    ///
    /// # Errors
    /// It has another type.
    pub fn number(self) -> Result<u64, FieldError> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Other => Err(FieldError::WireType),
        }
    }

    /// The text, bytes or message.
    ///
    /// # Errors
    /// It has another type.
    pub fn bytes(self) -> Result<&'a [u8], FieldError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Other => Err(FieldError::WireType),
        }
    }

    /// The text.
    ///
    /// # Errors
    /// It has another type, or is not UTF-8.
    pub fn text(self) -> Result<&'a str, FieldError> {
        Ok(str::from_utf8(self.bytes()?)?)
    }

    /// The text as Go's encoding/json writes it: bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// It has another type.
    pub fn lossy_text(self) -> Result<Cow<'a, str>, FieldError> {
        Ok(String::from_utf8_lossy(self.bytes()?))
    }
}

impl<'a> Fields<'a> {
    /// Values of the fields with this number, and the first error of the message.
    pub fn with_number(self, number: u32) -> impl Iterator<Item = Result<Value<'a>, FieldError>> {
        self.filter_map(move |field| match field {
            Ok(field) => (field.number == number).then_some(Ok(field.value)),
            Err(error) => Some(Err(error)),
        })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, FieldError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = Field::split_off(&mut self.rest);
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// The last value of the field with this number.
///
/// # Errors
/// A field of the message cannot be read.
pub fn last(message: &[u8], number: u32) -> Result<Option<Value<'_>>, FieldError> {
    fields(message).with_number(number).try_fold(None, |_, value| value.map(Some))
}

/// The last number in the field, or 0.
///
/// # Errors
/// A field of the message cannot be read, or this one is no number.
pub fn last_number(message: &[u8], number: u32) -> Result<u64, FieldError> {
    last(message, number)?.map_or(Ok(0), Value::number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::{
        bytes::Buf as _,
        encoding::{MAX_TAG, MIN_TAG, bytes, encode_key, fixed32, fixed64, uint64},
    };

    use super::*;

    /// Field as it is encoded.
    #[derive(Clone, Debug)]
    enum Written {
        Number(u64),
        Bytes(Vec<u8>),
        Fixed32(u32),
        Fixed64(u64),
        /// Group with a number in it.
        Group(u64),
    }

    impl Written {
        fn any() -> impl Strategy<Value = Self> {
            prop_oneof![
                any::<u64>().prop_map(Self::Number),
                prop::collection::vec(any::<u8>(), 0..200).prop_map(Self::Bytes),
                any::<u32>().prop_map(Self::Fixed32),
                any::<u64>().prop_map(Self::Fixed64),
                any::<u64>().prop_map(Self::Group),
            ]
        }

        fn encode(&self, number: u32, message: &mut Vec<u8>) {
            match self {
                Self::Number(value) => uint64::encode(number, value, message),
                Self::Bytes(value) => bytes::encode(number, value, message),
                Self::Fixed32(value) => fixed32::encode(number, value, message),
                Self::Fixed64(value) => fixed64::encode(number, value, message),
                Self::Group(value) => {
                    encode_key(number, WireType::StartGroup, message);
                    uint64::encode(1, value, message);
                    encode_key(number, WireType::EndGroup, message);
                }
            }
        }

        fn value(&self) -> Value<'_> {
            match self {
                Self::Number(value) => Value::Number(*value),
                Self::Bytes(value) => Value::Bytes(value),
                Self::Fixed32(_) | Self::Fixed64(_) | Self::Group(_) => Value::Other,
            }
        }
    }

    /// Fields of `message` as prost skips them, each with its number, up to the first error.
    fn skipped(mut message: &[u8]) -> Vec<Option<(u32, &[u8])>> {
        let mut skipped = Vec::new();
        while message.has_remaining() {
            let start = message;
            let number = decode_key(&mut message).and_then(|(number, wire_type)| {
                skip_field(wire_type, number, &mut message, DecodeContext::default()).map(|()| number)
            });
            let Ok(number) = number else {
                skipped.push(None);
                break;
            };
            skipped.push(Some((number, &start[..start.len() - message.len()])));
        }
        skipped
    }

    fn read(message: &[u8]) -> Vec<Option<(u32, &[u8])>> {
        fields(message).map(|field| field.ok().map(|field| (field.number, field.encoded))).collect()
    }

    proptest! {
        #[test]
        fn fields_are_read_as_prost_writes_them(
            written in prop::collection::vec((MIN_TAG..=MAX_TAG, Written::any()), 0..8),
        ) {
            let mut message = Vec::new();
            let mut ends = vec![0];
            for (number, field) in &written {
                field.encode(*number, &mut message);
                ends.push(message.len());
            }
            let read: Vec<_> = fields(&message).map(Result::unwrap).collect();
            let values: Vec<_> = read.iter().map(|field| (field.number, field.value)).collect();
            prop_assert_eq!(values, written.iter().map(|(number, field)| (*number, field.value())).collect::<Vec<_>>());
            prop_assert_eq!(read.iter().map(|field| field.encoded).collect::<Vec<_>>().concat(), &*message);
            for end in 0..message.len() {
                let cut: Vec<_> = fields(&message[..end]).collect();
                let whole = ends.iter().rposition(|other| *other <= end).unwrap();
                let is_clean = ends[whole] == end;
                prop_assert_eq!(cut.len(), whole + usize::from(!is_clean));
                prop_assert!(cut.iter().zip(&read).all(|(cut, read)| cut.as_ref().is_ok_and(|cut| cut == read)
                    || cut.is_err()));
                prop_assert_eq!(cut.last().is_some_and(Result::is_err), !is_clean);
            }
        }

        #[test]
        fn bytes_are_accepted_and_refused_as_prost_does(message in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(read(&message), skipped(&message));
        }

        #[test]
        fn small_bytes_are_accepted_and_refused_as_prost_does(message in prop::collection::vec(0..32_u8, 0..64)) {
            prop_assert_eq!(read(&message), skipped(&message));
        }
    }

    #[test]
    fn a_field_that_is_cut_has_its_beginning() {
        for length in [&b"\x05"[..], b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"] {
            let bytes = [b"\x12", length, b"abc"].concat();
            let mut message = &*bytes;
            assert_eq!(Field::split_off(&mut message), Err(FieldError::Cut(2)));
            assert_eq!(message, b"abc");
        }
    }

    #[test]
    fn broken_fields_are_errors() {
        for (message, text) in [
            (&b"\x00\x01"[..], "invalid tag value: 0"),
            (b"\x08", "invalid varint"),
            (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "invalid varint"),
            (b"\xff\xff\xff\xff\xff\x01\x00", "invalid key value: 68719476735"),
            (b"\x0e", "invalid wire type value: 6"),
            (b"\x0c", "unexpected end group tag"),
            (b"\x0b\x14", "unexpected end group tag"),
            (b"\x0b\x08\x01", "invalid varint"),
            (b"\x0d\x01\x02\x03", "buffer underflow"),
            (&[0x0b; 200], "recursion limit reached"),
        ] {
            let read: Vec<_> = fields(message).collect();
            let [Err(error @ FieldError::Protobuf(_))] = &*read else { panic!("{message:?}: {read:?}") };
            assert_eq!(error.to_string(), format!("failed to decode Protobuf message: {text}"), "{message:?}");
        }
    }

    #[test]
    fn the_last_value_counts() {
        let message = b"\x08\x01\x12\x01a\x08\x02\x12\x02bc";
        assert_eq!(last(message, 1), Ok(Some(Value::Number(2))));
        assert_eq!(last(message, 2), Ok(Some(Value::Bytes(b"bc"))));
        assert_eq!(last(message, 3), Ok(None));
        assert_eq!(last_number(message, 3), Ok(0));
        assert_eq!(last_number(message, 2), Err(FieldError::WireType));
    }

    #[test]
    fn an_error_anywhere_in_a_message_is_one_for_each_of_its_fields() {
        let message = b"\x08\x01\x12\x05abc";
        assert_eq!([1, 2, 3].map(|number| last(message, number)), [const { Err(FieldError::Cut(2)) }; 3]);
        assert!(matches!(last(b"\x08\x01\x08", 2), Err(FieldError::Protobuf(_))));
    }

    #[test]
    fn a_value_has_one_type() {
        assert_eq!(Value::Bytes(b"a\xff").lossy_text().as_deref(), Ok("a\u{fffd}"));
        assert!(matches!(Value::Bytes(b"a\xff").text(), Err(FieldError::NotUtf8(_))));
        assert_eq!(Value::Number(1).text(), Err(FieldError::WireType));
        assert_eq!(Value::Other.number(), Err(FieldError::WireType));
    }
}
