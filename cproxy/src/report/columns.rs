//! Aligned columns of text.

use cproxy_core::printable;

/// Maximum number of backends or Services that a line of text names; it only counts the others.
const NAMED_MAX: usize = 6;

/// Lines whose cells begin in the same column.
pub(super) fn align_columns<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: Vec<_> =
        (0..COLUMNS).map(|column| lines.iter().filter_map(|line| line.get(column)).map(String::len).max()).collect();
    let mut text = String::new();
    for line in lines {
        let mut padded = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            padded.push_str(&format!("{cell:width$}   ", width = width.unwrap_or(0)));
        }
        text.push_str(padded.trim_end());
        text.push('\n');
    }
    text
}

/// Printable text of a cell.
pub(super) fn or_dash(cell: Option<&str>) -> String {
    cell.filter(|cell| !cell.is_empty()).map_or_else(|| "-".to_owned(), printable)
}

/// First names of a list, and the number of the others.
pub(super) fn list_first(count: usize, names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.take(NAMED_MAX).collect();
    match count.saturating_sub(NAMED_MAX) {
        0 => {}
        more => names.push(format!("and {more} more")),
    }
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}
