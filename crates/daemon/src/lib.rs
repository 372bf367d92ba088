//! Common parts of the agent and the relay as processes: log lines, settings of the allocator, the notification of an
//! init system, output of commands, background tasks, and the server for metrics and health checks.

mod exposition;
mod file_changes;
mod json_lines;
mod listen_address;
mod log;
mod log_limit;
mod log_output;
pub mod memory;
pub mod notify;
mod os_codes;
mod recent_lines;
mod status_server;
mod stdout;
mod tasks;
mod terminal;
pub mod unix_socket;
mod usage;

pub use exposition::{Exposition, Histogram, MetricKind, MetricsFormat};
pub use file_changes::FileChanges;
pub use listen_address::ListenAddress;
pub use log::{LogFilter, LogFormat};
pub use log_output::{log_lines_left_out, write_stderr_line};
pub use os_codes::without_os_codes;
pub use status_server::{StatusListener, StatusRequest, StatusResponse};
pub use stdout::{write_stderr, write_stdout};
pub use tasks::Tasks;
pub use terminal::terminal_columns;
pub use usage::{hanging, help_columns, usage_error_line, variable_prefix, wrapped_help};
