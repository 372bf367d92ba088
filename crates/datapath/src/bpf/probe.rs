//! What the kernel can do, asked of the kernel: nothing is attached, pinned or left behind.

use std::io;

pub use aya::maps::MapType;
use aya::sys::is_map_supported;

use super::{
    root_cause,
    syscalls::{Instruction, try_program},
};

/// Hooks (include/uapi/linux/bpf.h, `enum bpf_attach_type`).
const CGROUP_INET4_CONNECT: u32 = 10;
const CGROUP_UDP4_SENDMSG: u32 = 14;

/// `r0 = 0; exit`
const DENY: [Instruction; 2] = [move_to(0, 0), Instruction { opcode: 0x95, registers: 0, offset: 0, immediate: 0 }];
/// `r1 = -ECONNREFUSED; call bpf_set_retval` (`enum bpf_func_id`)
const SET_ERRNO: [Instruction; 2] =
    [move_to(1, -libc::ECONNREFUSED), Instruction { opcode: 0x85, registers: 0, offset: 0, immediate: 187 }];

/// The types of the maps that the programs use, by the names that `bpftool feature` has for them.
pub const MAP_TYPES: [(&str, MapType); 6] = [
    ("hash", MapType::Hash),
    ("array", MapType::Array),
    ("lru_hash", MapType::LruHash),
    ("percpu_array", MapType::PerCpuArray),
    ("sk_storage", MapType::SkStorage),
    ("array_of_maps", MapType::ArrayOfMaps),
];

/// What not every kernel has, and the programs can do without.
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
        Self { errno_helper: has_errno_helper().unwrap_or(true) }
    }
}

/// Whether the kernel lets the connect and sendmsg hooks call `bpf_set_retval`: since 6.1. The helper itself is in 5.18,
/// but open to other hooks only (kernel/bpf/cgroup.c, `cgroup_common_func_proto`).
///
/// # Errors
/// The kernel could not be asked.
pub fn has_errno_helper() -> io::Result<bool> {
    let program = [SET_ERRNO, DENY].concat();
    for hook in [CGROUP_INET4_CONNECT, CGROUP_UDP4_SENDMSG] {
        match try_program(hook, &program) {
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
    try_program(CGROUP_INET4_CONNECT, &DENY)
}

/// Whether the kernel can make maps of a type.
///
/// # Errors
/// The kernel could not be asked.
pub fn has_map_type(map_type: MapType) -> io::Result<bool> {
    is_map_supported(map_type).map_err(|error| io::Error::other(root_cause(&error)))
}

const fn move_to(register: u8, immediate: i32) -> Instruction {
    Instruction { opcode: 0xb7, registers: register, offset: 0, immediate }
}
