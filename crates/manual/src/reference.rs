//! Reference pages in Markdown, from the definitions of the command lines.

use std::fmt::Write as _;

use clap::{Arg, Command};
use cproxy::cli::EXIT_CODES;

/// Commands whose flags can also be set on the kernel's command line and in the file.
const WITH_SETTINGS: [&str; 2] = ["run", "wait"];

/// The page of a program: each command with its flags.
pub(crate) fn commands(program: &Command) -> String {
    let name = program.get_name();
    let mut program = program.clone().disable_help_subcommand(true);
    program.build();
    let about = program.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = format!("# Commands of {name}\n\n{about}. This page is generated from the program's definition.\n");
    program.get_subcommands().for_each(|command| write_command(&mut page, name, command));
    page
}

fn write_command(page: &mut String, parent: &str, command: &Command) {
    if command.is_hide_set() {
        return;
    }
    let name = format!("{parent} {}", command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().bin_name(&name).render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    // Writing to a text cannot fail.
    write!(page, "\n## {name}\n\n{about}.\n\n```\n{usage}\n```\n").ok();
    let arguments: Vec<_> = command.get_arguments().filter(|of| is_shown(of)).collect();
    if !arguments.is_empty() {
        page.push_str("\n| argument | environment | default | effect |\n|---|---|---|---|\n");
        arguments.iter().for_each(|argument| write_argument(page, argument));
    }
    command.get_subcommands().for_each(|below| write_command(page, &name, below));
}

fn is_shown(argument: &Arg) -> bool {
    !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "version")
}

fn write_argument(page: &mut String, argument: &Arg) {
    let cells = [code(&form(argument)), environment(argument), default(argument), effect(argument)];
    writeln!(page, "| {} |", cells.join(" | ")).ok();
}

/// Flags and the name of the value.
fn form(argument: &Arg) -> String {
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let flags: Vec<_> = short.into_iter().chain(long).collect();
    let names = argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string);
    let takes_value = argument.get_action().takes_values();
    let value = if takes_value { names.collect::<Vec<_>>().join(" ") } else { String::new() };
    let many = argument.get_num_args().is_some_and(|count| count.max_values() > 1);
    format!("{} {value}{}", flags.join(", "), if many { "..." } else { "" }).trim().to_owned()
}

fn environment(argument: &Arg) -> String {
    argument.get_env().map(|name| code(&name.to_string_lossy())).unwrap_or_default()
}

pub(crate) fn default(argument: &Arg) -> String {
    let values: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if values.is_empty() || !argument.get_action().takes_values() { String::new() } else { code(&values.join(",")) }
}

/// The help, and the values with theirs.
fn effect(argument: &Arg) -> String {
    let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let values: Vec<_> = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    let value = |value: &clap::builder::PossibleValue| match value.get_help() {
        Some(help) => format!("{}: {help}", code(value.get_name())),
        None => code(value.get_name()),
    };
    let values: Vec<_> = values.iter().map(value).collect();
    let separator = if values.is_empty() { "" } else { ". " };
    escape(&format!("{help}{separator}{}", values.join("; "))).replace('\n', " ")
}

/// The settings of a machine, which four places may have.
pub(crate) fn settings(program: &Command) -> String {
    let mut page =
        "# Settings\n\nEach flag of `cproxy run` and `cproxy wait` is also a variable, a kernel parameter and \
                    a line of\n`/etc/cproxy/cproxy.conf`. This page is generated from the program's definition.\n\n\
                    | flag | environment | kernel parameter | line of the file | of |\n|---|---|---|---|---|\n"
            .to_owned();
    let mut names: Vec<(String, String, Vec<&str>)> = Vec::new();
    let commands = program.get_subcommands().filter(|command| WITH_SETTINGS.contains(&command.get_name()));
    for command in commands {
        for argument in command.get_arguments().filter(|argument| is_shown(argument)) {
            let (Some(long), Some(variable)) = (argument.get_long(), argument.get_env()) else { continue };
            match names.iter_mut().find(|(name, ..)| name == long) {
                Some((.., of)) => of.push(command.get_name()),
                None => {
                    let variable = variable.to_string_lossy().into_owned();
                    names.push((long.to_owned(), variable, vec![command.get_name()]));
                }
            }
        }
    }
    for (name, variable, of) in names {
        let of: Vec<_> = of.into_iter().map(code).collect();
        let cells = [format!("--{name}"), variable, format!("cproxy.{name}=VALUE"), format!("{name} = VALUE")]
            .map(|c| code(&c));
        writeln!(page, "| {} | {} |", cells.join(" | "), of.join(", ")).ok();
    }
    page
}

/// Exit codes, as docs/reference.md has them.
pub(crate) fn exit_codes() -> String {
    let mut page = "# Exit codes\n\nErrors are one line on stderr, `cproxy: ...`. This page is generated from the \
                    program's definition.\n\n| code | meaning |\n|---|---|\n"
        .to_owned();
    for (codes, meaning) in EXIT_CODES {
        let codes: Vec<_> = codes.iter().map(u8::to_string).collect();
        writeln!(page, "| {} | {meaning} |", codes.join(", ")).ok();
    }
    page
}

pub(crate) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", escape(text)) }
}

/// A bar would end the cell.
pub(crate) fn escape(text: &str) -> String {
    text.replace("\\|", "|").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_has_the_same_exit_codes() {
        let page = exit_codes();
        let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| ")).collect();
        let reference = include_str!("../../../docs/reference.md");
        for row in rows {
            assert!(reference.lines().any(|line| line == row), "docs/reference.md has not: {row}");
        }
    }
}
