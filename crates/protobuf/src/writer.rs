//! Writers of single fields.

use prost::encoding::{WireType, encode_key, encode_varint};

/// Appends a text, bytes or a message.
pub fn push_field(message: &mut Vec<u8>, number: u32, value: &[u8]) {
    push_header(message, number, value.len());
    message.extend_from_slice(value);
}

/// Appends key and length of a text, bytes or a message.
pub fn push_header(message: &mut Vec<u8>, number: u32, length: usize) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(length as u64, message);
}

/// Appends a number.
pub fn push_number(message: &mut Vec<u8>, number: u32, value: u64) {
    encode_key(number, WireType::Varint, message);
    encode_varint(value, message);
}
