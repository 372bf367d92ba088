//! Identifiers of Service ports in the session affinity map.

use super::{Family, Protocol, ServiceName};

const FNV_OFFSET: u32 = 0x811c_9dc5;
const FNV_PRIME: u32 = 0x0100_0193;

/// Identifier of a Service port in one family: 32-bit FNV-1a, so that it stays the same across restarts of the agent.
/// If two ports collide, a client of both keeps only the backend that it used last.
#[must_use]
pub fn affinity_id(service: &ServiceName, port_name: &str, protocol: Protocol, family: Family) -> u32 {
    let protocol = match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
    };
    let family = match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    };
    let parts = [&*service.namespace, &*service.name, port_name, protocol, family];
    // A slash separates the parts unambiguously: no name contains one.
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([b'/']));
    bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(FNV_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients keep their backends across an upgrade only while the identifiers stay the same.
    #[test]
    fn an_id_is_the_same_in_every_build() {
        let id = |service: &ServiceName| affinity_id(service, "http", Protocol::Tcp, Family::V4);
        assert_eq!(id(&ServiceName::new("default", "web")), fnv("default/web/http/TCP/IPv4/"));
        assert_ne!(id(&ServiceName::new("default", "web")), id(&ServiceName::new("defaul", "tweb")));
    }

    fn fnv(text: &str) -> u32 {
        text.bytes().fold(2_166_136_261, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619))
    }
}
