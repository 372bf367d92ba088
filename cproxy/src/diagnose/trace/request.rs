//! Calls to trace, and the output.

use std::{fmt::Display, path::PathBuf, time::Duration};

use cproxy_datapath::bpf::{Features, TraceFilter};

use crate::report::Layout;

/// Calls to trace, and where they are printed.
pub(crate) struct TraceRequest {
    pub(crate) filter: TraceFilter,
    pub(crate) features: Features,
    /// Whether sums by Service are printed each second, in place of events.
    pub(crate) is_summary: bool,
    pub(crate) is_json: bool,
    /// Space for lines of text.
    pub(crate) layout: Layout,
    /// Number of events to print; `None`: no limit.
    pub(crate) count: Option<u64>,
    pub(crate) duration: Option<Duration>,
    pub(crate) run_dir: PathBuf,
    /// Prints text. Returns false if its reader has had enough.
    pub(crate) print: fn(&str) -> anyhow::Result<bool>,
    /// Prints a line on stderr.
    pub(crate) warn: fn(&dyn Display),
}
