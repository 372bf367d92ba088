//! Texts of the command line: errors of one line, and help that fits a terminal.

use std::{env, ffi::OsString, iter::repeat_n};

use clap::error::{ContextKind, ContextValue};

use crate::terminal_columns;

/// Columns of a line of help without a terminal, and most of them: longer lines are hard to read.
const HELP_COLUMNS: usize = 80;
const HELP_COLUMNS_MAX: usize = 100;
/// Least room for a text behind its indentation. With less, lines are as long as they are.
const TEXT_COLUMNS_MIN: usize = 24;

/// An error of clap as one line: its first paragraph, which says what is wrong, without `error: `.
#[must_use]
pub fn usage_error_line(error: &str) -> String {
    let lines: Vec<_> = error.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

/// Variable that an invalid value comes from, since no argument has it: `NAME: `. Otherwise empty.
#[must_use]
pub fn variable_prefix(error: &clap::Error, cli: &clap::Command) -> String {
    let name = || {
        let (ContextValue::String(flag), ContextValue::String(value)) =
            (error.get(ContextKind::InvalidArg)?, error.get(ContextKind::InvalidValue)?)
        else {
            return None;
        };
        let mut arguments = env::args_os().skip(1);
        let command = cli.find_subcommand(arguments.next()?)?;
        // As `--exclude-port <PORT>...`.
        let long = flag.strip_prefix("--")?.split([' ', '[']).next();
        let name = command.get_arguments().find(|argument| argument.get_long() == long)?.get_env()?;
        let has = |text: &OsString| text.to_string_lossy().contains(&**value);
        let is_of_variable = env::var_os(name).is_some_and(|text| has(&text)) && !arguments.any(|text| has(&text));
        is_of_variable.then(|| format!("{}: ", name.to_string_lossy()))
    };
    name().unwrap_or_default()
}

/// Columns for help: those of the terminal, or 80 without one.
#[must_use]
pub fn help_columns() -> usize {
    terminal_columns().map_or(HELP_COLUMNS, |columns| columns.min(HELP_COLUMNS_MAX))
}

/// Help of clap in lines of so many columns. What follows stands below the text of its line.
#[must_use]
pub fn wrapped_help(help: &str, columns: usize) -> String {
    let line = |line: &str| {
        let text = line.trim_start();
        let lead = line.len() - text.len();
        // Two blanks end the names of a flag.
        let names = text.find("  ").filter(|_| lead != 0).unwrap_or_default();
        let behind = text.get(names..).unwrap_or_default().trim_start();
        let (head, text) = line.split_at(line.len() - behind.len());
        format!("{head}{}\n", hanging(columns, head.chars().count(), text))
    };
    help.lines().map(line).collect()
}

/// Text in lines of so many columns behind an indentation, which the first line has already.
#[must_use]
pub fn hanging(columns: usize, indent: usize, text: &str) -> String {
    let Some(room) = columns.checked_sub(indent).filter(|room| *room >= TEXT_COLUMNS_MIN) else {
        return text.to_owned();
    };
    let (mut lines, mut length) = (String::new(), 0);
    for word in text.split(' ') {
        let width = word.chars().count();
        if length != 0 && length + 1 + width > room {
            lines.push('\n');
            lines.extend(repeat_n(' ', indent));
            length = 0;
        } else if length != 0 {
            lines.push(' ');
            length += 1;
        }
        lines.push_str(word);
        length += width;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_paragraph_becomes_one_line() {
        let error =
            "error: invalid value 'a' for '--b <B>'\n  [possible values: c, d]\n\nFor more information, try it\n";
        assert_eq!(usage_error_line(error), "invalid value 'a' for '--b <B>' [possible values: c, d]");
        assert_eq!(usage_error_line(""), "");
    }

    #[test]
    fn help_stands_below_the_text_of_its_line() {
        let words = "word ".repeat(20);
        let help = format!("Usage: a\n\n  -b, --c <C>  {}\n          {}\n", words.trim_end(), words.trim_end());
        let wrapped = wrapped_help(&help, HELP_COLUMNS);
        let lines: Vec<_> = wrapped.lines().collect();
        assert_eq!(lines[..2], ["Usage: a", ""]);
        assert!(lines[2].starts_with("  -b, --c <C>  word ") && lines.iter().all(|line| line.len() <= 80), "{wrapped}");
        assert!(lines[3].starts_with("               word"), "{wrapped}");
        assert!(lines[5].starts_with("          word"), "{wrapped}");
        assert_eq!(wrapped.split_whitespace().count(), help.split_whitespace().count());
        for columns in [60, HELP_COLUMNS_MAX] {
            let longest = wrapped_help(&help, columns).lines().map(str::len).max().unwrap();
            assert!(longest <= columns && longest > columns - 5, "{columns}: {longest}");
        }
    }
}
