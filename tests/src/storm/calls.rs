//! System calls that return the local address a datagram was sent to, and answer from there.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem,
    net::{Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd, RawFd},
};

/// One control message, `IPV6_PKTINFO`, returned with the answer as it was received.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct Control {
    length: usize,
    level: i32,
    kind: i32,
    address: [u8; 16],
    interface: u32,
}

impl Control {
    /// Destination of the datagram, IPv4 in mapped form.
    pub(crate) fn destination(&self) -> Ipv6Addr {
        assert_eq!((self.level, self.kind), (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), "the one control message");
        Ipv6Addr::from_octets(self.address)
    }
}

/// Enables the destinations of received datagrams, and sending from addresses that no interface has.
pub(crate) fn enable_destinations(socket: &UdpSocket) -> io::Result<()> {
    for option in [libc::IPV6_RECVPKTINFO, libc::IPV6_FREEBIND] {
        let on: i32 = 1;
        let length = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
        // SAFETY: the option's value is an integer that lives during the call.
        check(unsafe {
            libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IPV6, option, (&raw const on).cast(), length)
        } as isize)?;
    }
    Ok(())
}

/// A client's address in the kernel's form.
pub(crate) struct Client(libc::sockaddr_in6);

/// Receives one datagram.
pub(crate) fn receive(socket: &UdpSocket, mut buffer: IoSliceMut<'_>, control: &mut Control) -> io::Result<Client> {
    // SAFETY: integers only.
    let mut client = Client(unsafe { mem::zeroed() });
    let mut message = message(&raw mut client.0, (&raw mut buffer).cast(), control);
    // SAFETY: every pointer in the message is to memory that lives during the call, with its length.
    check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) })?;
    Ok(client)
}

/// Sends one datagram back.
pub(crate) fn send(socket: &UdpSocket, buffer: IoSlice<'_>, client: &Client, control: &Control) -> io::Result<()> {
    let (mut client, mut control) = (client.0, *control);
    let mut buffer = buffer;
    let message = message(&raw mut client, (&raw mut buffer).cast(), &mut control);
    let fd: RawFd = socket.as_raw_fd();
    // SAFETY: as above; the kernel only reads.
    check(unsafe { libc::sendmsg(fd, &raw const message, 0) })
}

fn message(client: *mut libc::sockaddr_in6, buffer: *mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: integers and pointers, which may be null.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_name = client.cast();
    message.msg_namelen = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
    message.msg_iov = buffer;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut *control).cast();
    message.msg_controllen = size_of::<Control>();
    message
}

fn check(result: isize) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
