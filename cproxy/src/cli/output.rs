//! Output of commands: text on stdout that steers no terminal, and errors of one line on stderr.

mod plain;
mod terminal;

use std::{
    fmt::Display,
    io::{BufWriter, Write as _, stdout},
};

use cproxy_daemon::{without_os_codes, write_stderr, write_stdout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub(super) use self::terminal::{layout, screen};
use super::options::Format;
use crate::report::{FrontendRow, one_line, table_text, write_frontends_json};

pub(super) fn print_error(error: &dyn Display) {
    // One write for the line: on a console, parts of lines would mix with others.
    write_stderr(&format!("cproxy: {}\n", without_os_codes(&one_line(error))));
}

/// Prints text that may be long; a reader that has had enough is no error.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    print_or_end(text).map(drop)
}

/// Whether a pipe on stdout still has a reader. What is no pipe has one.
pub(super) fn has_reader() -> bool {
    let stdout = stdout();
    let mut pipe = [PollFd::new(&stdout, PollFlags::empty())];
    let polled = poll(&mut pipe, Some(&Timespec::default()));
    polled.is_err() || pipe.iter().all(|pipe| !pipe.revents().contains(PollFlags::ERR))
}

/// Prints text that may be long. Returns false if its reader has had enough.
pub(super) fn print_or_end(text: &str) -> anyhow::Result<bool> {
    let text = without_os_codes(text);
    Ok(write_stdout(|stdout| plain::Plain(stdout).write_all(text.as_bytes()))?)
}

pub(super) fn print_rows(rows: impl Iterator<Item = FrontendRow>, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Table => print(&table_text(&rows.collect::<Vec<_>>(), layout())),
        Format::Json => print_json_rows(rows),
    }
}

/// Prints one row after the other, as there may be very many.
pub(super) fn print_json_rows(rows: impl Iterator<Item = FrontendRow>) -> anyhow::Result<()> {
    write_stdout(|stdout| {
        let mut output = plain::Plain(BufWriter::new(stdout));
        write_frontends_json(rows, &mut output)?;
        output.write_all(b"\n")?;
        output.flush()
    })?;
    Ok(())
}
