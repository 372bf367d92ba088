//! `cproxy run`

use std::process::ExitCode;

use clap::{FromArgMatches as _, error::ErrorKind};
use cproxy_daemon::{LogFilter, memory, notify};

use super::{cleanup, exit_codes, machine_settings::unknown_variables, output::print_error, usage_error::summary};
use crate::{agent, config::Config, report::one_line};

/// Returns [`exit_codes::DISABLED`] where cproxy is disabled.
pub(super) fn run(config: Config) -> anyhow::Result<ExitCode> {
    memory::limit_spare_memory();
    let log = LogFilter::start(config.log.log_level, config.log.log_format);
    if let Some(reason) = config.switch.disabled() {
        return disabled(&config, &reason);
    }
    let config = checked(config)?;
    for name in unknown_variables(&super::command()) {
        tracing::warn!("the variable {name} is no setting and has no effect: see cproxy run --help");
    }
    tracing::info!(name: "started", "cproxy {}: {config}", env!("CARGO_PKG_VERSION"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(agent::run(config, log, reread)) {
        Err(error) if error.is_of_setting() => {
            print_error(&error);
            Ok(ExitCode::from(exit_codes::USAGE))
        }
        ended => Ok(ended.map(|()| ExitCode::SUCCESS)?),
    }
}

/// Leaves the machine as one without cproxy.
fn disabled(config: &Config, reason: &str) -> anyhow::Result<ExitCode> {
    match cleanup::remove(&config.pins.pin_dir, &config.run.run_dir)? {
        0 => tracing::info!(name: "disabled", "{reason}"),
        count => tracing::info!(name: "disabled", "{reason}: detached and removed {count} objects of an earlier start"),
    }
    // To systemd, a service that ends before it is ready has failed.
    notify::ready();
    Ok(ExitCode::from(exit_codes::DISABLED))
}

/// Configuration as the command line, the environment of the start and the settings of the machine have it now.
fn reread() -> Result<Config, String> {
    let config = match super::read() {
        (_, Ok(super::Command::Run(config))) => checked(*config),
        (_, Ok(_)) => return Err("the command is not `run`".to_owned()),
        (_, Err(error)) => Err(error),
    };
    config.map_err(|error| one_line(&summary(&error)))
}

/// Reason why `run` without flags refuses the settings of the environment and of the machine, if it does.
pub(super) fn settings_error(cli: &mut clap::Command) -> Option<String> {
    let matches = cli.try_get_matches_from_mut(["cproxy", "run"]);
    let command = matches.and_then(|matches| super::Cli::from_arg_matches(&matches));
    let config = match command.map(|cli| cli.command) {
        Ok(super::Command::Run(config)) => checked(*config),
        Ok(_) => return None,
        Err(error) => Err(error),
    };
    match config {
        Ok(config) if config.switch.settings.enabled => agent::settings_error(&config),
        Ok(_) => None,
        Err(error) => Some(one_line(&summary(&error))),
    }
}

fn checked(config: Config) -> Result<Config, clap::Error> {
    match config.check() {
        Ok(()) => Ok(config),
        Err(error) => Err(clap::Error::raw(ErrorKind::TooManyValues, error)),
    }
}
