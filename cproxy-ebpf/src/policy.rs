//! Layout of the maps of network policy. They have a version and a directory of their own, and exist only in guests
//! whose agent enforces policy.
//!
//! ```text
//! written by the agent; the three arrays of maps hold one map for each of two generations, of which one is in force
//! POLICY_STATE      array        0          -> State     (generation in force, directions)
//! POLICY_PEERS      array of hashes          address    -> Runs
//! POLICY_RANGES     array of tries           prefix     -> Runs
//! POLICY_INTERVALS  array of arrays          slot       -> Interval, sorted within a run
//!
//! written by the programs
//! POLICY_REPLIES    LRU hash     ReplyKey   -> u64       (second of the last datagram; last bit: its direction)
//! POLICY_DENIALS    LRU hash     DenialKey  -> Denial
//! POLICY_COUNTERS   per CPU      Counter    -> u64
//! POLICY_EVENTS     array of ring buffers    observation::Event; empty but while `cproxy trace` runs
//! ```
//!
//! `SOCKETS` and `OWN_ADDRESSES` are those of the table.

use crate::ExcludedCgroup;

/// Version of all layouts in this file; part of the pin path (`<pin-dir>/policy-v1`).
pub const POLICY_LAYOUT_VERSION: u32 = 1;

/// Smallest number of elements of `POLICY_PEERS` and `POLICY_INTERVALS`.
pub const POLICY_ROOM_MIN: u32 = 64;
/// Number of ranges that the trie takes. It has memory for those alone that are there.
pub const POLICY_RANGES_MAX: u32 = 1 << 17;
/// Replies that are remembered.
pub const POLICY_REPLIES_MIN: u32 = 4_096;
/// Denials that are remembered.
pub const POLICY_DENIALS_MIN: u32 = 256;
/// Further elements of an LRU hash for each CPU. It takes so many at once, and evicts as many others if they are not
/// there (kernel/bpf/bpf_lru_list.c, `LOCAL_FREE_TARGET`; fewer since Linux 6.16).
pub const LRU_ELEMENTS_PER_CPU: u32 = 128;
/// Number of counters.
pub const POLICY_COUNTERS_MAX: u32 = 16;
/// Cgroups whose calls no policy concerns, at most.
pub const EXEMPT_CGROUPS_MAX: usize = 8;

/// Seconds for which replies of UDP pass after a datagram, as for conntrack's streams
/// (`nf_conntrack_udp_timeout_stream`).
pub const REPLY_SECONDS: u64 = 120;

/// `IPPROTO_SCTP`.
pub const PROTOCOL_SCTP: u8 = 132;

/// Addresses that the agent's canary calls where a policy denies it, in network order, from the ranges for benchmarks
/// of networks, which are not routed (RFC 2544, RFC 5180). Their denials are not recorded.
pub const DENIED_CANARIES: [[u32; 4]; 2] = [
    crate::v4_mapped(u32::from_ne_bytes([198, 19, 255, 253])),
    [u32::from_ne_bytes([0x20, 1, 0, 2]), 0, 0, u32::from_ne_bytes([0, 0, 0xff, 0xfd])],
];
/// Port of these calls (echo, RFC 862), in host order.
pub const DENIED_CANARY_PORT: u16 = 7;

/// Slot in a [`crate::Translation`] of a datagram socket that policy refuses.
pub const POLICY_REFUSED_SLOT: u32 = crate::REFUSED_SLOT - 1;

/// Generation in force and directions, as one word that changes at one instant.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateWord(pub u64);

/// State of the policy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// A [`StateWord`].
    pub word: u64,
    /// Cookie of the pod's network namespace. Sockets in others are not the pod's.
    pub netns_cookie: u64,
    /// Cgroups whose calls no policy concerns; unused ones are zero.
    pub exempt_cgroups: [ExcludedCgroup; EXEMPT_CGROUPS_MAX],
}

/// Runs of both directions: for each the first slot (20 bits) and the number of intervals (12 bits).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunsWord(pub u64);

/// Interval of ports: protocol (8 bits), first port (16), last port (16), 1 if it allows, rule (23 bits). The order of
/// the words is that of protocols and first ports.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IntervalWord(pub u64);

/// Datagrams between a port of the pod and a peer, whose replies pass. Address and ports are in network order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyKey {
    /// Address of the peer, in network order.
    pub peer: [u32; 4],
    /// Port of the peer.
    pub peer_port: u16,
    /// Port of the pod.
    pub own_port: u16,
}

/// Denied peer. The port is the one that the peer has called, or that was called at the peer, in host order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenialKey {
    /// Address of the peer, in network order.
    pub peer: [u32; 4],
    /// Port that was called.
    pub port: u16,
    /// Number of the protocol.
    pub protocol: u8,
    /// [`EGRESS`] or 0.
    pub direction: u8,
}

/// Denials of a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Number of denied calls, datagrams or connections.
    pub count: u64,
    /// Time of the last one since boot.
    pub last_ns: u64,
    /// Rule that has denied it, or [`NO_RULE`].
    pub rule: u32,
    /// 1 if it was only audited.
    pub is_audited: u32,
}

/// Counters of `POLICY_COUNTERS`. Those of UDP follow those of TCP.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyCounter {
    /// Denied connections to the pod.
    DeniedIngress = 0,
    /// Denied calls of the pod.
    DeniedEgress = 2,
    /// Connections to the pod that were only audited.
    AuditedIngress = 4,
    /// Calls of the pod that were only audited.
    AuditedEgress = 6,
    /// Sockets of protocols that cannot be policed.
    DeniedSockets = 8,
}

/// Direction in keys and arguments of the programs: 0 is ingress.
pub const EGRESS: u8 = 1;
/// Rule of an interval that no rule has made.
pub const NO_RULE: u32 = (1 << RULE_BITS) - 1;

const RULE_BITS: u32 = 23;
const LENGTH_BITS: u32 = 12;
const ALLOW_BIT: u32 = RULE_BITS;
const LAST_SHIFT: u32 = ALLOW_BIT + 1;
const FIRST_SHIFT: u32 = LAST_SHIFT + 16;
const PROTOCOL_SHIFT: u32 = FIRST_SHIFT + 16;

impl StateWord {
    const INGRESS: u64 = 1 << 1;
    const EGRESS: u64 = 1 << 2;
    const AUDIT: u64 = 1 << 3;

    /// State of a generation (0 or 1) that is enforced in some directions, or only audited.
    #[must_use]
    pub const fn new(generation: u32, ingress: bool, egress: bool, audit: bool) -> Self {
        let mut word = (generation & 1) as u64;
        if ingress {
            word |= Self::INGRESS;
        }
        if egress {
            word |= Self::EGRESS;
        }
        if audit {
            word |= Self::AUDIT;
        }
        Self(word)
    }

    /// Generation in force.
    #[inline(always)]
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0 & 1) as u32
    }

    /// Whether traffic to the pod is looked at.
    #[inline(always)]
    #[must_use]
    pub const fn ingress(self) -> bool {
        self.0 & Self::INGRESS != 0
    }

    /// Whether traffic from the pod is looked at.
    #[inline(always)]
    #[must_use]
    pub const fn egress(self) -> bool {
        self.0 & Self::EGRESS != 0
    }

    /// Whether denials are only recorded.
    #[inline(always)]
    #[must_use]
    pub const fn audit(self) -> bool {
        self.0 & Self::AUDIT != 0
    }
}

impl RunsWord {
    /// Runs of slots and lengths.
    #[must_use]
    pub const fn new(ingress: (u32, u16), egress: (u32, u16)) -> Self {
        Self((half(ingress) << 32) | half(egress))
    }

    /// The run of a direction: first slot and length.
    #[inline(always)]
    #[must_use]
    pub const fn run(self, direction: u8) -> (u32, u32) {
        let half = if direction == EGRESS { self.0 as u32 } else { (self.0 >> 32) as u32 };
        (half >> LENGTH_BITS, half & ((1 << LENGTH_BITS) - 1))
    }
}

const fn half((first, length): (u32, u16)) -> u64 {
    ((first << LENGTH_BITS) | (length as u32 & ((1 << LENGTH_BITS) - 1))) as u64
}

impl IntervalWord {
    /// An interval. The rule is cut to its bits.
    #[must_use]
    pub const fn new(protocol: u8, first: u16, last: u16, allows: bool, rule: u32) -> Self {
        let allow = if allows { 1 << ALLOW_BIT } else { 0 };
        let rule = (if rule > NO_RULE { NO_RULE } else { rule }) as u64;
        let ports = ((first as u64) << FIRST_SHIFT) | ((last as u64) << LAST_SHIFT);
        Self(((protocol as u64) << PROTOCOL_SHIFT) | ports | allow | rule)
    }

    /// The largest word of an interval that begins at this port or before it.
    #[inline(always)]
    #[must_use]
    pub const fn up_to(protocol: u8, port: u16) -> Self {
        Self(((protocol as u64) << PROTOCOL_SHIFT) | ((port as u64) << FIRST_SHIFT) | ((1 << FIRST_SHIFT) - 1))
    }

    /// Whether the interval, which begins at the port or before it, has the port.
    #[inline(always)]
    #[must_use]
    pub const fn has(self, protocol: u8, port: u16) -> bool {
        self.0 >> PROTOCOL_SHIFT == protocol as u64 && port <= (self.0 >> LAST_SHIFT) as u16
    }

    /// Whether the interval has the port of the protocol.
    #[must_use]
    pub const fn contains(self, protocol: u8, port: u16) -> bool {
        self.has(protocol, port) && (self.0 >> FIRST_SHIFT) as u16 <= port
    }

    /// Whether it allows.
    #[inline(always)]
    #[must_use]
    pub const fn allows(self) -> bool {
        self.0 & (1 << ALLOW_BIT) != 0
    }

    /// Its rule, or [`NO_RULE`].
    #[inline(always)]
    #[must_use]
    pub const fn rule(self) -> u32 {
        self.0 as u32 & NO_RULE
    }
}

const _: () = {
    assert!(size_of::<State>() == 16 + EXEMPT_CGROUPS_MAX * 16 && size_of::<ReplyKey>() == 20);
    assert!(size_of::<DenialKey>() == 20 && size_of::<Denial>() == 24);
};
