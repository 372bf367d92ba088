//! Points of observation of the tracing set: counters by frontend, and events for `cproxy trace`.
//!
//! The callers pass numbers and pointers, not a structure: they are verified at each point, the subprograms once.

use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST},
    btf_maps::{Array, HashMap, LruPerCpuHashMap, PerCpuArray, RingBuf},
    helpers::{
        bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::{
            bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie,
            bpf_get_socket_cookie, bpf_ktime_get_ns,
        },
    },
    macros::btf_map,
    programs::{SockAddrContext, SockContext},
};
use cproxy_ebpf::{
    Backend, Balance, FrontendKey, PROTOCOL_ANY, PROTOCOL_TCP, SET_UNKNOWN_PORT, SetId, Translation,
    observation::{
        COUNTED_FRONTENDS_MAX, COUNTS, Call, EVENTS_BYTES, Event, FILTER_ADDRESSES_MAX, Filter, Reason, Verdict,
    },
};

use crate::{
    deny::ERRNO_HELPER,
    endpoint::Endpoint,
    lookup::{EXCLUDED, FoundSet},
    maps::SETTINGS,
    peer::is_translated,
    subprogram::increment,
};

#[btf_map]
static TRACE_EVENTS: RingBuf<Event, { EVENTS_BYTES as usize }> = RingBuf::new();

#[btf_map]
static TRACE_FILTER: Array<Filter, 1> = Array::new();

#[btf_map]
static TRACE_ADDRESSES: HashMap<FrontendKey, u32, { FILTER_ADDRESSES_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

#[btf_map]
static TRACE_LOST: PerCpuArray<u64, 1> = PerCpuArray::new();

#[btf_map]
static SERVICE_COUNTS: LruPerCpuHashMap<FrontendKey, [u64; COUNTS], { COUNTED_FRONTENDS_MAX as usize }> =
    LruPerCpuHashMap::new();

/// Whether the lookup distinguishes excluded calls.
pub(crate) const IS_ON: bool = true;

/// No backend.
static NOWHERE: Endpoint = Endpoint { address: [0; 4], port: 0, zero: 0 };

/// Call and verdict in one number, since a subprogram has five arguments at most.
#[derive(Clone, Copy)]
struct Codes(u64);

impl Codes {
    /// The detail is a number that the reason depends on: see [`cproxy_reason`].
    #[inline(always)]
    fn new(call: Call, protocol: u8, verdict: u8, reason: Reason, detail: u32) -> Self {
        let codes = [protocol, verdict, call as u8, reason as u8];
        Self(u32::from_le_bytes(codes) as u64 | (detail as u64) << 32)
    }

    #[inline(always)]
    fn protocol(self) -> u8 {
        self.0 as u8
    }

    #[inline(always)]
    fn verdict(self) -> u8 {
        (self.0 >> 8) as u8
    }

    #[inline(always)]
    fn call(self) -> u8 {
        (self.0 >> 16) as u8
    }

    #[inline(always)]
    fn reason(self) -> u8 {
        (self.0 >> 24) as u8
    }

    #[inline(always)]
    fn detail(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline(always)]
    fn is_unknown_port(self) -> bool {
        self.verdict() == Verdict::Refused as u8 && self.detail() == SET_UNKNOWN_PORT
    }
}

/// A call that goes to a backend.
#[inline(always)]
pub(crate) fn translated(
    ctx: &SockAddrContext,
    call: Call,
    protocol: u8,
    vip: &Endpoint,
    backend: &Backend,
    set: &FoundSet,
) {
    // A backend begins as an endpoint does.
    let backend = (&raw const *backend).cast();
    let codes = Codes::new(call, protocol, Verdict::Forwarded as u8, Reason::Random, set.affinity.seconds());
    observe(ctx, vip, backend, codes);
}

/// A call that is refused or dropped, for this reason or the set's.
#[inline(always)]
pub(crate) fn denied(ctx: &SockAddrContext, call: Call, protocol: u8, vip: &Endpoint, set: &FoundSet, reason: Reason) {
    // Without a branch: the verifier would follow both.
    let verdict = Verdict::Refused as u8 + set.word.drops() as u8;
    observe(ctx, vip, core::ptr::null(), Codes::new(call, protocol, verdict, reason, set.id));
}

/// A call to an address that is no frontend for it.
#[inline(always)]
pub(crate) fn direct(ctx: &SockAddrContext, call: Call, protocol: u8, destination: &Endpoint, set: SetId) {
    if set == EXCLUDED {
        let codes = Codes::new(call, protocol, Verdict::Direct as u8, Reason::ExcludedCgroup, 0);
        observe(ctx, destination, core::ptr::null(), codes);
    }
}

/// A VIP that is shown in place of a backend.
#[inline(always)]
pub(crate) fn reversed(
    ctx: &SockAddrContext,
    call: Call,
    protocol: u8,
    backend: &Endpoint,
    vip: &[u32; 4],
    vip_port: u16,
) {
    let codes = Codes::new(call, protocol, Verdict::Reversed as u8, Reason::None, 0);
    observe(ctx, &Endpoint::new(vip, vip_port), backend, codes);
}

/// A TCP socket that is closed.
#[inline(always)]
pub(crate) fn closed<'m>(ctx: &SockContext, peer: impl FnOnce() -> Option<&'m mut Translation>) {
    let Some(peer) = peer().filter(|peer| is_translated(peer)) else { return };
    let (vip, backend) = (Endpoint::new(&peer.vip, peer.vip_port), Endpoint::new(&peer.backend, peer.backend_port));
    observe(ctx, &vip, &backend, Codes::new(Call::Close, PROTOCOL_TCP, Verdict::Closed as u8, Reason::None, 0));
}

#[inline(always)]
fn observe(ctx: &impl EbpfContext, vip: &Endpoint, backend: *const Endpoint, codes: Codes) {
    // SAFETY: helpers that take the context.
    let (socket, netns) = unsafe { (bpf_get_socket_cookie(ctx.as_ptr()), bpf_get_netns_cookie(ctx.as_ptr())) };
    cproxy_observe(vip, backend, codes.0, socket, netns);
}

/// Counts a call, and reports it to a reader of events.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_observe(
    vip: *const Endpoint,
    backend: *const Endpoint,
    codes: u64,
    socket_cookie: u64,
    netns_cookie: u64,
) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(to) = (unsafe { vip.as_ref() }) else { return 0 };
    cproxy_count_service(vip, codes);
    if cproxy_is_wanted(vip, codes) == 0 {
        return 0;
    }
    let Some(mut event) = TRACE_EVENTS.reserve(0) else {
        if let Some(lost) = TRACE_LOST.get_ptr_mut(0) {
            increment(lost);
        }
        return 0;
    };
    let fields = event.as_mut_ptr();
    let reason = cproxy_reason(to.port as u32, codes) as u8;
    let codes = Codes(codes);
    // SAFETY: within the reserved event, which is written whole.
    unsafe {
        (*fields).time_ns = bpf_ktime_get_ns();
        (*fields).socket_cookie = socket_cookie;
        (*fields).netns_cookie = netns_cookie;
        (*fields).cgroup_id = bpf_get_current_cgroup_id();
        write_words(&raw mut (*fields).vip, &to.address);
        (*fields).vip_port = to.port;
        let backend = backend.as_ref().unwrap_or(&NOWHERE);
        write_words(&raw mut (*fields).backend, &backend.address);
        (*fields).backend_port = backend.port;
        (*fields).protocol = codes.protocol();
        (*fields).verdict = codes.verdict();
        (*fields).call = codes.call();
        (*fields).reason = reason;
        (*fields).pid = pid();
        (*fields).uid = bpf_get_current_uid_gid() as u32;
        let command = &raw mut (*fields).command;
        write_words(command.cast(), &NOWHERE.address);
        if knows_process() {
            bpf_get_current_comm(command.cast(), 16);
        }
    }
    event.submit(0);
    0
}

/// Writes four words one by one. A copy of the array would be compiled to a loop over its bytes.
///
/// # Safety
/// The target is valid.
#[inline(always)]
unsafe fn write_words(target: *mut [u32; 4], words: &[u32; 4]) {
    for (index, word) in words.iter().enumerate() {
        // SAFETY: within the array.
        unsafe { target.cast::<u32>().add(index).write_volatile(*word) };
    }
}

/// Adds 1 to a counter of the frontend. Calls to unknown ports count for the address as a whole: no scan of ports
/// evicts others.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_count_service(vip: *const Endpoint, codes: u64) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(to) = (unsafe { vip.as_ref() }) else { return 0 };
    let codes = Codes(codes);
    // The first verdicts are the counters.
    let count = codes.verdict() as usize;
    if count >= COUNTS {
        return 0;
    }
    // It lies on the stack: before Linux 6.2 no helper takes a key from memory that a subprogram got as an argument.
    let mut key = FrontendKey { address: to.address, port: to.port, protocol: codes.protocol(), zero: 0 };
    if codes.is_unknown_port() {
        (key.port, key.protocol) = (0, PROTOCOL_ANY);
    }
    let mut counts = SERVICE_COUNTS.get_ptr_mut(&key);
    if counts.is_none() {
        // If this fails, another CPU has just inserted it, or there is no memory.
        SERVICE_COUNTS.insert(&key, &[0; COUNTS], BPF_NOEXIST as u64).ok();
        counts = SERVICE_COUNTS.get_ptr_mut(&key);
    }
    if let Some(counts) = counts {
        // SAFETY: in range. The add is atomic, since another program may interrupt this one on the same CPU.
        increment(unsafe { counts.cast::<u64>().add(count) });
    }
    0
}

/// Returns 1 if the event passes the filter.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_is_wanted(vip: *const Endpoint, codes: u64) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(to) = (unsafe { vip.as_ref() }) else { return 0 };
    let Some(filter) = TRACE_FILTER.get_ptr(0) else { return 0 };
    let codes = Codes(codes);
    // SAFETY: a live element.
    let filter = unsafe { &*filter };
    if (filter.verdicts >> (codes.verdict() & 31)) & 1 == 0
        || filter.protocol != 0 && filter.protocol != codes.protocol() as u32
        || filter.pid != 0 && filter.pid != pid()
    {
        return 0;
    }
    if filter.cgroup_id != 0 {
        // SAFETY: a helper that takes an integer; it returns 0 if the process has no ancestor at that level.
        let cgroup_id = unsafe { bpf_get_current_ancestor_cgroup_id(filter.cgroup_level as i32) };
        if cgroup_id != filter.cgroup_id {
            return 0;
        }
    }
    if filter.has_addresses == 0 {
        return 1;
    }
    let mut key = FrontendKey { address: to.address, port: to.port, protocol: codes.protocol(), zero: 0 };
    if TRACE_ADDRESSES.get_ptr(&key).is_some() {
        return 1;
    }
    (key.port, key.protocol) = (0, PROTOCOL_ANY);
    TRACE_ADDRESSES.get_ptr(&key).is_some() as u32
}

/// True if the hooks have the helpers for process and command: they came with `bpf_set_retval` for these hooks, in
/// Linux 6.1 (kernel/bpf/cgroup.c, `cgroup_current_func_proto`).
#[inline(always)]
fn knows_process() -> bool {
    // SAFETY: a static; volatile, because the agent changes it in the object file.
    unsafe { (&raw const ERRNO_HELPER).read_volatile() != 0 }
}

/// Id of the process; 0 before Linux 6.1.
#[inline(always)]
fn pid() -> u32 {
    if knows_process() { (bpf_get_current_pid_tgid() >> 32) as u32 } else { 0 }
}

/// Returns the [`Reason`] of an event: that of its codes, refined by their detail and the settings.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_reason(port: u32, codes: u64) -> u32 {
    let codes = Codes(codes);
    let Some(settings) = SETTINGS.get_ptr(0) else { return 0 };
    // SAFETY: a live element.
    let settings = unsafe { &*settings };
    let verdict = codes.verdict();
    let reason = if verdict == Verdict::Forwarded as u8 {
        match settings.balance == Balance::RoundRobin as u64 {
            // The detail is the time of session affinity.
            _ if codes.detail() != 0 => Reason::Affinity,
            true => Reason::RoundRobin,
            false => Reason::Random,
        }
    } else if verdict == Verdict::Direct as u8 {
        let uid = bpf_get_current_uid_gid() as u32;
        if settings.excluded_ports.contains(&(port as u16)) {
            Reason::ExcludedPort
        } else if settings.excluded_uids.contains(&uid) {
            Reason::ExcludedUid
        } else {
            Reason::ExcludedCgroup
        }
    } else if verdict > Verdict::Dropped as u8 || codes.reason() != Reason::None as u8 {
        return codes.reason() as u32;
    } else if codes.is_unknown_port() {
        // The detail is the set.
        Reason::UnknownPort
    } else if verdict == Verdict::Dropped as u8 {
        Reason::NotAllowed
    } else {
        Reason::NoEndpoint
    };
    reason as u32
}
