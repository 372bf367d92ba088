//! `cproxy wait`, for init systems and hooks that start programs which need ClusterIPs.

use std::{io::IsTerminal as _, time::Duration};

use clap::{Args, error::ErrorKind};

use super::{options::parse_service_name, output::print_error};
use crate::{
    config::{OnTimeout, RunDirSettings, Switch, WaitSettings},
    run_dir::{Conditions, read_limits, wait},
};

/// The default of `--timeout`.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Flags of `cproxy wait`.
#[derive(Args, Debug)]
pub(super) struct WaitOptions {
    #[command(flatten)]
    pub(super) switch: Switch,
    #[command(flatten)]
    run: RunDirSettings,
    #[command(flatten)]
    wait: WaitSettings,
}

pub(super) fn run(options: WaitOptions) -> anyhow::Result<()> {
    if let Some(reason) = options.switch.disabled() {
        print_error(&format_args!("{reason}; not waiting"));
        return Ok(());
    }
    let WaitSettings { timeout, services, on_timeout } = options.wait;
    let origins = &options.switch.origins;
    let invalid = |name: &str, kind: &str, text: &str, reason: &str| {
        let place = match origins.of(name) {
            "flag" => String::new(),
            "environment" => format!("CPROXY_{}: ", name.to_uppercase()),
            place => format!("{place}: "),
        };
        // In clap's words.
        format!("{place}invalid value '{text}' for '--{name} <{kind}>': {reason}")
    };
    let timeout = parse_time(&timeout).map_err(|reason| invalid("timeout", "TIME", &timeout, &reason));
    let service_name =
        |text: &String| parse_service_name(text).map_err(|reason| invalid("for", "NAMESPACE/NAME", text, &reason));
    let services: Vec<_> = services.iter().map(service_name).collect();
    let service_error = services.iter().find_map(|service| service.clone().err());
    match (timeout.clone().err().or(service_error), on_timeout) {
        (Some(error), OnTimeout::Fail) => return Err(clap::Error::raw(ErrorKind::ValueValidation, error).into()),
        (Some(error), OnTimeout::Start) => {
            print_error(&format_args!("{error}; waiting without it (--on-timeout start)"));
        }
        (None, _) => {}
    }
    let conditions = Conditions {
        run_dir: options.run.run_dir,
        timeout: timeout.unwrap_or(TIMEOUT),
        services: services.into_iter().flatten().collect(),
    };
    // Scripts get one line, at the end.
    let is_watched = std::io::stderr().is_terminal();
    let report = |reason: &str| {
        if is_watched {
            print_error(&format_args!("waiting: {reason}"));
        }
    };
    match (wait(&conditions, report), on_timeout) {
        (Err(error), OnTimeout::Start) => {
            print_error(&format_args!("{error}; going on without it (--on-timeout start)"));
            Ok(())
        }
        (outcome, _) => {
            outcome?;
            if let Some(line) = read_limits(&conditions.run_dir) {
                print_error(&format_args!("ready, {line}"));
            }
            Ok(())
        }
    }
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
