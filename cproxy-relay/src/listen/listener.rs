//! Listeners: sockets that are opened for the addresses of `--listen`.

use std::{io, net::SocketAddr, sync::Arc};

use cproxy_daemon::{
    ListenAddress as OwnAddress,
    unix_socket::{self, SocketFile},
};
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

use crate::{
    listen::{acceptor::Acceptor, address::ListenAddress, guest_sockets::GuestSockets, tls::ServerTls},
    relay::Relay,
};

/// Connections that wait to be accepted. The kernel bounds it, too (net.core.somaxconn).
const BACKLOG: u32 = 16_384;

/// Socket that listens, or sockets of guests.
pub(crate) enum Listener {
    Socket(Acceptor),
    /// Unix socket with its file, which is made again if it is removed.
    Unix(UnixListener, Arc<SocketFile>),
    Guests(GuestSockets),
}

/// Opens a listener. `tls` is for TCP.
///
/// # Errors
/// The address is in use or cannot be bound.
pub(crate) fn open(address: &ListenAddress, tls: Option<&Arc<ServerTls>>) -> io::Result<Listener> {
    Ok(match address {
        ListenAddress::Guests(pattern) => Listener::Guests(GuestSockets::new(pattern.clone())),
        ListenAddress::Own(OwnAddress::Tcp(address)) => {
            Listener::Socket(Acceptor::Tcp(listen_tcp(*address)?, tls.cloned()))
        }
        ListenAddress::Own(OwnAddress::Unix(path)) => {
            let (listener, file) = unix_socket::listen(path)?;
            Listener::Unix(listener, Arc::new(file))
        }
        &ListenAddress::Own(OwnAddress::Vsock { cid, port }) => {
            let cid = if cid == u32::MAX { VMADDR_CID_ANY } else { cid };
            Listener::Socket(Acceptor::Vsock(VsockListener::bind(VsockAddr::new(cid, port))?))
        }
    })
}

fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Listener {
    /// Accepts connections for ever.
    pub(crate) async fn run(self, relay: Arc<Relay>) {
        match self {
            Self::Socket(acceptor) => acceptor.run(relay).await,
            Self::Unix(listener, file) => accept_unix(listener, file, relay).await,
            Self::Guests(sockets) => sockets.run(relay).await,
        }
    }
}

/// Accepts connections of a unix socket for ever. A socket cannot be reached without its file: a new one takes its
/// place.
async fn accept_unix(mut listener: UnixListener, file: Arc<SocketFile>, relay: Arc<Relay>) {
    loop {
        tokio::select! {
            () = Acceptor::Unix(listener, file.clone()).run(relay.clone()) => return,
            again = file.clone().listen_again() => listener = again,
        }
    }
}
