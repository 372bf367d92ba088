//! `cproxy get`: the state in the kernel, with the names of Services if an agent is running.

mod watch;

use std::cell::RefCell;

use anyhow::{anyhow, bail};
use clap::{
    Args, ValueEnum,
    error::{Error as UsageError, ErrorKind},
};
use cproxy_core::{Frontend, KernelSet, counted, printable, sorted_set};
use cproxy_datapath::{
    bpf::{
        KernelReader, PinDir, PolicyPins, PolicyReader, ReceivePins, ServiceCounters, read_counters, receive_counters,
    },
    sockets,
};
use cproxy_policy::Directions;
use serde::Serialize;

use super::{
    options::{Places, parse_namespace, parse_service_filter},
    output::{layout, print, print_error, print_json_rows},
};
use crate::{
    report::{
        BackendRow, CountedRow, DenialRow, FrontendRow, Layout, Names, PodPolicyRow, ProblemRow, ReceivedRow,
        ServiceFilter, SocketRow, TableRow, backend_rows, counters_json, counters_text, pretty_json, printable_lines,
        table_text,
    },
    run_dir::{
        RESPONSE_TIMEOUT, explain_silence, fetch_config, fetch_gauges, fetch_policy, fetch_problems, fetch_received,
        fetch_services,
    },
    status_http,
};

/// Flags of `cproxy get`.
#[derive(Args, Debug)]
pub(super) struct GetOptions {
    /// State to print
    #[arg(value_enum)]
    state: View,
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: GetFormat,
    /// Only rows of Services in this namespace
    #[arg(short, long, value_name = "NAMESPACE", value_parser = parse_namespace)]
    namespace: Option<String>,
    /// Only rows of the Service of this name, or of this namespace and name
    #[arg(long, value_name = "[NAMESPACE/]NAME", value_parser = parse_service_filter)]
    service: Option<String>,
    /// Then print each row of services or backends, or each counter, that changes, until interrupted
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    places: Places,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum View {
    /// Frontends and their backends
    #[value(aliases = ["service", "svc"])]
    Services,
    /// Backends and their frontends
    #[value(aliases = ["backend", "endpoints", "ep"])]
    Backends,
    /// Sockets connected through cproxy, and whether their backends still serve
    #[value(alias = "socket")]
    Sockets,
    /// Counters of the programs, and gauges of a running agent
    #[value(alias = "counter")]
    Counters,
    /// Settings of a running agent, and where each comes from
    #[value(aliases = ["settings", "setting"])]
    Config,
    /// Objects and files with a mistake, as a running agent has them
    #[value(alias = "problem")]
    Problems,
    /// Rules of the pod's network policy, as a running agent enforces them
    #[value(aliases = ["policies", "netpol"])]
    Policy,
    /// Peers that the pod's network policy has denied, the latest first
    #[value(alias = "denial")]
    Denials,
    /// Addresses and ports of load balancers that the pod receives, as a running agent has them
    #[value(aliases = ["received", "receives"])]
    Receive,
}

/// Output format of `cproxy get`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum GetFormat {
    /// Aligned columns, as many as the terminal has room for
    #[default]
    Table,
    /// Aligned columns with everything, however long
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// One name in each line
    Name,
}

pub(super) fn run(options: &GetOptions) -> anyhow::Result<()> {
    check_usage(options)?;
    // These need an agent, and no table.
    match options.state {
        View::Config => return print_config(options),
        View::Problems => return print_problems(options),
        View::Receive => return print_received(options),
        _ => {}
    }
    let pins = PinDir::new(&options.places.pin.pin_dir);
    pins.check_installed()?;
    let silence = Silence::default();
    match options.state {
        View::Services if options.watch => watch::watch(options, &pins, || services(options, &pins, &silence)),
        View::Backends if options.watch => watch::watch(options, &pins, || backends(options, &pins, &silence)),
        View::Counters if options.watch => watch::watch_counters(options, &pins, || counters(options, &pins)),
        View::Services => print_services(options, &pins),
        View::Backends => print_rows(options, backends(options, &pins, &silence)?, BackendRow::name),
        View::Sockets => print_sockets(options, &pins),
        View::Counters => print_counters(options, &pins),
        View::Config => print_config(options),
        View::Problems => print_problems(options),
        View::Receive => print_received(options),
        View::Policy => print_policy(options, &pins),
        View::Denials => print_denials(options, &pins),
    }
}

/// Flags that do not fit together.
fn check_usage(options: &GetOptions) -> Result<(), UsageError> {
    let conflict = |message: &str| Err(UsageError::raw(ErrorKind::ArgumentConflict, message));
    let is_watchable = matches!(options.state, View::Services | View::Backends | View::Counters);
    match options.output {
        _ if options.watch && !is_watchable => {
            conflict("--watch shows changes of services, backends and counters only")
        }
        GetFormat::Yaml | GetFormat::Name if options.watch => conflict("--watch prints table, wide or json"),
        _ if !has_services(options.state) && filter(options).is_set() => conflict(
            "counters, settings, problems, policy and denials are of no Service: --namespace and --service do not fit",
        ),
        _ => Ok(()),
    }
}

/// Whether the rows of a view are of Services.
fn has_services(view: View) -> bool {
    matches!(view, View::Services | View::Backends | View::Sockets | View::Receive)
}

fn filter(options: &GetOptions) -> ServiceFilter {
    ServiceFilter { namespace: options.namespace.clone(), service: options.service.clone() }
}

/// Rows of frontends in the order of the contract; each is made when it is asked for, as it may have very many
/// backends.
fn services(
    options: &GetOptions,
    pins: &PinDir,
    silence: &Silence,
) -> anyhow::Result<impl Iterator<Item = FrontendRow> + use<>> {
    let (names, filter) = (names(options, silence)?, filter(options));
    let mut kernel = KernelReader::read_table(pins)?;
    names.hide_canary(&mut kernel);
    let frontends: Vec<_> = kernel.frontends.iter().map(|(frontend, set)| (*frontend, *set)).collect();
    let empty = KernelSet::default();
    let named = move |(frontend, set): (Frontend, u32)| {
        FrontendRow::named(frontend, kernel.sets.get(&set).unwrap_or(&empty), &names)
    };
    Ok(frontends.into_iter().map(named).filter(move |row| filter.admits(row.service.as_deref())))
}

fn print_services(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let counters = ServiceCounters::read(pins)?;
    let has_counters = counters.is_some();
    let rows = services(options, pins, &Silence::default())?.map(|row| with_counts(row, counters.as_ref()));
    match options.output {
        GetFormat::Json => {
            let mut rows = rows.peekable();
            report_none(options, rows.peek().is_none());
            print_json_rows(rows)
        }
        // Several frontends have one name.
        GetFormat::Name => {
            let names = sorted_set(rows.filter_map(|row| row.service));
            report_none(options, names.is_empty());
            print(&names.iter().map(|name| format!("{}\n", printable(name))).collect::<String>())
        }
        GetFormat::Wide if has_counters => print_rows(options, rows.map(CountedRow), |_| String::new()),
        _ => print_rows(options, rows, |_| String::new()),
    }
}

/// The row with its counters, if the agent counts.
fn with_counts(row: FrontendRow, counters: Option<&ServiceCounters>) -> FrontendRow {
    let Some(counters) = counters else { return row };
    let counts = row.frontend().and_then(|frontend| counters.frontends.get(&frontend).copied());
    row.counted(counts.unwrap_or_default())
}

/// Rows of backends, each with the frontends of the Services that are shown.
fn backends(
    options: &GetOptions,
    pins: &PinDir,
    silence: &Silence,
) -> anyhow::Result<impl Iterator<Item = BackendRow> + use<>> {
    let (names, filter) = (names(options, silence)?, filter(options));
    let mut kernel = KernelReader::read_table(pins)?;
    names.hide_canary(&mut kernel);
    kernel.frontends.retain(|frontend, _| names.admits(frontend, &filter));
    Ok(backend_rows(&kernel, &names).into_iter())
}

fn print_sockets(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let listing = sockets::list(pins)?;
    let (names, filter) = (names(options, &Silence::default())?, filter(options));
    let rows = listing.sockets.iter().map(|socket| SocketRow::new(socket, &names));
    let rows: Vec<_> = rows.filter(|row| filter.admits(row.service.as_deref())).collect();
    print_rows(options, rows, SocketRow::name)?;
    if listing.unseen != 0 {
        let unseen = counted(listing.unseen.into(), "network namespace or process", "network namespaces or processes");
        print_error(&format!("the list may be incomplete: {unseen} could not be inspected"));
    }
    Ok(())
}

/// Counters of the kernel, and gauges of the agent.
fn counters(options: &GetOptions, pins: &PinDir) -> anyhow::Result<Vec<(String, u64)>> {
    let mut counters = read_counters(pins)?;
    if let Some(policy) = PolicyReader::new(PolicyPins::new(pins)) {
        counters.extend(policy.counters()?);
    }
    let received = ReceivePins::new(pins);
    if received.exist() {
        counters.extend(receive_counters(&received)?);
    }
    let mut counters: Vec<_> = counters.into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    // Without an agent there are no gauges, which is no error.
    counters.extend(fetch_gauges(&options.places.run.run_dir, RESPONSE_TIMEOUT).unwrap_or_default());
    Ok(counters)
}

fn print_counters(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let counters = counters(options, pins)?;
    print(&match options.output {
        GetFormat::Table => counters_text(&counters, None),
        GetFormat::Wide => counters_text(&counters, Some(status_http::meaning)),
        GetFormat::Json => format!("{}\n", counters_json(&counters)?),
        GetFormat::Yaml => counters.iter().map(|(name, count)| format!("{}: {count}\n", printable(name))).collect(),
        GetFormat::Name => counters.iter().map(|(name, _)| format!("{}\n", printable(name))).collect(),
    })
}

fn print_config(options: &GetOptions) -> anyhow::Result<()> {
    let run_dir = &options.places.run.run_dir;
    let rows = fetch_config(run_dir).map_err(|error| anyhow!(explain_silence(run_dir, &error)))?;
    print_rows(options, rows, |row| printable(&row.name))
}

fn print_problems(options: &GetOptions) -> anyhow::Result<()> {
    let run_dir = &options.places.run.run_dir;
    let rows = fetch_problems(run_dir).map_err(|error| anyhow!(explain_silence(run_dir, &error)))?;
    print_rows(options, rows, ProblemRow::name)
}

fn print_received(options: &GetOptions) -> anyhow::Result<()> {
    let run_dir = &options.places.run.run_dir;
    let rows = fetch_received(run_dir).map_err(|error| anyhow!(explain_silence(run_dir, &error)))?;
    let Some(rows) = rows else { bail!("nothing is received here: `cproxy run --receive` does that") };
    let filter = filter(options);
    let rows = rows.into_iter().filter(|row| filter.admits(row.service.as_deref()));
    print_rows(options, rows, ReceivedRow::name)
}

const NO_POLICY: &str = "no network policy is enforced here: `cproxy run --policy` does that";

fn print_policy(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let Some(policy) = PolicyReader::new(PolicyPins::new(pins)) else { bail!(NO_POLICY) };
    let run_dir = &options.places.run.run_dir;
    let report = match fetch_policy(run_dir) {
        Ok(report) => report,
        Err(error) => {
            let Directions { ingress, egress } = policy.state()?.directions;
            let silence = explain_silence(run_dir, &error);
            bail!(
                "a policy is in force in the kernel (ingress: {ingress}, egress: {egress}), whose rules only a running \
                 agent knows: {silence}"
            );
        }
    };
    let Some(report) = report else {
        bail!("the running agent enforces no policy (--policy off), but one is in force: `cproxy cleanup --policy-too`")
    };
    match options.output {
        GetFormat::Json => print(&format!("{}\n", pretty_json(&report)?)),
        GetFormat::Yaml => print(&yaml(&pretty_json(&report)?)?),
        GetFormat::Name => print_rows(options, report.rules, PodPolicyRow::name),
        GetFormat::Table | GetFormat::Wide => {
            print(&format!("{}\n", printable_lines(&report.heading())))?;
            print_rows(options, report.rules, PodPolicyRow::name)
        }
    }
}

fn print_denials(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let Some(policy) = PolicyReader::new(PolicyPins::new(pins)) else { bail!(NO_POLICY) };
    // Without an agent the rules have no names.
    let report = fetch_policy(&options.places.run.run_dir).ok().flatten();
    let rows = policy.denials()?;
    print_rows(options, rows.iter().map(|peer| DenialRow::new(peer, report.as_ref())), DenialRow::name)
}

/// Says, as kubectl does, that a filter has left nothing.
fn report_none(options: &GetOptions, is_empty: bool) {
    let filter = filter(options);
    if is_empty && filter.is_set() {
        print_error(&format_args!("no rows {}", filter.words()));
    }
}

/// Prints rows in the format that was asked for.
fn print_rows<R: TableRow + Serialize>(
    options: &GetOptions,
    rows: impl IntoIterator<Item = R>,
    name: impl Fn(&R) -> String,
) -> anyhow::Result<()> {
    let rows: Vec<_> = rows.into_iter().collect();
    report_none(options, rows.is_empty());
    print(&match options.output {
        GetFormat::Table => table_text(&rows, layout()),
        GetFormat::Wide => table_text(&rows, Layout::Wide),
        GetFormat::Json => format!("{}\n", pretty_json(&rows)?),
        GetFormat::Yaml => yaml(&pretty_json(&rows)?)?,
        GetFormat::Name => rows.iter().map(|row| format!("{}\n", name(row))).collect(),
    })
}

/// YAML with the fields of JSON in alphabetical order, as kubectl has them. Written from each type of row, it would
/// make the agent longer.
fn yaml(json: &str) -> anyhow::Result<String> {
    Ok(serde_saphyr::to_string(&serde_json::from_str::<serde_json::Value>(json)?)?)
}

/// Reason why there are no names of Services, which a watch prints again only if it changes.
#[derive(Default)]
struct Silence(RefCell<String>);

impl Silence {
    fn report(&self, reason: String) {
        if *self.0.borrow() != reason {
            let needs = "the rows have no names of Services, which only a running agent knows";
            print_error(&format_args!("{needs}: {reason}"));
            self.0.replace(reason);
        }
    }
}

/// Whether rows are chosen by the names of Services, or are nothing else.
fn needs_names(options: &GetOptions) -> bool {
    let is_names = options.state == View::Services && options.output == GetFormat::Name;
    filter(options).is_set() || is_names
}

/// Names from the agent; without one there are none, which is an error only where they are needed.
fn names(options: &GetOptions, silence: &Silence) -> anyhow::Result<Names> {
    match fetch_services(&options.places.run.run_dir, RESPONSE_TIMEOUT) {
        Ok(rows) => {
            silence.0.borrow_mut().clear();
            Ok(rows.into_iter().collect())
        }
        Err(error) if needs_names(options) => {
            let flag = match (&options.service, &options.namespace) {
                (Some(_), _) => "--service",
                (None, Some(_)) => "--namespace",
                (None, None) => "--output name",
            };
            let silence = explain_silence(&options.places.run.run_dir, &error);
            bail!("{flag} needs a running agent, which knows the names of Services: {silence}")
        }
        Err(error) => {
            silence.report(explain_silence(&options.places.run.run_dir, &error));
            Ok(Names::default())
        }
    }
}
