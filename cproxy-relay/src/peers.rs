//! Connections of each peer, so that none takes them all.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cproxy_access::PeerAddress;

/// Connections of one guest that comes in by vsock or by a socket of its own.
const GUEST_CONNECTIONS_MAX: usize = 16;

/// Place that connections come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// Many guests may share an address, behind their node.
    Ip(IpAddr),
    Unix(Arc<Path>),
    Vsock(u32),
}

/// Number of connections of each peer.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Connections of one address: half of all, so that another one is always served.
    address_max: usize,
    counts: Arc<Mutex<HashMap<Place, usize>>>,
}

/// Connection that is counted.
#[derive(Debug)]
pub(crate) struct Counted {
    place: Place,
    counts: Arc<Mutex<HashMap<Place, usize>>>,
}

impl Peers {
    pub(crate) fn new(connections_max: usize) -> Self {
        Self { address_max: connections_max.div_ceil(2), counts: Arc::default() }
    }

    /// Counts a connection; `None` if its peer has too many.
    pub(crate) fn count(&self, peer: &PeerAddress) -> Option<Counted> {
        let (place, bound) = match peer {
            // Proxies of this machine speak for others.
            PeerAddress::Tcp(address) if address.ip().is_loopback() => (Place::Ip(address.ip()), usize::MAX),
            PeerAddress::Tcp(address) => (Place::Ip(network(address.ip().to_canonical())), self.address_max),
            PeerAddress::Unix(path) => (Place::Unix(path.clone()), GUEST_CONNECTIONS_MAX),
            PeerAddress::Vsock { cid } => (Place::Vsock(*cid), GUEST_CONNECTIONS_MAX),
        };
        let mut counts = lock(&self.counts);
        let count = counts.get(&place).copied().unwrap_or(0);
        if count >= bound {
            return None;
        }
        counts.insert(place.clone(), count + 1);
        Some(Counted { place, counts: self.counts.clone() })
    }
}

/// An IPv4 address, or the 64 bits of an IPv6 network: a host has all addresses in it.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        match counts.get_mut(&self.place) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(counts.remove(&self.place)),
        }
    }
}

fn lock(counts: &Mutex<HashMap<Place, usize>>) -> MutexGuard<'_, HashMap<Place, usize>> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_a_bound_and_others_are_not_affected() {
        let peers = Peers::new(4);
        let tcp = |text: &str| PeerAddress::Tcp(text.parse().unwrap());
        let mut held: Vec<_> = (1..=2).map(|port| peers.count(&tcp(&format!("192.0.2.1:{port}"))).unwrap()).collect();
        assert!(peers.count(&tcp("192.0.2.1:3")).is_none());
        assert!(peers.count(&tcp("[::ffff:192.0.2.1]:3")).is_none());
        held.push(peers.count(&tcp("192.0.2.2:1")).unwrap());
        held.extend((1..=2).map(|host| peers.count(&tcp(&format!("[2001:db8::{host}]:1"))).unwrap()));
        assert!(peers.count(&tcp("[2001:db8::3]:1")).is_none());
        held.push(peers.count(&tcp("[2001:db8:0:1::3]:1")).unwrap());
        held.remove(0);
        held.push(peers.count(&tcp("192.0.2.1:3")).unwrap());
        held.extend((0..9).map(|_| peers.count(&tcp("127.0.0.1:1")).unwrap()));
        let guests: Vec<_> =
            (0..GUEST_CONNECTIONS_MAX).map(|_| peers.count(&PeerAddress::Vsock { cid: 3 }).unwrap()).collect();
        assert!(peers.count(&PeerAddress::Vsock { cid: 3 }).is_none());
        drop((held, guests));
        assert!(lock(&peers.counts).is_empty());
    }
}
