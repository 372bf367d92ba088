//! The pinned maps as `cproxy get`, passes over sockets and the agent's start read them: through descriptors that the
//! kernel does not write by.

use std::{
    collections::{HashMap as StdHashMap, HashSet, hash_map::Entry},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use aya::{
    maps::{Array, HashMap, IterableMap as _, Map, MapData, MapError},
    sys::SyscallError,
};
use cproxy_core::{Address, Capacity, KernelTable};
use cproxy_ebpf::{Backend as BackendSlot, FrontendKey, Set, SetId, SetWord, Settings};

use super::{
    encoding::address_key,
    error::{TRIES_MAX, TableError},
    map_spec::{BACKENDS, FRONTENDS, MapSpec, SETS},
    open::{Access, open_map},
    pins::PinDir,
    resizable::{InnerMap, ResizableMap},
    syscalls::{array_elements, hash_elements},
    table::{TableMaps, decode_table},
};

/// Whether a backend still belongs to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// There is no such frontend.
    NoFrontend,
    /// It is in the frontend's set: eligible, or still serving the clients that it has.
    Yes,
    /// It is in neither run of the set; or the socket was refused, and the frontend has an eligible backend now.
    No,
    /// The socket was refused, and would be again.
    Refused,
}

/// An address and a port, both in network order.
type Member = ([u32; 4], u16);

/// A frontend's set.
struct SetMembers {
    /// Both runs.
    backends: HashSet<Member>,
    has_eligible: bool,
}

/// The open maps of the table, for reading.
pub struct KernelReader {
    frontends: HashMap<MapData, FrontendKey, SetId>,
    sets: Array<MapData, Set>,
    backends: Array<MapData, BackendSlot>,
    settings: Array<MapData, Settings>,
    capacity: Capacity,
    outer: [(ResizableMap, u32); 3],
}

impl KernelReader {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let (frontends, of_frontends) = open_resizable(pins, FRONTENDS)?;
        let (sets, of_sets) = open_resizable(pins, SETS)?;
        let (backends, of_backends) = open_resizable(pins, BACKENDS)?;
        let settings = pins.object("SETTINGS");
        let open_settings =
            open_map(&settings, Access::ReadOnly).map_err(|error| TableError::Open(settings.clone(), error))?;
        Ok(Self {
            capacity: Capacity { frontends: frontends.entries, sets: sets.entries, slots: backends.entries },
            outer: [(of_frontends, frontends.id), (of_sets, sets.id), (of_backends, backends.id)],
            frontends: typed(pins, FRONTENDS.name, Map::HashMap(frontends.map))?,
            sets: typed(pins, SETS.name, Map::Array(sets.map))?,
            backends: typed(pins, BACKENDS.name, Map::Array(backends.map))?,
            settings: typed(pins, "SETTINGS", Map::Array(open_settings))?,
        })
    }

    /// The whole table as of now, read anew where the agent has replaced a map meanwhile.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn read_table(pins: &PinDir) -> Result<KernelTable, TableError> {
        for _ in 0..TRIES_MAX {
            match Self::open(pins)?.table() {
                Err(TableError::Replaced) => {}
                table => return table,
            }
        }
        Err(TableError::AlwaysReplaced)
    }

    /// Digest of the table's raw content: a batch of each map, and nothing that wakes the agent. A table of the same
    /// digest has not changed, unless it has changed twice between two elements.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn digest(pins: &PinDir) -> Result<u64, TableError> {
        for _ in 0..TRIES_MAX {
            let reader = Self::open(pins)?;
            let Capacity { sets, slots, .. } = reader.capacity;
            let mut hasher = DefaultHasher::new();
            // The kernel returns the elements of a hash in the order of its buckets.
            for (key, set) in reader.frontends()? {
                (key.address, key.port, key.protocol, set).hash(&mut hasher);
            }
            let all = array_elements::<Set>(reader.sets.map().fd().as_fd(), 0, sets);
            for Set { word, affinity } in all.map_err(|error| unreadable(SETS.name, error))? {
                (word, affinity).hash(&mut hasher);
            }
            for BackendSlot { address, port, .. } in reader.backends(0, slots)? {
                (address, port).hash(&mut hasher);
            }
            match reader.check_current() {
                Err(TableError::Replaced) => {}
                checked => return checked.map(|()| hasher.finish()),
            }
        }
        Err(TableError::AlwaysReplaced)
    }

    /// The sets as of now; each is read when it is first asked for.
    #[must_use]
    pub fn sets(&self) -> SetCache<'_> {
        SetCache { reader: self, sets: StdHashMap::new(), started: Instant::now() }
    }

    fn table(&self) -> Result<KernelTable, TableError> {
        let table = decode_table(self)?;
        // Ids of sets belong to the maps that they were read from.
        self.check_current()?;
        Ok(table)
    }

    /// The backends of a frontend's set, in both runs; `None` without such a frontend. Slots, and sets too, get a new
    /// content only after nothing refers to them: what has been read is valid if both references are still the same.
    fn members(&self, frontend: &FrontendKey) -> Result<Option<SetMembers>, TableError> {
        for _ in 0..TRIES_MAX {
            let Some(reference) = self.reference(frontend)? else { break };
            let members = self.members_of(reference.1);
            if self.reference(frontend)? == Some(reference) {
                self.check_current()?;
                return members.map(Some);
            }
        }
        self.check_current()?;
        self.reference(frontend)?.map_or(Ok(None), |_| Err(TableError::SetAlwaysChanged))
    }

    /// Fails if the programs use other maps by now than those that have been read.
    fn check_current(&self) -> Result<(), TableError> {
        let is_current = self.outer.iter().all(|(outer, id)| outer.is_current(*id));
        if is_current { Ok(()) } else { Err(TableError::Replaced) }
    }

    fn reference(&self, frontend: &FrontendKey) -> Result<Option<(SetId, SetWord)>, TableError> {
        let Some(set) = found(self.frontends.get(frontend, 0), FRONTENDS.name)? else { return Ok(None) };
        let word = self.sets.get(&set, 0).map_err(|error| TableError::Read("SETS", error))?.word;
        Ok(Some((set, SetWord(word))))
    }

    /// Whether the address is known as a ClusterIP, whose ports without a frontend refuse.
    fn is_cluster_ip(&self, address: [u32; 4]) -> Result<bool, TableError> {
        let key = address_key(Address::from_words(address));
        Ok(found(self.frontends.get(&key, 0), FRONTENDS.name)?.is_some())
    }

    fn members_of(&self, word: SetWord) -> Result<SetMembers, TableError> {
        let backends = self.backends(word.first_slot(), word.eligible() + word.serving())?;
        let backends = backends.into_iter().map(|backend| (backend.address, backend.port)).collect();
        Ok(SetMembers { backends, has_eligible: word.eligible() != 0 })
    }
}

impl TableMaps for KernelReader {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn settings(&self) -> Result<Settings, TableError> {
        self.settings.get(&0, 0).map_err(|error| TableError::Read("SETTINGS", error))
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, SetId)>, TableError> {
        let elements = hash_elements(self.frontends.map().fd().as_fd(), self.capacity.frontends);
        elements.map_err(|error| unreadable(FRONTENDS.name, error))
    }

    fn set(&self, set: SetId) -> Result<Option<Set>, TableError> {
        found(self.sets.get(&set, 0), SETS.name)
    }

    /// The agent may be writing them; see `Self::members`.
    fn backends(&self, first_slot: u32, count: u32) -> Result<Vec<BackendSlot>, TableError> {
        let backends = array_elements(self.backends.map().fd().as_fd(), first_slot, count);
        backends.map_err(|error| unreadable(BACKENDS.name, error))
    }
}

/// Cache of the sets of frontends, a few milliseconds old at most; see [`KernelReader::sets`].
pub struct SetCache<'r> {
    reader: &'r KernelReader,
    sets: StdHashMap<FrontendKey, Option<SetMembers>>,
    started: Instant,
}

/// A backend that has come back meanwhile serves.
const AGE_MAX: Duration = Duration::from_millis(5);

impl SetCache<'_> {
    /// Whether the backend, an address and a port in network order, still serves the clients that it got from the
    /// frontend. `None`: a socket that was refused.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn serving(&mut self, frontend: FrontendKey, backend: Option<Member>) -> Result<Serving, TableError> {
        let reader = self.reader;
        Ok(match (self.members(frontend)?, backend) {
            (Some(set), Some(backend)) if set.backends.contains(&backend) => Serving::Yes,
            (Some(set), None) if !set.has_eligible => Serving::Refused,
            (Some(_), _) => Serving::No,
            (None, None) if reader.is_cluster_ip(frontend.address)? => Serving::Refused,
            (None, _) => Serving::NoFrontend,
        })
    }

    /// Backends of the frontend, in network order; `None` without that frontend.
    ///
    /// # Errors
    /// A map could not be read.
    pub fn backends(&mut self, frontend: FrontendKey) -> Result<Option<Vec<Member>>, TableError> {
        Ok(self.members(frontend)?.as_ref().map(|set| set.backends.iter().copied().collect()))
    }

    fn members(&mut self, frontend: FrontendKey) -> Result<&Option<SetMembers>, TableError> {
        if self.started.elapsed() > AGE_MAX {
            self.sets.clear();
            self.started = Instant::now();
        }
        Ok(match self.sets.entry(frontend) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.reader.members(&frontend)?),
        })
    }
}

fn unreadable(map: &'static str, io_error: io::Error) -> TableError {
    TableError::Read(map, SyscallError { call: "BPF_MAP_LOOKUP_BATCH", io_error }.into())
}

fn found<T>(result: Result<T, MapError>, map: &'static str) -> Result<Option<T>, TableError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound | MapError::OutOfBounds { .. }) => Ok(None),
        Err(error) => Err(TableError::Read(map, error)),
    }
}

fn open_resizable(pins: &PinDir, spec: MapSpec) -> Result<(InnerMap, ResizableMap), TableError> {
    let resizable = ResizableMap::open(pins, spec, Access::ReadOnly)?;
    Ok((resizable.current()?, resizable))
}

fn typed<M: TryFrom<Map, Error = MapError>>(pins: &PinDir, name: &str, map: Map) -> Result<M, TableError> {
    M::try_from(map).map_err(|error| TableError::Open(pins.object(name), error))
}
