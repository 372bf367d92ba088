//! `cproxy version`

use super::output::print;

pub(super) fn run() -> anyhow::Result<()> {
    print(&format!("cproxy {} (table layout {})\n", env!("CARGO_PKG_VERSION"), cproxy_datapath::LAYOUT_VERSION))
}
