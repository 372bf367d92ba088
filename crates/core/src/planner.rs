//! From desired rows to ordered map writes.
//!
//! A set of backends is published by one atomic store: its backends go into slots that nobody reads, then the set's
//! word points at them. A frontend keeps its set's id for as long as the Service port lives. The order of [`Op`]s is
//! part of the model: after each of them, every lookup finds a set that was complete at some moment, or nothing.
//!
//! Two things may be used again only after a grace period ([`Op::Drain`]), because a program may have read a pointer to
//! them a moment before: backend slots and set ids, and (inside the kernel) the memory of a deleted or replaced
//! element of `FRONTENDS`, which the next insertion may take. Drains are made as late as possible: a change of endpoints
//! needs none until slots run out.

mod capacity;
mod conflicts;
mod desired_service;
mod filter;
mod frontends;
mod packed_set;
mod placement;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use capacity::{Lack, Lacks, Taker};
use desired_service::{Desire, DesiredService};
use filter::FilterCounts;
use frontends::{Claim, Frontends};
use packed_set::PackedSet;

use super::{
    Action, Address, Affinity, Family, Frontend, FrontendSource, KernelSet, KernelTable, Limits, Members, Op, Problem,
    Protocol, Retired, Row, Scope, ServiceName, Store, affinity_id,
    desired::{self, DesiredFrontend, precedence},
    names::{Text, Texts},
    slot_allocator::{Extent, SlotAllocator},
    store::refill,
};

/// A Service port in one family, as some of its frontends see it: what has a set of its own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct BackendSetKey {
    service: Arc<ServiceName>,
    port_name: Text,
    protocol: Protocol,
    family: Family,
    scope: Scope,
}

impl BackendSetKey {
    /// What a set of this Service port should have.
    fn affinity(&self, seconds: Option<u32>) -> Affinity {
        let id = || affinity_id(&self.service, &self.port_name, self.protocol, self.family);
        seconds.map_or_else(Affinity::default, |seconds| Affinity { id: id(), seconds })
    }
}

#[derive(Debug)]
struct Set {
    id: u32,
    extent: Extent,
    members: PackedSet,
    affinity: Affinity,
    /// Written by the agent before this one, perhaps for another Service, and not yet confirmed or replaced: it serves
    /// the frontends that have it already and no others.
    is_inherited: bool,
}

/// A set from before the restart, and the frontends that point at it.
#[derive(Debug)]
struct Orphan {
    set: Set,
    frontends: Vec<Frontend>,
}

/// What is kept of a Service.
#[derive(Debug, Default, PartialEq, Eq)]
struct ServiceClaims {
    created_s: Option<i64>,
    rows: Box<[ClaimRef]>,
}

/// What is kept of a row that a Service has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClaimRef {
    frontend: Frontend,
    port_name: Text,
    source: FrontendSource,
    scope: Scope,
}

/// An address that is, or should be, known as a ClusterIP.
#[derive(Clone, Copy, Debug, Default)]
struct ClusterIp {
    /// How many claims of frontends with it there are.
    claims: u32,
    is_written: bool,
}

/// The writer's picture of the kernel's table, and what it should become.
#[derive(Debug)]
pub struct TablePlanner {
    limits: Limits,
    frontends: Frontends,
    services: BTreeMap<Arc<ServiceName>, ServiceClaims>,
    port_names: Texts,
    sets: BTreeMap<BackendSetKey, Set>,
    cluster_ips: BTreeMap<Address, ClusterIp>,
    cluster_ips_written: usize,
    /// ClusterIPs that did not fit and are tried again.
    unplaced: BTreeMap<Address, Problem>,
    filter: FilterCounts,
    /// Sets from before the restart that no Service port has taken over yet.
    orphans: HashMap<u32, Orphan>,
    /// How many frontends and addresses the map has room for.
    frontends_room: u32,
    slots: SlotAllocator,
    ids: SlotAllocator,
    /// Elements of `FRONTENDS` were freed since the last drain.
    elements_freed: bool,
    /// Nothing was written yet: what an agent before this one gave up may still be read.
    is_untouched: bool,
    /// The claims are those of a complete store, not of a bootstrap.
    is_synced: bool,
    /// Backends retired since [`TablePlanner::take_retired`] was called last.
    retired: Retired,
    has_other_problems: bool,
    /// Services that did not fit and are tried again, and what they lack.
    starved: BTreeMap<Arc<ServiceName>, Lacks>,
    /// Room given back since they were tried last.
    new_room: Lacks,
    problems: BTreeMap<Arc<ServiceName>, Vec<Problem>>,
    /// Frontends that several claim.
    contested: BTreeSet<Frontend>,
}

/// Whether it is the API server's own Service, on which everything in the cluster depends.
fn is_protected(service: &ServiceName) -> bool {
    (&*service.namespace, &*service.name) == ("default", "kubernetes")
}

/// A frontend in force, with what the kernel does not know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontendName<'a> {
    /// Address, port and protocol that clients connect to.
    pub frontend: Frontend,
    /// The Service.
    pub service: &'a ServiceName,
    /// The name of the Service's port.
    pub port_name: &'a str,
    /// Why the Service has this frontend.
    pub source: FrontendSource,
    /// Outcome of a new connection.
    pub action: Action,
}

/// Desired content of a set.
struct Content {
    members: Members,
    affinity_seconds: Option<u32>,
}

impl Content {
    fn fits(&self, limits: &Limits) -> Result<(), Unpublished> {
        let count = self.members.eligible().len().max(self.members.serving().len());
        if count <= limits.run_backends {
            return Ok(());
        }
        let message = format!("{count} backends are more than the {} of one set", limits.run_backends);
        Err(Unpublished { message, lack: None })
    }
}

/// Why a set is not as it should be.
struct Unpublished {
    message: String,
    /// The room that is missing, if that is the reason.
    lack: Option<Lack>,
}

impl Unpublished {
    fn no_room(message: String) -> Self {
        Self { message, lack: Some(Lack::Backends) }
    }

    /// With what follows from it.
    fn and(self, consequence: &str) -> Self {
        Self { message: format!("{}; {consequence}", self.message), ..self }
    }
}

impl TablePlanner {
    /// Takes over what the kernel holds; empty on a fresh start.
    #[must_use]
    pub fn new(limits: Limits, kernel: KernelTable) -> Self {
        let KernelTable { frontends, addresses, mut sets, filter: written, room, is_new } = kernel;
        // Of the keys without a port, and not a set of ours.
        sets.remove(&0);
        let extent = |set: &KernelSet| Extent { first: set.first_slot, count: set.members.backends.len() as u32 };
        let slots = SlotAllocator::new(0, room.slots, sets.values().map(extent).collect());
        let ids = sets.keys().map(|&id| Extent { first: id, count: 1 }).collect();
        let ids = SlotAllocator::new(1, room.sets, ids);
        let orphan = |(id, set): (u32, KernelSet)| {
            let (extent, members) = (extent(&set), PackedSet::of(&set.members));
            let set = Set { id, extent, members, affinity: set.affinity, is_inherited: true };
            (id, Orphan { set, frontends: Vec::new() })
        };
        let mut orphans: HashMap<u32, Orphan> = sets.into_iter().map(orphan).collect();
        for (&frontend, id) in &frontends {
            if let Some(orphan) = orphans.get_mut(id) {
                orphan.frontends.push(frontend);
            }
        }
        let mut filter = FilterCounts::new(limits.filter_bit, written);
        frontends.keys().map(|frontend| frontend.address).chain(addresses.iter().copied()).for_each(|a| filter.add(a));
        let cluster_ips_written = addresses.len();
        let written = |address| (address, ClusterIp { claims: 0, is_written: true });
        Self {
            limits,
            frontends: Frontends::of_kernel(frontends),
            services: BTreeMap::new(),
            port_names: Texts::default(),
            sets: BTreeMap::new(),
            orphans,
            cluster_ips: addresses.into_iter().map(written).collect(),
            cluster_ips_written,
            unplaced: BTreeMap::new(),
            filter,
            frontends_room: room.frontends,
            slots,
            ids,
            elements_freed: false,
            is_untouched: !is_new,
            is_synced: false,
            retired: Retired::default(),
            has_other_problems: false,
            starved: BTreeMap::new(),
            new_room: Lacks::default(),
            problems: BTreeMap::new(),
            contested: BTreeSet::new(),
        }
    }

    /// Serves the frontends of `bootstrap` that the kernel does not have yet; touches nothing that it has.
    pub fn bootstrap(&mut self, bootstrap: &Store) -> Vec<Op> {
        let names = bootstrap.service_names().cloned().collect();
        collected(|write| self.grant(&names, &|name| DesiredService::of_missing(bootstrap, name), Plan::new(write)))
    }

    /// Makes the whole table equal the store: after the first complete sync, and whenever the kernel's content is in
    /// doubt. Removes what no Service claims.
    pub fn sync(&mut self, store: &Store) -> Vec<Op> {
        collected(|write| self.sync_by(store, write))
    }

    /// As [`TablePlanner::sync`], a little at a time: all of it at once would be a second table.
    pub fn sync_by(&mut self, store: &Store, write: Write<'_>) {
        let names: BTreeSet<_> = self.services.keys().chain(store.service_names()).cloned().collect();
        let plan = Plan {
            touched: self.frontends.each_written().map(|(frontend, _)| frontend).collect(),
            touched_ips: self.cluster_ips.keys().copied().collect(),
            orphans: true,
            ..Plan::new(write)
        };
        let plan = if self.is_synced { plan } else { self.with_room_for(store, plan) };
        self.is_synced = true;
        self.grant(&names, &|name| DesiredService::of(store, name), plan);
        self.refill();
    }

    /// Follows changes of some Services.
    pub fn update(&mut self, store: &Store, dirty: BTreeSet<Arc<ServiceName>>) -> Vec<Op> {
        let mut names = dirty;
        names.append(&mut self.take_relieved());
        collected(|write| self.grant(&names, &|name| DesiredService::of(store, name), Plan::new(write)))
    }

    /// What comes in one after the other, in order, leaves a tree's nodes half empty; built at once they are full.
    fn refill(&mut self) {
        self.frontends.refill();
        refill(&mut self.services);
        refill(&mut self.sets);
        refill(&mut self.cluster_ips);
    }

    /// The table as it is in force, with what the kernel does not know, sorted by frontend.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        self.each_row().collect()
    }

    /// The rows one after the other.
    pub fn each_row(&self) -> impl Iterator<Item = Row> {
        self.frontends.each_claimed().filter_map(|(frontend, claims)| self.row(frontend, claims))
    }

    /// The frontends in force with what the kernel does not know of them, without their backends.
    pub fn each_name(&self) -> impl Iterator<Item = FrontendName<'_>> {
        self.frontends.each_claimed().filter_map(|(frontend, claims)| {
            let (claim, set) = self.in_force(frontend, claims)?;
            let action = Action::of(set.members.eligible != 0, set.members.drops);
            let (service, port_name) = (&*claim.service, &*claim.port_name);
            Some(FrontendName { frontend, service, port_name, source: claim.source, action })
        })
    }

    /// How many frontends there are.
    #[must_use]
    pub fn frontend_count(&self) -> usize {
        self.frontends.written()
    }

    /// Frontends without room, sets that were refused, and claims lost to other Services: one problem for each Service and
    /// reason.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        self.problems.values().flatten().chain(self.unplaced.values()).cloned().chain(self.conflicts()).collect()
    }

    /// The backends that, since the last call, have left a set altogether, and those of frontends that were deleted or given
    /// to another set: there may be sockets that are connected to nobody.
    pub fn take_retired(&mut self) -> Retired {
        std::mem::take(&mut self.retired)
    }

    /// Whether [`TablePlanner::problems`] may say something else than at the last call.
    pub fn take_other_problems(&mut self) -> bool {
        std::mem::take(&mut self.has_other_problems)
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

    /// The claim that a frontend is served by.
    fn in_force<'a>(&'a self, frontend: Frontend, claims: &'a [Claim]) -> Option<(&'a Claim, &'a Set)> {
        claims.iter().find_map(|claim| Some((claim, self.sets.get(&claim.key(frontend))?)))
    }

    /// All claims first, since who owns a frontend decides which sets may be taken over; then sets, each published at
    /// once; then frontends.
    fn grant(&mut self, names: &BTreeSet<Arc<ServiceName>>, wish: Desire<'_>, mut plan: Plan<'_>) {
        plan.ops.extend(self.filter.widen().map(Op::SetFilter));
        // Where there is no room for everybody's backends, the API server's have it.
        let (first, others): (Vec<_>, Vec<_>) = names.iter().partition(|name| is_protected(name));
        let names = [first, others].concat();
        let mut kept = Vec::new();
        for &name in &names {
            let wish = wish(name);
            self.replace_claims(name, &wish, &mut plan);
            if names.len() <= DESIRED_KEPT_MAX {
                kept.push((name, wish));
            }
        }
        if kept.is_empty() {
            for name in names {
                self.publish_sets(name, wish(name), &mut plan);
            }
        }
        for (name, wish) in kept {
            self.publish_sets(name, wish, &mut plan);
        }
        self.place_frontends(&mut plan);
        self.free_sets(&plan);
        plan.ops.extend(self.filter.narrow().map(Op::SetFilter));
        self.flush(&mut plan, 1);
    }

    /// Writes what is to be written, if it is enough to be worth it.
    fn flush(&mut self, plan: &mut Plan<'_>, least: usize) {
        if plan.ops.len() < least {
            return;
        }
        if self.is_untouched {
            self.is_untouched = false;
            plan.ops.insert(0, Op::Drain);
        }
        (plan.write)(std::mem::take(&mut plan.ops));
    }

    fn replace_claims(&mut self, service: &Arc<ServiceName>, wish: &DesiredService, plan: &mut Plan<'_>) {
        let after = self.held(wish);
        if self.services.get(service) == Some(&after) {
            plan.touched.extend(after.rows.iter().map(|held| held.frontend));
            return;
        }
        let before = self.services.remove(service).unwrap_or_default();
        self.drop_claims(service, &before.rows, plan);
        for held in &after.rows {
            let ClaimRef { frontend, source, scope, .. } = *held;
            let claim = Claim { service: service.clone(), port_name: held.port_name.clone(), source, scope };
            self.claim(frontend, claim, after.created_s, plan);
        }
        let kept: BTreeSet<_> = after.rows.iter().map(ClaimRef::set).collect();
        for held in before.rows.iter().filter(|held| !kept.contains(&held.set())) {
            let key = held.key(service);
            plan.gone_from.insert(held.frontend, key.clone());
            plan.gone.entry(key).or_default().push(held.frontend);
        }
        if !after.rows.is_empty() {
            self.services.insert(service.clone(), after);
        }
    }

    fn held(&mut self, wish: &DesiredService) -> ServiceClaims {
        let Self { frontends, port_names, .. } = self;
        let row = |DesiredFrontend { frontend, port, source, scope }: DesiredFrontend<'_>| ClaimRef {
            frontend,
            port_name: port_names.share(&port.name),
            source,
            scope,
        };
        ServiceClaims { created_s: wish.created_s(), rows: wish.frontends(frontends).map(row).collect() }
    }

    fn publish_sets(&mut self, service: &Arc<ServiceName>, mut wish: DesiredService, plan: &mut Plan<'_>) {
        let problems = std::mem::take(&mut wish.problems);
        self.has_other_problems |= self.problems.remove(service).is_some() || !problems.is_empty();
        if !problems.is_empty() {
            self.problems.insert(service.clone(), problems);
        }
        let sets = wish.sets(&self.frontends);
        let mut left = self.limits.service_slots as usize;
        for (index, set) in sets.iter().enumerate() {
            let members = wish.members(set);
            let Some(rest) = left.checked_sub(members.backends.len()) else {
                let (count, most) = (sets.len() - index, self.limits.service_slots);
                self.problem(service, format!("more than the {most} backends of one Service; {count} of its ports and families are not served, or keep their last backends"));
                break;
            };
            left = rest;
            let content = Content { members, affinity_seconds: wish.affinity_seconds() };
            let port_name = self.port_names.share(&set.port.name);
            if let Err(error) = self.publish(&set.key(service, port_name), set.frontend, &content, plan) {
                self.problem(service, error.message);
                if let Some(lack) = error.lack {
                    self.starved.entry(service.clone()).or_default().add(lack);
                }
            }
            self.flush(plan, OPS_AT_ONCE);
        }
    }

    /// What is wrong with a Service. Several frontends may have it for the same reason.
    fn problem(&mut self, service: &Arc<ServiceName>, message: String) {
        let problem = Problem::new(format_args!("Service {service}"), "", message);
        let problems = self.problems.entry(service.clone()).or_default();
        if problems.last() != Some(&problem) {
            problems.push(problem);
        }
        self.has_other_problems = true;
    }

    fn drop_claims(&mut self, service: &ServiceName, before: &[ClaimRef], plan: &mut Plan<'_>) {
        for held in before {
            plan.touched.insert(held.frontend);
            self.frontends.drop_claims(held.frontend, service);
            self.mark_contested(held.frontend);
            if held.source == FrontendSource::ClusterIp {
                let cluster_ip = self.touch_ip(held.frontend.address, plan);
                cluster_ip.claims = cluster_ip.claims.saturating_sub(1);
            }
        }
    }

    fn touch_ip(&mut self, address: Address, plan: &mut Plan<'_>) -> &mut ClusterIp {
        plan.touched_ips.insert(address);
        self.cluster_ips.entry(address).or_default()
    }

    fn claim(&mut self, frontend: Frontend, claim: Claim, created_s: Option<i64>, plan: &mut Plan<'_>) {
        plan.touched.insert(frontend);
        if claim.source == FrontendSource::ClusterIp {
            self.touch_ip(frontend.address, plan).claims += 1;
        }
        let (service, source, services) = (claim.service.clone(), claim.source, &self.services);
        let rank = desired::ClaimRank { source, created_s, service: &service };
        self.frontends.claim(frontend, claim, |other| {
            let created_s = if other.service == service {
                created_s
            } else {
                services.get(&other.service).and_then(|held| held.created_s)
            };
            let other = desired::ClaimRank { source: other.source, created_s, service: &other.service };
            precedence(other, rank).is_le()
        });
        self.mark_contested(frontend);
    }

    /// Brings a set's backends into the kernel: into free slots, then one store. On an error the old set stays.
    fn publish(
        &mut self,
        key: &BackendSetKey,
        frontend: Frontend,
        content: &Content,
        plan: &mut Plan<'_>,
    ) -> Result<(), Unpublished> {
        let known = self.sets.remove(key).or_else(|| self.take_over(key, frontend));
        let Some(old) = known.or_else(|| self.succeed(key, frontend, plan)) else {
            return content
                .fits(&self.limits)
                .and_then(|()| self.publish_new(key, content, plan))
                .map_err(|error| error.and("not served"));
        };
        let (set, outcome) = self.publish_changed(old, key, content, plan);
        self.sets.insert(key.clone(), set);
        outcome.map_err(|error| error.and("its last backends stay"))
    }

    /// The set that a frontend has had since before the restart, if no other frontend points at it that is somebody
    /// else's or nobody's any more: what is published into it must not show up there.
    fn take_over(&mut self, key: &BackendSetKey, frontend: Frontend) -> Option<Set> {
        let id = self.frontends.set(frontend)?;
        let orphan = self.orphans.get(&id)?;
        let is_ours = orphan.frontends.iter().all(|&frontend| self.frontends.owner(frontend).as_ref() == Some(key));
        is_ours.then(|| self.orphans.remove(&id)).flatten().map(|orphan| orphan.set)
    }

    /// The set of a Service port that goes in this batch, if all its frontends become this one's: as when a port gets
    /// another name. The frontends then need not be written at all. A program may still hold the set's id from a frontend
    /// that was deleted earlier; it must not find another Service's backends there.
    fn succeed(&mut self, key: &BackendSetKey, frontend: Frontend, plan: &mut Plan<'_>) -> Option<Set> {
        let predecessor = plan.gone_from.get(&frontend)?.clone();
        let id = self.sets.get(&predecessor)?.id;
        let is_ours = |&frontend: &Frontend| {
            self.frontends.owner(frontend).as_ref() == Some(key) && self.frontends.set(frontend) == Some(id)
        };
        if !plan.gone.get(&predecessor)?.iter().all(is_ours) {
            return None;
        }
        self.drain_if_freed(plan);
        self.sets.remove(&predecessor).map(|set| Set { is_inherited: true, ..set })
    }

    fn publish_new(&mut self, key: &BackendSetKey, content: &Content, plan: &mut Plan<'_>) -> Result<(), Unpublished> {
        let no_ids = |limits: Limits| format!("no room for more than {} Service ports", limits.sets);
        let by = Taker { is_protected: is_protected(&key.service), returned: 0 };
        let extent = self.take(capacity::Map::Sets, 1, by, plan);
        let id = extent.ok_or_else(|| Unpublished::no_room(no_ids(self.limits)))?.first;
        let (members, extent) = match self.write(content.members.clone(), by, plan) {
            Ok(written) => written,
            Err(error) => {
                self.ids.give_back(Extent { first: id, count: 1 });
                return Err(error);
            }
        };
        let affinity = key.affinity(content.affinity_seconds);
        let set = Set { id, extent, members, affinity, is_inherited: false };
        // Whoever had the id before may have left something there.
        plan.ops.extend([Op::SetAffinity { set: id, affinity }, set.publication()]);
        self.sets.insert(key.clone(), set);
        Ok(())
    }

    fn publish_changed(
        &mut self,
        mut set: Set,
        key: &BackendSetKey,
        content: &Content,
        plan: &mut Plan<'_>,
    ) -> (Set, Result<(), Unpublished>) {
        let affinity = key.affinity(content.affinity_seconds);
        if set.affinity != affinity {
            plan.ops.push(Op::SetAffinity { set: set.id, affinity });
            set.affinity = affinity;
        }
        let fits = content.fits(&self.limits);
        let outcome = fits.and_then(|()| self.publish_members(&mut set, key, &content.members, plan));
        set.is_inherited &= outcome.is_err();
        (set, outcome)
    }

    fn publish_members(
        &mut self,
        set: &mut Set,
        key: &BackendSetKey,
        members: &Members,
        plan: &mut Plan<'_>,
    ) -> Result<(), Unpublished> {
        if set.members == PackedSet::of(members) {
            return Ok(());
        }
        if is_protected(&key.service) && members.eligible == 0 && set.members.eligible != 0 {
            let message = "it has no usable endpoints, and nothing works without the API server";
            return Err(Unpublished { message: message.to_owned(), lack: None });
        }
        let before = set.members.unpack();
        let retired: Vec<_> = before.backends.iter().filter(|backend| !members.has(backend)).copied().collect();
        let by = Taker { is_protected: is_protected(&key.service), returned: set.extent.count };
        let (members, extent) = self.write(members.clone(), by, plan)?;
        plan.raises_epoch |= !retired.is_empty();
        self.retired.add(key.protocol, retired);
        self.slots.give_back(std::mem::replace(&mut set.extent, extent));
        self.new_room.add(Lack::Backends);
        set.members = members;
        plan.ops.push(set.publication());
        Ok(())
    }

    fn write(&mut self, members: Members, by: Taker, plan: &mut Plan<'_>) -> Result<(PackedSet, Extent), Unpublished> {
        let packed = PackedSet::of(&members);
        let extent = self.take(capacity::Map::Backends, packed.count(), by, plan).ok_or_else(|| {
            Unpublished::no_room(format!("no room for {} more backends among {}", packed.count(), self.limits.slots))
        })?;
        if packed.count() != 0 {
            plan.ops.push(Op::WriteBackends { first_slot: extent.first, members });
        }
        Ok((packed, extent))
    }

    fn drain(&mut self, ops: &mut Vec<Op>) {
        ops.push(Op::Drain);
        self.drained();
    }

    /// No program uses any more what was given up.
    fn drained(&mut self) {
        self.slots.reclaim();
        self.ids.reclaim();
        self.elements_freed = false;
    }

    fn free_sets(&mut self, plan: &Plan<'_>) {
        let gone: Vec<_> = plan.gone.keys().filter_map(|key| self.sets.remove(key)).collect();
        let orphans = if plan.orphans { std::mem::take(&mut self.orphans) } else { HashMap::new() };
        for set in gone.into_iter().chain(orphans.into_values().map(|orphan| orphan.set)) {
            self.new_room.add(Lack::Backends);
            self.slots.give_back(set.extent);
            self.ids.give_back(Extent { first: set.id, count: 1 });
        }
    }
}

/// Of up to so many Services, what they want is kept until it is written; of more, it is computed twice.
const DESIRED_KEPT_MAX: usize = 64;
/// How many operations are written together.
const OPS_AT_ONCE: usize = 256;

/// Takes operations that are to be carried out in this order.
pub type Write<'a> = &'a mut dyn FnMut(Vec<Op>);

/// All that is written, as one list.
fn collected(write: impl FnOnce(Write<'_>)) -> Vec<Op> {
    let mut all = Vec::new();
    write(&mut |mut ops| if all.is_empty() { all = ops } else { all.append(&mut ops) });
    all
}

/// Work in progress on one batch.
struct Plan<'a> {
    write: Write<'a>,
    ops: Vec<Op>,
    touched: BTreeSet<Frontend>,
    touched_ips: BTreeSet<Address>,
    /// Service ports that have gone, and the frontends that they had.
    gone: BTreeMap<BackendSetKey, Vec<Frontend>>,
    gone_from: BTreeMap<Frontend, BackendSetKey>,
    /// Whether sets that were not taken over are given up.
    orphans: bool,
    /// Whether sockets may remember a backend that is no longer there.
    raises_epoch: bool,
}

impl<'a> Plan<'a> {
    fn new(write: Write<'a>) -> Self {
        Self {
            write,
            ops: Vec::new(),
            touched: BTreeSet::new(),
            touched_ips: BTreeSet::new(),
            gone: BTreeMap::new(),
            gone_from: BTreeMap::new(),
            orphans: false,
            raises_epoch: false,
        }
    }
}

impl ClaimRef {
    fn family(&self) -> Family {
        self.frontend.address.family()
    }

    /// Which of the Service's sets it has.
    fn set(&self) -> (Protocol, Family, Scope, &Text) {
        (self.frontend.protocol, self.family(), self.scope, &self.port_name)
    }

    fn key(&self, service: &Arc<ServiceName>) -> BackendSetKey {
        let (service, port_name) = (service.clone(), self.port_name.clone());
        BackendSetKey { service, port_name, protocol: self.frontend.protocol, family: self.family(), scope: self.scope }
    }
}

impl Set {
    /// The one store that puts its members in force.
    fn publication(&self) -> Op {
        Op::PublishSet {
            set: self.id,
            first_slot: self.extent.first,
            eligible: self.members.eligible as u16,
            serving: (self.members.count() - self.members.eligible) as u16,
            drops: self.members.drops,
        }
    }
}

#[cfg(test)]
mod tests;
