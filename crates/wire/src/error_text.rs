//! Error messages of one line.

/// An error and its causes in one line. Of each, only the first line is used: parsers print excerpts of their input
/// below it.
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

/// First line of a message.
pub(super) fn first_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_end_matches(':').to_owned()
}
