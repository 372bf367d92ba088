//! The few `bpf(2)` calls that aya does not offer.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

/// Commands of `bpf(2)` (include/uapi/linux/bpf.h, `enum bpf_cmd`).
const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;

/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR` (`enum bpf_prog_type`).
const PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;

/// One instruction of a program (`struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Instruction {
    pub(super) opcode: u8,
    /// Destination in the lower half, source in the upper.
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

/// Has the verifier judge a program for a hook (`enum bpf_attach_type`). Loaded, it is gone again at once.
pub(super) fn try_program(attach_type: u32, instructions: &[Instruction]) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log_buf: u64,
        kern_version: u32,
        prog_flags: u32,
        prog_name: [u8; 16],
        prog_ifindex: u32,
        expected_attach_type: u32,
    }
    let mut attr = Attr {
        prog_type: PROG_TYPE_CGROUP_SOCK_ADDR,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: 0,
        prog_name: [0; 16],
        prog_ifindex: 0,
        expected_attach_type: attach_type,
    };
    let fd = bpf(BPF_PROG_LOAD, &mut attr)?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// What a map is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapShape {
    /// `enum bpf_map_type`.
    pub(super) map_type: u32,
    pub(super) key_bytes: u32,
    pub(super) value_bytes: u32,
    pub(super) entries: u32,
    pub(super) flags: u32,
}

/// Makes a map; tools show it under the first 15 bytes of this name.
pub(super) fn map_create(shape: MapShape, name: &str) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        map_flags: u32,
        inner_map_fd: u32,
        numa_node: u32,
        map_name: [u8; 16],
    }
    let mut map_name = [0; 16];
    map_name.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
    let mut attr = Attr {
        map_type: shape.map_type,
        key_size: shape.key_bytes,
        value_size: shape.value_bytes,
        max_entries: shape.entries,
        map_flags: shape.flags,
        inner_map_fd: 0,
        numa_node: 0,
        map_name,
    };
    let fd = bpf(BPF_MAP_CREATE, &mut attr)?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[repr(C)]
struct Element {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The id of the only map in a map of maps; `None` if it has none.
pub(super) fn inner_map_id(outer: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let (key, mut id) = (0u32, 0u32);
    let (key, value) = ((&raw const key) as u64, (&raw mut id) as u64);
    let mut attr = Element { map_fd: outer.as_raw_fd() as u32, padding: 0, key, value, flags: 0 };
    match bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) {
        Ok(_) => Ok(Some(id)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Puts a map into a map of maps, in the place of the one that is there. When it returns, no program uses that one any more:
/// the kernel waits for all that run (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`).
pub(super) fn set_inner_map(outer: BorrowedFd<'_>, inner: BorrowedFd<'_>) -> io::Result<()> {
    let (key, fd) = (0u32, inner.as_raw_fd() as u32);
    let (key, value) = ((&raw const key) as u64, (&raw const fd) as u64);
    let mut attr = Element { map_fd: outer.as_raw_fd() as u32, padding: 0, key, value, flags: 0 };
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

#[repr(C)]
struct Object {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Pins an object.
pub(super) fn obj_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = Object { pathname: path.as_ptr() as u64, bpf_fd: object.as_raw_fd() as u32, file_flags: 0 };
    bpf(BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens a pinned object.
pub(super) fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = Object { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    let fd = bpf(BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts another program behind an attached link: the next call of the hook runs it, none runs neither.
pub(super) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        link_fd: u32,
        new_prog_fd: u32,
        flags: u32,
        old_prog_fd: u32,
    }
    let mut attr =
        Attr { link_fd: link.as_raw_fd() as u32, new_prog_fd: program.as_raw_fd() as u32, flags: 0, old_prog_fd: 0 };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link; when it returns, the hook runs without the program (kernel 5.9). Closing the last descriptor of a link
/// detaches it too, but later, from a work queue (kernel/bpf/syscall.c, `bpf_link_put`).
pub(super) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        link_fd: u32,
    }
    bpf(BPF_LINK_DETACH, &mut Attr { link_fd: link.as_raw_fd() as u32 }).map(drop)
}

/// The id of the cgroup that a link is on: the inode number of its directory, or 0 if it is gone.
pub(super) fn link_cgroup_id(link: BorrowedFd<'_>) -> io::Result<u64> {
    /// `struct bpf_link_info` with its `cgroup` member.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        link_type: u32,
        id: u32,
        prog_id: u32,
        padding: u32,
        cgroup_id: u64,
        attach_type: u32,
        padding_end: u32,
    }
    #[repr(C)]
    struct Attr {
        bpf_fd: u32,
        info_len: u32,
        info: u64,
    }
    let mut info = Info::default();
    let mut attr =
        Attr { bpf_fd: link.as_raw_fd() as u32, info_len: size_of::<Info>() as u32, info: (&raw mut info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info.cgroup_id)
}

fn bpf<Attr>(command: libc::c_long, attr: &mut Attr) -> io::Result<i32> {
    // SAFETY: `attr` is a live, initialised prefix of `union bpf_attr` of the size given; the kernel takes the rest as
    // zero. What it points to outlives the call, since each caller holds it in a local.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<Attr>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value as i32),
    }
}
