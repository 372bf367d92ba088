//! Layout of the BPF maps: the table, which the agent writes and the programs read, and the state of the programs.
//!
//! Keys and values are integers and arrays with explicit padding, so that both compilers agree on every byte. Any
//! change of a size, an offset or a meaning needs a new [`LAYOUT_VERSION`]. The version is part of the pin path, so an
//! agent never writes to maps that older programs read.
//!
//! ```text
//! written by the agent; the first three hold one inner map each, which the agent replaces by one of another size
//! FRONTENDS    hash        FrontendKey  -> SetId
//! SETS         array       SetId        -> Set           (its backends in one atomic word, and session affinity)
//! BACKENDS     array       slot         -> Backend
//! SETTINGS     array       0            -> Settings      (seed, filter, balance, exclusions)
//! OWN_ADDRESSES array      family       -> OwnAddress    (address of the VM, for sockets that are to be refused)
//!
//! written by the programs; the agent frees places in TCP_OWNERS whose sockets have gone
//! TCP_OWNERS   array       place        -> u64           (cookie of the socket that owns the place; 0: free)
//!                          TCP_WITHOUT_PLACE -> u64      (number of connects that have found no place)
//! TCP_PEERS    array       place        -> Translation   (peer of that socket)
//! TCP_MORE_OWNERS, TCP_MORE_PEERS: the same for each further level of places, as inner maps that the agent adds
//!              and removes
//! TCP_FULL     ring buffer, with one message: a TCP socket has found no place
//! SOCKETS      sk_storage               -> SocketState   (peer of a socket without a place; the agent's mark)
//! UDP_SOCKETS  sk_storage               -> UdpState      (flows of an unconnected socket)
//! UDP_FLOWS    LRU hash    FlowKey      -> FlowValue     (flows that do not fit into UDP_SOCKETS)
//! AFFINITY     LRU hash    AffinityKey  -> AffinityEntry
//! TURNS        array       turn_of(set) -> u64           (number of choices made in turn)
//! COUNTERS     per CPU     Counter      -> u64
//! ```
#![no_std]

#[cfg(feature = "user")]
pub mod layout;
pub mod observation;
pub mod policy;
pub mod receive;

/// Version of all layouts in this file; part of the pin path (`<pin-dir>/v8`).
pub const LAYOUT_VERSION: u32 = 8;

/// Smallest size of `FRONTENDS`. The agent replaces each of the three maps by a larger or a smaller one as the data
/// grows and shrinks.
pub const FRONTENDS_MIN: u32 = 256;
/// Largest size of `FRONTENDS`.
pub const FRONTENDS_MAX: u32 = 262_144;
/// Smallest size of `SETS`.
pub const SETS_MIN: u32 = 256;
/// Largest size of `SETS`.
pub const SETS_MAX: u32 = 262_144;
/// Smallest size of `BACKENDS`.
pub const BACKENDS_MIN: u32 = 1_536;
/// Largest size of `BACKENDS`, which then takes 96 MiB.
pub const BACKENDS_MAX: u32 = 4_194_304;
/// Number of clients that `AFFINITY` remembers. When it is full, it evicts the one that has been idle longest.
pub const AFFINITY_MAX: u32 = 512;
/// Number of entries of `UDP_FLOWS`; each flow takes two.
pub const UDP_FLOWS_MAX: u32 = 1_024;

/// `IPPROTO_TCP`.
pub const PROTOCOL_TCP: u8 = 6;
/// `IPPROTO_UDP`.
pub const PROTOCOL_UDP: u8 = 17;
/// Any protocol. With port 0 it is the key of a ClusterIP as a whole: ports without a frontend of their own refuse
/// connections.
pub const PROTOCOL_ANY: u8 = 0;

/// Third word of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2), in network order.
pub const V4_MAPPED_WORD: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// IPv4-mapped form of an IPv4 address in network order.
#[inline(always)]
#[must_use]
pub const fn v4_mapped(address: u32) -> [u32; 4] {
    [0, 0, V4_MAPPED_WORD, address]
}

/// True if the address is IPv4-mapped.
#[inline(always)]
#[must_use]
pub const fn is_v4(address: &[u32; 4]) -> bool {
    address[0] == 0 && address[1] == 0 && address[2] == V4_MAPPED_WORD
}

/// Address, port and protocol of a frontend: the key of `FRONTENDS`. 20 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrontendKey {
    /// Address in network order, IPv4 as IPv4-mapped.
    pub address: [u32; 4],
    /// Port in network order; 0 with [`PROTOCOL_ANY`].
    pub port: u16,
    /// [`PROTOCOL_TCP`], [`PROTOCOL_UDP`] or [`PROTOCOL_ANY`].
    pub protocol: u8,
    /// Padding, always 0, since the kernel hashes every byte of a key.
    pub zero: u8,
}

/// Index into `SETS`: the value of `FRONTENDS`. A frontend keeps its set as long as it belongs to the same Service
/// port. New endpoints therefore take one atomic store into `SETS`, however many frontends share the set.
pub type SetId = u32;

/// Set of every key with [`PROTOCOL_ANY`]. It is always empty, so it refuses.
pub const SET_UNKNOWN_PORT: SetId = 0;

/// Backend: an element of `BACKENDS`. 24 bytes, a multiple of 8, so that elements lie side by side
/// (kernel/bpf/arraymap.c, `array_map_alloc` rounds their size up).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Address in network order, IPv4 as IPv4-mapped.
    pub address: [u32; 4],
    /// Port in network order.
    pub port: u16,
    /// Index of the counter of calls that are sent to it: [`Counter::Forwarded`], or [`UNCOUNTED`].
    pub counter: u16,
    /// [`digest`] of address and port. The slots of a set are sorted by it for binary search.
    pub digest: u32,
}

/// Digest of an address and a port, both in network order. Different backends may have the same digest (likely from
/// 2^16 backends in one set on), so a match must also compare the address.
#[inline(always)]
#[must_use]
pub const fn digest(address: &[u32; 4], port: u16) -> u32 {
    let high = ((address[0] as u64) << 32) | address[1] as u64;
    let low = ((address[2] as u64) << 32) | address[3] as u64;
    let mixed = high.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ low.wrapping_mul(0xc2b2_ae3d_27d4_eb4f) ^ port as u64;
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as u32
}

/// Set of backends: an element of `SETS`. 16 bytes; each word is written and read as a whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// A [`SetWord`].
    pub word: u64,
    /// An [`Affinity`].
    pub affinity: u64,
}

/// Slots of a set's backends, in one 64-bit word: programs see a change whole or not at all.
///
/// | bits | content |
/// |---|---|
/// | 0..31 | first slot in `BACKENDS` |
/// | 31 | action of a set without eligible backends: drop (1) or refuse (0) |
/// | 32..48 | number of eligible backends, the first run |
/// | 48..64 | number of backends that only keep their present clients, the second run |
///
/// Each run is sorted by digest.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SetWord(pub u64);

impl SetWord {
    /// Word of an empty set that refuses.
    pub const EMPTY: Self = Self(0);

    const DROPS: u64 = 1 << 31;

    /// Word of a set with `eligible` backends from `first_slot` on, followed by `serving` ones.
    #[inline(always)]
    #[must_use]
    pub const fn new(first_slot: u32, eligible: u16, serving: u16, drops: bool) -> Self {
        let flags = if drops { Self::DROPS } else { 0 };
        Self((first_slot as u64 & (Self::DROPS - 1)) | flags | ((eligible as u64) << 32) | ((serving as u64) << 48))
    }

    /// Slot of the first backend.
    #[inline(always)]
    #[must_use]
    pub const fn first_slot(self) -> u32 {
        self.0 as u32 & (Self::DROPS - 1) as u32
    }

    /// Number of eligible backends, the first run.
    #[inline(always)]
    #[must_use]
    pub const fn eligible(self) -> u32 {
        (self.0 >> 32) as u32 & 0xffff
    }

    /// Number of backends that only keep their present clients, the second run.
    #[inline(always)]
    #[must_use]
    pub const fn serving(self) -> u32 {
        (self.0 >> 48) as u32
    }

    /// True if the set drops connections instead of refusing them while it has no eligible backend.
    #[inline(always)]
    #[must_use]
    pub const fn drops(self) -> bool {
        self.0 & Self::DROPS != 0
    }
}

/// Largest number of backends in one run, by the width of its field in [`SetWord`].
pub const SET_BACKENDS_MAX: usize = u16::MAX as usize;

/// Session affinity of a set. Bits 0..32 identify the Service port in `AFFINITY`; bits 32..64 are the timeout in
/// seconds, 0 without affinity.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity(pub u64);

impl Affinity {
    /// No affinity.
    pub const NONE: Self = Self(0);

    /// Affinity of the Service port `id` with a timeout of `seconds`.
    #[inline(always)]
    #[must_use]
    pub const fn new(id: u32, seconds: u32) -> Self {
        Self(id as u64 | ((seconds as u64) << 32))
    }

    /// Id of the Service port in `AFFINITY`.
    #[inline(always)]
    #[must_use]
    pub const fn id(self) -> u32 {
        self.0 as u32
    }

    /// Timeout: time from a client's last new connection until it is forgotten. 0: no affinity.
    #[inline(always)]
    #[must_use]
    pub const fn seconds(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Client of a Service port: the key of `AFFINITY`. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// [`Affinity::id`].
    pub id: u32,
    /// Padding, always 0.
    pub zero: u32,
    /// Cookie of the client's network namespace, which is the client's identity.
    pub netns_cookie: u64,
}

/// Backend of a client: the value of `AFFINITY`, one word that is only ever replaced as a whole. Bits 0..32 are the
/// backend's digest; bits 32..64 are the [`affinity_time`] of the client's last new connection.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffinityEntry(pub u64);

impl AffinityEntry {
    /// Entry of a client that has connected to the backend at [`affinity_time`] `used`.
    #[inline(always)]
    #[must_use]
    pub const fn new(digest: u32, used: u32) -> Self {
        Self(digest as u64 | ((used as u64) << 32))
    }

    /// Digest of the backend.
    #[inline(always)]
    #[must_use]
    pub const fn digest(self) -> u32 {
        self.0 as u32
    }

    /// True if the timeout of `seconds` has not passed at `now`.
    #[inline(always)]
    #[must_use]
    pub const fn is_fresh(self, now: u32, seconds: u32) -> bool {
        self.idle_ns(now) <= seconds as u64 * 1_000_000_000
    }

    /// Time between the client's last new connection and `now`, in nanoseconds.
    #[inline(always)]
    #[must_use]
    pub const fn idle_ns(self, now: u32) -> u64 {
        let idle = now.wrapping_sub((self.0 >> 32) as u32);
        // Another CPU may have renewed the entry after `now` was read.
        if idle >> 31 != 0 { 0 } else { (idle as u64) << AFFINITY_TIME_SHIFT }
    }
}

const AFFINITY_TIME_SHIFT: u32 = 24;

/// `CLOCK_MONOTONIC` in units of 2^24 ns (17 ms). It wraps around after two years.
#[inline(always)]
#[must_use]
pub const fn affinity_time(monotonic_ns: u64) -> u32 {
    (monotonic_ns >> AFFINITY_TIME_SHIFT) as u32
}

/// Translation of a destination: VIP and backend. 40 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Translation {
    /// Address that the application has named, in network order.
    pub vip: [u32; 4],
    /// Address of the backend, in network order.
    pub backend: [u32; 4],
    /// Port that the application has named, in network order.
    pub vip_port: u16,
    /// Port of the backend, in network order.
    pub backend_port: u16,
    /// Slot in which the backend was last found: a hint, checked before use. [`REFUSED_SLOT`] if there is no backend.
    pub slot: u32,
}

/// State of a UDP socket, of a TCP socket without a place, or of the agent's own: the value of `SOCKETS`. 44 bytes.
///
/// After a connect to an address that is not a Service's, VIP and backend of `peer` are both that address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// Translation of the last `connect()`, which may have failed: it counts only if its backend is the kernel's peer.
    /// It is the first field, because the verifier refuses an offset to a pointer that may be null.
    pub peer: Translation,
    /// [`SOCKET_UNTRANSLATED`] or 0.
    pub flags: u32,
}

/// Flag of the agent's own sockets, which are never translated.
pub const SOCKET_UNTRANSLATED: u32 = 1;

/// Number of places for the peers of TCP sockets in the first level, a power of two. They take 98 KiB, with what the
/// maps need themselves.
pub const TCP_PLACES: u32 = 2_048;

/// Number of levels of places beyond the first one. The agent adds them in their order, and removes the last one first.
pub const TCP_LEVELS_MORE: u32 = 2;

/// Number of places in a level: each has eight times as many as the one before.
#[inline(always)]
#[must_use]
pub const fn tcp_level_places(level: u32) -> u32 {
    TCP_PLACES << (3 * level)
}

/// Owner of a free place. No socket has this cookie.
pub const TCP_PLACE_FREE: u64 = 0;

/// Owner of a free place that no socket can claim, since its level is to go.
pub const TCP_PLACE_CLOSED: u64 = tcp_moving(TCP_PLACE_FREE);

/// Element of `TCP_OWNERS` behind the places: the number of connects whose socket has found no place.
pub const TCP_WITHOUT_PLACE: u32 = TCP_PLACES;

/// Bytes of `TCP_FULL`, a page.
pub const TCP_FULL_BYTES: u32 = 4_096;
/// Bytes of its one message, which says nothing: no second one fits until the agent has read it.
pub const TCP_FULL_MESSAGE_BYTES: u32 = TCP_FULL_BYTES / 4 * 3;

/// The two places of a level that a socket with this cookie can claim. The kernel gives each CPU a run of successive
/// cookies, so the first places of one CPU's sockets lie side by side. Where the runs of two CPUs overlap, the second
/// places do not. Beyond the first level, whose places are those of layout 7, one of the two is even and the other odd:
/// where each connection comes with an accepted socket, which has a cookie as well, all places are used.
#[inline(always)]
#[must_use]
pub const fn tcp_places(cookie: u64, level: u32) -> [u32; 2] {
    let places = tcp_level_places(level);
    let first = cookie as u32 & (places - 1);
    // 0 for the first level, else 1: a comparison would be a branch, and have the verifier go through the rest twice.
    let parity = level.div_ceil(2);
    [first, first ^ (places / 2) ^ parity]
}

const _: () = assert!(TCP_LEVELS_MORE == 2, "the parity fits these levels");

/// Owner of a place from which, or to which, the agent is moving the peer of the socket with this cookie.
///
/// The kernel counts cookies up from 1, and those that it gives in an interrupt down from `u64::MAX`
/// (include/linux/cookie.h): their two highest bits are equal, and those of a moving one are not.
#[inline(always)]
#[must_use]
pub const fn tcp_moving(cookie: u64) -> u64 {
    cookie ^ (1 << 62)
}

/// True for an owner by [`tcp_moving`], and for [`TCP_PLACE_CLOSED`].
#[inline(always)]
#[must_use]
pub const fn is_tcp_moving(owner: u64) -> bool {
    (owner ^ (owner << 1)) >> 63 != 0
}

/// A place in one of the levels: bits 0..28 are its index, bits 28..30 its level plus one; 0 is no place. Bit 30 is for
/// those who search.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpPlaceId(pub u32);

impl TcpPlaceId {
    /// No place.
    pub const NONE: Self = Self(0);

    const LEVEL_SHIFT: u32 = 28;

    /// The place with this index.
    #[inline(always)]
    #[must_use]
    pub const fn new(level: u32, index: u32) -> Self {
        Self(((level + 1) << Self::LEVEL_SHIFT) | index)
    }

    /// Its level. [`Self::NONE`] has none.
    #[inline(always)]
    #[must_use]
    pub const fn level(self) -> u32 {
        ((self.0 >> Self::LEVEL_SHIFT) & 3).wrapping_sub(1)
    }

    /// Its index in its level.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 & ((1 << Self::LEVEL_SHIFT) - 1)
    }
}

/// Number of flows in a UDP socket's own storage: as many as fit into the 440 bytes that the kernel allocates anyway.
pub const FLOWS_PER_SOCKET: usize = 7;

/// Flows of an unconnected UDP socket: the value of `UDP_SOCKETS`. 404 bytes. A flow has the same index in all four
/// arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpState {
    /// Count of datagrams that were sent by a flow or past all flows: the clock of `used`. It wraps around.
    pub clock: u32,
    /// [`UDP_HAS_OVERFLOWED`] or 0.
    pub flags: u32,
    /// Index at which the next new flow is tried, in 256ths of all flows. It wraps around.
    pub next: u32,
    /// [`flow_digest`] of each flow's VIP; 0 for a retired flow, by which nothing more is sent.
    pub vips: [u32; FLOWS_PER_SOCKET],
    /// [`flow_digest`] of each flow's backend if the flow claims it: datagrams of the backend show the flow's VIP. 0 if
    /// the socket has since sent to the backend itself or by another VIP. No two flows claim the same backend.
    pub backends: [u32; FLOWS_PER_SOCKET],
    /// Value of `clock` at each flow's last use.
    pub used: [u32; FLOWS_PER_SOCKET],
    /// The flows themselves.
    pub flows: [Flow; FLOWS_PER_SOCKET],
}

/// VIP that a socket sends to, and its backend. 44 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// VIP and backend.
    pub translation: Translation,
    /// [`Settings::epoch`] from before the backend was last found in the VIP's set. In the same epoch it is not looked
    /// up again.
    pub epoch: u32,
}

/// Flag of a socket that has flows in `UDP_FLOWS`.
pub const UDP_HAS_OVERFLOWED: u32 = 1;

/// [`digest`] of a VIP or a backend in [`UdpState`]: never 0, which has another meaning there.
#[inline(always)]
#[must_use]
pub const fn flow_digest(digest: u32) -> u32 {
    digest | 1
}

/// A flow that was not used for this many datagrams of its socket gives way to a new one.
pub const FLOW_IDLE_MAX: u32 = 4_096;

/// One direction of a flow that did not fit into its socket's storage: the key of `UDP_FLOWS`. 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Cookie of the socket.
    pub socket_cookie: u64,
    /// Address of the VIP or of the backend, by `direction`, in network order.
    pub address: [u32; 4],
    /// Its port in network order.
    pub port: u16,
    /// [`FLOW_FROM_VIP`] or [`FLOW_FROM_BACKEND`].
    pub direction: u16,
    /// Padding, always 0.
    pub zero: u32,
}

/// Direction of sending: the key is a VIP, the value its backend.
pub const FLOW_FROM_VIP: u16 = 0;
/// Direction of receiving: the key is a backend, the value its VIP.
pub const FLOW_FROM_BACKEND: u16 = 1;

/// Other end of a [`FlowKey`]: the value of `UDP_FLOWS`. 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowValue {
    /// Address of the backend or of the VIP, by the key's direction, in network order.
    pub address: [u32; 4],
    /// Its port in network order.
    pub port: u16,
    /// Padding, always 0.
    pub zero: u16,
    /// [`Translation::slot`] for [`FLOW_FROM_VIP`], else 0.
    pub slot: u32,
}

/// Settings of the agent for the programs: the one element of `SETTINGS`. 160 bytes. Single integers are written and
/// read whole. Excluded elements that stay keep their places when others change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Random number that is mixed into every choice, since all copies of a VM's snapshot get the same random numbers
    /// from the kernel.
    pub seed: u64,
    /// Filter: the union of [`filter_bit`] of all IPv4 addresses in `FRONTENDS`. Other destinations need no lookup.
    pub filter_v4: u64,
    /// The same for IPv6.
    pub filter_v6: u64,
    /// [`Balance`] by which backends are chosen.
    pub balance: u64,
    /// Number of `excluded_cgroups` in use.
    pub excluded_cgroup_count: u32,
    /// Number of `excluded_uids` in use.
    pub excluded_uid_count: u32,
    /// Number of `excluded_ports` in use.
    pub excluded_port_count: u32,
    /// Number that the agent raises after a backend has left a set, a frontend was deleted or got another set, or
    /// exclusions changed. Flows of an earlier epoch are looked up again.
    pub epoch: u32,
    /// Excluded cgroups, with all below them, and network namespaces. Unused elements have the id `u64::MAX`.
    pub excluded_cgroups: [ExcludedCgroup; EXCLUDED_CGROUPS_MAX],
    /// Excluded users. Unused elements are `u32::MAX`.
    pub excluded_uids: [u32; EXCLUSIONS_MAX],
    /// Excluded destination ports in network order. Unused elements are 0.
    pub excluded_ports: [u16; EXCLUSIONS_MAX],
}

/// Address of the VM: an element of `OWN_ADDRESSES`. 40 bytes.
///
/// The peer, at [`REFUSED_PORT`], of datagram sockets that connect to a Service without a backend: the source address
/// of such a socket is the one that it would have towards a pod, and its first datagram gets ECONNREFUSED.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnAddress {
    /// Index of the address in force. The agent writes the other one, then this index: programs see a change whole or
    /// not at all.
    pub current: u32,
    /// Padding, always 0.
    pub zero: u32,
    /// Addresses in network order, IPv4 as IPv4-mapped; all zero if the VM has none of the family.
    pub addresses: [[u32; 4]; 2],
}

/// Element of `OWN_ADDRESSES` for IPv4.
pub const OWN_ADDRESS_V4: u32 = 0;
/// Element of `OWN_ADDRESSES` for IPv6.
pub const OWN_ADDRESS_V6: u32 = 1;
/// Port of an [`OwnAddress`] to which sockets are connected that are to be refused: tcpmux, which is a service of TCP
/// alone (RFC 1078). At port 0 nobody can listen at all, but a socket that is connected to it has no peer for
/// `getpeername()` (net/ipv4/af_inet.c, `inet_getname`).
pub const REFUSED_PORT: u16 = 1;
/// [`Translation::slot`] of a socket that is connected to an [`OwnAddress`].
pub const REFUSED_SLOT: u32 = u32::MAX - 1;

/// Choice of a backend for a new connection: [`Settings::balance`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// At random, with equal weight.
    #[default]
    Random = 0,
    /// In turn.
    RoundRobin = 1,
}

/// Number of elements of `TURNS`. Sets with the same element take turns together.
pub const TURNS_MAX: u32 = 1 << TURNS_BITS;
const TURNS_BITS: u32 = 9;

/// Element of `TURNS` for a set whose backends begin at this slot. Sets of one size begin at regular distances, which
/// `spread` breaks up; otherwise many of them could have the same element.
#[inline(always)]
#[must_use]
pub const fn turn_of(first_slot: u32) -> u32 {
    (spread(first_slot) >> (u64::BITS - TURNS_BITS)) as u32
}

/// Hash of a slot: near slots differ widely, above all in the high bits.
#[inline(always)]
const fn spread(slot: u32) -> u64 {
    (slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Largest number of excluded users, and of excluded ports.
pub const EXCLUSIONS_MAX: usize = 8;
/// Largest number of excluded cgroups; network namespaces count as one.
pub const EXCLUDED_CGROUPS_MAX: usize = 4;

/// Excluded cgroup, or all network namespaces but one. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedCgroup {
    /// Id of the cgroup: the inode number of its directory. Cookie of the network namespace that is not excluded.
    pub id: u64,
    /// Level of the cgroup: the number of cgroups above it. `u32::MAX`, which no cgroup has, for network namespaces.
    pub level: u32,
    /// [`EXCLUDED_CGROUP`] or [`EXCLUDED_OTHER_NETNS`].
    pub kind: u32,
}

/// Kind of an [`ExcludedCgroup`] that is one.
pub const EXCLUDED_CGROUP: u32 = 0;
/// Kind of an [`ExcludedCgroup`] that stands for all network namespaces but one.
pub const EXCLUDED_OTHER_NETNS: u32 = 1;

/// Bit of an address in [`Settings::filter_v4`] or [`Settings::filter_v6`]. It depends on the first 16 bits of an IPv4
/// address or the first 64 bits of an IPv6 address, in which the Services of a cluster hardly differ.
#[inline(always)]
#[must_use]
pub const fn filter_bit(address: &[u32; 4]) -> u64 {
    filter_bit_of_prefix(if is_v4(address) { filter_prefix_v4(address) } else { filter_prefix_v6(address) })
}

/// Prefix of an IPv4 address for its filter bit.
#[inline(always)]
#[must_use]
pub const fn filter_prefix_v4(address: &[u32; 4]) -> u32 {
    u32::from_be(address[3]) >> 16
}

/// Prefix of an IPv6 address for its filter bit, folded to 32 bits.
#[inline(always)]
#[must_use]
pub const fn filter_prefix_v6(address: &[u32; 4]) -> u32 {
    address[0] ^ address[1].rotate_left(16)
}

/// Filter bit of a prefix.
#[inline(always)]
#[must_use]
pub const fn filter_bit_of_prefix(prefix: u32) -> u64 {
    1 << (prefix.wrapping_mul(0x9e37_79b1) >> 26)
}

/// Indices of `COUNTERS`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Connects, and first datagrams of a flow, that were sent to a backend.
    Forwarded = 0,
    /// Calls that failed with ECONNREFUSED, and connects of datagram sockets whose next calls do.
    Refused = 1,
    /// Calls that failed with EHOSTUNREACH, and connects of datagram sockets that a traffic policy or source ranges
    /// keep out.
    Dropped = 2,
    /// Entries inserted into `UDP_FLOWS`. Evictions are these less the removed and the present entries.
    UdpFlowsInserted = 3,
    /// Calls for which the kernel had no memory to store a translation. A connected socket then shows its backend; a
    /// datagram is refused.
    StateLost = 4,
    /// New connections whose client could not be remembered in `AFFINITY`.
    AffinityLost = 5,
    /// Entries removed from `UDP_FLOWS`: the backend no longer serves, or the socket has sent to it directly.
    UdpFlowsRemoved = 6,
}

/// Number of [`Counter`]s.
pub const COUNTERS_MAX: u32 = 7;
/// Index of no counter, for calls by which the agent tests the programs.
pub const UNCOUNTED: u16 = u16::MAX;

/// Maps a random number to an index in `0..count` with equal weight (up to `count` / 2^32), without a division. The
/// seed permutes the mapping.
#[inline(always)]
#[must_use]
pub const fn choose(random: u32, seed: u64, count: u32) -> u32 {
    let mixed = (random as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    choose_evenly((mixed >> 32) as u32, count)
}

/// Index of a set's backend in turn number `turn`. Seed and first slot decide at which backend the set begins.
/// Otherwise all VMs, and all Services with the same endpoints, would send their first connection to the same backend.
#[inline(always)]
#[must_use]
pub const fn choose_in_turn(turn: u64, seed: u64, set: SetWord) -> u32 {
    // All in 64 bits: each truncation to 32 costs two BPF instructions.
    let start = (seed >> 32).wrapping_add(spread(set.first_slot()) >> 32);
    match start.wrapping_add(turn).checked_rem(set.eligible() as u64) {
        Some(index) => index as u32,
        None => 0,
    }
}

/// Maps a number to an index in `0..count`, in order and with equal weight.
#[inline(always)]
#[must_use]
pub const fn choose_evenly(number: u32, count: u32) -> u32 {
    ((number as u64 * count as u64) >> 32) as u32
}

const _: () = assert!(size_of::<FrontendKey>() == 20 && align_of::<FrontendKey>() == 4);
const _: () = assert!(size_of::<Backend>() == 24 && align_of::<Backend>() == 4);
const _: () = assert!(size_of::<Set>() == 16);
const _: () = assert!(size_of::<AffinityKey>() == 16);
const _: () = assert!(size_of::<Translation>() == 40);
const _: () = assert!(size_of::<SocketState>() == 44);
const _: () = assert!(size_of::<UdpState>() == 404);
const _: () = assert!(size_of::<FlowKey>() == 32);
const _: () = assert!(size_of::<FlowValue>() == 24);
const _: () = assert!(size_of::<Settings>() == 160);
const _: () = assert!(size_of::<OwnAddress>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_word_returns_its_fields() {
        for (first_slot, eligible, serving, drops) in [
            (0, 0, 0, false),
            (1, 1, 0, false),
            (0x7fff_ffff, 65_535, 65_535, true),
            (262_143, 65_535, 1, false),
            (7, 0, 3, true),
        ] {
            let word = SetWord::new(first_slot, eligible, serving, drops);
            let back = (word.first_slot(), word.eligible(), word.serving(), word.drops());
            assert_eq!(back, (first_slot, u32::from(eligible), u32::from(serving), drops));
        }
    }

    #[test]
    fn choose_covers_the_whole_range_and_nothing_else() {
        for count in [1, 2, 3, 7, 100, 65_535] {
            for random in [0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
                for seed in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
                    assert!(choose(random, seed, count) < count);
                }
            }
        }
    }

    #[test]
    fn choices_in_turn_begin_at_the_seed_and_follow_one_another() {
        let choices =
            |seed, count| [0, 1, 2, 3, 4].map(|turn| choose_in_turn(turn, seed, SetWord::new(0, count, 0, false)));
        assert_eq!(choices(0, 3), [0, 1, 2, 0, 1]);
        assert_eq!(choices(7 << 32, 3), [1, 2, 0, 1, 2]);
        assert_eq!((choices(7, 1), choices(7, 0)), ([0; 5], [0; 5]));
    }

    /// Sets of one size, as in a real cluster, share a counter no more often than by chance, and begin at any backend.
    #[test]
    fn sets_of_one_size_have_turns_and_beginnings_of_their_own() {
        for size in [1, 2, 3, 5, 10, 16, 64, 100] {
            let mut sharing = [0u32; TURNS_MAX as usize];
            let mut starts = [0u32; 100];
            for set in 0..1_000 {
                sharing[turn_of(set * u32::from(size)) as usize] += 1;
                starts[choose_in_turn(0, 0, SetWord::new(set * u32::from(size), size, 0, false)) as usize] += 1;
            }
            assert!(sharing.iter().all(|&sets| sets <= 6), "{size}: {:?}", sharing.iter().max());
            let mean = 1_000 / u32::from(size);
            let starts = &starts[..size.into()];
            assert!(starts.iter().all(|&sets| sets <= 2 * mean + 8), "{size}: {starts:?}");
        }
    }

    /// Chi-square test of the choices for an even source. Two seeds must not agree more often than by chance.
    #[test]
    fn choose_is_even_and_depends_on_the_seed() {
        const SAMPLES: u32 = 1_000_000;
        for (count, critical) in [(2usize, 10.83), (3, 13.82), (7, 22.46), (100, 149.4)] {
            let mut hits = [0u32; 100];
            let mut agreed = 0;
            for sample in 0..SAMPLES {
                let random = sample.wrapping_mul(4_294_967);
                let chosen = choose(random, 0x0123_4567_89ab_cdef, count as u32);
                hits[chosen as usize] += 1;
                agreed += u32::from(chosen == choose(random, 0xfedc_ba98_7654_3210, count as u32));
            }
            let expected = f64::from(SAMPLES) / count as f64;
            let chi: f64 =
                hits[..count].iter().map(|&n| (f64::from(n) - expected) * (f64::from(n) - expected) / expected).sum();
            assert!(chi < critical, "{count} backends: chi-square {chi}");
            let agreed = f64::from(agreed) / f64::from(SAMPLES) * count as f64;
            assert!(
                (0.95..1.05).contains(&agreed),
                "{count} backends: the seeds agree {agreed} times as often as by chance"
            );
        }
    }

    #[test]
    fn digests_of_neighbours_differ() {
        let mut digests = [0u32; 4096];
        for (index, digest_of) in digests.iter_mut().enumerate() {
            let address = v4_mapped(u32::from_ne_bytes([10, 244, (index / 256) as u8, (index % 256) as u8]));
            *digest_of = digest(&address, 8080u16.to_be());
        }
        digests.sort_unstable();
        assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn an_affinity_entry_is_fresh_until_its_timeout_also_when_the_clock_wraps_around() {
        let seconds = |count: u64| affinity_time(count * 1_000_000_000);
        let entry = AffinityEntry::new(7, seconds(100));
        assert_eq!(entry.digest(), 7);
        assert!(entry.is_fresh(seconds(100), 1) && entry.is_fresh(seconds(160), 60));
        assert!(!entry.is_fresh(seconds(161), 60));
        assert!(AffinityEntry::new(7, 1_000).is_fresh(999, 1), "used by another CPU since the clock was read");
        let wrapping = AffinityEntry::new(7, u32::MAX);
        assert!(wrapping.is_fresh(10, 1) && !wrapping.is_fresh(seconds(10), 1));
    }

    #[test]
    fn the_usual_ranges_have_different_filter_bits() {
        let v4 = |octets| filter_bit(&v4_mapped(u32::from_ne_bytes(octets)));
        assert_eq!(v4([10, 96, 0, 1]), v4([10, 96, 255, 255]));
        for other in [[10, 244, 0, 1], [10, 0, 0, 1], [192, 168, 0, 1], [127, 0, 0, 1], [10, 42, 0, 1], [10, 128, 0, 1]]
        {
            assert_ne!(v4([10, 96, 0, 1]), v4(other), "{other:?}");
        }
    }
}
