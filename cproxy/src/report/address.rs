//! Address and port of one end of a connection.

use std::{fmt, net::IpAddr};

use cproxy_core::Backend;
use serde::{Deserialize, Serialize};

/// Address and port in the output of commands.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BackendAddress {
    /// IP address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
}

impl From<&Backend> for BackendAddress {
    fn from(backend: &Backend) -> Self {
        Self { address: backend.address.into(), port: backend.port }
    }
}

impl fmt::Display for BackendAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Backend { address: self.address.into(), port: self.port }.fmt(f)
    }
}
