//! The table as it lies in BPF maps: what the agent writes and the programs read, and what the programs keep for
//! themselves.
//!
//! Only integers and arrays cross this boundary, with explicit padding, so that both compilers agree on every byte.
//! Any change of a size, an offset or a meaning needs a new [`LAYOUT_VERSION`]: the version is part of the pin path, so
//! an agent never writes into maps that older programs read.
//!
//! ```text
//! written by the agent; the first three are maps of one map, so that it can be replaced by one of another size
//! FRONTENDS    hash        FrontendKey  -> SetId
//! SETS         array       SetId        -> Set           (a word that is switched atomically, and session affinity)
//! BACKENDS     array       slot         -> Backend
//! SETTINGS     array       0            -> Settings      (seed, filter, balance, exclusions)
//!
//! written by the programs
//! TCP_OWNERS   array       place        -> u64           (cookie of the socket that has the place, 0: free)
//!                          TCP_WITHOUT_PLACE -> u64      (1 as soon as a TCP socket is in SOCKETS)
//! TCP_PEERS    array       place        -> Translation   (peer of that socket)
//! SOCKETS      sk_storage               -> SocketState   (peer of a socket without a place; the agent's mark)
//! UDP_SOCKETS  sk_storage               -> UdpState      (flows of an unconnected socket)
//! UDP_FLOWS    LRU hash    FlowKey      -> FlowValue     (flows that do not fit into UDP_SOCKETS)
//! AFFINITY     LRU hash    AffinityKey  -> AffinityEntry
//! TURNS        array       turn_of(set) -> u64           (how many choices were made in turn)
//! COUNTERS     per CPU     Counter      -> u64
//! ```
#![no_std]

#[cfg(feature = "user")]
pub mod layout;

/// Version of everything in this file; part of the pin path (`<pin-dir>/v6`).
pub const LAYOUT_VERSION: u32 = 6;

/// Room in `FRONTENDS` when it is smallest. The agent replaces each of the three maps by a larger or a smaller one as the
/// data grows and shrinks, so real clusters meet neither this number nor [`FRONTENDS_MAX`].
pub const FRONTENDS_MIN: u32 = 256;
/// Most frontends (address, port, protocol) that the agent puts into `FRONTENDS`.
pub const FRONTENDS_MAX: u32 = 262_144;
/// Room in `SETS` when it is smallest.
pub const SETS_MIN: u32 = 256;
/// Most sets in `SETS`.
pub const SETS_MAX: u32 = 262_144;
/// Room in `BACKENDS` when it is smallest.
pub const BACKENDS_MIN: u32 = 1_536;
/// Most slots in `BACKENDS`: 96 MiB of them.
pub const BACKENDS_MAX: u32 = 4_194_304;
/// Most clients with session affinity that `AFFINITY` holds; beyond them, the one that has been idle longest is forgotten.
pub const AFFINITY_MAX: u32 = 512;
/// Most entries of `UDP_FLOWS`; each flow takes two.
pub const UDP_FLOWS_MAX: u32 = 1_024;

/// `IPPROTO_TCP`.
pub const PROTOCOL_TCP: u8 = 6;
/// `IPPROTO_UDP`.
pub const PROTOCOL_UDP: u8 = 17;
/// Any protocol: with port 0 the key of an address that is known as a ClusterIP. Ports of it that have no frontend of
/// their own refuse connections.
pub const PROTOCOL_ANY: u8 = 0;

/// Third word of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2), in network order as the kernel keeps it.
pub const V4_MAPPED_WORD: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// Puts an IPv4 address, in network order, into the one 16-byte address form.
#[inline(always)]
#[must_use]
pub const fn v4_mapped(address: u32) -> [u32; 4] {
    [0, 0, V4_MAPPED_WORD, address]
}

/// Whether an address in the one form is an IPv4 address.
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
    /// Padding, always 0: the kernel hashes every byte of a key.
    pub zero: u8,
}

/// Index into `SETS`: the value of `FRONTENDS`. It never changes while the frontend belongs to the same Service port, so
/// endpoints change by one atomic store into `SETS`, whatever the number of frontends.
pub type SetId = u32;

/// The set of every key with [`PROTOCOL_ANY`]: empty for ever.
pub const SET_UNKNOWN_PORT: SetId = 0;

/// One backend: an element of `BACKENDS`. 24 bytes, which is also the distance between two (the kernel rounds elements
/// up to 8 bytes: kernel/bpf/arraymap.c, `array_map_alloc`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Address in network order, in the same form as its frontend's.
    pub address: [u32; 4],
    /// Port in network order.
    pub port: u16,
    /// Padding, always 0.
    pub zero: u16,
    /// [`digest`] of the two: by it the slots of a set are sorted, so that a backend is found by binary search.
    pub digest: u32,
}

/// A digest of an address and a port, both in network order. Different backends may share one; it takes 2^16 backends in
/// one set to make that likely, so the address is compared, too.
#[inline(always)]
#[must_use]
pub const fn digest(address: &[u32; 4], port: u16) -> u32 {
    let high = ((address[0] as u64) << 32) | address[1] as u64;
    let low = ((address[2] as u64) << 32) | address[3] as u64;
    let mixed = high.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ low.wrapping_mul(0xc2b2_ae3d_27d4_eb4f) ^ port as u64;
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as u32
}

/// One set of backends: an element of `SETS`. 16 bytes; both words are written and read whole.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// A [`SetWord`].
    pub word: u64,
    /// An [`Affinity`].
    pub affinity: u64,
}

/// Where the backends of a set lie: a single 64-bit word, so that no program ever sees half of a change.
///
/// Bits 0..31 are the first slot in `BACKENDS`; bit 31 says what a set without eligible backends does: drop (1) or refuse
/// (0); bits 32..48 count the eligible backends, which come first; bits 48..64 count those that come after them: they
/// still serve their clients, but get no new ones. Each of the two runs is sorted by digest.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SetWord(pub u64);

impl SetWord {
    /// A set without backends that refuses.
    pub const EMPTY: Self = Self(0);

    const DROPS: u64 = 1 << 31;

    /// A set of `eligible` backends from `first_slot` on, and after them `serving` ones.
    #[inline(always)]
    #[must_use]
    pub const fn new(first_slot: u32, eligible: u16, serving: u16, drops: bool) -> Self {
        let flags = if drops { Self::DROPS } else { 0 };
        Self((first_slot as u64 & (Self::DROPS - 1)) | flags | ((eligible as u64) << 32) | ((serving as u64) << 48))
    }

    /// The slot of its first backend.
    #[inline(always)]
    #[must_use]
    pub const fn first_slot(self) -> u32 {
        self.0 as u32 & (Self::DROPS - 1) as u32
    }

    /// How many eligible backends it has.
    #[inline(always)]
    #[must_use]
    pub const fn eligible(self) -> u32 {
        (self.0 >> 32) as u32 & 0xffff
    }

    /// How many more backends still serve.
    #[inline(always)]
    #[must_use]
    pub const fn serving(self) -> u32 {
        (self.0 >> 48) as u32
    }

    /// Whether connections are dropped, not refused, while nothing is eligible.
    #[inline(always)]
    #[must_use]
    pub const fn drops(self) -> bool {
        self.0 & Self::DROPS != 0
    }
}

/// Most backends of one of a set's two runs: what [`SetWord`] can count.
pub const SET_BACKENDS_MAX: usize = u16::MAX as usize;

/// Session affinity of a set. Bits 0..32 name the Service port in `AFFINITY`; bits 32..64 are the timeout in seconds, 0
/// for a Service without affinity.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity(pub u64);

impl Affinity {
    /// No affinity.
    pub const NONE: Self = Self(0);

    /// Affinity for `seconds`, remembered under `id`.
    #[inline(always)]
    #[must_use]
    pub const fn new(id: u32, seconds: u32) -> Self {
        Self(id as u64 | ((seconds as u64) << 32))
    }

    /// Under which name it is remembered.
    #[inline(always)]
    #[must_use]
    pub const fn id(self) -> u32 {
        self.0 as u32
    }

    /// How long after its last new connection a client is remembered; 0: not at all.
    #[inline(always)]
    #[must_use]
    pub const fn seconds(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// A client of a Service port: the key of `AFFINITY`. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// [`Affinity::id`].
    pub id: u32,
    /// Padding, always 0.
    pub zero: u32,
    /// The client: its network namespace's cookie.
    pub netns_cookie: u64,
}

/// Backend of a client: the value of `AFFINITY`, one word that is only ever exchanged whole. Bits 0..32 are the backend's
/// digest; bits 32..64 when it last opened a connection, in [`affinity_time`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffinityEntry(pub u64);

impl AffinityEntry {
    /// The client used this backend at that time.
    #[inline(always)]
    #[must_use]
    pub const fn new(digest: u32, used: u32) -> Self {
        Self(digest as u64 | ((used as u64) << 32))
    }

    /// The backend.
    #[inline(always)]
    #[must_use]
    pub const fn digest(self) -> u32 {
        self.0 as u32
    }

    /// Whether the client is still remembered at `now`.
    #[inline(always)]
    #[must_use]
    pub const fn is_fresh(self, now: u32, seconds: u32) -> bool {
        let idle = now.wrapping_sub((self.0 >> 32) as u32);
        // Another CPU may have been here after `now` was taken.
        let is_later = idle >> 31 != 0;
        is_later || (idle as u64) << AFFINITY_TIME_SHIFT <= seconds as u64 * 1_000_000_000
    }
}

const AFFINITY_TIME_SHIFT: u32 = 24;

/// `CLOCK_MONOTONIC` in steps of 2^24 ns (17 ms), which wrap around after two years.
#[inline(always)]
#[must_use]
pub const fn affinity_time(monotonic_ns: u64) -> u32 {
    (monotonic_ns >> AFFINITY_TIME_SHIFT) as u32
}

/// Translation of a socket's destination: VIP and backend. 40 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Translation {
    /// The address that the application used, in network order.
    pub vip: [u32; 4],
    /// The backend's address, in network order.
    pub backend: [u32; 4],
    /// The port that the application used, in network order.
    pub vip_port: u16,
    /// The backend's port, in network order.
    pub backend_port: u16,
    /// Where the backend lay in `BACKENDS` when it was last looked for: a hint.
    pub slot: u32,
}

/// State of a socket that has no place of its own: the value of `SOCKETS`. 44 bytes.
///
/// `peer` is the translation of the last `connect()`, and is believed only where it matches the address that the
/// kernel has. Where a socket with state connects to no Service, both sides of it are that address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// The last `connect()`. It comes first, so that it is where the state is: the verifier lets nothing be added to a pointer
    /// that may be null.
    pub peer: Translation,
    /// [`SOCKET_UNTRANSLATED`] or 0.
    pub flags: u32,
}

/// This socket is the agent's own and is never translated.
pub const SOCKET_UNTRANSLATED: u32 = 1;

/// How many TCP sockets can be remembered without memory of their own. 96 KiB; a power of two.
pub const TCP_PLACES: u32 = 2_048;

/// Behind the places: whether there was ever a socket without one.
pub const TCP_WITHOUT_PLACE: u32 = TCP_PLACES;

/// The two places that a socket with this cookie may have. The kernel gives each of its CPUs a run of cookies, one after the
/// other, so that the sockets of one CPU are beside each other; two CPUs that have met at one place have not at the other.
#[inline(always)]
#[must_use]
pub const fn tcp_places(cookie: u64) -> [u32; 2] {
    let first = cookie as u32 & (TCP_PLACES - 1);
    [first, first ^ (TCP_PLACES / 2)]
}

/// How many Services one UDP socket remembers by itself: as many as fit into the 440 bytes that the kernel allocates anyway.
pub const FLOWS_PER_SOCKET: usize = 7;

/// Flows of an unconnected UDP socket: the value of `UDP_SOCKETS`. 404 bytes. A flow is one index of the four arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpState {
    /// Counts datagrams to Services: the clock of `used`. It wraps around.
    pub clock: u32,
    /// [`UDP_HAS_OVERFLOWED`] or 0.
    pub flags: u32,
    /// Where the place is that is looked at for the next new flow, in 256ths of all places; it wraps around.
    pub next: u32,
    /// [`flow_digest`] of each flow's VIP; 0 if nothing is sent that way any more.
    pub vips: [u32; FLOWS_PER_SOCKET],
    /// [`flow_digest`] of each flow's backend; 0 if its datagrams are not the VIP's (any more): the socket has since sent
    /// to the backend itself, or to it for another VIP. No two flows have the same.
    pub backends: [u32; FLOWS_PER_SOCKET],
    /// `clock` when each flow was last used.
    pub used: [u32; FLOWS_PER_SOCKET],
    /// The flows themselves.
    pub flows: [Flow; FLOWS_PER_SOCKET],
}

/// One Service that a socket sends to. 44 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Which, and by which backend.
    pub translation: Translation,
    /// [`Settings::epoch`] from before its backend was last found among those of its VIP; as long as that is the same, it
    /// is not looked for again.
    pub epoch: u32,
}

/// Some flows of this socket are in `UDP_FLOWS`.
pub const UDP_HAS_OVERFLOWED: u32 = 1;

/// A backend's, or a VIP's, [`digest`] as a socket's flows have it: 0 is kept free.
#[inline(always)]
#[must_use]
pub const fn flow_digest(digest: u32) -> u32 {
    digest | 1
}

/// A flow that has not been used for so many datagrams of its socket gives way to a new one.
pub const FLOW_IDLE_MAX: u32 = 4_096;

/// One direction of a flow that does not fit into its socket's state: the key of `UDP_FLOWS`. 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The socket.
    pub socket_cookie: u64,
    /// The VIP, or the backend, in network order.
    pub address: [u32; 4],
    /// Its port in network order.
    pub port: u16,
    /// [`FLOW_FROM_VIP`] or [`FLOW_FROM_BACKEND`].
    pub direction: u16,
    /// Padding, always 0.
    pub zero: u32,
}

/// The key is a VIP, the value its backend.
pub const FLOW_FROM_VIP: u16 = 0;
/// The key is a backend, the value its VIP.
pub const FLOW_FROM_BACKEND: u16 = 1;

/// The other end of a [`FlowKey`]: the value of `UDP_FLOWS`. 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowValue {
    /// The backend, or the VIP, in network order.
    pub address: [u32; 4],
    /// Its port in network order.
    pub port: u16,
    /// Padding, always 0.
    pub zero: u16,
    /// As [`Translation::slot`], for [`FLOW_FROM_VIP`].
    pub slot: u32,
}

/// Settings of the agent for the programs: the one element of `SETTINGS`. 160 bytes; fields of 8 bytes are written and read
/// whole, the others before the programs are attached.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Mixed into every choice: the kernel's random numbers are the same in every copy of a VM's snapshot.
    pub seed: u64,
    /// Bit [`filter_bit`] is set for every IPv4 address in `FRONTENDS`: other connects need no lookup.
    pub filter_v4: u64,
    /// As `filter_v4`, for IPv6.
    pub filter_v6: u64,
    /// How backends are chosen: a [`Balance`].
    pub balance: u64,
    /// How many of `excluded_cgroups` are in use.
    pub excluded_cgroup_count: u32,
    /// How many of `excluded_uids` are in use.
    pub excluded_uid_count: u32,
    /// How many of `excluded_ports` are in use.
    pub excluded_port_count: u32,
    /// Raised after a backend has left a set, after a frontend was deleted or given another set, and after exclusions
    /// changed: what sockets remember of lookups is then looked up again.
    pub epoch: u32,
    /// Sockets of processes in or below these cgroups are left alone. Unused ones have the id `u64::MAX`.
    pub excluded_cgroups: [ExcludedCgroup; EXCLUDED_CGROUPS_MAX],
    /// Sockets of processes of these users are left alone. Unused ones are `u32::MAX`.
    pub excluded_uids: [u32; EXCLUSIONS_MAX],
    /// Destinations with these ports, in network order, are left alone. Unused ones are 0.
    pub excluded_ports: [u16; EXCLUSIONS_MAX],
}

/// How a backend is chosen for a new connection: [`Settings::balance`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// Any, with equal weight.
    #[default]
    Random = 0,
    /// One after the other.
    RoundRobin = 1,
}

/// How many elements `TURNS` has. Sets that share one take turns together.
pub const TURNS_MAX: u32 = 1 << TURNS_BITS;
const TURNS_BITS: u32 = 9;

/// The element of `TURNS` of a set whose backends begin at this slot. Sets of one size lie at regular distances, which must
/// not meet again after a few.
#[inline(always)]
#[must_use]
pub const fn turn_of(first_slot: u32) -> u32 {
    (spread(first_slot) >> (u64::BITS - TURNS_BITS)) as u32
}

/// Slots that are near each other become numbers that are not, above all in their high bits.
#[inline(always)]
const fn spread(slot: u32) -> u64 {
    (slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Most uids and ports, each, that can be left alone.
pub const EXCLUSIONS_MAX: usize = 8;
/// Most cgroups, with all below them, that can be left alone.
pub const EXCLUDED_CGROUPS_MAX: usize = 4;

/// A cgroup whose processes are left alone. 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExcludedCgroup {
    /// Its id: the inode number of its directory.
    pub id: u64,
    /// How many cgroups are above it.
    pub level: u32,
    /// Padding, always 0.
    pub zero: u32,
}

/// The bit of an address in [`Settings::filter_v4`] or [`Settings::filter_v6`]: from the first 16 bits of an IPv4
/// address, the first 64 of an IPv6 one. The Services of a cluster share few of them.
#[inline(always)]
#[must_use]
pub const fn filter_bit(address: &[u32; 4]) -> u64 {
    filter_bit_of_prefix(if is_v4(address) { filter_prefix_v4(address) } else { filter_prefix_v6(address) })
}

/// Prefix of an IPv4 address that decides about its bit.
#[inline(always)]
#[must_use]
pub const fn filter_prefix_v4(address: &[u32; 4]) -> u32 {
    u32::from_be(address[3]) >> 16
}

/// Prefix of an IPv6 address, folded, that decides about its bit.
#[inline(always)]
#[must_use]
pub const fn filter_prefix_v6(address: &[u32; 4]) -> u32 {
    address[0] ^ address[1].rotate_left(16)
}

/// The bit of a prefix.
#[inline(always)]
#[must_use]
pub const fn filter_bit_of_prefix(prefix: u32) -> u64 {
    1 << (prefix.wrapping_mul(0x9e37_79b1) >> 26)
}

/// Indices of `COUNTERS`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Connects, and first datagrams of a flow, that got a backend.
    Forwarded = 0,
    /// Calls that failed with ECONNREFUSED.
    Refused = 1,
    /// Calls that failed with EHOSTUNREACH.
    Dropped = 2,
    /// Entries put into `UDP_FLOWS`; less what was removed and what it holds, that is how many were evicted.
    UdpFlowsInserted = 3,
    /// Sockets for whose state there was no memory: the application saw the backend's address.
    StateLost = 4,
    /// Clients whose backend could not be remembered.
    AffinityLost = 5,
    /// Entries taken out of `UDP_FLOWS` because their backend serves no more.
    UdpFlowsRemoved = 6,
}

/// How many [`Counter`]s there are.
pub const COUNTERS_MAX: u32 = 7;

/// Maps a random number onto `0..count` with equal weight (up to `count` / 2^32), without a division. The seed decides
/// which numbers lead where.
#[inline(always)]
#[must_use]
pub const fn choose(random: u32, seed: u64, count: u32) -> u32 {
    let mixed = (random as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    choose_evenly((mixed >> 32) as u32, count)
}

/// The index of a set's choice after so many others, one after the other. The seed and the set's place decide where the first
/// one is: else the first connection of each VM of a kind, and to each of several Services with the same endpoints, would go to
/// the same backend.
#[inline(always)]
#[must_use]
pub const fn choose_in_turn(turn: u64, seed: u64, set: SetWord) -> u32 {
    // All in 64 bits: BPF takes two more instructions for whatever is to have 32.
    let start = (seed >> 32).wrapping_add(spread(set.first_slot()) >> 32);
    match start.wrapping_add(turn).checked_rem(set.eligible() as u64) {
        Some(index) => index as u32,
        None => 0,
    }
}

/// Maps a number onto `0..count` in its order, with equal weight.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_word_gives_back_what_was_put_in() {
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
    fn choices_in_turn_come_one_after_the_other_from_where_the_seed_says() {
        let choices =
            |seed, count| [0, 1, 2, 3, 4].map(|turn| choose_in_turn(turn, seed, SetWord::new(0, count, 0, false)));
        assert_eq!(choices(0, 3), [0, 1, 2, 0, 1]);
        assert_eq!(choices(7 << 32, 3), [1, 2, 0, 1, 2]);
        assert_eq!((choices(7, 1), choices(7, 0)), ([0; 5], [0; 5]));
    }

    /// Sets of one size, as those of a real cluster, share no counter more often than chance has it, and begin anywhere.
    #[test]
    fn sets_of_one_size_neither_share_turns_nor_begin_alike() {
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

    /// Chi-square of the choices of a source that is itself even; and two seeds must not agree more often than chance.
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
    fn affinity_is_remembered_up_to_its_timeout_and_over_the_end_of_the_clock() {
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
    fn the_filter_tells_the_usual_ranges_apart() {
        let v4 = |octets| filter_bit(&v4_mapped(u32::from_ne_bytes(octets)));
        assert_eq!(v4([10, 96, 0, 1]), v4([10, 96, 255, 255]));
        for other in [[10, 244, 0, 1], [10, 0, 0, 1], [192, 168, 0, 1], [127, 0, 0, 1], [10, 42, 0, 1], [10, 128, 0, 1]]
        {
            assert_ne!(v4([10, 96, 0, 1]), v4(other), "{other:?}");
        }
    }
}
