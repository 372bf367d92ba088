//! Error messages of one line.

use cproxy_core::printable;
use cproxy_secrets::hidden;

/// An error and its causes in one line, without secrets. Of each, only the first line is used: parsers print excerpts
/// of their input below it.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    for error in std::iter::successors(Some(error), |error| error.source()) {
        let line = first_line(error);
        if !text.contains(&line) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&line);
        }
    }
    text
}

/// First line of a message, without secrets.
pub(super) fn first_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    printable(&hidden(text.lines().next().unwrap_or_default().trim_end_matches(':')))
}

/// Text of a server or program as one line, which cannot pass for another line of the log, without secrets.
pub(super) fn one_line(text: &str) -> String {
    printable(&hidden(text).split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_is_one_line_without_control_characters() {
        assert_eq!(one_line(" not so\n\tWARN \u{1b}[31mred\r\n"), "not so WARN \u{fffd}[31mred");
        assert_eq!(first_line(&"\u{1b}[31mred:\nsecond"), "\u{fffd}[31mred");
    }
}
