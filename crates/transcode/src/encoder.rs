//! Writer of protobuf from JSON, by the tables of `schema`. A field that a table does not have is left out.

use prost::encoding::{WireType, encode_key, encode_varint};
use serde_json::{Map, Value};

use crate::{
    error::{Reason, TranscodeError},
    schema::{Field, Kind, Rule, Schema},
};

/// Numbers of the fields in an entry of a map.
const KEY: u32 = 1;
const VALUE: u32 = 2;

/// Appends the fields of an object.
pub(crate) fn encode_object(schema: &Schema, object: &Value, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    let object = object.as_object().ok_or(Reason::Expected("an object"))?;
    for field in schema {
        let Some(value) = object.get(field.name).filter(|value| !value.is_null()) else { continue };
        encode_field(field, value, out).map_err(|error| error.within(field.name))?;
    }
    Ok(())
}

/// Appends a field that is not null. An error has the path within the field.
fn encode_field(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    match field.rule {
        Rule::List | Rule::ListOrNull => {
            let items = value.as_array().ok_or(Reason::Expected("a list"))?;
            for (index, item) in items.iter().enumerate() {
                encode_value(field.number, field.kind, item, out).map_err(|error| error.at(index))?;
            }
            Ok(())
        }
        Rule::Map => encode_map(field, value.as_object().ok_or(Reason::Expected("an object"))?, out),
        Rule::Always | Rule::NotZero | Rule::Pointer => encode_value(field.number, field.kind, value, out),
    }
}

fn encode_map(field: &Field, entries: &Map<String, Value>, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    for (key, value) in entries {
        let mut entry = Vec::new();
        encode_bytes(KEY, key.as_bytes(), &mut entry);
        // Go reads null as the zero value.
        if !value.is_null() {
            encode_value(VALUE, field.kind, value, &mut entry)?;
        }
        encode_bytes(field.number, &entry, out);
    }
    Ok(())
}

fn encode_value(number: u32, kind: Kind, value: &Value, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    match kind {
        Kind::Text => encode_bytes(number, text(value)?.as_bytes(), out),
        Kind::Bool => encode_number(number, value.as_bool().ok_or(Reason::Expected("true or false"))?.into(), out),
        Kind::Int32 => encode_number(number, int32(value)?, out),
        Kind::Int64 => encode_number(number, value.as_i64().ok_or(Reason::Expected("a whole number"))?, out),
        Kind::Time => encode_bytes(number, &time(value)?, out),
        Kind::Quantity => encode_bytes(number, &quantity(value)?, out),
        Kind::IntOrString => encode_bytes(number, &int_or_string(value)?, out),
        Kind::Fields => {
            let mut fields = Vec::new();
            encode_bytes(1, value.to_string().as_bytes(), &mut fields);
            encode_bytes(number, &fields, out);
        }
        Kind::Message(schema) => {
            let mut message = Vec::new();
            encode_object(schema, value, &mut message)?;
            encode_bytes(number, &message, out);
        }
    }
    Ok(())
}

fn text(value: &Value) -> Result<&str, Reason> {
    value.as_str().ok_or(Reason::Expected("a text"))
}

fn int32(value: &Value) -> Result<i64, Reason> {
    let number = value.as_i64().and_then(|number| i32::try_from(number).ok());
    number.map(i64::from).ok_or(Reason::Expected("a whole number of 32 bits"))
}

/// metav1.Timestamp: seconds since 1970, and nanoseconds, which JSON does not have.
fn time(value: &Value) -> Result<Vec<u8>, Reason> {
    let time: jiff::Timestamp = text(value)?.parse().map_err(|_| Reason::Expected("a time as in RFC 3339"))?;
    let mut message = Vec::new();
    encode_number(1, time.as_second(), &mut message);
    encode_number(2, 0, &mut message);
    Ok(message)
}

/// resource.Quantity: a text. JSON may have a number in its place.
fn quantity(value: &Value) -> Result<Vec<u8>, Reason> {
    let mut message = Vec::new();
    match value {
        Value::String(text) => encode_bytes(1, text.as_bytes(), &mut message),
        Value::Number(number) => encode_bytes(1, number.to_string().as_bytes(), &mut message),
        _ => return Err(Reason::Expected("a quantity")),
    }
    Ok(message)
}

/// intstr.IntOrString, whose type says which of its fields counts.
fn int_or_string(value: &Value) -> Result<Vec<u8>, Reason> {
    let (kind, number, text) = match value {
        Value::String(text) => (1, 0, text.as_str()),
        _ => (0, int32(value).map_err(|_| Reason::Expected("a number or a text"))?, ""),
    };
    let mut message = Vec::new();
    encode_number(1, kind, &mut message);
    encode_number(2, number, &mut message);
    encode_bytes(3, text.as_bytes(), &mut message);
    Ok(message)
}

fn encode_number(number: u32, value: i64, out: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value.cast_unsigned(), out);
}

fn encode_bytes(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}
