//! The command line: a contract that scripts and images rely on. One file per command.

mod bugreport;
mod canary;
mod check;
mod cleanup;
mod completion;
mod exec;
mod exit_codes;
mod explain;
mod get;
mod install;
mod machine_settings;
mod manual;
mod options;
mod output;
mod policy;
mod reseed;
mod resolve;
mod run;
#[cfg(feature = "schema")]
mod schemas;
mod set;
mod status;
mod trace;
mod usage_error;
mod version;
mod wait;

use std::{env, process::ExitCode};

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

#[cfg(feature = "schema")]
pub use self::schemas::schemas;
pub use self::{completion::Shell, exit_codes::EXIT_CODES, manual::manual};
use self::{machine_settings::MachineSettings, output::print_error, usage_error::report_usage};
use crate::{
    config::{Config, SETTINGS},
    privileges,
};

/// End of the help of commands whose help has no room for each flag's variable.
const SETTINGS_HELP: &str = "Each flag can also be set in the environment (CPROXY_RUN_DIR for --run-dir), as a kernel \
                             parameter (cproxy.run-dir=DIR) or in /etc/cproxy/cproxy.conf: see docs/reference.md";

/// End of the help of all.
const FIRST_HELP: &str = "\
An address does not answer? cproxy explain ADDRESS:PORT --probe
Is all well? cproxy status";

/// End of the help of `explain`.
const EXPLAIN_HELP: &str = "\
The first line says where a call goes: forwarded (to a backend), refused
(ECONNREFUSED), dropped (EHOSTUNREACH), direct (to the address itself).
USED in the table: yes, new connections; keeps, only those from before; no.
Exit code: 0 it gets there, 1 it does not, 4 that cannot be said.";

/// Makes Kubernetes Services work for the pod in a microVM.
#[derive(Debug, Parser)]
#[command(name = "cproxy", version, after_help = FIRST_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Follow Services and EndpointSlices and keep the kernel's table up to date
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Run(Box<Config>),
    /// Check whether cproxy can run on this kernel and machine, without changing them
    Check(check::CheckOptions),
    /// Wait until the table of a running agent is complete
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Wait(wait::WaitOptions),
    /// Show agent, source, table and calls on one screen
    Status(status::StatusOptions),
    /// Print the state in the kernel, with or without a running agent
    Get(get::GetOptions),
    /// Explain what a call to an address or a Service gets now, and why
    #[command(after_help = EXPLAIN_HELP)]
    Explain(explain::ExplainOptions),
    /// Print each call that is translated, refused or dropped, as it happens
    Trace(trace::TraceOptions),
    /// Print the table for manifests, or what their network policies allow, without touching the kernel
    Resolve(resolve::ResolveOptions),
    /// Change a setting of a running agent until its next start or reload
    Set(set::SetOptions),
    /// Write all that support needs into one tar file, without secrets
    Bugreport(bugreport::BugreportOptions),
    /// Make the agent choose backends from a new seed, after a snapshot was restored
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Reseed(reseed::ReseedOptions),
    /// Detach the programs and remove the table and its pins
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Cleanup(cleanup::CleanupOptions),
    /// Replace cproxy by another program, with default handling of SIGINT and SIGQUIT
    Exec(exec::ExecOptions),
    /// Print the versions of cproxy and its table layout
    Version(options::OutputOptions),
    /// Print a script that has a shell complete commands, flags and names of Services
    Completion(completion::CompletionOptions),
    /// Print candidates for a word; the script of `completion` does this
    #[command(hide = true)]
    Complete(completion::CompleteOptions),
    /// Load, attach and pin the programs; `run` does this in a child process
    #[command(hide = true)]
    Install(install::InstallOptions),
    /// Load or attach the programs of network policy; `run` does this in a child process
    #[command(hide = true)]
    Policy(policy::PolicyOptions),
    /// Walk the canary in the cgroup whose `cgroup.procs` is stdin; `run` does this in a child process
    #[command(hide = true)]
    Canary(canary::CanaryOptions),
}

/// Runs one command. Errors go to stderr in one line; 1 for failure, 2 for wrong usage.
#[must_use]
pub fn main() -> ExitCode {
    // It stays for as long as its agent, and so does all memory that it uses.
    if env::args_os().nth(1).is_some_and(|name| name == "broker") {
        return match privileges::serve_as_broker(env::args_os().skip(2)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    // The command line's description is dropped: an agent would keep it for good.
    let (_, command) = read();
    let result = command.map_err(anyhow::Error::from).and_then(execute);
    match result {
        Ok(code) => code,
        Err(error) => match error.downcast_ref() {
            Some(usage) => report_usage(usage, &read().0),
            None => {
                print_error(&error);
                ExitCode::FAILURE
            }
        },
    }
}

/// Reads the command line, and the settings of the environment and of the machine.
fn read() -> (clap::Command, Result<Command, clap::Error>) {
    let cli = command();
    // `exec` starts programs, whatever the settings are.
    let is_exec = env::args_os().nth(1).is_some_and(|name| name == "exec");
    let (mut cli, settings) =
        if is_exec { (cli, MachineSettings::default()) } else { machine_settings::with_settings(cli) };
    let command = parse(&mut cli, settings);
    (cli, command)
}

/// The command line, with the variable of each setting. `enabled` is about `run`; other commands take it from the
/// machine.
fn command() -> clap::Command {
    let hidden = |flag: Arg| if flag.get_long() == Some("enabled") { flag.hide(true) } else { flag };
    let with_hidden = |command: clap::Command| match command.get_name() {
        "run" => command,
        _ => command.mut_args(hidden),
    };
    Cli::command().mut_subcommands(|command| with_hidden(with_variables(command)))
}

fn with_variables(command: clap::Command) -> clap::Command {
    command.mut_args(with_variable).mut_subcommands(with_variables)
}

/// Each setting is a variable, too. An empty one, as scripts and pod templates leave it, counts as absent.
fn with_variable(flag: Arg) -> Arg {
    // `--policy` of `resolve` takes no value, and is no setting.
    let is_setting = |name: &&str| SETTINGS.iter().any(|group| group.settings.iter().any(|of| of.name == *name));
    let name = flag.get_long().filter(|_| flag.get_action().takes_values()).filter(is_setting);
    let variable = name.map(|name| format!("CPROXY_{}", name.replace('-', "_").to_uppercase()));
    let flag = if let Some(variable) = variable { flag.env(variable) } else { flag }.hide_env_values(true);
    let value = flag.get_env().and_then(env::var_os);
    if value.is_some_and(|value| value.is_empty()) { flag.env(None) } else { flag }
}

/// The name of each flag gives its variable, which the help would repeat.
fn without_shown_variable(flag: Arg) -> Arg {
    flag.hide_env(true)
}

fn parse(cli: &mut clap::Command, settings: MachineSettings) -> Result<Command, clap::Error> {
    let mut matches = cli.try_get_matches_from_mut(env::args_os())?;
    let given = matches.subcommand().and_then(|(name, matches)| Some((cli.find_subcommand(name)?, matches)));
    let origins = given.map(|(command, matches)| machine_settings::origins(command, matches, &settings.valid));
    let origins = origins.unwrap_or_default();
    let mut command = Cli::from_arg_matches_mut(&mut matches)?.command;
    match &mut command {
        Command::Run(options) => {
            // `cproxy wait` reports why the agent ended, as its policy says; the others do without the setting.
            if let Some(error) = settings.error {
                return Err(clap::Error::raw(ErrorKind::InvalidValue, error));
            }
            options.switch.origins = origins;
        }
        Command::Wait(options) => options.switch.origins = origins,
        Command::Status(options) => options.switch.origins = origins,
        Command::Check(options) => {
            options.switch.origins = origins;
            options.settings_error =
                settings.error.map_or_else(|| run::settings_error(cli), |error| Some(error.to_string()));
        }
        Command::Explain(options) => options.switch.origins = origins,
        _ => {}
    }
    Ok(command)
}

fn execute(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(options) => return run::run(*options),
        Command::Check(options) => check::run(&options)?,
        Command::Wait(options) => wait::run(options)?,
        Command::Status(options) => return status::run(&options),
        Command::Get(options) => get::run(&options)?,
        Command::Explain(options) => return explain::run(options),
        Command::Trace(options) => trace::run(&options)?,
        Command::Resolve(options) => return resolve::run(&options),
        Command::Set(options) => set::run(&options)?,
        Command::Bugreport(options) => bugreport::run(&options)?,
        Command::Reseed(options) => reseed::run(&options)?,
        Command::Cleanup(options) => cleanup::run(&options)?,
        Command::Version(options) => version::run(&options)?,
        Command::Completion(options) => completion::run(&options)?,
        Command::Complete(options) => completion::complete(&options, &self::command())?,
        Command::Exec(options) => return Ok(exec::run(&options)),
        Command::Install(options) => return Ok(install::run(&options)),
        Command::Policy(options) => return Ok(policy::run(&options)),
        Command::Canary(options) => canary::run(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use cproxy_daemon::wrapped_help;

    use super::*;

    #[test]
    fn help_has_eighty_columns() {
        let cli = command();
        let of_set = ["set", "log-level"].as_slice();
        let names: Vec<_> = cli.get_subcommands().map(clap::Command::get_name).collect();
        let commands = names.iter().map(std::slice::from_ref).chain([&[][..], of_set]);
        for (command, flag) in commands.flat_map(|command| [(command, "-h"), (command, "--help")]) {
            let arguments = [&["cproxy"], command, &[flag]].concat();
            let help = cli.clone().try_get_matches_from(&arguments).unwrap_err();
            assert_eq!(help.kind(), ErrorKind::DisplayHelp, "{arguments:?}");
            let help = wrapped_help(&help.to_string(), 80);
            let long = help.lines().find(|line| line.chars().count() > 80);
            assert_eq!(long, None, "{arguments:?}");
            let is_run = command == ["run"];
            assert_eq!(help.contains("--enabled"), is_run, "{arguments:?}");
        }
    }
}
