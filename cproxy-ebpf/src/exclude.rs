//! Exclusions: cgroups, users, ports and network namespaces whose connections are not translated.

use aya_ebpf::{
    helpers::{
        bpf_get_current_uid_gid,
        generated::{bpf_get_current_ancestor_cgroup_id, bpf_get_netns_cookie},
    },
    programs::SockAddrContext,
};
use cproxy_ebpf::{EXCLUDED_CGROUP, EXCLUDED_OTHER_NETNS, EXCLUSIONS_MAX, ExcludedCgroup};

use crate::maps::SETTINGS;

/// Verdict of the exclusions: neither process nor port is excluded.
pub(crate) const NOT_EXCLUDED: u32 = 0;
/// Verdict: the process or the port is excluded.
const EXCLUDED: u32 = 1;
/// Verdict: the socket is excluded unless it is in the network namespace that is not: see [`is_own_netns`].
pub(crate) const EXCLUDED_IN_OTHER_NETNS: u32 = 2;

/// Whether the current process or this port is excluded.
#[inline(always)]
pub(crate) fn exclusion(port: u16) -> u32 {
    let Some(settings) = SETTINGS.get_ptr(0) else { return NOT_EXCLUDED };
    // SAFETY: a live element.
    let count = unsafe {
        (&raw const (*settings).excluded_cgroup_count).read_volatile()
            | (&raw const (*settings).excluded_uid_count).read_volatile()
            | (&raw const (*settings).excluded_port_count).read_volatile()
    };
    if count == 0 { NOT_EXCLUDED } else { cproxy_exclusion(port as u32) }
}

const _: () = assert!(EXCLUDED_CGROUP == 0 && EXCLUDED_OTHER_NETNS == 1);

/// Returns [`NOT_EXCLUDED`], [`EXCLUDED`] or [`EXCLUDED_IN_OTHER_NETNS`]. Unused elements are compared, too; they match
/// nothing. With the counts as bounds the verifier would follow each combination of them.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_exclusion(port: u32) -> u32 {
    let Some(settings) = SETTINGS.get_ptr(0) else { return NOT_EXCLUDED };
    // SAFETY: a live element.
    let settings = unsafe { &*settings };
    let uid = bpf_get_current_uid_gid() as u32;
    for index in 0..EXCLUSIONS_MAX {
        if settings.excluded_ports[index] as u32 == port || settings.excluded_uids[index] == uid {
            return EXCLUDED;
        }
    }
    let mut kinds = EXCLUDED_CGROUP;
    for cgroup in &settings.excluded_cgroups {
        // SAFETY: a helper that takes an integer; it returns 0 if the process has no ancestor at that level.
        if unsafe { bpf_get_current_ancestor_cgroup_id(cgroup.level as i32) } == cgroup.id {
            return EXCLUDED;
        }
        kinds |= cgroup.kind;
    }
    kinds * EXCLUDED_IN_OTHER_NETNS
}

/// Cookie of the socket's network namespace.
#[inline(always)]
pub(crate) fn netns_cookie(ctx: &SockAddrContext) -> u64 {
    // SAFETY: a helper that takes the context.
    unsafe { bpf_get_netns_cookie(ctx.sock_addr.cast()) }
}

/// True if the socket's network namespace is not excluded.
#[inline(always)]
pub(crate) fn is_in_own_netns(ctx: &SockAddrContext) -> bool {
    cproxy_is_own_netns(netns_cookie(ctx)) != 0
}

/// Returns 1 if the network namespace with this cookie is not excluded.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_is_own_netns(cookie: u64) -> u32 {
    is_own_netns(cookie) as u32
}

/// True if the network namespace with this cookie is not excluded.
#[inline(always)]
pub(crate) fn is_own_netns(cookie: u64) -> bool {
    let Some(settings) = SETTINGS.get_ptr(0) else { return true };
    // SAFETY: a live element.
    let settings = unsafe { &*settings };
    // One branch, not one for each element.
    let difference = |cgroup: &ExcludedCgroup| cgroup.kind as u64 * (cgroup.id ^ cookie);
    settings.excluded_cgroups.iter().fold(0, |differences, cgroup| differences | difference(cgroup)) == 0
}
