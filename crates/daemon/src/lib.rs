//! Common parts of the agent and the relay as processes: log lines, settings of the allocator, the notification of an
//! init system, and errors of the command line.

mod log;
mod log_limit;
pub mod memory;
pub mod notify;
mod usage;

pub use log::{LogFilter, LogFormat};
pub use usage::usage_error_line;
