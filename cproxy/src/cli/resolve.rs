//! `cproxy resolve`

mod policy;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::bail;
use clap::Args;
use cproxy_core::{
    self, KernelTable, ObjectName, Problem, ServiceName, Store, TablePlanner,
    api::{EndpointSlice, Service},
    sorted_set,
};
use cproxy_datapath::bpf::KernelMaps;

use self::policy::PolicyOptions;
use super::{
    options::{Format, OutputOptions, parse_service_name},
    output::{print, print_error, print_rows},
};
use crate::{
    config::{NodeNameSettings, NodeSettings},
    manifests::{Files, ManifestError, ParseOptions, WholeObject},
    report::{EndpointRow, Explained, FrontendRow, explanations_text, pretty_json},
};

/// Flags of `cproxy resolve`.
#[derive(Args, Debug)]
pub(super) struct ResolveOptions {
    /// Files or directories with objects, separated by commas; `-`: stdin
    #[arg(long, value_name = "PATH", num_args = 1.., value_delimiter = ',',
          required = true)]
    manifests: Vec<PathBuf>,
    #[command(flatten)]
    node_name: NodeNameSettings,
    #[command(flatten)]
    node: NodeSettings,
    /// Explain why each endpoint of this Service is used or not
    #[arg(long, env = "CPROXY_EXPLAIN", value_name = "NAMESPACE/NAME", value_parser = parse_service_name)]
    explain: Option<ServiceName>,
    #[command(flatten)]
    policy: PolicyOptions,
    #[command(flatten)]
    output: OutputOptions,
}

impl ResolveOptions {
    /// Reads the files.
    fn files(&self, store: &Store) -> Result<Files, ManifestError> {
        let parse_options = ParseOptions {
            node_name: store.node_name().map(str::to_owned),
            whole_service: self.explain.clone(),
            has_policies: self.policy.question().is_some(),
            has_pipes: true,
        };
        let path_of = |path: &PathBuf| if path.as_os_str() == "-" { "/dev/stdin".into() } else { path.clone() };
        Files::read(&self.manifests.iter().map(path_of).collect::<Vec<_>>(), parse_options)
    }
}

/// Exit codes: 0, or those of `--policy`.
pub(super) fn run(options: &ResolveOptions) -> anyhow::Result<ExitCode> {
    let store = Store::new(options.node.context(&options.node_name));
    let files = options.files(&store);
    match options.policy.question() {
        Some(question) => policy::run(question, files, store, options.output.output),
        None => print_table(options, &files?, store).map(|()| ExitCode::SUCCESS),
    }
}

fn print_table(options: &ResolveOptions, files: &Files, mut store: Store) -> anyhow::Result<()> {
    let problems: Vec<_> = files.events().flat_map(|event| store.apply(event)).collect();
    // Plans as the agent does, to find problems between Services.
    let mut table = TablePlanner::new(KernelMaps::LIMITS, KernelTable::default());
    drop(table.sync(&store));
    let duplicates = files.duplicates();
    let no_node = files.missing_node();
    let in_table = table.problems();
    let all = files.problems().chain(&duplicates).chain(&problems).chain(&in_table).chain(&no_node);
    let all = all.collect();
    match &options.explain {
        Some(name) => {
            let objects = Objects::of(files);
            report(&all, Some((name, &objects)));
            explain(files, &objects, &store, &table, name, options.output.output)?;
        }
        None => {
            report(&all, None);
            print_rows(table.each_row().map(|row| FrontendRow::from(&row)), options.output.output)?;
        }
    }
    if files.has_unread_file() {
        bail!("some manifests could not be read; the table is that of the others");
    }
    Ok(())
}

/// Explained Service and its slices.
#[derive(Default)]
struct Objects<'a> {
    service: Option<&'a Service>,
    slices: BTreeMap<&'a ObjectName, &'a EndpointSlice>,
}

impl<'a> Objects<'a> {
    fn of(files: &'a Files) -> Self {
        let mut objects = Self::default();
        for ((_, name), object) in files.whole_objects() {
            match object {
                WholeObject::Service(service) => objects.service = Some(service),
                WholeObject::Slice(slice) => drop(objects.slices.insert(name, slice)),
            }
        }
        objects
    }
}

/// Prints all problems; or those of one Service and its slices, and of files.
fn report(problems: &BTreeSet<&Problem>, explained: Option<(&ServiceName, &Objects<'_>)>) {
    let (shown, others): (Vec<_>, Vec<_>) = match explained {
        None => (problems.iter().collect(), Vec::new()),
        Some((name, objects)) => {
            let mut objects = sorted_set(objects.slices.keys().map(|name| format!("EndpointSlice {name}")));
            objects.insert(format!("Service {name}"));
            let is_other = |problem: &&&Problem| {
                let is_object = ["Service ", "EndpointSlice "].iter().any(|kind| problem.object.starts_with(kind));
                is_object && !objects.contains(&problem.object)
            };
            problems.iter().partition(|problem| !is_other(problem))
        }
    };
    shown.iter().for_each(|problem| print_error(problem));
    match others.len() {
        0 => {}
        1 => print_error(&"1 problem of another object is not shown; omit --explain to see it"),
        count => {
            print_error(&format_args!("{count} problems of other objects are not shown; omit --explain to see them"));
        }
    }
}

fn explain(
    files: &Files,
    objects: &Objects<'_>,
    store: &Store,
    table: &TablePlanner,
    name: &ServiceName,
    output: Format,
) -> anyhow::Result<()> {
    let Some(service) = objects.service else {
        if files.has_unreadable_service(name) {
            bail!("--explain {name}: the Service cannot be read");
        }
        bail!("--explain {name}: the manifests have no such Service");
    };
    if let Err(skipped) = cproxy_core::served_spec(service) {
        bail!("--explain {name}: the Service is not served: {skipped}");
    }
    if cproxy_core::desired_rows(store, name).is_empty() {
        bail!("--explain {name}: the Service is not served: it has no usable address and port");
    }
    let owner_of = |frontend| table.service_of(frontend).cloned();
    let slices = objects.slices.iter().map(|(name, slice)| (*name, *slice));
    let explanations = cproxy_core::explain(store, &owner_of, name, slices);
    let endpoints: Vec<_> = explanations.iter().map(EndpointRow::from).collect();
    let rows = table.rows();
    let rows: Vec<_> = rows.iter().filter(|row| row.service == *name).map(FrontendRow::from).collect();
    if rows.is_empty() {
        bail!("--explain {name}: the Service is not served: none of its addresses and ports is left to it");
    }
    match output {
        Format::Json => {
            let explained = Explained { frontends: &rows, endpoints: &endpoints };
            print(&format!("{}\n", pretty_json(&explained)?))
        }
        Format::Table => {
            print_rows(rows.into_iter(), output)?;
            print(&format!("\n{}", explanations_text(name, store.slices(name).count(), &endpoints)))
        }
    }
}
