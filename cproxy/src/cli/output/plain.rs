//! Output that steers no terminal, whatever names it has. Text has no such characters when it comes here. JSON escapes
//! those below 0x20 only, and these escapes mean the same to its readers.

use std::io::{self, Write};

use cproxy_core::is_steering;

/// Writer that escapes characters from 0x7f on as JSON does. They must not be split between two calls.
pub(super) struct Plain<W>(pub(super) W);

impl<W: Write> Write for Plain<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        for piece in text.split_inclusive(is_escaped) {
            match piece.chars().next_back().filter(|char| is_escaped(*char)) {
                None => self.0.write_all(piece.as_bytes())?,
                Some(last) => {
                    self.0.write_all(piece.trim_end_matches(is_escaped).as_bytes())?;
                    write!(self.0, "\\u{:04x}", u32::from(last))?;
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// All of these are of 16 bits.
fn is_escaped(char: char) -> bool {
    char >= '\u{7f}' && is_steering(char)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_means_the_same_without_characters_that_steer() {
        let value = serde_json::json!({"a\u{7f}\u{9b}31m": ["\u{202e}\u{202e}b\n", "\u{e9}\u{4e2d}\u{1f600}", ""]});
        let mut output = Plain(Vec::new());
        serde_json::to_writer_pretty(&mut output, &value).unwrap();
        output.write_all("\u{2066}".as_bytes()).unwrap();
        let text = String::from_utf8(output.0).unwrap();
        let json = text.strip_suffix("\\u2066").unwrap();
        assert!(!json.contains(is_escaped) && json.contains("\u{e9}\u{4e2d}\u{1f600}"), "{json}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap(), value);
    }
}
