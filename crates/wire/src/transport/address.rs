//! Addresses of API servers.

use std::{
    fmt,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};

use http::{
    Uri,
    uri::{Authority, InvalidUri},
};

use crate::transport::hosts;

/// Examples in messages about an address that cannot be used.
const EXPECTED: &str = "expected an address like https://10.0.0.1:6443, unix:///run/api.sock or vsock://2:6443";

/// The same about the `server` of a kubeconfig, which is always a URL.
const EXPECTED_URL: &str = "expected a URL like https://10.0.0.1:6443; --apiserver takes unix sockets and vsock";

/// Remedy for a URL with http that leaves the machine.
const IN_CLEAR: &str = "over http the token could be read on the way: use https, or http only with 127.0.0.1, [::1] or \
                        localhost";

/// Remedy for a URL with parts that requests would not have, and that logs would show.
const HAS_CREDENTIALS: &str = "a user, a password or a query in it would not be sent: remove it, and put credentials \
                               into the kubeconfig's user";

/// Reason why a text or URL is no address of an API server.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// It has none of the forms of an address.
    #[error("{}", EXPECTED)]
    Form,
    /// It is no URL of a server, and nothing else is possible.
    #[error("{}", EXPECTED_URL)]
    Url,
    /// It cannot be parsed as a URL.
    #[error("{0}; {expected}", expected = EXPECTED)]
    Syntax(InvalidUri),
    /// Requests could be read on the network.
    #[error("{}", IN_CLEAR)]
    InClear,
    /// It has parts that may be credentials.
    #[error("{}", HAS_CREDENTIALS)]
    HasCredentials,
}

/// Authority in requests that go to a local socket.
const LOCAL: &str = "localhost";

/// Address of an API server, or of a proxy or relay that stands for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServerAddress {
    /// `https://HOST:PORT`, or `http://HOST:PORT` on this machine, with a path if the server is behind one.
    Url(Uri),
    /// `unix:///PATH`: a socket of this machine.
    Unix(PathBuf),
    /// `vsock://CID:PORT`: a socket of the hypervisor's host (context id 2) or of another VM.
    Vsock {
        /// Context id.
        cid: u32,
        /// Port.
        port: u32,
    },
}

impl ServerAddress {
    /// Host and port for HTTP.
    pub(crate) fn authority(&self) -> Authority {
        let of_url = match self {
            Self::Url(url) => url.authority().cloned(),
            Self::Unix(_) | Self::Vsock { .. } => None,
        };
        of_url.unwrap_or_else(|| Authority::from_static(LOCAL))
    }

    /// Path before every request's path, without a slash at its end.
    pub(crate) fn path_prefix(&self) -> &str {
        match self {
            Self::Url(url) => url.path().trim_end_matches('/'),
            Self::Unix(_) | Self::Vsock { .. } => "",
        }
    }

    /// Host name or IP address, without brackets; `None` for a local socket.
    pub(crate) fn host(&self) -> Option<&str> {
        match self {
            Self::Url(url) => url.host().map(|host| host.trim_matches(['[', ']'])),
            Self::Unix(_) | Self::Vsock { .. } => None,
        }
    }

    /// True for sockets that do not leave the machine.
    pub(crate) fn is_local(&self) -> bool {
        self.host().is_none()
    }

    /// True if the scheme asks for TLS.
    pub(crate) fn is_https(&self) -> bool {
        matches!(self, Self::Url(url) if url.scheme_str() == Some("https"))
    }

    /// IP addresses that are known without a nameserver.
    #[must_use]
    pub fn known_addresses(&self) -> Vec<IpAddr> {
        self.host().map(|host| hosts::local_addresses(host, Path::new(hosts::ROOT))).unwrap_or_default()
    }
}

impl TryFrom<Uri> for ServerAddress {
    type Error = AddressError;

    fn try_from(url: Uri) -> Result<Self, Self::Error> {
        match is_server_url(&url) {
            true if leaves_machine_in_clear(&url) => Err(AddressError::InClear),
            true if has_credentials(&url) => Err(AddressError::HasCredentials),
            true => Ok(Self::Url(url)),
            false => Err(AddressError::Url),
        }
    }
}

impl FromStr for ServerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() { Ok(Self::Unix(path)) } else { Err(AddressError::Form) };
        }
        if let Some(rest) = text.strip_prefix("vsock://") {
            let parts = rest.trim_end_matches('/').split_once(':');
            let parsed = parts.and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)));
            let (cid, port) = parsed.ok_or(AddressError::Form)?;
            return Ok(Self::Vsock { cid, port });
        }
        let url: Uri = text.parse().map_err(AddressError::Syntax)?;
        Self::try_from(url).map_err(|error| match error {
            AddressError::Url => AddressError::Form,
            error => error,
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => url.fmt(f),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Vsock { cid, port } => write!(f, "vsock://{cid}:{port}"),
        }
    }
}

/// Whether the URL has a scheme, a host and a possible port.
fn is_server_url(url: &Uri) -> bool {
    let is_port = |port: &str| port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0);
    // `Uri` has no port if the number is too large.
    let port =
        url.authority().and_then(|authority| authority.as_str().rsplit_once(authority.host())?.1.strip_prefix(':'));
    matches!(url.scheme_str(), Some("https" | "http")) && url.host().is_some() && port.is_none_or(is_port)
}

/// Whether requests to the URL can be read on the network.
fn leaves_machine_in_clear(url: &Uri) -> bool {
    let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_here = match host.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => hosts::is_localhost(host),
    };
    url.scheme_str() == Some("http") && !is_here
}

/// Whether the URL has parts that may be credentials.
pub(crate) fn has_credentials(url: &Uri) -> bool {
    url.query().is_some() || url.authority().is_some_and(|authority| authority.as_str().contains('@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ServerAddress, String> {
        text.parse().map_err(|error: AddressError| error.to_string())
    }

    /// Error about the server of a kubeconfig.
    fn url_error(url: &'static str) -> String {
        ServerAddress::try_from(Uri::from_static(url)).unwrap_err().to_string()
    }

    #[test]
    fn a_url_has_a_scheme_a_host_and_a_possible_port() {
        for url in ["https://1.2.3.4", "http://[::1]:8080/a:b", "https://api:6443/"] {
            assert!(matches!(parse(url), Ok(ServerAddress::Url(_))), "{url}");
        }
        for url in ["1.2.3.4", "1.2.3.4:6443", "/a", "ftp://1.2.3.4", "https://1.2.3.4:65536", "https://[::1]:0", ""] {
            assert!(parse(url).unwrap_err().contains("expected an address like https://"), "{url}");
        }
    }

    #[test]
    fn credentials_in_a_url_are_refused_and_not_repeated() {
        for url in ["https://user:secret@api", "https://secret@10.0.0.1:6443/a", "https://api/?token=secret"] {
            let error = url_error(url);
            assert!(error.contains("remove it") && !error.contains("secret"), "{error}");
            assert_eq!(parse(url).unwrap_err(), error);
        }
    }

    #[test]
    fn without_tls_no_request_leaves_the_machine() {
        for url in ["http://127.0.0.1:80", "http://127.9.9.9", "http://[::1]:8080/a", "http://LocalHost:8080"] {
            assert!(parse(url).is_ok(), "{url}");
        }
        for url in
            ["http://10.0.0.1", "http://api:6443", "http://[fd00::1]", "http://127.0.0.1@api", "http://a.localhost"]
        {
            assert!(parse(url).unwrap_err().contains("use https"), "{url}");
            assert!(url_error(url).contains("use https"), "{url}");
        }
    }

    #[test]
    fn a_kubeconfig_has_a_url_and_other_addresses_are_sent_to_the_flag() {
        let error = url_error("vsock://2:6443");
        assert!(error.contains("a URL like https://") && error.contains("--apiserver"), "{error}");
    }

    #[test]
    fn local_sockets_have_a_path_or_two_numbers() {
        assert_eq!(parse("unix:///run/a b"), Ok(ServerAddress::Unix("/run/a b".into())));
        assert_eq!(parse("vsock://2:6443"), Ok(ServerAddress::Vsock { cid: 2, port: 6443 }));
        for text in ["unix://run/a", "unix://", "vsock://2", "vsock://host:1", "vsock://2:-1", "vsock:2:1"] {
            assert!(parse(text).is_err(), "{text}");
        }
        for text in ["unix:///run/a", "vsock://2:6443", "https://api:6443/"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn requests_go_to_the_host_and_below_the_path_of_the_address() {
        let of = |text| {
            let address = parse(text).unwrap();
            (address.authority().to_string(), address.path_prefix().to_owned())
        };
        assert_eq!(of("https://api:6443/clusters/a/"), ("api:6443".to_owned(), "/clusters/a".to_owned()));
        assert_eq!(of("https://[::1]"), ("[::1]".to_owned(), String::new()));
        assert_eq!(of("vsock://2:6443"), (LOCAL.to_owned(), String::new()));
    }
}
