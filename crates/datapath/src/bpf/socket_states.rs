//! The state that the programs keep of sockets: their translations.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::maps::{Array, IterableMap as _, Map, MapData, MapError, SkStorage};
use cproxy_core::TcpPlace;
use cproxy_ebpf::{
    SocketState, TCP_PLACE_FREE, TcpPlaceId, Translation, UdpState, is_tcp_moving, tcp_level_places, tcp_moving,
    tcp_places,
};
use rustix::net::sockopt::socket_cookie;

use super::{
    error::{TableError, root_cause},
    open::{Access, open_map},
    pins::PinDir,
    syscalls::array_elements,
    takeover::kept_map,
    tcp_levels::{LevelMaps, Levels},
};

/// The state of sockets that the programs keep.
pub struct SocketStates {
    /// All levels, the last one first: the agent moves peers down.
    places: Vec<TcpPlaces>,
    /// Places of an older layout, whose sockets keep them.
    older_places: Option<TcpPlaces>,
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
        let further = Levels::open(pins, Access::ReadOnly)?.all()?.into_iter().rev().map(TcpPlaces::of);
        let mut places = further.collect::<Result<Vec<_>, _>>()?;
        places.push(TcpPlaces::open(|name| pins.object(name))?);
        Ok(Self {
            places,
            older_places: TcpPlaces::open_kept(pins)?,
            sockets: open(pins.object("SOCKETS"), Map::SkStorage)?,
            udp_sockets: open(pins.object("UDP_SOCKETS"), Map::SkStorage)?,
            storage: open_read_only(&pins.object("SOCKETS"))?,
        })
    }

    /// The map that has the state of sockets without a place.
    #[must_use]
    pub fn storage(&self) -> BorrowedFd<'_> {
        self.storage.fd().as_fd()
    }

    /// Number of levels of places for TCP sockets beyond the first one.
    #[must_use]
    pub fn further_levels(&self) -> usize {
        self.places.len() - 1
    }

    /// The places of TCP sockets that have owners, without those that are being moved.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn tcp_owners(&self) -> io::Result<Vec<TcpPlace>> {
        self.places.iter().try_fold(Vec::new(), |mut taken, places| {
            taken.extend(places.taken()?);
            Ok(taken)
        })
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
        let is_any = |asked: &Translation| *asked != Translation::default();
        Ok(std::iter::once(state.peer).chain(flows).filter(is_any).collect())
    }

    /// The translation at the place of the TCP socket with this cookie, if it has one. The socket may have been closed
    /// since, and its place given to another.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn at_place(&self, cookie: u64) -> io::Result<Option<Translation>> {
        for places in self.places.iter().chain(&self.older_places) {
            if let Some(peer) = places.peer_of(cookie)? {
                return Ok(Some(peer));
            }
        }
        Ok(None)
    }

    /// Whether a TCP socket with this cookie has, or may have, a place of an older layout.
    pub(crate) fn has_older_place(&self, cookie: u64) -> bool {
        self.older_places.as_ref().is_some_and(|places| !matches!(places.peer_of(cookie), Ok(None)))
    }
}

/// A level of places of TCP sockets: their owners and peers.
struct TcpPlaces {
    level: u32,
    owners: Array<MapData, u64>,
    peers: Array<MapData, Translation>,
}

impl TcpPlaces {
    fn open(path_of: impl Fn(&str) -> PathBuf) -> Result<Self, TableError> {
        let (owners, peers) = (open(path_of("TCP_OWNERS"), Map::Array)?, open(path_of("TCP_PEERS"), Map::Array)?);
        Ok(Self { level: 0, owners, peers })
    }

    /// Those of a further level.
    fn of(LevelMaps { spec, owners, peers }: LevelMaps) -> Result<Self, TableError> {
        let owners = Array::try_from(Map::Array(owners)).map_err(|error| TableError::Read("TCP_OWNERS", error))?;
        Ok(Self { level: spec.level, owners, peers })
    }

    fn taken(&self) -> io::Result<impl Iterator<Item = TcpPlace>> {
        let owners = array_elements::<u64>(self.owners.map().fd().as_fd(), 0, tcp_level_places(self.level))?;
        let level = self.level;
        let places = owners.into_iter().zip(0..);
        let places = places.map(move |(owner, index)| TcpPlace { place: TcpPlaceId::new(level, index).0, owner });
        Ok(places.filter(|place| place.owner != TCP_PLACE_FREE && !is_tcp_moving(place.owner)))
    }

    /// Those of an older layout, if they are kept. They may go at any moment; maps that are there and cannot be opened
    /// may have state of sockets.
    fn open_kept(pins: &PinDir) -> Result<Option<Self>, TableError> {
        let is_kept = || kept_map(pins, "TCP_OWNERS").is_some();
        if !is_kept() {
            return Ok(None);
        }
        match Self::open(|name| kept_map(pins, name).unwrap_or_default()) {
            Err(_) if !is_kept() => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn peer_of(&self, cookie: u64) -> io::Result<Option<Translation>> {
        for place in tcp_places(cookie, self.level) {
            let owner = found(self.owners.get(&place, 0))?;
            if owner == Some(cookie) || owner == Some(tcp_moving(cookie)) {
                return found(self.peers.get(&place, 0));
            }
        }
        Ok(None)
    }
}

fn found<T>(state: Result<T, MapError>) -> io::Result<Option<T>> {
    match state {
        Ok(state) => Ok(Some(state)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(io::Error::other(root_cause(&error))),
    }
}

fn open<M: TryFrom<Map, Error = MapError>>(path: PathBuf, kind: fn(MapData) -> Map) -> Result<M, TableError> {
    M::try_from(kind(open_read_only(&path)?)).map_err(|error| TableError::Open(path, error))
}

fn open_read_only(path: &Path) -> Result<MapData, TableError> {
    open_map(path, Access::ReadOnly).map_err(|error| TableError::Open(path.to_owned(), error))
}
