//! The pinned maps as the agent uses them. [`Table::apply`] is the one function in the project that writes them.

use std::{
    collections::HashMap as StdHashMap,
    io,
    os::fd::AsFd,
    path::PathBuf,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::{Array, ArrayOfMaps, HashMap, Map, MapData, MapError, SkStorage};
use cproxy_ebpf::{
    BACKEND_STRIDE_BYTES, BACKENDS_MAX, Backend as BackendSlot, FRONTENDS_MAX, FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP,
    SET_BACKENDS_MAX, SETS_MAX, SOCKET_UNTRANSLATED, SetId, SetWord, SocketState,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::pins::PinDir;
use crate::model::{Address, Backend, Frontend, KernelSet, KernelTable, Limits, Op, Protocol};

/// Why the table could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A map could not be opened.
    #[error("cannot open {0}: {cause}; it takes root or CAP_BPF", cause = super::root_cause(.1))]
    Open(PathBuf, MapError),
    /// A map could not be mapped into memory.
    #[error("cannot map {0} into memory: {1}")]
    Mmap(PathBuf, io::Error),
    /// A write failed; the table is as it was after the write before.
    #[error("cannot write {0}: {1}")]
    Write(String, MapError),
    /// `FRONTENDS` could not be read.
    #[error("cannot read FRONTENDS: {0}")]
    Read(MapError),
    /// A slot or a set is outside the maps: a bug in the model.
    #[error("{0} is outside the map")]
    OutOfRange(String),
}

/// The open maps.
pub struct Table {
    frontends: HashMap<MapData, FrontendKey, SetId>,
    sets: Mapped,
    backends: Mapped,
    barrier: ArrayOfMaps<MapData, Array<MapData, u32>>,
    barrier_inner: Array<MapData, u32>,
}

/// An array map's memory, shared with the kernel.
#[derive(Debug)]
struct Mapped {
    address: NonNull<u8>,
    size_bytes: usize,
    _map: MapData,
}

impl Table {
    /// How much the maps hold.
    pub const LIMITS: Limits =
        Limits { frontends: FRONTENDS_MAX, sets: SETS_MAX, slots: BACKENDS_MAX, set_backends: SET_BACKENDS_MAX };

    /// Opens the pinned maps for reading and writing.
    ///
    /// # Errors
    /// A map is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let error = |name: &str, error| TableError::Open(pins.object(name), error);
        let open = |name: &str| MapData::from_pin(pins.object(name)).map_err(|source| error(name, source));
        let typed = |name: &'static str| move |source| TableError::Open(pins.object(name), source);
        Ok(Self {
            frontends: HashMap::try_from(Map::HashMap(open("FRONTENDS")?)).map_err(typed("FRONTENDS"))?,
            sets: Mapped::new(pins, "SETS", SETS_MAX as usize * size_of::<SetWord>())?,
            backends: Mapped::new(pins, "BACKENDS", BACKENDS_MAX as usize * BACKEND_STRIDE_BYTES)?,
            barrier: ArrayOfMaps::try_from(Map::ArrayOfMaps(open("BARRIER")?)).map_err(typed("BARRIER"))?,
            barrier_inner: Array::create(1, 0).map_err(typed("BARRIER"))?,
        })
    }

    /// Reads the whole table back. What points outside the maps is left out: it is then written anew.
    ///
    /// # Errors
    /// `FRONTENDS` could not be read.
    pub fn read(&self) -> Result<KernelTable, TableError> {
        let mut table = KernelTable::default();
        for entry in self.frontends.iter() {
            let (key, set) = entry.map_err(TableError::Read)?;
            let Some(frontend) = frontend(&key) else { continue };
            table.frontends.insert(frontend, set);
            if let std::collections::hash_map::Entry::Vacant(vacant) = table.sets.entry(set)
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
            Op::WriteBackends { first_slot, backends } => self.write_backends(*first_slot, backends),
            Op::PublishSet { set, first_slot, count } => self.publish(*set, SetWord::new(*first_slot, *count)),
            Op::PutFrontend { frontend, set } => {
                self.frontends.insert(key(*frontend), set, 0).map_err(failed(frontend))
            }
            Op::DeleteFrontend { frontend } => match self.frontends.remove(&key(*frontend)) {
                Err(MapError::KeyNotFound) | Ok(()) => Ok(()),
                Err(error) => Err(failed(frontend)(error)),
            },
            Op::Drain => self.drain().map_err(failed(&"BARRIER")),
        }
    }

    /// Waits until every program that runs now has ended. The kernel does so after each update of a map of maps
    /// (kernel/bpf/syscall.c, `maybe_wait_bpf_programs`), on every number of CPUs; `membarrier(MEMBARRIER_CMD_GLOBAL)`
    /// does not wait where only one CPU is online (kernel/sched/membarrier.c).
    fn drain(&mut self) -> Result<(), MapError> {
        self.barrier.set(0, &self.barrier_inner, 0)
    }

    fn write_backends(&self, first_slot: u32, backends: &[Backend]) -> Result<(), TableError> {
        for (slot, backend) in (first_slot as usize..).zip(backends) {
            let out_of_range = || TableError::OutOfRange(format!("slot {slot}"));
            let target = self.backends.element::<BackendSlot>(slot, BACKEND_STRIDE_BYTES).ok_or_else(out_of_range)?;
            // SAFETY: in range and aligned; no set refers to this slot, so no program reads it.
            unsafe { target.write_volatile(slot_of(*backend)) };
        }
        Ok(())
    }

    fn publish(&self, set: u32, word: SetWord) -> Result<(), TableError> {
        let out_of_range = || TableError::OutOfRange(format!("set {set}"));
        self.word(set).ok_or_else(out_of_range)?.store(word.0, Ordering::Release);
        Ok(())
    }

    fn read_set(&self, set: u32) -> Option<KernelSet> {
        let word = SetWord(self.word(set)?.load(Ordering::Acquire));
        let slots = word.first_slot() as usize..word.first_slot() as usize + word.count() as usize;
        let backends = slots.map(|slot| {
            let source = self.backends.element::<BackendSlot>(slot, BACKEND_STRIDE_BYTES)?;
            // SAFETY: in range and aligned; a concurrent writer may tear a value, which only a reader without the
            // agent's lock can meet, and every bit pattern is valid.
            Some(backend(unsafe { source.read_volatile() }))
        });
        Some(KernelSet { first_slot: word.first_slot(), backends: backends.collect::<Option<_>>()? })
    }

    fn word(&self, set: u32) -> Option<&AtomicU64> {
        let word = self.sets.element::<u64>(set as usize, size_of::<SetWord>())?;
        // SAFETY: in range, aligned, alive as long as `self`; shared memory that both sides access as 64-bit words.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }
}

impl Mapped {
    fn new(pins: &PinDir, name: &str, size_bytes: usize) -> Result<Self, TableError> {
        let map = MapData::from_pin(pins.object(name)).map_err(|error| TableError::Open(pins.object(name), error))?;
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { mmap(std::ptr::null_mut(), size_bytes, flags, MapFlags::SHARED, map.fd().as_fd(), 0) };
        let address = address.map_err(|error| TableError::Mmap(pins.object(name), error.into()))?;
        let null = || TableError::Mmap(pins.object(name), io::Error::other("mapped at address 0"));
        Ok(Self { address: NonNull::new(address.cast()).ok_or_else(null)?, size_bytes, _map: map })
    }

    /// A pointer to an element, if it lies in the map.
    fn element<T>(&self, index: usize, stride_bytes: usize) -> Option<*mut T> {
        let offset_bytes = index.checked_mul(stride_bytes)?;
        let end_bytes = offset_bytes.checked_add(size_of::<T>())?;
        // SAFETY: within the mapping, as checked.
        (end_bytes <= self.size_bytes).then(|| unsafe { self.address.as_ptr().add(offset_bytes).cast() })
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
pub struct SocketMark(SkStorage<MapData, SocketState>);

impl SocketMark {
    /// Opens the pinned map.
    ///
    /// # Errors
    /// It is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let error = |error| TableError::Open(pins.object("SOCKETS"), error);
        let map = MapData::from_pin(pins.object("SOCKETS")).map_err(error)?;
        Ok(Self(SkStorage::try_from(Map::SkStorage(map)).map_err(error)?))
    }

    /// Marks a socket.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn mark(&mut self, socket: &impl std::os::fd::AsRawFd) -> io::Result<()> {
        self.0.insert(socket, SocketState { flags: SOCKET_UNTRANSLATED }, 0).map_err(io::Error::other)
    }
}

fn key(frontend: Frontend) -> FrontendKey {
    let protocol = match frontend.protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
    };
    FrontendKey { address: words(frontend.address), port: frontend.port.to_be(), protocol, zero: 0 }
}

/// `None` for a protocol that no agent of this layout writes.
fn frontend(key: &FrontendKey) -> Option<Frontend> {
    let protocol = match key.protocol {
        PROTOCOL_TCP => Protocol::Tcp,
        PROTOCOL_UDP => Protocol::Udp,
        _ => return None,
    };
    Some(Frontend { address: address(key.address), port: u16::from_be(key.port), protocol })
}

fn slot_of(backend: Backend) -> BackendSlot {
    BackendSlot { address: words(backend.address), port: backend.port.to_be(), zero: 0 }
}

fn backend(slot: BackendSlot) -> Backend {
    Backend { address: address(slot.address), port: u16::from_be(slot.port) }
}

/// Network-order words as the kernel has them in `user_ip6`.
fn words(address: Address) -> [u32; 4] {
    let octets = address.octets();
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(octets.as_chunks().0) {
        *word = u32::from_ne_bytes(*bytes);
    }
    words
}

fn address(words: [u32; 4]) -> Address {
    let mut octets = [0; 16];
    for (bytes, word) in octets.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_ne_bytes();
    }
    Address::from_octets(octets)
}

/// The kernel's table as rows without names, for commands that run without an agent.
#[must_use]
pub fn unnamed_rows(table: &KernelTable) -> StdHashMap<Frontend, Vec<Backend>> {
    let backends = |set: &u32| table.sets.get(set).map(|set| set.backends.clone()).unwrap_or_default();
    table.frontends.iter().map(|(&frontend, set)| (frontend, backends(set))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::parse_address;

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
        }
    }
}
