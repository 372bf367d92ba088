//! Log lines of the agent and the relay, and the notification of an init system.

mod log;
mod log_limit;
pub mod notify;

pub use log::{LogFilter, LogFormat};
