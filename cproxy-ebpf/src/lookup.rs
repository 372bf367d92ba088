//! Lookup of destinations in the table.

use cproxy_ebpf::{
    Affinity, Flow, FrontendKey, PROTOCOL_ANY, PROTOCOL_UDP, SetId, SetWord, Translation, V4_MAPPED_WORD,
    filter_bit_of_prefix, filter_prefix_v4, filter_prefix_v6,
};

use crate::{
    endpoint::Endpoint,
    exclude::is_excluded,
    maps::{self, FRONTENDS, SETTINGS},
    search::cproxy_has,
    sock_addr::deny,
    subprogram::opaque,
};

/// Set of a destination, and when it was looked up. Plain numbers: of an enum's unused part the verifier would say that it was
/// never written.
pub(crate) struct Service {
    epoch: u32,
    pub(crate) word: SetWord,
    pub(crate) affinity: Affinity,
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

/// Ports of route probes: a UDP socket that connects to one of them asks for a route to the address (RFC 6724, address
/// selection), and is given it. glibc takes 0 where its caller names no port, Go 9 and musl 65535.
#[inline(always)]
fn is_probe(port: u16) -> bool {
    matches!(u16::from_be(port), 0 | 9 | 65_535)
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

    /// The Service has no eligible backend.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.word.eligible() == 0
    }

    /// Refuses or drops a call to a Service that is empty.
    #[inline(always)]
    pub(crate) fn deny(&self) -> i32 {
        deny(self.word.drops())
    }

    /// Whether the translation's backend still serves; its slot is brought up to date.
    #[inline(always)]
    pub(crate) fn still_has(&self, translation: &mut Translation) -> bool {
        cproxy_has(self.word.0, translation) != 0
    }
}
