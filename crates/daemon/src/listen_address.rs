//! Addresses to listen on.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr};

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// `IP:PORT`
    Tcp(SocketAddr),
    /// `unix:///PATH`
    Unix(PathBuf),
    /// `vsock://CID:PORT`: the context id is this machine's, or 4294967295 for any.
    Vsock {
        /// Context id of this side.
        cid: u32,
        /// Port.
        port: u32,
    },
}

impl ListenAddress {
    /// Forms of an address, for errors.
    pub const EXPECTED: &str = "expected IP:PORT, unix:///PATH or vsock://CID:PORT";
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = if let Some(path) = text.strip_prefix("unix://") {
            path.starts_with('/').then(|| Self::Unix(path.into()))
        } else if let Some(rest) = text.strip_prefix("vsock://") {
            let numbers = rest.split_once(':').and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)));
            numbers.map(|(cid, port)| Self::Vsock { cid, port })
        } else {
            text.parse().ok().map(Self::Tcp)
        };
        parsed.ok_or_else(|| Self::EXPECTED.to_owned())
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Vsock { cid, port } => write!(f, "vsock://{cid}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_tcp_unix_or_vsock() {
        for text in ["127.0.0.1:10249", "[::1]:10256", "0.0.0.0:0", "unix:///run/a.sock", "vsock://4294967295:10249"] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for text in
            ["", "10249", "127.0.0.1", "localhost:1", "unix://run/a", "vsock://2", "vsock://a:1", "http://127.0.0.1:1"]
        {
            assert_eq!(text.parse::<ListenAddress>(), Err(ListenAddress::EXPECTED.to_owned()), "{text}");
        }
    }
}
