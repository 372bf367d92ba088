//! Sockets that are connected to the address of a frontend itself: no program has translated them.

use std::{collections::HashMap, ops::ControlFlow};

use cproxy_core::{Backend, Frontend, Protocol, RetiredBackends, sort_few};

use super::{
    error::{SocketsError, no_proc},
    namespaces, owners,
    socket_lists::{ListedSocket, SocketLists},
    staleness::endpoint,
    thread::on_own_thread,
};
use crate::bpf::{PinDir, SocketStates};

/// Socket that is connected to a frontend's own address, or tries to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirectSocket {
    /// The frontend.
    pub frontend: Frontend,
    /// Its own address and port.
    pub local: Backend,
    /// A process that has it among its descriptors, if one could be found.
    pub pid: Option<u32>,
}

/// Lists the sockets of the machine that are connected to these frontends' own addresses: they were connected before
/// the programs were attached, or their process is one that is not translated. Blocks, usually for milliseconds. It
/// takes root.
///
/// # Errors
/// /proc or the list of sockets could not be read.
pub fn list_direct(pins: &PinDir, frontends: &[Frontend]) -> Result<Vec<DirectSocket>, SocketsError> {
    owners::check_access().map_err(SocketsError::Owners)?;
    let states = SocketStates::open(pins)?;
    on_own_thread(|| list_on_this_thread(&states, frontends))
}

/// The calling thread ends in another network namespace.
fn list_on_this_thread(states: &SocketStates, frontends: &[Frontend]) -> Result<Vec<DirectSocket>, SocketsError> {
    let (mut found, mut failure) = (HashMap::new(), None);
    namespaces::visit_all(|_| {
        let mut lists = SocketLists::open(states.storage());
        for protocol in [Protocol::Udp, Protocol::Tcp] {
            let of_protocol = frontends.iter().filter(|frontend| frontend.protocol == protocol);
            let peers = of_protocol.map(|&Frontend { address, port, .. }| Backend { address, port }).collect();
            let listed = lists.each(protocol, &RetiredBackends::These(peers), &mut |entry| {
                found.insert(entry.info.inode, socket(entry, protocol));
            });
            failure = failure.take().or(listed.err());
        }
    })
    .map_err(no_proc)?;
    // `/proc/net` knows no filter.
    found.retain(|_, socket: &mut DirectSocket| frontends.contains(&socket.frontend));
    if !found.is_empty() {
        let name = |descriptor: &owners::Descriptor<'_>| {
            if let Some(socket) = found.get_mut(&descriptor.inode)
                && (socket.pid.is_none() || !owners::is_borrower(descriptor.owner_name().as_deref()))
            {
                socket.pid = Some(descriptor.owner().as_raw_nonzero().get().unsigned_abs());
            }
            Ok(ControlFlow::Continue(()))
        };
        owners::each_socket(name).map_err(no_proc)?;
    }
    let mut sockets: Vec<_> = found.into_values().collect();
    sort_few(&mut sockets);
    failure.map_or(Ok(sockets), Err)
}

fn socket(entry: &ListedSocket, protocol: Protocol) -> DirectSocket {
    let Backend { address, port } = endpoint(entry.info.peer);
    DirectSocket { frontend: Frontend { address, port, protocol }, local: endpoint(entry.info.local), pid: None }
}
