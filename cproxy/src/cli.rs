//! The command line: a contract that scripts and images rely on. One file per command.

mod bugreport;
mod canary;
mod check;
mod cleanup;
mod exec;
mod exit_codes;
mod explain;
mod get;
mod install;
mod manual;
mod plain;
mod reseed;
mod resolve;
mod run;
#[cfg(feature = "schema")]
mod schemas;
mod set;
mod settings;
mod terminal;
mod trace;
mod version;
mod wait;

use std::{collections::BTreeMap, env, ffi::OsString, fmt::Display, path::PathBuf, process::ExitCode};

use clap::{
    Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
    error::{ContextKind, ContextValue, ErrorKind},
};
use cproxy_core::{Address, ExternalIps, NodeContext, ServiceName, parse_address, printable};
use cproxy_daemon::usage_error_line;
use cproxy_wire::{ApiServer, ServerAddress};

#[cfg(feature = "schema")]
pub use self::schemas::schemas;
use self::settings::MachineSettings;
pub use self::{exit_codes::EXIT_CODES, manual::manual};
use crate::{
    config::{ObjectSource, ServiceCounting},
    privileges,
    report::{FrontendRow, table_text, write_frontends_json},
    run_dir::{Failure, record_failure},
};

/// Length of a line or value that an error shows.
const SHOWN_CHARS_MAX: usize = 80;

/// End of the help of commands whose help has no room for each flag's variable.
const SETTINGS_HELP: &str = "\
Each flag can also be set in the environment (CPROXY_RUN_DIR for --run-dir), as a kernel parameter
(cproxy.run-dir=DIR) or in /etc/cproxy/cproxy.conf: see docs/reference.md";

/// Makes Kubernetes Services work for the pod in a microVM.
#[derive(Debug, Parser)]
#[command(name = "cproxy", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Follow Services and EndpointSlices and keep the kernel's table up to date
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Run(Box<run::RunOptions>),
    /// Check whether cproxy can run on this kernel and machine, without changing them
    Check(check::CheckOptions),
    /// Wait until the table of a running agent is complete
    #[command(next_line_help = true, mut_args(without_shown_variable), after_help = SETTINGS_HELP)]
    Wait(wait::WaitOptions),
    /// Print the state in the kernel, with or without a running agent
    Get(get::GetOptions),
    /// Explain what a call to an address or a Service gets now, and why
    Explain(explain::ExplainOptions),
    /// Print each call that is translated, refused or dropped, as it happens
    Trace(trace::TraceOptions),
    /// Print the table for manifests, without touching the kernel
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
    Version,
    /// Load, attach and pin the programs; `run` does this in a child process
    #[command(hide = true)]
    Install(install::InstallOptions),
    /// Walk the canary in the cgroup whose `cgroup.procs` is stdin; `run` does this in a child process
    #[command(hide = true)]
    Canary(canary::CanaryOptions),
}

/// The pin directory.
#[derive(Args, Debug)]
struct PinDirOption {
    /// Directory on a BPF file system for pinned maps and links
    #[arg(long, env = "CPROXY_PIN_DIR", value_name = "DIR", default_value = "/sys/fs/bpf/cproxy")]
    pin_dir: PathBuf,
}

/// The run directory.
#[derive(Args, Debug)]
struct RunDirOption {
    /// Directory for the agent's files, such as `ready` and `cproxy.sock`
    #[arg(long, env = "CPROXY_RUN_DIR", value_name = "DIR", default_value = "/run/cproxy")]
    run_dir: PathBuf,
}

/// Counters by Service.
#[derive(Args, Debug)]
struct CountersOption {
    /// Count calls by Service, for `cproxy get services -o wide` and metrics; each call then costs more
    #[arg(long, env = "CPROXY_SERVICE_COUNTERS", value_name = "on|off", value_enum, num_args = 0..=1,
          default_missing_value = "on", default_value_t)]
    service_counters: Switch,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Switch {
    #[default]
    Off,
    On,
}

impl From<Switch> for ServiceCounting {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::Off => Self::Off,
            Switch::On => Self::On,
        }
    }
}

/// Switch of a machine that has cproxy in its image.
#[derive(Args, Debug)]
struct EnabledOption {
    /// Whether cproxy does anything on this machine: if not, `run` removes what an earlier start has left, and ends
    #[arg(long, env = "CPROXY_ENABLED", value_name = "true|false", default_value_t = true, action = ArgAction::Set)]
    enabled: bool,
    /// Where flags got their values, by the name of the flag
    #[arg(skip)]
    origins: BTreeMap<String, String>,
}

impl EnabledOption {
    /// Reason why cproxy does nothing here, if it does not.
    fn disabled(&self) -> Option<String> {
        let place = self.origins.get("enabled").map_or_else(String::new, |place| format!(", {place}"));
        (!self.enabled).then(|| format!("cproxy is disabled on this machine (enabled = false{place})"))
    }
}

/// Source of Services and EndpointSlices.
#[derive(Args, Debug)]
struct SourceOptions {
    /// Kubeconfig of the API server to follow; default: the pod's ServiceAccount
    #[arg(long, env = "CPROXY_KUBECONFIG", value_name = "FILE", conflicts_with = "manifests")]
    kubeconfig: Option<PathBuf>,
    /// Files or directories to follow instead of an API server, separated by commas
    #[arg(long, env = "CPROXY_MANIFESTS", value_name = "PATH", num_args = 1.., value_delimiter = ',',
          conflicts_with_all = ["kubeconfig", "apiserver", "tls_server_name"])]
    manifests: Vec<PathBuf>,
    /// Real addresses of API servers, best first: https://HOST, unix:///PATH, vsock://CID:PORT
    #[arg(long, env = "CPROXY_APISERVER", value_name = "URL", num_args = 1.., value_delimiter = ',',
          conflicts_with = "manifests")]
    apiserver: Vec<ServerAddress>,
    /// Name expected in the API server's certificate; default: from kubeconfig or URL
    #[arg(long, env = "CPROXY_TLS_SERVER_NAME", value_name = "NAME", conflicts_with = "manifests")]
    tls_server_name: Option<String>,
}

impl SourceOptions {
    fn source(&self) -> ObjectSource {
        if self.manifests.is_empty() {
            ObjectSource::ApiServer(ApiServer {
                kubeconfig: self.kubeconfig.clone(),
                addresses: self.apiserver.clone(),
                tls_server_name: self.tls_server_name.clone(),
            })
        } else {
            ObjectSource::Manifests(self.manifests.clone())
        }
    }
}

/// Name of the node.
#[derive(Args, Debug)]
struct NodeNameOption {
    /// Name of this node, for local endpoints, zone hints and node ports
    #[arg(long, env = "CPROXY_NODE_NAME", value_name = "NAME", value_parser = parse_node_name)]
    node_name: Option<String>,
}

impl NodeNameOption {
    /// The given name. An empty one, as scripts may leave it in a flag, counts as absent.
    fn name(&self) -> Option<String> {
        self.node_name.clone().filter(|name| !name.is_empty())
    }
}

/// Node and VM that the agent runs on.
#[derive(Args, Debug)]
struct NodeOptions {
    #[command(flatten)]
    name: NodeNameOption,
    /// Addresses of this node that serve node ports, separated by commas; default: from its Node
    #[arg(long, env = "CPROXY_NODE_IP", value_name = "IP", num_args = 1.., value_delimiter = ',',
          value_parser = parse_node_ip)]
    node_ip: Vec<Address>,
    /// Addresses of this VM for loadBalancerSourceRanges, separated by commas; detected by `run`
    #[arg(long, env = "CPROXY_POD_IP", value_name = "IP", num_args = 1.., value_delimiter = ',',
          value_parser = parse_ip)]
    pod_ip: Vec<Address>,
    /// Use of `spec.externalIPs`, which whoever may write a Service can set to any address
    #[arg(long, env = "CPROXY_EXTERNAL_IPS", value_name = "USE", value_enum, default_value_t)]
    external_ips: ExternalIpUse,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum ExternalIpUse {
    /// Serve them, except on ClusterIPs and on addresses of this VM
    #[default]
    Serve,
    /// Do not serve them
    Ignore,
}

impl From<ExternalIpUse> for ExternalIps {
    fn from(external_ips: ExternalIpUse) -> Self {
        match external_ips {
            ExternalIpUse::Serve => Self::Serve,
            ExternalIpUse::Ignore => Self::Ignore,
        }
    }
}

impl NodeOptions {
    /// The given values.
    fn context(&self) -> NodeContext {
        NodeContext {
            node_name: self.name.name(),
            node_ips: self.node_ip.clone(),
            pod_ips: self.pod_ip.clone(),
            external_ips: self.external_ips.into(),
        }
    }
}

/// Node name without characters that have a meaning in a field selector.
fn parse_node_name(text: &str) -> Result<String, String> {
    let belongs = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name = text.bytes().all(belongs);
    is_name
        .then(|| text.to_owned())
        .ok_or_else(|| "a node's name has only letters, digits, dashes, dots and underscores".to_owned())
}

fn parse_ip(text: &str) -> Result<Address, String> {
    parse_address(text.trim()).ok_or_else(|| "not an IP address".to_owned())
}

fn parse_node_ip(text: &str) -> Result<Address, String> {
    let address = parse_ip(text)?;
    if address.is_special() { Err("node ports cannot be served on this address".to_owned()) } else { Ok(address) }
}

fn parse_service_name(text: &str) -> Result<ServiceName, String> {
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
enum Format {
    /// Aligned columns
    #[default]
    #[value(aliases = ["wide", "name"])]
    Table,
    /// JSON
    #[value(alias = "yaml")]
    Json,
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
    let (cli, command) = read();
    let result = command.map_err(anyhow::Error::from).and_then(execute);
    match result {
        Ok(code) => code,
        Err(error) => match error.downcast_ref() {
            Some(usage) => report_usage(usage, &cli),
            None => {
                print_error(&error);
                ExitCode::FAILURE
            }
        },
    }
}

/// Reads the command line, and the settings of the environment and of the machine.
fn read() -> (clap::Command, Result<Command, clap::Error>) {
    let cli = Cli::command().mut_subcommands(|command| command.mut_args(without_empty_variable));
    // `exec` starts programs, whatever the settings are.
    let is_exec = env::args_os().nth(1).is_some_and(|name| name == "exec");
    let (mut cli, settings) = if is_exec { (cli, MachineSettings::default()) } else { settings::with_settings(cli) };
    let command = parse(&mut cli, settings);
    (cli, command)
}

/// An empty variable, as scripts and pod templates leave it, counts as absent.
fn without_empty_variable(flag: Arg) -> Arg {
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
    let origins = given.map(|(command, matches)| settings::origins(command, matches, &settings.valid));
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
        Command::Check(options) => options.switch.origins = origins,
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
        Command::Get(options) => get::run(&options)?,
        Command::Explain(options) => return explain::run(options),
        Command::Trace(options) => trace::run(&options)?,
        Command::Resolve(options) => resolve::run(&options)?,
        Command::Set(options) => set::run(&options)?,
        Command::Bugreport(options) => bugreport::run(&options)?,
        Command::Reseed(options) => reseed::run(&options)?,
        Command::Cleanup(options) => cleanup::run(&options)?,
        Command::Version => version::run()?,
        Command::Exec(options) => return Ok(exec::run(&options)),
        Command::Install(options) => return Ok(install::run(&options)),
        Command::Canary(options) => canary::run(&options)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints help where it is due, and otherwise one line. For `cproxy wait`, the run directory records why an agent did
/// not start.
fn report_usage(error: &clap::Error, cli: &clap::Command) -> ExitCode {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if let DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand = error.kind() {
        // A closed stdout is no error.
        drop(error.print());
        return if error.use_stderr() { ExitCode::from(exit_codes::USAGE) } else { ExitCode::SUCCESS };
    }
    let command = env::args_os().nth(1).and_then(|name| cli.find_subcommand(name));
    let name = command.map_or_else(String::new, |command| format!("{} ", command.get_name()));
    let message = format!("{} (see cproxy {name}--help)", summary(error));
    print_error(&message);
    if let Some(run) = command.filter(|command| command.get_name() == "run") {
        record_failure(&run_dir(run, env::args_os().skip(2)), Failure::Transient, &one_line(&message));
    }
    ExitCode::from(exit_codes::USAGE)
}

/// First paragraph of an error, which says what is wrong, in one line. A long value is shortened.
fn summary(error: &clap::Error) -> String {
    let mut text = error.to_string();
    if let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) {
        text = text.replacen(value, &shorten(value), 1);
    }
    usage_error_line(&text)
}

/// Requested run directory, even if other arguments cannot be parsed.
fn run_dir(run: &clap::Command, arguments: impl Iterator<Item = OsString>) -> PathBuf {
    let value_of = |argument: &OsString| argument.to_str()?.strip_prefix("--run-dir=").map(OsString::from);
    let mut arguments = arguments.skip_while(|argument| argument != "--run-dir" && value_of(argument).is_none());
    let flag = arguments.next();
    let next = || arguments.next().filter(|value| !value.as_encoded_bytes().starts_with(b"-"));
    let option = run.get_arguments().find(|argument| argument.get_long() == Some("run-dir"));
    let variable = || option?.get_env().and_then(env::var_os);
    let default = || Some(option?.get_default_values().first()?.to_os_string());
    let given = flag.as_ref().and_then(value_of).or_else(next).or_else(variable).or_else(default);
    given.unwrap_or_default().into()
}

/// Part of a text that an error shows. A URL is without user, password and query, which may be secret: errors are
/// logged, and recorded in the run directory.
fn shorten(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.chars().take(SHOWN_CHARS_MAX).collect() };
    let rest = rest.split('?').next().unwrap_or_default();
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    format!("{scheme}://{rest}").chars().take(SHOWN_CHARS_MAX).collect()
}

fn print_error(error: &dyn Display) {
    // One write for the line: on a console, parts of lines would mix with others.
    let line = format!("cproxy: {}\n", one_line(error));
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).ok();
}

fn one_line(text: &dyn Display) -> String {
    printable(&text.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Prints text that may be long; a reader that has had enough is no error.
fn print(text: &str) -> anyhow::Result<()> {
    print_or_end(text).map(drop)
}

/// Refuses the id of a process that does not exist.
fn check_process(pid: u32) -> Result<(), clap::Error> {
    if std::path::Path::new("/proc").join(pid.to_string()).exists() {
        return Ok(());
    }
    let message = format!("--pid {pid}: there is no such process in this PID namespace");
    Err(clap::Error::raw(ErrorKind::ValueValidation, message))
}

/// Prints text that may be long. Returns false if its reader has had enough.
fn print_or_end(text: &str) -> anyhow::Result<bool> {
    use std::io::{ErrorKind, Write};
    match plain::Plain(std::io::stdout().lock()).write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        printed => printed.map(|()| true).map_err(|error| unwritten(&error)),
    }
}

fn print_rows(rows: impl Iterator<Item = FrontendRow>, format: Format) -> anyhow::Result<()> {
    match format {
        Format::Table => print(&table_text(&rows.collect::<Vec<_>>(), terminal::layout())),
        Format::Json => print_json_rows(rows),
    }
}

/// Prints one row after the other, as there may be very many.
fn print_json_rows(rows: impl Iterator<Item = FrontendRow>) -> anyhow::Result<()> {
    use std::io::{BufWriter, ErrorKind, Write};
    let mut output = plain::Plain(BufWriter::new(std::io::stdout().lock()));
    let written = write_frontends_json(rows, &mut output).map_err(std::io::Error::from);
    match written.and_then(|()| output.write_all(b"\n")).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(unwritten(&error)),
        _ => Ok(()),
    }
}

fn unwritten(error: &std::io::Error) -> anyhow::Error {
    anyhow::anyhow!("cannot write to stdout: {error}")
}
