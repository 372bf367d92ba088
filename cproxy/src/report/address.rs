//! Address and port of one end of a connection.

use std::{fmt, net::IpAddr};

use cproxy_core::Backend;
use serde::Serialize;
use serde_json::Value;

use super::fields::number_of;

/// Address and port in the output of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BackendAddress {
    /// IP address.
    pub address: IpAddr,
    /// Port.
    pub port: u16,
}

impl BackendAddress {
    pub(super) fn read(row: &Value) -> Option<Self> {
        Some(Self { address: address_of(row)?, port: number_of(row, "port")? })
    }
}

/// Address of a row.
pub(super) fn address_of(row: &Value) -> Option<IpAddr> {
    row.get("address")?.as_str()?.parse().ok()
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
