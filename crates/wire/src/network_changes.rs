//! The kernel's word, by netlink, that routes, rules, addresses or links have changed. What has changed does not matter: it is
//! cheaper to ask again than to follow.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink::SocketAddrNetlink, recv, socket_with},
};
use tokio::io::{Interest, unix::AsyncFd};

/// The groups that are listened to (linux/rtnetlink.h). A link that goes down takes its routes along without a further
/// word (net/ipv4/fib_frontend.c, `fib_disable_ip`).
const GROUPS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV4_RULE
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV6_ROUTE) as u32
    | 1 << (libc::RTNLGRP_IPV6_RULE - 1);

/// An address comes with its routes, and often with others.
const DELAY: Duration = Duration::from_millis(50);

/// A socket that has something to read when something has changed.
#[derive(Debug)]
pub struct NetworkChanges(AsyncFd<OwnedFd>);

impl NetworkChanges {
    /// Listens from now on. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no such sockets, or no room for one.
    pub fn open() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // No protocol is NETLINK_ROUTE, which is 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nobody else closes it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
        socket.map(Self).map_err(|error| errno(&error.into()))
    }

    /// Waits until something has changed, and a little longer for what comes with it.
    ///
    /// # Errors
    /// The socket is of no use any more.
    pub async fn wait(&self) -> Result<(), Errno> {
        loop {
            let mut ready = self.0.readable().await.map_err(|error| errno(&error))?;
            let has_changed = self.drain()?;
            ready.clear_ready();
            if has_changed {
                tokio::time::sleep(DELAY).await;
                return self.drain().map(drop);
            }
        }
    }

    /// Reads what there is: whether that is anything. What did not fit (ENOBUFS) is something, too.
    fn drain(&self) -> Result<bool, Errno> {
        let mut has_read = false;
        loop {
            // The rest of a message is dropped.
            let mut start = [0; 1];
            match retry_on_intr(|| recv(self.0.get_ref(), &mut start[..], RecvFlags::empty())) {
                Ok(_) | Err(Errno::NOBUFS) => has_read = true,
                Err(Errno::WOULDBLOCK) => return Ok(has_read),
                Err(error) => return Err(error),
            }
        }
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
