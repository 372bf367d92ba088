//! The command line: a contract that scripts and manifests rely on.

use std::{
    env,
    net::SocketAddr,
    ops::RangeInclusive,
    path::PathBuf,
    process::{ExitCode, exit},
    time::Duration,
};

use clap::{
    Args, CommandFactory as _, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser as _},
    error::ErrorKind,
};
use cproxy_daemon::{
    LogFilter, LogFormat, help_columns, memory, usage_error_line, variable_prefix, wrapped_help, write_stderr,
};
use tracing::Level;

use crate::{
    check,
    config::{Authentication, Config, ConfigError, PolicySource, tls_files},
    listen::address::ListenAddress,
    output::{print, print_error},
    run,
};

/// Exit code of wrong usage.
const EXIT_USAGE: i32 = 2;
/// Levels of the log, as the agent has them.
const LEVELS: [&str; 4] = ["error", "warn", "info", "debug"];

/// Serves Services, EndpointSlices and Nodes of an API server to many cproxy agents.
#[derive(Debug, Parser)]
#[command(name = "cproxy-relay", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The command line as the reference has it.
#[must_use]
pub fn manual() -> clap::Command {
    Cli::command()
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Follow an API server and serve its objects
    #[command(
        next_line_help = true,
        after_help = "Each flag can also be set in the environment: CPROXY_RELAY_LISTEN for --listen."
    )]
    Run(Box<RunOptions>),
    /// Check whether the relay can run with these settings: API server, permissions, certificates, views
    #[command(next_line_help = true)]
    Check(Box<CheckOptions>),
    /// Print the version
    Version,
}

/// Settings that `run` and `check` share.
#[derive(Args, Debug)]
struct Settings {
    /// Kubeconfig file; default: the pod's ServiceAccount
    #[arg(long, env = "CPROXY_RELAY_KUBECONFIG", hide_env = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Addresses to listen on: HOST:PORT, unix:///PATH, where * stands for the names of VMs, or vsock://CID:PORT;
    /// several separated by commas
    #[arg(long, env = "CPROXY_RELAY_LISTEN", hide_env = true, value_name = "ADDR", num_args = 1..,
          value_delimiter = ',')]
    listen: Vec<ListenAddress>,
    /// Certificate for TLS, with its chain, in PEM
    #[arg(long, env = "CPROXY_RELAY_TLS_CERT_FILE", hide_env = true, value_name = "FILE")]
    tls_cert_file: Option<PathBuf>,
    /// Key of the certificate, in PEM
    #[arg(long, env = "CPROXY_RELAY_TLS_PRIVATE_KEY_FILE", hide_env = true, value_name = "FILE")]
    tls_private_key_file: Option<PathBuf>,
    /// Authorities whose client certificates are accepted, in PEM
    #[arg(long, env = "CPROXY_RELAY_CLIENT_CA_FILE", hide_env = true, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
    /// Way to know who a client is
    #[arg(
        long,
        env = "CPROXY_RELAY_AUTHENTICATION",
        hide_env = true,
        value_name = "WAY",
        default_value = "token-review"
    )]
    authentication: Authentication,
    /// Audiences, one of which each token must be for; several separated by commas; default: those of the API server
    #[arg(long, env = "CPROXY_RELAY_TOKEN_AUDIENCES", hide_env = true, value_name = "AUDIENCE", num_args = 1..,
          value_delimiter = ',')]
    token_audiences: Vec<String>,
    /// File with the views of clients; default: each sees everything
    #[arg(long, env = "CPROXY_RELAY_VIEWS", hide_env = true, value_name = "FILE")]
    views: Option<PathBuf>,
    /// Serve each pod's network policy and the address sets that it names; default: off. Without a value: resolve
    #[arg(long, env = "CPROXY_RELAY_POLICIES", hide_env = true, value_name = "SOURCE", num_args = 0..=1,
          require_equals = true, default_missing_value = "resolve")]
    policies: Option<PolicySource>,
}

#[derive(Args, Debug)]
struct RunOptions {
    #[command(flatten)]
    settings: Settings,
    /// Bytes of the history of changes, which is at most 15 minutes long
    #[arg(long, env = "CPROXY_RELAY_HISTORY_BYTES", hide_env = true, value_name = "BYTES", default_value_t = 64 << 20,
          value_parser = parse_bytes)]
    history_bytes: usize,
    /// Connections of clients; more get 429
    #[arg(long, env = "CPROXY_RELAY_MAX_CONNECTIONS", hide_env = true, value_name = "COUNT", default_value_t = 20_000,
          value_parser = parse_connections)]
    max_connections: u32,
    /// Address for /metrics and health checks over plain HTTP; default: off
    #[arg(long, env = "CPROXY_RELAY_METRICS_BIND_ADDRESS", hide_env = true, value_name = "IP:PORT",
          value_parser = parse_address)]
    metrics_bind_address: Option<SocketAddr>,
    /// Seconds over which clients are moved to other replicas before the relay stops
    #[arg(long, env = "CPROXY_RELAY_DRAIN_SECONDS", hide_env = true, value_name = "SECONDS", default_value_t = 20,
          value_parser = parse_seconds)]
    drain_seconds: u32,
    /// Least severe level to log
    #[arg(long, env = "CPROXY_RELAY_LOG_LEVEL", hide_env = true, value_name = "LEVEL", default_value = "info",
          value_parser = PossibleValuesParser::new(LEVELS).try_map(|name| name.parse::<Level>()))]
    log_level: Level,
    /// Format of log lines
    #[arg(long, env = "CPROXY_RELAY_LOG_FORMAT", hide_env = true, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

#[derive(Args, Debug)]
struct CheckOptions {
    #[command(flatten)]
    settings: Settings,
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: check::Format,
}

impl Settings {
    fn config(&self) -> Result<Config, ConfigError> {
        let tls = tls_files(
            self.tls_cert_file.as_deref(),
            self.tls_private_key_file.as_deref(),
            self.client_ca_file.as_deref(),
        )?;
        Ok(Config {
            kubeconfig: self.kubeconfig.clone(),
            listen: self.listen.clone(),
            tls,
            authentication: self.authentication,
            token_audiences: self.token_audiences.clone(),
            views: self.views.clone(),
            policies: self.policies,
            history_bytes: 64 << 20,
            connections_max: 0,
            metrics_address: None,
            drain_time: Duration::ZERO,
        })
    }
}

impl RunOptions {
    fn config(&self) -> Result<Config, ConfigError> {
        Ok(Config {
            history_bytes: self.history_bytes,
            connections_max: usize::try_from(self.max_connections).unwrap_or(usize::MAX),
            metrics_address: self.metrics_bind_address,
            drain_time: Duration::from_secs(self.drain_seconds.into()),
            ..self.settings.config()?
        })
    }
}

fn parse_bytes(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a number of bytes".to_owned())
}

fn parse_connections(text: &str) -> Result<u32, String> {
    parse_number(text, 1..=1_000_000)
}

fn parse_seconds(text: &str) -> Result<u32, String> {
    parse_number(text, 0..=3600)
}

fn parse_number(text: &str, range: RangeInclusive<u32>) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("expected a number from {} to {}", range.start(), range.end()))
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected IP:PORT, such as 0.0.0.0:9090 or [::]:9090".to_owned())
}

/// Runs the command of the process's arguments.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_usage(&error),
    };
    match cli.command {
        Command::Run(options) => run_relay(&options),
        Command::Check(options) => {
            finish(block_on(check::run(&config_or_exit(options.settings.config()), options.output)))
        }
        Command::Version => finish(print(concat!("cproxy-relay ", env!("CARGO_PKG_VERSION"), "\n"))),
    }
}

/// Prints help where it is due, and otherwise one line.
fn report_usage(error: &clap::Error) -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    let text = error.to_string();
    match error.kind() {
        DisplayHelp | DisplayVersion => finish(print(&wrapped_help(&text, help_columns()))),
        DisplayHelpOnMissingArgumentOrSubcommand => {
            write_stderr(&wrapped_help(&text, help_columns()));
            exit(EXIT_USAGE)
        }
        _ => {
            let cli = Cli::command();
            let command = env::args_os().nth(1).and_then(|name| cli.find_subcommand(name));
            let name = command.map_or_else(String::new, |command| format!("{} ", command.get_name()));
            let (variable, line) = (variable_prefix(error, &cli), usage_error_line(&text));
            usage_error(&format!("{variable}{line} (see cproxy-relay {name}--help)"))
        }
    }
}

fn run_relay(options: &RunOptions) -> ExitCode {
    if options.settings.listen.is_empty() {
        usage_error(
            "no --listen: pass at least one address, such as unix:///run/cproxy-relay.sock, or 0.0.0.0:6443 with \
             --tls-cert-file and --tls-private-key-file",
        );
    }
    let config = config_or_exit(options.config());
    drop(LogFilter::start(options.log_level, options.log_format));
    memory::limit_spare_memory();
    finish(block_on(run::run(config)))
}

/// One thread: clients share its cache without waiting for each other. Compression has threads of its own.
fn block_on<T>(task: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(2).build()?;
    runtime.block_on(task)
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn config_or_exit(config: Result<Config, ConfigError>) -> Config {
    let checked = config.and_then(|config| config.check().map(|()| config));
    checked.unwrap_or_else(|error| usage_error(&error.to_string()))
}

/// Ends the process with exit code 2 and one line.
fn usage_error(message: &str) -> ! {
    print_error(message);
    exit(EXIT_USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_eighty_columns() {
        for command in [&[][..], &["run"], &["check"], &["version"]] {
            for flag in ["-h", "--help"] {
                let arguments = [&["cproxy-relay"], command, &[flag]].concat();
                let help = wrapped_help(&Cli::try_parse_from(&arguments).unwrap_err().to_string(), 80);
                let long = help.lines().find(|line| line.chars().count() > 80);
                assert!(help.contains("Usage: ") && long.is_none(), "{arguments:?}: {long:?}");
            }
        }
    }
}
