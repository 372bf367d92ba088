//! Closing of stale sockets among those that the kernel lists.

use std::collections::HashSet;

use cproxy_core::{Protocol, RetiredBackends};
use rustix::io::Errno;

use super::{
    error::SocketsError,
    processes::is_passing,
    socket_lists::{ListedSocket, SocketLists},
};

/// Two sockets may have the same addresses (`SO_REUSEPORT`), and the kernel finds one of them at a time.
const ROUNDS_MAX: u32 = 64;
/// Maximum number of sockets in each collection: sought, suspected, to be closed.
pub(super) const KEPT_MAX: usize = 2_048;

/// Numbers of stale sockets that were closed and left open.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CloseCounts {
    pub(super) closed: u64,
    pub(super) left: u64,
}

/// Closes the stale ones among the sockets of a protocol that are connected to these peers.
pub(super) fn close_listed(
    lists: &mut SocketLists<'_>,
    protocol: Protocol,
    peers: &RetiredBackends,
    has_subflows: bool,
    is_stale: &mut dyn FnMut(&ListedSocket) -> bool,
) -> Result<CloseCounts, SocketsError> {
    let mut all = CloseCounts::default();
    for number in 1..=ROUNDS_MAX {
        let (mut stale, mut kept) = (0, Vec::new());
        lists.each(protocol, peers, &mut |entry| {
            if is_stale(entry) {
                stale += 1;
                if kept.len() < KEPT_MAX {
                    kept.push(*entry);
                }
            }
        })?;
        let is_more = stale > kept.len() as u64;
        let (mut missed, mut failure) = (0, None);
        kept.retain(|entry| {
            // The list was long, and its backend may be back by now.
            if !is_stale(entry) {
                stale -= 1;
                return false;
            }
            match entry.id.map(|id| lists.destroy(entry.kind, &id)) {
                Some(Ok(())) => true,
                outcome => {
                    let error = outcome.and_then(Result::err);
                    missed += u32::from(error == Some(Errno::NOENT));
                    failure = failure.or(error.filter(|error| is_passing(&(*error).into())));
                    false
                }
            }
        });
        if let Some(error) = failure {
            return Err(SocketsError::Close(error));
        }
        let closed = kept.len() as u64;
        all = CloseCounts { closed: all.closed + closed, left: stale - closed };
        if has_subflows && closed != 0 {
            close_subflows(lists, protocol, kept.iter().map(|entry| entry.info.inode).collect())?;
        }
        // Sockets that the first round missed have mostly ended by themselves.
        if !(is_more || missed != 0) || (number > 1 && closed == 0) {
            break;
        }
    }
    Ok(all)
}

/// An MPTCP connection goes on while it has any subflow. All of them have its inode; a TCP socket's is its own.
fn close_subflows(lists: &mut SocketLists<'_>, protocol: Protocol, mut of: HashSet<u64>) -> Result<(), SocketsError> {
    of.remove(&0);
    let mut others = Vec::new();
    lists.each(protocol, &RetiredBackends::Any, &mut |entry| {
        if of.contains(&entry.info.inode) && others.len() < KEPT_MAX {
            others.push(*entry);
        }
    })?;
    for ListedSocket { kind, id, .. } in others {
        // It may have gone by itself.
        id.and_then(|id| lists.destroy(kind, &id).ok());
    }
    Ok(())
}
