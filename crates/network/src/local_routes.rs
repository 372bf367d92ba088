//! Local routes of addresses that the machine receives though no device has them (`ip route add local ADDRESS dev lo
//! proto 98`): it takes packets to them.
//!
//! The protocol is this program's mark on its routes. Those of others are not removed.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::OwnedFd,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with},
};

/// Mark of the routes (linux/rtnetlink.h, `rtm_protocol`): from 5 on they are free for anybody; 98 is in no list.
pub const ROUTE_PROTOCOL: u8 = 98;

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = libc::AF_INET6 as u8;

/// `lo` is the first device of each network namespace (net/core/dev.c, `LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;

/// `struct nlmsghdr`, `struct rtmsg`, `struct nlattr`.
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;
const ATTRIBUTE_BYTES: usize = 4;

/// More than the kernel puts into one datagram (net/netlink/af_netlink.c, `netlink_dump`).
const DATAGRAM_BYTES: usize = 64 * 1024;

/// Way to the routes of the calling thread's network namespace.
#[derive(Debug)]
pub struct LocalRoutes {
    socket: OwnedFd,
    sequence: u32,
}

/// Addresses whose packets the machine takes.
#[derive(Debug, Default)]
pub struct LocalAddresses {
    /// Those with a route of ours.
    pub ours: Vec<IpAddr>,
    /// Those of devices but the loopback device, and of broadcasts.
    pub of_devices: Vec<IpAddr>,
}

impl LocalRoutes {
    /// Opens it.
    ///
    /// # Errors
    /// The kernel has no netlink, or no memory for the socket.
    pub fn open() -> io::Result<Self> {
        // `None` is NETLINK_ROUTE, which is 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Adds the route of an address. One that is there, also of others, is enough.
    ///
    /// # Errors
    /// The kernel refuses, as without the right to change the network.
    pub fn add(&mut self, address: IpAddr) -> io::Result<()> {
        let flags = libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        match self.change(libc::RTM_NEWROUTE, flags, address) {
            Err(Errno::EXIST) => Ok(()),
            changed => Ok(changed?),
        }
    }

    /// Removes the route of an address, if there is one.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn remove(&mut self, address: IpAddr) -> io::Result<()> {
        match self.change(libc::RTM_DELROUTE, libc::NLM_F_ACK, address) {
            Err(Errno::SRCH | Errno::NOENT) => Ok(()),
            changed => Ok(changed?),
        }
    }

    /// Addresses that have such a route, and those that the machine has on a device, or takes for a network's
    /// broadcasts.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn list(&mut self) -> io::Result<LocalAddresses> {
        let mut addresses = LocalAddresses::default();
        for family in [AF_INET, AF_INET6] {
            let message = self.message(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &[family; 1], &[]);
            self.exchange(&message, &mut |route| addresses.add(route))?;
        }
        Ok(addresses)
    }

    fn change(&mut self, kind: u16, flags: i32, address: IpAddr) -> Result<(), Errno> {
        let (family, octets): (u8, &[u8]) = match &address {
            IpAddr::V4(v4) => (AF_INET, &v4.octets()),
            IpAddr::V6(v6) => (AF_INET6, &v6.octets()),
        };
        let scope = if family == AF_INET { libc::RT_SCOPE_HOST } else { libc::RT_SCOPE_UNIVERSE };
        // struct rtmsg: family, bits of the destination and of the source, type of service, table, protocol, scope,
        // type, flags.
        let bits = (octets.len() * 8) as u8;
        let route = [family, bits, 0, 0, libc::RT_TABLE_LOCAL, ROUTE_PROTOCOL, scope, libc::RTN_LOCAL];
        let attributes = [(libc::RTA_DST, octets), (libc::RTA_OIF, &LOOPBACK.to_ne_bytes())];
        let message = self.message(kind, flags, &route, &attributes);
        self.exchange(&message, &mut |_| {})
    }

    /// A message with the first bytes of its `struct rtmsg`.
    fn message(&mut self, kind: u16, flags: i32, route: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = vec![0; HEADER_BYTES];
        message.extend_from_slice(route);
        message.resize(HEADER_BYTES + ROUTE_BYTES, 0);
        for (kind, value) in attributes {
            // The values have whole words.
            message.extend_from_slice(&((ATTRIBUTE_BYTES + value.len()) as u16).to_ne_bytes());
            message.extend_from_slice(&kind.to_ne_bytes());
            message.extend_from_slice(value);
        }
        let flags = (libc::NLM_F_REQUEST | flags) as u16;
        let mut header = (message.len() as u32).to_ne_bytes().to_vec();
        header.extend_from_slice(&kind.to_ne_bytes());
        header.extend_from_slice(&flags.to_ne_bytes());
        header.extend_from_slice(&self.sequence.to_ne_bytes());
        message.splice(..header.len(), header);
        message
    }

    /// Sends a request and shows the routes of its answers.
    fn exchange(&self, request: &[u8], show: &mut dyn FnMut(&[u8])) -> Result<(), Errno> {
        retry_on_intr(|| send(&self.socket, request, SendFlags::empty()))?;
        let mut buffer = vec![0; DATAGRAM_BYTES];
        loop {
            let (_, length) = retry_on_intr(|| recv(&self.socket, buffer.as_mut_slice(), RecvFlags::TRUNC))?;
            let mut rest = buffer.get(..length).ok_or(Errno::BADMSG)?;
            while let Some((kind, sequence, body, after)) = next_message(rest) {
                rest = after;
                if sequence != self.sequence {
                    continue;
                }
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(()),
                    libc::NLMSG_ERROR => {
                        let code = body.first_chunk().map_or(libc::EBADMSG, |code| -i32::from_ne_bytes(*code));
                        return if code == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(code)) };
                    }
                    _ => show(body),
                }
            }
        }
    }
}

/// Type, number and body of the first message, and the bytes behind it.
fn next_message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let sequence = u32::from_ne_bytes(*bytes.get(8..)?.first_chunk()?);
    let body = bytes.get(HEADER_BYTES..length)?;
    Some((kind, sequence, body, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

impl LocalAddresses {
    /// Adds the address of a route, if it leads to one.
    fn add(&mut self, route: &[u8]) {
        let &[family, bits, _, _, libc::RT_TABLE_LOCAL, protocol, _, kind, ..] = route else { return };
        let Some(attributes) = route.get(ROUTE_BYTES..) else { return };
        let Some(octets) = attribute(attributes, libc::RTA_DST) else { return };
        let address: Option<IpAddr> = match (family, bits) {
            (AF_INET, 32) => octets.first_chunk().map(|octets: &[u8; 4]| Ipv4Addr::from(*octets).into()),
            (AF_INET6, 128) => octets.first_chunk().map(|octets: &[u8; 16]| Ipv6Addr::from(*octets).into()),
            _ => None,
        };
        let is_on_loopback = attribute(attributes, libc::RTA_OIF) == Some(LOOPBACK.to_ne_bytes().as_slice());
        match (kind, protocol) {
            (libc::RTN_LOCAL, ROUTE_PROTOCOL) => self.ours.extend(address),
            // One on the loopback device is what others have set up for a balancer's address.
            (libc::RTN_LOCAL, _) if is_on_loopback => {}
            _ => self.of_devices.extend(address),
        }
    }
}

/// Value of a route's attribute.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(*attributes.first_chunk()?));
        let name = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(ATTRIBUTE_BYTES..length)?;
        if name == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}
