//! Destination that `cproxy explain` is asked about.

use std::{fmt, str::FromStr};

use cproxy_core::{Address, Frontend, Protocol, ServiceName, parse_address};

/// Destination of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// All frontends of a Service.
    Service(ServiceName),
    /// All frontends with an address.
    Address(Address),
    /// One address, port and protocol.
    Frontend(Frontend),
}

/// Reason why a text names no destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Neither address nor name.
    #[error(
        "expected ADDRESS, ADDRESS:PORT, ADDRESS:PORT/udp or NAMESPACE/NAME; an IPv6 address before a port is in []"
    )]
    Form,
    /// No port.
    #[error("{0:?} is no port from 1 to 65535")]
    Port(String),
    /// Another protocol than TCP and UDP.
    #[error("{0:?} is no protocol that cproxy translates: those are tcp and udp")]
    Protocol(String),
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let text = text.trim();
        if let Some(address) = parse_address(text) {
            return Ok(Self::Address(address));
        }
        let (front, protocol) = text.split_once('/').map_or((text, None), |(front, back)| (front, Some(back)));
        let Some((address, port)) = endpoint(front) else {
            let name = protocol.filter(|name| !front.is_empty() && is_name(front) && !name.is_empty() && is_name(name));
            return name.map(|name| Self::Service(ServiceName::new(front, name))).ok_or(TargetError::Form);
        };
        let protocol = match protocol.map(str::to_ascii_lowercase).as_deref() {
            None | Some("tcp") => Protocol::Tcp,
            Some("udp") => Protocol::Udp,
            Some(other) => return Err(TargetError::Protocol(other.to_owned())),
        };
        let number = port.parse().ok().filter(|&port| port != 0);
        let port = number.ok_or_else(|| TargetError::Port(port.to_owned()))?;
        Ok(Self::Frontend(Frontend { address, port, protocol }))
    }
}

/// Address and port of `1.2.3.4:80` and `[fd00::1]:80`.
fn endpoint(text: &str) -> Option<(Address, &str)> {
    let (host, port) = text.rsplit_once(':')?;
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let address = parse_address(v6.unwrap_or(host))?;
    (v6.is_some() || !host.contains(':')).then_some((address, port))
}

/// Whether a text may be an object's name: it has no character that none has (RFC 1123).
fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(name) => name.fmt(f),
            Self::Address(address) => address.fmt(f),
            Self::Frontend(frontend) => frontend.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_an_address_with_or_without_port_or_a_name() {
        for (text, shown) in [
            ("10.96.0.10", "10.96.0.10"),
            ("fd00::1", "fd00::1"),
            ("10.96.0.10:80", "10.96.0.10:80/TCP"),
            ("10.96.0.10:53/udp", "10.96.0.10:53/UDP"),
            ("[FD00:0::1]:80/TCP", "[fd00::1]:80/TCP"),
            ("default/web", "default/web"),
            (" kube-system/kube-dns ", "kube-system/kube-dns"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), shown);
            assert_eq!(shown.parse(), Ok(target), "{text}: as the agent reads it");
        }
    }

    #[test]
    fn another_text_is_refused_with_the_reason() {
        for text in ["", "web", "/web", "a/", "a/b/c", "a b/c", "10.96.0.10/", "fd00::1:80/tcp", "1.2.3:80"] {
            assert_eq!(text.parse::<Target>(), Err(TargetError::Form), "{text}");
        }
        for port in ["", "0", "65536", "-1", "http"] {
            let error = format!("10.96.0.10:{port}").parse::<Target>();
            assert_eq!(error, Err(TargetError::Port(port.to_owned())));
        }
        assert_eq!("10.96.0.10:80/sctp".parse::<Target>(), Err(TargetError::Protocol("sctp".to_owned())));
    }
}
