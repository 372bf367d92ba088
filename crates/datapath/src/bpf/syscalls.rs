//! The few `bpf(2)` calls that aya does not offer, with the kernel's structures as aya has them.

use std::{
    ffi::{CString, c_char},
    io,
    mem::{self, offset_of},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya::Pod;
use aya_obj::generated::{
    BPF_ALU64, BPF_CALL, BPF_EXIT, BPF_F_QUERY_EFFECTIVE, BPF_F_REPLACE, BPF_JMP, BPF_K, BPF_MOV,
    bpf_attr__bindgen_ty_1 as MapCreate, bpf_func_id, bpf_link_info, bpf_prog_info,
};
pub use aya_obj::generated::{bpf_attach_type, bpf_attr, bpf_cmd, bpf_insn, bpf_prog_type, bpf_stats_type};

use super::map_spec::MapShape;

/// Arguments of a call: all zero.
#[must_use]
pub fn no_arguments() -> bpf_attr {
    // SAFETY: a union of structures of integers.
    unsafe { mem::zeroed() }
}

/// Calls `bpf(2)`. Memory that the arguments point to must outlive the call.
///
/// # Errors
/// As the command has them.
pub fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    bpf_prefix(command, attr, size_of::<bpf_attr>())
}

fn bpf_prefix(command: bpf_cmd, attr: &mut bpf_attr, size_bytes: usize) -> io::Result<i32> {
    let size_bytes = size_bytes.min(size_of::<bpf_attr>());
    let command = command as libc::c_long;
    // SAFETY: `attr` is live and at least of the size given. The kernel refuses one that is longer than its own, unless
    // the rest is zero; it is, since no older kernel has a command that sets it.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_bytes) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value as i32),
    }
}

/// Calls `bpf(2)` for a command that returns a descriptor.
///
/// # Errors
/// As the command has them.
pub fn bpf_fd(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    bpf(command, attr).map(owned)
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor, and nothing else uses it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// `register = immediate`
#[must_use]
pub fn move_to(register: u8, immediate: i32) -> bpf_insn {
    instruction(BPF_ALU64 | BPF_MOV | BPF_K, register, immediate)
}

/// A call of a helper.
pub(super) fn call(helper: bpf_func_id) -> bpf_insn {
    instruction(BPF_JMP | BPF_CALL, 0, helper as i32)
}

/// The end of a program.
#[must_use]
pub fn exit() -> bpf_insn {
    instruction(BPF_JMP | BPF_EXIT, 0, 0)
}

fn instruction(code: u32, destination: u8, immediate: i32) -> bpf_insn {
    bpf_insn {
        code: code as u8,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(destination, 0),
        off: 0,
        imm: immediate,
    }
}

/// Loads a program for a hook.
///
/// # Errors
/// The kernel refuses it.
pub fn load_program(
    program_type: bpf_prog_type,
    attach_type: u32,
    instructions: &[bpf_insn],
    name: &str,
) -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.__bindgen_anon_3.prog_type = program_type as u32;
    attr.__bindgen_anon_3.insn_cnt = instructions.len() as u32;
    attr.__bindgen_anon_3.insns = instructions.as_ptr() as u64;
    attr.__bindgen_anon_3.license = c"GPL".as_ptr() as u64;
    attr.__bindgen_anon_3.prog_name = object_name(name);
    attr.__bindgen_anon_3.expected_attach_type = attach_type;
    bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr)
}

/// Creates a map; tools show it under the first 15 bytes of this name.
pub(super) fn map_create(shape: MapShape, name: &str) -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.__bindgen_anon_1.map_type = shape.map_type as u32;
    attr.__bindgen_anon_1.key_size = shape.key_bytes;
    attr.__bindgen_anon_1.value_size = shape.value_bytes;
    attr.__bindgen_anon_1.max_entries = shape.entries;
    attr.__bindgen_anon_1.map_flags = shape.flags;
    attr.__bindgen_anon_1.map_name = object_name(name);
    // By this size the tests tell the maps that the agent makes from those of aya.
    bpf_prefix(bpf_cmd::BPF_MAP_CREATE, &mut attr, offset_of!(MapCreate, map_ifindex)).map(owned)
}

fn object_name(name: &str) -> [c_char; 16] {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from as c_char);
    bytes
}

/// The id of a map in an array of maps; `None` if the element has none.
pub(super) fn inner_map_id(outer: BorrowedFd<'_>, key: u32) -> io::Result<Option<u32>> {
    let mut id = 0u32;
    let mut attr = no_arguments();
    attr.__bindgen_anon_2.map_fd = outer.as_raw_fd() as u32;
    attr.__bindgen_anon_2.key = (&raw const key) as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw mut id) as u64;
    match bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr) {
        Ok(_) => Ok(Some(id)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads elements of an array that follow one another (`BPF_MAP_LOOKUP_BATCH`, kernel 5.6).
pub(super) fn array_elements<T: Pod>(map: BorrowedFd<'_>, first: u32, count: u32) -> io::Result<Vec<T>> {
    let Some(last) = count.checked_sub(1) else { return Ok(Vec::new()) };
    // The kernel begins behind a key, or at the first without one.
    let (before, mut end) = (first.wrapping_sub(1), 0u32);
    let mut keys = vec![0u32; count as usize];
    let mut values = Vec::<T>::with_capacity(count as usize);
    let mut attr = no_arguments();
    attr.batch.in_batch = if first == 0 { 0 } else { (&raw const before) as u64 };
    attr.batch.out_batch = (&raw mut end) as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = count;
    attr.batch.map_fd = map.as_raw_fd() as u32;
    match bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) {
        // The array ends there.
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // SAFETY: an integer, which the kernel has written.
    if unsafe { attr.batch.count } != count || keys.last() != Some(&(first + last)) {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: the kernel has written as many values; any bytes are one.
    unsafe { values.set_len(count as usize) };
    Ok(values)
}

/// All elements of a hash of this capacity (`BPF_MAP_LOOKUP_BATCH`, kernel 5.6): one call, where a call for each key
/// and each value would take ten times as long.
pub(super) fn hash_elements<K: Pod, V: Pod>(map: BorrowedFd<'_>, capacity: u32) -> io::Result<Vec<(K, V)>> {
    let mut keys = Vec::<K>::with_capacity(capacity as usize);
    let mut values = Vec::<V>::with_capacity(capacity as usize);
    // The number of the bucket at which a further call would begin; none follows, since all elements have room.
    let mut end = 0u32;
    let mut attr = no_arguments();
    attr.batch.out_batch = (&raw mut end) as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = capacity;
    attr.batch.map_fd = map.as_raw_fd() as u32;
    match bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) {
        // The hash ends there.
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // SAFETY: an integer, which the kernel has written.
    let count = unsafe { attr.batch.count }.min(capacity) as usize;
    // SAFETY: the kernel has written as many keys; any bytes are one.
    unsafe { keys.set_len(count) };
    // SAFETY: as many values, too.
    unsafe { values.set_len(count) };
    Ok(keys.into_iter().zip(values).collect())
}

/// Puts a map into an array of maps, in the place of the one that is there. When it returns, no program uses that one
/// any more: the kernel waits for all that run (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`).
pub(super) fn set_inner_map(outer: BorrowedFd<'_>, key: u32, inner: BorrowedFd<'_>) -> io::Result<()> {
    let fd = inner.as_raw_fd() as u32;
    let mut attr = no_arguments();
    attr.__bindgen_anon_2.map_fd = outer.as_raw_fd() as u32;
    attr.__bindgen_anon_2.key = (&raw const key) as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw const fd) as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Takes a map out of an array of maps, if the element has one. When it returns, no program uses it any more.
pub(super) fn remove_inner_map(outer: BorrowedFd<'_>, key: u32) -> io::Result<()> {
    let mut attr = no_arguments();
    attr.__bindgen_anon_2.map_fd = outer.as_raw_fd() as u32;
    attr.__bindgen_anon_2.key = (&raw const key) as u64;
    match bpf(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut attr) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Pins an object.
pub(super) fn obj_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = no_arguments();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = object.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Opens a pinned object. The flags, `BPF_F_RDONLY` or 0, are for maps.
///
/// # Errors
/// There is none, or it may not be opened.
pub fn obj_get(path: &Path, flags: u32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = no_arguments();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.file_flags = flags;
    bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut attr)
}

/// Opens a pinned object, if anything is pinned there.
///
/// # Errors
/// It may not be opened.
pub(super) fn obj_get_if_any(path: &Path) -> io::Result<Option<OwnedFd>> {
    match obj_get(path, 0) {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Attaches a program to a cgroup. The link ends with its last descriptor.
///
/// # Errors
/// The kernel refuses.
pub fn link_create(program: BorrowedFd<'_>, cgroup: BorrowedFd<'_>, attach_type: u32) -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attr.link_create.__bindgen_anon_2.target_fd = cgroup.as_raw_fd() as u32;
    attr.link_create.attach_type = attach_type;
    bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// Puts another program behind an attached link: the next call of the hook runs it, and each call runs one of the two.
///
/// # Errors
/// It is no link, or the program is for another hook.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = no_arguments();
    attr.link_update.link_fd = link.as_raw_fd() as u32;
    attr.link_update.__bindgen_anon_1.new_prog_fd = program.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Puts a program behind an attached link if another one is there.
///
/// # Errors
/// That one is not there any more, or as [`link_update`].
pub(super) fn link_replace(link: BorrowedFd<'_>, old: BorrowedFd<'_>, new: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = no_arguments();
    attr.link_update.link_fd = link.as_raw_fd() as u32;
    attr.link_update.__bindgen_anon_1.new_prog_fd = new.as_raw_fd() as u32;
    attr.link_update.flags = BPF_F_REPLACE;
    attr.link_update.__bindgen_anon_2.old_prog_fd = old.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link; when it returns, the hook runs without the program (kernel 5.9). Closing the last descriptor of a
/// link detaches it too, but later, from a work queue (kernel/bpf/syscall.c, `bpf_link_put`).
///
/// # Errors
/// It is no link, or is detached already.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = no_arguments();
    attr.link_detach.link_fd = link.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_DETACH, &mut attr).map(drop)
}

/// Link on a cgroup.
#[derive(Clone, Copy, Debug)]
pub(super) struct CgroupLink {
    /// The inode number of the cgroup's directory; 0 if the link was detached or the cgroup is gone.
    pub(super) cgroup_id: u64,
    /// The kernel's id of the program.
    pub(super) program_id: u32,
}

/// The cgroup and program of a link.
pub(super) fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<CgroupLink> {
    let info = link_info(link)?;
    // SAFETY: integers; our links are all on cgroups.
    let cgroup = unsafe { info.__bindgen_anon_1.cgroup };
    Ok(CgroupLink { cgroup_id: cgroup.cgroup_id, program_id: info.prog_id })
}

/// A pinned link, if anything is pinned there, and what it says of itself.
pub(super) fn pinned_link(path: &Path) -> io::Result<Option<(CgroupLink, OwnedFd)>> {
    let Some(link) = obj_get_if_any(path)? else { return Ok(None) };
    Ok(Some((link_cgroup(link.as_fd())?, link)))
}

/// Largest number of programs at one hook of a cgroup (kernel/bpf/cgroup.c, `BPF_CGROUP_MAX_PROGS`).
const CGROUP_PROGRAMS_MAX: usize = 64;

/// Ids of the programs that run at a hook for processes in a cgroup, in their order: its own and those of the cgroups
/// above it.
pub(super) fn effective_programs(cgroup: BorrowedFd<'_>, attach_type: u32) -> io::Result<Vec<u32>> {
    attached_programs(cgroup, attach_type, BPF_F_QUERY_EFFECTIVE)
}

/// Ids of the programs that look sockets up in a network namespace, in their order.
pub(super) fn lookup_programs(netns: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    attached_programs(netns, bpf_attach_type::BPF_SK_LOOKUP as u32, 0)
}

fn attached_programs(target: BorrowedFd<'_>, attach_type: u32, flags: u32) -> io::Result<Vec<u32>> {
    let mut ids = vec![0u32; CGROUP_PROGRAMS_MAX];
    let mut attr = no_arguments();
    attr.query.__bindgen_anon_1.target_fd = target.as_raw_fd() as u32;
    attr.query.attach_type = attach_type;
    attr.query.query_flags = flags;
    attr.query.prog_ids = ids.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.prog_cnt = ids.len() as u32;
    bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr)?;
    // SAFETY: integers and unions of integers.
    let query = unsafe { attr.query };
    // SAFETY: an integer, which the kernel has written.
    ids.truncate(unsafe { query.__bindgen_anon_2.prog_cnt } as usize);
    Ok(ids)
}

/// Name of the program with this id, if it has one and may be opened. That takes CAP_SYS_ADMIN.
pub(super) fn program_name(id: u32) -> Option<String> {
    let info = program_info(program_by_id(id).ok()?.as_fd()).ok()?;
    let name: String = info.name.iter().map(|&byte| byte as u8 as char).take_while(|&char| char != '\0').collect();
    Some(name).filter(|name| !name.is_empty())
}

/// Opens the program with this id. That takes CAP_SYS_ADMIN.
pub(super) fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    bpf_fd(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr)
}

/// The kernel's id of a program.
pub(super) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    program_info(program).map(|info| info.id)
}

/// Description of a program.
pub(super) fn program_info(program: BorrowedFd<'_>) -> io::Result<bpf_prog_info> {
    // SAFETY: a structure of integers.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    let mut attr = no_arguments();
    attr.info.bpf_fd = program.as_raw_fd() as u32;
    attr.info.info_len = size_of::<bpf_prog_info>() as u32;
    attr.info.info = (&raw mut info) as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// The kernel's id of a link; an error for any other object.
pub(super) fn link_id(link: BorrowedFd<'_>) -> io::Result<u32> {
    // Of other objects the kernel writes other structures, whose first two words are type and id as well.
    is_link(link)?;
    link_info(link).map(|info| info.id)
}

/// Fails for an object that is no link (kernel/bpf/syscall.c, `bpf_link_show_fdinfo`).
fn is_link(object: BorrowedFd<'_>) -> io::Result<()> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", object.as_raw_fd()))?;
    let is_link = text.lines().any(|line| line.starts_with("link_id:"));
    if is_link { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Description of a link.
pub(super) fn link_info(link: BorrowedFd<'_>) -> io::Result<bpf_link_info> {
    // SAFETY: a structure of integers and unions of them.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    let mut attr = no_arguments();
    attr.info.bpf_fd = link.as_raw_fd() as u32;
    attr.info.info_len = size_of::<bpf_link_info>() as u32;
    attr.info.info = (&raw mut info) as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}
