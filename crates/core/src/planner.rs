//! Desired rows to ordered map writes.
//!
//! A set of backends is published by one atomic store: its backends go into slots that no program reads, then the set's
//! word points at them. A frontend keeps its set's id for as long as the Service port lives. The order of [`Op`]s is
//! part of the model: after each of them, every lookup finds a set that was complete at some moment, or nothing.
//!
//! Two things may be used again only after a grace period ([`Op::Drain`]), because a program may have read a pointer to
//! them a moment before: backend slots and set ids, and (inside the kernel) the memory of a deleted or replaced element
//! of `FRONTENDS`, which the next insertion may take. Drains are made as late as possible: a change of endpoints needs
//! none until slots run out.

mod capacity;
mod changes;
mod claims;
mod cluster_ips;
mod desired_service;
mod frontends;
mod loss;
mod packed_set;
mod placement;
mod problems;
mod publication;
mod set_key;
mod sets;
mod starved;
mod write_order;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

pub use changes::{CHANGES_MAX, SetChange};
use claims::{ClaimChanges, Claims};
use cluster_ips::ClusterIps;
use desired_service::DesiredService;
use frontends::{Claim, Frontends};
pub use loss::Loss;
use problems::Problems;
use set_key::BackendSetKey;
use sets::{BackendSet, BackendSets};
use starved::{Shortage, StarvedServices};
use write_order::{FilterCounts, WriteOrder};

use super::{
    Action, Address, Affinity, Frontend, FrontendSource, KernelTable, Limits, Op, Problem, Retired, Row, ServiceName,
    Store,
};

/// Services whose desired state is kept until it is written; of more at once, it is computed twice.
const DESIRED_KEPT_MAX: usize = 64;
/// Operations that are written together.
const OPS_AT_ONCE: usize = 256;
/// Maximum number of rounds of one update. Each after the first retries Services with room that the one before has
/// freed, which mostly ends after one or two; the bound keeps the events that wait meanwhile from waiting long.
const ROUNDS_MAX: usize = 9;

/// Planner of the writes that make the kernel's table equal to the store.
///
/// A batch has three steps: the claims of its Services change, their sets are published, and the frontends that the
/// difference has touched are placed.
#[derive(Debug)]
pub struct TablePlanner {
    limits: Limits,
    phase: Phase,
    claims: Claims,
    sets: BackendSets,
    order: WriteOrder,
    /// See [`KernelTable::is_damaged`].
    is_damaged: bool,
    /// Frontends and addresses that the map has room for.
    frontends_capacity: u32,
    starved: StarvedServices,
    problems: Problems,
    /// Backends retired since [`TablePlanner::take_retired`] was called last.
    retired: Retired,
    /// Changes of sets since [`TablePlanner::take_changes`] was called last, [`CHANGES_MAX`] at most.
    changes: Vec<SetChange>,
    /// Services of the agent itself. No source has them, and their names are none of objects.
    internal: Arc<Store>,
    /// Services of `internal` that have changed since the last write.
    internal_dirty: BTreeSet<Arc<ServiceName>>,
}

/// Origin of the claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A bootstrap: no other port of a ClusterIP is refused, and nothing is removed.
    Bootstrap,
    /// A complete store.
    Synced,
}

/// Namespace and name of the API server's Service, on which everything in the cluster depends.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

fn api_server() -> ServiceName {
    ServiceName::new(API_SERVER.0, API_SERVER.1)
}

/// Whether the Service is the API server's.
fn is_protected(service: &ServiceName) -> bool {
    (&*service.namespace, &*service.name) == API_SERVER
}

/// Frontend in force, with the facts that the kernel does not store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontendName<'a> {
    /// Address, port and protocol that clients connect to.
    pub frontend: Frontend,
    /// Service of the frontend.
    pub service: &'a ServiceName,
    /// Name of the Service's port.
    pub port_name: &'a str,
    /// Origin of the frontend's address.
    pub source: FrontendSource,
    /// Result of a new connection.
    pub action: Action,
}

impl TablePlanner {
    /// Takes over the kernel's content; empty on a fresh start.
    #[must_use]
    pub fn new(limits: Limits, kernel: KernelTable) -> Self {
        let KernelTable { mut frontends, addresses, mut sets, filter, capacity, is_new, is_damaged } = kernel;
        // Set 0 belongs to keys without a port, not to a Service. A set outside the map counts as set 0, and a frontend
        // with set 0 gets a set of its own.
        sets.remove(&0);
        frontends.values_mut().filter(|set| **set >= capacity.sets).for_each(|set| *set = 0);
        let mut filter = FilterCounts::new(limits.filter_bit, filter);
        frontends.keys().map(|frontend| frontend.address).chain(addresses.iter().copied()).for_each(|a| filter.add(a));
        let frontends = Frontends::from_kernel(frontends);
        Self {
            limits,
            phase: Phase::Bootstrap,
            sets: BackendSets::from_kernel(sets, &frontends, capacity),
            claims: Claims::new(frontends, ClusterIps::from_kernel(addresses)),
            order: WriteOrder::new(filter, is_new),
            is_damaged,
            frontends_capacity: capacity.frontends,
            starved: StarvedServices::default(),
            problems: Problems::default(),
            retired: Retired::default(),
            changes: Vec::new(),
            internal: Arc::default(),
            internal_dirty: BTreeSet::new(),
        }
    }

    /// Also writes the Services of this complete store, which are the agent's own, from the next sync or update on.
    /// Counts, names and changes are without them. Their names must be none that objects can have.
    pub fn set_internal(&mut self, internal: Store) {
        self.internal_dirty.extend(self.internal.service_names().chain(internal.service_names()).cloned());
        self.internal = Arc::new(internal);
    }

    /// Serves the frontends of `bootstrap` that the kernel does not have yet; changes nothing else.
    pub fn bootstrap(&mut self, bootstrap: &Store) -> Vec<Op> {
        let names = bootstrap.service_names().cloned().collect();
        collected(|write| self.plan_batch(&names, &|name| DesiredService::missing(bootstrap, name), Batch::new(write)))
    }

    /// Makes the whole table equal the store: after the first complete sync, and whenever the kernel's content is in
    /// doubt. Removes frontends and addresses that no Service claims.
    pub fn sync(&mut self, store: &Store) -> Vec<Op> {
        collected(|write| self.sync_by(store, write))
    }

    /// As [`TablePlanner::sync`], in small portions: all operations at once would be a second table in memory.
    pub fn sync_by(&mut self, store: &Store, write: Write<'_>) {
        let internal = self.internal.clone();
        let all = self.claims.services().chain(store.service_names()).chain(internal.service_names());
        let names = super::sorted_set(all.cloned());
        let mut batch = Batch { is_whole: true, ..Batch::new(&mut *write) };
        if self.phase == Phase::Bootstrap {
            self.grow_for(store, &mut batch);
        }
        self.phase = Phase::Synced;
        self.plan_batch(&names, &|name| DesiredService::new(store_of(name, store, &internal), name), batch);
        self.sets.refill();
        self.update_by(store, BTreeSet::new(), write);
    }

    /// Follows changes of some Services, and retries those that did not fit as long as that frees room.
    pub fn update(&mut self, store: &Store, dirty: BTreeSet<Arc<ServiceName>>) -> Vec<Op> {
        collected(|write| self.update_by(store, dirty, write))
    }

    /// As [`TablePlanner::update`], in small portions.
    pub fn update_by(&mut self, store: &Store, dirty: BTreeSet<Arc<ServiceName>>, write: Write<'_>) {
        let mut names = dirty;
        names.append(&mut self.internal_dirty);
        let internal = self.internal.clone();
        for _ in 0..ROUNDS_MAX {
            names.append(&mut self.starved.retriable());
            let mut has_written = false;
            let mut write = |ops| {
                has_written = true;
                write(ops);
            };
            let desired = |name: &ServiceName| DesiredService::new(store_of(name, store, &internal), name);
            self.plan_batch(&names, &desired, Batch::new(&mut write));
            // Only a write frees room.
            if !has_written {
                break;
            }
            names.clear();
        }
    }

    /// The agent's own Services.
    #[must_use]
    pub fn internal(&self) -> &Store {
        &self.internal
    }

    /// The store that has a Service: that of the agent's own, or that of the source.
    #[must_use]
    pub fn store_of<'a>(&'a self, service: &ServiceName, store: &'a Store) -> &'a Store {
        store_of(service, store, &self.internal)
    }

    /// Rows of the table in force, sorted by frontend.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        self.each_row().collect()
    }

    /// Rows of the table in force, one at a time.
    pub fn each_row(&self) -> impl Iterator<Item = Row> {
        self.claims.frontends.each_written_with_claims().filter_map(|(frontend, claims)| self.row(frontend, claims))
    }

    /// Frontends in force with the facts that the kernel does not store, without their backends.
    pub fn each_name(&self) -> impl Iterator<Item = FrontendName<'_>> {
        self.each_name_of_all().filter(|name| !self.is_internal(name.service))
    }

    /// The same for the agent's own Services.
    pub fn each_internal_name(&self) -> impl Iterator<Item = FrontendName<'_>> {
        self.each_name_of_all().filter(|name| self.is_internal(name.service))
    }

    fn is_internal(&self, service: &ServiceName) -> bool {
        self.internal.service_row(service).is_some()
    }

    fn each_name_of_all(&self) -> impl Iterator<Item = FrontendName<'_>> {
        self.claims.frontends.each_written_with_claims().filter_map(|(frontend, claims)| {
            let (claim, set) = self.in_force(frontend, claims)?;
            let action = Action::of(set.members.eligible() != 0, set.members.drops());
            let (service, port_name) = (&*claim.service, &*claim.port_name);
            Some(FrontendName { frontend, service, port_name, source: claim.source, action })
        })
    }

    /// Service that a frontend in the kernel leads to.
    #[must_use]
    pub fn service_of(&self, frontend: Frontend) -> Option<&ServiceName> {
        self.claims.frontends.set(frontend)?;
        let (claim, _) = self.in_force(frontend, self.claims.frontends.claims(frontend))?;
        Some(&claim.service)
    }

    /// Number of frontends in the kernel, without those of the agent's own Services.
    #[must_use]
    pub fn frontend_count(&self) -> usize {
        let internal = self.internal.service_names().flat_map(|service| self.claims.frontends_of(service));
        let internal = internal.filter(|frontend| self.service_of(*frontend).is_some_and(|of| self.is_internal(of)));
        self.claims.frontends.written() - internal.count()
    }

    /// Frontends without room, sets that were refused, and claims lost to other Services: one problem for each Service
    /// and reason.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let unplaced = self.claims.cluster_ips.unplaced.values();
        self.problems.iter().chain(unplaced).cloned().chain(self.claims.conflicts()).collect()
    }

    /// Revision of [`TablePlanner::problems`]: they change only if it does.
    #[must_use]
    pub fn problems_revision(&self) -> u64 {
        self.problems.revision + self.claims.revision
    }

    /// Retired backends since the last call: those that have left a set altogether, and those of frontends that were
    /// deleted or given another set. Sockets may still be connected to them.
    pub fn take_retired(&mut self) -> Retired {
        std::mem::take(&mut self.retired)
    }

    /// Changes of sets since the last call: the first [`CHANGES_MAX`].
    pub fn take_changes(&mut self) -> Vec<SetChange> {
        let mut changes = std::mem::take(&mut self.changes);
        changes.retain(|change| !self.is_internal(&change.service));
        changes
    }

    fn row(&self, frontend: Frontend, claims: &[Claim]) -> Option<Row> {
        let (claim, set) = self.in_force(frontend, claims)?;
        let members = set.members.unpack();
        Some(Row {
            frontend,
            service: (*claim.service).clone(),
            port_name: (*claim.port_name).into(),
            source: claim.source,
            scope: claim.scope,
            action: Action::of(members.eligible != 0, members.drops),
            session_affinity_seconds: set.affinity.seconds(),
            members,
        })
    }

    /// Claim that serves the frontend, and its set.
    fn in_force<'a>(&'a self, frontend: Frontend, claims: &'a [Claim]) -> Option<(&'a Claim, &'a BackendSet)> {
        self.claims
            .that_count(frontend.address, claims)
            .iter()
            .find_map(|claim| Some((claim, self.sets.get(&claim.key(frontend))?)))
    }

    /// Applies all claims first, since the owner of a frontend decides which sets may be taken over; then publishes
    /// each set at once; then places frontends.
    fn plan_batch<'s>(
        &mut self,
        names: &BTreeSet<Arc<ServiceName>>,
        desired: &dyn Fn(&ServiceName) -> DesiredService<'s>,
        mut batch: Batch<'_>,
    ) {
        if std::mem::take(&mut self.is_damaged) {
            self.mend(&mut batch);
        }
        batch.ops.extend(self.order.filter.widen().map(Op::SetFilter));
        // The API server's Service gets backend slots first if there is not room for all.
        let (first, others): (Vec<_>, Vec<_>) = names.iter().partition(|name| is_protected(name));
        let names = [first, others].concat();
        let mut kept = Vec::new();
        for &name in &names {
            let service = desired(name);
            self.starved.remove(name);
            batch.add(self.claims.replace(name, &service));
            if names.len() <= DESIRED_KEPT_MAX {
                kept.push((name, service));
            }
        }
        if batch.is_whole {
            // The nodes that this frees have room for the sets.
            self.claims.refill();
        }
        if kept.is_empty() {
            for (index, name) in names.into_iter().enumerate() {
                self.publish_sets(name, desired(name), &mut batch);
                // The nodes that this frees have room for the next sets.
                if index.is_power_of_two() && batch.is_whole {
                    self.sets.refill();
                }
            }
        }
        for (name, service) in kept {
            self.publish_sets(name, service, &mut batch);
        }
        if batch.is_whole {
            batch.frontends = self.claims.frontends.each().collect();
            batch.cluster_ips = self.claims.cluster_ips.addresses().collect();
        }
        self.place_frontends(&mut batch);
        self.free_sets(&batch);
        batch.ops.extend(self.order.filter.narrow().map(Op::SetFilter));
        self.flush(&mut batch, 1);
    }

    /// Empties the set of unknown ports, and removes keys that no agent writes: they take room, or lead calls astray.
    fn mend(&mut self, batch: &mut Batch<'_>) {
        let affinity = Affinity::default();
        batch.ops.push(Op::PublishSet { set: 0, first_slot: 0, eligible: 0, serving: 0, drops: false });
        batch.ops.push(Op::SetAffinity { set: 0, affinity });
        if self.limits.may_replace {
            self.replace_frontends(self.frontends_capacity, batch);
        }
    }

    fn free_sets(&mut self, batch: &Batch<'_>) {
        let mut is_freed = false;
        for key in batch.gone.keys() {
            is_freed |= self.sets.free(key);
        }
        if batch.is_whole {
            is_freed |= self.sets.free_orphans();
        }
        if is_freed {
            self.starved.free(Shortage::Backends);
        }
    }

    /// Writes the pending operations if there are `least` or more.
    fn flush(&mut self, batch: &mut Batch<'_>, least: usize) {
        if batch.ops.len() < least {
            return;
        }
        if let Some(first) = self.order.begin() {
            batch.ops.insert(0, first);
        }
        (batch.write)(std::mem::take(&mut batch.ops));
    }

    /// Waits for a grace period, after which freed slots and ids are free for use.
    fn drain(&mut self, batch: &mut Batch<'_>) {
        batch.ops.push(Op::Drain);
        self.drained();
    }

    /// Frees slots and ids after the grace period that they waited for.
    fn drained(&mut self) {
        self.sets.reclaim();
        self.order.drained();
    }
}

/// The store that has a Service: that of the agent's own, or that of the source.
fn store_of<'a>(name: &ServiceName, store: &'a Store, internal: &'a Store) -> &'a Store {
    if internal.service_row(name).is_some() { internal } else { store }
}

/// Callback that carries out operations in this order.
pub type Write<'a> = &'a mut dyn FnMut(Vec<Op>);

/// All operations as one list.
fn collected(write: impl FnOnce(Write<'_>)) -> Vec<Op> {
    let mut all = Vec::new();
    write(&mut |mut ops| if all.is_empty() { all = ops } else { all.append(&mut ops) });
    all
}

/// Difference that one batch makes, and its pending operations.
struct Batch<'a> {
    write: Write<'a>,
    ops: Vec<Op>,
    /// Frontends whose claims or sets may have changed.
    frontends: BTreeSet<Frontend>,
    /// Addresses whose claims may have changed.
    cluster_ips: BTreeSet<Address>,
    /// Keys of sets that no Service port needs any more, with the frontends that led to them.
    gone: BTreeMap<BackendSetKey, Vec<Frontend>>,
    gone_from: BTreeMap<Frontend, BackendSetKey>,
    /// The whole table is compared: every frontend and address may have changed, and sets that were not taken over
    /// are given up.
    is_whole: bool,
    /// Sockets may remember a backend that has left its set.
    raises_epoch: bool,
}

impl<'a> Batch<'a> {
    fn new(write: Write<'a>) -> Self {
        Self {
            write,
            ops: Vec::new(),
            frontends: BTreeSet::new(),
            cluster_ips: BTreeSet::new(),
            gone: BTreeMap::new(),
            gone_from: BTreeMap::new(),
            is_whole: false,
            raises_epoch: false,
        }
    }

    fn add(&mut self, changes: ClaimChanges) {
        // Of a whole table, all are collected at the end.
        if !self.is_whole {
            self.frontends.extend(changes.frontends);
            self.cluster_ips.extend(changes.cluster_ips);
        }
        for (frontend, key) in changes.gone {
            self.gone_from.insert(frontend, key.clone());
            self.gone.entry(key).or_default().push(frontend);
        }
    }
}

#[cfg(test)]
mod tests;
