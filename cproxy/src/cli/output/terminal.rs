//! The terminal: its width and its colours.

use std::{env, io::IsTerminal, io::stdout};

use rustix::termios::tcgetwinsize;

use crate::report::{Layout, Screen};

/// Columns of a terminal that does not tell.
const COLUMNS: usize = 80;
/// Most columns that a table uses: longer lines are hard to read.
const COLUMNS_MAX: usize = 200;

/// Screen on stdout: colours where it is a terminal that has them, and nobody has set `NO_COLOR` (no-color.org).
pub(in crate::cli) fn screen() -> Screen {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    Screen { layout: layout(), has_colours: stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb }
}

/// Layout of tables on stdout: what fits the terminal, if it is one. `COLUMNS` overrides its width.
pub(in crate::cli) fn layout() -> Layout {
    if !stdout().is_terminal() {
        return Layout::Plain;
    }
    let given = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let size = || tcgetwinsize(stdout()).ok().map(|size| usize::from(size.ws_col));
    let is_real = |columns: &usize| *columns != 0;
    let columns = given.filter(is_real).or_else(|| size().filter(is_real)).unwrap_or(COLUMNS);
    Layout::Columns(columns.min(COLUMNS_MAX))
}
