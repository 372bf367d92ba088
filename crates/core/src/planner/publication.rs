//! Publication of sets: backends go into slots that no set refers to, then one store puts them in force.

use std::sync::Arc;

use super::{
    Batch, OPS_AT_ONCE, TablePlanner,
    capacity::{ExtentMap, Requester},
    desired_service::DesiredService,
    is_protected,
    packed_set::PackedSet,
    set_key::BackendSetKey,
    sets::{BackendSet, PublicationError, SetContent},
    starved::Shortage,
};
use crate::{Backend, Frontend, Members, Op, Protocol, ServiceName, slot_allocator::Extent};

impl TablePlanner {
    /// Publishes the sets of a Service. A set that cannot be published keeps its last backends.
    pub(super) fn publish_sets(
        &mut self,
        service: &Arc<ServiceName>,
        mut desired: DesiredService<'_>,
        batch: &mut Batch<'_>,
    ) {
        self.problems.replace(service, std::mem::take(&mut desired.problems));
        let sets = desired.sets(&self.claims.frontends);
        let mut left = self.limits.service_slots as usize;
        for (index, set) in sets.iter().enumerate() {
            let members = desired.members(set);
            let Some(rest) = left.checked_sub(members.backends.len()) else {
                let (count, most) = (sets.len() - index, self.limits.service_slots);
                let message = format!(
                    "more than the {most} backends of one Service; {count} of its ports and families are not served, \
                     or keep their last backends"
                );
                self.problems.add(service, message);
                break;
            };
            left = rest;
            let content = SetContent { members, affinity_seconds: desired.affinity_seconds() };
            let port_name = self.claims.share(&set.port.name);
            if let Err(error) = self.publish(&set.key(service, port_name), set.frontend, &content, batch) {
                self.problems.add(service, error.message);
                if let Some(shortage) = error.shortage {
                    self.starved.add(service, shortage);
                }
            }
            self.flush(batch, OPS_AT_ONCE);
        }
    }

    fn publish(
        &mut self,
        key: &BackendSetKey,
        frontend: Frontend,
        content: &SetContent,
        batch: &mut Batch<'_>,
    ) -> Result<(), PublicationError> {
        let is_there = self.sets.has(key)
            || self.sets.adopt(key, frontend, &self.claims)
            || self.inherit_set(key, frontend, batch);
        if is_there {
            self.change(key, content, batch).map_err(|error| error.and("its last backends stay"))
        } else {
            self.create(key, content, batch).map_err(|error| error.and("this port is not served"))
        }
    }

    /// Takes over the set of a Service port that goes in this batch, if all its frontends move to this port, as when a
    /// port is renamed. The frontends then need no write. A program may still hold the set's id from a frontend that
    /// was deleted earlier; it must not find another Service's backends there. Returns whether it was taken over.
    fn inherit_set(&mut self, key: &BackendSetKey, frontend: Frontend, batch: &mut Batch<'_>) -> bool {
        let Some(predecessor) = batch.gone_from.get(&frontend).cloned() else { return false };
        let Some(id) = self.sets.get(&predecessor).map(|set| set.id) else { return false };
        let claims = &self.claims;
        let is_own = |&frontend: &Frontend| {
            claims.owner(frontend).as_ref() == Some(key) && claims.frontends.set(frontend) == Some(id)
        };
        let may_inherit = batch.gone.get(&predecessor).is_some_and(|gone| gone.iter().all(is_own));
        if may_inherit {
            self.drain_if_freed(batch);
            self.sets.inherit(key, &predecessor);
        }
        may_inherit
    }

    fn create(
        &mut self,
        key: &BackendSetKey,
        content: &SetContent,
        batch: &mut Batch<'_>,
    ) -> Result<(), PublicationError> {
        content.fits(&self.limits)?;
        let by = Requester { is_protected: is_protected(&key.service), returned: 0 };
        let most = self.limits.sets;
        let id = self
            .allocate(ExtentMap::Sets, 1, by, batch)
            .ok_or_else(|| PublicationError::no_room(format!("no room for more than {most} Service ports")))?;
        let id = id.first;
        let (members, extent) = match self.write(key, content.members.clone(), by, batch) {
            Ok(written) => written,
            Err(error) => {
                self.sets.ids.release(Extent { first: id, count: 1 });
                return Err(error);
            }
        };
        let affinity = key.affinity(content.affinity_seconds);
        let set = BackendSet { id, extent, members, affinity, is_inherited: false };
        // The id may still have the affinity of another set.
        batch.ops.extend([Op::SetAffinity { set: id, affinity }, set.publication()]);
        self.sets.insert(key.clone(), set);
        self.record_change(&key.service, None, content.members.eligible as u32);
        Ok(())
    }

    fn change(
        &mut self,
        key: &BackendSetKey,
        content: &SetContent,
        batch: &mut Batch<'_>,
    ) -> Result<(), PublicationError> {
        let affinity = key.affinity(content.affinity_seconds);
        if let Some(set) = self.sets.get_mut(key).filter(|set| set.affinity != affinity) {
            batch.ops.push(Op::SetAffinity { set: set.id, affinity });
            set.affinity = affinity;
        }
        content.fits(&self.limits)?;
        self.change_members(key, &content.members, batch)?;
        if let Some(set) = self.sets.get_mut(key) {
            set.is_inherited = false;
        }
        Ok(())
    }

    fn change_members(
        &mut self,
        key: &BackendSetKey,
        members: &Members,
        batch: &mut Batch<'_>,
    ) -> Result<(), PublicationError> {
        let Some(set) = self.sets.get(key).filter(|set| set.members != PackedSet::of(members)) else { return Ok(()) };
        if is_protected(&key.service) && members.eligible == 0 && set.members.eligible() != 0 {
            let message = "it has no usable endpoints, and nothing works without the API server";
            return Err(PublicationError { message: message.to_owned(), shortage: None });
        }
        let (before, eligible) = (set.members.unpack(), members.eligible);
        let retired: Vec<_> = before.backends.iter().filter(|backend| !members.has(backend)).copied().collect();
        let by = Requester { is_protected: is_protected(&key.service), returned: set.extent.count };
        let (members, extent) = self.write(key, members.clone(), by, batch)?;
        batch.raises_epoch |= !retired.is_empty();
        self.retired.add(key.protocol, retired);
        if key.protocol == Protocol::Udp && before.eligible == 0 && eligible != 0 {
            self.retired.add(key.protocol, [Backend::NOBODY]);
        }
        batch.ops.extend(self.sets.switch(key, members, extent));
        self.record_change(&key.service, Some(before.eligible as u32), eligible as u32);
        self.starved.free(Shortage::Backends);
        Ok(())
    }

    /// Writes backends into free slots.
    fn write(
        &mut self,
        key: &BackendSetKey,
        members: Members,
        by: Requester,
        batch: &mut Batch<'_>,
    ) -> Result<(PackedSet, Extent), PublicationError> {
        let packed = PackedSet::of(&members);
        let extent = self.allocate(ExtentMap::Backends, packed.count(), by, batch).ok_or_else(|| {
            PublicationError::no_room(format!(
                "no room for {} more backends among {}",
                packed.count(),
                self.limits.slots
            ))
        })?;
        if packed.count() != 0 {
            batch.ops.push(Op::WriteBackends { first_slot: extent.first, members, are_counted: key.is_counted() });
        }
        Ok((packed, extent))
    }
}
