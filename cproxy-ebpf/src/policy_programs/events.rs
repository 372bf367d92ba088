//! Events of denied calls for `cproxy trace`. Without a tracer a denial costs one lookup more.

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::{bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_netns_cookie, bpf_get_socket_cookie},
    },
    programs::SockAddrContext,
};
use cproxy_ebpf::observation::Call;

use crate::{
    decision::{Decision, Question},
    egress::knows_process,
    incoming_events::{codes, write},
    maps::POLICY_EVENTS,
};

/// Reports a denied call.
#[inline(always)]
pub(crate) fn call(ctx: &SockAddrContext, question: &Question, decision: Decision, call: Call, is_audited: bool) {
    // SAFETY: helpers that take the context.
    let (socket, netns) = unsafe { (bpf_get_socket_cookie(ctx.as_ptr()), bpf_get_netns_cookie(ctx.as_ptr())) };
    cproxy_policy_call(question, codes(decision, call, is_audited), socket, netns);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_call(question: *const Question, codes: u64, socket_cookie: u64, netns_cookie: u64) -> u32 {
    // SAFETY: null is checked, and the verifier knows the size of the memory behind the pointer.
    let Some(question) = (unsafe { question.as_ref() }) else { return 0 };
    let Some(mut event) = POLICY_EVENTS.get(0).and_then(|events| events.reserve(0)) else { return 0 };
    let fields = event.as_mut_ptr();
    // SAFETY: within the reserved event, which is written whole.
    unsafe {
        write(fields, question, codes);
        (*fields).socket_cookie = socket_cookie;
        (*fields).netns_cookie = netns_cookie;
        (*fields).cgroup_id = bpf_get_current_cgroup_id();
        (*fields).uid = bpf_get_current_uid_gid() as u32;
        if knows_process() {
            (*fields).pid = (bpf_get_current_pid_tgid() >> 32) as u32;
            bpf_get_current_comm((&raw mut (*fields).command).cast(), 16);
        }
    }
    event.submit(0);
    0
}
