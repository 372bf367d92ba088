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

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use super::{
    Backend, Family, Frontend, Problem, Protocol, Row, ServiceName, Source, Store,
    desired::{desired_rows, precedence},
    slots::{Extent, Slots},
};

/// One write to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill slots that no set refers to.
    WriteBackends {
        /// The first slot.
        first_slot: u32,
        /// The backends.
        backends: Arc<[Backend]>,
    },
    /// Make a set consist of these slots; atomic.
    PublishSet {
        /// The set.
        set: u32,
        /// Its first slot.
        first_slot: u32,
        /// How many slots it has.
        count: u16,
    },
    /// Insert a frontend, or replace its value.
    PutFrontend {
        /// The key.
        frontend: Frontend,
        /// The set it has.
        set: u32,
    },
    /// Delete a frontend.
    DeleteFrontend {
        /// The key.
        frontend: Frontend,
    },
    /// Wait until every program that runs now has ended.
    Drain,
}

/// How much the maps hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Frontends.
    pub frontends: u32,
    /// Sets.
    pub sets: u32,
    /// Backend slots.
    pub slots: u32,
    /// Backends of one set.
    pub set_backends: usize,
}

/// What the kernel holds, as read back from the maps.
#[derive(Clone, Debug, Default)]
pub struct KernelTable {
    /// `FRONTENDS`.
    pub frontends: HashMap<Frontend, u32>,
    /// The sets that frontends refer to.
    pub sets: HashMap<u32, KernelSet>,
}

/// A set as read back from the maps.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KernelSet {
    /// Its first slot.
    pub first_slot: u32,
    /// Its backends.
    pub backends: Vec<Backend>,
}

/// A Service port in one family: what has a set of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SetKey {
    service: ServiceName,
    port_name: Arc<str>,
    protocol: Protocol,
    family: Family,
}

#[derive(Debug)]
struct Set {
    id: u32,
    extent: Extent,
    backends: Arc<[Backend]>,
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

/// A Service's wish to have a frontend.
#[derive(Clone, Debug)]
struct Claim {
    created_s: Option<i64>,
    key: SetKey,
    source: Source,
}

/// The writer's picture of the kernel's table, and what it should become.
#[derive(Debug)]
pub struct Table {
    limits: Limits,
    claims: HashMap<Frontend, Vec<Claim>>,
    services: HashMap<ServiceName, Vec<Row>>,
    sets: HashMap<SetKey, Set>,
    kernel: HashMap<Frontend, u32>,
    /// Sets from before the restart that no Service port has taken over yet.
    orphans: HashMap<u32, Orphan>,
    slots: Slots,
    ids: Slots,
    /// Elements of `FRONTENDS` were freed since the last drain.
    elements_freed: bool,
    /// Nothing was written yet: what an agent before this one gave up may still be read.
    is_untouched: bool,
    /// Services that did not fit and are tried again.
    starved: BTreeSet<ServiceName>,
    problems: BTreeMap<ServiceName, Problem>,
    conflicts: BTreeMap<Frontend, Problem>,
}

/// The API server's own Service, on which everything in the cluster depends.
const PROTECTED: (&str, &str) = ("default", "kubernetes");

impl Table {
    /// Takes over what the kernel holds; empty on a fresh start.
    #[must_use]
    pub fn new(limits: Limits, kernel: KernelTable) -> Self {
        let extent = |set: &KernelSet| Extent { first: set.first_slot, count: set.backends.len() as u32 };
        let slots = Slots::new(0, limits.slots, kernel.sets.values().map(extent).collect());
        let ids = kernel.sets.keys().map(|&id| Extent { first: id, count: 1 }).collect();
        let ids = Slots::new(0, limits.sets, ids);
        let orphan = |(id, set): (u32, KernelSet)| {
            let set = Set { id, extent: extent(&set), backends: set.backends.into(), is_inherited: true };
            (id, Orphan { set, frontends: Vec::new() })
        };
        let mut orphans: HashMap<u32, Orphan> = kernel.sets.into_iter().map(orphan).collect();
        for (&frontend, id) in &kernel.frontends {
            if let Some(orphan) = orphans.get_mut(id) {
                orphan.frontends.push(frontend);
            }
        }
        Self {
            limits,
            claims: HashMap::new(),
            services: HashMap::new(),
            sets: HashMap::new(),
            orphans,
            kernel: kernel.frontends,
            slots,
            ids,
            elements_freed: false,
            is_untouched: true,
            starved: BTreeSet::new(),
            problems: BTreeMap::new(),
            conflicts: BTreeMap::new(),
        }
    }

    /// Serves the frontends of `bootstrap` that the kernel does not have yet; touches nothing that it has.
    pub fn bootstrap(&mut self, bootstrap: &Store) -> Vec<Op> {
        let kernel = &self.kernel;
        let missing = |row: &Row| !kernel.contains_key(&row.frontend);
        let missing_rows = |name| desired_rows(bootstrap, name).into_iter().filter(missing).collect();
        let wishes = bootstrap
            .services()
            .map(|(name, service)| Wish { name: name.clone(), created_s: service.created_s, rows: missing_rows(name) })
            .collect();
        self.grant(wishes, Plan::default())
    }

    /// Makes the whole table equal the store: after the first complete sync, and whenever the kernel's content is in
    /// doubt. Removes what no Service claims.
    pub fn sync(&mut self, store: &Store) -> Vec<Op> {
        let names: BTreeSet<_> = self.services.keys().chain(store.services().map(|(name, _)| name)).cloned().collect();
        let plan = Plan { touched: self.kernel.keys().copied().collect(), orphans: true, ..Plan::default() };
        self.grant(names.into_iter().map(|name| wish(store, name)).collect(), plan)
    }

    /// Follows changes of some Services.
    pub fn update(&mut self, store: &Store, dirty: BTreeSet<ServiceName>) -> Vec<Op> {
        let mut names = std::mem::take(&mut self.starved);
        names.extend(dirty);
        self.grant(names.into_iter().map(|name| wish(store, name)).collect(), Plan::default())
    }

    /// The table as it is in force, with what the kernel does not know, sorted by frontend.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<_> =
            self.claims.iter().filter_map(|(&frontend, claims)| self.row(frontend, claims)).collect();
        rows.sort_unstable_by_key(|row| row.frontend);
        rows
    }

    /// What did not fit or was refused, by Service, and who else claims a frontend that another Service has.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().chain(self.conflicts.values())
    }

    fn row(&self, frontend: Frontend, claims: &[Claim]) -> Option<Row> {
        let (claim, set) = claims.iter().find_map(|claim| Some((claim, self.sets.get(&claim.key)?)))?;
        Some(Row {
            frontend,
            service: claim.key.service.clone(),
            port_name: claim.key.port_name.clone(),
            source: claim.source,
            backends: set.backends.to_vec(),
        })
    }

    /// All claims first, since who owns a frontend decides which sets may be taken over; then sets, each published at
    /// once; then frontends.
    fn grant(&mut self, wishes: Vec<Wish>, mut plan: Plan) -> Vec<Op> {
        for wish in &wishes {
            self.replace_claims(wish, &mut plan);
        }
        for wish in wishes {
            self.publish_sets(&wish, &mut plan);
        }
        self.place_frontends(&mut plan);
        self.free_sets(&plan);
        if self.is_untouched && !plan.ops.is_empty() {
            self.is_untouched = false;
            plan.ops.insert(0, Op::Drain);
        }
        plan.ops
    }

    fn replace_claims(&mut self, wish: &Wish, plan: &mut Plan) {
        let before = self.services.remove(&wish.name).unwrap_or_default();
        self.drop_claims(&wish.name, &before, plan);
        for row in &wish.rows {
            self.claim(row.frontend, Claim { created_s: wish.created_s, key: set_key(row), source: row.source }, plan);
        }
        let after: HashSet<_> = wish.rows.iter().map(set_key).collect();
        for (key, frontend) in before.iter().map(|row| (set_key(row), row.frontend)) {
            if !after.contains(&key) {
                plan.gone_from.insert(frontend, key.clone());
                plan.gone.entry(key).or_default().push(frontend);
            }
        }
        if !wish.rows.is_empty() {
            let slim = wish.rows.iter().map(|row| Row { backends: Vec::new(), ..row.clone() });
            self.services.insert(wish.name.clone(), slim.collect());
        }
    }

    fn publish_sets(&mut self, wish: &Wish, plan: &mut Plan) {
        self.problems.remove(&wish.name);
        for row in &wish.rows {
            if let Err(message) = self.publish(&set_key(row), row, plan) {
                self.problem(&wish.name, message);
                self.starved.insert(wish.name.clone());
            }
        }
    }

    fn problem(&mut self, name: &ServiceName, message: String) {
        self.problems.insert(name.clone(), Problem::new(format_args!("Service {name}"), "", message));
    }

    fn drop_claims(&mut self, name: &ServiceName, before: &[Row], plan: &mut Plan) {
        for row in before {
            plan.touched.insert(row.frontend);
            if let Some(claims) = self.claims.get_mut(&row.frontend) {
                claims.retain(|claim| claim.key.service != *name);
                if claims.is_empty() {
                    self.claims.remove(&row.frontend);
                }
            }
        }
    }

    fn claim(&mut self, frontend: Frontend, claim: Claim, plan: &mut Plan) {
        plan.touched.insert(frontend);
        let claims = self.claims.entry(frontend).or_default();
        let before = |other: &Claim| {
            precedence((other.created_s, &other.key.service), (claim.created_s, &claim.key.service)).is_le()
        };
        let index = claims.partition_point(before);
        claims.insert(index, claim);
    }

    /// Brings a set's backends into the kernel: into free slots, then one store. On an error the old set stays.
    fn publish(&mut self, key: &SetKey, row: &Row, plan: &mut Plan) -> Result<(), String> {
        let known = self.sets.remove(key).or_else(|| self.take_over(key, row.frontend));
        let Some(old) = known.or_else(|| self.succeed(key, row.frontend, plan)) else {
            return self.publish_new(key, row, plan);
        };
        let (set, outcome) = match self.publish_changed(&old, key, row, plan) {
            Ok(Some(set)) => (set, Ok(())),
            Ok(None) => (Set { is_inherited: false, ..old }, Ok(())),
            Err(message) => (old, Err(format!("{message}; its last backends stay"))),
        };
        self.sets.insert(key.clone(), set);
        outcome
    }

    /// The set that a frontend has had since before the restart, if nobody else's frontend points at it: what is
    /// published into it must not show up under another Service.
    fn take_over(&mut self, key: &SetKey, frontend: Frontend) -> Option<Set> {
        let id = self.kernel.get(&frontend)?;
        let owner = |frontend| self.claims.get(frontend).and_then(|claims| claims.first()).map(|claim| &claim.key);
        let orphan = self.orphans.get(id)?;
        let is_ours =
            owner(&frontend) == Some(key) && orphan.frontends.iter().all(|f| owner(f).is_none_or(|o| o == key));
        is_ours.then(|| self.orphans.remove(id)).flatten().map(|orphan| orphan.set)
    }

    /// The set of a Service port that goes in this batch, if all its frontends become this one's: as when a port gets
    /// another name. The frontends then need not be written at all. A program may still hold the set's id from a frontend
    /// that was deleted earlier; it must not find another Service's backends there.
    fn succeed(&mut self, key: &SetKey, frontend: Frontend, plan: &mut Plan) -> Option<Set> {
        let predecessor = plan.gone_from.get(&frontend)?.clone();
        let id = self.sets.get(&predecessor)?.id;
        let is_ours = |frontend: &Frontend| {
            let owner = self.claims.get(frontend).and_then(|claims| claims.first());
            owner.is_some_and(|claim| claim.key == *key) && self.kernel.get(frontend) == Some(&id)
        };
        if !plan.gone.get(&predecessor)?.iter().all(is_ours) {
            return None;
        }
        if self.elements_freed {
            self.drain(&mut plan.ops);
        }
        self.sets.remove(&predecessor).map(|set| Set { is_inherited: true, ..set })
    }

    fn publish_new(&mut self, key: &SetKey, row: &Row, plan: &mut Plan) -> Result<(), String> {
        let no_ids = format!("no room for more than {} Service ports; not served", self.limits.sets);
        let id = self.take(|table| &mut table.ids, 1, plan).ok_or(no_ids)?.first;
        let extent = match self.write(row, plan) {
            Ok(extent) => extent,
            Err(message) => {
                self.ids.give_back(Extent { first: id, count: 1 });
                return Err(format!("{message}; not served"));
            }
        };
        self.sets.insert(key.clone(), self.point(id, extent, row, plan));
        Ok(())
    }

    fn publish_changed(&mut self, old: &Set, key: &SetKey, row: &Row, plan: &mut Plan) -> Result<Option<Set>, String> {
        if *old.backends == *row.backends {
            return Ok(None);
        }
        let is_protected = (&*key.service.namespace, &*key.service.name) == PROTECTED;
        if is_protected && row.backends.is_empty() {
            return Err("it has no usable endpoints, and nothing works without the API server".to_owned());
        }
        let extent = self.write(row, plan)?;
        let set = self.point(old.id, extent, row, plan);
        self.slots.give_back(old.extent);
        Ok(Some(set))
    }

    fn write(&mut self, row: &Row, plan: &mut Plan) -> Result<Extent, String> {
        let count = row.backends.len();
        if count > self.limits.set_backends {
            return Err(format!("{count} backends are more than the {} of one set", self.limits.set_backends));
        }
        let no_slots = format!("no room for {count} more backends among {}", self.limits.slots);
        let extent = self.take(|table| &mut table.slots, count as u32, plan).ok_or(no_slots)?;
        if count != 0 {
            plan.ops.push(Op::WriteBackends { first_slot: extent.first, backends: row.backends.as_slice().into() });
        }
        Ok(extent)
    }

    fn point(&self, id: u32, extent: Extent, row: &Row, plan: &mut Plan) -> Set {
        let backends: Arc<[Backend]> = match plan.ops.last() {
            Some(Op::WriteBackends { backends, .. }) if !row.backends.is_empty() => backends.clone(),
            _ => row.backends.as_slice().into(),
        };
        plan.ops.push(Op::PublishSet { set: id, first_slot: extent.first, count: extent.count as u16 });
        Set { id, extent, backends, is_inherited: false }
    }

    /// Takes from an allocator; if it has run dry, drains and tries once more.
    fn take(&mut self, slots: fn(&mut Self) -> &mut Slots, count: u32, plan: &mut Plan) -> Option<Extent> {
        if let Some(extent) = slots(self).take(count) {
            return Some(extent);
        }
        if !slots(self).has_given_back() {
            return None;
        }
        self.drain(&mut plan.ops);
        slots(self).take(count)
    }

    fn drain(&mut self, ops: &mut Vec<Op>) {
        ops.push(Op::Drain);
        self.slots.reclaim();
        self.ids.reclaim();
        self.elements_freed = false;
    }

    /// Insertions, replacements, deletions: the fewest drains.
    fn place_frontends(&mut self, plan: &mut Plan) {
        let (mut replaced, mut deleted) = (Vec::new(), Vec::new());
        for frontend in std::mem::take(&mut plan.touched) {
            self.note_conflict(frontend);
            match (self.wanted(frontend), self.kernel.get(&frontend).copied()) {
                (None, None) => {}
                (None, Some(_)) => deleted.push(frontend),
                (Some(set), None) => self.put(frontend, set, plan),
                (Some(set), Some(now)) if set == now => {}
                (Some(set), Some(_)) => replaced.push((frontend, set)),
            }
        }
        for (frontend, set) in replaced {
            self.put(frontend, set, plan);
            self.elements_freed = true;
        }
        for frontend in deleted {
            plan.ops.push(Op::DeleteFrontend { frontend });
            self.kernel.remove(&frontend);
            self.elements_freed = true;
        }
    }

    fn note_conflict(&mut self, frontend: Frontend) {
        match self.claims.get(&frontend).map(Vec::as_slice) {
            Some([first, second, ..]) => {
                let message = format!("{frontend} belongs to Service {}, which comes first", first.key.service);
                let loser = format_args!("Service {}", second.key.service).to_string();
                self.conflicts.insert(frontend, Problem::new(loser, "", message));
            }
            _ => drop(self.conflicts.remove(&frontend)),
        }
    }

    /// The set that a frontend should have: of its claims the first whose set could be published.
    fn wanted(&self, frontend: Frontend) -> Option<u32> {
        let now = self.kernel.get(&frontend);
        let mut sets = self.claims.get(&frontend)?.iter().filter_map(|claim| self.sets.get(&claim.key));
        sets.find(|set| !set.is_inherited || now == Some(&set.id)).map(|set| set.id)
    }

    fn put(&mut self, frontend: Frontend, set: u32, plan: &mut Plan) {
        let is_new = !self.kernel.contains_key(&frontend);
        if is_new && self.kernel.len() >= self.limits.frontends as usize {
            return self.frontend_does_not_fit(frontend);
        }
        if self.elements_freed {
            self.drain(&mut plan.ops);
        }
        plan.ops.push(Op::PutFrontend { frontend, set });
        self.kernel.insert(frontend, set);
    }

    fn frontend_does_not_fit(&mut self, frontend: Frontend) {
        let Some(claim) = self.claims.get(&frontend).and_then(|claims| claims.first()) else { return };
        let name = claim.key.service.clone();
        self.problem(
            &name,
            format!("no room for more than {} frontends; {frontend} is not served", self.limits.frontends),
        );
        self.starved.insert(name);
    }

    fn free_sets(&mut self, plan: &Plan) {
        let gone: Vec<_> = plan.gone.keys().filter_map(|key| self.sets.remove(key)).collect();
        let orphans = if plan.orphans { std::mem::take(&mut self.orphans) } else { HashMap::new() };
        for set in gone.into_iter().chain(orphans.into_values().map(|orphan| orphan.set)) {
            self.slots.give_back(set.extent);
            self.ids.give_back(Extent { first: set.id, count: 1 });
        }
    }
}

/// What one Service wants; no rows if it is gone.
struct Wish {
    name: ServiceName,
    created_s: Option<i64>,
    rows: Vec<Row>,
}

fn wish(store: &Store, name: ServiceName) -> Wish {
    let created_s = store.service_row(&name).and_then(|service| service.created_s);
    Wish { created_s, rows: desired_rows(store, &name), name }
}

/// Work in progress on one batch.
#[derive(Default)]
struct Plan {
    ops: Vec<Op>,
    touched: BTreeSet<Frontend>,
    /// Service ports that have gone, and the frontends that they had.
    gone: HashMap<SetKey, Vec<Frontend>>,
    gone_from: HashMap<Frontend, SetKey>,
    /// Whether sets that were not taken over are given up.
    orphans: bool,
}

fn set_key(row: &Row) -> SetKey {
    let (protocol, family) = protocol_family(row);
    SetKey { service: row.service.clone(), port_name: row.port_name.clone(), protocol, family }
}

fn protocol_family(row: &Row) -> (Protocol, Family) {
    (row.frontend.protocol, row.frontend.address.family())
}

#[cfg(test)]
mod tests;
