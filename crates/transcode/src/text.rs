//! JSON strings as Go's encoding/json writes them. Its `HTMLEscape` also replaces characters with a meaning in HTML and
//! the two line separators of JavaScript.

/// Appends a string in quotes.
pub(crate) fn write_text(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    write_escaped(text, is_escaped, out);
    out.push(b'"');
}

/// Appends a text in which the characters that `is_special` selects are escaped.
pub(crate) fn write_escaped(text: &str, is_special: fn(char) -> bool, out: &mut Vec<u8>) {
    for piece in text.split_inclusive(is_special) {
        let special = piece.chars().next_back().filter(|&last| is_special(last));
        let plain = special.and_then(|special| piece.strip_suffix(special)).unwrap_or(piece);
        out.extend_from_slice(plain.as_bytes());
        if let Some(special) = special {
            write_escape(special, out);
        }
    }
}

/// Characters that `HTMLEscape` replaces anywhere in JSON.
pub(crate) fn is_html(character: char) -> bool {
    matches!(character, '<' | '>' | '&' | '\u{2028}' | '\u{2029}')
}

fn is_escaped(character: char) -> bool {
    matches!(character, '"' | '\\' | '\0'..='\x1f') || is_html(character)
}

fn write_escape(character: char, out: &mut Vec<u8>) {
    let escape = match character {
        '"' => "\\\"",
        '\\' => "\\\\",
        '\x08' => "\\b",
        '\x0c' => "\\f",
        '\n' => "\\n",
        '\r' => "\\r",
        '\t' => "\\t",
        other => &format!("\\u{:04x}", u32::from(other)),
    };
    out.extend_from_slice(escape.as_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(text: &str) -> String {
        let mut out = Vec::new();
        write_text(text, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn characters_are_escaped_as_go_does() {
        let cases = [
            ("", r#""""#),
            ("plain", r#""plain""#),
            ("\"\\/", r#""\"\\/""#),
            ("\u{8}\u{c}\n\r\t", r#""\b\f\n\r\t""#),
            ("\0\u{1}\u{1f}\u{7f}", "\"\\u0000\\u0001\\u001f\u{7f}\""),
            ("a<b>&c", r#""a\u003cb\u003e\u0026c""#),
            ("\u{2027}\u{2028}\u{2029}", "\"\u{2027}\\u2028\\u2029\""),
            ("ä€😀", "\"ä€😀\""),
        ];
        for (text, json) in cases {
            assert_eq!(written(text), json);
        }
    }

    proptest! {
        #[test]
        fn every_text_is_read_back(text: String) {
            prop_assert_eq!(serde_json::from_str::<String>(&written(&text)).unwrap(), text);
        }
    }
}
