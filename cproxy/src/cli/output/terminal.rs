//! The terminal: its width and its colours.

use std::{
    env,
    io::{IsTerminal, stdout},
};

use cproxy_daemon::terminal_columns;

use crate::report::{Layout, Screen};

/// Most columns that a table uses: longer lines are hard to read.
const COLUMNS_MAX: usize = 200;

/// Screen on stdout: colours where it is a terminal that has them, and nobody has set `NO_COLOR` (no-color.org).
pub(in crate::cli) fn screen() -> Screen {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    Screen { layout: layout(), has_colours: stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb }
}

/// Layout of tables on stdout: what fits the terminal, if it is one.
pub(in crate::cli) fn layout() -> Layout {
    terminal_columns().map_or(Layout::Plain, |columns| Layout::Columns(columns.min(COLUMNS_MAX)))
}
