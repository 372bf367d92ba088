//! Aligned columns of text.

use cproxy_core::printable;

use super::table::{chars, pad};

/// Lines whose cells begin in the same column.
pub(super) fn align_columns<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: Vec<_> = (0..COLUMNS)
        .map(|column| lines.iter().filter_map(|line| line.get(column)).map(|cell| chars(cell)).max())
        .collect();
    let mut text = String::new();
    for line in lines {
        let mut padded = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            padded.push_str(&pad(cell.clone(), width.unwrap_or(0) + 3));
        }
        text.push_str(padded.trim_end());
        text.push('\n');
    }
    text
}

/// Text of several lines, each of them printable.
pub(crate) fn printable_lines(text: &str) -> String {
    text.lines().map(|line| printable(line) + "\n").collect()
}

/// Printable text of a cell.
pub(super) fn or_dash(cell: Option<&str>) -> String {
    cell.filter(|cell| !cell.is_empty()).map_or_else(|| "-".to_owned(), printable)
}
