//! `cproxy resolve`

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use super::{Format, print_rows};
use crate::{
    manifests::Files,
    model::{self, Store},
    report::ReportRow,
};

/// Flags of `cproxy resolve`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Files or directories with Services and EndpointSlices
    #[arg(long, env = "CPROXY_MANIFESTS", value_name = "PATH", num_args = 1.., value_delimiter = ',', required = true)]
    manifests: Vec<PathBuf>,
    /// How to print the table
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let files = Files::read(&options.manifests)?;
    let mut store = Store::default();
    let problems: Vec<_> = files.events().into_iter().flat_map(|event| store.apply(event)).collect();
    files.problems().chain(&files.duplicates()).chain(&problems).for_each(|problem| eprintln!("cproxy: {problem}"));
    let rows: Vec<_> = model::resolve(&store).iter().map(ReportRow::from).collect();
    print_rows(&rows, options.output)?;
    if files.has_unread() {
        bail!("not all manifests could be read; the table is of the others");
    }
    Ok(())
}
