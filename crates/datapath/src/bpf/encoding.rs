//! Frontends and backends as they lie in the maps: addresses and ports in network order.

use cproxy_core::{Address, Backend, Frontend, Protocol};
use cproxy_ebpf::{
    Backend as BackendSlot, Counter, FrontendKey, PROTOCOL_ANY, PROTOCOL_TCP, PROTOCOL_UDP, UNCOUNTED, digest,
};

/// The key of a frontend.
pub(super) fn key(frontend: Frontend) -> FrontendKey {
    let protocol = protocol_number(frontend.protocol);
    FrontendKey { address: frontend.address.words(), port: frontend.port.to_be(), protocol, zero: 0 }
}

/// The number of a protocol in keys.
pub(crate) fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
    }
}

/// The key of an address that is known as a ClusterIP.
pub(super) fn address_key(address: Address) -> FrontendKey {
    FrontendKey { address: address.words(), port: 0, protocol: PROTOCOL_ANY, zero: 0 }
}

/// The frontend of a key; `None` for a protocol that no agent of this layout writes.
pub(crate) fn frontend(key: &FrontendKey) -> Option<Frontend> {
    let protocol = match key.protocol {
        PROTOCOL_TCP => Protocol::Tcp,
        PROTOCOL_UDP => Protocol::Udp,
        _ => return None,
    };
    Some(Frontend { address: Address::from_words(key.address), port: u16::from_be(key.port), protocol })
}

pub(super) fn backend_slot(backend: Backend, is_counted: bool) -> BackendSlot {
    let (address, port) = (backend.address.words(), backend.port.to_be());
    let counter = if is_counted { Counter::Forwarded as u16 } else { UNCOUNTED };
    BackendSlot { address, port, counter, digest: digest(&address, port) }
}

pub(super) fn backend(slot: BackendSlot) -> Backend {
    Backend { address: Address::from_words(slot.address), port: u16::from_be(slot.port) }
}

#[cfg(test)]
mod tests {
    use cproxy_core::parse_address;

    use super::*;

    #[test]
    fn keys_and_slots_are_in_network_order() {
        let frontend_of =
            |text: &str| Frontend { address: parse_address(text).unwrap(), port: 0x1234, protocol: Protocol::Udp };
        let v4 = key(frontend_of("10.96.0.10"));
        assert_eq!(v4.address, cproxy_ebpf::v4_mapped(u32::from_ne_bytes([10, 96, 0, 10])));
        assert_eq!((v4.port.to_ne_bytes(), v4.protocol, v4.zero), ([0x12, 0x34], 17, 0));
        let v6 = key(frontend_of("fd00:1:2:3:4:5:6:7"));
        assert_eq!(v6.address[0].to_ne_bytes(), [0xfd, 0, 0, 1]);
        for text in ["10.96.0.10", "fd00:1:2:3:4:5:6:7"] {
            assert_eq!(frontend(&key(frontend_of(text))), Some(frontend_of(text)));
            assert_eq!(frontend(&address_key(frontend_of(text).address)), None);
        }
    }
}
