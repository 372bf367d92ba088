//! The command line: a contract that scripts and images rely on. One file per command.

mod check;
mod cleanup;
mod exec;
mod get;
mod install;
mod reseed;
mod resolve;
mod run;
mod settings;
mod version;
mod wait;

use std::{collections::BTreeSet, ffi::OsString, fmt::Display, path::PathBuf, process::ExitCode};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum, error::ErrorKind};
use cproxy_core::{Address, NodeContext, ServiceName, parse_address, printable};

use crate::run_dir::{Failure, record_failure};

/// Exit code for wrong usage.
const EXIT_USAGE: u8 = 2;

/// Kubernetes ClusterIPs for the pod in a microVM, by socket hooks.
#[derive(Debug, Parser)]
#[command(name = "cproxy", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Follow Services and EndpointSlices and keep the kernel's table up to date
    Run(Box<run::Options>),
    /// Check whether this kernel and machine can run cproxy; changes nothing
    Check(check::Options),
    /// Wait until the table of a running agent is complete
    Wait(wait::Options),
    /// Print the state in the kernel; works without a running agent
    Get(get::Options),
    /// Print the table that manifests would give; leaves the kernel alone
    Resolve(resolve::Options),
    /// Choose backends from a new seed; for each VM restored from a snapshot
    Reseed(reseed::Options),
    /// Detach cproxy's programs and remove its pins, and nothing else
    Cleanup(cleanup::Options),
    /// Print the version
    Version,
    /// Load, attach and pin the programs, then exit; `run` does this in a child
    #[command(hide = true)]
    Install(install::Options),
}

/// The pin directory.
#[derive(Args, Debug)]
struct PinDirOption {
    /// Directory on a BPF file system where maps and links are pinned
    #[arg(long, env = "CPROXY_PIN_DIR", value_name = "DIR", default_value = "/sys/fs/bpf/cproxy")]
    pin_dir: PathBuf,
}

/// The default of `--run-dir`.
const RUN_DIR: &str = "/run/cproxy";

/// The run directory.
#[derive(Args, Debug)]
struct RunDirOption {
    /// Directory of the agent's files, such as `ready` and `cproxy.sock`
    #[arg(long, env = "CPROXY_RUN_DIR", value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

/// The node and the VM that the agent runs on.
#[derive(Args, Debug)]
struct OwnOptions {
    /// Name of this node, for local endpoints, zone hints and node ports; default: none
    #[arg(long, env = "CPROXY_NODE_NAME", value_name = "NAME", value_parser = node_name)]
    node_name: Option<String>,
    /// IP addresses of this node, on which node ports are served, separated by commas; default: the InternalIPs of its
    /// Node
    #[arg(long, env = "CPROXY_NODE_IP", value_name = "IP", num_args = 1.., value_delimiter = ',', value_parser = node_ip)]
    node_ip: Vec<Address>,
    /// IP addresses of this VM, compared with loadBalancerSourceRanges, separated by commas; default: `run` detects them,
    /// `resolve` has none, which is outside of all ranges
    #[arg(long, env = "CPROXY_POD_IP", value_name = "IP", num_args = 1.., value_delimiter = ',', value_parser = pod_ip)]
    pod_ip: Vec<Address>,
}

impl OwnOptions {
    /// The given values; an empty name, as scripts may leave it in the environment, is none.
    fn own(&self) -> NodeContext {
        NodeContext {
            node_name: self.node_name.clone().filter(|name| !name.is_empty()),
            node_ips: self.node_ip.clone(),
            pod_ips: self.pod_ip.clone(),
        }
    }
}

/// Node name without characters that have a meaning in a field selector.
fn node_name(text: &str) -> Result<String, String> {
    let belongs = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name = text.bytes().all(belongs);
    is_name.then(|| text.to_owned()).ok_or_else(|| "a node's name has letters, digits, dashes and dots".to_owned())
}

fn pod_ip(text: &str) -> Result<Address, String> {
    parse_address(text.trim()).ok_or_else(|| "not an IP address".to_owned())
}

fn node_ip(text: &str) -> Result<Address, String> {
    let address = pod_ip(text)?;
    if address.is_special() { Err("node ports cannot be served on this address".to_owned()) } else { Ok(address) }
}

fn service_name(text: &str) -> Result<ServiceName, String> {
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
        _ => Err("it looks like default/web".to_owned()),
    }
}

/// Output format.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// Aligned columns
    #[default]
    Table,
    /// JSON
    Json,
}

/// Runs one command. Errors go to stderr in one line; 1 for failure, 2 for wrong usage.
#[must_use]
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|command| command == exec::NAME) {
        // This comes before settings become variables, which the program would inherit.
        return exec::run(arguments);
    }
    forget_empty_variables();
    let settings = settings::apply(variables);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // An error in the settings goes to `cproxy wait` too, which then follows its own policy.
    if let (Err(error), Command::Run(_)) = (&settings, &cli.command) {
        return misuse(error);
    }
    let result = match cli.command {
        Command::Run(options) => run::run(*options),
        Command::Check(options) => check::run(&options),
        Command::Wait(options) => wait::run(options),
        Command::Get(options) => get::run(&options),
        Command::Resolve(options) => resolve::run(&options),
        Command::Reseed(options) => reseed::run(&options),
        Command::Cleanup(options) => cleanup::run(&options),
        Command::Version => version::run(),
        Command::Install(options) => return install::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref::<clap::Error>() {
            Some(error) => usage(error),
            None => {
                complain(&error);
                ExitCode::FAILURE
            }
        },
    }
}

/// Variables of the flags of `run` and `wait`.
fn variables() -> BTreeSet<String> {
    let cli = Cli::command();
    let commands = ["run", "wait"].into_iter().filter_map(|name| cli.find_subcommand(name));
    let arguments = commands.flat_map(clap::Command::get_arguments);
    let variables = arguments.filter_map(|argument| argument.get_env());
    variables.map(|variable| variable.to_string_lossy().into_owned()).collect()
}

/// A variable that is there and empty, as scripts and pod templates leave it, is none.
fn forget_empty_variables() {
    let is_empty =
        |(name, value): &(OsString, OsString)| value.is_empty() && name.as_encoded_bytes().starts_with(b"CPROXY_");
    for (name, _) in std::env::vars_os().filter(is_empty) {
        // SAFETY: nothing has started a thread yet.
        unsafe { std::env::remove_var(name) };
    }
}

/// Help goes to stdout as it is; of an error's many lines, the first says what is wrong.
fn usage(error: &clap::Error) -> ExitCode {
    let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // A closed stdout is no reason to complain.
        drop(error.print());
        return if asked { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) };
    }
    let text = error.to_string();
    let what: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let command = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    let command = command.filter(|word| Cli::command().find_subcommand(word).is_some());
    let help = command.map_or_else(|| "cproxy --help".to_owned(), |command| format!("cproxy {command} --help"));
    misuse(&format!("{} (see {help})", what.join(" ").trim_start_matches("error: ")))
}

/// Records in the run directory why an agent could not start, as it does for one that ends later.
fn misuse(error: &dyn Display) -> ExitCode {
    complain(error);
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|command| command == "run") {
        record_failure(&run_dir(arguments), Failure::Transient, &one_line(error));
    }
    ExitCode::from(EXIT_USAGE)
}

fn value_of(argument: &OsString) -> Option<OsString> {
    argument.to_str()?.strip_prefix("--run-dir=").map(OsString::from)
}

/// Requested run directory, even if other arguments cannot be parsed.
fn run_dir(arguments: impl Iterator<Item = OsString>) -> PathBuf {
    let mut arguments = arguments.skip_while(|argument| argument != "--run-dir" && value_of(argument).is_none());
    let flag = arguments.next();
    let next = || arguments.next().filter(|value| !value.as_encoded_bytes().starts_with(b"-"));
    let given = flag.as_ref().and_then(value_of).or_else(next);
    given.or_else(|| std::env::var_os("CPROXY_RUN_DIR")).map_or_else(|| RUN_DIR.into(), PathBuf::from)
}

fn complain(error: &dyn Display) {
    // One write for the line: on a console, parts of lines would mix with others.
    let line = format!("cproxy: {}\n", one_line(error));
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).ok();
}

fn one_line(text: &dyn Display) -> String {
    printable(&text.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Prints text that may be long; a reader that has had enough is no error.
fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn print_rows(rows: impl Iterator<Item = crate::report::FrontendRow>, format: Format) -> anyhow::Result<()> {
    use std::io::{BufWriter, ErrorKind, Write};
    if let Format::Table = format {
        return print(&crate::report::frontends_text(rows));
    }
    let mut output = BufWriter::new(std::io::stdout().lock());
    let written = crate::report::write_frontends_json(rows, &mut output).map_err(std::io::Error::from);
    match written.and_then(|()| output.write_all(b"\n")).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
