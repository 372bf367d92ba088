//! Writer of JSON from protobuf, by the tables of `schema`. It reads a message once for each field of its table, and so
//! writes the fields in the order of the Go struct without a copy of any.

use std::{borrow::Cow, collections::BTreeMap};

use cproxy_protobuf::{Value, fields, last};

use crate::{
    error::{Reason, TranscodeError},
    fields::write_fields,
    leaf::{int, write_int, write_int_or_string, write_quantity},
    schema::{Field, Kind, Rule, Schema},
    text::write_text,
    time::{seconds, write_time},
};

/// Numbers of the fields in an entry of a map.
const KEY: u32 = 1;
const VALUE: u32 = 2;

/// Appends an object, with its kind first if it is given.
pub(crate) fn write_object(
    schema: &Schema,
    kind: Option<crate::Kind>,
    message: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), TranscodeError> {
    out.push(b'{');
    if let Some(kind) = kind {
        let type_meta = format!("\"kind\":\"{}\",\"apiVersion\":\"{}\"", kind.name(), kind.api_version());
        out.extend_from_slice(type_meta.as_bytes());
    }
    for field in schema {
        write_field(field, message, out)?;
    }
    out.push(b'}');
    Ok(())
}

/// Appends a field of a message, unless JSON leaves it out. An error of the message itself has no path.
fn write_field(field: &Field, message: &[u8], out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    match field.rule {
        Rule::List | Rule::ListOrNull => return write_list(field, message, out),
        Rule::Map => return write_map(field, message, out),
        Rule::Always | Rule::NotZero | Rule::Pointer => {}
    }
    let value = match (field.rule, last(message, field.number)?) {
        (Rule::Always, None) => absent(field.kind),
        (_, None) => return Ok(()),
        (Rule::NotZero, Some(value)) if is_zero(field.kind, value) => return Ok(()),
        (_, Some(value)) => value,
    };
    write_name(field, out);
    write_value(field.kind, value, out).map_err(|error| error.within(field.name))
}

/// Appends the name of a field, and a comma before it unless the field is the first one.
fn write_name(field: &Field, out: &mut Vec<u8>) {
    let is_first = out.last() == Some(&b'{');
    out.extend_from_slice(if is_first { b"\"" } else { b",\"" });
    out.extend_from_slice(field.name.as_bytes());
    out.extend_from_slice(b"\":");
}

fn write_list(field: &Field, message: &[u8], out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    let mut is_empty = true;
    for (index, value) in fields(message).with_number(field.number).enumerate() {
        let value = value?;
        if is_empty {
            write_name(field, out);
        }
        out.push(if is_empty { b'[' } else { b',' });
        is_empty = false;
        write_value(field.kind, value, out).map_err(|error| error.at(index).within(field.name))?;
    }
    match field.rule {
        _ if !is_empty => out.push(b']'),
        Rule::ListOrNull => {
            write_name(field, out);
            out.extend_from_slice(b"null");
        }
        _ => {}
    }
    Ok(())
}

/// Appends a map, sorted as Go sorts it: by the bytes of its keys.
fn write_map(field: &Field, message: &[u8], out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    let mut entries = BTreeMap::new();
    for entry in fields(message).with_number(field.number) {
        let (key, value) = read_entry(field.kind, entry?).map_err(|error| error.within(field.name))?;
        entries.insert(key, value);
    }
    if entries.is_empty() {
        return Ok(());
    }
    write_name(field, out);
    for (index, (key, value)) in entries.into_iter().enumerate() {
        out.push(if index == 0 { b'{' } else { b',' });
        write_text(&key, out);
        out.push(b':');
        write_value(field.kind, value, out).map_err(|error| error.within(field.name))?;
    }
    out.push(b'}');
    Ok(())
}

fn read_entry(kind: Kind, entry: Value<'_>) -> Result<(Cow<'_, str>, Value<'_>), TranscodeError> {
    let entry = entry.bytes()?;
    let key = last(entry, KEY)?.map_or(Ok(Cow::default()), Value::lossy_text)?;
    Ok((key, last(entry, VALUE)?.unwrap_or(absent(kind))))
}

fn write_value(kind: Kind, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), TranscodeError> {
    match kind {
        Kind::Text => write_text(&value.lossy_text()?, out),
        Kind::Bool => out.extend_from_slice(if value.number()? == 0 { b"false" } else { b"true" }),
        Kind::Int32 => write_int(value.number()?, out),
        Kind::Int64 => out.extend_from_slice(value.number()?.cast_signed().to_string().as_bytes()),
        Kind::Time => write_time_or_null(value.bytes()?, out)?,
        Kind::Quantity => write_quantity(value.bytes()?, out)?,
        Kind::IntOrString => write_int_or_string(value.bytes()?, out)?,
        Kind::Fields => write_fields(value.bytes()?, out)?,
        Kind::Message(schema) => write_object(schema, None, value.bytes()?, out)?,
    }
    Ok(())
}

fn write_time_or_null(message: &[u8], out: &mut Vec<u8>) -> Result<(), Reason> {
    match seconds(message)? {
        Some(seconds) => write_time(seconds, out),
        None => out.extend_from_slice(b"null"),
    }
    Ok(())
}

/// Value of a field that protobuf does not have.
fn absent(kind: Kind) -> Value<'static> {
    match kind {
        Kind::Bool | Kind::Int32 | Kind::Int64 => Value::Number(0),
        Kind::Text | Kind::Time | Kind::Quantity | Kind::IntOrString | Kind::Fields | Kind::Message(_) => {
            Value::Bytes(&[])
        }
    }
}

/// Go regards the value as empty. A value of another type than the field's never is, so that it is an error later.
fn is_zero(kind: Kind, value: Value<'_>) -> bool {
    match (kind, value) {
        (Kind::Text, Value::Bytes(text)) => text.is_empty(),
        (Kind::Int32, Value::Number(number)) => int(number) == 0,
        (Kind::Bool | Kind::Int64, Value::Number(number)) => number == 0,
        (Kind::Time, Value::Bytes(time)) => seconds(time) == Ok(None),
        _ => false,
    }
}
