//! `cproxy get`: the kernel's table, with names where an agent is there to tell them.

use std::collections::HashMap;

use clap::{Args, ValueEnum};

use super::{Format, PinDirOption, RunDirOption, print_rows};
use crate::{
    admin,
    bpf::{PinDir, Table, unnamed_rows},
    model::Frontend,
    report::ReportRow,
};

/// Flags of `cproxy get`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// What to print
    #[arg(value_enum)]
    what: What,
    /// How to print it
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    pin: PinDirOption,
    #[command(flatten)]
    run: RunDirOption,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Frontends and their backends.
    Services,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let What::Services = options.what;
    let pins = PinDir::new(&options.pin.pin_dir);
    pins.check_installed()?;
    let kernel = Table::open(&pins)?.read()?;
    let mut rows: Vec<_> = unnamed_rows(&kernel).into_iter().collect();
    rows.sort_unstable();
    let names = names(options);
    let named = |(frontend, backends): &(Frontend, Vec<_>)| ReportRow {
        service: names.get(frontend).and_then(|row| row.service.clone()),
        port_name: names.get(frontend).and_then(|row| row.port_name.clone()),
        source: names.get(frontend).and_then(|row| row.source.clone()),
        ..ReportRow::unnamed(*frontend, backends)
    };
    print_rows(&rows.iter().map(named).collect::<Vec<_>>(), options.output)
}

/// Without an agent there are no names, and that is no error.
fn names(options: &Options) -> HashMap<Frontend, ReportRow> {
    let rows = admin::ask_services(&options.run.run_dir).unwrap_or_default();
    rows.into_iter().filter_map(|row| Some((row.frontend()?, row))).collect()
}
