//! Layout of the maps that only the tracing set of the programs has. They are removed with it, so no
//! [`LAYOUT_VERSION`](crate::LAYOUT_VERSION) covers them: both sides are of one build.
//!
//! ```text
//! TRACE_EVENTS     ring buffer                              of Event
//! TRACE_FILTER     array                     0           -> Filter
//! TRACE_ADDRESSES  hash                      FrontendKey -> u32     (any value; PROTOCOL_ANY: all ports)
//! TRACE_LOST       per-CPU array             0           -> u64     (events that found the ring buffer full)
//! SERVICE_COUNTS   per-CPU LRU hash          FrontendKey -> [u64; COUNTS] (by Count)
//! ```

/// Size of the ring buffer, which bounds the memory of events: room for 2,520.
pub const EVENTS_BYTES: u32 = 256 << 10;

/// Number of frontends that are counted. A further one takes the place of one that was idle for long.
pub const COUNTED_FRONTENDS_MAX: u32 = 1_024;

/// Number of destinations in a filter.
pub const FILTER_ADDRESSES_MAX: u32 = 256;

/// Outcome of a call: [`Event::verdict`]. Its bit in [`Filter::verdicts`] is `1 << verdict`. The first ones are in the
/// order of [`Count`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The call goes to a backend.
    Forwarded = 0,
    /// The call fails with ECONNREFUSED.
    Refused = 1,
    /// The call fails with EHOSTUNREACH.
    Dropped = 2,
    /// The call goes to the ClusterIP itself, since its process or port is excluded.
    Direct = 3,
    /// The caller sees the ClusterIP in place of the backend.
    Reversed = 4,
    /// A translated TCP socket was closed.
    Closed = 5,
    /// Network policy denies the call, or what comes in.
    Denied = 6,
    /// Network policy would deny it, and is only audited.
    Audited = 7,
}

/// System call of an observation: [`Event::call`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `connect()`.
    Connect = 0,
    /// `sendto()` and the like.
    Send = 1,
    /// `recvfrom()` and the like.
    Receive = 2,
    /// `getpeername()`.
    PeerName = 3,
    /// The close of a socket.
    Close = 4,
}

/// Reason of a verdict: [`Event::reason`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No reason.
    None = 0,
    /// The backend was chosen at random.
    Random = 1,
    /// The backend was chosen in turn.
    RoundRobin = 2,
    /// The backend is the client's, by session affinity.
    Affinity = 3,
    /// The Service has no eligible endpoint.
    NoEndpoint = 4,
    /// The ClusterIP has no such port.
    UnknownPort = 5,
    /// The Service has endpoints, but source ranges or its traffic policy allow none here.
    NotAllowed = 6,
    /// The port is excluded.
    ExcludedPort = 7,
    /// The user is excluded.
    ExcludedUid = 8,
    /// The cgroup is excluded.
    ExcludedCgroup = 9,
    /// The table was replaced meanwhile.
    TableReplaced = 10,
    /// The kernel had no memory for the translation.
    NoMemory = 11,
}

/// Element of the ring buffer. 96 bytes.
///
/// Of a denial by network policy, `vip` is the peer, `vip_port` the port that was called, and the first word of
/// `backend` the rule. What comes in ([`Call::Receive`]) has no process, cgroup and socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub time_ns: u64,
    /// Cookie of the socket.
    pub socket_cookie: u64,
    /// Cookie of the socket's network namespace.
    pub netns_cookie: u64,
    /// Id of the process's cgroup.
    pub cgroup_id: u64,
    /// Address that the application names, in network order.
    pub vip: [u32; 4],
    /// Address of the backend, in network order; 0 without one.
    pub backend: [u32; 4],
    /// Port that the application names, in network order.
    pub vip_port: u16,
    /// Port of the backend, in network order; 0 without one.
    pub backend_port: u16,
    /// [`PROTOCOL_TCP`](crate::PROTOCOL_TCP) or [`PROTOCOL_UDP`](crate::PROTOCOL_UDP).
    pub protocol: u8,
    /// A [`Verdict`].
    pub verdict: u8,
    /// A [`Call`].
    pub call: u8,
    /// A [`Reason`].
    pub reason: u8,
    /// Id of the process; 0 before Linux 6.1.
    pub pid: u32,
    /// User of the process.
    pub uid: u32,
    /// Name of the thread, ended by 0; empty before Linux 6.1.
    pub command: [u8; 16],
}

/// Filter of events: the one element of `TRACE_FILTER`. 32 bytes. An event passes if all parts match.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Id of the cgroup in or below which the process is; 0: any.
    pub cgroup_id: u64,
    /// Level of that cgroup: the number of cgroups above it.
    pub cgroup_level: u32,
    /// Bits of the [`Verdict`]s that pass. 0: no event is wanted.
    pub verdicts: u32,
    /// Id of the process; 0: any.
    pub pid: u32,
    /// Protocol; 0: any.
    pub protocol: u32,
    /// 1 if the destination must be in `TRACE_ADDRESSES`; 0: any destination.
    pub has_addresses: u32,
    /// Padding, always 0.
    pub zero: u32,
}

/// Indices of a value of `SERVICE_COUNTS`.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Connects, and first datagrams of a flow, that were sent to a backend.
    Connections = 0,
    /// Calls that failed with ECONNREFUSED.
    Refusals = 1,
    /// Calls that failed with EHOSTUNREACH.
    Drops = 2,
}

/// Number of [`Count`]s.
pub const COUNTS: usize = 3;

const _: () = assert!(size_of::<Event>() == 96);
const _: () = assert!(size_of::<Filter>() == 32);

#[cfg(feature = "user")]
mod user {
    // SAFETY: repr(C) with explicit padding and integers only.
    unsafe impl aya::Pod for super::Filter {}
}
