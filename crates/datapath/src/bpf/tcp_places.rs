//! The places of TCP sockets as the agent uses them. Programs claim and free places at any time, so the agent changes
//! an owner only by compare-and-exchange.

use std::{
    iter,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::{Array, Map, MapData, MapError};
use cproxy_core::TcpPlace;
use cproxy_ebpf::{
    TCP_LEVELS_MORE, TCP_PLACE_CLOSED, TCP_PLACE_FREE, TCP_PLACES, TCP_WITHOUT_PLACE, TcpPlaceId, Translation,
    tcp_level_places,
};

use super::{
    error::TableError,
    map_spec::TCP_LEVELS,
    mapping::Mapping,
    open::{Access, open_map},
    pins::PinDir,
    tcp_levels::{LevelMaps, Levels},
    tcp_move::{self, Move, Places, all_places},
};

const OWNERS: &str = "TCP_OWNERS";
const PEERS: &str = "TCP_PEERS";

/// Most peers that are moved at once: that takes a few milliseconds.
const MOVES_MAX: usize = 1_024;

/// Places in all levels that there can be.
pub const TCP_PLACES_MAX: u32 = {
    let (mut sum, mut level) = (0, 0);
    while level <= TCP_LEVELS_MORE {
        sum += tcp_level_places(level);
        level += 1;
    }
    sum
};

/// The places of TCP sockets that are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpPlacesUsage {
    /// Places that have an owner.
    pub taken: u32,
    /// Those of them in the last level.
    pub taken_in_last: u32,
    /// Connects so far whose socket has found no place.
    pub without_place: u64,
    /// Levels beyond the first one.
    pub further_levels: u32,
    /// Whether the last level is to go.
    pub is_shrinking: bool,
}

impl TcpPlacesUsage {
    /// Number of all places in the levels that stay.
    #[must_use]
    pub fn room(&self) -> u32 {
        places_below(self.further_levels + u32::from(!self.is_shrinking))
    }

    /// Number of places without the last level.
    #[must_use]
    pub fn smaller_room(&self) -> u32 {
        places_below(self.further_levels)
    }
}

/// Places in the levels below this one.
fn places_below(level: u32) -> u32 {
    (0..level).map(tcp_level_places).sum()
}

/// The levels of places.
pub(super) struct TcpPlaces {
    /// Owners of the first level, in memory that the programs share.
    owners: Mapping,
    peers: Array<MapData, Translation>,
    levels: Levels,
    further: Vec<FurtherLevel>,
    freed: u64,
}

struct FurtherLevel {
    maps: LevelMaps,
    /// Its owners, in memory that the programs share.
    owners: Mapping,
}

impl FurtherLevel {
    fn new(maps: LevelMaps) -> Result<Self, TableError> {
        let size_bytes = tcp_level_places(maps.spec.level) as usize * size_of::<u64>();
        Ok(Self { owners: Mapping::new(&maps.owners, maps.spec.pins[0], size_bytes)?, maps })
    }

    fn level(&self) -> u32 {
        self.maps.spec.level
    }

    /// Whether free places are closed, at least some of them.
    fn is_closed(&self) -> bool {
        count(&self.owners, |owner| owner == TCP_PLACE_CLOSED) > 0
    }

    /// Whether no socket has a place, and none can claim one.
    fn is_all_closed(&self) -> bool {
        count(&self.owners, |owner| owner != TCP_PLACE_CLOSED) == 0
    }

    /// Replaces each owner `from` by `to`; neither is a socket's.
    fn replace_owners(&self, from: u64, to: u64) {
        for owner in self.owners.words().iter().filter(|owner| owner.load(Ordering::Relaxed) == from) {
            owner.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).ok();
        }
    }
}

fn word(owners: &Mapping, index: u32) -> Option<&AtomicU64> {
    owners.word(index as usize * size_of::<u64>())
}

/// Number of words that fulfil `is_it`.
fn count(owners: &Mapping, is_it: impl Fn(u64) -> bool) -> u32 {
    owners.words().iter().filter(|owner| is_it(owner.load(Ordering::Relaxed))).count() as u32
}

/// Use of one level.
#[derive(Default)]
struct LevelUsage {
    taken: u32,
    closed: u32,
}

impl LevelUsage {
    /// Reads each owner once: the agent asks whenever it is awake.
    fn of(owners: &[AtomicU64]) -> Self {
        owners.iter().fold(Self::default(), |mut usage, owner| {
            match owner.load(Ordering::Relaxed) {
                TCP_PLACE_FREE => {}
                TCP_PLACE_CLOSED => usage.closed += 1,
                _ => usage.taken += 1,
            }
            usage
        })
    }
}

impl TcpPlaces {
    /// Opens all levels, and ends what an agent that was killed has begun.
    pub(super) fn open(pins: &PinDir) -> Result<Self, TableError> {
        let open = |name| {
            let path = pins.object(name);
            open_map(&path, Access::ReadWrite).map_err(|error| TableError::Open(path, error))
        };
        let levels = Levels::open(pins, Access::ReadWrite)?;
        let places = Self {
            // The mapping keeps the map.
            owners: Mapping::new(&open(OWNERS)?, OWNERS, (TCP_PLACES as usize + 1) * size_of::<u64>())?,
            peers: typed_peers(open(PEERS)?)?,
            further: levels.take_over()?.into_iter().map(FurtherLevel::new).collect::<Result<_, _>>()?,
            levels,
            freed: 0,
        };
        tcp_move::resume(&places, places.further.len() as u32);
        Ok(places)
    }

    pub(super) fn usage(&self) -> TcpPlacesUsage {
        let without_place = word(&self.owners, TCP_WITHOUT_PLACE).map_or(0, |count| count.load(Ordering::Relaxed));
        // Behind the places of the first level is that counter.
        let first = self.owners.words().get(..TCP_PLACES as usize).unwrap_or_default();
        let mut usage = TcpPlacesUsage { without_place, ..TcpPlacesUsage::default() };
        for owners in iter::once(first).chain(self.further.iter().map(|level| level.owners.words())) {
            let LevelUsage { taken, closed } = LevelUsage::of(owners);
            (usage.taken_in_last, usage.is_shrinking) = (taken, closed > 0);
            usage.taken += taken;
        }
        usage.further_levels = self.further.len() as u32;
        usage
    }

    /// Number of places that were freed since the maps were opened.
    pub(super) fn freed(&self) -> u64 {
        self.freed
    }

    /// Frees the places that still have these owners.
    pub(super) fn free(&mut self, places: &[TcpPlace]) {
        let is_freed = |place: &&TcpPlace| self.exchange(TcpPlaceId(place.place), place.owner, TCP_PLACE_FREE);
        let freed = places.iter().filter(is_freed).count();
        self.freed += freed as u64;
    }

    /// Adds a level, or opens the last one again. Does nothing if all levels exist.
    pub(super) fn grow(&mut self, wait_for_programs: impl Fn() -> Result<(), TableError>) -> Result<(), TableError> {
        if let Some(last) = self.further.last().filter(|last| last.is_closed()) {
            // A program may still read a peer that was moved: nobody writes in its place before that has ended.
            wait_for_programs()?;
            last.replace_owners(TCP_PLACE_CLOSED, TCP_PLACE_FREE);
            return Ok(());
        }
        let Some(spec) = TCP_LEVELS.get(self.further.len()) else { return Ok(()) };
        let level = FurtherLevel::new(self.levels.create(*spec)?)?;
        self.levels.put(&level.maps)?;
        self.further.push(level);
        Ok(())
    }

    /// Closes the last level, moves peers out of it, and removes it once it has none. `wait_for_programs` returns when
    /// all programs have ended that ran when it was called.
    pub(super) fn shrink(&mut self, wait_for_programs: impl Fn() -> Result<(), TableError>) -> Result<(), TableError> {
        let Some(last) = self.further.last() else { return Ok(()) };
        let (level, spec) = (last.level(), last.maps.spec);
        // Those that programs have freed since the last time, too.
        last.replace_owners(TCP_PLACE_FREE, TCP_PLACE_CLOSED);
        let moves: Vec<Move> =
            all_places(level).filter_map(|place| tcp_move::begin(self, place)).take(MOVES_MAX).collect();
        if !moves.is_empty() {
            let copied = self.copy(&moves, &wait_for_programs);
            let end = if copied.is_ok() { tcp_move::commit } else { tcp_move::cancel };
            moves.into_iter().for_each(|of| end(self, of));
            copied?;
        }
        if self.further.last().is_some_and(FurtherLevel::is_all_closed) {
            // A program that has looked for a peer below before it was moved has ended.
            wait_for_programs()?;
            self.levels.remove(spec)?;
            self.further.pop();
        }
        Ok(())
    }

    fn copy(
        &mut self,
        moves: &[Move],
        wait_for_programs: impl Fn() -> Result<(), TableError>,
    ) -> Result<(), TableError> {
        wait_for_programs()?;
        moves.iter().try_for_each(|of| tcp_move::copy(self, *of))?;
        wait_for_programs()
    }

    /// Pins levels again that have lost their pins, and returns whether there were any.
    pub(super) fn restore_pins(&self) -> Result<bool, TableError> {
        self.further.iter().try_fold(false, |any, level| Ok(any | self.levels.restore_pins(&level.maps)?))
    }

    /// Frees all places of the further levels, in the maps that are pinned.
    pub(super) fn free_further(pins: &PinDir) -> Result<(), TableError> {
        for maps in Levels::open(pins, Access::ReadWrite)?.take_over()? {
            let level = FurtherLevel::new(maps)?;
            level.owners.words().iter().for_each(|owner| owner.store(TCP_PLACE_FREE, Ordering::Release));
        }
        Ok(())
    }

    fn owner_word(&self, place: TcpPlaceId) -> Option<&AtomicU64> {
        let owners = match place.level().checked_sub(1) {
            None => &self.owners,
            Some(further) => &self.further.get(further as usize)?.owners,
        };
        // Behind the places of the first level is a counter.
        (place.index() < tcp_level_places(place.level())).then(|| word(owners, place.index())).flatten()
    }

    fn peers(&mut self, level: u32) -> Option<&mut Array<MapData, Translation>> {
        match level.checked_sub(1) {
            None => Some(&mut self.peers),
            Some(further) => self.further.get_mut(further as usize).map(|level| &mut level.maps.peers),
        }
    }
}

impl Places for TcpPlaces {
    fn owner(&self, place: TcpPlaceId) -> u64 {
        self.owner_word(place).map_or(TCP_PLACE_FREE, |owner| owner.load(Ordering::Acquire))
    }

    fn exchange(&self, place: TcpPlaceId, from: u64, to: u64) -> bool {
        let exchanged = |owner: &AtomicU64| owner.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed);
        self.owner_word(place).is_some_and(|owner| exchanged(owner).is_ok())
    }

    fn copy_peer(&mut self, from: TcpPlaceId, to: TcpPlaceId) -> Result<(), TableError> {
        let missing = || TableError::OutOfRange(format!("level {}", from.level().max(to.level())));
        let peer = self.peers(from.level()).ok_or_else(missing)?.get(&from.index(), 0);
        let peer = peer.map_err(|error| TableError::Read(PEERS, error))?;
        let failed = |error: MapError| TableError::Write(PEERS.to_owned(), error);
        self.peers(to.level()).ok_or_else(missing)?.set(to.index(), peer, 0).map_err(failed)
    }
}

fn typed_peers(map: MapData) -> Result<Array<MapData, Translation>, TableError> {
    Array::try_from(Map::Array(map)).map_err(|error| TableError::Read(PEERS, error))
}
