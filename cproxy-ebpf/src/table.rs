//! What the table says about a destination, and who is left alone whatever it says.

use aya_ebpf::{
    helpers::{
        bpf_get_current_uid_gid, bpf_get_prandom_u32,
        generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_netns_cookie, bpf_ktime_get_ns},
    },
    programs::SockAddrContext,
};
use cproxy_ebpf::{
    Affinity, AffinityEntry, AffinityKey, Balance, Counter, EXCLUSIONS_MAX, FLOWS_PER_SOCKET, Flow, FrontendKey,
    PROTOCOL_ANY, PROTOCOL_UDP, SetId, SetWord, Translation, UdpState, V4_MAPPED_WORD, affinity_time, choose,
    choose_evenly, choose_in_turn, filter_bit_of_prefix, filter_prefix_v4, filter_prefix_v6, flow_digest, turn_of,
};

use crate::{
    flows::cproxy_position,
    maps::{self, AFFINITY, FRONTENDS, SETTINGS, TURNS, backend, count},
    sock_addr::{Endpoint, deny, is_same},
    subprogram::{compare_and_exchange, digest, opaque},
};

/// `BPF_NOEXIST`: only insert.
const NOEXIST: u64 = 1;

/// No slot, no place.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// What the table says about a destination. Plain numbers: of an enum's unused part the verifier would say that nobody
/// has written it.
pub(crate) struct Service {
    epoch: u32,
    word: SetWord,
    affinity: Affinity,
}

/// No set.
const SET_NONE: SetId = SetId::MAX;
/// The word of no Service: no set has so many backends so far behind.
const WORD_NONE: SetWord = SetWord(u64::MAX);

/// Whether the address shares its prefix with one that is in the table: others need no lookup.
#[inline(always)]
pub(crate) fn may_be_service(destination: &Endpoint) -> bool {
    let Some(settings) = SETTINGS.get_ptr(0) else { return false };
    let address = &destination.address;
    // One branch, not three.
    let not_v4 = opaque((address[0] | address[1] | (address[2] ^ V4_MAPPED_WORD)) as u64);
    let (filter, prefix) = if not_v4 == 0 {
        (unsafe { &raw const (*settings).filter_v4 }, filter_prefix_v4(address))
    } else {
        (unsafe { &raw const (*settings).filter_v6 }, filter_prefix_v6(address))
    };
    // SAFETY: the helper returned a pointer to the live element; volatile, because the agent writes it any time.
    let filter = unsafe { filter.read_volatile() };
    filter & filter_bit_of_prefix(prefix) != 0
}

/// Looks any destination up.
#[inline(always)]
pub(crate) fn look_up_if_service(destination: &Endpoint, protocol: u8) -> Service {
    if may_be_service(destination) { look_up(destination, protocol) } else { Service::NONE }
}

/// Looks a destination up that may be a Service's.
#[inline(always)]
pub(crate) fn look_up(destination: &Endpoint, protocol: u8) -> Service {
    // First the epoch: if the table changes from here on, the next look finds another one.
    let epoch = epoch();
    service(cproxy_set_of(destination, protocol as u32), epoch)
}

#[inline(always)]
fn epoch() -> u32 {
    // SAFETY: a live element; volatile, because the agent writes it any time.
    SETTINGS.get_ptr(0).map_or(0, |settings| unsafe { (&raw const (*settings).epoch).read_volatile() })
}

/// The Service that has this set now.
#[inline(always)]
fn service(set: SetId, epoch: u32) -> Service {
    let Some(element) = maps::set(set) else { return Service::NONE };
    // SAFETY: a live element; volatile makes each the one 64-bit load that pairs with the agent's 64-bit store.
    unsafe {
        Service {
            epoch,
            word: SetWord((&raw const (*element).word).read_volatile()),
            affinity: Affinity((&raw const (*element).affinity).read_volatile()),
        }
    }
}

/// 1 if the flow's backend still serves its VIP, which is looked up only if backends or frontends have gone since it was
/// last.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_flow_serves(flow: *mut Flow, vip: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(flow) = (unsafe { flow.as_mut() }) else { return 0 };
    let epoch = epoch();
    if flow.epoch == epoch {
        return 1;
    }
    let found = service(cproxy_set_of(vip, PROTOCOL_UDP as u32), epoch);
    if found.is_none() || cproxy_has(found.word.0, &raw mut flow.translation) == 0 {
        return 0;
    }
    flow.epoch = epoch;
    1
}

/// 1 if the translation's backend is in this slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_is_at(slot: u32, translation: *const Translation) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let (Some(translation), Some(found)) = (unsafe { translation.as_ref() }, backend(slot)) else { return 0 };
    is_same(&found.address, found.port, &translation.backend, translation.backend_port) as u32
}

/// The set of a destination, or [`SET_NONE`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_set_of(destination: *const Endpoint, protocol: u32) -> SetId {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(to) = (unsafe { destination.as_ref() }) else { return SET_NONE };
    let mut key = FrontendKey { address: to.address, port: to.port, protocol: protocol as u8, zero: 0 };
    let Some(frontends) = FRONTENDS.get(0) else { return SET_NONE };
    let mut set = frontends.get_ptr(&key);
    // A ClusterIP refuses on ports that its Services do not have.
    if set.is_none() && !(protocol == PROTOCOL_UDP as u32 && is_probe(to.port)) {
        (key.port, key.protocol) = (0, PROTOCOL_ANY);
        set = frontends.get_ptr(&key);
    }
    match set {
        // SAFETY: the helper returned a pointer to a live value of that size.
        Some(set) if !is_excluded(to.port) => unsafe { set.read_volatile() },
        _ => SET_NONE,
    }
}

/// Ports that nobody means: who connects a UDP socket to one of them asks for a route to the address (RFC 6724, address
/// selection), and is given it. glibc takes 0 where its caller names no port, Go 9 and musl 65535.
#[inline(always)]
fn is_probe(port: u16) -> bool {
    matches!(u16::from_be(port), 0 | 9 | 65_535)
}

/// Whether the current process, or this port, is to be left alone.
#[inline(always)]
fn is_excluded(port: u16) -> bool {
    let Some(settings) = SETTINGS.get_ptr(0) else { return false };
    // SAFETY: a live element.
    let count = unsafe {
        (&raw const (*settings).excluded_cgroup_count).read_volatile()
            | (&raw const (*settings).excluded_uid_count).read_volatile()
            | (&raw const (*settings).excluded_port_count).read_volatile()
    };
    count != 0 && cproxy_excluded(port as u32) != 0
}

/// 1 if it is. All elements are compared, also unused ones, which match nobody: with the counts as bounds the verifier
/// would follow each combination of them.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_excluded(port: u32) -> u32 {
    let Some(settings) = SETTINGS.get_ptr(0) else { return 0 };
    // SAFETY: a live element.
    let settings = unsafe { &*settings };
    let uid = bpf_get_current_uid_gid() as u32;
    for index in 0..EXCLUSIONS_MAX {
        if settings.excluded_ports[index] as u32 == port || settings.excluded_uids[index] == uid {
            return 1;
        }
    }
    for cgroup in &settings.excluded_cgroups {
        // SAFETY: a helper that takes an integer; it gives 0 where the process is not so deep.
        if unsafe { bpf_get_current_ancestor_cgroup_id(cgroup.level as i32) } == cgroup.id {
            return 1;
        }
    }
    0
}

impl Service {
    /// No Service.
    pub(crate) const NONE: Self = Self { epoch: 0, word: WORD_NONE, affinity: Affinity::NONE };

    /// For functions that take numbers.
    #[inline(always)]
    pub(crate) fn word(&self) -> u64 {
        self.word.0
    }

    /// When it was looked up.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// No Service, or not for this process: the kernel's own business.
    #[inline(always)]
    pub(crate) fn is_none(&self) -> bool {
        self.word == WORD_NONE
    }

    /// Nobody answers there.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.word.eligible() == 0
    }

    /// What a call to a Service that is empty gets.
    #[inline(always)]
    pub(crate) fn deny(&self) -> i32 {
        deny(self.word.drops())
    }

    /// The slot of a backend for a new connection: the one that the client has, or any.
    #[inline(always)]
    pub(crate) fn choose(&self, ctx: &SockAddrContext) -> u32 {
        if self.affinity.seconds() == 0 {
            return cproxy_any(self.word.0);
        }
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_affine(self.word.0, self.affinity.0, netns_cookie)
    }

    /// The slot of the backend that the client has; else of any, or of the next one if one of these flows has that: two
    /// VIPs with one backend could not be told apart by its replies.
    #[inline(always)]
    pub(crate) fn choose_beside(&self, ctx: &SockAddrContext, flows: &UdpState) -> u32 {
        // SAFETY: a helper that takes the context.
        let netns_cookie = unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) };
        cproxy_beside(flows, self.word.0, self.affinity.0, netns_cookie)
    }

    /// Whether the translation's backend still serves; its slot is brought up to date.
    #[inline(always)]
    pub(crate) fn still_has(&self, translation: &mut Translation) -> bool {
        cproxy_has(self.word.0, translation) != 0
    }
}

/// The slot of one of the eligible, chosen as the agent was told to.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_any(word: u64) -> u32 {
    let word = SetWord(word);
    let Some(settings) = SETTINGS.get_ptr(0) else { return word.first_slot() };
    // SAFETY: a live element; volatile, because the agent writes it any time.
    let (seed, balance) =
        unsafe { ((&raw const (*settings).seed).read_volatile(), (&raw const (*settings).balance).read_volatile()) };
    let index = if balance == Balance::RoundRobin as u64 {
        in_turn(word, seed)
    } else {
        // SAFETY: a helper without arguments.
        choose(unsafe { bpf_get_prandom_u32() }, seed, word.eligible())
    };
    word.first_slot() + index
}

/// The index of whoever's turn it is: `BPF_ATOMIC` with `BPF_FETCH` (kernel 5.12). `core` has no such atomics for this
/// target.
#[inline(always)]
fn in_turn(word: SetWord, seed: u64) -> u32 {
    let Some(turn) = TURNS.get_ptr_mut(turn_of(word.first_slot())) else { return 0 };
    let mut before = 1u64;
    // SAFETY: the verifier checks that the pointer is to a live value; the instruction touches nothing but `before` and it.
    unsafe {
        core::arch::asm!(
            "{before} = atomic_fetch_add((u64 *)({turn} + 0), {before})",
            turn = in(reg) turn,
            before = inout(reg) before,
        );
    }
    choose_in_turn(before, seed, word)
}

/// See [`Service::choose_beside`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_beside(flows: *const UdpState, word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    if Affinity(affinity).seconds() != 0 {
        return cproxy_affine(word, affinity, netns_cookie);
    }
    let first = cproxy_any(word);
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(flows) = (unsafe { flows.as_ref() }) else { return first };
    if cproxy_position(&flows.backends, flow_digest(cproxy_digest_at(first))) == FLOWS_PER_SOCKET as u32 {
        return first;
    }
    // Whether the next one is free is not asked: of two VIPs with two backends it is.
    let next = first + 1;
    if next < word.first_slot() + word.eligible() { next } else { word.first_slot() }
}

/// See [`Service::still_has`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_has(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    let (first, total) = (word.first_slot(), word.eligible() + word.serving());
    // What is where it was last is found without a search.
    if translation.slot.wrapping_sub(first) < total && cproxy_is_at(translation.slot, translation) != 0 {
        return 1;
    }
    cproxy_find_again(word.0, translation)
}

/// As [`cproxy_has`], wherever the backend is now.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_again(word: u64, translation: *mut Translation) -> u32 {
    let word = SetWord(word);
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    let Some(translation) = (unsafe { translation.as_mut() }) else { return 0 };
    let wanted = digest(&Endpoint::new(&translation.backend, translation.backend_port));
    let mut slot = cproxy_find(word.first_slot(), word.eligible(), wanted);
    if slot == NOWHERE {
        slot = cproxy_find(word.first_slot() + word.eligible(), word.serving(), wanted);
    }
    translation.slot = slot;
    // Of two with the same digest the first is found; a flow to the other one moves. That takes one chance in 2^32.
    cproxy_is_at(slot, translation)
}

/// How far from where it should be a backend is looked for, in powers of two. Digests are spread evenly: of
/// [`cproxy_ebpf::SET_BACKENDS_MAX`] backends one is off by 128 places at one standard deviation, so by 1,024 practically
/// never.
const SEARCH_STEPS: u32 = 11;

/// The slot of the first backend with this digest among `count` sorted ones, or [`NOWHERE`]. The search is a loop of
/// fixed steps; `bpf_loop` would be shorter, but a kernel without a JIT takes no callbacks (kernel/bpf/verifier.c,
/// `fixup_call_args`).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find(first_slot: u32, count: u32, digest: u32) -> u32 {
    let expected = choose_evenly(digest, count);
    let mut low = expected.saturating_sub(1 << (SEARCH_STEPS - 1));
    for step in (0..SEARCH_STEPS).rev() {
        low = cproxy_search(first_slot, count, digest, low, 1 << step);
    }
    if low < count && cproxy_digest_at(first_slot + low) == digest { first_slot + low } else { NOWHERE }
}

/// All before `low` are less. If the one at the end of the step is one of ours and less, too, the next is the new `low`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_search(first_slot: u32, count: u32, digest: u32, low: u32, step: u32) -> u32 {
    let end = low + step - 1;
    if end < count && cproxy_digest_at(first_slot + end) < digest { end + 1 } else { low }
}

/// The digest of the backend in a slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_digest_at(slot: u32) -> u32 {
    backend(slot).map_or(u32::MAX, |backend| backend.digest)
}

/// The slot of the client's backend. Each change of an entry is one compare-and-exchange, so of two threads of one client
/// that find no entry, or a useless one, the second adopts what the first has chosen.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_affine(word: u64, affinity: u64, netns_cookie: u64) -> u32 {
    let (word, affinity) = (SetWord(word), Affinity(affinity));
    // SAFETY: a helper without arguments.
    let now = affinity_time(unsafe { bpf_ktime_get_ns() });
    let any = cproxy_any(word.0);
    let new = AffinityEntry::new(cproxy_digest_at(any), now);
    let key = AffinityKey { id: affinity.id(), zero: 0, netns_cookie };
    if AFFINITY.get_ptr(&key).is_none() && AFFINITY.insert(&key, new.0, NOEXIST).is_ok() {
        return any;
    }
    let Some(entry) = AFFINITY.get_ptr_mut(&key) else {
        count(Counter::AffinityLost);
        return any;
    };
    // SAFETY: the helper returned a pointer to a live, aligned value, which is only ever accessed whole.
    let known = AffinityEntry(unsafe { entry.read_volatile() });
    let slot = cproxy_find(word.first_slot(), word.eligible(), known.digest());
    if slot != NOWHERE && known.is_fresh(now, affinity.seconds()) {
        // If somebody else was faster, that extends it just as well.
        exchange(entry, known, AffinityEntry::new(known.digest(), now));
        return slot;
    }
    let winner = exchange(entry, known, new);
    if winner == known {
        return any;
    }
    let slot = cproxy_find(word.first_slot(), word.eligible(), winner.digest());
    if slot == NOWHERE { any } else { slot }
}

/// Puts `new` where `expected` is and gives back what was there.
#[inline(always)]
fn exchange(entry: *mut u64, expected: AffinityEntry, new: AffinityEntry) -> AffinityEntry {
    AffinityEntry(compare_and_exchange(entry, expected.0, new.0))
}
