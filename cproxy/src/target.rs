//! Destination that `cproxy explain` is asked about.

use std::{fmt, str::FromStr};

use cproxy_core::{Address, Frontend, Protocol, ServiceName, is_label, parse_address};

/// Length of what is no port that an error shows.
const PORT_CHARS_MAX: usize = 20;

/// Destination of calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// All frontends of a Service, or those with a port.
    Service(ServiceName, Option<TargetPort>),
    /// All frontends with an address.
    Address(Address),
    /// One address, port and protocol.
    Frontend(Frontend),
}

/// Port of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetPort {
    /// Number.
    pub number: u16,
    /// Protocol; any without one.
    pub protocol: Option<Protocol>,
}

/// Reason why a text names no destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Neither address nor name.
    #[error(
        "expected an address (10.96.0.10, 10.96.0.10:80, 10.96.0.10:53/udp, [fd00::1]:80) or a Service (default/web, \
         web.default, web.default.svc.cluster.local, default/web:80)"
    )]
    Form,
    /// A name without its namespace.
    #[error("the namespace is missing: write NAMESPACE/{0}")]
    Namespace(String),
    /// Name of a pod of a headless Service.
    #[error("this is the name of a pod, which is called directly; its Service is {0}")]
    Pod(ServiceName),
    /// A protocol without a port.
    #[error("a protocol needs a port: {0}:PORT/udp")]
    NoPort(Address),
    /// No port.
    #[error("{0:?} is not a port (1 to 65535)")]
    Port(String),
    /// Another protocol than TCP and UDP.
    #[error("cproxy does not translate {0:?}, only tcp and udp")]
    Protocol(String),
}

impl TargetPort {
    /// Whether a frontend has the port.
    #[must_use]
    pub fn is_of(&self, frontend: &Frontend) -> bool {
        frontend.port == self.number && self.protocol.is_none_or(|protocol| protocol == frontend.protocol)
    }
}

impl Target {
    /// Destination of an address or a Service, and a port that stands apart, as in `nc 10.96.0.10 80`.
    ///
    /// # Errors
    /// The texts name no destination.
    pub fn with_port(text: &str, port: &str) -> Result<Self, TargetError> {
        match parse_address(text) {
            Some(address) if text.contains(':') => format!("[{address}]:{port}").parse(),
            _ => format!("{text}:{port}").parse(),
        }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let text = text.trim();
        for (scheme, port) in [("http://", "80"), ("https://", "443")] {
            if let Some(rest) = text.strip_prefix(scheme) {
                let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
                let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
                return if has_port { host.parse() } else { format!("{host}:{port}").parse() };
            }
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).filter(|text| text.contains(':'));
        if let Some(address) = parse_address(bare.unwrap_or(text)) {
            return Ok(Self::Address(address));
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return match text.split_once('/').and_then(|(front, _)| parse_address(front)) {
                Some(address) => Err(TargetError::NoPort(address)),
                None => Ok(Self::Service(service_name(text)?, None)),
            };
        };
        let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let address = parse_address(v6.unwrap_or(host)).filter(|_| v6.is_some() || !host.contains(':'));
        if address.is_none() && (v6.is_some() || host.contains(':')) {
            return Err(TargetError::Form);
        }
        let port = target_port(port)?;
        Ok(match address {
            Some(address) => {
                let protocol = port.protocol.unwrap_or(Protocol::Tcp);
                Self::Frontend(Frontend { address, port: port.number, protocol })
            }
            None => Self::Service(service_name(host)?, Some(port)),
        })
    }
}

/// Port of `80` and `53/udp`.
fn target_port(text: &str) -> Result<TargetPort, TargetError> {
    let (port, protocol) = text.split_once('/').map_or((text, None), |(port, protocol)| (port, Some(protocol)));
    let protocol = match protocol.map(str::to_ascii_lowercase).as_deref() {
        None => None,
        Some("tcp") => Some(Protocol::Tcp),
        Some("udp") => Some(Protocol::Udp),
        Some(other) => return Err(TargetError::Protocol(other.to_owned())),
    };
    let number = port.parse().ok().filter(|&port| port != 0);
    Ok(TargetPort {
        number: number.ok_or_else(|| TargetError::Port(port.chars().take(PORT_CHARS_MAX).collect()))?,
        protocol,
    })
}

/// Service of `default/web`, or of its name in DNS with or without the cluster's domain.
fn service_name(text: &str) -> Result<ServiceName, TargetError> {
    if text.contains('/') {
        return ServiceName::of_service(text).ok_or(TargetError::Form);
    }
    let text = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let labels: Vec<_> = text.split('.').collect();
    if !labels.iter().all(|label| is_label(label)) {
        return Err(TargetError::Form);
    }
    match labels.as_slice() {
        [name] => Err(TargetError::Namespace((*name).to_owned())),
        [name, namespace] | [name, namespace, "svc", ..] => Ok(ServiceName::new(namespace, *name)),
        [_, name, namespace, "svc", ..] => Err(TargetError::Pod(ServiceName::new(namespace, *name))),
        _ => Err(TargetError::Form),
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(name, None) => name.fmt(f),
            Self::Service(name, Some(TargetPort { number, protocol: None })) => write!(f, "{name}:{number}"),
            Self::Service(name, Some(TargetPort { number, protocol: Some(protocol) })) => {
                write!(f, "{name}:{number}/{protocol}")
            }
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
            ("[fd00::1]", "fd00::1"),
            ("10.96.0.10:80", "10.96.0.10:80/TCP"),
            ("10.96.0.10:53/udp", "10.96.0.10:53/UDP"),
            ("[FD00:0::1]:80/TCP", "[fd00::1]:80/TCP"),
            ("default/web", "default/web"),
            (" kube-system/kube-dns ", "kube-system/kube-dns"),
            ("default/web:80", "default/web:80"),
            ("web.default", "default/web"),
            ("Web.Default.svc", "default/web"),
            ("web.default.svc.cluster.local", "default/web"),
            ("web.default.svc.cluster.local.", "default/web"),
            ("web.default.svc.example.org:53/udp", "default/web:53/UDP"),
            ("default/udp", "default/udp"),
            ("http://203.0.113.9", "203.0.113.9:80/TCP"),
            ("https://[fd00::1]/a/b", "[fd00::1]:443/TCP"),
            ("http://web.default:8080/?q", "default/web:8080"),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), shown);
            assert_eq!(shown.parse(), Ok(target), "{text}: as the agent reads it");
        }
    }

    #[test]
    fn a_port_may_stand_apart() {
        for (text, port, shown) in [
            ("10.96.0.10", "80", "10.96.0.10:80/TCP"),
            ("fd00::1", "53/udp", "[fd00::1]:53/UDP"),
            ("web.default", "80", "default/web:80"),
        ] {
            assert_eq!(Target::with_port(text, port).map(|target| target.to_string()).as_deref(), Ok(shown));
        }
        assert_eq!(Target::with_port("10.96.0.10:80", "80"), Err(TargetError::Form));
    }

    #[test]
    fn another_text_is_refused_with_the_reason() {
        let long = "x".repeat(64);
        for text in
            ["", "/web", "a/", "a/b/c", "a b/c", "fd00::1:80/tcp", "1.2.3:80", "a.b/c", "a/b.c", "www.example.org"]
                .into_iter()
                .chain([&*format!("a/{long}"), &*format!("{long}.a")])
        {
            assert_eq!(text.parse::<Target>(), Err(TargetError::Form), "{text}");
        }
        for port in ["", "0", "65536", "-1", "http"] {
            let error = format!("10.96.0.10:{port}").parse::<Target>();
            assert_eq!(error, Err(TargetError::Port(port.to_owned())));
        }
        assert_eq!("10.96.0.10:80/sctp".parse::<Target>(), Err(TargetError::Protocol("sctp".to_owned())));
        for text in ["10.96.0.10/udp", "10.96.0.10/32", "10.96.0.10/"] {
            assert!(matches!(text.parse::<Target>(), Err(TargetError::NoPort(_))), "{text}");
        }
        assert_eq!("web".parse::<Target>(), Err(TargetError::Namespace("web".to_owned())));
        let pod = TargetError::Pod(ServiceName::new("default", "web"));
        assert_eq!("web-0.web.default.svc.cluster.local".parse::<Target>(), Err(pod));
    }
}
