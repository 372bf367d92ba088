//! Fields of an agent's answers. A derived reader would be several times as long for each type.

use std::io;

use cproxy_wire::read_json;
use serde_json::Value;

/// A value from an agent's answer.
///
/// # Errors
/// It has another form, as that of an agent of another version ([`io::ErrorKind::InvalidData`]).
pub fn read_answer<T>(answer: &[u8], read: impl FnOnce(&Value) -> Option<T>) -> io::Result<T> {
    let value = read_json(answer).ok();
    value.and_then(|value| read(&value)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Text of a field, if it has one.
pub(super) fn text_of(row: &Value, field: &str) -> Option<String> {
    row.get(field).and_then(Value::as_str).map(str::to_owned)
}

/// Number of a field, if it has one that fits.
pub(super) fn number_of<T: TryFrom<u64>>(row: &Value, field: &str) -> Option<T> {
    T::try_from(row.get(field)?.as_u64()?).ok()
}

/// Boolean of a field, if it has one.
pub(super) fn bool_of(row: &Value, field: &str) -> Option<bool> {
    row.get(field)?.as_bool()
}

/// Texts of a field, if it has a list.
pub(super) fn texts_of(row: &Value, field: &str) -> Option<Vec<String>> {
    list_of(row, field, |text| text.as_str().map(str::to_owned))
}

/// Elements of a field, if it has a list that can be read.
pub(super) fn list_of<T>(row: &Value, field: &str, read: fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    row.get(field)?.as_array()?.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_another_form_is_invalid_data() {
        for answer in ["", "{", "[]", r#"{"name": 5}"#] {
            let read = read_answer(answer.as_bytes(), |value| text_of(value, "name"));
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::InvalidData, "{answer}");
        }
        assert_eq!(read_answer(br#"{"name": "a"}"#, |value| text_of(value, "name")).unwrap(), "a");
    }
}
