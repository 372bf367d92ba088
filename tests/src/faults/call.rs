//! Descriptions of system calls: what they do, and to what, and the errors that the kernel can give for them.

use std::{fs, io::IoSliceMut};

use aya::maps::MapInfo;
use libc::{
    E2BIG, EACCES, EAFNOSUPPORT, EAGAIN, EBUSY, EINTR, EINVAL, EMFILE, ENOBUFS, ENODEV, ENOLCK, ENOMEM, ENOSPC, EPERM,
    EROFS,
};
use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};

/// Calls at which processes stop.
pub(super) const TRACED: &[i64] = &[
    libc::SYS_bpf,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_setns,
    libc::SYS_socket,
    libc::SYS_bind,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

/// Errors of calls that change directories.
const DIRECTORY: &[i32] = &[EPERM, ENOSPC, EROFS];

/// Commands of bpf(2) by number (`enum bpf_cmd`), with the place of a name or descriptor and the errors. Answers that
/// would lie about what exists, such as ENOENT for a key that is there, are no errors of the kernel.
const COMMANDS: &[(&str, Object, &[i32])] = &[
    ("MAP_CREATE", Object::Name(28), &[EPERM, ENOMEM, EINVAL, E2BIG, EMFILE]),
    ("MAP_LOOKUP_ELEM", Object::Descriptor(0), &[EPERM, ENOMEM]),
    ("MAP_UPDATE_ELEM", Object::Descriptor(0), &[EPERM, ENOMEM, E2BIG, EBUSY]),
    ("MAP_DELETE_ELEM", Object::Descriptor(0), &[EPERM, EBUSY]),
    ("MAP_GET_NEXT_KEY", Object::Descriptor(0), &[EPERM, ENOMEM]),
    ("PROG_LOAD", Object::Name(48), &[EPERM, ENOMEM, EINVAL, EACCES, E2BIG, EAGAIN, EMFILE]),
    ("OBJ_PIN", Object::Path(0), &[EPERM, ENOMEM, ENOSPC]),
    ("OBJ_GET", Object::Path(0), &[EPERM, EACCES, ENOMEM, EMFILE]),
    ("PROG_ATTACH", Object::None, &[EPERM, ENOMEM]),
    ("PROG_DETACH", Object::None, &[EPERM, ENOMEM]),
    ("PROG_TEST_RUN", Object::Descriptor(0), &[EPERM, ENOMEM]),
    ("PROG_GET_NEXT_ID", Object::None, &[EPERM]),
    ("MAP_GET_NEXT_ID", Object::None, &[EPERM]),
    ("PROG_GET_FD_BY_ID", Object::None, &[EPERM, EMFILE]),
    ("MAP_GET_FD_BY_ID", Object::None, &[EPERM, EMFILE]),
    ("OBJ_GET_INFO_BY_FD", Object::Descriptor(0), &[EPERM, ENOMEM]),
    ("PROG_QUERY", Object::Number(4), &[EPERM, ENOMEM]),
    ("RAW_TRACEPOINT_OPEN", Object::None, &[EPERM, ENOMEM]),
    ("BTF_LOAD", Object::None, &[EPERM, ENOMEM, EINVAL, E2BIG]),
    ("BTF_GET_FD_BY_ID", Object::None, &[EPERM, EMFILE]),
    ("TASK_FD_QUERY", Object::None, &[EPERM]),
    ("MAP_LOOKUP_AND_DELETE_ELEM", Object::Descriptor(0), &[EPERM, ENOMEM]),
    ("MAP_FREEZE", Object::Descriptor(0), &[EPERM, EBUSY]),
    ("BTF_GET_NEXT_ID", Object::None, &[EPERM]),
    ("MAP_LOOKUP_BATCH", Object::Descriptor(36), &[EPERM, ENOMEM]),
    ("MAP_LOOKUP_AND_DELETE_BATCH", Object::Descriptor(36), &[EPERM, ENOMEM]),
    ("MAP_UPDATE_BATCH", Object::Descriptor(36), &[EPERM, ENOMEM]),
    ("MAP_DELETE_BATCH", Object::Descriptor(36), &[EPERM, ENOMEM]),
    ("LINK_CREATE", Object::Number(8), &[EPERM, ENOMEM, EBUSY, E2BIG, EMFILE]),
    ("LINK_UPDATE", Object::Descriptor(0), &[EPERM, ENOMEM, EINVAL]),
    ("LINK_GET_FD_BY_ID", Object::None, &[EPERM, EMFILE]),
    ("LINK_GET_NEXT_ID", Object::None, &[EPERM]),
];

/// Whether a command makes a map, a program or a link.
pub(super) fn makes_object(command: u64) -> bool {
    let name = usize::try_from(command).ok().and_then(|command| COMMANDS.get(command)).map(|(name, ..)| *name);
    matches!(name, Some("MAP_CREATE" | "PROG_LOAD" | "LINK_CREATE"))
}

/// Place of the object in `union bpf_attr`, in bytes.
#[derive(Clone, Copy)]
enum Object {
    None,
    /// A descriptor.
    Descriptor(u64),
    /// A name of up to 15 bytes.
    Name(u64),
    /// The address of a path.
    Path(u64),
    /// A number, such as a type of attachment.
    Number(u64),
}

/// Describes a call before it is made. None for calls that are of no interest, or of a process that has gone.
pub(super) fn describe(
    thread: Pid,
    number: i64,
    arguments: [u64; 6],
    directory: &str,
) -> Option<(String, &'static [i32])> {
    let [first, second, third, fourth, ..] = arguments;
    let path = |address| Some(short(&text(thread, address)?, directory));
    let descriptor = |number: u64| fs::read_link(format!("/proc/{thread}/fd/{number}")).ok();
    Some(match number {
        libc::SYS_bpf => return bpf(thread, first, second, directory),
        libc::SYS_mount => (format!("mount {}", path(second)?), &[EPERM, ENOMEM, ENODEV, EBUSY]),
        libc::SYS_umount2 => (format!("umount {}", path(first)?), &[EPERM, EBUSY]),
        libc::SYS_rename => (format!("rename {} {}", path(first)?, path(second)?), DIRECTORY),
        libc::SYS_renameat | libc::SYS_renameat2 => (format!("rename {} {}", path(second)?, path(fourth)?), DIRECTORY),
        libc::SYS_unlink => (format!("unlink {}", path(first)?), &[EPERM, EROFS, EBUSY]),
        libc::SYS_unlinkat => (format!("unlink {}", path(second)?), &[EPERM, EROFS, EBUSY]),
        libc::SYS_mkdir => (format!("mkdir {}", path(first)?), DIRECTORY),
        libc::SYS_mkdirat => (format!("mkdir {}", path(second)?), DIRECTORY),
        libc::SYS_flock => {
            let file = short(&descriptor(first)?.to_string_lossy(), directory);
            // A lock that is waited for cannot be somebody else's.
            let is_waiting = second & libc::LOCK_NB as u64 == 0;
            (format!("flock {file} {second}"), if is_waiting { &[ENOLCK, EINTR] } else { &[ENOLCK, EAGAIN] })
        }
        libc::SYS_fcntl => {
            const LOCKS: [i32; 4] = [libc::F_SETLK, libc::F_SETLKW, libc::F_OFD_SETLK, libc::F_OFD_SETLKW];
            if !LOCKS.iter().any(|lock| *lock as u64 == second) {
                return None;
            }
            (format!("fcntl {} {second}", short(&descriptor(first)?.to_string_lossy(), directory)), &[ENOLCK, EINTR])
        }
        // A missing permission (EPERM) is one for good: such a namespace is counted and left alone.
        libc::SYS_setns => ("setns".to_owned(), &[ENOMEM]),
        libc::SYS_socket if first as i32 == libc::AF_NETLINK => {
            (format!("socket netlink {third}"), &[EPERM, EMFILE, ENOBUFS, EAFNOSUPPORT])
        }
        libc::SYS_bind => (format!("bind {}", netlink(thread, first)?), &[EPERM, ENOMEM]),
        libc::SYS_sendto => {
            // `struct nlmsghdr` has the length and then the type.
            let kind = u16::from_ne_bytes(bytes::<2>(thread, second + 4)?);
            (format!("sendto {} {kind}", netlink(thread, first)?), &[EPERM, ENOBUFS, EINTR])
        }
        libc::SYS_sendmsg => (format!("sendmsg {}", netlink(thread, first)?), &[EPERM, ENOBUFS, EINTR]),
        libc::SYS_recvfrom | libc::SYS_recvmsg => {
            (format!("receive {}", netlink(thread, first)?), &[ENOBUFS, EINTR, ENOMEM])
        }
        _ => return None,
    })
}

fn bpf(thread: Pid, command: u64, attributes: u64, directory: &str) -> Option<(String, &'static [i32])> {
    let number = |offset| Some(u32::from_ne_bytes(bytes(thread, attributes + offset)?));
    let Some(&(name, object, errors)) = COMMANDS.get(usize::try_from(command).ok()?) else {
        return Some((format!("bpf {command}"), &[EPERM]));
    };
    let object = match object {
        Object::None => String::new(),
        Object::Descriptor(offset) => object_name(thread, number(offset)?),
        Object::Name(offset) => {
            let name = bytes::<15>(thread, attributes + offset)?;
            String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()
        }
        Object::Path(offset) => {
            let address = u64::from_ne_bytes(bytes(thread, attributes + offset)?);
            short(&text(thread, address)?, directory)
        }
        Object::Number(offset) => number(offset)?.to_string(),
    };
    Some((format!("bpf {name} {object}"), errors))
}

/// The name of a map, or the kind of another object.
fn object_name(thread: Pid, descriptor: u32) -> String {
    let information = fs::read_to_string(format!("/proc/{thread}/fdinfo/{descriptor}")).unwrap_or_default();
    let field = |name: &str| information.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if let Some(id) = field("map_id:").and_then(|id| id.parse().ok()) {
        let name = MapInfo::from_id(id).ok().and_then(|map| map.name_as_str().map(str::to_owned));
        return name.unwrap_or_else(|| "map".to_owned());
    }
    match (field("attach_type:"), field("prog_type:")) {
        (Some(kind), _) => format!("link {kind}"),
        (None, Some(kind)) => format!("program {kind}"),
        (None, None) => "object".to_owned(),
    }
}

/// Protocol of a netlink socket. None for other sockets.
fn netlink(thread: Pid, descriptor: u64) -> Option<String> {
    let link = fs::read_link(format!("/proc/{thread}/fd/{descriptor}")).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned();
    let sockets = fs::read_to_string(format!("/proc/{thread}/net/netlink")).ok()?;
    // The second column is the protocol, the last the inode.
    let socket = sockets.lines().find(|line| line.split_whitespace().next_back() == Some(&inode))?;
    Some(format!("netlink {}", socket.split_whitespace().nth(1)?))
}

/// A path without the sandbox's directory, and without numbers that differ from run to run.
fn short(path: &str, directory: &str) -> String {
    let path = path.replace(directory, "");
    let parts = path.split('/').map(|part| {
        let digits = part.chars().filter(char::is_ascii_digit).count();
        if digits > 2 {
            part.chars().map(|char| if char.is_ascii_digit() { '#' } else { char }).collect()
        } else {
            part.to_owned()
        }
    });
    parts.collect::<Vec<_>>().join("/")
}

/// A string of another process.
fn text(thread: Pid, address: u64) -> Option<String> {
    let mut text = Vec::new();
    while text.len() < libc::PATH_MAX as usize {
        let [byte] = bytes::<1>(thread, address + text.len() as u64)?;
        if byte == 0 {
            return Some(String::from_utf8_lossy(&text).into_owned());
        }
        text.push(byte);
    }
    None
}

/// Memory of another process.
fn bytes<const N: usize>(thread: Pid, address: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let remote = RemoteIoVec { base: usize::try_from(address).ok()?, len: N };
    let read = process_vm_readv(thread, &mut [IoSliceMut::new(&mut bytes)], &[remote]).ok()?;
    (read == N).then_some(bytes)
}
