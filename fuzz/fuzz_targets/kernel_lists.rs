//! Lists of the kernel: sockets, by netlink and in `/proc/net`, mounts, and records of its log. The first byte of an
//! input selects the list, the rest is its text.

#![no_main]

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use cproxy::agent::is_fork;
use cproxy_core::Protocol;
use cproxy_datapath::sockets::{
    diag_message::{self, AddressPort, DiagReply, INET, SocketFamily},
    proc_net,
};
use cproxy_mountinfo::{MountEntry, parse as parse_mounts};
use libfuzzer_sys::fuzz_target;

/// Length of a request to close a socket, and the place of the socket's id in it (include/uapi/linux/inet_diag.h).
const DESTROY_BYTES: usize = 72;
const ID_AT: usize = 24;
/// Header of a message, and of a socket in it.
const HEADER_BYTES: usize = 16;
const SOCKET_BYTES: usize = 72;

fuzz_target!(|input: &[u8]| {
    let Some((list, rest)) = input.split_first() else { return };
    match list {
        b'n' => check_netlink(rest),
        b'p' => String::from_utf8_lossy(rest).lines().for_each(check_socket_line),
        b'm' => check_mounts(rest),
        b'k' => check_record(rest),
        _ => {}
    }
});

/// The first four bytes are the number of the request.
fn check_netlink(bytes: &[u8]) {
    let Some((sequence, datagram)) = bytes.split_first_chunk() else { return };
    let sequence = u32::from_ne_bytes(*sequence);
    let Some(replies) = diag_message::parse(datagram, sequence) else { return };
    assert!(replies.len() <= datagram.len() / HEADER_BYTES, "more replies than messages: {replies:?}");
    for reply in replies {
        let DiagReply::Socket(id, info, stored) = reply else { continue };
        let kind = SocketFamily { family: INET, protocol: Protocol::Udp };
        let request = diag_message::encode_destroy(kind, &id, sequence);
        assert_eq!(request.len(), DESTROY_BYTES);
        let id_bytes = &request[ID_AT..];
        assert!(datagram.windows(id_bytes.len()).any(|window| window == id_bytes), "the kernel gets back what it gave");
        assert!(id_bytes.ends_with(&id.cookie().to_ne_bytes()) || cfg!(target_endian = "big"));
        assert!(info.inode <= u32::MAX.into());
        let is_longer = datagram.len() >= HEADER_BYTES + SOCKET_BYTES + size_of::<cproxy_ebpf::Translation>();
        assert!(stored.is_none() || is_longer, "{stored:?} is from nowhere");
    }
}

/// A line that is understood says the same when it is written as the kernel writes it.
fn check_socket_line(line: &str) {
    let Some(info) = proc_net::parse_line(line) else { return };
    assert_ne!(info.inode, 0, "{line:?}");
    let [local, peer] = [info.local, info.peer].map(written);
    let (uid, inode, retransmits) = (info.uid, info.inode, info.retransmits);
    let again = format!("  0: {local} {peer} 01 00000000:00000000 00:00000000 {retransmits:08X} {uid} 0 {inode} 2 0 0");
    assert_eq!(proc_net::parse_line(&again), Some(info), "{line:?}");
}

fn written((address, port): AddressPort) -> String {
    let words: String = address.iter().map(|word| format!("{word:08X}")).collect();
    format!("{words}:{:04X}", u16::from_be(port))
}

/// Mounts say the same when they are written as the kernel writes them.
fn check_mounts(text: &[u8]) {
    let mounts = parse_mounts(text);
    assert!(mounts.len() <= text.split(|&byte| byte == b'\n').count());
    let lines: Vec<_> = mounts.iter().map(mount_line).collect();
    assert_eq!(parse_mounts(&lines.concat()), mounts, "{}", text.escape_ascii());
}

fn mount_line(mount: &MountEntry) -> Vec<u8> {
    let MountEntry { id, root, point, kind, options } = mount;
    let paths = [root, point].map(|path| escaped(path));
    let start = format!("{id} 1 0:1 ").into_bytes();
    [&start, &*paths[0], b" ", &*paths[1], b" rw master:1 - ", kind, b" none ", options, b"\n"].concat()
}

/// Path with octal escapes (fs/seq_file.c, `mangle_path`).
fn escaped(path: &Path) -> Vec<u8> {
    let escaped = |&byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        _ => vec![byte],
    };
    OsStr::as_bytes(path.as_os_str()).iter().flat_map(escaped).collect()
}

/// A record counts only if it is the kernel's own message.
fn check_record(record: &[u8]) {
    if is_fork(record) {
        let text = str::from_utf8(record).unwrap();
        assert!(text.contains(";random: crng reseeded due to virtual machine fork"), "{text:?}");
        let number: u32 = text.split([',', ';']).next().unwrap().parse().unwrap();
        assert_eq!(number >> 3, 0, "{text:?} is a program's");
    }
}
