//! Text for a line of a log or a table.

use std::fmt::Display;

use cproxy_core::printable;

/// The text in one line, without characters that steer a terminal.
#[must_use]
pub(crate) fn one_line(text: &dyn Display) -> String {
    printable(&text.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}
