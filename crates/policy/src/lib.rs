//! Network policies: what objects say, without any I/O.

pub mod api;
mod selector;

pub use selector::{LabelSelector, LabelSelectorError};
