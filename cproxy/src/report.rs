//! Output of commands: rows in the form of the JSON contract, and as text.

mod address;
mod backends;
mod columns;
mod counters;
mod denials;
mod explanations;
mod filter;
mod frontends;
mod health;
mod names;
mod one_line;
mod policy;
mod problems;
mod screen;
mod services;
mod settings;
mod sockets;
mod source;
mod table;
mod time;
mod trace;

pub use address::BackendAddress;
pub use backends::{BackendFrontend, BackendRow, backend_rows};
pub use counters::{counters_json, counters_text};
pub use denials::DenialRow;
pub use explanations::{EndpointRow, Explained, explanations_text};
pub use filter::ServiceFilter;
pub use frontends::{CountedRow, FrontendRow, frontend_names_json, write_frontends_json};
pub use health::{CanaryReport, HealthReport};
pub use names::Names;
pub use policy::{PolicyAnswer, PolicyPair, PolicyVerdict};
pub use problems::ProblemRow;
pub use screen::{Colour, Screen};
pub use services::{AgentReport, ChangeRow, EXTERNAL_NAME, HEADLESS, ServiceReport, UnservedReport};
pub use sockets::SocketRow;
pub use source::SourceReport;
pub use table::{Cell, Column, Fitted, Layout, TableRow, table_text};
pub use trace::{SummaryRow, TraceRow, summary_rows, summary_text, trace_header};

pub(crate) use columns::printable_lines;
pub(crate) use explanations::{endpoints_text, missing_slice};
pub(crate) use one_line::one_line;
pub(crate) use policy::{ALLOWED, DENIED, common_verdict};
pub(crate) use time::time;
