//! Sockets that no policy concerns: the agent's, those of exempt cgroups, and those in other network namespaces.

use aya_ebpf::helpers::generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_netns_cookie};

use crate::maps::POLICY_STATE;

/// True if the policy is about a socket with this hook's context: it is in the pod's network namespace, and the process
/// is in no exempt cgroup.
#[inline(always)]
pub(crate) fn is_policed(ctx: *mut core::ffi::c_void) -> bool {
    // SAFETY: a helper that takes the context.
    cproxy_policy_concerns(unsafe { bpf_get_netns_cookie(ctx) }) != 0
}

/// Returns 1 if the policy is about sockets in the network namespace with this cookie, and about the current process.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_policy_concerns(netns_cookie: u64) -> u32 {
    let Some(state) = POLICY_STATE.get_ptr(0) else { return 0 };
    // SAFETY: a live element.
    let state = unsafe { &*state };
    if state.netns_cookie != netns_cookie {
        return 0;
    }
    for cgroup in &state.exempt_cgroups {
        // SAFETY: a helper that takes an integer; it returns 0 if the process has no ancestor at that level.
        if cgroup.id != 0 && unsafe { bpf_get_current_ancestor_cgroup_id(cgroup.level as i32) } == cgroup.id {
            return 0;
        }
    }
    1
}
