//! What the agent and the relay have in common as processes: log lines, settings of the allocator, and the
//! notification of an init system.

mod log;
mod log_limit;
pub mod memory;
pub mod notify;

pub use log::{LogFilter, LogFormat};
