//! Options that several commands have beside settings.

use clap::{ValueEnum, error::ErrorKind};
use cproxy_core::ServiceName;

pub(super) fn parse_service_name(text: &str) -> Result<ServiceName, String> {
    // In a list there may be blanks behind the commas.
    let text = text.trim();
    match text.split_once('/') {
        Some((namespace, name))
            if !namespace.is_empty()
                && !name.is_empty()
                && !name.contains('/')
                && !text.contains(char::is_whitespace) =>
        {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err("expected a name like default/web".to_owned()),
    }
}

/// Output format. The further formats of `get` are accepted, so that `CPROXY_OUTPUT` fits all commands; JSON is YAML.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum Format {
    /// Aligned columns
    #[default]
    #[value(aliases = ["wide", "name"])]
    Table,
    /// JSON
    #[value(alias = "yaml")]
    Json,
}

/// Refuses the id of a process that does not exist.
pub(super) fn check_process(pid: u32) -> Result<(), clap::Error> {
    if std::path::Path::new("/proc").join(pid.to_string()).exists() {
        return Ok(());
    }
    let message = format!("--pid {pid}: there is no such process in this PID namespace");
    Err(clap::Error::raw(ErrorKind::ValueValidation, message))
}
