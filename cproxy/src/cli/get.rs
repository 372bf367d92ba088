//! `cproxy get`: the state in the kernel, with the names of Services if an agent is running.

use clap::{Args, ValueEnum};
use cproxy_core::{Frontend, KernelSet};
use cproxy_datapath::{
    bpf::{KernelReader, PinDir, read_counters},
    sockets,
};

use super::{Format, PinDirOption, RunDirOption, print, print_error, print_rows};
use crate::{
    report::{
        FrontendRow, Names, SocketRow, backend_rows, backends_json, backends_text, counters_json, counters_text,
        sockets_json, sockets_text,
    },
    run_dir::{RESPONSE_TIMEOUT, fetch_gauges, fetch_services},
};

/// Flags of `cproxy get`.
#[derive(Args, Debug)]
pub(super) struct GetOptions {
    /// State to print
    #[arg(value_enum)]
    state: View,
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    pin: PinDirOption,
    #[command(flatten)]
    run: RunDirOption,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum View {
    /// Frontends and their backends
    Services,
    /// Backends and their frontends
    Backends,
    /// Sockets connected through cproxy, and whether their backends still serve
    Sockets,
    /// Counters of the programs, and gauges of a running agent
    Counters,
}

pub(super) fn run(options: &GetOptions) -> anyhow::Result<()> {
    let pins = PinDir::new(&options.pin.pin_dir);
    pins.check_installed()?;
    match options.state {
        View::Services => services(options, &pins),
        View::Backends => backends(options, &pins),
        View::Sockets => sockets(options, &pins),
        View::Counters => counters(options, &pins),
    }
}

fn services(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let kernel = KernelReader::read_table(pins)?;
    let mut frontends: Vec<_> = kernel.frontends.into_iter().collect();
    frontends.sort_unstable();
    let names = names(options);
    let empty = KernelSet::default();
    let named = |(frontend, set): &(Frontend, u32)| {
        FrontendRow::named(*frontend, kernel.sets.get(set).unwrap_or(&empty), &names)
    };
    let others = frontends.iter().filter(|(frontend, _)| !names.is_canary(frontend));
    print_rows(others.map(named), options.output)
}

fn backends(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let names = names(options);
    let mut kernel = KernelReader::read_table(pins)?;
    kernel.frontends.retain(|frontend, _| !names.is_canary(frontend));
    let rows = backend_rows(&kernel, &names);
    print(&match options.output {
        Format::Table => backends_text(&rows),
        Format::Json => format!("{}\n", backends_json(&rows)?),
    })
}

fn sockets(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let listing = sockets::list(pins)?;
    let names = names(options);
    let rows: Vec<_> = listing.sockets.iter().map(|socket| SocketRow::new(socket, &names)).collect();
    print(&match options.output {
        Format::Table => sockets_text(&rows),
        Format::Json => format!("{}\n", sockets_json(&rows)?),
    })?;
    if listing.unseen != 0 {
        let unseen = listing.unseen;
        print_error(&format!(
            "the list may be incomplete: {unseen} network namespaces or processes could not be inspected"
        ));
    }
    Ok(())
}

fn counters(options: &GetOptions, pins: &PinDir) -> anyhow::Result<()> {
    let mut counters: Vec<_> = read_counters(pins)?.into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    // Without an agent there are no gauges, which is no error.
    counters.extend(fetch_gauges(&options.run.run_dir, RESPONSE_TIMEOUT).unwrap_or_default());
    print(&match options.output {
        Format::Table => counters_text(&counters),
        Format::Json => format!("{}\n", counters_json(&counters)?),
    })
}

/// Names from the agent; without one there are none, which is no error.
fn names(options: &GetOptions) -> Names {
    let rows = fetch_services(&options.run.run_dir, RESPONSE_TIMEOUT).unwrap_or_default();
    rows.into_iter().collect()
}
