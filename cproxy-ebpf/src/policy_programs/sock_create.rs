//! Sockets of protocols whose packets no hook sees: they are refused while a policy isolates the pod.

use core::ptr::addr_of;

use aya_ebpf::{EbpfContext, macros::cgroup_sock, programs::SockContext};
use cproxy_ebpf::policy::{PROTOCOL_SCTP, PolicyCounter};

use crate::{
    exemption::is_policed,
    maps::{count, state},
    sock_addr::{ALLOW, DENY},
};

const IPPROTO_DCCP: u32 = 33;
const IPPROTO_UDPLITE: u32 = 136;

#[cgroup_sock(sock_create)]
fn cproxy_policy_sk(ctx: SockContext) -> i32 {
    let state = state();
    // SAFETY: the verifier checks every access to the context.
    let protocol = unsafe { addr_of!((*ctx.sock).protocol).read_volatile() };
    let is_hidden = protocol == PROTOCOL_SCTP as u32 || protocol == IPPROTO_DCCP || protocol == IPPROTO_UDPLITE;
    if !is_hidden || !(state.ingress() || state.egress()) || !is_policed(ctx.as_ptr()) {
        return ALLOW;
    }
    count(PolicyCounter::DeniedSockets, false);
    if state.audit() { ALLOW } else { DENY }
}
