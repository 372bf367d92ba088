//! The kernel's lists of the sockets of one network namespace that have a peer: by socket monitoring, or as `/proc/net`
//! has them.

use std::os::fd::{AsRawFd, BorrowedFd};

use cproxy_core::{Protocol, RetiredBackends};
use cproxy_ebpf::Translation;
use rustix::io::Errno;

use super::{
    diag::{Diag, DumpedSocket},
    diag_message::{CONNECTED, DumpQuery, INET, INET6, LISTENING, SocketFamily, SocketId, SocketInfo},
    error::SocketsError,
    filter, proc_net,
};

/// A socket that has a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListedSocket {
    pub(super) kind: SocketFamily,
    pub(super) info: SocketInfo,
    /// The id by which it can be closed; `/proc/net` does not show it.
    pub(super) id: Option<SocketId>,
    /// Socket storage of a TCP socket.
    pub(super) stored: Option<Translation>,
}

/// The lists of the network namespace in which they were opened, in which the thread must stay.
pub(super) struct SocketLists<'m> {
    diag: Result<Diag, Errno>,
    storage: BorrowedFd<'m>,
}

impl<'m> SocketLists<'m> {
    /// Opens those of the calling thread's network namespace. `storage` is the map that has what sockets have stored.
    pub(super) fn open(storage: BorrowedFd<'m>) -> Self {
        Self { diag: Diag::open(), storage }
    }

    /// Whether the kernel can list sockets of a protocol by itself.
    pub(super) fn can_list(&mut self, protocol: Protocol) -> bool {
        let tried = self.diag.as_mut().map_err(|error| *error);
        !tried.and_then(|diag| diag.try_dump(SocketFamily { family: INET, protocol })).is_err_and(is_unable)
    }

    /// Shows the sockets of a protocol that are connected to one of these backends.
    pub(super) fn each(
        &mut self,
        protocol: Protocol,
        peers: &RetiredBackends,
        show: &mut dyn FnMut(&ListedSocket),
    ) -> Result<(), SocketsError> {
        [INET, INET6].into_iter().try_for_each(|family| self.each_of(SocketFamily { family, protocol }, peers, show))
    }

    fn each_of(
        &mut self,
        kind: SocketFamily,
        peers: &RetiredBackends,
        show: &mut dyn FnMut(&ListedSocket),
    ) -> Result<(), SocketsError> {
        let filter = match peers {
            RetiredBackends::Any => None,
            RetiredBackends::These(backends) => match filter::connected_to(backends, kind.family) {
                None => return Ok(()),
                filter => filter,
            },
        };
        // Of UDP the kernel shows nothing that is stored.
        let storage = (kind.protocol == Protocol::Tcp).then(|| self.storage.as_raw_fd());
        let query = DumpQuery { kind, states: CONNECTED, filter: filter.as_deref(), storage };
        let mut listed = |DumpedSocket { id, info, stored }: &DumpedSocket| {
            show(&ListedSocket { kind, info: *info, id: Some(*id), stored: *stored });
        };
        match self.diag.as_mut().map_err(|error| *error).and_then(|diag| diag.dump(&query, &mut listed)) {
            Err(error) if is_unable(error) => {
                proc_net::each(kind, &mut |info| show(&ListedSocket { kind, info, id: None, stored: None }));
                Ok(())
            }
            outcome => outcome.map_err(SocketsError::List),
        }
    }

    /// Shows the ports, in network order, on which TCP sockets listen.
    pub(super) fn each_listener(&mut self, show: &mut dyn FnMut(u16)) -> Result<(), SocketsError> {
        [INET, INET6].into_iter().try_for_each(|family| {
            let kind = SocketFamily { family, protocol: Protocol::Tcp };
            let query = DumpQuery { kind, states: LISTENING, filter: None, storage: None };
            let mut listed = |socket: &DumpedSocket| show(socket.info.local.1);
            let dumped = self.diag.as_mut().map_err(|error| *error).and_then(|diag| diag.dump(&query, &mut listed));
            dumped.map_err(SocketsError::List)
        })
    }

    /// Closes a socket under its owner.
    pub(super) fn destroy(&mut self, kind: SocketFamily, id: &SocketId) -> Result<(), Errno> {
        self.diag.as_mut().map_err(|error| *error)?.destroy(kind, id)
    }
}

/// Whether the kernel has no such list.
pub(super) fn is_unable(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT)
}
