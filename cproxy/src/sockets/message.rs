//! Messages of the kernel's socket monitoring, `NETLINK_SOCK_DIAG`: bytes in, values out, no I/O.
//!
//! include/uapi/linux/{netlink,sock_diag,inet_diag}.h have the layouts. All numbers are in the machine's order, except
//! addresses and ports, which are in network order.

use cproxy_ebpf::v4_mapped;
use rustix::io::Errno;

/// `AF_INET`.
pub(super) const INET: u8 = 2;
/// `AF_INET6`.
pub(super) const INET6: u8 = 10;

/// Message types.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// Message flags.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;

/// `INET_DIAG_REQ_PROTOCOL`: a protocol that does not fit into the 8 bits of the request.
const INET_DIAG_REQ_PROTOCOL: u16 = 3;

/// `struct nlmsghdr`, `struct inet_diag_msg` and the `struct inet_diag_sockid` in it.
const HEADER_BYTES: usize = 16;
const DIAG_BYTES: usize = 72;
const ID_BYTES: usize = 48;

/// States of sockets that have a peer and an owner, as bits by number (include/net/tcp_states.h): established (so are
/// connected UDP sockets), SYN sent, both FIN waits, close wait, last ACK, closing.
pub(super) const CONNECTED: u32 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
    Mptcp,
}

impl Transport {
    /// `IPPROTO_MPTCP` has more than 8 bits: the request then says `IPPROTO_RAW`, and an attribute the rest.
    const fn numbers(self) -> (u8, Option<u32>) {
        match self {
            Self::Udp => (17, None),
            Self::Tcp => (6, None),
            Self::Mptcp => (255, Some(262)),
        }
    }
}

/// Which sockets are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// [`INET`] or [`INET6`].
    pub(super) family: u8,
    pub(super) transport: Transport,
}

/// An address, IPv4 as IPv4-mapped, and a port, both in network order.
pub(super) type AddressPort = ([u32; 4], u16);

/// `struct inet_diag_sockid`: addresses, ports, interface and cookie. What the kernel gave is what it gets back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SocketId([u8; ID_BYTES]);

impl SocketId {
    /// Fits no socket: their cookies are not 0.
    pub(super) const NOBODY: Self = Self([0; ID_BYTES]);

    /// Tells sockets apart as long as the machine runs.
    pub(super) fn cookie(&self) -> u64 {
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
pub(super) struct Shown {
    pub(super) local: AddressPort,
    /// Where packets really go.
    pub(super) peer: AddressPort,
    /// Its owner.
    pub(super) uid: u32,
    /// By which descriptors show it; 0 when it has none.
    pub(super) inode: u64,
}

/// One message of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A socket.
    Socket(SocketId, Shown),
    /// The end: of a dump, or of anything that went wrong.
    End(Result<(), Errno>),
    /// Of no interest here.
    Other,
}

/// What one datagram brought.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) messages: Vec<Message>,
    /// The dump met a change and may lack something.
    pub(super) is_interrupted: bool,
}

/// A request for all sockets of a kind that are in one of `states`.
pub(super) fn dump_request(kind: Kind, states: u32, sequence: u32) -> Vec<u8> {
    request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, kind, states, &SocketId::NOBODY, sequence)
}

/// A request to close exactly this socket under its owner.
pub(super) fn destroy_request(kind: Kind, id: &SocketId, sequence: u32) -> Vec<u8> {
    request(SOCK_DESTROY, NLM_F_ACK, kind, u32::MAX, id, sequence)
}

fn request(message: u16, flags: u16, kind: Kind, states: u32, id: &SocketId, sequence: u32) -> Vec<u8> {
    let (protocol, long_protocol) = kind.transport.numbers();
    let mut bytes = vec![0; 4];
    bytes.extend(message.to_ne_bytes());
    bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]); // to the kernel
    bytes.extend([kind.family, protocol, 0, 0]);
    bytes.extend(states.to_ne_bytes());
    bytes.extend(id.0);
    if let Some(protocol) = long_protocol {
        bytes.extend(8u16.to_ne_bytes());
        bytes.extend(INET_DIAG_REQ_PROTOCOL.to_ne_bytes());
        bytes.extend(protocol.to_ne_bytes());
    }
    let length = bytes.len() as u32;
    bytes.splice(..4, length.to_ne_bytes());
    bytes
}

/// Reads what the kernel answered to the request with this number; answers to others are left out. `None` when it is
/// not in the form it should be.
pub(super) fn parse(mut bytes: &[u8], sequence: u32) -> Option<Answer> {
    let mut answer = Answer { messages: Vec::new(), is_interrupted: false };
    while !bytes.is_empty() {
        let length = u32_at(bytes, 0)? as usize;
        let payload = bytes.get(HEADER_BYTES..length)?;
        if u32_at(bytes, 8)? == sequence {
            answer.is_interrupted |= u16_at(bytes, 6)? & NLM_F_DUMP_INTR != 0;
            answer.messages.push(message(u16_at(bytes, 4)?, payload)?);
        }
        // The last message may lack its padding.
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(answer)
}

fn message(kind: u16, payload: &[u8]) -> Option<Message> {
    Some(match kind {
        SOCK_DIAG_BY_FAMILY => shown(payload)?.map_or(Message::Other, |(id, shown)| Message::Socket(id, shown)),
        // 0 is an acknowledgement.
        NLMSG_ERROR => Message::End(result(i32_at(payload, 0)?)),
        // The kernel's older way to end had no payload.
        NLMSG_DONE => Message::End(result(i32_at(payload, 0).unwrap_or_default())),
        _ => Message::Other,
    })
}

fn shown(payload: &[u8]) -> Option<Option<(SocketId, Shown)>> {
    let diag = payload.get(..DIAG_BYTES)?;
    let id = SocketId(diag.get(4..4 + ID_BYTES)?.try_into().ok()?);
    let (family, uid, inode) = (*diag.first()?, u32_at(diag, 64)?, u32_at(diag, 68)?.into());
    let ends = id.local(family).zip(id.peer(family));
    Some(ends.map(|(local, peer)| (id, Shown { local, peer, uid, inode })))
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

    /// What Linux 6.18 answered: an IPv6 socket connected to [::ffff:127.0.0.9]:4660, the end of that dump, and the end
    /// of one of a protocol that it does not know.
    const SOCKET: &str = "7c0000001400020007000000bd7300000a010000d429123400000000000000000000ffff7f00000100000000000000000000\
                          ffff7f000009000000000900000000000000000000000000000000000000000000001ee00e00050008000000000008000f00\
                          000000000c00150001000000000000000600160010000000";
    const END: &str = "140000000300020007000000bd73000000000000";
    const UNKNOWN: &str = "140000000300020007000000bd730000feffffff";
    const UDP6: Kind = Kind { family: INET6, transport: Transport::Udp };

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
        digits.as_chunks::<2>().0.iter().map(|[high, low]| (high * 16 + low) as u8).collect()
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn the_kernels_own_messages_are_understood() {
        let answer = parse(&[bytes(SOCKET), bytes(END)].concat(), 7).unwrap();
        let [Message::Socket(id, shown), Message::End(Ok(()))] = answer.messages[..] else { panic!("{answer:?}") };
        assert!(!answer.is_interrupted);
        let at = |host, port: u16| (v4_mapped(u32::from_ne_bytes([127, 0, 0, host])), port.to_be());
        assert_eq!(shown, Shown { local: at(1, 0xd429), peer: at(9, 4660), uid: 0, inode: 0x000e_e01e });
        assert_eq!(id.cookie(), 9);
        assert_eq!(parse(&bytes(UNKNOWN), 7).unwrap().messages, [Message::End(Err(Errno::NOENT))]);
        assert_eq!(parse(&bytes(END), 8).unwrap().messages, [], "an answer to another request");
        let destroy = destroy_request(UDP6, &id, 8);
        assert_eq!(
            (destroy.len(), &destroy[24..72]),
            (72, &bytes(SOCKET)[20..68]),
            "the kernel gets back what it gave"
        );
    }

    #[test]
    fn the_peer_of_an_ipv4_socket_is_in_the_one_form() {
        let mut id = SocketId::NOBODY;
        id.0[2..4].copy_from_slice(&[0x12, 0x34]);
        id.0[20..24].copy_from_slice(&[10, 244, 0, 7]);
        let address = v4_mapped(u32::from_ne_bytes([10, 244, 0, 7]));
        assert_eq!(id.peer(INET), Some((address, 0x1234u16.to_be())));
        assert_eq!(id.peer(1), None, "another family");
    }

    #[test]
    fn an_acknowledgement_an_error_and_an_interruption_are_told_apart() {
        let error = |code: i32, flags: u16| {
            let mut bytes = 20u32.to_ne_bytes().to_vec();
            bytes.extend(NLMSG_ERROR.to_ne_bytes());
            bytes.extend(flags.to_ne_bytes());
            bytes.extend([1u32.to_ne_bytes(), 0u32.to_ne_bytes(), code.to_ne_bytes()].concat());
            parse(&bytes, 1).unwrap()
        };
        assert_eq!(error(0, 0).messages, [Message::End(Ok(()))]);
        assert_eq!(error(-95, 0).messages, [Message::End(Err(Errno::OPNOTSUPP))]);
        for code in [i32::MIN, -4096, 1, i32::MAX] {
            assert_eq!(error(code, 0).messages, [Message::End(Err(Errno::BADMSG))]);
        }
        assert!(error(0, NLM_F_DUMP_INTR).is_interrupted && !error(0, 0).is_interrupted);
    }

    #[test]
    fn requests_say_their_length_and_long_protocols_have_an_attribute() {
        for (transport, length, protocol) in
            [(Transport::Udp, 72, 17), (Transport::Tcp, 72, 6), (Transport::Mptcp, 80, 255)]
        {
            let request = dump_request(Kind { family: INET, transport }, CONNECTED, 1);
            assert_eq!((request.len(), u32_at(&request, 0), request[17]), (length, Some(length as u32), protocol));
        }
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn what_is_cut_off_is_not_taken() {
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
