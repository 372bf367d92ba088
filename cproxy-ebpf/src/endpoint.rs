//! Address and port, with IPv4 addresses as IPv4-mapped.

use crate::subprogram::opaque;

/// Address and port, both in network order. 20 bytes.
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
    pub(crate) fn matches(&self, address: &[u32; 4], port: u16) -> bool {
        is_same(&self.address, self.port, address, port)
    }

    /// The endpoint's [`cproxy_ebpf::digest`].
    #[inline(always)]
    pub(crate) fn digest(&self) -> u32 {
        cproxy_digest(self)
    }
}

/// True if two addresses and ports are equal. One branch, not six.
#[inline(always)]
pub(crate) fn is_same(address: &[u32; 4], port: u16, other: &[u32; 4], other_port: u16) -> bool {
    let differences = (address[0] ^ other[0])
        | (address[1] ^ other[1])
        | (address[2] ^ other[2])
        | (address[3] ^ other[3])
        | (port ^ other_port) as u32;
    opaque(differences as u64) == 0
}

/// Returns the endpoint's [`cproxy_ebpf::digest`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_digest(endpoint: *const Endpoint) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    unsafe { endpoint.as_ref() }.map_or(0, |endpoint| cproxy_ebpf::digest(&endpoint.address, endpoint.port))
}
