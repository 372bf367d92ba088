//! Options that send a socket's packets to other addresses than those that it calls: they are refused while a policy
//! isolates the pod for egress.

use core::ptr::addr_of;

use aya_ebpf::{macros::cgroup_sockopt, programs::SockoptContext};

use crate::{
    maps::state,
    sock_addr::{ALLOW, DENY},
};

/// Of `<linux/in6.h>`. With a routing header (RFC 8754), packets visit other addresses first.
const IPPROTO_IPV6: i32 = 41;
const IPV6_2292PKTOPTIONS: i32 = 6;
const IPV6_RTHDR: i32 = 57;

#[cgroup_sockopt(setsockopt)]
fn cproxy_policy_so(ctx: SockoptContext) -> i32 {
    // SAFETY: the verifier checks every access to the context.
    let (level, name) =
        unsafe { (addr_of!((*ctx.sockopt).level).read_volatile(), addr_of!((*ctx.sockopt).optname).read_volatile()) };
    let routes = level == IPPROTO_IPV6 && (name == IPV6_RTHDR || name == IPV6_2292PKTOPTIONS);
    let state = state();
    if routes && state.egress() && !state.audit() { DENY } else { ALLOW }
}
