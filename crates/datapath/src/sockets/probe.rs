//! Abilities to close stale sockets, by this kernel and these privileges; nothing is closed to find out.

use cproxy_core::Protocol;
use rustix::io::Errno;

use super::{
    diag::Diag,
    diag_message::{INET, SocketFamily, SocketId},
    owners, places,
};
use crate::bpf::{PinDir, SocketStates};

/// Abilities of the kernel and of this process, each with the reason where it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// UDP sockets can be listed.
    pub udp_diag: Result<(), String>,
    /// TCP sockets can be listed.
    pub tcp_diag: Result<(), String>,
    /// Sockets can be closed under their owner.
    pub destroy: Result<(), String>,
    /// The state of other processes' sockets can be read; without it no stale socket is even counted.
    pub storages: Result<(), String>,
    /// Places of TCP sockets that have gone can be found.
    pub places: Result<(), String>,
}

/// Asks the kernel. Without `pins`, or before anything is installed, the state of sockets is taken to be readable where
/// their descriptors can be duplicated.
#[must_use]
pub fn probe(pins: Option<&PinDir>) -> Abilities {
    let kind = |protocol| SocketFamily { family: INET, protocol };
    let list = |protocol, option| {
        let listed = Diag::open().and_then(|mut diag| diag.try_dump(kind(protocol)));
        listed.map_err(|error| reason(error, option))
    };
    // No socket has this id: a kernel that can close sockets looks for it in vain, one that cannot says so.
    let destroy = Diag::open().and_then(|mut diag| diag.destroy(kind(Protocol::Udp), &SocketId::NONE));
    let udp_diag = list(Protocol::Udp, "CONFIG_INET_UDP_DIAG");
    let tcp_diag = list(Protocol::Tcp, "CONFIG_INET_DIAG");
    Abilities {
        places: tcp_diag.clone().and_then(|()| places::probe()),
        destroy: match (destroy, &udp_diag) {
            (_, Err(reason)) => Err(reason.clone()),
            (Ok(()) | Err(Errno::NOENT), Ok(())) => Ok(()),
            (Err(error), Ok(())) => Err(reason(error, "CONFIG_INET_DIAG_DESTROY")),
        },
        udp_diag,
        tcp_diag,
        storages: storages(pins),
    }
}

fn reason(error: Errno, option: &str) -> String {
    match error {
        Errno::NOENT | Errno::OPNOTSUPP | Errno::PROTONOSUPPORT => format!("the kernel lacks {option}"),
        Errno::PERM | Errno::ACCESS => "missing CAP_NET_ADMIN: run cproxy as root".to_owned(),
        error => error.to_string(),
    }
}

fn storages(pins: Option<&PinDir>) -> Result<(), String> {
    owners::probe()?;
    match pins.filter(|pins| pins.check_installed().is_ok()) {
        Some(pins) => SocketStates::open(pins).map(drop).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}
