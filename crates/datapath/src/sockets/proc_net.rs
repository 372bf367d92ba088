//! Sockets as `/proc/net` shows them, for kernels without socket monitoring: enough to list and count, not to close.

use std::{
    fs::File,
    io::{BufRead, BufReader},
};

use cproxy_core::Protocol;
use cproxy_ebpf::v4_mapped;

use super::diag_message::{AddressPort, CONNECTED, INET, SocketFamily, SocketInfo};

/// Shows the connected sockets of a kind, in the calling thread's network namespace.
pub(super) fn each(kind: SocketFamily, show: &mut dyn FnMut(SocketInfo)) {
    let path = match (kind.protocol, kind.family) {
        (Protocol::Udp, INET) => "/proc/thread-self/net/udp",
        (Protocol::Udp, _) => "/proc/thread-self/net/udp6",
        (Protocol::Tcp, INET) => "/proc/thread-self/net/tcp",
        (Protocol::Tcp, _) => "/proc/thread-self/net/tcp6",
    };
    // A kernel without IPv6 has none of its files.
    let Ok(file) = File::open(path) else { return };
    let (mut reader, mut line) = (BufReader::new(file), String::new());
    while reader.read_line(&mut line).is_ok_and(|length| length != 0) {
        if let Some(info) = parse_line(&line) {
            show(info);
        }
        line.clear();
    }
}

/// A line of `/proc/net/{udp,udp6,tcp,tcp6}` (net/ipv4/udp.c, `udp4_format_sock`): a socket that has a peer and
/// an inode.
#[must_use]
pub fn parse_line(line: &str) -> Option<SocketInfo> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, peer) = (address_port(fields.next()?)?, address_port(fields.next()?)?);
    let state = u32::from_str_radix(fields.next()?, 16).ok()?;
    let retransmits = u32::from_str_radix(fields.nth(2)?, 16).ok()?;
    let retransmits = u8::try_from(retransmits).unwrap_or(u8::MAX);
    let uid = fields.next()?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    let is_connected = 1u32.checked_shl(state).is_some_and(|bit| bit & CONNECTED != 0);
    (is_connected && inode != 0).then_some(SocketInfo { local, peer, uid, inode, retransmits, cgroup: 0 })
}

/// The kernel writes the port as a number, the words of the address as it has them in memory.
fn address_port(text: &str) -> Option<AddressPort> {
    let (address, port) = text.split_once(':')?;
    Some((words(address)?, u16::from_str_radix(port, 16).ok()?.to_be()))
}

fn words(hex: &str) -> Option<[u32; 4]> {
    let word = |index: usize| u32::from_str_radix(hex.get(index * 8..index * 8 + 8)?, 16).ok();
    match hex.len() {
        8 => Some(v4_mapped(word(0)?)),
        32 => Some([word(0)?, word(1)?, word(2)?, word(3)?]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, net::UdpSocket, os::fd::AsFd};

    use super::*;

    #[test]
    fn the_kernels_own_lines_are_understood() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect("127.0.0.9:4660").unwrap();
        let stat = rustix::fs::fstat(socket.as_fd()).unwrap();
        let read = || -> Vec<_> {
            let text = fs::read_to_string("/proc/thread-self/net/udp").unwrap();
            text.lines().filter_map(parse_line).filter(|info| info.inode == stat.st_ino).collect()
        };
        // The kernel counts lines to go on where it was, and so leaves sockets out while others are closed.
        let ours = (0..1000).map(|_| read()).find(|ours| !ours.is_empty()).unwrap_or_default();
        let address = |host| v4_mapped(u32::from_ne_bytes([127, 0, 0, host]));
        let (local, peer) = (socket.local_addr().unwrap().port().to_be(), 0x1234u16.to_be());
        let (local, peer, uid, inode) = ((address(1), local), (address(9), peer), stat.st_uid, stat.st_ino);
        let expected = SocketInfo { local, peer, uid, inode, retransmits: 0, cgroup: 0 };
        assert_eq!(ours, [expected]);
    }

    #[test]
    fn ipv6_addresses_and_states_are_read_and_garbage_is_skipped() {
        let line = |peer: &str, state: &str, inode: &str| {
            let zeros = "0".repeat(32);
            parse_line(&format!(" 7: {zeros}:0035 {peer} {state} 0:0 00:0 0000000B 4711 0 {inode} 2 0 0"))
        };
        let mapped = "0000000000000000FFFF000009007F0A:0035";
        let address = [0, 0, 0xffff_0000, 0x0900_7f0a];
        let port = 53u16.to_be();
        let expected = SocketInfo {
            local: ([0; 4], port),
            peer: (address, port),
            uid: 4_711,
            inode: 9,
            retransmits: 11,
            cgroup: 0,
        };
        assert_eq!(line(mapped, "01", "9"), Some(expected));
        for (state, inode) in [("07", "9"), ("0A", "9"), ("01", "0"), ("01", "x"), ("FF", "9"), ("", "")] {
            assert_eq!(line(mapped, state, inode), None, "{state} {inode}");
        }
        for text in ["", "sl local_address rem_address st", " 1: a:b c:d 01", " 1: 0:0 00€00:1 01 0 0 0 0 0 5"] {
            assert_eq!(parse_line(text), None, "{text}");
        }
    }
}
