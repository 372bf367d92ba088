//! `cproxy run`

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum, error::ErrorKind};
use cproxy_core::Balance;
use cproxy_daemon::{ListenAddress, LogFilter, LogFormat, memory, notify};
use cproxy_datapath::{EXCLUDED_CGROUPS_MAX, EXCLUSIONS_MAX, sockets::Mode};
use tracing::Level;

use super::{
    CountersOption, EnabledOption, NodeOptions, PinDirOption, RunDirOption, SourceOptions, cleanup, exit_codes,
};
use crate::{
    agent, canary,
    config::{CanaryAddresses, Config, Exclude},
};

/// Flags of `cproxy run`.
#[derive(Args, Debug)]
pub(super) struct RunOptions {
    #[command(flatten)]
    pub(super) switch: EnabledOption,
    #[command(flatten)]
    source: SourceOptions,
    /// File with Services and EndpointSlices to serve until the first complete sync
    #[arg(long, env = "CPROXY_BOOTSTRAP", value_name = "FILE")]
    bootstrap: Option<PathBuf>,
    #[command(flatten)]
    own: NodeOptions,
    /// cgroup2 directory whose processes are served; default: the cgroup2 root
    #[arg(long, env = "CPROXY_CGROUP", value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Do not translate calls in or below these cgroups; at most 4, separated by commas
    #[arg(long, env = "CPROXY_EXCLUDE_CGROUP", value_name = "DIR", num_args = 1.., value_delimiter = ',')]
    exclude_cgroup: Vec<PathBuf>,
    /// Do not translate calls of these users; at most 8, separated by commas
    #[arg(long, env = "CPROXY_EXCLUDE_UID", value_name = "UID", num_args = 1.., value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(..u32::MAX as i64))]
    exclude_uid: Vec<u32>,
    /// Do not translate calls to these ports; at most 8, separated by commas
    #[arg(long, env = "CPROXY_EXCLUDE_PORT", value_name = "PORT", num_args = 1.., value_delimiter = ',',
          value_parser = parse_port)]
    exclude_port: Vec<u16>,
    /// Network namespaces in which calls are not translated
    #[arg(long, env = "CPROXY_EXCLUDE_NETNS", value_name = "NAMESPACES", value_enum, default_value_t)]
    exclude_netns: ExcludedNetns,
    /// How to choose backends
    #[arg(long, env = "CPROXY_BALANCE", value_name = "METHOD", value_enum, default_value_t)]
    balance: Choice,
    /// Sockets to close when they are stale
    #[arg(long, env = "CPROXY_TERMINATE_SOCKETS", value_name = "SOCKETS", value_enum, default_value_t)]
    terminate_sockets: Terminate,
    #[command(flatten)]
    counters: CountersOption,
    /// Addresses of no Service, one of each family, by which the agent tests its own programs; `none`: no tests
    #[arg(long, env = "CPROXY_CANARY_ADDRESS", value_name = "ADDRESSES", default_value = canary::ADDRESSES)]
    canary_address: CanaryAddresses,
    /// Address of /metrics: IP:PORT, unix:///PATH or vsock://CID:PORT; default: off
    #[arg(long, env = "CPROXY_METRICS_BIND_ADDRESS", value_name = "ADDRESS")]
    metrics_bind_address: Option<ListenAddress>,
    /// Address of /healthz, /livez and /readyz, which may be the same; default: off
    #[arg(long, env = "CPROXY_HEALTHZ_BIND_ADDRESS", value_name = "ADDRESS")]
    healthz_bind_address: Option<ListenAddress>,
    #[command(flatten)]
    pin: PinDirOption,
    #[command(flatten)]
    run: RunDirOption,
    /// Least severe level to log
    #[arg(long, env = "CPROXY_LOG_LEVEL", value_name = "LEVEL", value_enum, default_value_t)]
    log_level: LogLevel,
    /// Log lines as text or as JSON objects
    #[arg(long, env = "CPROXY_LOG_FORMAT", value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Choice {
    /// Any backend, all with the same chance
    #[default]
    Random,
    /// One backend after another, which spreads few connections more evenly
    RoundRobin,
}

impl From<Choice> for Balance {
    fn from(choice: Choice) -> Self {
        match choice {
            Choice::Random => Self::Random,
            Choice::RoundRobin => Self::RoundRobin,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ExcludedNetns {
    /// None
    #[default]
    None,
    /// All but the agent's: containers, and the pods of a cluster in this machine
    Others,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Terminate {
    /// Connected UDP sockets, which would not notice otherwise
    #[default]
    Udp,
    /// UDP and TCP sockets
    All,
    /// No sockets
    None,
}

impl From<Terminate> for Mode {
    fn from(which: Terminate) -> Self {
        match which {
            Terminate::Udp => Self::Udp,
            Terminate::All => Self::All,
            Terminate::None => Self::None,
        }
    }
}

/// Level of log lines.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

impl From<LogLevel> for Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

fn parse_port(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|&port| port != 0);
    port.ok_or_else(|| "expected a port from 1 to 65535".to_owned())
}

/// Returns [`exit_codes::DISABLED`] where cproxy is disabled.
pub(super) fn run(options: RunOptions) -> anyhow::Result<ExitCode> {
    memory::limit_spare_memory();
    let log = LogFilter::start(options.log_level.into(), options.log_format);
    if let Some(reason) = options.switch.disabled() {
        return disabled(&options, &reason);
    }
    let config = config(options)?;
    tracing::info!(name: "started", "cproxy {}: {config}", env!("CARGO_PKG_VERSION"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(agent::run(config, log, reread))?;
    Ok(ExitCode::SUCCESS)
}

/// Leaves the machine as one without cproxy.
fn disabled(options: &RunOptions, reason: &str) -> anyhow::Result<ExitCode> {
    match cleanup::remove(&options.pin.pin_dir, &options.run.run_dir)? {
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
        (_, Ok(super::Command::Run(options))) => config(*options),
        (_, Ok(_)) => return Err("the command is not `run`".to_owned()),
        (_, Err(error)) => Err(error),
    };
    config.map_err(|error| super::one_line(&super::summary(&error)))
}

fn config(options: RunOptions) -> Result<Config, clap::Error> {
    let exclude = exclude(&options)?;
    Ok(Config {
        enabled: options.switch.enabled,
        source: options.source.source(),
        bootstrap: options.bootstrap,
        node: options.own.context(),
        cgroup: options.cgroup,
        exclude,
        balance: options.balance.into(),
        terminate_sockets: options.terminate_sockets.into(),
        service_counters: options.counters.service_counters.into(),
        canary: options.canary_address,
        metrics_address: options.metrics_bind_address,
        healthz_address: options.healthz_bind_address,
        pin_dir: options.pin.pin_dir,
        run_dir: options.run.run_dir,
        log_level: options.log_level.into(),
        log_format: options.log_format,
        origins: options.switch.origins,
    })
}

fn exclude(options: &RunOptions) -> Result<Exclude, clap::Error> {
    let other_netns = options.exclude_netns == ExcludedNetns::Others;
    let counts = [
        ("--exclude-cgroup", options.exclude_cgroup.len(), EXCLUDED_CGROUPS_MAX - usize::from(other_netns)),
        ("--exclude-uid", options.exclude_uid.len(), EXCLUSIONS_MAX),
        ("--exclude-port", options.exclude_port.len(), EXCLUSIONS_MAX),
    ];
    if let Some((flag, count, most)) = counts.into_iter().find(|(_, count, most)| count > most) {
        let beside = if other_netns && flag == "--exclude-cgroup" { " beside --exclude-netns" } else { "" };
        let message = format!("{flag}: {count} values; at most {most} are allowed{beside}");
        return Err(clap::Error::raw(ErrorKind::TooManyValues, message));
    }
    Ok(Exclude {
        cgroups: options.exclude_cgroup.clone(),
        uids: options.exclude_uid.clone(),
        ports: options.exclude_port.clone(),
        other_netns,
    })
}
