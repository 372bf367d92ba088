//! `cproxy resolve`

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::bail;
use clap::Args;

use super::{Format, OwnOptions, print_rows};
use crate::{
    bpf,
    manifests::Files,
    model::{self, KernelTable, Store, Table},
    report::ReportRow,
};

/// Flags of `cproxy resolve`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Files or directories with Services and EndpointSlices
    #[arg(long, env = "CPROXY_MANIFESTS", value_name = "PATH", num_args = 1.., value_delimiter = ',', required = true)]
    manifests: Vec<PathBuf>,
    #[command(flatten)]
    own: OwnOptions,
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
    let rows: Vec<_> = model::resolve(&store).iter().map(ReportRow::from).collect();
    print_rows(&rows, options.output)?;
    if files.has_unread() {
        bail!("not all manifests could be read; the table is of the others");
    }
    Ok(())
}
