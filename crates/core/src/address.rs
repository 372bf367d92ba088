//! IP addresses in the table's 16-byte form: IPv6, or IPv4 as IPv4-mapped IPv6.

use std::{
    cmp::Ordering,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// IP address. IPv4 sorts before the IPv6 addresses in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address([u8; 16]);

impl PartialOrd for Address {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Address {
    /// The order of the bytes, which numbers have in two instructions.
    fn cmp(&self, other: &Self) -> Ordering {
        u128::from_be_bytes(self.0).cmp(&u128::from_be_bytes(other.0))
    }
}

/// Address family of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Transport protocol that socket hooks can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// Address, port and protocol that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// ClusterIP or another address of the Service.
    pub address: Address,
    /// Port of the Service.
    pub port: u16,
    /// Protocol of the Service port.
    pub protocol: Protocol,
}

/// Address and port of an endpoint that a frontend leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    /// Address of the endpoint.
    pub address: Address,
    /// Port on which the endpoint listens.
    pub port: u16,
}

impl Backend {
    /// Stands for any address of the VM, to which datagram sockets are connected whose calls are refused.
    pub const NOBODY: Self = Self { address: Address::from_octets([0; 16]), port: 1 };

    /// Whether sockets that are connected to it may be such sockets.
    #[must_use]
    pub const fn may_be_nobody(&self) -> bool {
        self.port == Self::NOBODY.port
    }
}

impl Address {
    /// Address from its 16 bytes in network order.
    #[must_use]
    pub const fn from_octets(octets: [u8; 16]) -> Self {
        Self(octets)
    }

    /// The 16 bytes of the address in network order.
    #[must_use]
    pub const fn octets(self) -> [u8; 16] {
        self.0
    }

    /// Address from the kernel's four words, each in network order.
    #[must_use]
    pub fn from_words(words: [u32; 4]) -> Self {
        let mut octets = [0; 16];
        for (bytes, word) in octets.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_ne_bytes();
        }
        Self(octets)
    }

    /// The kernel's four words of the address, each in network order.
    #[must_use]
    pub fn words(self) -> [u32; 4] {
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(self.0.as_chunks().0) {
            *word = u32::from_ne_bytes(*bytes);
        }
        words
    }

    /// Whether the address is loopback, multicast or unspecified, which no Service can have.
    #[must_use]
    pub fn is_special(self) -> bool {
        let address = IpAddr::from(self);
        address.is_loopback() || address.is_multicast() || address.is_unspecified()
    }

    /// IPv4 for an IPv4-mapped address, else IPv6.
    #[must_use]
    pub fn family(self) -> Family {
        if Ipv6Addr::from(self.0).to_ipv4_mapped().is_some() { Family::V4 } else { Family::V6 }
    }
}

/// Range of addresses of one family, such as 10.0.0.0/8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    pub(super) first: Address,
    /// Number of leading bits that are fixed, of 128.
    pub(super) fixed: u8,
}

impl AddressRange {
    /// Parses address/length, with the address as in [`parse_address`]. Bits beyond the length are ignored
    /// (k8s.io/utils/net `ParseCIDRSloppy`). `None` if the text is no range.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, length) = text.split_once('/')?;
        let digits_only = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
        let length: u8 = digits_only.then(|| length.parse().ok()).flatten()?;
        let address = parse_address(address)?;
        // The length of an IPv4-mapped address that is written as IPv6 counts from 128 bits.
        let bits_before = if text.contains(':') { 0 } else { 96 };
        let fixed = length.checked_add(bits_before).filter(|&fixed| fixed <= 128)?;
        // A range that reaches beyond the IPv4-mapped addresses is an IPv6 range.
        Some(Self::new(address, fixed))
    }

    /// Range of all addresses that share so many leading bits, of the 128 of the table's form, with an address.
    #[must_use]
    pub fn new(address: Address, fixed_bits: u8) -> Self {
        let fixed = fixed_bits.min(128);
        let first = u128::from_be_bytes(address.0) & mask(fixed);
        Self { first: Address(first.to_be_bytes()), fixed }
    }

    /// First address of the range.
    #[must_use]
    pub const fn first(&self) -> Address {
        self.first
    }

    /// Number of leading bits, of the 128 of the table's form, that all addresses of the range share.
    #[must_use]
    pub const fn fixed_bits(&self) -> u8 {
        self.fixed
    }

    /// Whether the range contains every address of another.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.fixed <= other.fixed && self.family() == other.family() && self.contains(other.first)
    }

    /// Whether the range contains an address.
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        (u128::from_be_bytes(address.0) & mask(self.fixed)).to_be_bytes() == self.first.0
            && address.family() == self.family()
    }

    /// Family of all addresses in the range.
    #[must_use]
    pub fn family(&self) -> Family {
        if self.fixed >= 96 { self.first.family() } else { Family::V6 }
    }

    /// Whether the range contains every address of its family.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.fixed
            == match self.family() {
                Family::V4 => 96,
                Family::V6 => 0,
            }
    }
}

/// Mask of the leading bits of 128.
fn mask(fixed: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(fixed.min(128))).unwrap_or(0)
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits_before = if self.family() == Family::V4 { 96 } else { 0 };
        write!(f, "{}/{}", self.first, self.fixed - bits_before)
    }
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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

impl Family {
    /// Name of the family, as Kubernetes writes it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
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

/// Parses an address as Kubernetes does for fields that older API servers did not validate: leading zeros are decimal
/// (`010.0.0.1` is 10.0.0.1; k8s.io/utils/net `ParseIPSloppy`) and IPv4-mapped IPv6 is IPv4. `None` if the text is no
/// address.
#[must_use]
pub fn parse_address(text: &str) -> Option<Address> {
    let address = parse_v4(text).map(IpAddr::V4).or_else(|| parse_v6(text).map(IpAddr::V6));
    address.map(Address::from)
}

/// Parses IPv6. A dotted end allows leading zeros, as IPv4 does.
fn parse_v6(text: &str) -> Option<Ipv6Addr> {
    match text.rsplit_once(':') {
        Some((groups, v4)) if v4.contains('.') => format!("{groups}:{}", parse_v4(v4)?).parse().ok(),
        _ => text.parse().ok(),
    }
}

/// Parses IPv4 in one pass: a large cluster has fifty thousand addresses.
fn parse_v4(text: &str) -> Option<Ipv4Addr> {
    let (mut bits, mut dots) = (0, 0);
    let (mut octet, mut has_digits) = (0, false);
    for byte in text.bytes() {
        match byte {
            b'0'..=b'9' => {
                octet = octet * 10 + u32::from(byte - b'0');
                has_digits = true;
                if octet > 0xff {
                    return None;
                }
            }
            b'.' if dots < 3 && has_digits => {
                bits = bits << 8 | octet;
                dots += 1;
                (octet, has_digits) = (0, false);
            }
            _ => return None,
        }
    }
    (dots == 3 && has_digits).then(|| Ipv4Addr::from_bits(bits << 8 | octet))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_covers_the_narrower_ones_of_its_family() {
        let range = |text| AddressRange::parse(text).unwrap();
        for (wide, narrow, expected) in [
            ("10.0.0.0/8", "10.1.0.0/16", true),
            ("10.0.0.0/8", "10.0.0.0/8", true),
            ("10.1.0.0/16", "10.0.0.0/8", false),
            ("10.0.0.0/8", "11.0.0.0/16", false),
            ("::/0", "fd00::/8", true),
            ("::/0", "10.0.0.0/8", false),
            ("::/0", "0.0.0.0/0", false),
        ] {
            assert_eq!(range(wide).covers(&range(narrow)), expected, "{wide} {narrow}");
        }
        let one = AddressRange::new(parse_address("10.1.2.3").unwrap(), 128);
        assert_eq!((one.to_string().as_str(), one.fixed_bits()), ("10.1.2.3/32", 128));
        assert_eq!(range("10.1.2.3/8").first(), parse_address("10.0.0.0").unwrap());
    }

    #[test]
    fn addresses_are_read_leniently_and_written_canonically() {
        for (text, expected) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("010.000.0.01", Some("10.0.0.1")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("::ffff:010.000.0.01", Some("10.0.0.1")),
            ("64:ff9b::010.0.0.1", Some("64:ff9b::a00:1")),
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
            ("::ffff:10.0.0.256", None),
            ("::10.0.0.1:1", None),
        ] {
            assert_eq!(parse_address(text).map(|address| address.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn ranges_are_read_leniently() {
        for (text, expected) in [
            ("10.0.0.0/8", Some("10.0.0.0/8")),
            ("010.1.2.3/8", Some("10.0.0.0/8")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("10.0.0.1/32", Some("10.0.0.1/32")),
            ("fd00::1/16", Some("fd00::/16")),
            ("::/0", Some("::/0")),
            ("fd00::1/128", Some("fd00::1/128")),
            ("::ffff:10.0.0.1/104", Some("10.0.0.0/8")),
            ("10.0.0.0/33", None),
            ("fd00::/129", None),
            ("fd00::/255", None),
            ("10.0.0.0", None),
            ("10.0.0.0/", None),
            ("10.0.0.0/+8", None),
            ("/8", None),
        ] {
            let range = AddressRange::parse(text);
            assert_eq!(range.map(|range| range.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_range_has_the_addresses_of_its_family_between_its_ends() {
        let has =
            |range: &str, address: &str| AddressRange::parse(range).unwrap().contains(parse_address(address).unwrap());
        assert!(has("10.0.0.0/8", "10.255.255.255") && !has("10.0.0.0/8", "11.0.0.0"));
        assert!(has("0.0.0.0/0", "1.2.3.4") && !has("0.0.0.0/0", "fd00::1"));
        assert!(has("::/0", "fd00::1") && !has("::/0", "1.2.3.4"));
        assert!(has("fd00::/16", "fd00:1::") && !has("fd00::/16", "fd01::"));
        let whole = |range: &str| AddressRange::parse(range).unwrap().is_whole();
        assert!(whole("0.0.0.0/0") && whole("::/0") && !whole("0.0.0.0/1") && !whole("::/1"));
    }

    #[test]
    fn the_family_is_that_of_the_text_form() {
        assert_eq!(parse_address("::ffff:1.2.3.4").unwrap().family(), Family::V4);
        assert_eq!(parse_address("::1.2.3.4").unwrap().family(), Family::V6);
    }
}
