//! Features of the kernel, found by asking it: nothing is attached, pinned or left behind.

use std::io;

pub use aya::maps::MapType;
use aya::sys::is_map_supported;
use aya_obj::generated::{bpf_attach_type, bpf_func_id, bpf_insn, bpf_prog_type};

use super::{
    error::root_cause,
    signals::SignalsBlocked,
    syscalls::{call, exit, load_program, move_to},
};

/// The types of the maps that the programs use, by the names that `bpftool feature` has for them.
pub const MAP_TYPES: [(&str, MapType); 6] = [
    ("hash", MapType::Hash),
    ("array", MapType::Array),
    ("lru_hash", MapType::LruHash),
    ("percpu_array", MapType::PerCpuArray),
    ("sk_storage", MapType::SkStorage),
    ("array_of_maps", MapType::ArrayOfMaps),
];

/// Features that not every kernel has, and that the programs can do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The programs may choose the error with which a call fails; otherwise it is EPERM.
    pub errno_helper: bool,
}

impl Features {
    /// Asks the kernel. A question that fails counts as a yes: the same failure, with its reason, is met again when the
    /// programs are loaded.
    #[must_use]
    pub fn probe() -> Self {
        let _blocked = SignalsBlocked::new();
        Self { errno_helper: has_errno_helper().unwrap_or(true) }
    }

    /// Whether the hooks know the process of a call: the helpers for that came with the one for errors (kernel/bpf/
    /// cgroup.c, `cgroup_current_func_proto`).
    #[must_use]
    pub fn knows_process(self) -> bool {
        self.errno_helper
    }
}

/// Whether the kernel lets the connect and sendmsg hooks call `bpf_set_retval`: since 6.1. The helper itself is in
/// 5.18, but open to other hooks only (kernel/bpf/cgroup.c, `cgroup_common_func_proto`).
///
/// # Errors
/// The kernel could not be asked.
pub fn has_errno_helper() -> io::Result<bool> {
    let set_errno = [move_to(1, -libc::ECONNREFUSED), call(bpf_func_id::BPF_FUNC_set_retval), move_to(0, 0), exit()];
    for hook in [bpf_attach_type::BPF_CGROUP_INET4_CONNECT, bpf_attach_type::BPF_CGROUP_UDP4_SENDMSG] {
        match verify(hook, &set_errno) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(false),
            result => result?,
        }
    }
    Ok(true)
}

/// Whether the kernel has our kind of program at all.
///
/// # Errors
/// It refuses the smallest one.
pub fn has_hooks() -> io::Result<()> {
    verify(bpf_attach_type::BPF_CGROUP_INET4_CONNECT, &[move_to(0, 0), exit()])
}

/// Whether the kernel can make maps of a type.
///
/// # Errors
/// The kernel could not be asked.
pub fn has_map_type(map_type: MapType) -> io::Result<bool> {
    is_map_supported(map_type).map_err(|error| io::Error::other(root_cause(&error)))
}

/// Has the verifier check a program for a hook. Loaded, it is gone again at once.
fn verify(hook: bpf_attach_type, instructions: &[bpf_insn]) -> io::Result<()> {
    load_program(bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR, hook as u32, instructions, "").map(drop)
}
