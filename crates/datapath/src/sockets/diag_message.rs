//! Messages of the kernel's socket monitoring, `NETLINK_SOCK_DIAG`: bytes in, values out, no I/O.
//!
//! include/uapi/linux/{netlink,sock_diag,inet_diag}.h have the layouts. All numbers are in the machine's order, except
//! addresses and ports, which are in network order.

use std::{mem::offset_of, os::fd::RawFd};

use cproxy_core::Protocol;
use cproxy_ebpf::{SocketState, Translation, v4_mapped};
use rustix::io::Errno;

/// `AF_INET`.
pub const INET: u8 = 2;
/// `AF_INET6`.
pub const INET6: u8 = 10;

/// Message types.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// Message flags.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;

/// Attributes of a request; the second lists the maps whose values are wanted.
const INET_DIAG_REQ_BYTECODE: u16 = 1;
const INET_DIAG_REQ_SK_BPF_STORAGES: u16 = 2;
const SK_DIAG_BPF_STORAGE_REQ_MAP_FD: u16 = 1;

/// Attributes of a reply: the cgroup; the values, in it one for each map, and in that the value.
const INET_DIAG_CGROUP_ID: u16 = 21;
const INET_DIAG_SK_BPF_STORAGES: u16 = 20;
const SK_DIAG_BPF_STORAGE: u16 = 1;
const SK_DIAG_BPF_STORAGE_MAP_VALUE: u16 = 3;

/// `struct nlmsghdr`, `struct inet_diag_msg` and the `struct inet_diag_sockid` in it.
const HEADER_BYTES: usize = 16;
const DIAG_BYTES: usize = 72;
const ID_BYTES: usize = 48;
/// `struct nlattr`, and a mark on its type.
const ATTRIBUTE_BYTES: usize = 4;
const NLA_F_NESTED: u16 = 1 << 15;

/// States of sockets that have a peer and an owner, as bits by number (include/net/tcp_states.h): established (so are
/// connected UDP sockets), SYN sent, both FIN waits, close wait, last ACK, closing.
pub(super) const CONNECTED: u32 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// State of TCP sockets that listen.
pub(super) const LISTENING: u32 = 1 << 10;

/// Sockets of an address family and a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketFamily {
    /// [`INET`] or [`INET6`].
    pub family: u8,
    /// TCP or UDP.
    pub protocol: Protocol,
}

/// `IPPROTO_TCP`, `IPPROTO_UDP`.
const fn number_of(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

/// An address, IPv4 as IPv4-mapped, and a port, both in network order.
pub type AddressPort = ([u32; 4], u16);

/// `struct inet_diag_sockid`: addresses, ports, interface and cookie. What the kernel gave is what it gets back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketId([u8; ID_BYTES]);

impl SocketId {
    /// Fits no socket: their cookies are not 0.
    pub(super) const NONE: Self = Self([0; ID_BYTES]);

    /// Number that no other socket has until the machine restarts.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        let half = |at| u64::from(u32_at(&self.0, at).unwrap_or_default());
        half(40) | half(44) << 32
    }

    fn local(&self, family: u8) -> Option<AddressPort> {
        self.address_port(family, 4, 0)
    }

    fn peer(&self, family: u8) -> Option<AddressPort> {
        self.address_port(family, 20, 2)
    }

    fn address_port(&self, family: u8, address_at: usize, port_at: usize) -> Option<AddressPort> {
        let word = |index: usize| u32_at(&self.0, address_at + 4 * index);
        let address = match family {
            INET => v4_mapped(word(0)?),
            INET6 => [word(0)?, word(1)?, word(2)?, word(3)?],
            _ => return None,
        };
        Some((address, u16_at(&self.0, port_at)?))
    }
}

/// A socket that has a peer, as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketInfo {
    /// Its own end.
    pub local: AddressPort,
    /// Actual destination of packets.
    pub peer: AddressPort,
    /// Its owner.
    pub uid: u32,
    /// Inode number, as its descriptors show it; 0 without one.
    pub inode: u64,
    /// Times that what was sent last has been sent again, so far without an acknowledgement.
    pub retransmits: u8,
    /// Id of the cgroup in which it was made, or accepted; 0 if the kernel does not show it.
    pub cgroup: u64,
}

/// One message of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiagReply {
    /// A socket, and its translation if that is stored with it.
    Socket(SocketId, SocketInfo, Option<Translation>),
    /// The end: of a dump, or of anything that went wrong.
    End(Result<(), Errno>),
    /// Of no interest here.
    Other,
}

/// The contents of a dump.
#[derive(Clone, Copy, Debug)]
pub(super) struct DumpQuery<'w> {
    pub(super) kind: SocketFamily,
    /// In one of these states.
    pub(super) states: u32,
    /// Of a form as [`super::filter`] makes it; all sockets without one.
    pub(super) filter: Option<&'w [u8]>,
    /// The map whose values are wanted, too. The kernel shows them for TCP alone.
    pub(super) storage: Option<RawFd>,
}

/// A request for all sockets of a query.
pub(super) fn encode_dump(query: &DumpQuery<'_>, sequence: u32) -> Vec<u8> {
    let mut request = request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, query.kind, query.states, &SocketId::NONE, sequence);
    if let Some(filter) = query.filter {
        append(&mut request, INET_DIAG_REQ_BYTECODE, filter);
    }
    if let Some(map) = query.storage {
        let mut maps = Vec::new();
        append(&mut maps, SK_DIAG_BPF_STORAGE_REQ_MAP_FD, &map.to_ne_bytes());
        append(&mut request, INET_DIAG_REQ_SK_BPF_STORAGES, &maps);
    }
    with_length(request)
}

/// A request to close exactly this socket under its owner.
#[must_use]
pub fn encode_destroy(kind: SocketFamily, id: &SocketId, sequence: u32) -> Vec<u8> {
    with_length(request(SOCK_DESTROY, NLM_F_ACK, kind, u32::MAX, id, sequence))
}

fn request(message: u16, flags: u16, kind: SocketFamily, states: u32, id: &SocketId, sequence: u32) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend(message.to_ne_bytes());
    bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]); // to the kernel
    bytes.extend([kind.family, number_of(kind.protocol), 0, 0]);
    bytes.extend(states.to_ne_bytes());
    bytes.extend(id.0);
    bytes
}

/// Adds `struct nlattr` and what it holds, whose length is a multiple of 4.
fn append(bytes: &mut Vec<u8>, kind: u16, payload: &[u8]) {
    bytes.extend(((ATTRIBUTE_BYTES + payload.len()) as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(payload);
}

fn with_length(mut request: Vec<u8>) -> Vec<u8> {
    let length = request.len() as u32;
    request.splice(..4, length.to_ne_bytes());
    request
}

/// Decodes the replies to the request with this number; replies to others are left out. `None` when it is
/// not in the form it should be.
pub fn parse(mut bytes: &[u8], sequence: u32) -> Option<Vec<DiagReply>> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let length = u32_at(bytes, 0)? as usize;
        let payload = bytes.get(HEADER_BYTES..length)?;
        if u32_at(bytes, 8)? == sequence {
            messages.push(message(u16_at(bytes, 4)?, payload)?);
        }
        // The last message may lack its padding.
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(messages)
}

fn message(kind: u16, payload: &[u8]) -> Option<DiagReply> {
    Some(match kind {
        SOCK_DIAG_BY_FAMILY => socket(payload)?,
        // 0 is an acknowledgement.
        NLMSG_ERROR => DiagReply::End(result(i32_at(payload, 0)?)),
        // The kernel's older way to end had no payload.
        NLMSG_DONE => DiagReply::End(result(i32_at(payload, 0).unwrap_or_default())),
        _ => DiagReply::Other,
    })
}

fn socket(payload: &[u8]) -> Option<DiagReply> {
    let (diag, attributes) = payload.split_at_checked(DIAG_BYTES)?;
    let id = SocketId(diag.get(4..4 + ID_BYTES)?.try_into().ok()?);
    let (family, uid, inode) = (*diag.first()?, u32_at(diag, 64)?, u32_at(diag, 68)?.into());
    let retransmits = *diag.get(3)?;
    let Some((local, peer)) = id.local(family).zip(id.peer(family)) else { return Some(DiagReply::Other) };
    let cgroup = attribute(attributes, INET_DIAG_CGROUP_ID).and_then(|id| Some(u64::from_ne_bytes(*id.first_chunk()?)));
    let info = SocketInfo { local, peer, uid, inode, retransmits, cgroup: cgroup.unwrap_or_default() };
    Some(DiagReply::Socket(id, info, stored(attributes)))
}

/// The socket's translation, where the kernel shows its storage.
fn stored(attributes: &[u8]) -> Option<Translation> {
    let storage = attribute(attribute(attributes, INET_DIAG_SK_BPF_STORAGES)?, SK_DIAG_BPF_STORAGE)?;
    let state = attribute(storage, SK_DIAG_BPF_STORAGE_MAP_VALUE)?;
    let peer = state.get(offset_of!(SocketState, peer)..)?;
    let address = |at| {
        let word = |index: usize| u32_at(peer, at + 4 * index);
        Some([word(0)?, word(1)?, word(2)?, word(3)?])
    };
    Some(Translation {
        vip: address(offset_of!(Translation, vip))?,
        backend: address(offset_of!(Translation, backend))?,
        vip_port: u16_at(peer, offset_of!(Translation, vip_port))?,
        backend_port: u16_at(peer, offset_of!(Translation, backend_port))?,
        slot: u32_at(peer, offset_of!(Translation, slot))?,
    })
}

/// The first attribute of a kind. The kernel marks some that have others in them.
fn attribute(mut bytes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16_at(bytes, 0)?);
        let payload = bytes.get(ATTRIBUTE_BYTES..length)?;
        if u16_at(bytes, 2)? & !NLA_F_NESTED == kind {
            return Some(payload);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

/// An error number outside the kernel's range (include/linux/err.h, `MAX_ERRNO`) is none: rustix would panic on it.
fn result(code: i32) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        -4095..0 => Err(Errno::from_raw_os_error(-code)),
        _ => Err(Errno::BADMSG),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Replies of Linux 6.18: an IPv6 socket connected to [::ffff:127.0.0.9]:4660, the end of that dump, and the end
    /// of one of a protocol that it does not know.
    const SOCKET: &str = "7c0000001400020007000000bd7300000a010000d429123400000000000000000000ffff7f00000100000000\
                          000000000000ffff7f000009000000000900000000000000000000000000000000000000000000001ee00e00\
                          050008000000000008000f00000000000c00150001000000000000000600160010000000";
    const END: &str = "140000000300020007000000bd73000000000000";
    const UNKNOWN: &str = "140000000300020007000000bd730000feffffff";
    const UDP6: SocketFamily = SocketFamily { family: INET6, protocol: Protocol::Udp };

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
        digits.as_chunks::<2>().0.iter().map(|[high, low]| (high * 16 + low) as u8).collect()
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn the_kernels_own_messages_are_decoded() {
        let replies = parse(&[bytes(SOCKET), bytes(END)].concat(), 7).unwrap();
        let [DiagReply::Socket(id, info, None), DiagReply::End(Ok(()))] = replies[..] else { panic!("{replies:?}") };
        let at = |host, port: u16| (v4_mapped(u32::from_ne_bytes([127, 0, 0, host])), port.to_be());
        let (local, peer) = (at(1, 0xd429), at(9, 4660));
        assert_eq!(info, SocketInfo { local, peer, uid: 0, inode: 0x000e_e01e, retransmits: 0, cgroup: 1 });
        assert_eq!(id.cookie(), 9);
        assert_eq!(parse(&bytes(UNKNOWN), 7).unwrap(), [DiagReply::End(Err(Errno::NOENT))]);
        assert_eq!(parse(&bytes(END), 8).unwrap(), [], "a reply to another request");
        let destroy = encode_destroy(UDP6, &id, 8);
        assert_eq!(
            (destroy.len(), &destroy[24..72]),
            (72, &bytes(SOCKET)[20..68]),
            "the kernel gets back what it gave"
        );
    }

    #[test]
    fn the_peer_of_an_ipv4_socket_is_in_the_one_form() {
        let mut id = SocketId::NONE;
        id.0[2..4].copy_from_slice(&[0x12, 0x34]);
        id.0[20..24].copy_from_slice(&[10, 244, 0, 7]);
        let address = v4_mapped(u32::from_ne_bytes([10, 244, 0, 7]));
        assert_eq!(id.peer(INET), Some((address, 0x1234u16.to_be())));
        assert_eq!(id.peer(1), None, "another family");
    }

    #[test]
    fn an_acknowledgement_and_an_error_are_distinguished() {
        let error = |code: i32| {
            let mut bytes = 20u32.to_ne_bytes().to_vec();
            bytes.extend(NLMSG_ERROR.to_ne_bytes());
            bytes.extend([0; 2]);
            bytes.extend([1u32.to_ne_bytes(), 0u32.to_ne_bytes(), code.to_ne_bytes()].concat());
            parse(&bytes, 1).unwrap()
        };
        assert_eq!(error(0), [DiagReply::End(Ok(()))]);
        assert_eq!(error(-95), [DiagReply::End(Err(Errno::OPNOTSUPP))]);
        for code in [i32::MIN, -4096, 1, i32::MAX] {
            assert_eq!(error(code), [DiagReply::End(Err(Errno::BADMSG))]);
        }
    }

    #[test]
    fn requests_have_their_length_and_their_filters() {
        for (protocol, number) in [(Protocol::Udp, 17), (Protocol::Tcp, 6)] {
            let kind = SocketFamily { family: INET, protocol };
            let request = |filter, storage| encode_dump(&DumpQuery { kind, states: CONNECTED, filter, storage }, 1);
            for (request, length) in [
                (request(None, None), 72),
                (request(Some(&[0; 8]), None), 84),
                (request(None, Some(7)), 84),
                (request(Some(&[0; 8]), Some(7)), 96),
            ] {
                assert_eq!((request.len(), u32_at(&request, 0), request[17]), (length, Some(length as u32), number));
            }
            let both = request(Some(&[9; 8]), Some(7));
            assert_eq!(attribute(&both[72..], INET_DIAG_REQ_BYTECODE), Some(&[9; 8][..]));
            let maps = attribute(&both[72..], INET_DIAG_REQ_SK_BPF_STORAGES).unwrap();
            assert_eq!(attribute(maps, SK_DIAG_BPF_STORAGE_REQ_MAP_FD), Some(&7u32.to_ne_bytes()[..]));
        }
    }

    #[test]
    fn socket_storage_is_decoded() {
        let asked = Translation { vip: [1, 2, 3, 4], vip_port: 5, backend: [6, 7, 8, 9], backend_port: 10, slot: 11 };
        let words = |words: [u32; 4]| words.map(u32::to_ne_bytes).concat();
        let ports = [asked.vip_port.to_ne_bytes(), asked.backend_port.to_ne_bytes()].concat();
        let state =
            [words(asked.vip), words(asked.backend), ports, [asked.slot.to_ne_bytes(), [0; 4]].concat()].concat();
        let [mut storage, mut storages, mut attributes] = [const { Vec::new() }; 3];
        append(&mut storage, 2, &[0; 4]);
        append(&mut storage, SK_DIAG_BPF_STORAGE_MAP_VALUE, &state);
        append(&mut storages, SK_DIAG_BPF_STORAGE | NLA_F_NESTED, &storage);
        append(&mut attributes, 8, &[0; 4]);
        append(&mut attributes, INET_DIAG_SK_BPF_STORAGES | NLA_F_NESTED, &storages);
        assert_eq!(stored(&attributes), Some(asked));
        for length in 0..attributes.len() {
            assert_eq!(stored(&attributes[..length]), None, "{length} bytes");
        }
        // A length that would never end.
        assert_eq!(stored(&[0; 64]), None);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn truncated_messages_are_refused() {
        let whole = bytes(SOCKET);
        for length in 1..whole.len() {
            assert_eq!(parse(&whole[..length], 7), None, "{length} bytes");
        }
        // A length that leaves no room for the message, and one that would never end.
        for length in [0u32, 15, 16, 60, 87] {
            let lying = [&length.to_ne_bytes(), &whole[4..]].concat();
            assert_eq!(parse(&lying, 7), None, "{length} bytes");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300), length in 0u32..300) {
            parse(&bytes, 0);
            parse(&[&length.to_ne_bytes(), &bytes[..]].concat(), u32_at(&bytes, 4).unwrap_or_default());
        }
    }
}
