//! The state that the programs keep of sockets: their translations.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use aya::maps::{Array, IterableMap as _, Map, MapData, MapError, SkStorage};
use cproxy_ebpf::{SocketState, TCP_PLACES, Translation, UdpState, tcp_places};
use rustix::net::sockopt::socket_cookie;

use super::{
    error::TableError,
    open::{Access, open_map},
    pins::PinDir,
    syscalls::array_elements,
};

/// The state of sockets that the programs keep.
pub struct SocketStates {
    tcp_owners: Array<MapData, u64>,
    tcp_peers: Array<MapData, Translation>,
    sockets: SkStorage<MapData, SocketState>,
    udp_sockets: SkStorage<MapData, UdpState>,
    /// `SOCKETS` once more: its descriptor goes into requests for lists of sockets.
    storage: MapData,
}

impl SocketStates {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// One is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        Ok(Self {
            tcp_owners: open(pins, "TCP_OWNERS", Map::Array)?,
            tcp_peers: open(pins, "TCP_PEERS", Map::Array)?,
            sockets: open(pins, "SOCKETS", Map::SkStorage)?,
            udp_sockets: open(pins, "UDP_SOCKETS", Map::SkStorage)?,
            storage: open_read_only(pins, "SOCKETS")?,
        })
    }

    /// The map that has the state of sockets without a place.
    #[must_use]
    pub fn storage(&self) -> BorrowedFd<'_> {
        self.storage.fd().as_fd()
    }

    /// The owner of each place of TCP sockets; 0 for a free one.
    ///
    /// # Errors
    /// The map could not be read.
    pub fn tcp_owners(&self) -> io::Result<Vec<u64>> {
        array_elements(self.tcp_owners.map().fd().as_fd(), 0, TCP_PLACES)
    }

    /// The translation of a TCP socket's `connect()`.
    ///
    /// # Errors
    /// It is no socket, or a map could not be read.
    pub fn of_tcp(&self, socket: &OwnedFd) -> io::Result<Option<Translation>> {
        if let Some(peer) = self.at_place(socket_cookie(socket)?)? {
            return Ok(Some(peer));
        }
        Ok(found(self.sockets.get(&socket.as_raw_fd(), 0))?.map(|state| state.peer))
    }

    /// The translations of a UDP socket's `connect()`: of the last one and, in case that failed after it was noted, of
    /// the one before it, which is then among its flows. Empty if it has only sent: then its peer is not one of ours.
    ///
    /// # Errors
    /// It is no socket, or a map could not be read.
    pub fn of_udp(&self, socket: &OwnedFd) -> io::Result<Vec<Translation>> {
        let Some(state) = found(self.sockets.get(&socket.as_raw_fd(), 0))? else { return Ok(Vec::new()) };
        let flows = found(self.udp_sockets.get(&socket.as_raw_fd(), 0))?;
        let flows = flows.into_iter().flat_map(|state| state.flows).map(|flow| flow.translation);
        // Places that no flow has taken are empty.
        let is_any = |asked: &Translation| asked.backend_port != 0;
        Ok([state.peer].into_iter().chain(flows).filter(is_any).collect())
    }

    /// The translation at the place of the TCP socket with this cookie, if it has one. The socket may have been closed
    /// since, and its place given to another.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn at_place(&self, cookie: u64) -> io::Result<Option<Translation>> {
        for place in tcp_places(cookie) {
            if found(self.tcp_owners.get(&place, 0))? == Some(cookie) {
                return found(self.tcp_peers.get(&place, 0));
            }
        }
        Ok(None)
    }
}

fn found<T>(state: Result<T, MapError>) -> io::Result<Option<T>> {
    match state {
        Ok(state) => Ok(Some(state)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(io::Error::other(super::root_cause(&error))),
    }
}

fn open<M: TryFrom<Map, Error = MapError>>(
    pins: &PinDir,
    name: &str,
    kind: fn(MapData) -> Map,
) -> Result<M, TableError> {
    M::try_from(kind(open_read_only(pins, name)?)).map_err(|error| TableError::Open(pins.object(name), error))
}

fn open_read_only(pins: &PinDir, name: &str) -> Result<MapData, TableError> {
    let path = pins.object(name);
    open_map(&path, Access::ReadOnly).map_err(|error| TableError::Open(path, error))
}
