//! Frontends that are written, replaced and deleted, and those that give way if the map is full.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Batch, OPS_AT_ONCE, Op, Phase, TablePlanner, api_server, cluster_ips::AddressChange, frontends::Claim,
    is_protected, starved::Shortage,
};
use crate::{
    Address, Backend, Frontend, FrontendSource, Problem, Protocol, ServiceName,
    problem::{FRONTENDS_NAMED_MAX, some_of},
    sorted_map, sorted_set,
};

/// Number of frontends that can be written during one grace period: a write takes about 1 us, a grace
/// period about 10 ms.
const FRONTENDS_PER_DRAIN: usize = 8_192;

/// Precedence of a frontend where there is not room for all, the best first. Frontends that are already written give
/// way to new ones of a better rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// The API server's ClusterIPs.
    ApiServer,
    /// Other ClusterIPs.
    ClusterIp,
    /// Other addresses of Services, and node ports.
    External,
}

/// Changes of the frontends in one batch.
#[derive(Default)]
struct Changes {
    /// New frontends with the ids of their sets, by rank, then by frontend.
    inserted: Vec<(Rank, Frontend, u32)>,
    /// Written frontends with the ids of their new sets.
    replaced: Vec<(Frontend, u32)>,
    deleted: Vec<Frontend>,
}

impl Rank {
    /// Rank of a frontend with these claims that count.
    fn of(claims: &[Claim]) -> Self {
        let rank = |claim: &Claim| match claim.source {
            FrontendSource::ClusterIp if is_protected(&claim.service) => Self::ApiServer,
            FrontendSource::ClusterIp => Self::ClusterIp,
            FrontendSource::ExternalIp | FrontendSource::LoadBalancerIp | FrontendSource::NodePort => Self::External,
        };
        claims.iter().map(rank).min().unwrap_or(Self::External)
    }
}

impl Changes {
    fn of_rank(&self, rank: Rank) -> usize {
        self.inserted.iter().filter(|(other, ..)| *other == rank).count()
    }

    /// Removes the last insertions of a rank, so that `count` remain.
    fn keep(&mut self, rank: Rank, count: usize) -> Vec<Frontend> {
        let first = self.inserted.partition_point(|(other, ..)| *other < rank);
        let end = self.inserted.partition_point(|(other, ..)| *other <= rank);
        let cut = end.min(first.saturating_add(count));
        self.inserted.drain(cut..end).map(|(_, frontend, _)| frontend).collect()
    }
}

impl TablePlanner {
    /// Writes the frontends that a batch has touched, as far as there is room. Deletions come last, so that the writes
    /// before them need no drain; only a full map has them first. The address of a ClusterIP, whose other ports are
    /// refused, is written after the frontends: otherwise calls to them would be refused until they follow.
    pub(super) fn place_frontends(&mut self, batch: &mut Batch<'_>) {
        let touched = std::mem::take(&mut batch.frontends);
        let mut changes = self.changes(touched);
        self.limit_external(&mut changes);
        self.grow_or_evict(&mut changes, batch);
        for (_, frontend, set) in std::mem::take(&mut changes.inserted) {
            self.insert(frontend, set, batch);
            self.flush(batch, OPS_AT_ONCE);
        }
        self.retire(changes.replaced.iter().map(|(frontend, _)| frontend));
        batch.raises_epoch |= !changes.replaced.is_empty();
        self.replace(changes.replaced, batch);
        let unclaimed = self.place_addresses(batch);
        self.delete(changes.deleted, batch);
        if batch.raises_epoch {
            batch.ops.push(Op::RaiseEpoch);
        }
        if !unclaimed.is_empty() {
            // All its ports refused datagrams.
            self.retired.add(Protocol::Udp, [Backend::NOBODY]);
        }
        for address in unclaimed {
            batch.ops.push(Op::DeleteAddress(address));
            self.claims.cluster_ips.unset_written(address);
            self.free_element(address);
        }
    }

    fn changes(&self, touched: BTreeSet<Frontend>) -> Changes {
        let mut changes = Changes::default();
        for frontend in touched {
            let (now, claims) = self.claims.frontends.get(frontend);
            let claims = self.claims.that_count(frontend.address, claims);
            match (self.wanted(frontend, now, claims), now) {
                (None, None) => {}
                (None, Some(_)) => changes.deleted.push(frontend),
                (Some(set), None) => changes.inserted.push((Rank::of(claims), frontend, set)),
                (Some(set), Some(now)) if set == now => {}
                (Some(set), Some(_)) => changes.replaced.push((frontend, set)),
            }
        }
        changes.inserted.sort_unstable_by_key(|&(rank, frontend, _)| (rank, frontend));
        changes
    }

    /// Frontends of a rank that the kernel has and keeps, the last one first.
    fn written_of(&self, rank: Rank, changes: &Changes) -> impl Iterator<Item = Frontend> {
        let is_deleted = |frontend: &Frontend| changes.deleted.binary_search(frontend).is_ok();
        let has_rank = move |(frontend, claims): &(Frontend, &[Claim])| {
            Rank::of(self.claims.that_count(frontend.address, claims)) == rank
        };
        let written = self.claims.frontends.each_written_with_claims().rev().filter(has_rank);
        written.map(|(frontend, _)| frontend).filter(move |frontend| !is_deleted(frontend))
    }

    /// Limits external addresses and node ports together, so that they do not fill the memory of every VM.
    fn limit_external(&mut self, changes: &mut Changes) {
        let (most, new) = (self.limits.external_frontends as usize, changes.of_rank(Rank::External));
        // `written()` counts all ranks, so below the limit there is nothing to count.
        if new == 0 || self.claims.frontends.written() + new <= most {
            return;
        }
        let left = most.saturating_sub(self.written_of(Rank::External, changes).count());
        let unfit = changes.keep(Rank::External, left);
        self.report_unplaced(
            unfit,
            &format!("no room for more than {most} frontends of external addresses and node ports"),
        );
    }

    /// Grows the map, or evicts frontends of a lower rank.
    fn grow_or_evict(&mut self, changes: &mut Changes, batch: &mut Batch<'_>) {
        let new_addresses = self.new_addresses(&batch.cluster_ips).count();
        let needed = changes.inserted.len() + new_addresses;
        if needed == 0 {
            return;
        }
        self.grow_for_insertions(needed, batch);
        if self.free_elements() >= needed {
            return;
        }
        let deleted = std::mem::take(&mut changes.deleted);
        self.delete(deleted, batch);
        // Each round makes room for its rank and the better ones.
        for rank in [Rank::ApiServer, Rank::ClusterIp] {
            let new = changes.inserted.iter().filter(|(other, ..)| *other <= rank).count();
            let ips =
                if rank == Rank::ClusterIp { new_addresses } else { self.new_addresses_of(rank, &batch.cluster_ips) };
            let excess = (new + ips).saturating_sub(self.free_elements());
            self.evict(excess, rank, changes, batch);
        }
        let mut left = self.free_elements();
        let mut unfit = Vec::new();
        for rank in [Rank::ApiServer, Rank::ClusterIp, Rank::External] {
            unfit.append(&mut changes.keep(rank, left));
            left -= changes.of_rank(rank);
            left = left.saturating_sub(self.new_addresses_of(rank, &batch.cluster_ips));
        }
        self.report_unplaced(unfit, &self.capacity_message());
    }

    /// Evicts up to `count` frontends of ranks worse than this one, the worst rank first.
    fn evict(&mut self, count: usize, rank: Rank, changes: &mut Changes, batch: &mut Batch<'_>) {
        if count == 0 {
            return;
        }
        let later = [Rank::External, Rank::ClusterIp].into_iter().filter(|other| *other > rank);
        let evicted = sorted_set(later.flat_map(|rank| self.written_of(rank, changes)).take(count));
        changes.replaced.retain(|(frontend, _)| !evicted.contains(frontend));
        let evicted = Vec::from_iter(evicted);
        self.delete(evicted.clone(), batch);
        self.report_unplaced(evicted, &self.capacity_message());
    }

    fn capacity_message(&self) -> String {
        format!("no room for more than {} frontends", self.limits.frontends)
    }

    /// ClusterIPs whose addresses a batch will write that has touched these.
    fn new_addresses<'a>(&'a self, touched: &'a BTreeSet<Address>) -> impl Iterator<Item = Address> + 'a {
        let cluster_ips = &self.claims.cluster_ips;
        let waiting = cluster_ips.unplaced.keys().filter(move |address| !touched.contains(address));
        let all = touched.iter().chain(waiting).copied().filter(|_| self.phase != Phase::Bootstrap);
        all.filter(move |&address| cluster_ips.change(address) == AddressChange::Put)
    }

    /// Number of those of a rank.
    fn new_addresses_of(&self, rank: Rank, touched: &BTreeSet<Address>) -> usize {
        let first = self.claims.cluster_ips_of(&api_server());
        let rank_of = |address| if first.contains(&address) { Rank::ApiServer } else { Rank::ClusterIp };
        self.new_addresses(touched).filter(|&address| rank_of(address) == rank).count()
    }

    /// Set that a frontend should have that has the set `now` and these claims that count: that of the first one whose
    /// set could be published. A set that is inherited from an earlier agent counts only where it is already in force.
    fn wanted(&self, frontend: Frontend, now: Option<u32>, claims: &[Claim]) -> Option<u32> {
        let mut sets = claims.iter().filter_map(|claim| self.sets.get(&claim.key(frontend)));
        sets.find(|set| !set.is_inherited || now == Some(set.id)).map(|set| set.id)
    }

    fn insert(&mut self, frontend: Frontend, set: u32, batch: &mut Batch<'_>) {
        // So far the ClusterIP refused calls to this port.
        if frontend.protocol == Protocol::Udp && self.claims.cluster_ips.is_written(frontend.address) {
            self.retired.add(frontend.protocol, [Backend::NOBODY]);
        }
        self.before_insertion(frontend.address, batch);
        batch.ops.push(Op::PutFrontend { frontend, set });
        self.claims.frontends.set_to(frontend, set);
    }

    /// Replaces frontends' sets. The kernel may use the memory of a replaced element for the next one
    /// (kernel/bpf/hashtab.c), so single replacements need a grace period between them. If that takes longer than
    /// writing all frontends again, the whole map is replaced, with one grace period.
    fn replace(&mut self, replaced: Vec<(Frontend, u32)>, batch: &mut Batch<'_>) {
        let written = self.elements();
        let is_worth_it = replaced.len() > 1 && written / FRONTENDS_PER_DRAIN < replaced.len();
        if is_worth_it && self.limits.may_replace {
            for (frontend, set) in replaced {
                self.claims.frontends.set_to(frontend, set);
            }
            return self.replace_frontends(self.frontends_capacity, batch);
        }
        for (frontend, set) in replaced {
            self.drain_if_freed(batch);
            batch.ops.push(Op::PutFrontend { frontend, set });
            self.claims.frontends.set_to(frontend, set);
            self.order.free();
        }
    }

    fn delete(&mut self, deleted: Vec<Frontend>, batch: &mut Batch<'_>) {
        self.retire(deleted.iter());
        batch.raises_epoch |= !deleted.is_empty();
        for frontend in deleted {
            batch.ops.push(Op::DeleteFrontend { frontend });
            self.claims.frontends.unset(frontend);
            self.free_element(frontend.address);
        }
    }

    /// Releases the element of a deleted key: its bit in the filter and its room.
    fn free_element(&mut self, address: Address) {
        self.order.filter.remove(address);
        self.order.free();
        self.starved.free(Shortage::Frontends);
    }

    /// Prepares the insertion of a key: waits until programs no longer read freed elements, and sets the address's bit
    /// in the filter.
    fn before_insertion(&mut self, address: Address, batch: &mut Batch<'_>) {
        self.drain_if_freed(batch);
        batch.ops.extend(self.order.filter.widen_for(address).map(Op::SetFilter));
    }

    pub(super) fn drain_if_freed(&mut self, batch: &mut Batch<'_>) {
        if self.order.must_drain() {
            self.drain(batch);
        }
    }

    /// Retires the backends of frontends that are deleted or get another set.
    fn retire<'a>(&mut self, frontends: impl Iterator<Item = &'a Frontend>) {
        let set = |frontend: &Frontend| Some((self.claims.frontends.set(*frontend)?, frontend.protocol));
        let left = sorted_map(frontends.filter_map(set));
        if left.is_empty() {
            return;
        }
        // Sets are freed at the end of a batch, so these still exist.
        for (set, &protocol) in self.sets.each_in_kernel().filter_map(|set| Some((set, left.get(&set.id)?))) {
            let members = set.members.unpack();
            self.retired.add(protocol, members.backends.iter().copied());
            if protocol == Protocol::Udp && members.eligible == 0 {
                self.retired.add(protocol, [Backend::NOBODY]);
            }
        }
    }

    /// Reports one problem for each Service, however many frontends it has.
    fn report_unplaced(&mut self, frontends: Vec<Frontend>, why: &str) {
        let mut services = BTreeMap::<Arc<ServiceName>, Vec<Frontend>>::new();
        for frontend in frontends {
            if let Some(owner) = self.claims.of(frontend).first() {
                services.entry(owner.service.clone()).or_default().push(frontend);
            }
        }
        for (service, frontends) in services {
            let are_not = if frontends.len() == 1 { "is not" } else { "are not" };
            let message = format!(
                "{why}; {} {are_not} served",
                some_of(frontends.get(..FRONTENDS_NAMED_MAX).unwrap_or(&frontends), frontends.len())
            );
            self.problems.add(&service, message);
            self.starved.add(&service, Shortage::Frontends);
        }
    }

    /// Writes the addresses of claimed ClusterIPs. Returns those that no Service claims any more.
    fn place_addresses(&mut self, batch: &mut Batch<'_>) -> Vec<Address> {
        let mut unclaimed = Vec::new();
        if self.phase == Phase::Bootstrap {
            return unclaimed;
        }
        let mut touched = std::mem::take(&mut batch.cluster_ips);
        if self.free_elements() != 0 {
            touched.extend(self.claims.cluster_ips.unplaced.keys());
        }
        let first = self.claims.cluster_ips_of(&api_server());
        let (first, others): (Vec<_>, Vec<_>) = touched.into_iter().partition(|address| first.contains(address));
        for address in [first, others].concat() {
            let was_unplaced = self.claims.cluster_ips.unplaced.remove(&address).is_some();
            self.problems.revision += u64::from(was_unplaced);
            match self.claims.cluster_ips.change(address) {
                AddressChange::Delete => unclaimed.push(address),
                AddressChange::Put => {
                    self.put_address(address, batch);
                    self.flush(batch, OPS_AT_ONCE);
                }
                AddressChange::Keep => self.claims.cluster_ips.remove_unused(address),
            }
        }
        unclaimed
    }

    fn put_address(&mut self, address: Address, batch: &mut Batch<'_>) {
        if self.free_elements() == 0 {
            let problem = self.unplaced_problem(address);
            self.problems.revision += 1;
            self.claims.cluster_ips.unplaced.insert(address, problem);
            return;
        }
        self.before_insertion(address, batch);
        batch.ops.push(Op::PutAddress(address));
        self.claims.cluster_ips.set_written(address);
    }

    fn unplaced_problem(&self, address: Address) -> Problem {
        let mut claims = self.claims.frontends.of_address(address).flat_map(|(_, claims)| claims);
        let service = claims.find(|claim| claim.source == FrontendSource::ClusterIp).map(|claim| &claim.service);
        let message = format!("{}; calls to other ports of {address} are not refused", self.capacity_message());
        match service {
            Some(service) => Problem::new(format_args!("Service {service}"), "spec.clusterIP", message),
            None => Problem::new(format_args!("ClusterIP {address}"), "", message),
        }
    }

    fn free_elements(&self) -> usize {
        (self.frontends_capacity as usize).saturating_sub(self.elements())
    }
}
