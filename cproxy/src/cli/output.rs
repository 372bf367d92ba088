//! Output of commands: text on stdout that steers no terminal, and errors of one line on stderr.

mod plain;
mod terminal;

use std::fmt::Display;

pub(super) use self::terminal::{layout, screen};
use super::options::Format;
use crate::report::{FrontendRow, one_line, table_text, write_frontends_json};

pub(super) fn print_error(error: &dyn Display) {
    // One write for the line: on a console, parts of lines would mix with others.
    let line = format!("cproxy: {}\n", one_line(error));
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).ok();
}

/// Prints text that may be long; a reader that has had enough is no error.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_or_end(text).map(drop)
}

/// Prints text that may be long. Returns false if its reader has had enough.
pub(super) fn print_or_end(text: &str) -> anyhow::Result<bool> {
    use std::io::{ErrorKind, Write};
    match plain::Plain(std::io::stdout().lock()).write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        printed => printed.map(|()| true).map_err(|error| unwritten(&error)),
    }
}

pub(super) fn print_rows(rows: impl Iterator<Item = FrontendRow>, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Table => print(&table_text(&rows.collect::<Vec<_>>(), layout())),
        Format::Json => print_json_rows(rows),
    }
}

/// Prints one row after the other, as there may be very many.
pub(super) fn print_json_rows(rows: impl Iterator<Item = FrontendRow>) -> anyhow::Result<()> {
    use std::io::{BufWriter, ErrorKind, Write};
    let mut output = plain::Plain(BufWriter::new(std::io::stdout().lock()));
    let written = write_frontends_json(rows, &mut output).map_err(std::io::Error::from);
    match written.and_then(|()| output.write_all(b"\n")).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(unwritten(&error)),
        _ => Ok(()),
    }
}

pub(super) fn unwritten(error: &std::io::Error) -> anyhow::Error {
    anyhow::anyhow!("cannot write to stdout: {error}")
}
