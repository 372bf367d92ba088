//! Addresses of a slice: packed in protobuf, text in JSON.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cproxy_core::{Address, parse_address};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{ServedError, unknown};

/// Addresses of a slice, sorted.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Addresses {
    /// IPv4 addresses, 4 bytes each.
    #[prost(bytes = "vec", tag = "1")]
    v4: Vec<u8>,
    /// IPv6 addresses, 16 bytes each.
    #[prost(bytes = "vec", tag = "2")]
    v6: Vec<u8>,
}

impl Addresses {
    /// Packs addresses.
    pub(super) fn new(addresses: &[Address]) -> Self {
        let mut packed = Self::default();
        for &address in addresses {
            match IpAddr::from(address) {
                IpAddr::V4(address) => packed.v4.extend(address.octets()),
                IpAddr::V6(address) => packed.v6.extend(address.octets()),
            }
        }
        packed
    }

    /// The addresses, sorted.
    pub(super) fn read(&self) -> Result<Vec<Address>, ServedError> {
        let (v4, v4_rest) = self.v4.as_chunks::<4>();
        let (v6, v6_rest) = self.v6.as_chunks::<16>();
        if !v4_rest.is_empty() || !v6_rest.is_empty() {
            return Err(unknown("addresses", &format!("{} and {} bytes", self.v4.len(), self.v6.len())));
        }
        let v4 = v4.iter().map(|&octets| IpAddr::from(Ipv4Addr::from(octets)));
        let v6 = v6.iter().map(|&octets| IpAddr::from(Ipv6Addr::from(octets)));
        let mut addresses: Vec<_> = v4.chain(v6).map(Address::from).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }
}

impl Serialize for Addresses {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let addresses = self.read().map_err(serde::ser::Error::custom)?;
        serializer.collect_seq(addresses.into_iter().map(|address| IpAddr::from(address).to_string()))
    }
}

impl<'de> Deserialize<'de> for Addresses {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let address = |text: &String| parse_address(text).ok_or_else(|| D::Error::custom(unknown("addresses", text)));
        Ok(Self::new(&texts.iter().map(address).collect::<Result<Vec<_>, _>>()?))
    }
}
