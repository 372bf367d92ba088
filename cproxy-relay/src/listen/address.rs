//! Addresses that the relay listens on.

use std::{fmt, net::ToSocketAddrs, str::FromStr};

use cproxy_daemon::ListenAddress as OwnAddress;

use crate::listen::guest_sockets::GuestSockets;

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// `HOST:PORT`, `unix:///PATH` or `vsock://CID:PORT`, where the context id is the host's (2).
    Own(OwnAddress),
    /// `unix:///PATH` with a `*`
    Guests(GuestSockets),
}

impl ListenAddress {
    /// True if nobody outside this machine and its VMs can connect.
    #[must_use]
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Self::Own(OwnAddress::Tcp(address)) => address.ip().is_loopback(),
            Self::Own(OwnAddress::Unix(_) | OwnAddress::Vsock { .. }) | Self::Guests(_) => true,
        }
    }

    /// True if two listeners can have the address: the kernel chooses each a port of its own.
    pub(crate) fn has_any_port(&self) -> bool {
        matches!(self, Self::Own(OwnAddress::Tcp(address)) if address.port() == 0)
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected HOST:PORT, unix:///PATH or vsock://CID:PORT";
        if let Some(path) = text.strip_prefix("unix://").filter(|path| path.starts_with('/') && path.contains('*')) {
            return GuestSockets::parse(path).map(Self::Guests);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Own(address));
        }
        if text.starts_with("unix://") || text.starts_with("vsock://") {
            return Err(EXPECTED.to_owned());
        }
        if text.is_empty() {
            return Err(format!("an address is empty; {EXPECTED}"));
        }
        if text.contains("://") {
            return Err(format!("{EXPECTED}; TLS follows from --tls-cert-file"));
        }
        let mut addresses = text.to_socket_addrs().map_err(|error| format!("{error}; {EXPECTED}"))?;
        let address = addresses.next().ok_or_else(|| format!("the host has no address; {EXPECTED}"))?;
        Ok(Self::Own(OwnAddress::Tcp(address)))
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(address) => address.fmt(f),
            Self::Guests(sockets) => write!(f, "unix://{}", sockets.path().display()),
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
