//! `cproxy get`: what the kernel holds, with names where an agent is there to tell them.

use std::collections::HashMap;

use clap::{Args, ValueEnum};

use super::{Format, PinDirOption, RunDirOption, print, print_rows};
use crate::{
    admin,
    bpf::{PinDir, Table, read_counters},
    model::{Frontend, KernelSet},
    report::{ReportRow, counters_json, counters_text},
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
    /// What has been counted since the programs were installed.
    Counters,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let pins = PinDir::new(&options.pin.pin_dir);
    pins.check_installed()?;
    match options.what {
        What::Services => services(options, &pins),
        What::Counters => counters(options, &pins),
    }
}

fn services(options: &Options, pins: &PinDir) -> anyhow::Result<()> {
    let kernel = Table::snapshot(pins)?;
    let mut frontends: Vec<_> = kernel.frontends.into_iter().collect();
    frontends.sort_unstable();
    let names = names(options);
    let empty = KernelSet::default();
    let named = |(frontend, set): &(Frontend, u32)| ReportRow {
        service: names.get(frontend).and_then(|row| row.service.clone()),
        port_name: names.get(frontend).and_then(|row| row.port_name.clone()),
        source: names.get(frontend).and_then(|row| row.source.clone()),
        ..ReportRow::unnamed(*frontend, kernel.sets.get(set).unwrap_or(&empty))
    };
    print_rows(&frontends.iter().map(named).collect::<Vec<_>>(), options.output)
}

fn counters(options: &Options, pins: &PinDir) -> anyhow::Result<()> {
    let mut counters: Vec<_> = read_counters(pins)?.into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    // Without an agent its own are not there, and that is no error.
    counters.extend(admin::ask_gauges(&options.run.run_dir).unwrap_or_default());
    print(&match options.output {
        Format::Table => counters_text(&counters),
        Format::Json => format!("{}\n", counters_json(&counters)?),
    })
}

/// Without an agent there are no names, and that is no error.
fn names(options: &Options) -> HashMap<Frontend, ReportRow> {
    let rows = admin::ask_services(&options.run.run_dir).unwrap_or_default();
    rows.into_iter().filter_map(|row| Some((row.frontend()?, row))).collect()
}
