//! Addresses that the relay listens on.

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    net::ToSocketAddrs,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use cproxy_daemon::ListenAddress as OwnAddress;

/// Forms of an address.
const EXPECTED: &str = "expected HOST:PORT, unix:///PATH or vsock://CID:PORT";

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// `HOST:PORT`, `unix:///PATH` or `vsock://CID:PORT`, where the context id is the host's (2).
    Own(OwnAddress),
    /// `unix:///PATH` with a `*`
    Guests(GuestPattern),
}

/// Pattern of sockets `UDS_PATH_PORT`, in which `*` stands for any characters of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestPattern {
    /// Directory above all names with a `*`, whose own path may have symbolic links.
    pub(crate) top: PathBuf,
    vm_sockets: PathBuf,
    port: u32,
}

/// Text that is no address.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AddressError {
    /// It has none of the forms.
    #[error("{EXPECTED}")]
    Form,
    /// It is empty.
    #[error("an address is empty; {EXPECTED}")]
    Empty,
    /// It has the scheme of something else.
    #[error("{EXPECTED}; TLS follows from --tls-cert-file")]
    Scheme,
    /// The host's address cannot be found.
    #[error("{0}; {EXPECTED}")]
    Host(io::Error),
    /// The host has no address.
    #[error("the host has no address; {EXPECTED}")]
    NoAddress,
    /// A pattern does not end with a port.
    #[error("a path with * must end with _PORT, as in unix:///run/vm/*/v.sock_6443")]
    PatternWithoutPort,
}

impl ListenAddress {
    /// True if only this machine and its VMs can connect.
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
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix://").filter(|path| path.starts_with('/') && path.contains('*')) {
            return path.parse().map(Self::Guests);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Own(address));
        }
        if text.starts_with("unix://") || text.starts_with("vsock://") {
            return Err(AddressError::Form);
        }
        if text.is_empty() {
            return Err(AddressError::Empty);
        }
        if text.contains("://") {
            return Err(AddressError::Scheme);
        }
        let mut addresses = text.to_socket_addrs().map_err(AddressError::Host)?;
        addresses.next().map(|address| Self::Own(OwnAddress::Tcp(address))).ok_or(AddressError::NoAddress)
    }
}

impl FromStr for GuestPattern {
    type Err = AddressError;

    /// Reads an absolute path with at least one `*`.
    fn from_str(path: &str) -> Result<Self, AddressError> {
        let parsed = path.rsplit_once('_').and_then(|(path, port)| Some((path, port.parse().ok()?)));
        let (path, port) = parsed.ok_or(AddressError::PatternWithoutPort)?;
        let has_no_star = |component: &Component<'_>| !component.as_os_str().to_string_lossy().contains('*');
        let path = Path::new(path);
        Ok(Self { top: path.components().take_while(has_no_star).collect(), vm_sockets: path.to_owned(), port })
    }
}

impl GuestPattern {
    /// The path, with `*`.
    pub(crate) fn path(&self) -> PathBuf {
        self.with_port(self.vm_sockets.as_os_str()).into()
    }

    /// Names below `top`, with `*`, of the VMs' own sockets.
    pub(crate) fn below_top(&self) -> &Path {
        self.vm_sockets.strip_prefix(&self.top).unwrap_or(&self.vm_sockets)
    }

    /// Name of the relay's socket for a VM's own one.
    pub(crate) fn with_port(&self, vm_socket: &OsStr) -> OsString {
        let mut name = vm_socket.to_owned();
        name.push(format!("_{}", self.port));
        name
    }

    /// Whether a file is named like a socket of the relay.
    pub(crate) fn is_own(&self, path: &Path) -> bool {
        path.as_os_str().as_encoded_bytes().ends_with(format!("_{}", self.port).as_bytes())
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(address) => address.fmt(f),
            Self::Guests(pattern) => write!(f, "unix://{}", pattern.path().display()),
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

    #[test]
    fn a_pattern_ends_with_a_port() {
        let pattern: GuestPattern = "/run/vm/*/v.sock_6443".parse().unwrap();
        assert_eq!((pattern.path(), pattern.top.as_path()), ("/run/vm/*/v.sock_6443".into(), Path::new("/run/vm")));
        for path in ["/run/vm/*", "/run/vm/*_", "/run/vm/*_a", "/run/vm/*_-1"] {
            let error = path.parse::<GuestPattern>().unwrap_err();
            assert!(matches!(error, AddressError::PatternWithoutPort), "{path}: {error}");
        }
    }
}
