//! Addresses of the canary: calls by which the agent tests its own programs (see `agent::health`).

use std::{fmt, net::IpAddr, str::FromStr};

use cproxy_core::{Address, Frontend, ServiceName, parse_address};

/// Default addresses, from the ranges for benchmarks of networks, which are not routed (RFC 2544, RFC 5180).
pub(crate) const ADDRESSES: &str = "198.19.255.254,2001:2::fffe";

/// Value that switches the canary off.
const NONE: &str = "none";

/// Port of the canary (echo, RFC 862), for both protocols.
pub(crate) const PORT: u16 = 7;

/// Namespace and name of the Service of the canary. No object has them: the name of a namespace has no tilde. It sorts
/// behind all others, so that a Service with the same address comes first.
const NAMESPACE: &str = "~cproxy";
const NAME: &str = "canary";

/// Addresses of the canary, at most one of each family. None: there is no canary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CanaryAddresses(Vec<Address>);

impl CanaryAddresses {
    /// The addresses.
    pub fn iter(&self) -> impl Iterator<Item = Address> {
        self.0.iter().copied()
    }
}

impl FromStr for CanaryAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == NONE {
            return Ok(Self::default());
        }
        let mut addresses = Vec::<Address>::new();
        for part in text.split(',') {
            let address =
                parse_address(part.trim()).ok_or_else(|| format!("expected an IPv4 and an IPv6 address, or {NONE}"))?;
            if address.is_special() || is_of_link(address) {
                return Err(format!(
                    "{address} is a loopback, link-local, broadcast, multicast or unspecified address, and no Service \
                     can have it"
                ));
            }
            if addresses.iter().any(|other| other.family() == address.family()) {
                return Err("at most one address of each family is allowed".to_owned());
            }
            addresses.push(address);
        }
        Ok(Self(addresses))
    }
}

/// Whether an address counts on one link alone.
fn is_of_link(address: Address) -> bool {
    match address.into() {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

impl fmt::Display for CanaryAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(NONE);
        }
        let addresses: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&addresses.join(","))
    }
}

/// Name of the canary's Service.
#[must_use]
pub(crate) fn service_name() -> ServiceName {
    ServiceName::new(NAMESPACE, NAME)
}

/// Whether a frontend is one of the canary's: by the name of its Service or, without an agent that has the name, by the
/// default addresses.
#[must_use]
pub(crate) fn is_canary(frontend: &Frontend, service: Option<&str>) -> bool {
    match service {
        Some(name) => name.split_once('/') == Some((NAMESPACE, NAME)),
        None => {
            let addresses = ADDRESSES.split(',').filter_map(|address| address.parse::<IpAddr>().ok());
            frontend.port == PORT && addresses.into_iter().any(|address| Address::from(address) == frontend.address)
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::Protocol;

    use super::*;

    #[test]
    fn there_is_one_address_of_each_family_or_none() {
        for text in [ADDRESSES, "10.0.0.1", "fd00::1,10.0.0.1", NONE] {
            assert_eq!(text.parse::<CanaryAddresses>().unwrap().to_string(), text);
        }
        for text in ["", "10.0.0.1,10.0.0.2", "none,10.0.0.1", "127.0.0.1", "10.0.0.1,", "host"] {
            assert!(text.parse::<CanaryAddresses>().is_err(), "{text}");
        }
        for text in ["169.254.1.1", "fe80::1", "255.255.255.255", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "::1"] {
            let error = text.parse::<CanaryAddresses>().unwrap_err();
            assert!(error.starts_with(&format!("{text} is a loopback, link-local,")), "{error}");
        }
    }

    #[test]
    fn its_frontends_are_known_by_name_or_by_the_default_addresses() {
        let frontend = |address, port| {
            let address = parse_address(address).unwrap();
            Frontend { address, port, protocol: Protocol::Tcp }
        };
        let name = service_name().to_string();
        assert!(is_canary(&frontend("10.0.0.1", 80), Some(&name)));
        assert!(is_canary(&frontend("2001:2::fffe", PORT), None) && is_canary(&frontend("198.19.255.254", PORT), None));
        assert!(!is_canary(&frontend("198.19.255.254", PORT), Some("default/web")));
        assert!(!is_canary(&frontend("198.19.255.254", 80), None) && !is_canary(&frontend("10.0.0.1", PORT), None));
    }
}
