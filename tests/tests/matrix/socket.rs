//! System calls on sockets as applications make them, all with the same arguments and results.

use std::{
    cell::RefCell,
    io, mem,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    time::Duration,
};

use io_uring::{IoUring, opcode, squeue, types::Fd};

use crate::{
    message::{Buffer, Name},
    world::patience,
};

/// An open socket.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
}

/// Call to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendCall {
    Send,
    Sendto,
    Sendmsg,
    /// With control data: the source address and the type of service.
    SendmsgCmsg,
    Sendmmsg,
    UringSend,
    UringSendmsg,
}

/// Call to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveCall {
    Recv,
    Recvfrom,
    Recvmsg,
    Recvmmsg,
    UringRecv,
    UringRecvmsg,
}

/// Whether a receiving call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Waits up to the socket's timeout.
    Yes,
    /// Fails if there is nothing to receive.
    No,
}

impl Socket {
    /// A new socket.
    pub(crate) fn new(family: libc::c_int, kind: libc::c_int) -> io::Result<Self> {
        Self::of_protocol(family, kind, 0)
    }

    /// A new socket of a protocol.
    pub(crate) fn of_protocol(family: libc::c_int, kind: libc::c_int, protocol: libc::c_int) -> io::Result<Self> {
        // SAFETY: a system call with integers.
        let fd = check(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) })?;
        // SAFETY: a new descriptor that nothing else owns.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Sets an integer option.
    pub(crate) fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        self.set_option_value(level, option, &value)
    }

    /// Sets the timeout for receiving.
    pub(crate) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = libc::timeval {
            tv_sec: timeout.as_secs().try_into().map_err(io::Error::other)?,
            tv_usec: timeout.subsec_micros().into(),
        };
        self.set_option_value(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout)
    }

    fn set_option_value<T>(&self, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
        let length = size_of::<T>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of a live value.
        check(unsafe { libc::setsockopt(self.raw(), level, option, (&raw const *value).cast(), length) }).map(drop)
    }

    /// `bind()`.
    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let name = Name::from(address);
        // SAFETY: the pointer and the length are those of a live name.
        check(unsafe { libc::bind(self.raw(), name.as_ptr(), name.length()) }).map(drop)
    }

    /// `connect()`.
    pub(crate) fn connect(&self, address: SocketAddr) -> io::Result<()> {
        let name = Name::from(address);
        // SAFETY: the pointer and the length are those of a live name.
        check(unsafe { libc::connect(self.raw(), name.as_ptr(), name.length()) }).map(drop)
    }

    /// `connect()` through an io_uring.
    pub(crate) fn connect_by_uring(&self, address: SocketAddr) -> io::Result<()> {
        let name = Name::from(address);
        submit(&opcode::Connect::new(Fd(self.raw()), name.as_ptr(), name.length()).build()).map(drop)
    }

    /// `connect()` with AF_UNSPEC, which disconnects.
    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: all bytes 0 are a valid sockaddr, of AF_UNSPEC.
        let address: libc::sockaddr = unsafe { mem::zeroed() };
        let length = size_of::<libc::sockaddr>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of a live value.
        check(unsafe { libc::connect(self.raw(), &raw const address, length) }).map(drop)
    }

    /// `getpeername()`.
    pub(crate) fn peer(&self) -> io::Result<SocketAddr> {
        self.name(libc::getpeername)
    }

    /// `getsockname()`.
    pub(crate) fn local(&self) -> io::Result<SocketAddr> {
        self.name(libc::getsockname)
    }

    fn name(
        &self,
        call: unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int,
    ) -> io::Result<SocketAddr> {
        let mut name = Name::default();
        let mut length = name.capacity();
        // SAFETY: the pointer and the length are those of a live name.
        check(unsafe { call(self.raw(), name.as_mut_ptr(), &raw mut length) })?;
        name.decode(length).ok_or_else(|| io::Error::other("no name"))
    }

    /// Sends one message to `to` or to the socket's peer.
    pub(crate) fn send_one(&self, bytes: &[u8], to: Option<SocketAddr>) -> io::Result<()> {
        self.send(SendCall::Sendto, &mut [Buffer::sending(bytes, to)]).map(drop)
    }

    /// `send()`.
    pub(crate) fn send_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the pointer and the length are those of live bytes.
        check_size(unsafe { libc::send(self.raw(), bytes.as_ptr().cast(), bytes.len(), 0) })
    }

    /// Opens a TCP connection with the first message, by a call that takes flags.
    pub(crate) fn fast_open(&self, call: SendCall, message: &mut Buffer) -> io::Result<usize> {
        let flags = libc::MSG_FASTOPEN;
        if call == SendCall::UringSendmsg {
            let entry = opcode::SendMsg::new(Fd(self.raw()), message.header()).flags(flags as u32);
            return submit(&entry.build());
        }
        if call == SendCall::Sendmsg {
            // SAFETY: the header points into a live buffer.
            return check_size(unsafe { libc::sendmsg(self.raw(), message.header(), flags) });
        }
        let (bytes, name, length) = message.parts();
        // SAFETY: the pointers and lengths are those of live values.
        check_size(unsafe { libc::sendto(self.raw(), bytes.as_ptr().cast(), bytes.len(), flags, name, length) })
    }

    /// Sends messages, several with [`SendCall::Sendmmsg`] only, and returns the number of sent ones.
    pub(crate) fn send(&self, call: SendCall, messages: &mut [Buffer]) -> io::Result<usize> {
        if call == SendCall::Sendmmsg {
            return self.sendmmsg(messages);
        }
        let [message] = messages else { return Err(io::ErrorKind::InvalidInput.into()) };
        let length = match call {
            SendCall::UringSend => submit(&uring_send(self.raw(), message))?,
            SendCall::UringSendmsg => submit(&opcode::SendMsg::new(Fd(self.raw()), message.header()).build())?,
            SendCall::Sendmsg | SendCall::SendmsgCmsg => {
                // SAFETY: the header points into a live buffer.
                check_size(unsafe { libc::sendmsg(self.raw(), message.header(), 0) })?
            }
            _ => {
                let (bytes, name, name_length) = message.parts();
                // SAFETY: the pointers and lengths are those of live values.
                check_size(unsafe {
                    libc::sendto(self.raw(), bytes.as_ptr().cast(), bytes.len(), 0, name, name_length)
                })?
            }
        };
        if length == message.bytes().len() { Ok(1) } else { Err(io::Error::other("sent in part")) }
    }

    fn sendmmsg(&self, messages: &mut [Buffer]) -> io::Result<usize> {
        let mut headers = vector(messages);
        let count = headers.len().try_into().map_err(io::Error::other)?;
        // SAFETY: the headers point into live buffers.
        let sent = check(unsafe { libc::sendmmsg(self.raw(), headers.as_mut_ptr(), count, 0) })?;
        usize::try_from(sent).map_err(io::Error::other)
    }

    /// Waits until the kernel has an error for the socket, which no call takes.
    ///
    /// # Panics
    /// When there is none.
    pub(crate) fn wait_for_refusal(&self) {
        let refused = poll(&[self], 0, patience()).expect("a socket");
        assert!(refused.is_some(), "a datagram to nobody is not refused");
    }

    /// Receives one datagram, or the available part of a stream, with its source.
    pub(crate) fn receive_one(&self) -> io::Result<Buffer> {
        let mut buffer = [Buffer::receiving()];
        self.receive(ReceiveCall::Recvfrom, Waiting::Yes, &mut buffer)?;
        let [buffer] = buffer;
        Ok(buffer)
    }

    /// Receives messages, several with [`ReceiveCall::Recvmmsg`] only, and returns the number of received ones.
    pub(crate) fn receive(&self, call: ReceiveCall, waiting: Waiting, messages: &mut [Buffer]) -> io::Result<usize> {
        let flags = if waiting == Waiting::No { libc::MSG_DONTWAIT } else { 0 };
        if call == ReceiveCall::Recvmmsg {
            return self.recvmmsg(flags, messages);
        }
        let [message] = messages else { return Err(io::ErrorKind::InvalidInput.into()) };
        match call {
            ReceiveCall::UringRecv | ReceiveCall::UringRecvmsg => self.uring_receive(call, flags, message)?,
            ReceiveCall::Recvmsg => {
                let mut header = *message.header();
                // SAFETY: the header points into a live buffer.
                let length = check_size(unsafe { libc::recvmsg(self.raw(), &raw mut header, flags) })?;
                message.filled(length, header.msg_namelen);
            }
            ReceiveCall::Recv => {
                let space = message.space();
                // SAFETY: the pointer and the length are those of a live buffer.
                let received = unsafe { libc::recv(self.raw(), space.as_mut_ptr().cast(), space.len(), flags) };
                message.filled(check_size(received)?, 0);
            }
            _ => self.recvfrom(flags, message)?,
        }
        Ok(1)
    }

    fn recvfrom(&self, flags: libc::c_int, message: &mut Buffer) -> io::Result<()> {
        let mut name = Name::default();
        let mut name_length = name.capacity();
        let space = message.space();
        let (at, size) = (space.as_mut_ptr().cast(), space.len());
        // SAFETY: the pointers and lengths are those of live values.
        let received = unsafe { libc::recvfrom(self.raw(), at, size, flags, name.as_mut_ptr(), &raw mut name_length) };
        let length = check_size(received)?;
        message.filled_from(length, name, name_length);
        Ok(())
    }

    fn recvmmsg(&self, flags: libc::c_int, messages: &mut [Buffer]) -> io::Result<usize> {
        let mut headers = vector(messages);
        let count = headers.len().try_into().map_err(io::Error::other)?;
        // The call checks its own timeout argument after each datagram only; the socket's timeout ends a wait.
        let timeout = std::ptr::null_mut();
        // SAFETY: the headers point into live buffers.
        let received = check(unsafe { libc::recvmmsg(self.raw(), headers.as_mut_ptr(), count, flags, timeout) })?;
        for (message, header) in messages.iter_mut().zip(headers) {
            message.filled(header.msg_len as usize, header.msg_hdr.msg_namelen);
        }
        usize::try_from(received).map_err(io::Error::other)
    }

    /// Receives by io_uring, which ignores the socket's timeout, so a poll has to wait.
    fn uring_receive(&self, call: ReceiveCall, flags: libc::c_int, message: &mut Buffer) -> io::Result<()> {
        if flags == 0 && poll(&[self], libc::POLLIN, patience())?.is_none() {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        if call == ReceiveCall::UringRecv {
            let space = message.space();
            let length = space.len().try_into().map_err(io::Error::other)?;
            let entry = opcode::Recv::new(Fd(self.raw()), space.as_mut_ptr(), length).flags(flags | libc::MSG_DONTWAIT);
            let length = submit(&entry.build())?;
            message.filled(length, 0);
            return Ok(());
        }
        let mut header = *message.header();
        let flags = (flags | libc::MSG_DONTWAIT) as u32;
        let length = submit(&opcode::RecvMsg::new(Fd(self.raw()), &raw mut header).flags(flags).build())?;
        message.filled(length, header.msg_namelen);
        Ok(())
    }

    /// `dup()`.
    pub(crate) fn duplicate(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// The descriptor's number.
    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

/// Waits until one of the sockets is ready for `events`, and returns its index; none within `timeout`.
pub(crate) fn poll(sockets: &[impl AsFd], events: libc::c_short, timeout: Duration) -> io::Result<Option<usize>> {
    let of = |socket: &_| libc::pollfd { fd: AsFd::as_fd(socket).as_raw_fd(), events, revents: 0 };
    let mut waiting: Vec<_> = sockets.iter().map(of).collect();
    let timeout_ms = timeout.as_millis().try_into().map_err(io::Error::other)?;
    // SAFETY: the pointer and the length are those of a live vector.
    check(unsafe { libc::poll(waiting.as_mut_ptr(), waiting.len() as libc::nfds_t, timeout_ms) })?;
    Ok(waiting.iter().position(|socket| socket.revents != 0))
}

/// The vector that `sendmmsg()` and `recvmmsg()` take.
fn vector(messages: &mut [Buffer]) -> Vec<libc::mmsghdr> {
    messages.iter_mut().map(|message| libc::mmsghdr { msg_hdr: *message.header(), msg_len: 0 }).collect()
}

fn uring_send(fd: RawFd, message: &mut Buffer) -> squeue::Entry {
    let (bytes, name, name_length) = message.parts();
    let length = bytes.len().try_into().expect("a message is short");
    let send = opcode::Send::new(Fd(fd), bytes.as_ptr(), length);
    send.dest_addr(name).dest_addr_len(name_length).build()
}

thread_local! {
    /// One ring for all operations, since the end of a ring interrupts any system call of its thread at that time.
    static RING: RefCell<IoUring> = RefCell::new(IoUring::new(2).expect("this kernel has io_uring"));
}

/// Submits one operation and returns the result of the system call of that name.
fn submit(entry: &squeue::Entry) -> io::Result<usize> {
    RING.with_borrow_mut(|ring| {
        // SAFETY: the caller's buffers live until the operation is complete, which this function waits for.
        unsafe { ring.submission().push(entry) }.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        let result = ring.completion().next().ok_or_else(|| io::Error::other("no completion"))?.result();
        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    })
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_size(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
