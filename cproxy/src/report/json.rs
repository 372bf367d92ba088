//! JSON on several lines. A writer with indentation would be compiled once more for each type.

use serde::Serialize;
use serde_json::Result;

/// Columns of each level of indentation.
const INDENT: &str = "  ";

/// A value as JSON on several lines.
///
/// # Errors
/// Never for the types of reports.
pub fn pretty_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map(|json| indented(&json, 0))
}

/// JSON without white space on several lines, of which all but the first begin at this level of indentation or below.
pub(super) fn indented(json: &str, mut level: usize) -> String {
    let mut text = String::with_capacity(json.len() * 3 / 2);
    let (mut is_text, mut is_escaped) = (false, false);
    let mut chars = json.chars().peekable();
    while let Some(char) = chars.next() {
        if is_text {
            text.push(char);
            is_text = char != '"' || is_escaped;
            is_escaped = char == '\\' && !is_escaped;
            continue;
        }
        let is_empty = matches!((char, chars.peek()), ('{', Some('}')) | ('[', Some(']')));
        match char {
            '{' | '[' if is_empty => {
                text.push(char);
                text.extend(chars.next());
                continue;
            }
            '{' | '[' => level += 1,
            '}' | ']' => {
                level = level.saturating_sub(1);
                line(&mut text, level);
            }
            '"' => is_text = true,
            _ => {}
        }
        text.push(char);
        match char {
            '{' | '[' | ',' => line(&mut text, level),
            ':' => text.push(' '),
            _ => {}
        }
    }
    text
}

fn line(text: &mut String, level: usize) {
    text.push('\n');
    (0..level).for_each(|_| text.push_str(INDENT));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_indented_as_serde_json_does_it() {
        for value in [
            json!(null),
            json!([]),
            json!({}),
            json!("a, \"b\": {c}\\"),
            json!({"e": [{}, [[]], {"f": "\u{e9}:,"}]}),
            json!({"a": [], "b": {"c": [1, -2.5, true, null], "d\\\"": "\\\\\",["}}),
        ] {
            assert_eq!(pretty_json(&value).unwrap(), serde_json::to_string_pretty(&value).unwrap());
        }
    }
}
