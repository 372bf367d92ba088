//! Writer of protobuf from JSON, by the tables of `schema`. A field that a table does not have is left out.

use cproxy_protobuf::{push_field, push_number};
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
        push_field(&mut entry, KEY, key.as_bytes());
        // Go reads null as the zero value.
        if !value.is_null() {
            encode_value(VALUE, field.kind, value, &mut entry)?;
        }
        push_field(out, field.number, &entry);
    }
    Ok(())
}

fn encode_value(number: u32, kind: Kind, value: &Value, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    match kind {
        Kind::Text => push_field(out, number, text(value)?.as_bytes()),
        Kind::Bool => push_number(out, number, value.as_bool().ok_or(Reason::Expected("true or false"))?.into()),
        Kind::Int32 => push_number(out, number, int32(value)?),
        Kind::Int64 => push_number(out, number, int64(value)?),
        Kind::Time => push_field(out, number, &time(value)?),
        Kind::Quantity => push_field(out, number, &quantity(value)?),
        Kind::IntOrString => push_field(out, number, &int_or_string(value)?),
        Kind::Fields => {
            let mut fields = Vec::new();
            push_field(&mut fields, 1, value.to_string().as_bytes());
            push_field(out, number, &fields);
        }
        Kind::Message(schema) => {
            let mut message = Vec::new();
            encode_object(schema, value, &mut message)?;
            push_field(out, number, &message);
        }
    }
    Ok(())
}

fn text(value: &Value) -> Result<&str, Reason> {
    value.as_str().ok_or(Reason::Expected("a text"))
}

/// A number of 32 bits, as a varint has it.
fn int32(value: &Value) -> Result<u64, Reason> {
    let number = value.as_i64().filter(|number| i32::try_from(*number).is_ok());
    number.map(i64::cast_unsigned).ok_or(Reason::Expected("a whole number of 32 bits"))
}

/// A number of 64 bits, as a varint has it.
fn int64(value: &Value) -> Result<u64, Reason> {
    value.as_i64().map(i64::cast_unsigned).ok_or(Reason::Expected("a whole number"))
}

/// metav1.Timestamp: seconds since 1970, and nanoseconds, which JSON does not have.
fn time(value: &Value) -> Result<Vec<u8>, Reason> {
    let time: jiff::Timestamp = text(value)?.parse().map_err(|_| Reason::Expected("a time as in RFC 3339"))?;
    let mut message = Vec::new();
    push_number(&mut message, 1, time.as_second().cast_unsigned());
    push_number(&mut message, 2, 0);
    Ok(message)
}

/// resource.Quantity: a text. JSON may have a number in its place.
fn quantity(value: &Value) -> Result<Vec<u8>, Reason> {
    let mut message = Vec::new();
    match value {
        Value::String(text) => push_field(&mut message, 1, text.as_bytes()),
        Value::Number(number) => push_field(&mut message, 1, number.to_string().as_bytes()),
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
    push_number(&mut message, 1, kind);
    push_number(&mut message, 2, number);
    push_field(&mut message, 3, text.as_bytes());
    Ok(message)
}
