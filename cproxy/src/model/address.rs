//! Addresses in the one 16-byte form that the table uses: IPv6, or IPv4 as IPv4-mapped.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// An IP address; orders IPv4 before the IPv6 addresses in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address([u8; 16]);

/// The two families a Service can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The transport protocols that socket hooks can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// The ClusterIP (or another address of the Service).
    pub address: Address,
    /// The Service's port.
    pub port: u16,
    /// Its protocol.
    pub protocol: Protocol,
}

/// Where a connection goes instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// The endpoint's address.
    pub address: Address,
    /// The endpoint's own port.
    pub port: u16,
}

impl Address {
    /// From its 16 bytes in network order.
    #[must_use]
    pub const fn from_octets(octets: [u8; 16]) -> Self {
        Self(octets)
    }

    /// Its 16 bytes in network order.
    #[must_use]
    pub const fn octets(self) -> [u8; 16] {
        self.0
    }

    /// From the four words that the kernel keeps, each in network order.
    #[must_use]
    pub fn from_words(words: [u32; 4]) -> Self {
        let mut octets = [0; 16];
        for (bytes, word) in octets.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_ne_bytes();
        }
        Self(octets)
    }

    /// The four words that the kernel keeps, each in network order.
    #[must_use]
    pub fn words(self) -> [u32; 4] {
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(self.0.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
        words
    }

    /// IPv4 if it is IPv4-mapped.
    #[must_use]
    pub fn family(self) -> Family {
        if Ipv6Addr::from(self.0).to_ipv4_mapped().is_some() { Family::V4 } else { Family::V6 }
    }
}

impl From<IpAddr> for Address {
    fn from(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        })
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        Ipv6Addr::from(address.0).to_canonical()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        IpAddr::from(*self).fmt(f)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_address_port(f, self.address, self.port)?;
        write!(f, "/{}", self.protocol)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_address_port(f, self.address, self.port)
    }
}

fn fmt_address_port(f: &mut fmt::Formatter<'_>, address: Address, port: u16) -> fmt::Result {
    match address.family() {
        Family::V4 => write!(f, "{address}:{port}"),
        Family::V6 => write!(f, "[{address}]:{port}"),
    }
}

/// Reads an address as Kubernetes does for fields that older API servers let through: leading zeros are decimal
/// (`010.0.0.1` is 10.0.0.1; k8s.io/utils/net `ParseIPSloppy`) and IPv4-mapped IPv6 is IPv4. `None` if it is no address.
#[must_use]
pub fn parse_address(text: &str) -> Option<Address> {
    if text.contains(':') {
        return text.parse::<Ipv6Addr>().ok().map(|v6| IpAddr::V6(v6).into());
    }
    let mut octets = [0u8; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        *octet = parse_octet(parts.next()?)?;
    }
    parts.next().is_none().then(|| IpAddr::V4(Ipv4Addr::from(octets)).into())
}

fn parse_octet(text: &str) -> Option<u8> {
    let digits_only = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits_only.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_leniently_and_written_canonically() {
        for (text, expected) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("010.000.0.01", Some("10.0.0.1")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("FD00:0::1", Some("fd00::1")),
            ("0:0:0:0:0:ffff:0a00:0001", Some("10.0.0.1")),
            ("", None),
            ("None", None),
            ("10.0.0", None),
            ("10.0.0.1.2", None),
            ("10.0.0.256", None),
            ("10.0.0.+1", None),
            ("10.0.0.1 ", None),
            ("fd00::1%eth0", None),
            ("fd00:::1", None),
        ] {
            assert_eq!(parse_address(text).map(|address| address.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn the_family_is_that_of_the_text_form() {
        assert_eq!(parse_address("::ffff:1.2.3.4").unwrap().family(), Family::V4);
        assert_eq!(parse_address("::1.2.3.4").unwrap().family(), Family::V6);
    }
}
