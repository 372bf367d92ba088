//! Options that several commands have beside settings.

use clap::{Args, ValueEnum, error::ErrorKind};
use cproxy_core::{ServiceName, is_label};

use crate::config::{PinDirSettings, RunDirSettings};

/// Flag of commands that print a table or JSON.
#[derive(Args, Debug)]
pub(super) struct OutputOptions {
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    pub(super) output: Format,
}

/// Places of an agent that a command is about.
#[derive(Args, Debug)]
pub(super) struct Places {
    #[command(flatten)]
    pub(super) pin: PinDirSettings,
    #[command(flatten)]
    pub(super) run: RunDirSettings,
}

pub(super) fn parse_service_name(text: &str) -> Result<ServiceName, String> {
    // In a list there may be blanks behind the commas.
    ServiceName::of_service(text.trim()).ok_or_else(|| "expected a name like default/web".to_owned())
}

/// Namespace that selects rows.
pub(super) fn parse_namespace(text: &str) -> Result<String, String> {
    let is_namespace = is_label(text).then(|| text.to_owned());
    is_namespace.ok_or_else(|| "expected a namespace: lower-case letters, digits and inner dashes".to_owned())
}

/// Name or `namespace/name` of a Service that selects rows.
pub(super) fn parse_service_filter(text: &str) -> Result<String, String> {
    let (namespace, name) = text.split_once('/').map_or((None, text), |(namespace, name)| (Some(namespace), name));
    let is_service = namespace.is_none_or(is_label) && is_label(name);
    is_service.then(|| text.to_owned()).ok_or_else(|| "expected a name like web or default/web".to_owned())
}

/// Output format. The further formats of `get` are accepted, so that `CPROXY_OUTPUT` fits all commands; JSON is YAML.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum Format {
    /// Aligned columns
    #[default]
    #[value(aliases = ["wide", "name"])]
    Table,
    /// JSON, which is YAML, too
    #[value(alias = "yaml")]
    Json,
}

pub(super) fn parse_pid(text: &str) -> Result<u32, String> {
    // Ids are positive (pid_t).
    let pid = text.parse().ok().filter(|pid| i32::try_from(*pid).is_ok_and(i32::is_positive));
    pid.ok_or_else(|| "expected a process id, a number from 1".to_owned())
}

/// Refuses the id of a process that does not exist.
pub(super) fn check_process(pid: u32) -> Result<(), clap::Error> {
    if std::path::Path::new("/proc").join(pid.to_string()).exists() {
        return Ok(());
    }
    let message = format!("--pid {pid}: there is no such process in this PID namespace");
    Err(clap::Error::raw(ErrorKind::ValueValidation, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_no_service_matches_is_refused() {
        let long = "a".repeat(64);
        for text in ["web", "default/web", "7-web"] {
            assert_eq!(parse_service_filter(text).as_deref(), Ok(text));
        }
        for text in ["", "/web", "default/", "a/b/c", "a.b/web", "Web", "default/*", &long] {
            assert!(parse_service_filter(text).is_err() && parse_namespace(text).is_err(), "{text}");
        }
    }
}
