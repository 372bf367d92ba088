//! Addresses, messages and control data in the kernel's form.

use std::{
    mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use cproxy_tests::witness::ANSWER_BYTES;

/// Length of an answer, so that a read takes exactly one from a stream.
const SPACE_BYTES: usize = ANSWER_BYTES;
/// Room for two control messages.
const CONTROL_WORDS: usize = 16;

/// Type of service in control data.
const TYPE_OF_SERVICE: libc::c_int = 0x10;

/// A socket address.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl Default for Name {
    fn default() -> Self {
        // SAFETY: all bytes 0 are a valid value.
        Self { storage: unsafe { mem::zeroed() }, length: 0 }
    }
}

impl From<SocketAddr> for Name {
    fn from(address: SocketAddr) -> Self {
        let mut name = Self::default();
        match address {
            SocketAddr::V4(address) => name.store(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: in_addr(*address.ip()),
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(address) => name.store(libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            }),
        }
        name
    }
}

impl Name {
    fn store<T>(&mut self, address: T) {
        const { assert!(size_of::<T>() <= size_of::<libc::sockaddr_storage>()) };
        // SAFETY: the storage is large enough and aligned for every kind of address.
        unsafe { (&raw mut self.storage).cast::<T>().write(address) };
        self.length = size_of::<T>() as libc::socklen_t;
    }

    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn length(&self) -> libc::socklen_t {
        self.length
    }

    /// Capacity of the storage.
    pub(crate) fn capacity(&self) -> libc::socklen_t {
        size_of::<libc::sockaddr_storage>() as libc::socklen_t
    }

    /// The address that the kernel has written; `None` if it is empty.
    pub(crate) fn decode(&self, length: libc::socklen_t) -> Option<SocketAddr> {
        match (length, libc::c_int::from(self.storage.ss_family)) {
            (0, _) => None,
            (_, libc::AF_INET) => {
                // SAFETY: the family says what it is.
                let name = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let address = Ipv4Addr::from_bits(u32::from_be(name.sin_addr.s_addr));
                Some(SocketAddr::new(IpAddr::V4(address), u16::from_be(name.sin_port)))
            }
            (_, libc::AF_INET6) => {
                // SAFETY: the family says what it is.
                let name = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in6>().read() };
                let address = Ipv6Addr::from_octets(name.sin6_addr.s6_addr);
                Some(SocketAddr::new(IpAddr::V6(address), u16::from_be(name.sin6_port)))
            }
            (_, family) => panic!("an address of family {family}"),
        }
    }
}

fn in_addr(address: Ipv4Addr) -> libc::in_addr {
    libc::in_addr { s_addr: address.to_bits().to_be() }
}

/// A message to send, or room to receive one, with everything that `sendmsg()` and `recvmsg()` refer to.
pub(crate) struct Buffer {
    bytes: [u8; SPACE_BYTES],
    length: usize,
    name: Option<Name>,
    control: [u64; CONTROL_WORDS],
    control_length: usize,
    vector: libc::iovec,
    header: libc::msghdr,
}

impl Buffer {
    fn new(name: Option<Name>) -> Self {
        let vector = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: all bytes 0 are a valid header.
        let header = unsafe { mem::zeroed() };
        let bytes = [0; SPACE_BYTES];
        Self { bytes, length: SPACE_BYTES, name, control: [0; CONTROL_WORDS], control_length: 0, vector, header }
    }

    /// A message to send.
    pub(crate) fn sending(bytes: &[u8], to: Option<SocketAddr>) -> Self {
        let mut buffer = Self::new(to.map(Name::from));
        buffer.bytes[..bytes.len()].copy_from_slice(bytes);
        buffer.length = bytes.len();
        buffer
    }

    /// Room for a message and its source.
    pub(crate) fn receiving() -> Self {
        let mut name = Name::default();
        name.length = name.capacity();
        Self::new(Some(name))
    }

    /// Adds control data: the source address, and a type of service. A socket of AF_INET6 takes it in the form of
    /// AF_INET6, for any destination.
    pub(crate) fn control(&mut self, source: IpAddr) {
        let tos = TYPE_OF_SERVICE;
        match source {
            IpAddr::V4(source) => {
                let nowhere = in_addr(Ipv4Addr::UNSPECIFIED);
                let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: in_addr(source), ipi_addr: nowhere };
                self.push_control(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
                self.push_control(libc::IPPROTO_IP, libc::IP_TOS, tos);
            }
            IpAddr::V6(source) => {
                let address = libc::in6_addr { s6_addr: source.octets() };
                let info = libc::in6_pktinfo { ipi6_addr: address, ipi6_ifindex: 0 };
                self.push_control(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
                // An IPv4 destination has no traffic class.
                if source.to_ipv4_mapped().is_none() {
                    self.push_control(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, tos);
                } else {
                    self.push_control(libc::IPPROTO_IP, libc::IP_TOS, tos);
                }
            }
        }
    }

    fn push_control<T>(&mut self, level: libc::c_int, kind: libc::c_int, data: T) {
        let length = size_of::<libc::cmsghdr>() + size_of::<T>();
        self.append(libc::cmsghdr { cmsg_len: length, cmsg_level: level, cmsg_type: kind });
        self.append(data);
    }

    /// Appends a part, aligned to a multiple of 8.
    fn append<T>(&mut self, part: T) {
        let end = self.control_length + size_of::<T>().next_multiple_of(8);
        assert!(end <= size_of_val(&self.control), "more control data than there is room for");
        let at = self.control.as_mut_ptr().wrapping_byte_add(self.control_length).cast::<T>();
        // SAFETY: within the array, as checked, and aligned.
        unsafe { at.write(part) };
        self.control_length = end;
    }

    /// The message.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Room for a message.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The message and its destination, for calls that take them separately.
    pub(crate) fn parts(&self) -> (&[u8], *const libc::sockaddr, libc::socklen_t) {
        let name = self.name.as_ref();
        (self.bytes(), name.map_or(std::ptr::null(), Name::as_ptr), name.map_or(0, Name::length))
    }

    /// Source of the message, if there was one.
    pub(crate) fn name(&self) -> Option<SocketAddr> {
        self.name.and_then(|name| name.decode(name.length))
    }

    /// A header that points into this buffer, valid until the buffer is moved.
    pub(crate) fn header(&mut self) -> &mut libc::msghdr {
        self.vector = libc::iovec { iov_base: self.bytes.as_mut_ptr().cast(), iov_len: self.length };
        self.header.msg_iov = &raw mut self.vector;
        self.header.msg_iovlen = 1;
        if let Some(name) = &mut self.name {
            self.header.msg_name = name.as_mut_ptr().cast();
            self.header.msg_namelen = name.length;
        }
        if self.control_length > 0 {
            self.header.msg_control = self.control.as_mut_ptr().cast();
            self.header.msg_controllen = self.control_length;
        }
        &mut self.header
    }

    /// Records that the kernel has filled the buffer through its header.
    pub(crate) fn filled(&mut self, length: usize, name_length: libc::socklen_t) {
        let name = self.name.unwrap_or_default();
        self.filled_from(length, name, name_length);
    }

    /// Records that the kernel has filled the buffer, and written the source to `name`.
    pub(crate) fn filled_from(&mut self, length: usize, name: Name, name_length: libc::socklen_t) {
        self.length = length;
        self.name = Some(Name { length: name_length, ..name });
    }
}
