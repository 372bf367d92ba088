//! Notifications by netlink that routes, rules, addresses or links have changed. Their content is ignored: reading the
//! state again costs less than following each change.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink::SocketAddrNetlink, recv, socket_with},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Multicast groups (linux/rtnetlink.h). A link that goes down removes its routes without a further notification
/// (net/ipv4/fib_frontend.c, `fib_disable_ip`).
const GROUPS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV4_RULE
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV6_ROUTE) as u32
    | 1 << (libc::RTNLGRP_IPV6_RULE - 1);

/// Time for related changes to arrive: an address comes with its routes, and often with other addresses.
const DELAY: Duration = Duration::from_millis(50);

/// Netlink socket that becomes readable after a change.
#[derive(Debug)]
pub struct NetworkChanges(AsyncFd<OwnedFd>);

impl NetworkChanges {
    /// Starts to listen. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no netlink, or no memory for the socket.
    pub fn open() -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // `None` is NETLINK_ROUTE, which is 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nothing else closes it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
        socket.map(Self).map_err(|error| errno(&error.into()))
    }

    /// Waits for a change, and a little longer for related ones.
    ///
    /// # Errors
    /// The socket has failed.
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

    /// Reads all notifications. True if there was one; lost notifications (ENOBUFS) count.
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
