//! Errors in the usage of a command, in one line.

use std::{env, ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{
    ValueEnum as _,
    error::{ContextKind, ContextValue, ErrorKind},
};
use cproxy_daemon::{help_columns, usage_error_line, variable_prefix, wrapped_help, write_stderr};

use super::{
    exit_codes,
    get::View,
    output::{print, print_error},
};
use crate::{
    report::one_line,
    run_dir::{Failure, record_failure},
};

/// Length of a line or value that an error shows.
pub(super) const SHOWN_CHARS_MAX: usize = 80;

/// Prints help where it is due, and otherwise one line. For `cproxy wait`, the run directory records why an agent did
/// not start.
pub(super) fn report_usage(error: &clap::Error, cli: &clap::Command) -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if let DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand = error.kind() {
        let text = wrapped_help(&error.to_string(), help_columns());
        if error.use_stderr() {
            write_stderr(&text);
            return ExitCode::from(exit_codes::USAGE);
        }
        return print(&text).map_or_else(
            |error| {
                print_error(&error);
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    let command = env::args_os().nth(1).and_then(|name| cli.find_subcommand(name));
    let command = command.filter(|command| command.get_name() != "help");
    let name = command.map_or_else(String::new, |command| format!("{} ", command.get_name()));
    let message = format!("{}{} (see cproxy {name}--help)", variable_prefix(error, cli), summary(error));
    print_error(&message);
    if let Some(run) = command.filter(|command| command.get_name() == "run") {
        record_failure(&run_dir(run, env::args_os().skip(2)), Failure::Transient, &one_line(&message));
    }
    ExitCode::from(exit_codes::USAGE)
}

/// First paragraph of an error, which says what is wrong, in one line. A long value is shortened.
pub(super) fn summary(error: &clap::Error) -> String {
    let mut text = error.to_string();
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) {
        // The parser of the value may repeat it.
        text = text.replace(value, &shorten(value));
    }
    format!("{}{}", usage_error_line(&text), similar(error))
}

/// A name like the one that was mistyped.
fn similar(error: &clap::Error) -> String {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        && View::from_str(name, false).is_ok()
    {
        return format!("; did you mean get {name}?");
    }
    let kinds = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let names = kinds.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(name) => Some(name.clone()),
        ContextValue::Strings(names) => names.first().cloned(),
        _ => None,
    });
    names.map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

/// Requested run directory, even if other arguments cannot be parsed.
pub(super) fn run_dir(run: &clap::Command, arguments: impl Iterator<Item = OsString>) -> PathBuf {
    let value_of = |argument: &OsString| argument.to_str()?.strip_prefix("--run-dir=").map(OsString::from);
    let mut arguments = arguments.skip_while(|argument| argument != "--run-dir" && value_of(argument).is_none());
    let flag = arguments.next();
    let next = || arguments.next().filter(|value| !value.as_encoded_bytes().starts_with(b"-"));
    let option = run.get_arguments().find(|argument| argument.get_long() == Some("run-dir"));
    let variable = || option?.get_env().and_then(env::var_os);
    let default = || Some(option?.get_default_values().first()?.to_os_string());
    let given = flag.as_ref().and_then(value_of).or_else(next).or_else(variable).or_else(default);
    given.unwrap_or_default().into()
}

/// Part of a text that an error shows. A URL is without user, password and query, which may be secret: errors are
/// logged, and recorded in the run directory.
pub(super) fn shorten(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.chars().take(SHOWN_CHARS_MAX).collect() };
    let rest = rest.split('?').next().unwrap_or_default();
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    format!("{scheme}://{rest}").chars().take(SHOWN_CHARS_MAX).collect()
}
