//! Output of commands: rows in the form of the JSON contract, and as text.

mod address;
mod backends;
mod columns;
mod counters;
mod explanations;
mod frontends;
mod health;
mod names;
mod sockets;
mod source;

pub use address::BackendAddress;
pub use backends::{BackendFrontend, BackendRow, backend_rows, backends_json, backends_text};
pub use counters::{counters_json, counters_text};
pub use explanations::{explanations_json, explanations_text};
pub use frontends::{FrontendRow, frontend_names_json, frontends_text, write_frontends_json};
pub use health::{CanaryReport, HealthReport};
pub use names::Names;
pub use sockets::{SocketRow, sockets_json, sockets_text};
pub use source::SourceReport;
