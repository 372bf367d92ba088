//! The pinned maps as the agent uses them. [`Table::apply`] is the one function in the project that writes them.

use std::{
    io,
    mem::offset_of,
    os::fd::AsFd,
    path::PathBuf,
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use aya::maps::{HashMap, Map, MapData, MapError, SkStorage};
use cproxy_core::{
    Address, Affinity, Backend, Balance, ExcludedCgroup, Exclusions, Filter, Frontend, KernelSet, KernelTable, Limits,
    Members, Op, Protocol, Reserve, Room,
};
use cproxy_ebpf::{
    Affinity as AffinityWord, BACKENDS_MAX, BACKENDS_MIN, Backend as BackendSlot, ExcludedCgroup as CgroupSlot,
    FRONTENDS_MAX, FRONTENDS_MIN, FrontendKey, PROTOCOL_ANY, PROTOCOL_TCP, PROTOCOL_UDP, SET_BACKENDS_MAX,
    SET_UNKNOWN_PORT, SETS_MAX, SETS_MIN, SOCKET_UNTRANSLATED, Set, SetId, SetWord, Settings, SocketState, digest,
    filter_bit,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{
    growing::{self, Growing},
    pins::PinDir,
};

/// Why the table could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A map could not be opened.
    #[error("cannot open {0}: {cause}; it takes root or CAP_BPF", cause = super::root_cause(.1))]
    Open(PathBuf, MapError),
    /// A pinned object could not be used.
    #[error("cannot use {0}: {1}")]
    Pin(PathBuf, io::Error),
    /// There is no memory for a map of this size.
    #[error("cannot make {map} with room for {entries}: {error}")]
    NoMemory {
        /// Its name.
        map: &'static str,
        /// Its size.
        entries: u32,
        /// What the kernel said.
        error: io::Error,
    },
    /// There is no descriptor left.
    #[error("cannot duplicate a descriptor: {0}")]
    Descriptor(io::Error),
    /// The agent replaces maps again and again.
    #[error("the table was replaced at each of {TRIES} attempts to read it: try again")]
    Restless,
    /// A map could not be mapped into memory.
    #[error("cannot map {0} into memory: {1}")]
    Mmap(&'static str, io::Error),
    /// A write failed; the table is as it was after the write before.
    #[error("cannot write {0}: {1}")]
    Write(String, MapError),
    /// A map could not be read.
    #[error("cannot read {0}: {1}")]
    Read(&'static str, MapError),
    /// The kernel gives no random numbers.
    #[error("cannot get a random seed: {0}")]
    Seed(io::Error),
    /// A slot or a set is outside the maps: a bug in the model.
    #[error("{0} is outside the map")]
    OutOfRange(String),
}

/// How often the table is read before it counts as restless.
const TRIES: u32 = 100;

/// The open maps.
pub struct Table {
    frontends: HashMap<MapData, FrontendKey, SetId>,
    sets: Mapped,
    backends: Mapped,
    settings: Mapped,
    room: Room,
    /// Through these the programs find the first three: `FRONTENDS`, `SETS`, `BACKENDS`.
    outer: [Growing; 3],
    ids: [u32; 3],
}

/// An array map's memory, shared with the kernel.
#[derive(Debug)]
struct Mapped {
    address: NonNull<u8>,
    size_bytes: usize,
    map: MapData,
}

impl Table {
    /// What the maps are like.
    pub const LIMITS: Limits = Limits {
        frontends: FRONTENDS_MAX,
        // Set 0 is that of keys without a port.
        sets: SETS_MAX - 1,
        slots: BACKENDS_MAX,
        // ClusterIPs always have the other half.
        external_frontends: FRONTENDS_MAX / 2,
        // With a fifth of that for what the agent keeps, 10 MiB.
        service_slots: BACKENDS_MAX / 16,
        // More than any API server has.
        reserved: Reserve { sets: 64, slots: 4_096 },
        may_replace: true,
        least: Room { frontends: FRONTENDS_MIN, sets: SETS_MIN, slots: BACKENDS_MIN },
        run_backends: SET_BACKENDS_MAX,
        filter_bit: |address| filter_bit(&address.words()),
    };

    /// Opens the pinned maps for reading and writing.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let outer = |kind| Growing::open(pins, kind);
        let outer = [outer(growing::FRONTENDS)?, outer(growing::SETS)?, outer(growing::BACKENDS)?];
        let [of_frontends, of_sets, of_backends] = &outer;
        let (frontends, sets, backends) = (of_frontends.current()?, of_sets.current()?, of_backends.current()?);
        let settings = pins.object("SETTINGS");
        let open_settings = MapData::from_pin(&settings).map_err(|error| TableError::Open(settings, error))?;
        Ok(Self {
            room: Room { frontends: frontends.entries, sets: sets.entries, slots: backends.entries },
            ids: [frontends.id, sets.id, backends.id],
            frontends: typed(frontends.map)?,
            sets: Mapped::new(sets.map, "SETS", sets.entries as usize * size_of::<Set>())?,
            backends: Mapped::new(backends.map, "BACKENDS", backends.entries as usize * size_of::<BackendSlot>())?,
            settings: Mapped::new(open_settings, "SETTINGS", size_of::<Settings>())?,
            outer,
        })
    }

    /// The table as it is now, read by somebody who is not the agent.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn snapshot(pins: &PinDir) -> Result<KernelTable, TableError> {
        for _ in 0..TRIES {
            let table = Self::open(pins)?;
            let read = table.read()?;
            // Ids of sets belong to the maps that they were read from.
            if table.outer.iter().zip(table.ids).all(|(outer, id)| outer.is_current(id)) {
                return Ok(read);
            }
        }
        Err(TableError::Restless)
    }

    /// How much the maps can hold now.
    #[must_use]
    pub fn room(&self) -> Room {
        self.room
    }

    /// Reads the whole table back. What points outside the maps is left out: it is then written anew.
    ///
    /// # Errors
    /// `FRONTENDS` could not be read.
    pub fn read(&self) -> Result<KernelTable, TableError> {
        let mut table = KernelTable { filter: self.filter(), room: self.room, ..KernelTable::default() };
        for entry in self.frontends.iter() {
            let (key, set) = entry.map_err(|error| TableError::Read("FRONTENDS", error))?;
            if key.protocol == PROTOCOL_ANY {
                table.addresses.insert(Address::from_words(key.address));
            }
            let Some(frontend) = frontend(&key) else { continue };
            table.frontends.insert(frontend, set);
            if let std::collections::btree_map::Entry::Vacant(vacant) = table.sets.entry(set)
                && let Some(kernel_set) = self.read_set(set)
            {
                vacant.insert(kernel_set);
            }
        }
        Ok(table)
    }

    /// Writes the operations in their order. After an error the caller must read the table back before it goes on.
    ///
    /// # Errors
    /// The first write that failed; none after it was tried.
    pub fn apply(&mut self, ops: &[Op]) -> Result<(), TableError> {
        ops.iter().try_for_each(|op| self.apply_one(op))
    }

    fn apply_one(&mut self, op: &Op) -> Result<(), TableError> {
        let failed = |what: &dyn std::fmt::Display| {
            let what = what.to_string();
            move |error| TableError::Write(what, error)
        };
        match op {
            Op::WriteBackends { first_slot, members } => self.write_backends(*first_slot, members),
            Op::PublishSet { set, first_slot, eligible, serving, drops } => {
                let word = SetWord::new(*first_slot, *eligible, *serving, *drops);
                self.store(self.set_field(*set, offset_of!(Set, word)), word.0, format_args!("set {set}"))
            }
            Op::SetAffinity { set, affinity } => {
                let word = AffinityWord::new(affinity.id, affinity.seconds);
                self.store(self.set_field(*set, offset_of!(Set, affinity)), word.0, format_args!("set {set}"))
            }
            Op::PutFrontend { frontend, set } => {
                self.frontends.insert(key(*frontend), set, 0).map_err(failed(frontend))
            }
            Op::PutAddress(address) => {
                self.frontends.insert(address_key(*address), SET_UNKNOWN_PORT, 0).map_err(failed(address))
            }
            Op::DeleteFrontend { frontend } => self.delete(&key(*frontend)).map_err(failed(frontend)),
            Op::DeleteAddress(address) => self.delete(&address_key(*address)).map_err(failed(address)),
            Op::SetFilter(filter) => {
                self.store_setting(offset_of!(Settings, filter_v4), filter.v4)?;
                self.store_setting(offset_of!(Settings, filter_v6), filter.v6)
            }
            Op::RaiseEpoch => self.raise_epoch(),
            Op::SetSeed(seed) => self.store_setting(offset_of!(Settings, seed), *seed),
            Op::SetBalance(balance) => {
                let balance = match balance {
                    Balance::Random => cproxy_ebpf::Balance::Random,
                    Balance::RoundRobin => cproxy_ebpf::Balance::RoundRobin,
                };
                self.store_setting(offset_of!(Settings, balance), balance as u64)
            }
            Op::SetExclusions(exclusions) => self.exclude(exclusions),
            Op::ReplaceFrontends { room, frontends, addresses } => self.replace_frontends(*room, frontends, addresses),
            Op::ResizeSets(room) => {
                let ([_, outer, _], [_, id, _]) = (&self.outer, &mut self.ids);
                (self.sets, *id) = resized(outer, &self.sets, *room)?;
                self.room.sets = *room;
                Ok(())
            }
            Op::ResizeBackends(room) => {
                let ([.., outer], [.., id]) = (&self.outer, &mut self.ids);
                (self.backends, *id) = resized(outer, &self.backends, *room)?;
                self.room.slots = *room;
                Ok(())
            }
            Op::Drain => self.drain(),
        }
    }

    fn replace_frontends(
        &mut self,
        room: u32,
        frontends: &[(Frontend, u32)],
        addresses: &[Address],
    ) -> Result<(), TableError> {
        let [outer, ..] = &self.outer;
        let map = outer.make(room)?;
        // What has a type keeps its descriptor to itself.
        let fd = map.fd().as_fd().try_clone_to_owned().map_err(TableError::Descriptor)?;
        let mut map = typed(map)?;
        let frontends = frontends.iter().map(|&(frontend, set)| (key(frontend), set));
        let addresses = addresses.iter().map(|&address| (address_key(address), SET_UNKNOWN_PORT));
        for (key, set) in frontends.chain(addresses) {
            map.insert(key, set, 0).map_err(|error| TableError::Write("FRONTENDS".to_owned(), error))?;
        }
        let [id, ..] = &mut self.ids;
        *id = outer.put(fd.as_fd())?;
        (self.frontends, self.room.frontends) = (map, room);
        Ok(())
    }

    /// Waits until every program that runs now has ended.
    fn drain(&self) -> Result<(), TableError> {
        let [_, outer, _] = &self.outer;
        outer.wait_for_programs(&self.sets.map)
    }

    fn delete(&mut self, key: &FrontendKey) -> Result<(), MapError> {
        match self.frontends.remove(key) {
            Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
            error => error,
        }
    }

    fn write_backends(&self, first_slot: u32, members: &Members) -> Result<(), TableError> {
        let runs = [members.eligible(), members.serving()];
        for (slot, backend) in (first_slot as usize..).zip(runs.into_iter().flat_map(by_digest)) {
            let out_of_range = || TableError::OutOfRange(format!("slot {slot}"));
            let target =
                self.backends.element::<BackendSlot>(slot, size_of::<BackendSlot>()).ok_or_else(out_of_range)?;
            // SAFETY: in range and aligned; no set refers to this slot, so no program reads it.
            unsafe { target.write_volatile(backend) };
        }
        Ok(())
    }

    fn read_set(&self, set: u32) -> Option<KernelSet> {
        let word = SetWord(self.set_field(set, offset_of!(Set, word))?.load(Ordering::Acquire));
        let affinity = AffinityWord(self.set_field(set, offset_of!(Set, affinity))?.load(Ordering::Acquire));
        let eligible = self.read_run(word.first_slot(), word.eligible())?;
        let serving = self.read_run(word.first_slot() + word.eligible(), word.serving())?;
        Some(KernelSet {
            first_slot: word.first_slot(),
            members: Members::new(&eligible, &serving, word.drops()),
            affinity: Affinity { id: affinity.id(), seconds: affinity.seconds() },
        })
    }

    /// One run of a set, sorted as the model has it.
    fn read_run(&self, first_slot: u32, count: u32) -> Option<Vec<Backend>> {
        let slots = first_slot as usize..first_slot as usize + count as usize;
        let backends = slots.map(|slot| {
            let source = self.backends.element::<BackendSlot>(slot, size_of::<BackendSlot>())?;
            // SAFETY: in range and aligned; a concurrent writer may tear a value, which only a reader without the
            // agent's lock can meet, and every bit pattern is valid.
            Some(backend(unsafe { source.read_volatile() }))
        });
        let mut backends = backends.collect::<Option<Vec<_>>>()?;
        backends.sort_unstable();
        Some(backends)
    }

    fn set_field(&self, set: u32, offset_bytes: usize) -> Option<&AtomicU64> {
        self.sets.word((set as usize).checked_mul(size_of::<Set>())?.checked_add(offset_bytes)?)
    }

    fn store_setting(&self, offset_bytes: usize, value: u64) -> Result<(), TableError> {
        self.store(self.settings.word(offset_bytes), value, format_args!("SETTINGS, byte {offset_bytes}"))
    }

    fn store(&self, word: Option<&AtomicU64>, value: u64, what: std::fmt::Arguments<'_>) -> Result<(), TableError> {
        word.ok_or_else(|| TableError::OutOfRange(what.to_string()))?.store(value, Ordering::Release);
        Ok(())
    }

    fn filter(&self) -> Filter {
        let word = |offset_bytes| self.settings.word(offset_bytes).map_or(0, |word| word.load(Ordering::Acquire));
        Filter { v4: word(offset_of!(Settings, filter_v4)), v6: word(offset_of!(Settings, filter_v6)) }
    }

    /// Nobody is left alone while the elements change: an element that is only half written must not be read.
    fn exclude(&mut self, exclusions: &Exclusions) -> Result<(), TableError> {
        let Some(settings) = self.settings.element::<Settings>(0, size_of::<Settings>()) else {
            return Err(TableError::OutOfRange("SETTINGS".to_owned()));
        };
        // SAFETY: the whole map; only this agent writes it, and programs read single integers of it.
        let now = unsafe { settings.read_volatile() };
        let wanted = with_exclusions(now, exclusions);
        let counts = |of: &Settings| [of.excluded_cgroup_count, of.excluded_uid_count, of.excluded_port_count];
        if now == wanted || [counts(&now), counts(&wanted)] == [[0; 3]; 2] {
            return Ok(());
        }
        self.set_counts([0; 3])?;
        self.drain()?;
        let uncounted = Settings { excluded_cgroup_count: 0, excluded_uid_count: 0, excluded_port_count: 0, ..wanted };
        // SAFETY: as above; of what a program may read now, every byte keeps its value.
        unsafe { settings.write_volatile(uncounted) };
        self.set_counts(counts(&wanted))?;
        // Flows that were found before are to be left alone, too.
        self.raise_epoch()
    }

    fn raise_epoch(&self) -> Result<(), TableError> {
        let index = offset_of!(Settings, epoch) / size_of::<u32>();
        let word = self.settings.element::<u32>(index, size_of::<u32>());
        let word = word.ok_or_else(|| TableError::OutOfRange("SETTINGS".to_owned()))?;
        // SAFETY: in range, aligned, alive as long as `self`; both sides access it as one word.
        unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn set_counts(&self, counts: [u32; 3]) -> Result<(), TableError> {
        let first = offset_of!(Settings, excluded_cgroup_count) / size_of::<u32>();
        for (index, count) in (first..).zip(counts) {
            let word = self.settings.element::<u32>(index, size_of::<u32>());
            let word = word.ok_or_else(|| TableError::OutOfRange("SETTINGS".to_owned()))?;
            // SAFETY: in range, aligned, alive as long as `self`; both sides access it as one word.
            unsafe { AtomicU32::from_ptr(word) }.store(count, Ordering::Release);
        }
        Ok(())
    }
}

/// A run as it lies in `BACKENDS`: sorted by digest, neighbours of one digest by address and port.
fn by_digest(run: &[Backend]) -> Vec<BackendSlot> {
    let mut slots: Vec<_> = run.iter().copied().map(slot_of).collect();
    slots.sort_by_key(|slot| slot.digest);
    slots
}

/// The settings with these exclusions. There are no more than there are places; those without one match nobody.
fn with_exclusions(settings: Settings, exclusions: &Exclusions) -> Settings {
    let slot = |cgroup: &ExcludedCgroup| CgroupSlot { id: cgroup.id, level: cgroup.level, zero: 0 };
    let no_cgroup = CgroupSlot { id: u64::MAX, level: 0, zero: 0 };
    let (excluded_cgroup_count, excluded_cgroups) = filled(no_cgroup, exclusions.cgroups.iter().map(slot));
    let (excluded_uid_count, excluded_uids) = filled(u32::MAX, exclusions.uids.iter().copied());
    let (excluded_port_count, excluded_ports) = filled(0, exclusions.ports.iter().map(|port| port.to_be()));
    Settings {
        excluded_cgroup_count,
        excluded_uid_count,
        excluded_port_count,
        excluded_cgroups,
        excluded_uids,
        excluded_ports,
        ..settings
    }
}

fn filled<T: Copy, const MAX: usize>(nobody: T, values: impl Iterator<Item = T>) -> (u32, [T; MAX]) {
    let mut array = [nobody; MAX];
    let mut count = 0;
    for (element, value) in array.iter_mut().zip(values) {
        *element = value;
        count += 1;
    }
    (count, array)
}

fn typed(map: MapData) -> Result<HashMap<MapData, FrontendKey, SetId>, TableError> {
    HashMap::try_from(Map::HashMap(map)).map_err(|error| TableError::Read("FRONTENDS", error))
}

/// An array of another size in the place of one; what fits is copied.
fn resized(outer: &Growing, old: &Mapped, room: u32) -> Result<(Mapped, u32), TableError> {
    let (name, map) = (outer.name(), outer.make(room)?);
    let size_bytes = room as usize * outer.element_bytes();
    let new = Mapped::new(map, name, size_bytes)?;
    new.copy_from(old);
    let id = outer.put(new.map.fd().as_fd())?;
    Ok((new, id))
}

impl Mapped {
    fn new(map: MapData, name: &'static str, size_bytes: usize) -> Result<Self, TableError> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { mmap(std::ptr::null_mut(), size_bytes, flags, MapFlags::SHARED, map.fd().as_fd(), 0) };
        let address = address.map_err(|error| TableError::Mmap(name, error.into()))?;
        let null = || TableError::Mmap(name, io::Error::other("mapped at address 0"));
        Ok(Self { address: NonNull::new(address.cast()).ok_or_else(null)?, size_bytes, map })
    }

    fn copy_from(&self, other: &Self) {
        let size_bytes = self.size_bytes.min(other.size_bytes);
        // SAFETY: two mappings of at least this size; only the agent writes the other one, and no program sees this one.
        unsafe { self.address.as_ptr().copy_from_nonoverlapping(other.address.as_ptr(), size_bytes) };
    }

    /// A pointer to an element, if it lies in the map.
    fn element<T>(&self, index: usize, stride_bytes: usize) -> Option<*mut T> {
        let offset_bytes = index.checked_mul(stride_bytes)?;
        let end_bytes = offset_bytes.checked_add(size_of::<T>())?;
        // SAFETY: within the mapping, as checked.
        (end_bytes <= self.size_bytes).then(|| unsafe { self.address.as_ptr().add(offset_bytes).cast() })
    }

    /// The word at an offset that is a multiple of 8, if it lies in the map.
    fn word(&self, offset_bytes: usize) -> Option<&AtomicU64> {
        let word = self.element::<u64>(offset_bytes / size_of::<u64>(), size_of::<u64>())?;
        // SAFETY: in range, aligned, alive as long as `self`; shared memory that both sides access as 64-bit words.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping; every reference to it borrows `self`. A failure leaves it mapped, which is harmless.
        unsafe { munmap(self.address.as_ptr().cast(), self.size_bytes) }.ok();
    }
}

// SAFETY: the mapping is owned, and every access goes through atomics or volatile accesses under the owner's borrow.
unsafe impl Send for Mapped {}

/// Marks sockets that are never translated: the agent's own, before they connect.
#[derive(Debug)]
pub struct SocketMark {
    pin: PathBuf,
    map: Mutex<Option<SkStorage<MapData, SocketState>>>,
}

impl SocketMark {
    /// By the pinned map; nothing is opened yet.
    #[must_use]
    pub fn new(pins: &PinDir) -> Self {
        Self { pin: pins.object("SOCKETS"), map: Mutex::default() }
    }

    /// Marks a socket. As long as there is no map, there are no programs that would translate what the socket does next, and it
    /// stays as it is: the agent may ask its API server while the programs are being installed.
    ///
    /// # Errors
    /// The map may not be used, or the kernel refused.
    pub fn mark(&self, socket: impl AsFd) -> io::Result<()> {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        if map.is_none() {
            *map = self.open().map_err(io::Error::other)?;
        }
        let Some(map) = &mut *map else { return Ok(()) };
        let state = SocketState { flags: SOCKET_UNTRANSLATED, ..SocketState::default() };
        map.insert(&socket.as_fd(), state, 0).map_err(io::Error::other)
    }

    fn open(&self) -> Result<Option<SkStorage<MapData, SocketState>>, TableError> {
        let error = |error| TableError::Open(self.pin.clone(), error);
        if !self.pin.exists() {
            return Ok(None);
        }
        let map = MapData::from_pin(&self.pin).map_err(error)?;
        Ok(Some(SkStorage::try_from(Map::SkStorage(map)).map_err(error)?))
    }
}

fn key(frontend: Frontend) -> FrontendKey {
    let protocol = match frontend.protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
    };
    FrontendKey { address: frontend.address.words(), port: frontend.port.to_be(), protocol, zero: 0 }
}

fn address_key(address: Address) -> FrontendKey {
    FrontendKey { address: address.words(), port: 0, protocol: PROTOCOL_ANY, zero: 0 }
}

/// `None` for a protocol that no agent of this layout writes.
fn frontend(key: &FrontendKey) -> Option<Frontend> {
    let protocol = match key.protocol {
        PROTOCOL_TCP => Protocol::Tcp,
        PROTOCOL_UDP => Protocol::Udp,
        _ => return None,
    };
    Some(Frontend { address: Address::from_words(key.address), port: u16::from_be(key.port), protocol })
}

fn slot_of(backend: Backend) -> BackendSlot {
    let (address, port) = (backend.address.words(), backend.port.to_be());
    BackendSlot { address, port, zero: 0, digest: digest(&address, port) }
}

fn backend(slot: BackendSlot) -> Backend {
    Backend { address: Address::from_words(slot.address), port: u16::from_be(slot.port) }
}

#[cfg(test)]
mod tests {
    use cproxy_core::parse_address;

    use super::*;

    #[test]
    fn keys_and_slots_are_in_network_order() {
        let frontend_of =
            |text: &str| Frontend { address: parse_address(text).unwrap(), port: 0x1234, protocol: Protocol::Udp };
        let v4 = key(frontend_of("10.96.0.10"));
        assert_eq!(v4.address, cproxy_ebpf::v4_mapped(u32::from_ne_bytes([10, 96, 0, 10])));
        assert_eq!((v4.port.to_ne_bytes(), v4.protocol, v4.zero), ([0x12, 0x34], 17, 0));
        let v6 = key(frontend_of("fd00:1:2:3:4:5:6:7"));
        assert_eq!(v6.address[0].to_ne_bytes(), [0xfd, 0, 0, 1]);
        for text in ["10.96.0.10", "fd00:1:2:3:4:5:6:7"] {
            assert_eq!(frontend(&key(frontend_of(text))), Some(frontend_of(text)));
            assert_eq!(frontend(&address_key(frontend_of(text).address)), None);
        }
    }

    #[test]
    fn a_run_is_sorted_by_digest() {
        let backend = |host: u8| Backend { address: parse_address(&format!("10.0.0.{host}")).unwrap(), port: 8080 };
        let run: Vec<_> = (0..100).map(backend).collect();
        let slots = by_digest(&run);
        assert!(slots.is_sorted_by_key(|slot| slot.digest) && !run.is_sorted_by_key(|b| slot_of(*b).digest));
        let mut back: Vec<_> = slots.into_iter().map(self::backend).collect();
        back.sort_unstable();
        assert_eq!(back, run);
    }

    #[test]
    fn exclusions_take_their_places_and_leave_the_rest_alone() {
        // SAFETY: integers only.
        let before = Settings { seed: 7, filter_v4: 8, excluded_uid_count: 9, ..unsafe { std::mem::zeroed() } };
        let cgroups = vec![ExcludedCgroup { id: 5, level: 2 }];
        let after = with_exclusions(before, &Exclusions { cgroups, uids: Vec::new(), ports: vec![80, 443] });
        assert_eq!((after.seed, after.filter_v4), (7, 8));
        assert_eq!((after.excluded_cgroup_count, after.excluded_uid_count, after.excluded_port_count), (1, 0, 2));
        assert_eq!(after.excluded_cgroups[0], CgroupSlot { id: 5, level: 2, zero: 0 });
        assert_eq!(after.excluded_cgroups[1].id, u64::MAX);
        assert_eq!(after.excluded_uids, [u32::MAX; cproxy_ebpf::EXCLUSIONS_MAX]);
        assert_eq!(after.excluded_ports[..3], [80u16.to_be(), 443u16.to_be(), 0]);
    }
}
