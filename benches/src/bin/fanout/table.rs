//! Rows that an agent has written for one Service, read from its pinned maps by a few system calls, whatever cgroup the
//! programs are attached to.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::Path,
};

use cproxy_benches::bpf::Map;
use cproxy_ebpf::{Backend, LAYOUT_VERSION, PROTOCOL_TCP, Set, SetWord};

/// Maps of an agent that is ready, and the position of the Service's set.
pub(crate) struct Table {
    sets: Map,
    backends: Map,
    set: [u8; 4],
}

impl Table {
    /// Finds the Service. The agent must not replace the maps by larger ones afterwards.
    pub(crate) fn open(pin_dir: &Path, vip: SocketAddr) -> io::Result<Self> {
        let pins = pin_dir.join(format!("v{LAYOUT_VERSION}"));
        let inner = |name: &str| Map::open(&pins.join(name))?.inner();
        let set = inner("FRONTENDS")?.get(&key(vip))?;
        Ok(Self { sets: inner("SETS")?, backends: inner("BACKENDS")?, set })
    }

    /// The address of the Service's first backend; `None` if it has none.
    pub(crate) fn backend(&self) -> io::Result<Option<IpAddr>> {
        let set = self.sets.get::<{ size_of::<Set>() }>(&self.set)?;
        // The word is the first half of the value.
        let word = SetWord(u64::from_ne_bytes(set.first_chunk().copied().unwrap_or_default()));
        if word.eligible() == 0 {
            return Ok(None);
        }
        let backend = self.backends.get::<{ size_of::<Backend>() }>(&word.first_slot().to_ne_bytes())?;
        let address = backend.first_chunk::<16>().copied().map(Ipv6Addr::from);
        Ok(address.map(|address| IpAddr::V6(address).to_canonical()))
    }
}

/// A `FrontendKey`, all in network byte order.
fn key(vip: SocketAddr) -> [u8; 20] {
    let address = match vip.ip() {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    let mut key = [0; 20];
    let parts = address.octets().into_iter().chain(vip.port().to_be_bytes()).chain([PROTOCOL_TCP]);
    key.iter_mut().zip(parts).for_each(|(byte, part)| *byte = part);
    key
}

#[cfg(test)]
mod tests {
    use cproxy_ebpf::FrontendKey;

    use super::*;

    #[test]
    fn a_key_is_as_long_as_the_maps_and_in_network_order() {
        let key = key("10.96.255.1:80".parse().unwrap());
        assert_eq!(key.len(), size_of::<FrontendKey>());
        assert_eq!(key, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 96, 255, 1, 0, 80, 6, 0]);
    }
}
