//! The pinned maps as somebody reads them who is not the agent's loop: who serves whom now, and what a socket asked for.

use std::{
    collections::{HashMap as StdHashMap, HashSet, hash_map::Entry},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, SkStorage};
use cproxy_ebpf::{Backend, FrontendKey, Set, SetId, SetWord, SocketState, Translation, UdpState, tcp_places};
use rustix::net::sockopt::socket_cookie;

use super::{
    growing::{self, Growing, Kind},
    pins::PinDir,
    tables::TableError,
};

/// Why the maps could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// A map could not be opened.
    #[error("cannot open {0}: {cause}; it takes root or CAP_BPF", cause = super::root_cause(.1))]
    Open(PathBuf, MapError),
    /// A map could not be read.
    #[error("cannot read {0}: {cause}", cause = super::root_cause(.1))]
    Read(&'static str, MapError),
    /// The agent changes one set again and again.
    #[error("SETS changed at each of {TRIES} attempts to read it: try again")]
    Restless,
    /// The agent has given the table more or less room meanwhile.
    #[error("the table was replaced while it was read: try again")]
    Replaced,
    /// The maps in force could not be found.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// Whether a backend still belongs to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// There is no such frontend.
    NoFrontend,
    /// It is in the frontend's set: eligible, or still serving whom it serves.
    Yes,
    /// It is in neither run of the set.
    No,
}

/// How often a set is read before it counts as restless; a change takes the agent some microseconds.
const TRIES: u32 = 100;

/// An address and a port, both in network order.
type Member = ([u32; 4], u16);

/// The table, for looking up; nothing is written through it.
pub struct Lookup {
    frontends: HashMap<MapData, FrontendKey, SetId>,
    sets: Array<MapData, Set>,
    backends: Array<MapData, Backend>,
    outer: [(Growing, u32); 3],
}

impl Lookup {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, LookupError> {
        let (frontends, of_frontends) = open_growing(pins, growing::FRONTENDS, Map::HashMap)?;
        let (sets, of_sets) = open_growing(pins, growing::SETS, Map::Array)?;
        let (backends, of_backends) = open_growing(pins, growing::BACKENDS, Map::Array)?;
        Ok(Self { frontends, sets, backends, outer: [of_frontends, of_sets, of_backends] })
    }

    /// The table as of now; each set is read when it is first asked for.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot<'_> {
        Snapshot { table: self, sets: StdHashMap::new(), taken: Instant::now() }
    }

    /// Everybody in a frontend's set, in both runs; `None` without such a frontend. Slots, and sets too, get a new
    /// content only after nothing refers to them: what has been read is valid if both references are still the same.
    fn members(&self, frontend: &FrontendKey) -> Result<Option<HashSet<Member>>, LookupError> {
        for _ in 0..TRIES {
            let Some(reference) = self.reference(frontend)? else { break };
            let members = self.backends_of(reference.1);
            if self.reference(frontend)? == Some(reference) {
                self.check_current()?;
                return members.map(Some);
            }
        }
        self.check_current()?;
        self.reference(frontend)?.map_or(Ok(None), |_| Err(LookupError::Restless))
    }

    /// What has been read is as old as the maps that it was read from.
    fn check_current(&self) -> Result<(), LookupError> {
        let is_current = self.outer.iter().all(|(outer, id)| outer.is_current(*id));
        if is_current { Ok(()) } else { Err(LookupError::Replaced) }
    }

    fn reference(&self, frontend: &FrontendKey) -> Result<Option<(SetId, SetWord)>, LookupError> {
        let set = match self.frontends.get(frontend, 0) {
            Ok(set) => set,
            Err(MapError::KeyNotFound) => return Ok(None),
            Err(error) => return Err(LookupError::Read("FRONTENDS", error)),
        };
        let word = self.sets.get(&set, 0).map_err(|error| LookupError::Read("SETS", error))?.word;
        Ok(Some((set, SetWord(word))))
    }

    fn backends_of(&self, word: SetWord) -> Result<HashSet<Member>, LookupError> {
        let slots = word.first_slot()..word.first_slot() + word.eligible() + word.serving();
        let member = |slot| {
            let backend = self.backends.get(&slot, 0).map_err(|error| LookupError::Read("BACKENDS", error))?;
            Ok((backend.address, backend.port))
        };
        slots.map(member).collect()
    }
}

/// Cache of the sets of frontends, a few milliseconds old at most; see [`Lookup::snapshot`].
pub struct Snapshot<'t> {
    table: &'t Lookup,
    sets: StdHashMap<FrontendKey, Option<HashSet<Member>>>,
    taken: Instant,
}

/// A backend that has come back meanwhile serves.
const AGE_MAX: Duration = Duration::from_millis(5);

impl Snapshot<'_> {
    /// Whether the backend, an address and a port in network order, serves whom the frontend gave it.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn serves(&mut self, frontend: FrontendKey, backend: ([u32; 4], u16)) -> Result<Serving, LookupError> {
        if self.taken.elapsed() > AGE_MAX {
            self.sets.clear();
            self.taken = Instant::now();
        }
        let members = match self.sets.entry(frontend) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.table.members(&frontend)?),
        };
        Ok(match members {
            None => Serving::NoFrontend,
            Some(members) if members.contains(&backend) => Serving::Yes,
            Some(_) => Serving::No,
        })
    }
}

/// What the programs know of sockets.
pub struct SocketStates {
    tcp_owners: Array<MapData, u64>,
    tcp_peers: Array<MapData, Translation>,
    sockets: SkStorage<MapData, SocketState>,
    udp_sockets: SkStorage<MapData, UdpState>,
    /// `SOCKETS` once more, for those to whom the kernel itself shows what is in it.
    storage: MapData,
}

impl SocketStates {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// One is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, LookupError> {
        let path = pins.object("SOCKETS");
        Ok(Self {
            tcp_owners: open(pins, "TCP_OWNERS", Map::Array)?,
            tcp_peers: open(pins, "TCP_PEERS", Map::Array)?,
            sockets: open(pins, "SOCKETS", Map::SkStorage)?,
            udp_sockets: open(pins, "UDP_SOCKETS", Map::SkStorage)?,
            storage: MapData::from_pin(&path).map_err(|error| LookupError::Open(path, error))?,
        })
    }

    /// The map that has the state of sockets without a place.
    #[must_use]
    pub fn storage(&self) -> BorrowedFd<'_> {
        self.storage.fd().as_fd()
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

    /// The translations of a UDP socket's `connect()`: of the last one and, in case that failed after it was noted, of the one
    /// before it, which is then among its flows. Empty if it has only sent: then its peer is not one of ours.
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

    /// The translation at the place of the TCP socket with this cookie, if it has one. The socket may have been closed since,
    /// and its place given to another.
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

fn open_growing<M: TryFrom<Map, Error = MapError>>(
    pins: &PinDir,
    kind: Kind,
    typed: fn(MapData) -> Map,
) -> Result<(M, (Growing, u32)), LookupError> {
    let outer = Growing::open(pins, kind)?;
    let current = outer.current()?;
    let map = M::try_from(typed(current.map)).map_err(|error| LookupError::Open(pins.object(kind.name), error))?;
    Ok((map, (outer, current.id)))
}

fn open<M: TryFrom<Map, Error = MapError>>(
    pins: &PinDir,
    name: &str,
    kind: fn(MapData) -> Map,
) -> Result<M, LookupError> {
    let path = pins.object(name);
    let opened = MapData::from_pin(&path).and_then(|map| M::try_from(kind(map)));
    opened.map_err(|error| LookupError::Open(path, error))
}
