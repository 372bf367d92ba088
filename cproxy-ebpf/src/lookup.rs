//! Lookup of a destination: prefix filter, frontend, set.

use aya_ebpf::programs::SockAddrContext;
use cproxy_ebpf::{
    Affinity, Flow, FrontendKey, PROTOCOL_ANY, PROTOCOL_UDP, SetId, SetWord, Translation, V4_MAPPED_WORD,
    filter_bit_of_prefix, filter_prefix_v4, filter_prefix_v6,
};

use crate::{
    deny::deny,
    endpoint::Endpoint,
    exclude::{EXCLUDED_IN_OTHER_NETNS, NOT_EXCLUDED, exclusion, is_own_netns, netns_cookie},
    maps::{self, FRONTENDS, SETTINGS},
    observe,
    search::cproxy_confirm_backend,
    subprogram::opaque,
};

/// Result of a lookup: the destination's set, or none. It has plain numbers instead of an `Option`, since the verifier
/// refuses to copy the fields that `None` leaves uninitialised.
pub(crate) struct FoundSet {
    epoch: u32,
    pub(crate) word: SetWord,
    pub(crate) affinity: Affinity,
    /// Id of the set; [`EXCLUDED`]. Only points of observation use it.
    pub(crate) id: SetId,
}

/// Id of no set.
const NO_SET: SetId = SetId::MAX;
/// Id of no set, for an excluded process or port.
pub(crate) const EXCLUDED: SetId = if observe::IS_ON { NO_SET - 1 } else { NO_SET };
/// Mark of an id that counts only in the network namespace that is not excluded.
const FOR_OWN_NETNS: SetId = 1 << 31;
/// Result of [`cproxy_flow_serves`]: the backend serves sockets of the network namespace that is not excluded.
pub(crate) const SERVES_OWN_NETNS: u32 = 2;
/// Word of no set: its first slot is beyond the end of `BACKENDS`.
const NO_WORD: SetWord = SetWord(u64::MAX);

/// True if the table may have a frontend with this address: some frontend's prefix has the same bit.
#[inline(always)]
pub(crate) fn passes_filter(destination: &Endpoint) -> bool {
    let Some(settings) = SETTINGS.get_ptr(0) else { return false };
    let address = &destination.address;
    // One branch, not three.
    let not_v4 = opaque((address[0] | address[1] | (address[2] ^ V4_MAPPED_WORD)) as u64);
    let (filter, prefix) = if not_v4 == 0 {
        (unsafe { &raw const (*settings).filter_v4 }, filter_prefix_v4(address))
    } else {
        (unsafe { &raw const (*settings).filter_v6 }, filter_prefix_v6(address))
    };
    // SAFETY: the helper returned a pointer to the live element; volatile, because the agent may write it at any time.
    let filter = unsafe { filter.read_volatile() };
    filter & filter_bit_of_prefix(prefix) != 0
}

/// Looks up a destination.
#[inline(always)]
pub(crate) fn look_up(ctx: &SockAddrContext, destination: &Endpoint, protocol: u8) -> FoundSet {
    if passes_filter(destination) { look_up_unfiltered(ctx, destination, protocol) } else { FoundSet::NONE }
}

/// Looks up a destination that has passed the filter.
#[inline(always)]
pub(crate) fn look_up_unfiltered(ctx: &SockAddrContext, destination: &Endpoint, protocol: u8) -> FoundSet {
    // The epoch is read first: if the table changes during the lookup, the next datagram finds another epoch.
    let epoch = current_epoch();
    let mut set = cproxy_find_set(destination, protocol as u32);
    if is_for_own_netns(set) {
        set = cproxy_set_in_netns(set, netns_cookie(ctx));
    }
    read_set(set, epoch)
}

/// Returns the id of a set that counts only in the network namespace that is not excluded, or [`EXCLUDED`] if this is
/// the cookie of another one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_set_in_netns(set: SetId, netns_cookie: u64) -> SetId {
    if is_own_netns(netns_cookie) { set & !FOR_OWN_NETNS } else { EXCLUDED }
}

/// True if the id has [`FOR_OWN_NETNS`]. By a shift, of which the verifier learns nothing about the id: it would follow
/// both branches to the end.
#[inline(always)]
fn is_for_own_netns(set: SetId) -> bool {
    set >> 30 == FOR_OWN_NETNS >> 30
}

#[inline(always)]
fn current_epoch() -> u32 {
    // SAFETY: a live element; volatile, because the agent may write it at any time.
    SETTINGS.get_ptr(0).map_or(0, |settings| unsafe { (&raw const (*settings).epoch).read_volatile() })
}

/// Reads the present word and affinity of a set.
#[inline(always)]
fn read_set(set: SetId, epoch: u32) -> FoundSet {
    let Some(element) = maps::set_element(set) else { return FoundSet { id: set, ..FoundSet::NONE } };
    // SAFETY: a live element; volatile makes each read one 64-bit load, which pairs with the agent's 64-bit store.
    unsafe {
        FoundSet {
            epoch,
            word: SetWord((&raw const (*element).word).read_volatile()),
            affinity: Affinity((&raw const (*element).affinity).read_volatile()),
            id: set,
        }
    }
}

/// Returns 1 if the flow's backend still serves the VIP, or [`SERVES_OWN_NETNS`]. It is looked up again only in a new
/// epoch, that is after backends or frontends have gone.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn cproxy_flow_serves(flow: *mut Flow, vip: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(flow) = (unsafe { flow.as_mut() }) else { return 0 };
    let epoch = current_epoch();
    if flow.epoch == epoch {
        return 1;
    }
    let set = cproxy_find_set(vip, PROTOCOL_UDP as u32);
    let is_for_own = is_for_own_netns(set);
    let set = read_set(if is_for_own { set & !FOR_OWN_NETNS } else { set }, epoch);
    if set.is_none() || cproxy_confirm_backend(set.word.0, &raw mut flow.translation) == 0 {
        return 0;
    }
    flow.epoch = epoch;
    1 + is_for_own as u32
}

/// Returns the id of the destination's set, perhaps with [`FOR_OWN_NETNS`], [`NO_SET`], or [`EXCLUDED`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_find_set(destination: *const Endpoint, protocol: u32) -> SetId {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(to) = (unsafe { destination.as_ref() }) else { return NO_SET };
    let mut key = FrontendKey { address: to.address, port: to.port, protocol: protocol as u8, zero: 0 };
    let Some(frontends) = FRONTENDS.get(0) else { return NO_SET };
    let mut set = frontends.get_ptr(&key);
    // A ClusterIP refuses connections to ports that its Services do not have.
    if set.is_none() {
        (key.port, key.protocol) = (0, PROTOCOL_ANY);
        set = frontends.get_ptr(&key);
    }
    match set {
        Some(set) => {
            // SAFETY: the helper returned a pointer to a live value of that size.
            let set = unsafe { set.read_volatile() };
            match exclusion(to.port) {
                NOT_EXCLUDED => set,
                EXCLUDED_IN_OTHER_NETNS => set | FOR_OWN_NETNS,
                _ => EXCLUDED,
            }
        }
        None => NO_SET,
    }
}

impl FoundSet {
    /// No set: the destination is not translated.
    pub(crate) const NONE: Self = Self { epoch: 0, word: NO_WORD, affinity: Affinity::NONE, id: NO_SET };

    /// Word of the set, as an argument of subprograms.
    #[inline(always)]
    pub(crate) fn word(&self) -> u64 {
        self.word.0
    }

    /// Epoch from before the lookup.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// True if the destination is no frontend, or excluded.
    #[inline(always)]
    pub(crate) fn is_none(&self) -> bool {
        self.word == NO_WORD
    }

    /// True if the set has no eligible backend.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.word.eligible() == 0
    }

    /// Refuses or drops the call, as the set says. Returns the verdict.
    #[inline(always)]
    pub(crate) fn deny(&self) -> i32 {
        deny(self.word.drops())
    }

    /// True if the translation's backend still serves. Updates its slot.
    #[inline(always)]
    pub(crate) fn confirm_backend(&self, translation: &mut Translation) -> bool {
        cproxy_confirm_backend(self.word.0, translation) != 0
    }
}
