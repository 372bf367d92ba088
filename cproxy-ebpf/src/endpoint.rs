//! An address and a port in the one form of the maps.

use crate::subprogram::opaque;

/// An address and a port, both in network order. 20 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Endpoint {
    pub(crate) address: [u32; 4],
    pub(crate) port: u16,
    pub(crate) zero: u16,
}

impl Endpoint {
    #[inline(always)]
    pub(crate) fn new(address: &[u32; 4], port: u16) -> Self {
        Self { address: *address, port, zero: 0 }
    }

    #[inline(always)]
    pub(crate) fn is(&self, address: &[u32; 4], port: u16) -> bool {
        is_same(&self.address, self.port, address, port)
    }
}

/// Whether two addresses and ports are the same: one branch, not six.
#[inline(always)]
pub(crate) fn is_same(address: &[u32; 4], port: u16, other: &[u32; 4], other_port: u16) -> bool {
    let differences = (address[0] ^ other[0])
        | (address[1] ^ other[1])
        | (address[2] ^ other[2])
        | (address[3] ^ other[3])
        | (port ^ other_port) as u32;
    opaque(differences as u64) == 0
}

/// [`cproxy_ebpf::digest`], once.
#[inline(always)]
pub(crate) fn digest(endpoint: &Endpoint) -> u32 {
    cproxy_digest(endpoint)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_digest(endpoint: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows how much memory is behind the pointer.
    unsafe { endpoint.as_ref() }.map_or(0, |endpoint| cproxy_ebpf::digest(&endpoint.address, endpoint.port))
}
