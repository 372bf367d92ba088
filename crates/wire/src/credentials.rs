//! Servers and credentials, as kubeconfig, service account and command line name them.

pub(crate) mod configuration;
pub(crate) mod exec_plugin;
pub mod file;
pub(crate) mod kubeconfig;
pub(crate) mod setup_error;
