//! `TCP_OWNERS` as the agent uses it. Programs claim and free places at any time, so the agent changes one only by
//! compare-and-exchange.

use std::sync::atomic::{AtomicU64, Ordering};

use cproxy_core::TcpPlace;
use cproxy_ebpf::{TCP_PLACE_FREE, TCP_PLACES, TCP_WITHOUT_PLACE};

use super::{
    error::TableError,
    mapping::Mapping,
    open::{Access, open_map},
    pins::PinDir,
};

const NAME: &str = "TCP_OWNERS";

/// The places of TCP sockets that are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpPlacesUsage {
    /// Places that have an owner.
    pub taken: u32,
    /// Connects so far whose socket has found both its places taken.
    pub without_place: u64,
}

/// Owners of the places, in memory that the programs share.
#[derive(Debug)]
pub(super) struct TcpOwners {
    memory: Mapping,
    freed: u64,
}

impl TcpOwners {
    pub(super) fn open(pins: &PinDir) -> Result<Self, TableError> {
        let path = pins.object(NAME);
        let map = open_map(&path, Access::ReadWrite).map_err(|error| TableError::Open(path, error))?;
        // The mapping keeps the map.
        Ok(Self { memory: Mapping::new(&map, NAME, (TCP_PLACES as usize + 1) * size_of::<u64>())?, freed: 0 })
    }

    pub(super) fn usage(&self) -> TcpPlacesUsage {
        let owner = |place| self.owner(place).map_or(TCP_PLACE_FREE, |owner| owner.load(Ordering::Relaxed));
        let taken = (0..TCP_PLACES).filter(|&place| owner(place) != TCP_PLACE_FREE).count() as u32;
        TcpPlacesUsage { taken, without_place: owner(TCP_WITHOUT_PLACE) }
    }

    /// Number of places that were freed since the map was opened.
    pub(super) fn freed(&self) -> u64 {
        self.freed
    }

    /// Frees the places that still have these owners.
    pub(super) fn free(&mut self, places: &[TcpPlace]) -> Result<(), TableError> {
        for TcpPlace { place, owner } in places.iter().filter(|place| place.place < TCP_PLACES) {
            let found = self.owner(*place).ok_or_else(|| TableError::OutOfRange(format!("place {place}")))?;
            let is_freed = found.compare_exchange(*owner, TCP_PLACE_FREE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            self.freed += u64::from(is_freed);
        }
        Ok(())
    }

    fn owner(&self, place: u32) -> Option<&AtomicU64> {
        self.memory.word(place as usize * size_of::<u64>())
    }
}
