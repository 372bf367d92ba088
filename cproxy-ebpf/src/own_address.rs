//! Address of the VM to which datagram sockets are connected that are to be refused.

use cproxy_ebpf::{OWN_ADDRESS_V4, OWN_ADDRESS_V6, REFUSED_PORT, V4_MAPPED_WORD};

use crate::{endpoint::Endpoint, maps::OWN_ADDRESSES, subprogram::opaque};

/// The VM's address of the destination's family, with the port at which nobody listens; `None` if it has none. A socket
/// that is to connect to port 0 does.
#[inline(always)]
pub(crate) fn own_address(destination: &Endpoint) -> Option<Endpoint> {
    let to = &destination.address;
    let is_v4 = opaque((to[0] | to[1] | (to[2] ^ V4_MAPPED_WORD)) as u64) == 0;
    let own = OWN_ADDRESSES.get_ptr(if is_v4 { OWN_ADDRESS_V4 } else { OWN_ADDRESS_V6 })?;
    let port = if destination.port == 0 { 0 } else { REFUSED_PORT.to_be() };
    let mut found = Endpoint::new(&[0; 4], port);
    // SAFETY: a live element; volatile, because the agent may write it at any time. It never writes the address that
    // is in force.
    unsafe {
        let current = opaque(((&raw const (*own).current).read_volatile() & 1) as u64) as usize & 1;
        for word in 0..4 {
            found.address[word] = (&raw const (*own).addresses[current][word]).read_volatile();
        }
    }
    let [a, b, c, d] = found.address;
    (opaque((a | b | c | d) as u64) != 0).then_some(found)
}
