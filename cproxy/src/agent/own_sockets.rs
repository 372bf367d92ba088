//! The agent's own sockets.

use cproxy_datapath::bpf::{PinDir, SocketMark};
use cproxy_network::SocketSetup;

/// Marks the agent's own sockets, which never use its table.
#[must_use]
pub(crate) fn socket_setup(pins: &PinDir) -> SocketSetup {
    let mark = SocketMark::new(pins);
    SocketSetup::new(move |socket| mark.mark(socket))
}
