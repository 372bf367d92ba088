//! Sockets whose state is in maps of an older layout.

use cproxy_core::{Protocol, RetiredBackends};

use super::{
    error::{SocketsError, no_proc},
    namespaces,
    socket_lists::SocketLists,
    thread::on_own_thread,
};
use crate::bpf::{PinDir, SocketStates};

/// Whether there may be such a socket: an open TCP socket with a peer. Blocks, usually for milliseconds.
#[must_use]
pub fn has_older_socket(pins: &PinDir) -> bool {
    // A socket that cannot be seen may be an older one.
    search(pins).unwrap_or(true)
}

fn search(pins: &PinDir) -> Result<bool, SocketsError> {
    let states = SocketStates::open(pins)?;
    on_own_thread(|| {
        let (mut found, mut listed) = (false, Ok(()));
        let unseen = namespaces::visit_all(|_| {
            let mut lists = SocketLists::open(states.storage());
            let outcome = lists.each(Protocol::Tcp, &RetiredBackends::Any, &mut |socket| {
                // Without an id, it may have a place that this kernel does not show.
                found |= socket.id.is_none_or(|id| states.has_older_place(id.cookie()));
            });
            listed = std::mem::replace(&mut listed, Ok(())).and(outcome);
        });
        let unseen = unseen.map_err(no_proc)?;
        listed?;
        Ok(found || unseen > 0)
    })
}
