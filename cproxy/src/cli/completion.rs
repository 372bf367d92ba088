//! `cproxy completion`: a script for a shell, which asks `cproxy complete` for candidates. So they fit the program that
//! is there, and Services have their names.

use std::{ffi::OsString, path::Path};

use clap::{Arg, Args, Command, ValueEnum};
use cproxy_core::printable;

use super::output::print;
use crate::{
    config::RunDirSettings,
    run_dir::{RESPONSE_TIMEOUT, fetch_services},
};

/// Flags of `cproxy completion`.
#[derive(Args, Debug)]
pub(super) struct CompletionOptions {
    /// Shell that the script is for
    #[arg(value_enum)]
    shell: Shell,
}

/// Shell with completions.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Shell {
    /// GNU bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

impl Shell {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bash, Self::Zsh, Self::Fish];

    /// The script that has the shell ask for candidates.
    #[must_use]
    pub fn script(self) -> &'static str {
        match self {
            Self::Bash => include_str!("completion/cproxy.bash"),
            Self::Zsh => include_str!("completion/_cproxy"),
            Self::Fish => include_str!("completion/cproxy.fish"),
        }
    }

    /// Name under which the shell looks for the script in its own directories.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Bash => "cproxy.bash",
            Self::Zsh => "_cproxy",
            Self::Fish => "cproxy.fish",
        }
    }
}

pub(super) fn run(options: &CompletionOptions) -> anyhow::Result<()> {
    print(options.shell.script())
}

/// Arguments of `cproxy complete`.
#[derive(Args, Debug)]
pub(super) struct CompleteOptions {
    /// The words behind `cproxy`, of which the last is to be completed
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
    #[command(flatten)]
    run: RunDirSettings,
}

/// Prints a candidate in each line, and behind a tab what it means.
pub(super) fn complete(options: &CompleteOptions, cli: &Command) -> anyhow::Result<()> {
    let words: Vec<_> = options.words.iter().map(|word| word.to_string_lossy()).collect();
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    let run_dir = run_dir_of(&words).unwrap_or(&options.run.run_dir);
    let services = || match fetch_services(run_dir, RESPONSE_TIMEOUT) {
        // The agent's canary is no Service of its source: its name begins with a tilde.
        Ok(rows) => rows.into_iter().filter_map(|row| row.service).filter(|name| !name.starts_with('~')).collect(),
        Err(_) => Vec::new(),
    };
    let mut candidates = candidates(cli, &words, services);
    candidates.sort_unstable();
    candidates.dedup();
    print(&candidates.iter().map(|(value, meaning)| format!("{value}\t{meaning}\n")).collect::<String>())
}

/// The agent's directory that the line names, which is another one than the environment's.
fn run_dir_of<'w>(words: &[&'w str]) -> Option<&'w Path> {
    const FLAG: &str = "--run-dir";
    let named = |pair: &[&'w str]| match pair {
        [flag, value] if *flag == FLAG && *value != "=" => Some(*value),
        [word, ..] => word.strip_prefix(FLAG)?.strip_prefix('='),
        [] => None,
    };
    words.windows(2).find_map(named).map(Path::new)
}

/// Candidate for a word, and what it means.
type Candidate = (String, String);

/// Candidates for the last word. bash parts a word at `=`; other shells do not.
fn candidates(cli: &Command, words: &[&str], services: impl FnOnce() -> Vec<String>) -> Vec<Candidate> {
    let Some((&last, before)) = words.split_last() else { return Vec::new() };
    // The flag whose value comes next, and the number of values without one.
    let (mut command, mut flag, mut positionals) = (cli, None, 0);
    for word in before {
        if flag.is_some() {
            // Its value is this word, or the one behind `=`.
            flag = flag.filter(|_| *word == "=");
            continue;
        }
        if word.starts_with('-') {
            flag = command.get_arguments().find(|argument| is_named(argument, word) && takes_value(argument));
        } else if let Some(inner) = command.find_subcommand(word) {
            (command, positionals) = (inner, 0);
        } else if command.has_subcommands() {
            return Vec::new();
        } else {
            positionals += 1;
        }
    }
    let (lead, last) = match last.split_once('=') {
        Some((name, value)) if flag.is_none() => {
            flag = command.get_arguments().find(|argument| is_named(argument, name) && takes_value(argument));
            (format!("{name}="), value)
        }
        _ => (String::new(), if last == "=" { "" } else { last }),
    };
    let all = match flag {
        Some(flag) => values(flag, services),
        None if !lead.is_empty() => Vec::new(),
        None if last.starts_with('-') => flags(command),
        None => {
            let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
            let commands = commands.map(|of| (of.get_name().to_owned(), meaning(of.get_about())));
            let positional = command.get_positionals().nth(positionals);
            commands.chain(positional.map(|argument| values(argument, services)).unwrap_or_default()).collect()
        }
    };
    let fitting = all.into_iter().filter(|(value, _)| value.starts_with(last));
    fitting.map(|(value, meaning)| (format!("{lead}{value}"), meaning)).collect()
}

/// Whether a word is this flag.
fn is_named(flag: &Arg, word: &str) -> bool {
    let mut letters = word.chars().skip(1);
    let is_short = flag.get_short().is_some_and(|short| letters.next() == Some(short) && letters.next().is_none());
    is_short || flag.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long))
}

fn takes_value(flag: &Arg) -> bool {
    flag.get_action().takes_values()
}

fn flags(command: &Command) -> Vec<Candidate> {
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let named = shown.filter_map(|flag| Some((format!("--{}", flag.get_long()?), meaning(flag.get_help()))));
    named.chain([("--help".to_owned(), "Print help".to_owned())]).collect()
}

/// Values of a flag or a positional argument, as far as they are known.
fn values(argument: &Arg, services: impl FnOnce() -> Vec<String>) -> Vec<Candidate> {
    let is_service =
        matches!(argument.get_long().unwrap_or(argument.get_id().as_str()), "service" | "for" | "destination");
    if is_service {
        return services().into_iter().map(|name| (printable(&name), String::new())).collect();
    }
    let shown = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set());
    shown.map(|value| (value.get_name().to_owned(), meaning(value.get_help()))).collect()
}

/// The first sentence of a help text, in one line.
fn meaning(help: Option<&clap::builder::StyledStr>) -> String {
    let help = help.map(ToString::to_string).unwrap_or_default();
    help.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Vec<String> {
        let words: Vec<_> = line.split(' ').collect();
        let all = candidates(&crate::cli::command(), &words, || vec!["default/web".to_owned(), "shop/db".to_owned()]);
        all.into_iter().map(|(value, _)| value).collect()
    }

    #[test]
    fn each_kind_of_word_is_completed() {
        assert_eq!(found("ch"), ["check"]);
        assert_eq!(found("get s"), ["services", "sockets"]);
        assert_eq!(found("get services --wa"), ["--watch"]);
        assert_eq!(found("get -o y"), ["yaml"]);
        assert_eq!(found("get services --output j"), ["json"]);
        assert_eq!(found("get services --output=j"), ["--output=json"]);
        assert_eq!(found("get services --output = j"), ["json"]);
        assert_eq!(found("get services --output =").len(), 5);
        assert_eq!(found("explain --output = json sh"), ["shop/db"]);
        assert_eq!(found("explain --output=json sh"), ["shop/db"]);
        assert_eq!(found("get --watch=y"), [""; 0]);
        assert_eq!(found("get services --service sh"), ["shop/db"]);
        assert_eq!(found("explain d"), ["default/web"]);
        assert_eq!(found("wait --for "), ["default/web", "shop/db"]);
        assert_eq!(found("run --policy en"), ["enforce"]);
        assert_eq!(found("set log-level de"), ["debug"]);
        assert_eq!(found("get services "), [""; 0]);
        assert_eq!(found("nonsense --x "), [""; 0]);
        assert_eq!(found("ins"), [""; 0], "what the agent runs itself");
    }

    #[test]
    fn the_directory_of_the_line_counts() {
        assert_eq!(run_dir_of(&["get", "--run-dir", "/a", "x"]), Some(Path::new("/a")));
        assert_eq!(run_dir_of(&["get", "--run-dir=/a", "x"]), Some(Path::new("/a")));
        assert_eq!(run_dir_of(&["get", "x"]), None);
    }

    #[test]
    fn every_command_and_flag_that_is_shown_is_a_candidate() {
        let cli = crate::cli::manual();
        for command in cli.get_subcommands() {
            assert!(found(command.get_name()).contains(&command.get_name().to_owned()));
            let flags = found(&format!("{} --", command.get_name()));
            for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()).filter_map(Arg::get_long) {
                assert!(flags.contains(&format!("--{flag}")), "--{flag} of {}", command.get_name());
            }
        }
    }
}
