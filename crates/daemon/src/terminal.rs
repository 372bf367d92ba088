//! The terminal's width.

use std::{
    env,
    io::{IsTerminal, stdout},
};

use rustix::termios::tcgetwinsize;

/// Columns of a terminal that does not tell.
const COLUMNS: usize = 80;

/// Columns of the terminal on stdout, if it is one. `COLUMNS` overrides its width.
#[must_use]
pub fn terminal_columns() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    let given = env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    let size = || tcgetwinsize(stdout()).ok().map(|size| usize::from(size.ws_col));
    let is_real = |columns: &usize| *columns != 0;
    Some(given.filter(is_real).or_else(|| size().filter(is_real)).unwrap_or(COLUMNS))
}
