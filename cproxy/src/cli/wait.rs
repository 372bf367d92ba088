//! `cproxy wait`, for init systems and hooks that start programs which need ClusterIPs.

use std::{convert::Infallible, time::Duration};

use clap::{Args, ValueEnum, error::ErrorKind};
use cproxy_core::ServiceName;

use super::{EnabledOption, RunDirOption, parse_service_name};
use crate::run_dir::{Conditions, read_limits, wait};

/// The default of `--timeout`.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Value or the error in it, which the policy decides about, and that may be parsed later.
type Checked<T> = Result<T, String>;

/// Flags of `cproxy wait`.
#[derive(Args, Debug)]
pub(super) struct WaitOptions {
    #[command(flatten)]
    pub(super) switch: EnabledOption,
    #[command(flatten)]
    run: RunDirOption,
    /// Longest time to wait, in seconds or with a unit: ms, s or m
    #[arg(long, env = "CPROXY_TIMEOUT", value_name = "TIME", default_value = "30s", value_parser = checked_time)]
    timeout: Checked<Duration>,
    /// Also wait until these Services have an eligible endpoint, separated by commas
    #[arg(long = "for", env = "CPROXY_FOR", value_name = "NAMESPACE/NAME", num_args = 1.., value_delimiter = ',',
          value_parser = checked_service)]
    services: Vec<Checked<ServiceName>>,
    /// Result on failure or if a value is invalid
    #[arg(long, env = "CPROXY_ON_TIMEOUT", value_name = "POLICY", value_enum, default_value_t)]
    on_timeout: Policy,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Policy {
    /// Print the reason and exit with 1, or with 2 if a value is invalid
    #[default]
    Fail,
    /// Print the reason and exit with 0, so that the caller starts without Services
    Start,
}

pub(super) fn run(options: WaitOptions) -> anyhow::Result<()> {
    if let Some(reason) = options.switch.disabled() {
        super::print_error(&format_args!("{reason}; not waiting"));
        return Ok(());
    }
    let service_error = options.services.iter().find_map(|service| service.clone().err());
    match (options.timeout.clone().err().or(service_error), options.on_timeout) {
        (Some(error), Policy::Fail) => return Err(clap::Error::raw(ErrorKind::ValueValidation, error).into()),
        (Some(error), Policy::Start) => {
            super::print_error(&format_args!("{error}; waiting without it (--on-timeout start)"));
        }
        (None, _) => {}
    }
    let conditions = Conditions {
        run_dir: options.run.run_dir,
        timeout: options.timeout.unwrap_or(TIMEOUT),
        services: options.services.into_iter().flatten().collect(),
    };
    match (wait(&conditions), options.on_timeout) {
        (Err(error), Policy::Start) => {
            super::print_error(&format_args!("{error}; going on without it (--on-timeout start)"));
            Ok(())
        }
        (outcome, _) => {
            outcome?;
            if let Some(line) = read_limits(&conditions.run_dir) {
                super::print_error(&format_args!("ready, {line}"));
            }
            Ok(())
        }
    }
}

fn checked_time(text: &str) -> Result<Checked<Duration>, Infallible> {
    Ok(parse_time(text).map_err(|reason| invalid_value("--timeout <TIME>", text, &reason)))
}

fn checked_service(text: &str) -> Result<Checked<ServiceName>, Infallible> {
    Ok(parse_service_name(text).map_err(|reason| invalid_value("--for <NAMESPACE/NAME>", text, &reason)))
}

/// Error in clap's words.
fn invalid_value(flag: &str, text: &str, reason: &str) -> String {
    format!("invalid value '{text}' for '{flag}': {reason}")
}

pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let units = [("ms", Duration::from_millis(1)), ("s", Duration::from_secs(1)), ("m", Duration::from_secs(60))];
    let unit = units.iter().find_map(|(unit, one)| Some((text.strip_suffix(unit)?, *one)));
    let (number, one) = unit.unwrap_or((text, Duration::from_secs(1)));
    let number: u32 = number.trim().parse().map_err(|_| "expected a time like 30s, 500ms or 2m".to_owned())?;
    Ok(one * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, expected) in [("30s", 30_000), ("500ms", 500), ("2m", 120_000), ("7", 7_000), ("0", 0)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(expected)), "{text}");
        }
        for text in ["", "s", "-1s", "1h", "1.5s", "99999999999s"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
