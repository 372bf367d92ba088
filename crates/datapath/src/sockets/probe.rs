//! Abilities to close stale sockets, by this kernel and these privileges; nothing is closed to find out.

use cproxy_core::Protocol;
use rustix::io::Errno;

use super::{
    diag::Diag,
    diag_message::{INET, SocketFamily, SocketId},
    error::{AbilityError, DiagError},
    owners, places,
};
use crate::bpf::{PinDir, SocketStates};

/// Abilities of the kernel and of this process, each with the reason where it is missing.
#[derive(Debug)]
pub struct Abilities {
    /// UDP sockets can be listed.
    pub udp_diag: Result<(), DiagError>,
    /// TCP sockets can be listed.
    pub tcp_diag: Result<(), DiagError>,
    /// Sockets can be closed under their owner.
    pub destroy: Result<(), DiagError>,
    /// The state of other processes' sockets can be read; without it no stale socket is even counted.
    pub storages: Result<(), AbilityError>,
    /// Places of TCP sockets that have gone can be found.
    pub places: Result<(), AbilityError>,
}

/// Asks the kernel. Without `pins`, or before anything is installed, the state of sockets is taken to be readable where
/// their descriptors can be duplicated.
#[must_use]
pub fn probe(pins: Option<&PinDir>) -> Abilities {
    let kind = |protocol| SocketFamily { family: INET, protocol };
    let list = |protocol, option| {
        let listed = Diag::open().and_then(|mut diag| diag.try_dump(kind(protocol)));
        listed.map_err(|error| DiagError::of(error, option))
    };
    // No socket has this id: a kernel that can close sockets looks for it in vain, one that cannot says so.
    let destroy = Diag::open().and_then(|mut diag| diag.destroy(kind(Protocol::Udp), &SocketId::NONE));
    let udp_diag = list(Protocol::Udp, "CONFIG_INET_UDP_DIAG");
    let tcp_diag = list(Protocol::Tcp, "CONFIG_INET_DIAG");
    Abilities {
        places: places(tcp_diag),
        destroy: match (destroy, udp_diag) {
            (_, Err(reason)) => Err(reason),
            (Ok(()) | Err(Errno::NOENT), Ok(())) => Ok(()),
            (Err(error), Ok(())) => Err(DiagError::of(error, "CONFIG_INET_DIAG_DESTROY")),
        },
        udp_diag,
        tcp_diag,
        storages: storages(pins),
    }
}

fn places(tcp_diag: Result<(), DiagError>) -> Result<(), AbilityError> {
    tcp_diag?;
    Ok(places::check_access()?)
}

fn storages(pins: Option<&PinDir>) -> Result<(), AbilityError> {
    owners::check_access()?;
    if let Some(pins) = pins.filter(|pins| pins.check_installed().is_ok()) {
        SocketStates::open(pins)?;
    }
    Ok(())
}
