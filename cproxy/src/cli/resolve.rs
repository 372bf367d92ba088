//! `cproxy resolve`

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::bail;
use clap::Args;

use super::{Format, OwnOptions, print, print_rows};
use crate::{
    bpf,
    manifests::Files,
    model::{self, KernelTable, ServiceName, Store, Table},
    report::{ReportRow, explanations_json, explanations_text},
};

/// Flags of `cproxy resolve`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Files or directories with Services, EndpointSlices and Nodes
    #[arg(long, env = "CPROXY_MANIFESTS", value_name = "PATH", num_args = 1.., value_delimiter = ',', required = true)]
    manifests: Vec<PathBuf>,
    #[command(flatten)]
    own: OwnOptions,
    /// Say of each endpoint of this Service which rule takes it in or leaves it out
    #[arg(long, env = "CPROXY_EXPLAIN", value_name = "NAMESPACE/NAME", value_parser = service_name)]
    explain: Option<ServiceName>,
    /// How to print the table
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let files = Files::read(&options.manifests)?;
    let mut store = Store::new(options.own.own());
    let problems: Vec<_> = files.events().into_iter().flat_map(|event| store.apply(event)).collect();
    // As the agent does it, for what only shows when the Services are put together.
    let mut table = Table::new(bpf::Table::LIMITS, KernelTable::default());
    drop(table.sync(&store));
    let duplicates = files.duplicates();
    let all: BTreeSet<_> = files.problems().chain(&duplicates).chain(&problems).chain(table.problems()).collect();
    all.iter().for_each(|problem| eprintln!("cproxy: {problem}"));
    match &options.explain {
        Some(name) => explain(&files, &store, &table, name, options.output)?,
        None => {
            let rows: Vec<_> = table.rows().iter().map(ReportRow::from).collect();
            print_rows(&rows, options.output)?;
        }
    }
    if files.has_unread() {
        bail!("not all manifests could be read; the table is of the others");
    }
    Ok(())
}

fn service_name(text: &str) -> Result<ServiceName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err("it looks like default/web".to_owned()),
    }
}

fn explain(files: &Files, store: &Store, table: &Table, name: &ServiceName, output: Format) -> anyhow::Result<()> {
    let services = files.services();
    let Some(service) = services.get(name) else {
        if files.has_unreadable_service(name) {
            bail!("--explain {name}: the Service cannot be read");
        }
        bail!("--explain {name}: the manifests have no such Service");
    };
    if let Err(skipped) = model::served_spec(service) {
        bail!("--explain {name}: the Service is not served: {skipped}");
    }
    let slices = files.slices();
    let explanations = model::explain(store, name, slices.iter().map(|(name, slice)| (name, *slice)));
    match output {
        Format::Json => print(&format!("{}\n", explanations_json(name, &explanations)?)),
        Format::Table => {
            let rows = table.rows();
            let rows: Vec<_> = rows.iter().filter(|row| row.service == *name).map(ReportRow::from).collect();
            print_rows(&rows, output)?;
            print(&format!("\n{}", explanations_text(&explanations)))
        }
    }
}
