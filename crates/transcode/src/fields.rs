//! metav1.FieldsV1: JSON in protobuf. Go's encoder takes the white space out of it and replaces the characters that
//! `HTMLEscape` does.

use cproxy_protobuf::last;
use serde::de::IgnoredAny;

use crate::{
    error::Reason,
    text::{is_html, write_escaped},
};

/// Number of the field with the JSON.
const RAW: u32 = 1;

/// Appends the JSON in a metav1.FieldsV1, or null if it has none.
pub(crate) fn write_fields(message: &[u8], out: &mut Vec<u8>) -> Result<(), Reason> {
    let json = last(message, RAW)?.map_or(Ok(""), |raw| raw.text())?;
    if json.is_empty() {
        out.extend_from_slice(b"null");
        return Ok(());
    }
    serde_json::from_str::<IgnoredAny>(json).map_err(|_| Reason::NotJson)?;
    let mut position = Position::default();
    let compact = json.chars().filter(|&character| position.keeps(character)).collect::<String>();
    write_escaped(&compact, is_html, out);
    Ok(())
}

/// Position in JSON.
#[derive(Default)]
struct Position {
    is_in_string: bool,
    is_after_backslash: bool,
}

impl Position {
    /// Moves behind the next character. Returns whether it is more than white space between values.
    fn keeps(&mut self, character: char) -> bool {
        let is_kept = self.is_in_string || !matches!(character, ' ' | '\t' | '\r' | '\n');
        match character {
            _ if self.is_after_backslash => self.is_after_backslash = false,
            '\\' => self.is_after_backslash = true,
            '"' => self.is_in_string = !self.is_in_string,
            _ => {}
        }
        is_kept
    }
}

#[cfg(test)]
mod tests {
    use cproxy_protobuf::FieldError;

    use super::*;

    fn written(json: &str) -> Result<String, Reason> {
        let mut message = vec![0x0a, u8::try_from(json.len()).unwrap()];
        message.extend_from_slice(json.as_bytes());
        let mut out = Vec::new();
        write_fields(&message, &mut out).map(|()| String::from_utf8(out).unwrap())
    }

    #[test]
    fn white_space_is_left_out_and_html_escaped() {
        let json = " {\t\"f: \\\" <\" :\r\n[ 1 , {} ] ,\"\\\\\" : \"a & b\"}\n";
        let compact = "{\"f: \\\" \\u003c\":[1,{}],\"\\\\\":\"a \\u0026 b\"}";
        assert_eq!(written(json).as_deref(), Ok(compact));
        assert_eq!(written("{\"f:a\":{}}").as_deref(), Ok("{\"f:a\":{}}"));
    }

    #[test]
    fn no_fields_are_null() {
        assert_eq!(written("").as_deref(), Ok("null"));
        let mut out = Vec::new();
        assert_eq!(write_fields(b"", &mut out), Ok(()));
        assert_eq!(out, b"null");
    }

    #[test]
    fn text_that_is_not_json_is_an_error() {
        for json in ["{", "{}}", "{\"a\":1,}", "\"\n\"", "\"\\x\"", "01", " "] {
            assert_eq!(written(json), Err(Reason::NotJson), "{json}");
        }
        assert_eq!(write_fields(b"\x0a\x02\"\xff", &mut Vec::new()), Err(Reason::NotUtf8));
        assert_eq!(write_fields(b"\x08\x01", &mut Vec::new()), Err(Reason::Field(FieldError::WireType)));
    }
}
