//! Exclusions: cgroups, users and ports whose connections are not translated.

use aya_ebpf::helpers::{bpf_get_current_uid_gid, generated::bpf_get_current_ancestor_cgroup_id};
use cproxy_ebpf::EXCLUSIONS_MAX;

use crate::maps::SETTINGS;

/// True if the current process or this port is excluded.
#[inline(always)]
pub(crate) fn is_excluded(port: u16) -> bool {
    let Some(settings) = SETTINGS.get_ptr(0) else { return false };
    // SAFETY: a live element.
    let count = unsafe {
        (&raw const (*settings).excluded_cgroup_count).read_volatile()
            | (&raw const (*settings).excluded_uid_count).read_volatile()
            | (&raw const (*settings).excluded_port_count).read_volatile()
    };
    count != 0 && cproxy_is_excluded(port as u32) != 0
}

/// Returns 1 if the current process or this port is excluded. Unused elements are compared, too; they match nothing.
/// With the counts as bounds the verifier would follow each combination of them.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn cproxy_is_excluded(port: u32) -> u32 {
    let Some(settings) = SETTINGS.get_ptr(0) else { return 0 };
    // SAFETY: a live element.
    let settings = unsafe { &*settings };
    let uid = bpf_get_current_uid_gid() as u32;
    for index in 0..EXCLUSIONS_MAX {
        if settings.excluded_ports[index] as u32 == port || settings.excluded_uids[index] == uid {
            return 1;
        }
    }
    for cgroup in &settings.excluded_cgroups {
        // SAFETY: a helper that takes an integer; it returns 0 if the process has no ancestor at that level.
        if unsafe { bpf_get_current_ancestor_cgroup_id(cgroup.level as i32) } == cgroup.id {
            return 1;
        }
    }
    0
}
