//! Points of observation: nothing in this set of the programs. `observe_calls.rs` has those of the tracing set.

use aya_ebpf::programs::{SockAddrContext, SockContext};
use cproxy_ebpf::{
    Backend, SetId, Translation,
    observation::{Call, Reason},
};

use crate::{endpoint::Endpoint, lookup::FoundSet};

/// Whether the lookup distinguishes excluded calls.
pub(crate) const IS_ON: bool = false;

/// A call that goes to a backend.
#[inline(always)]
pub(crate) fn translated(_: &SockAddrContext, _: Call, _: u8, _: &Endpoint, _: &Backend, _: &FoundSet) {}

/// A call that is refused or dropped, for this reason or the set's.
#[inline(always)]
pub(crate) fn denied(_: &SockAddrContext, _: Call, _: u8, _: &Endpoint, _: &FoundSet, _: Reason) {}

/// A call to an address that is no frontend for it.
#[inline(always)]
pub(crate) fn direct(_: &SockAddrContext, _: Call, _: u8, _: &Endpoint, _: SetId) {}

/// A VIP that is shown in place of a backend.
#[inline(always)]
pub(crate) fn reversed(_: &SockAddrContext, _: Call, _: u8, _: &Endpoint, _: &[u32; 4], _: u16) {}

/// A TCP socket that is closed.
#[inline(always)]
pub(crate) fn closed<'m>(_: &SockContext, _: impl FnOnce() -> Option<&'m mut Translation>) {}
