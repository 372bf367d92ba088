//! Addresses that the relay listens on.

use std::{
    fmt,
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
    str::FromStr,
};

use crate::guest_sockets::GuestSockets;

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// `HOST:PORT`
    Tcp(SocketAddr),
    /// `unix:///PATH`
    Unix(PathBuf),
    /// `unix:///PATH` with a `*`
    Guests(GuestSockets),
    /// `vsock://CID:PORT`: the context id is the host's (2), or 4294967295 for any.
    Vsock {
        /// Context id of this side.
        cid: u32,
        /// Port.
        port: u32,
    },
}

impl ListenAddress {
    /// True if nobody outside this machine and its VMs can connect.
    #[must_use]
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) | Self::Guests(_) | Self::Vsock { .. } => true,
        }
    }

    /// True if two listeners can have the address: the kernel chooses each a port of its own.
    pub(crate) fn has_any_port(&self) -> bool {
        matches!(self, Self::Tcp(address) if address.port() == 0)
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected HOST:PORT, unix:///PATH or vsock://CID:PORT";
        if let Some(path) = text.strip_prefix("unix://") {
            return match path {
                _ if !path.starts_with('/') => Err(EXPECTED.to_owned()),
                _ if path.contains('*') => GuestSockets::parse(path).map(Self::Guests),
                _ => Ok(Self::Unix(path.into())),
            };
        }
        if let Some(rest) = text.strip_prefix("vsock://") {
            let parsed = rest.split_once(':').and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)));
            let (cid, port) = parsed.ok_or(EXPECTED)?;
            return Ok(Self::Vsock { cid, port });
        }
        if text.is_empty() {
            return Err(format!("an address is empty; {EXPECTED}"));
        }
        if text.contains("://") {
            return Err(format!("{EXPECTED}; TLS follows from --tls-cert-file"));
        }
        let mut addresses = text.to_socket_addrs().map_err(|error| format!("{error}; {EXPECTED}"))?;
        addresses.next().map(Self::Tcp).ok_or_else(|| format!("the host has no address; {EXPECTED}"))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Guests(sockets) => write!(f, "unix://{}", sockets.path().display()),
            Self::Vsock { cid, port } => write!(f, "vsock://{cid}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_tcp_unix_or_vsock() {
        for (text, is_local) in [
            ("127.0.0.1:6443", true),
            ("[::1]:6443", true),
            ("0.0.0.0:6443", false),
            ("[::]:6443", false),
            ("unix:///run/vm/a.sock_6443", true),
            ("unix:///run/vm/*/v.sock_6443", true),
            ("vsock://2:6443", true),
        ] {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!((address.to_string().as_str(), address.is_local()), (text, is_local));
        }
        for text in [
            "",
            "6443",
            "127.0.0.1",
            "unix://run/a",
            "unix://run/*_1",
            "unix:///run/*",
            "vsock://2",
            "vsock://a:1",
            "https://127.0.0.1:6443",
            "127.0.0.1:65536",
        ] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
    }
}
