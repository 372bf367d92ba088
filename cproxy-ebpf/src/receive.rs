//! Layout of the maps for connections and datagrams to the addresses of load balancers. They have a version and a
//! directory of their own, and exist only in guests that receive.
//!
//! ```text
//! written by the agent
//! RECEIVED            hash       ReceivedKey  -> ReceivedWord
//! RECEIVED_SOURCES    trie       SourcePrefix -> u32          (clients of a group; the value is unused)
//!
//! written by the programs
//! LISTENERS           socket hash ListenerKey -> socket       (TCP sockets that listen; the kernel removes them)
//! RECEIVED_DATAGRAMS  LRU hash   DatagramKey  -> [u32; 4]     (address to which a peer has sent)
//! RECEIVE_COUNTERS    per CPU    ReceiveCounter -> u64
//! ```
//!
//! The program that looks sockets up is that of network policy, too: a program for each could not do, since the kernel
//! lets a socket that one has chosen win over the refusal of another (include/linux/filter.h,
//! `BPF_PROG_SK_LOOKUP_RUN_ARRAY`).

/// Version of all layouts in this file; part of the pin path (`<pin-dir>/receive-v1`).
pub const RECEIVE_LAYOUT_VERSION: u32 = 1;

/// Addresses and ports that are received, at most.
pub const RECEIVED_MAX: u32 = 4_096;
/// Ranges of clients, at most. The trie has memory for those alone that are there.
pub const RECEIVED_SOURCES_MAX: u32 = 1 << 16;
/// Sockets that listen, at most.
pub const LISTENERS_MAX: u32 = 8_192;
/// Sockets that listen at an address and port at once and are known, the latest ones: one of them is enough for the
/// kernel to share the connections among all of a reuseport group.
pub const LISTENER_SLOTS: u16 = 8;
/// Address of [`ListenerKey`] for sockets on all addresses of IPv6 that take no IPv4 (`IPV6_V6ONLY`). No socket has it.
pub const ANY_V6_ONLY: [u32; 4] = [u32::MAX; 4];
/// Peers that are remembered for the replies to their datagrams.
pub const RECEIVED_DATAGRAMS_MIN: u32 = 4_096;
/// Number of counters.
pub const RECEIVE_COUNTERS_MAX: u32 = 8;

/// Address, port and protocol that are received. The address alone, with port and protocol 0, is there if one of its
/// ports is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedKey {
    /// Address in network order, IPv4 as IPv4-mapped.
    pub address: [u32; 4],
    /// Port in host order.
    pub port: u16,
    /// Number of the protocol.
    pub protocol: u8,
    /// Zero.
    pub padding: u8,
}

/// The pod's port (lower 16 bits), and the group of clients that may call it (upper 16 bits), 0 for all clients. The
/// word of an address alone is 0.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceivedWord(pub u32);

/// Group of clients, and their address in network order, as the words of a prefix.
pub type SourcePrefix = [u32; 5];

/// TCP socket that listens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerKey {
    /// Cookie of its network namespace.
    pub netns_cookie: u64,
    /// Address in network order, IPv4 as IPv4-mapped; zero is that of all addresses of both families,
    /// [`ANY_V6_ONLY`] that of all of IPv6.
    pub address: [u32; 4],
    /// Port in host order.
    pub port: u16,
    /// Below [`LISTENER_SLOTS`].
    pub slot: u16,
    /// Zero.
    pub padding: u32,
}

/// Datagrams between a peer and a port of the pod. Address and ports are in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramKey {
    /// Address of the peer.
    pub peer: [u32; 4],
    /// Port of the peer.
    pub peer_port: u16,
    /// Port of the pod.
    pub own_port: u16,
}

/// Counters of `RECEIVE_COUNTERS`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveCounter {
    /// Connections to a received address and port.
    Connections = 0,
    /// Datagrams to a received address and port that belong to no connected socket.
    Datagrams = 1,
    /// Connections and datagrams to other ports of a received address.
    OtherPorts = 2,
    /// Connections for which no socket listens.
    NoListener = 3,
    /// Sockets that listen and found no place in `LISTENERS`.
    ListenersLost = 4,
    /// Connections and datagrams of clients outside the source ranges.
    OtherSources = 5,
}

impl ReceivedKey {
    /// Key of an address alone.
    #[inline(always)]
    #[must_use]
    pub const fn of_address(address: [u32; 4]) -> Self {
        Self { address, port: 0, protocol: 0, padding: 0 }
    }
}

impl ReceivedWord {
    /// A port in host order, with a group of clients.
    #[must_use]
    pub const fn new(port: u16, group: u16) -> Self {
        Self(port as u32 | (group as u32) << 16)
    }

    /// Port of the pod in host order.
    #[inline(always)]
    #[must_use]
    pub const fn port(self) -> u16 {
        self.0 as u16
    }

    /// Group of clients; 0 for all.
    #[inline(always)]
    #[must_use]
    pub const fn group(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

const _: () = {
    assert!(size_of::<ReceivedKey>() == 20 && size_of::<ListenerKey>() == 32 && size_of::<DatagramKey>() == 20);
    assert!(RECEIVE_COUNTERS_MAX > ReceiveCounter::OtherSources as u32);
};
