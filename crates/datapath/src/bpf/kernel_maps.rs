//! The pinned maps as the agent uses them. [`KernelMaps::apply`] is the one function in the project that writes the
//! table. Marks of sockets and freed places are state of sockets, which others write.

use std::{
    mem::offset_of,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    slice,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use aya::maps::{HashMap, IterableMap as _, Map, MapData, MapError};
use cproxy_core::{
    Address, Backend, Balance, Capacity, ExcludedCgroup, Exclusions, Family, Frontend, Limits, Members, Op, Reserve,
};
use cproxy_ebpf::{
    Affinity as AffinityWord, BACKENDS_MAX, BACKENDS_MIN, Backend as BackendSlot, EXCLUDED_CGROUP,
    EXCLUDED_OTHER_NETNS, ExcludedCgroup as CgroupSlot, FRONTENDS_MAX, FRONTENDS_MIN, FrontendKey, OWN_ADDRESS_V4,
    OWN_ADDRESS_V6, OwnAddress, SET_BACKENDS_MAX, SET_UNKNOWN_PORT, SETS_MAX, SETS_MIN, Set, SetId, SetWord, Settings,
    filter_bit,
};

use super::{
    encoding::{address_key, backend_slot, key},
    error::TableError,
    map_spec::{BACKENDS, FRONTENDS, SETS, TCP_MORE_OWNERS},
    mapping::Mapping,
    open::{Access, open_map},
    pins::{PinDir, PinLock},
    resizable::{InnerMap, ResizableMap},
    service_counters::{self, CountsMap},
    syscalls::{obj_get, obj_pin},
    tcp_places::{TcpPlaces, TcpPlacesUsage},
    together::together,
};

/// The open maps.
pub struct KernelMaps {
    frontends: HashMap<MapData, FrontendKey, SetId>,
    sets: MappedArray,
    backends: MappedArray,
    settings: MappedArray,
    own_addresses: MappedArray,
    tcp_places: TcpPlaces,
    /// Counters by frontend, if they are on.
    service_counts: Option<CountsMap>,
    capacity: Capacity,
    /// Through these the programs find the first three: `FRONTENDS`, `SETS`, `BACKENDS`.
    outer: [ResizableMap; 3],
    /// All maps that the programs name. They outlive their pins.
    named: Vec<(&'static str, OwnedFd)>,
}

/// Map that takes the place of another one, and its size.
enum Replacement {
    /// The descriptor is of the same map.
    Frontends(HashMap<MapData, FrontendKey, SetId>, OwnedFd, u32),
    Sets(MappedArray, u32),
    Backends(MappedArray, u32),
}

/// An array map, and its memory.
#[derive(Debug)]
struct MappedArray {
    map: MapData,
    memory: Mapping,
}

impl KernelMaps {
    /// Limits of the maps.
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
        least: Capacity { frontends: FRONTENDS_MIN, sets: SETS_MIN, slots: BACKENDS_MIN },
        run_backends: SET_BACKENDS_MAX,
        filter_bit: |address| filter_bit(&address.words()),
    };

    /// Opens the pinned maps. The lock is the proof that no other agent writes them.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn open(lock: &PinLock) -> Result<Self, TableError> {
        let pins = lock.pins();
        let outer = |spec| ResizableMap::open(pins, spec, Access::ReadWrite);
        let outer = [outer(FRONTENDS)?, outer(SETS)?, outer(BACKENDS)?];
        let [of_frontends, of_sets, of_backends] = &outer;
        let (frontends, sets, backends) = (of_frontends.current()?, of_sets.current()?, of_backends.current()?);
        let named = |name| {
            let path = pins.object(name);
            obj_get(&path, 0).map(|map| (name, map)).map_err(|error| TableError::Pin(path, error))
        };
        let mapped = |name, size_bytes| {
            let path = pins.object(name);
            let map = open_map(&path, Access::ReadWrite).map_err(|error| TableError::Open(path, error))?;
            MappedArray::new(map, name, size_bytes)
        };
        Ok(Self {
            capacity: Capacity { frontends: frontends.entries, sets: sets.entries, slots: backends.entries },
            frontends: typed(frontends.map)?,
            sets: MappedArray::new(sets.map, "SETS", sets.entries as usize * size_of::<Set>())?,
            backends: MappedArray::new(backends.map, "BACKENDS", backends.entries as usize * size_of::<BackendSlot>())?,
            settings: mapped("SETTINGS", size_of::<Settings>())?,
            own_addresses: mapped("OWN_ADDRESSES", 2 * size_of::<OwnAddress>())?,
            tcp_places: TcpPlaces::open(pins)?,
            service_counts: service_counters::pinned(pins, Access::ReadWrite)
                .map_err(|error| TableError::Pin(service_counters::path(pins), error))?,
            outer,
            named: PinDir::map_names().map(named).collect::<Result<_, _>>()?,
        })
    }

    /// Pins maps again that have lost their pins. Returns their names. The programs use the maps all the time.
    ///
    /// # Errors
    /// A map cannot be pinned.
    pub fn restore_pins(&self, pins: &PinDir) -> Result<Vec<&'static str>, TableError> {
        let mut restored = Vec::new();
        for (name, map) in &self.named {
            let path = pins.object(name);
            if !path.exists() {
                obj_pin(map.as_fd(), &path).map_err(|error| TableError::Pin(path, error))?;
                restored.push(*name);
            }
        }
        let inner = [self.frontends.map().fd(), self.sets.map.fd(), self.backends.map.fd()];
        for (outer, map) in self.outer.iter().zip(inner) {
            if outer.restore_pin(map.as_fd())? {
                restored.push(outer.name());
            }
        }
        if self.tcp_places.restore_pins()? {
            restored.push(TCP_MORE_OWNERS);
        }
        Ok(restored)
    }

    /// Current capacity of the maps.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The places of TCP sockets that are in use.
    #[must_use]
    pub fn tcp_places(&self) -> TcpPlacesUsage {
        self.tcp_places.usage()
    }

    /// Number of places of TCP sockets that were freed since the maps were opened.
    #[must_use]
    pub fn tcp_places_freed(&self) -> u64 {
        self.tcp_places.freed()
    }

    /// Writes the operations in their order. After an error the caller must read the table back before it goes on.
    ///
    /// # Errors
    /// The first write that failed; none after it was tried.
    pub fn apply(&mut self, ops: &[Op]) -> Result<(), TableError> {
        ops.chunk_by(are_together).try_for_each(|ops| match ops {
            [op] => self.apply_one(op),
            ops => self.replace_maps(ops),
        })
    }

    fn apply_one(&mut self, op: &Op) -> Result<(), TableError> {
        let failed = |what: &dyn std::fmt::Display| {
            let what = what.to_string();
            move |error| TableError::Write(what, error)
        };
        match op {
            Op::WriteBackends { first_slot, members, are_counted } => {
                self.write_backends(*first_slot, members, *are_counted)
            }
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
            Op::SetOwnAddresses(addresses) => self.set_own_addresses(addresses),
            Op::FreeTcpPlaces(places) => {
                self.tcp_places.free(places);
                Ok(())
            }
            Op::GrowTcpPlaces | Op::ShrinkTcpPlaces => {
                let [_, outer, _] = &self.outer;
                let wait_for_programs = || outer.wait_for_programs(&self.sets.map);
                let is_growth = matches!(op, Op::GrowTcpPlaces);
                if is_growth {
                    self.tcp_places.grow(wait_for_programs)
                } else {
                    self.tcp_places.shrink(wait_for_programs)
                }
            }
            Op::ReplaceFrontends { .. } | Op::ResizeSets(_) | Op::ResizeBackends(_) => {
                self.replace_maps(slice::from_ref(op))
            }
            Op::Drain => self.drain(),
        }
    }

    /// Replaces maps, each by one operation. Memory may suffice for the first of them.
    fn replace_maps(&mut self, ops: &[Op]) -> Result<(), TableError> {
        let (mut new, mut made) = (Vec::new(), Ok(()));
        for replacement in ops.iter().map_while(|op| self.replacement(op)) {
            match replacement {
                Ok(replacement) => new.push(replacement),
                Err(error) => {
                    made = Err(error);
                    break;
                }
            }
        }
        let outcomes = put_in_force(&self.outer, &new);
        let replaced = new.into_iter().zip(outcomes).map(|(new, outcome)| outcome.map(|()| self.go_on_with(new)));
        // Those that were replaced are in use from now on, whatever has become of the others.
        replaced.fold(Ok(()), Result::and).and(made)
    }

    /// Map that an operation puts in the place of another one, with its content.
    fn replacement(&self, op: &Op) -> Option<Result<Replacement, TableError>> {
        let [of_frontends, of_sets, of_backends] = &self.outer;
        Some(match op {
            Op::ReplaceFrontends { capacity, frontends, addresses } => {
                filled(of_frontends, *capacity, frontends, addresses)
            }
            Op::ResizeSets(capacity) => {
                resized(of_sets, &self.sets, *capacity).map(|map| Replacement::Sets(map, *capacity))
            }
            Op::ResizeBackends(capacity) => {
                resized(of_backends, &self.backends, *capacity).map(|map| Replacement::Backends(map, *capacity))
            }
            _ => return None,
        })
    }

    fn go_on_with(&mut self, new: Replacement) {
        match new {
            Replacement::Frontends(map, _, capacity) => {
                (self.frontends, self.capacity.frontends) = (map, capacity);
            }
            Replacement::Sets(map, capacity) => (self.sets, self.capacity.sets) = (map, capacity),
            Replacement::Backends(map, capacity) => (self.backends, self.capacity.slots) = (map, capacity),
        }
    }

    /// Waits until every program that runs now has ended.
    fn drain(&self) -> Result<(), TableError> {
        let [_, outer, _] = &self.outer;
        outer.wait_for_programs(&self.sets.map)
    }

    /// Deletes a frontend with its counters: another Service may get the address.
    fn delete(&mut self, key: &FrontendKey) -> Result<(), MapError> {
        if let Some(counts) = &mut self.service_counts {
            // It has none unless it was called.
            counts.remove(key).ok();
        }
        match self.frontends.remove(key) {
            Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
            error => error,
        }
    }

    fn write_backends(&self, first_slot: u32, members: &Members, are_counted: bool) -> Result<(), TableError> {
        let runs = [members.eligible(), members.kept()].into_iter().flat_map(|run| by_digest(run, are_counted));
        for (slot, backend) in (first_slot as usize..).zip(runs) {
            let out_of_range = || TableError::OutOfRange(format!("slot {slot}"));
            let target =
                self.backends.memory.element::<BackendSlot>(slot, size_of::<BackendSlot>()).ok_or_else(out_of_range)?;
            // SAFETY: in range and aligned; no set refers to this slot, so no program reads it.
            unsafe { target.write_volatile(backend) };
        }
        Ok(())
    }

    fn set_field(&self, set: u32, offset_bytes: usize) -> Option<&AtomicU64> {
        self.sets.memory.word((set as usize).checked_mul(size_of::<Set>())?.checked_add(offset_bytes)?)
    }

    fn store_setting(&self, offset_bytes: usize, value: u64) -> Result<(), TableError> {
        self.store(self.settings.memory.word(offset_bytes), value, format_args!("SETTINGS, byte {offset_bytes}"))
    }

    fn store(&self, word: Option<&AtomicU64>, value: u64, what: std::fmt::Arguments<'_>) -> Result<(), TableError> {
        word.ok_or_else(|| TableError::OutOfRange(what.to_string()))?.store(value, Ordering::Release);
        Ok(())
    }

    /// Writes the exclusions. None is in force while the elements change: a program must not read one that is half
    /// written.
    fn exclude(&mut self, exclusions: &Exclusions) -> Result<(), TableError> {
        let Some(settings) = self.settings.memory.element::<Settings>(0, size_of::<Settings>()) else {
            return Err(TableError::OutOfRange("SETTINGS".to_owned()));
        };
        // SAFETY: the whole map; only this agent writes it, and programs read single integers of it.
        let now = unsafe { settings.read_volatile() };
        let wanted = with_exclusions(now, exclusions);
        let counts = |of: &Settings| [of.excluded_cgroup_count, of.excluded_uid_count, of.excluded_port_count];
        if now == wanted || [counts(&now), counts(&wanted)] == [[0; 3]; 2] {
            return Ok(());
        }
        // Elements that stay keep their places, so that they apply all the time. A cgroup of which a program reads the
        // old id or the old level matches nothing, since an id has one level.
        let [before, after] = [now, wanted].map(words);
        let first = offset_of!(Settings, excluded_cgroups) / size_of::<u64>();
        for (index, (_, word)) in before.into_iter().zip(after).enumerate().skip(first).filter(|(_, (a, b))| a != b) {
            let place = self.settings.memory.element::<u64>(index, size_of::<u64>());
            let place = place.ok_or_else(|| TableError::OutOfRange("SETTINGS".to_owned()))?;
            // SAFETY: in range, aligned, alive as long as `self`; no integer that programs read is in two words.
            unsafe { AtomicU64::from_ptr(place) }.store(word, Ordering::Release);
        }
        self.set_counts(counts(&wanted))?;
        // Flows that were found before are to be left alone, too.
        self.raise_epoch()
    }

    /// Writes the VM's addresses, each beside the one that is in force, and then puts it in force.
    fn set_own_addresses(&self, addresses: &[Address]) -> Result<(), TableError> {
        for (family, element) in [(Family::V4, OWN_ADDRESS_V4), (Family::V6, OWN_ADDRESS_V6)] {
            let address = addresses.iter().find(|address| address.family() == family);
            let [a, b, c, d] = address.map_or([0; 4], |address| address.words());
            let first_byte = element as usize * size_of::<OwnAddress>();
            let current = self.own_addresses.memory.word(first_byte + offset_of!(OwnAddress, current));
            let current = current.ok_or_else(|| TableError::OutOfRange("OWN_ADDRESSES".to_owned()))?;
            // The index shares its word with padding.
            let is_first = u64_of(0, 0) == current.load(Ordering::Relaxed);
            let next = first_byte + offset_of!(OwnAddress, addresses) + usize::from(is_first) * size_of::<[u32; 4]>();
            for (offset_bytes, value) in [(next, u64_of(a, b)), (next + size_of::<u64>(), u64_of(c, d))] {
                self.store(self.own_addresses.memory.word(offset_bytes), value, format_args!("OWN_ADDRESSES"))?;
            }
            current.store(u64_of(is_first.into(), 0), Ordering::Release);
        }
        Ok(())
    }

    fn raise_epoch(&self) -> Result<(), TableError> {
        let index = offset_of!(Settings, epoch) / size_of::<u32>();
        let word = self.settings.memory.element::<u32>(index, size_of::<u32>());
        let word = word.ok_or_else(|| TableError::OutOfRange("SETTINGS".to_owned()))?;
        // SAFETY: in range, aligned, alive as long as `self`; both sides access it as one word.
        unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn set_counts(&self, counts: [u32; 3]) -> Result<(), TableError> {
        let first = offset_of!(Settings, excluded_cgroup_count) / size_of::<u32>();
        for (index, count) in (first..).zip(counts) {
            let word = self.settings.memory.element::<u32>(index, size_of::<u32>());
            let word = word.ok_or_else(|| TableError::OutOfRange("SETTINGS".to_owned()))?;
            // SAFETY: in range, aligned, alive as long as `self`; both sides access it as one word.
            unsafe { AtomicU32::from_ptr(word) }.store(count, Ordering::Release);
        }
        Ok(())
    }
}

/// Two words as they lie in memory, one after the other.
fn u64_of(first: u32, second: u32) -> u64 {
    // SAFETY: integers of the same size.
    unsafe { std::mem::transmute([first, second]) }
}

/// A run as it lies in `BACKENDS`: sorted by digest, neighbours of one digest by address and port.
fn by_digest(run: &[Backend], are_counted: bool) -> Vec<BackendSlot> {
    let mut slots: Vec<_> = run.iter().map(|backend| backend_slot(*backend, are_counted)).collect();
    slots.sort_unstable_by_key(|slot| (slot.digest, slot.address, slot.port));
    slots
}

/// The settings as words.
fn words(settings: Settings) -> [u64; size_of::<Settings>() / size_of::<u64>()] {
    // SAFETY: integers without padding, of the same size.
    unsafe { std::mem::transmute(settings) }
}

/// The settings with these exclusions. There are no more than there are places; unused places match no process and no
/// port.
fn with_exclusions(settings: Settings, exclusions: &Exclusions) -> Settings {
    let slot = |cgroup: &ExcludedCgroup| CgroupSlot { id: cgroup.id, level: cgroup.level, kind: EXCLUDED_CGROUP };
    let no_cgroup = CgroupSlot { id: u64::MAX, level: 0, kind: EXCLUDED_CGROUP };
    let netns = exclusions.netns_others_than.map(|id| CgroupSlot { id, level: u32::MAX, kind: EXCLUDED_OTHER_NETNS });
    let (excluded_cgroup_count, excluded_cgroups) =
        replaced(settings.excluded_cgroups, no_cgroup, exclusions.cgroups.iter().map(slot).chain(netns));
    let (excluded_uid_count, excluded_uids) =
        replaced(settings.excluded_uids, u32::MAX, exclusions.uids.iter().copied());
    let (excluded_port_count, excluded_ports) =
        replaced(settings.excluded_ports, 0, exclusions.ports.iter().map(|port| port.to_be()));
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

/// Array with these values, and their number. Values that it has already keep their places.
fn replaced<T: Copy + PartialEq, const MAX: usize>(
    before: [T; MAX],
    unused: T,
    values: impl Iterator<Item = T> + Clone,
) -> (u32, [T; MAX]) {
    let mut array = before.map(|value| if values.clone().any(|new| new == value) { value } else { unused });
    for value in values.filter(|value| !before.contains(value)) {
        if let Some(free) = array.iter_mut().find(|place| **place == unused) {
            *free = value;
        }
    }
    (array.iter().filter(|&&value| value != unused).count() as u32, array)
}

fn typed(map: MapData) -> Result<HashMap<MapData, FrontendKey, SetId>, TableError> {
    HashMap::try_from(Map::HashMap(map)).map_err(|error| TableError::Read("FRONTENDS", error))
}

/// Number of the map that an operation replaces, in the order of the planner's first operations.
fn replaced_map(op: &Op) -> Option<usize> {
    match op {
        Op::ResizeSets(_) => Some(0),
        Op::ResizeBackends(_) => Some(1),
        Op::ReplaceFrontends { .. } => Some(2),
        _ => None,
    }
}

/// Whether two operations that follow each other replace different maps: these wait for one grace period together.
fn are_together(one: &Op, next: &Op) -> bool {
    let (one, next) = (replaced_map(one), replaced_map(next));
    one.is_some() && one < next
}

/// Replacement of an array by one of another size, with as much of its content as fits. It is not in force yet.
fn resized(outer: &ResizableMap, old: &MappedArray, capacity: u32) -> Result<MappedArray, TableError> {
    let (name, InnerMap { map, .. }) = (outer.name(), outer.create(capacity)?);
    let size_bytes = capacity as usize * outer.value_bytes();
    let new = MappedArray::new(map, name, size_bytes)?;
    new.memory.copy_from(&old.memory);
    Ok(new)
}

/// The same for the frontends, with this content.
fn filled(
    outer: &ResizableMap,
    capacity: u32,
    frontends: &[(Frontend, u32)],
    addresses: &[Address],
) -> Result<Replacement, TableError> {
    let InnerMap { map, .. } = outer.create(capacity)?;
    // The typed map keeps its descriptor to itself.
    let fd = map.fd().as_fd().try_clone_to_owned().map_err(TableError::Descriptor)?;
    let mut map = typed(map)?;
    let frontends = frontends.iter().map(|&(frontend, set)| (key(frontend), set));
    let addresses = addresses.iter().map(|&address| (address_key(address), SET_UNKNOWN_PORT));
    for (key, set) in frontends.chain(addresses) {
        map.insert(key, set, 0).map_err(|error| TableError::Write("FRONTENDS".to_owned(), error))?;
    }
    Ok(Replacement::Frontends(map, fd, capacity))
}

/// Puts maps in force, all at the same time, since each waits for a grace period.
fn put_in_force(outer: &[ResizableMap; 3], new: &[Replacement]) -> Vec<Result<(), TableError>> {
    let targets: Vec<_> = new.iter().map(|new| new.target(outer)).collect();
    together(&targets, |(outer, map)| outer.replace(map))
}

impl Replacement {
    /// Where it is put in force, and its descriptor.
    fn target<'a>(&'a self, outer: &'a [ResizableMap; 3]) -> (&'a ResizableMap, BorrowedFd<'a>) {
        let [of_frontends, of_sets, of_backends] = outer;
        match self {
            Self::Frontends(_, map, _) => (of_frontends, map.as_fd()),
            Self::Sets(array, _) => (of_sets, array.map.fd().as_fd()),
            Self::Backends(array, _) => (of_backends, array.map.fd().as_fd()),
        }
    }
}

impl MappedArray {
    fn new(map: MapData, name: &'static str, size_bytes: usize) -> Result<Self, TableError> {
        let memory = Mapping::new(&map, name, size_bytes)?;
        Ok(Self { map, memory })
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::parse_address;

    use super::*;
    use crate::bpf::encoding::backend;

    #[test]
    fn a_run_is_sorted_by_digest() {
        let numbered = |host: u8| Backend { address: parse_address(&format!("10.0.0.{host}")).unwrap(), port: 8080 };
        let run: Vec<_> = (0..100).map(numbered).collect();
        let slots = by_digest(&run, true);
        assert!(slots.is_sorted_by_key(|slot| slot.digest) && !run.is_sorted_by_key(|b| backend_slot(*b, true).digest));
        let mut back: Vec<_> = slots.into_iter().map(backend).collect();
        back.sort_unstable();
        assert_eq!(back, run);
    }

    #[test]
    fn replacements_of_different_maps_are_made_together() {
        let frontends = || Op::ReplaceFrontends { capacity: 1, frontends: Vec::new(), addresses: Vec::new() };
        let groups = |ops: &[Op]| ops.chunk_by(are_together).map(<[Op]>::len).collect::<Vec<_>>();
        let growth = [Op::RaiseEpoch, Op::ResizeSets(2), Op::ResizeBackends(3), frontends(), Op::RaiseEpoch];
        assert_eq!(groups(&growth), [1, 3, 1]);
        let same_map = [Op::ResizeBackends(2), Op::ResizeBackends(3), Op::ResizeSets(2), Op::ResizeBackends(4)];
        assert_eq!(groups(&same_map), [1, 1, 2], "a map is replaced once at a time");
        assert_eq!(groups(&[Op::RaiseEpoch, Op::RaiseEpoch]), [1, 1]);
    }

    #[test]
    fn exclusions_take_their_places_and_leave_the_rest_alone() {
        // SAFETY: integers only.
        let before = Settings { seed: 7, filter_v4: 8, excluded_uid_count: 9, ..unsafe { std::mem::zeroed() } };
        let cgroups = vec![ExcludedCgroup { id: 5, level: 2 }];
        let after = with_exclusions(before, &Exclusions { cgroups, ports: vec![80, 443], ..Exclusions::default() });
        assert_eq!((after.seed, after.filter_v4), (7, 8));
        assert_eq!((after.excluded_cgroup_count, after.excluded_uid_count, after.excluded_port_count), (1, 0, 2));
        assert_eq!(after.excluded_cgroups[0], CgroupSlot { id: 5, level: 2, kind: 0 });
        assert_eq!(after.excluded_cgroups[1].id, u64::MAX);
        assert_eq!(after.excluded_uids, [u32::MAX; cproxy_ebpf::EXCLUSIONS_MAX]);
        assert_eq!(after.excluded_ports[..3], [80u16.to_be(), 443u16.to_be(), 0]);
        let after =
            with_exclusions(after, &Exclusions { uids: vec![7, 0], ports: vec![53, 443, 54], ..Exclusions::default() });
        assert_eq!((after.excluded_cgroup_count, after.excluded_uid_count, after.excluded_port_count), (0, 2, 3));
        assert_eq!(after.excluded_uids[..3], [7, 0, u32::MAX]);
        assert_eq!(after.excluded_ports[..4], [53u16.to_be(), 443u16.to_be(), 54u16.to_be(), 0], "443 stays in place");
    }
}
