//! `cproxy version`

use cproxy_datapath::LAYOUT_VERSION;

use super::{
    options::{Format, OutputOptions},
    output::print,
};

pub(super) fn run(options: &OutputOptions) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    print(&match options.output {
        Format::Table => format!("cproxy {version} (table layout {LAYOUT_VERSION})\n"),
        Format::Json => format!("{{\"version\": \"{version}\", \"table_layout\": {LAYOUT_VERSION}}}\n"),
    })
}
