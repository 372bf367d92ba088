//! YAML files: any number of documents, with limits on what aliases repeat, and errors of one line.
//!
//! The parser is compiled once for each type that it makes, with tens of kilobytes for one with many fields. Where a
//! file is small, read [`values`] and make the types from them.

mod documents;

use documents::documents;
use serde::Deserialize;
use serde_json::Value;
use serde_saphyr::{DefaultMessageFormatter, Deserializer, Error, Location, MessageFormatter as _, Options};

/// Maximum number of parts that aliases may repeat in a document: a few lines can repeat each other a billion times.
const REPEATED_MAX: usize = 100_000;

/// Reads each document of a file's text with `read`. Some may be empty.
///
/// # Errors
/// A document is not YAML, or `read` fails: the parser's message with the line in the file, as one line.
pub fn each_document(
    text: &str,
    mut read: impl FnMut(Deserializer<'_, '_>) -> Result<(), Error>,
) -> Result<(), String> {
    for (start, document) in documents(text) {
        let before = text.get(..start).unwrap_or_default();
        serde_saphyr::with_deserializer_from_str_with_options(document, options(), &mut read)
            .map_err(|error| message(&error, before))?;
    }
    Ok(())
}

/// Documents of a file's text as values.
///
/// # Errors
/// As of [`each_document`].
pub fn values(text: &str) -> Result<Vec<Value>, String> {
    let mut values = Vec::new();
    each_document(text, |document| {
        values.push(Value::deserialize(document)?);
        Ok(())
    })?;
    Ok(values)
}

/// Limits of the parser: a file of ten thousand Services is allowed; nesting and aliases stay bounded.
#[must_use]
pub fn options() -> Options {
    serde_saphyr::options! {
        // Names may be n or yes.
        strict_booleans: true,
        with_snippet: false,
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_recorded_anchor_events: REPEATED_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPEATED_MAX },
    }
}

/// Error in a document that comes after this text.
fn message(error: &Error, before: &str) -> String {
    let lines = before.replace("\r\n", "\n").matches(['\n', '\r']).count();
    // The error's own Display draws pictures of the place, by 60 KiB of code.
    let message = DefaultMessageFormatter.format_message(error);
    let message = message.lines().next().unwrap_or("not YAML");
    let Some(location) = error.location().filter(|location| *location != Location::UNKNOWN) else {
        return message.to_owned();
    };
    let (line, column) = (location.line() + lines as u64, location.column());
    twice(message, line, column).unwrap_or_else(|| format!("{message} at line {line}, column {column}"))
}

/// Error about a key that occurs twice, which the parser words for programmers. Where objects are not separated, it is
/// a key of the document.
fn twice(message: &str, line: u64, column: u64) -> Option<String> {
    let (key, _) = message.strip_prefix("duplicate mapping key: ")?.split_once(", set ")?;
    let remedy = if column == 1 { "; separate objects with a line ---" } else { "" };
    Some(format!("line {line}, column {column}: the key {key} occurs twice{remedy}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_document_is_a_value() {
        let text = "# first\na: 1\n---\n---\nb: [x, yes, 5, null]\n...\n";
        assert_eq!(values(text).unwrap(), [json!({"a": 1}), json!(null), json!({"b": ["x", "yes", 5, null]})]);
    }

    #[test]
    fn the_line_of_an_error_is_that_of_the_file() {
        for (before, line) in [("", 1), ("a: 1\n---\n", 3), ("a: 1\r\n...\r\n# b\r\n", 4), ("a: 1\r---\r", 3)] {
            let error = values(&format!("{before}kind: [\n")).unwrap_err();
            assert_eq!(error, format!("unclosed bracket '[' at line {line}, column 7"), "{before:?}");
        }
    }

    #[test]
    fn a_key_that_occurs_twice_is_named() {
        for (text, expected) in [
            ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key a occurs twice; separate objects with a line ---"),
            ("a:\n  b: 1\n  b: 2\n", "line 3, column 3: the key b occurs twice"),
        ] {
            assert_eq!(values(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn aliases_that_repeat_each_other_are_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..10 {
            let last = format!("*a{}", level - 1);
            text += &format!("a{level}: &a{level} [{}]\n", [last.as_str(); 10].join(", "));
        }
        assert!(!values(&text).unwrap_err().contains('\n'));
    }
}
