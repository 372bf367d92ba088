//! Traffic that `cproxy resolve --policy` is asked about.

use std::{fmt, str::FromStr};

use cproxy_core::{Address, ObjectName, is_label, is_subdomain, parse_address};
use cproxy_policy::Protocol;

/// Longest name of a port.
const PORT_NAME_BYTES_MAX: usize = 15;

/// One side of the traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A pod.
    Pod(ObjectName),
    /// An address, of a pod or not.
    Address(Address),
}

/// Port of the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// Number.
    Number(u16),
    /// Name of a port of the pod's containers.
    Name(String),
}

/// Side that is called, with the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) side: Side,
    pub(crate) port: Port,
    pub(crate) protocol: Protocol,
}

/// Reason why a text names no side or no destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QuestionError {
    #[error("expected NAMESPACE/POD or an address")]
    Form,
    #[error("the namespace is missing: write NAMESPACE/{0}")]
    Namespace(String),
    #[error("{0} is no address of a host")]
    Special(Address),
    #[error("the port is missing: write {0}:PORT, such as {0}:80 or {0}:53/UDP")]
    NoPort(Side),
    #[error("a port comes after an IPv6 address in brackets, as in [fd00::1]:80")]
    Brackets,
    #[error("{0:?} is neither a port's number (1 to 65535) nor the name of one")]
    Port(String),
    #[error("{0:?} is not TCP, UDP or SCTP")]
    Protocol(String),
}

impl FromStr for Side {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, QuestionError> {
        let text = text.trim();
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).filter(|text| text.contains(':'));
        if let Some(address) = parse_address(bare.unwrap_or(text)) {
            return if address.is_special() {
                Err(QuestionError::Special(address))
            } else {
                Ok(Self::Address(address))
            };
        }
        match text.split_once('/') {
            Some((namespace, name)) if is_label(namespace) && is_subdomain(name) => {
                Ok(Self::Pod(ObjectName::new(namespace, name)))
            }
            None if is_subdomain(text) => Err(QuestionError::Namespace(text.to_owned())),
            _ => Err(QuestionError::Form),
        }
    }
}

impl FromStr for Destination {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, QuestionError> {
        let text = text.trim();
        if let Ok(side) = text.parse() {
            return Err(if text.starts_with('[') || !text.contains(':') {
                QuestionError::NoPort(side)
            } else {
                QuestionError::Brackets
            });
        }
        let (side, port) = text.rsplit_once(':').ok_or(QuestionError::Form)?;
        if side.contains(':') && !side.starts_with('[') {
            return Err(QuestionError::Brackets);
        }
        let (port, protocol) = port.split_once('/').unwrap_or((port, "TCP"));
        Ok(Self { side: side.parse()?, port: port.parse()?, protocol: parse_protocol(protocol)? })
    }
}

impl FromStr for Port {
    type Err = QuestionError;

    fn from_str(text: &str) -> Result<Self, QuestionError> {
        let is_digits = text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_digits && !text.starts_with('0')).map(Self::Number);
        let is_name = || text.len() <= PORT_NAME_BYTES_MAX && is_label(text) && !is_digits;
        let name = || is_name().then(|| Self::Name(text.to_owned()));
        number.or_else(name).ok_or_else(|| QuestionError::Port(text.to_owned()))
    }
}

fn parse_protocol(text: &str) -> Result<Protocol, QuestionError> {
    let is = |protocol: &Protocol| text.eq_ignore_ascii_case(&protocol.to_string());
    Protocol::ALL.into_iter().find(is).ok_or_else(|| QuestionError::Protocol(text.to_owned()))
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(name) => name.fmt(f),
            Self::Address(address) if address.to_string().contains(':') => write!(f, "[{address}]"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.side, self.port, self.protocol)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_a_pod_or_an_address() {
        for (text, shown) in [
            ("shop/web-0", "shop/web-0"),
            (" shop/web.0 ", "shop/web.0"),
            ("10.1.0.5", "10.1.0.5"),
            ("FD00:0::1", "[fd00::1]"),
            ("[fd00::1]", "[fd00::1]"),
        ] {
            assert_eq!(text.parse::<Side>().unwrap().to_string(), shown);
        }
        for (text, error) in [
            ("web", "the namespace is missing: write NAMESPACE/web"),
            ("127.0.0.1", "127.0.0.1 is no address of a host"),
            ("", "expected NAMESPACE/POD or an address"),
            ("a/b/c", "expected NAMESPACE/POD or an address"),
            ("shop/web:80", "expected NAMESPACE/POD or an address"),
            ("10.1.0.0/16", "expected NAMESPACE/POD or an address"),
        ] {
            assert_eq!(text.parse::<Side>().unwrap_err().to_string(), error, "{text}");
        }
    }

    #[test]
    fn a_destination_has_a_port_by_number_or_name() {
        for (text, shown) in [
            ("db/pg-0:5432", "db/pg-0:5432/TCP"),
            ("kube-system/dns:dns/udp", "kube-system/dns:dns/UDP"),
            ("db/pg:7-a/Sctp", "db/pg:7-a/SCTP"),
            ("10.1.0.5:53/UDP", "10.1.0.5:53/UDP"),
            ("[fd00::1]:80", "[fd00::1]:80/TCP"),
        ] {
            let destination: Destination = text.parse().unwrap();
            assert_eq!(destination.to_string(), shown);
            assert_eq!(shown.parse(), Ok(destination));
        }
        for (text, error) in [
            ("db/pg-0", "the port is missing: write db/pg-0:PORT, such as db/pg-0:80 or db/pg-0:53/UDP"),
            ("[fd00::1]", "the port is missing: write [fd00::1]:PORT, such as [fd00::1]:80 or [fd00::1]:53/UDP"),
            ("fd00::1", "a port comes after an IPv6 address in brackets, as in [fd00::1]:80"),
            ("fd00:1:2:3:4:5:6:7:80", "a port comes after an IPv6 address in brackets, as in [fd00::1]:80"),
            ("pg-0:80", "the namespace is missing: write NAMESPACE/pg-0"),
            ("db/pg-0:0", "\"0\" is neither a port's number (1 to 65535) nor the name of one"),
            ("db/pg-0:+80", "\"+80\" is neither a port's number (1 to 65535) nor the name of one"),
            ("db/pg-0:080", "\"080\" is neither a port's number (1 to 65535) nor the name of one"),
            ("db/pg-0:65536", "\"65536\" is neither a port's number (1 to 65535) nor the name of one"),
            ("db/pg-0:", "\"\" is neither a port's number (1 to 65535) nor the name of one"),
            ("db/pg-0:80/icmp", "\"icmp\" is not TCP, UDP or SCTP"),
            ("db/pg-0:80/", "\"\" is not TCP, UDP or SCTP"),
            ("", "expected NAMESPACE/POD or an address"),
        ] {
            assert_eq!(text.parse::<Destination>().unwrap_err().to_string(), error, "{text}");
        }
    }
}
