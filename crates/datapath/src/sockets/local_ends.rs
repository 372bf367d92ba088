//! Own ends of the sockets in the calling process' network namespace.

use std::collections::BTreeSet;

use cproxy_core::{Backend, Frontend, Protocol};

use super::{
    diag::{Diag, DumpedSocket},
    diag_message::{CONNECTED, DumpQuery, INET, INET6, LISTENING, SocketFamily},
    error::SocketsError,
    proc_net,
    socket_lists::is_unable,
    staleness::endpoint,
};

/// Those of these addresses and ports that are the own end of a socket with a peer. Blocks, usually for milliseconds.
///
/// # Errors
/// The kernel does not list sockets.
pub fn local_ends_in_use(of: &[Frontend]) -> Result<BTreeSet<Frontend>, SocketsError> {
    let mut in_use = BTreeSet::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        each(protocol, CONNECTED, &mut |Backend { address, port }| {
            let end = Frontend { address, port, protocol };
            if of.contains(&end) {
                in_use.insert(end);
            }
        })?;
    }
    Ok(in_use)
}

/// Addresses and ports at which TCP sockets listen; the zero address is that of all. Blocks, usually for milliseconds.
///
/// # Errors
/// The kernel does not list sockets.
pub fn listening() -> Result<Vec<Backend>, SocketsError> {
    let mut listening = Vec::new();
    each(Protocol::Tcp, LISTENING, &mut |end| listening.push(end))?;
    Ok(listening)
}

fn each(protocol: Protocol, states: u32, show: &mut dyn FnMut(Backend)) -> Result<(), SocketsError> {
    for family in [INET, INET6] {
        let kind = SocketFamily { family, protocol };
        let query = DumpQuery { kind, states, filter: None, storage: None };
        let mut listed = |socket: &DumpedSocket| show(endpoint(socket.info.local));
        match Diag::open().and_then(|mut diag| diag.dump(&query, &mut listed)) {
            Err(error) if is_unable(error) && states == CONNECTED => {
                proc_net::each(kind, &mut |info| show(endpoint(info.local)));
            }
            outcome => outcome.map_err(SocketsError::List)?,
        }
    }
    Ok(())
}
