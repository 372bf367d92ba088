//! Sockets whose state is in maps of an older layout.

use std::ops::ControlFlow;

use cproxy_core::{Protocol, RetiredBackends};

use super::{SocketsError, namespaces, no_proc, on_own_thread, owners, socket_lists::SocketLists};
use crate::bpf::{PinDir, SocketStates};

/// Whether there may be such a socket. It is open, and if it is a TCP socket, it has a peer.
pub(crate) fn has_older_socket(pins: &PinDir) -> bool {
    // A socket that cannot be seen may be an older one.
    search(pins).unwrap_or(true)
}

fn search(pins: &PinDir) -> Result<bool, SocketsError> {
    let states = SocketStates::open(pins)?;
    on_own_thread(|| Ok(has_place(&states)? || has_storage(&states)?))
}

/// Whether one has a place, or may have one that this kernel does not show.
fn has_place(states: &SocketStates) -> Result<bool, SocketsError> {
    let (mut found, mut listed) = (false, Ok(()));
    let unseen = namespaces::visit_all(|_| {
        let outcome = SocketLists::open(states.storage()).each(Protocol::Tcp, &RetiredBackends::Any, &mut |socket| {
            found |= socket.id.is_none_or(|id| states.has_older_place(id.cookie()));
        });
        listed = std::mem::replace(&mut listed, Ok(())).and(outcome);
    });
    let unseen = unseen.map_err(no_proc)?;
    listed?;
    Ok(found || unseen > 0)
}

/// Whether one has socket storage, or belongs to a process that cannot be looked into.
fn has_storage(states: &SocketStates) -> Result<bool, SocketsError> {
    if !states.has_older_storage() {
        return Ok(false);
    }
    let mut found = false;
    let unseen = owners::each_socket(|descriptor| {
        found |= descriptor.duplicate()?.is_some_and(|socket| states.is_in_older_storage(&socket));
        Ok(if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    Ok(found || unseen.map_err(no_proc)? > 0)
}
