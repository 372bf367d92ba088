//! The table: store, planner and maps, and when it is written. The only writer of maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use cproxy_core::{
    Address, AddressRange, Capacity, Exclusions, Frontend, KernelTable, Limits, Op, Problem, ReceivePlanner,
    ReceivedPorts, Reserve, Retired, ServiceName, SetChange, Store, TablePlanner, TcpPlace,
};
use cproxy_datapath::{
    bpf::{KernelMaps, KernelReader, PinDir, PinLock, TableError, TcpPlacesUsage},
    canary::Route,
};
use tokio::time::Instant;

use super::{canary::Canary, readiness::Ready, seed::new_seed};
use crate::{
    canary::service_name,
    config::LoopSettings,
    mailbox::TcpPlaceDemand,
    state::{CanaryState, Untried},
};

/// Least time between attempts to read back and rewrite the table after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Time after which maps that are mostly empty are replaced by smaller ones.
const SPARSE_PAUSE: Duration = Duration::from_secs(10);
/// Pause before the next attempt to grow a map, after memory ran out.
const NO_MEMORY_PAUSE: Duration = Duration::from_secs(30);

/// Kind of the next write.
#[derive(Clone, Copy, Debug)]
pub(super) enum SyncState {
    /// Whole table, once the store is complete for the first time.
    FirstSync,
    /// Services that have changed, once the agent is ready.
    Incremental(Ready),
    /// Whole table, after reading back the kernel's content: a write has failed, or growth is allowed again after
    /// memory ran out.
    Resync { at: Instant },
}

/// Store, planner and maps.
pub(super) struct Table {
    pub(super) store: Store,
    pub(super) planner: TablePlanner,
    pins: PinDir,
    maps: KernelMaps,
    state: SyncState,
    /// Limits of the maps. After memory ran out they allow no growth until `grows_again_at`.
    limits: Limits,
    grows_again_at: Option<Instant>,
    /// Time at which maps that are mostly empty are replaced.
    compacts_at: Option<Instant>,
    canary: Canary,
    /// Exclusions in force.
    exclusions: Exclusions,
    /// Whether sockets may be connected through the table of an earlier agent.
    has_predecessor: bool,
    /// Plan of what the pod is to receive, if it is to receive anything.
    receive: Option<ReceivePlanner>,
    /// Raised when that changes.
    received_revision: u64,
}

/// Effect of a write.
pub(super) struct Written {
    /// Retired backends, to which sockets may still be connected.
    pub(super) retired: Retired,
    pub(super) changes: Vec<SetChange>,
    /// Ports that the pod is to receive, if they have changed.
    pub(super) received: Option<ReceivedPorts>,
    pub(super) is_first: bool,
    pub(super) is_whole: bool,
}

impl Table {
    /// Takes over the table in the kernel.
    pub(super) fn open(lock: &PinLock, store: Store, canary: Canary) -> Result<Self, TableError> {
        let pins = lock.pins().clone();
        let kernel = KernelTable { is_new: lock.is_empty(), ..KernelReader::read_table(&pins)? };
        let maps = KernelMaps::open(lock)?;
        let mut planner = TablePlanner::new(KernelMaps::LIMITS, kernel);
        planner.set_internal(canary.store());
        Ok(Self {
            store,
            planner,
            pins,
            maps,
            state: SyncState::FirstSync,
            limits: KernelMaps::LIMITS,
            grows_again_at: None,
            compacts_at: None,
            canary,
            exclusions: Exclusions::default(),
            has_predecessor: !lock.is_empty(),
            receive: None,
            received_revision: 0,
        })
    }

    /// Applies settings of the programs.
    pub(super) fn configure(&mut self, settings: &LoopSettings) -> Result<(), TableError> {
        let LoopSettings { exclusions, balance, .. } = settings;
        self.maps.apply(&[Op::SetExclusions(exclusions.clone()), Op::SetBalance(*balance)])?;
        self.exclusions.clone_from(exclusions);
        Ok(())
    }

    /// Writes the VM's addresses, to which datagram sockets are connected that are to be refused.
    pub(super) fn set_own_addresses(&mut self, addresses: Vec<Address>) -> Result<(), TableError> {
        self.maps.apply(&[Op::SetOwnAddresses(addresses)])
    }

    /// Writes a new seed.
    pub(super) fn reseed(&mut self) -> Result<(), TableError> {
        let seed = new_seed().map_err(|error| TableError::Seed(error.into()))?;
        self.maps.apply(&[Op::SetSeed(seed)])
    }

    pub(super) fn free_tcp_places(&mut self, places: Vec<TcpPlace>) -> Result<(), TableError> {
        self.maps.apply(&[Op::FreeTcpPlaces(places)])
    }

    /// Adds places for TCP sockets, or goes on with removing some, if that is due. Returns their use afterwards.
    pub(super) fn resize_tcp_places(&mut self, demand: TcpPlaceDemand) -> Result<TcpPlacesUsage, TableError> {
        if let Some(op) = resize_of_tcp_places(demand, self.maps.tcp_places()) {
            self.maps.apply(&[op])?;
        }
        Ok(self.maps.tcp_places())
    }

    /// Pins maps again whose pins were removed, and returns their names.
    pub(super) fn restore_pins(&mut self) -> Result<Vec<&'static str>, TableError> {
        self.maps.restore_pins(&self.pins)
    }

    /// Serves frontends of the bootstrap that the kernel does not have yet, until the first complete sync.
    pub(super) fn bootstrap(&mut self, bootstrap: &Store) -> Result<(), TableError> {
        let ops = self.planner.bootstrap(bootstrap);
        self.maps.apply(&ops)
    }

    /// Chooses other ports for the canary, where the present ones are in use.
    pub(super) fn move_canary(&mut self) {
        self.canary.choose_ports();
        self.planner.set_internal(self.canary.store());
    }

    /// Has the whole table read back and written anew, if it was written before. Returns whether it was.
    pub(super) fn rewrite(&mut self) -> bool {
        let is_written = matches!(self.state, SyncState::Incremental(_));
        if is_written {
            self.state = SyncState::Resync { at: Instant::now() };
        }
        is_written
    }

    /// Whether something may be written now.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        if self.grows_again_at.is_some_and(|at| at <= now) {
            // A full write also places what had no room.
            (self.limits, self.grows_again_at) = (KernelMaps::LIMITS, None);
            self.state = SyncState::Resync { at: now };
        }
        let is_waiting = matches!(self.state, SyncState::Resync { at } if now < at);
        self.store.is_complete() && !is_waiting
    }

    /// Whether the first lists are complete and not written yet.
    pub(super) fn is_first_complete(&self) -> bool {
        matches!(self.state, SyncState::FirstSync) && self.store.is_complete()
    }

    /// Time of the next action without an event.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let resync_at = match self.state {
            SyncState::Resync { at } => Some(at),
            SyncState::FirstSync | SyncState::Incremental(_) => None,
        };
        [resync_at, self.grows_again_at, self.compacts_at].into_iter().flatten().min()
    }

    /// Writes what is due to the kernel. After an error the next write reads the table back first.
    pub(super) fn write(&mut self, now: Instant) -> Result<Written, TableError> {
        let dirty = self.store.take_dirty();
        let received = self.plan_received(&dirty);
        let written = self.write_services(dirty).and_then(|()| self.compact(now));
        if let Err(error) = written {
            self.put_off(&error, now);
            return Err(error);
        }
        let retired = self.planner.take_retired();
        // After taking over or reading back a table it is unknown which backends have retired: all sockets are checked.
        let is_unknown = match self.state {
            SyncState::FirstSync => self.has_predecessor,
            SyncState::Incremental(_) => false,
            SyncState::Resync { .. } => true,
        };
        Ok(Written {
            retired: if is_unknown { Retired::any() } else { retired },
            changes: self.planner.take_changes(),
            received,
            is_first: matches!(self.state, SyncState::FirstSync),
            is_whole: !matches!(self.state, SyncState::Incremental(_)),
        })
    }

    /// From now on, Services are written as they change.
    pub(super) fn follow(&mut self, ready: Ready) {
        self.state = SyncState::Incremental(ready);
    }

    /// Plans what the pod is to receive, in ranges of addresses.
    pub(super) fn receive(&mut self, ranges: Vec<AddressRange>) {
        self.receive = Some(ReceivePlanner::new(ranges));
    }

    /// Ports that the pod is to receive, if they have changed, or are known for the first time.
    fn plan_received(&mut self, dirty: &BTreeSet<Arc<ServiceName>>) -> Option<ReceivedPorts> {
        let planner = self.receive.as_mut()?;
        let has_changed = match self.state {
            SyncState::Incremental(_) => planner.update(&self.store, dirty),
            SyncState::FirstSync | SyncState::Resync { .. } => planner.sync(&self.store),
        };
        self.received_revision += u64::from(has_changed);
        (has_changed || matches!(self.state, SyncState::FirstSync)).then(|| planner.received())
    }

    /// All problems that are there.
    pub(super) fn problems(&self) -> Vec<Problem> {
        self.store.problems().cloned().chain(self.plan_problems()).collect()
    }

    /// Problems of the plans.
    pub(super) fn plan_problems(&self) -> Vec<Problem> {
        let of_received = self.receive.iter().flat_map(ReceivePlanner::problems);
        self.planner.problems().into_iter().chain(of_received).collect()
    }

    /// Number that differs after [`Self::plan_problems`] may have changed.
    pub(super) fn problems_revision(&self) -> (u64, u64) {
        (self.planner.problems_revision(), self.received_revision)
    }

    fn write_services(&mut self, dirty: BTreeSet<Arc<ServiceName>>) -> Result<(), TableError> {
        if let SyncState::Resync { .. } = self.state {
            self.planner = TablePlanner::new(self.limits, KernelReader::read_table(&self.pins)?);
            self.planner.set_internal(self.canary.store());
        }
        // After an error nothing more is written.
        let (maps, mut outcome) = (&mut self.maps, Ok(()));
        let mut write = |ops: Vec<Op>| {
            tracing::debug!("writing {} operations", ops.len());
            if outcome.is_ok() {
                outcome = maps.apply(&ops);
            }
        };
        match self.state {
            SyncState::Incremental(_) => self.planner.update_by(&self.store, dirty, &mut write),
            SyncState::FirstSync | SyncState::Resync { .. } => self.planner.sync_by(&self.store, &mut write),
        }
        outcome?;
        if !matches!(self.state, SyncState::Incremental(_)) {
            // The agent, or an earlier one, may have failed to raise the epoch after its last write.
            self.maps.apply(&[Op::RaiseEpoch])?;
        }
        Ok(())
    }

    /// Replaces maps that are mostly empty by smaller ones, after [`SPARSE_PAUSE`]. The planner decides again then, as
    /// they may have filled up meanwhile.
    fn compact(&mut self, now: Instant) -> Result<(), TableError> {
        match self.compacts_at {
            Some(at) if at > now => {}
            Some(_) => {
                self.compacts_at = None;
                self.maps.apply(&self.planner.compact())?;
            }
            None => self.compacts_at = self.planner.is_sparse().then(|| now + SPARSE_PAUSE),
        }
        Ok(())
    }

    /// Decides when a write that has failed is done again.
    fn put_off(&mut self, error: &TableError, now: Instant) {
        if !matches!(error, TableError::NoMemory { .. }) {
            tracing::error!(
                name: "table_failed",
                "{error}; the table is read back and written anew in {RETRY_PAUSE:?}"
            );
            self.state = SyncState::Resync { at: now + RETRY_PAUSE };
            return;
        }
        tracing::error!(
            name: "no_memory",
            "{error}; what does not fit is not served, or keeps its last backends; the maps grow again in \
             {NO_MEMORY_PAUSE:?} at the earliest"
        );
        let Capacity { frontends, sets, slots } = self.maps.capacity();
        // Limits do not count the set for unknown ports. The maps cannot grow, so a reserve would take room that is in
        // use.
        let (sets, reserved) = (sets.saturating_sub(1), Reserve::default());
        self.limits = Limits { frontends, sets, slots, reserved, may_replace: false, ..self.limits };
        self.grows_again_at = Some(now + NO_MEMORY_PAUSE);
        self.state = SyncState::Resync { at: now };
    }

    /// Kind of the next write.
    pub(super) fn sync_state(&self) -> SyncState {
        self.state
    }

    /// Limits of the maps.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Room in the maps.
    pub(super) fn capacity(&self) -> Capacity {
        self.maps.capacity()
    }

    /// Use of the places of TCP sockets, and the number of those that were freed.
    pub(super) fn tcp_places(&self) -> (TcpPlacesUsage, u64) {
        (self.maps.tcp_places(), self.maps.tcp_places_freed())
    }

    /// State of the canary, as the task that walks it needs it.
    pub(super) fn canary_state(&self) -> CanaryState {
        let has_table = !matches!(self.state, SyncState::FirstSync);
        CanaryState {
            routes: has_table.then(|| self.canary_routes()),
            untried: untried(&self.canary, &self.planner),
            exclusions: self.exclusions.clone(),
        }
    }

    /// Routes of the canary that the kernel's table has.
    fn canary_routes(&self) -> Vec<Route> {
        let name = service_name();
        let is_there = |route: &Route| self.planner.service_of(frontend(route)) == Some(&name);
        self.canary.routes().into_iter().filter(is_there).collect()
    }

    /// Addresses that the kernel's table serves, without those of this canary.
    pub(super) fn serving_addresses(&self) -> BTreeSet<Address> {
        let mut serving = self.planner.serving_addresses();
        for route in self.canary.routes() {
            serving.remove(&frontend(&route).address);
        }
        serving
    }
}

/// Places are added when a socket has found none while the owners of a quarter of them live: with fewer, that happens
/// to few sockets. The last level is removed when an eighth of the other places is enough for all owners.
fn resize_of_tcp_places(demand: TcpPlaceDemand, usage: TcpPlacesUsage) -> Option<Op> {
    let fits_below = usage.taken <= usage.smaller_room() / 8;
    match demand {
        // Those that lived may have gone since.
        TcpPlaceDemand::More { living } if living.min(usage.taken) >= usage.room() / 4 => Some(Op::GrowTcpPlaces),
        TcpPlaceDemand::None if usage.further_levels > 0 && (usage.is_shrinking || fits_below) => {
            Some(Op::ShrinkTcpPlaces)
        }
        TcpPlaceDemand::More { .. } | TcpPlaceDemand::None => None,
    }
}

fn frontend(route: &Route) -> Frontend {
    Frontend { address: route.frontend.ip().into(), port: route.frontend.port(), protocol: route.protocol }
}

/// Addresses of the canary without routes: those of families that the machine does not have, and those that are not in
/// force.
fn untried(canary: &Canary, planner: &TablePlanner) -> Vec<Untried> {
    let absent = canary.absent().iter().map(|address| Untried {
        reason: format!("{}: the loopback device has no such address", address.family()),
        is_absent: true,
    });
    let (name, mut lost) = (service_name(), BTreeMap::new());
    for route in canary.routes() {
        let frontend = frontend(&route);
        let address = frontend.address;
        let why = match planner.service_of(frontend) {
            Some(owner) if *owner == name => continue,
            Some(owner) => format!("{frontend} belongs to Service {owner}; choose another by --canary-address"),
            None => format!("there is no room for {frontend}"),
        };
        lost.entry(address).or_insert(Untried { reason: format!("{}: {why}", address.family()), is_absent: false });
    }
    absent.chain(lost.into_values()).collect()
}

#[cfg(test)]
mod tests {
    use cproxy_datapath::TCP_PLACES;

    use super::*;

    fn usage(taken: u32, further_levels: u32, is_shrinking: bool) -> TcpPlacesUsage {
        TcpPlacesUsage { taken, further_levels, is_shrinking, ..TcpPlacesUsage::default() }
    }

    #[test]
    fn places_are_added_while_many_live_and_removed_when_few_are_left() {
        let more = |living, usage| resize_of_tcp_places(TcpPlaceDemand::More { living }, usage);
        let none = |usage| resize_of_tcp_places(TcpPlaceDemand::None, usage);
        let quarter = TCP_PLACES / 4;
        assert_eq!(more(quarter - 1, usage(TCP_PLACES, 0, false)), None, "the others have gone");
        assert_eq!(more(quarter, usage(TCP_PLACES, 0, false)), Some(Op::GrowTcpPlaces));
        assert_eq!(more(quarter, usage(quarter - 1, 0, false)), None, "they have gone since");
        assert_eq!(more(quarter * 9 - 1, usage(TCP_PLACES * 9, 1, false)), None);
        assert_eq!(more(quarter * 9, usage(TCP_PLACES * 9, 1, false)), Some(Op::GrowTcpPlaces));
        assert_eq!(more(quarter, usage(TCP_PLACES, 1, true)), Some(Op::GrowTcpPlaces), "the level that goes stays");
        assert_eq!(none(usage(0, 0, false)), None, "there is none to remove");
        assert_eq!(none(usage(TCP_PLACES / 8 + 1, 1, false)), None);
        assert_eq!(none(usage(TCP_PLACES / 8, 1, false)), Some(Op::ShrinkTcpPlaces));
        assert_eq!(none(usage(TCP_PLACES * 9 / 8, 2, false)), Some(Op::ShrinkTcpPlaces));
        assert_eq!(none(usage(TCP_PLACES, 1, true)), Some(Op::ShrinkTcpPlaces), "it has begun");
    }
}
