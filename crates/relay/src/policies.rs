//! Policies of pods and the address sets that they name: what is known of them, and the clients that follow it.
//!
//! ```text
//! Pods, Namespaces, NetworkPolicies -> Source -> changed names -> publish -> notices   -> PolicyWatch, list
//!                         (or another relay)                              -> slices    -> Collection
//! ```
//!
//! The policy of a pod is written when a client asks for it or is told of a change: nothing of it is kept. Slices are
//! kept as objects, since many clients share them.

mod input;
mod interest;
mod object;
mod scope;
mod source;
mod summary;
mod version;
mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use bytes::Bytes;
use cproxy_core::{ObjectName, Problem};
use cproxy_policy::{AddressSlice, Changes, PodIdentity, SliceName, served};
use prost::Message as _;

use self::{input::Inputs, source::Source, version::Versions};
pub use self::{
    input::{PolicyChange, PolicyInput, PolicyUpdate},
    interest::{Interest, InterestWatch},
    object::{PolicyKind, PolicyObject, policy_deletion, policy_object_name},
    scope::PolicyScope,
    summary::PolicySummary,
    watch::{PolicyStart, PolicyWatch},
};
use crate::{
    collection::{Collection, Update},
    json::object_json,
    kind::Kind,
    object::{Meta, Object, item_bytes, push_item},
    watchers::Watchers,
    wire::{Format, list_head, list_tail},
};

/// Changes of pods' policies that are remembered for clients that resume.
const NOTICES_MAX: usize = 1 << 16;

/// Policies of pods, and the collection of slices that they name.
pub struct Policies {
    slices: Arc<Collection>,
    /// Updates since the last publication. What clients see is what was published, so that each version stands for it.
    updates: Mutex<Vec<(PolicyInput, PolicyUpdate)>>,
    state: Mutex<State>,
}

struct State {
    source: Source,
    inputs: Inputs,
    versions: Versions,
    /// Changes since the last publication.
    pending: Changes,
    /// Pods that were there then, and have gone.
    gone: BTreeMap<ObjectName, PodIdentity>,
    /// A source has confirmed what is known since then.
    is_confirmed: bool,
    /// The first publication is over.
    is_synced: bool,
    notices: VecDeque<Notice>,
    /// Sequence number of the first notice.
    first_sequence: u64,
    /// Oldest version that a watch can be resumed from.
    oldest_version: u64,
    confirmations: u64,
    watchers: Watchers,
}

/// Change of a pod's policy.
struct Notice {
    version: u64,
    name: ObjectName,
    /// The pod that had the name before, if it has gone.
    gone: Option<PodIdentity>,
}

impl Policies {
    /// Policies that are resolved from Pods, Namespaces and NetworkPolicies. `epoch` is a random number of this
    /// process.
    #[must_use]
    pub fn resolved(slices: Arc<Collection>, epoch: u64) -> Self {
        Self::new(slices, Source::resolver(), epoch)
    }

    /// Policies as another relay has resolved them.
    #[must_use]
    pub fn followed(slices: Arc<Collection>, epoch: u64) -> Self {
        Self::new(slices, Source::followed(), epoch)
    }

    fn new(slices: Arc<Collection>, source: Source, epoch: u64) -> Self {
        let state = State {
            inputs: Inputs::new(source.inputs()),
            source,
            versions: Versions::new(epoch),
            pending: Changes::default(),
            gone: BTreeMap::new(),
            is_confirmed: false,
            is_synced: false,
            notices: VecDeque::new(),
            first_sequence: 0,
            oldest_version: 0,
            confirmations: 0,
            watchers: Watchers::default(),
        };
        Self { slices, updates: Mutex::default(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Objects that the policies follow.
    #[must_use]
    pub fn inputs(&self) -> &'static [PolicyInput] {
        self.state().source.inputs()
    }

    /// Takes an update of a source. [`Self::publish`] applies it.
    pub fn add(&self, input: PolicyInput, update: PolicyUpdate) {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner).push((input, update));
    }

    /// Applies the updates so far, and publishes what has changed once the first lists are complete. Returns the number
    /// of updates and of changed objects.
    pub fn publish(&self, now: Instant) -> (usize, usize) {
        let updates = std::mem::take(&mut *self.updates.lock().unwrap_or_else(PoisonError::into_inner));
        let count = updates.len();
        let mut state = self.state();
        updates.into_iter().for_each(|(input, update)| state.apply(input, update));
        (count, state.publish(&self.slices, now))
    }

    /// Wakes the clients that the publications since the last call concern.
    pub fn wake_due(&self) {
        self.state().watchers.wake_due();
    }

    /// Revision of the API server up to which all is known; `None` before the first lists are complete.
    #[must_use]
    pub fn known_revision(&self) -> Option<u64> {
        let state = self.state();
        state.inputs.least().filter(|_| state.is_synced)
    }

    /// Revision of the API server that a version is about.
    #[must_use]
    pub fn revision(version: u64) -> u64 {
        version::revision(version)
    }

    /// Largest version, of any process, that this one does not wait for.
    #[must_use]
    pub fn known_version(&self) -> u64 {
        self.known_revision().map_or(0, version::last_of)
    }

    /// Whether this process has published a version.
    #[must_use]
    pub fn has_published(&self, version: u64) -> bool {
        let state = self.state();
        state.is_synced && state.versions.has_issued(version)
    }

    /// Numbers for metrics; `None` before the first lists are complete.
    #[must_use]
    pub fn summary(&self) -> Option<PolicySummary> {
        let state = self.state();
        state.is_synced.then(|| PolicySummary {
            version: state.versions.last(),
            watchers: state.watchers.len(),
            ..state.source.counts()
        })
    }

    /// Rules that name sets of which no address is allowed, since the sets of one pod would be too large.
    #[must_use]
    pub fn problems(&self) -> BTreeSet<Problem> {
        self.state().source.problems()
    }

    /// Name of the pod with an identity.
    #[must_use]
    pub fn find_pod(&self, uid: &str) -> Option<ObjectName> {
        self.state().source.find_pod(uid)
    }

    /// Token of what a client sees: another one means that versions of before mean nothing.
    #[must_use]
    pub fn token(&self, kind: Kind, scope: &PolicyScope, interest: &Interest) -> String {
        let epoch = self.state().versions.epoch();
        let mut hasher = DefaultHasher::new();
        (epoch, scope).hash(&mut hasher);
        if kind == Kind::AddressSlices {
            interest.hash(&mut hasher);
        }
        format!("{epoch:016x}{:016x}", hasher.finish())
    }

    /// Sets that the policies of a client's pods name.
    #[must_use]
    pub fn interest(&self, scope: &PolicyScope) -> Interest {
        self.state().interest(scope)
    }

    /// The policies of a client's pods as a list.
    #[must_use]
    pub fn list(&self, scope: &PolicyScope, filter: impl Fn(&Meta) -> bool, format: Format) -> Bytes {
        let (objects, version) = {
            let state = self.state();
            let objects: Vec<_> = state.objects(scope).filter(|object| filter(&object.meta)).collect();
            (objects, state.versions.last())
        };
        let items_bytes = objects.iter().map(|object| item_bytes(&object.protobuf)).sum();
        let mut list = list_head(format, Kind::PodPolicies, version, items_bytes);
        match format {
            Format::Protobuf => objects.iter().for_each(|object| push_item(&mut list, &object.protobuf)),
            Format::Json => {
                let items: Vec<_> = objects.iter().filter_map(|object| object_json(object, false)).collect();
                list.extend(items.join(&b','));
            }
        }
        list.extend_from_slice(list_tail(format));
        list.into()
    }

    /// The policy of one of a client's pods.
    #[must_use]
    pub fn get(&self, scope: &PolicyScope, name: &ObjectName) -> Option<Object> {
        self.state().object(scope, name)
    }
}

impl State {
    fn apply(&mut self, input: PolicyInput, update: PolicyUpdate) {
        let swept = match update {
            PolicyUpdate::ListStarted => return self.inputs.start_list(input),
            PolicyUpdate::Listed(change) => {
                self.inputs.record_listed(input, change.name());
                return self.change(change);
            }
            PolicyUpdate::ListedUnreadable(name) => return self.inputs.record_listed(input, name),
            PolicyUpdate::Applied(change, revision) => {
                self.change(change);
                return self.inputs.set_known(input, revision);
            }
            PolicyUpdate::Known(revision) => {
                self.is_confirmed = true;
                return self.inputs.set_known(input, revision);
            }
            PolicyUpdate::ListDone(revision) => {
                self.is_confirmed = true;
                self.inputs.end_list(input, revision)
            }
        };
        // What the list lacks has gone.
        let names = self.source.names(input);
        for name in names.into_iter().filter(|name| !swept.contains(name)) {
            self.change(PolicyChange::gone(input, name));
        }
    }

    fn change(&mut self, change: PolicyChange) {
        let pod = change.pod();
        let before = pod.as_ref().and_then(|name| self.source.identity(name));
        let Changes { pods, slices } = self.source.apply(change);
        if let (Some(name), Some(before)) = (pod, before)
            && self.source.identity(&name).as_ref() != Some(&before)
        {
            self.gone.entry(name).or_insert(before);
        }
        self.pending.pods.extend(pods);
        self.pending.slices.extend(slices);
    }

    fn publish(&mut self, slices: &Collection, now: Instant) -> usize {
        let Some(revision) = self.inputs.latest() else { return 0 };
        let pending = std::mem::take(&mut self.pending);
        if !std::mem::replace(&mut self.is_synced, true) {
            return self.publish_all(revision, slices, now);
        }
        let count = pending.pods.len() + pending.slices.len();
        for name in pending.slices {
            let version = self.versions.next(revision);
            let update = match self.source.slice(name) {
                Some(slice) => Update::Applied(slice_object(&slice, version)),
                None => Update::Deleted(slice_object(&AddressSlice { name, addresses: Vec::new() }, version)),
            };
            slices.apply(update, now);
        }
        let mut gone = std::mem::take(&mut self.gone);
        for name in pending.pods {
            let version = self.versions.next(revision);
            self.notify(Notice { version, gone: gone.remove(&name), name });
        }
        if std::mem::take(&mut self.is_confirmed) {
            self.confirm(revision, slices, now);
        }
        count
    }

    /// Publishes everything as a list: there are no clients before.
    fn publish_all(&mut self, revision: u64, slices: &Collection, now: Instant) -> usize {
        slices.apply(Update::ListStarted, now);
        let names = self.source.slices();
        for &name in &names {
            let version = self.versions.next(revision);
            if let Some(slice) = self.source.slice(name) {
                slices.apply(Update::Listed(slice_object(&slice, version)), now);
            }
        }
        self.oldest_version = self.versions.next(revision);
        slices.apply(Update::ListDone(self.oldest_version), now);
        self.gone.clear();
        self.watchers.record_for_all();
        names.len()
    }

    fn confirm(&mut self, revision: u64, slices: &Collection, now: Instant) {
        slices.apply(Update::Bookmark(self.versions.next(revision)), now);
        self.confirmations += 1;
        self.watchers.record_for_all();
    }

    fn notify(&mut self, notice: Notice) {
        let sequence = self.next_sequence();
        self.watchers.record(&PolicyScope::topic_of_pod(&notice.name), sequence);
        let now = self.source.identity(&notice.name);
        for PodIdentity { node_name, .. } in now.iter().chain(&notice.gone) {
            self.watchers.record(&PolicyScope::topic_of_node(node_name), sequence);
        }
        self.notices.push_back(notice);
        if self.notices.len() > NOTICES_MAX
            && let Some(oldest) = self.notices.pop_front()
        {
            self.first_sequence += 1;
            self.oldest_version = oldest.version;
        }
    }

    fn next_sequence(&self) -> u64 {
        self.first_sequence + self.notices.len() as u64
    }

    /// Sequence number of the first notice after a version; `None` if later ones are missing.
    fn sequence_after(&self, version: u64) -> Option<u64> {
        let is_known = self.versions.has_issued(version) && version >= self.oldest_version;
        let index = self.notices.partition_point(|notice| notice.version <= version);
        is_known.then(|| self.first_sequence + index as u64)
    }

    /// Names of a client's pods that are there.
    fn pods(&self, scope: &PolicyScope) -> Vec<ObjectName> {
        match scope {
            PolicyScope::Pod { name, .. } => vec![name.clone()],
            PolicyScope::Node(node_name) => self.source.pods_of_node(node_name),
        }
    }

    fn objects(&self, scope: &PolicyScope) -> impl Iterator<Item = Object> {
        self.pods(scope).into_iter().filter_map(|name| self.object(scope, &name))
    }

    /// The policy of a pod, if the pod is there and the client's.
    fn object(&self, scope: &PolicyScope, name: &ObjectName) -> Option<Object> {
        let is_shown = self.source.identity(name).is_some_and(|pod| scope.shows(name, &pod));
        let policy = self.source.policy(name).filter(|_| is_shown)?;
        Some(policy_object(served::PodPolicy::new(&policy), self.versions.last()))
    }

    fn interest(&self, scope: &PolicyScope) -> Interest {
        let mut sets = Interest::default();
        for name in self.pods(scope) {
            let is_shown = self.source.identity(&name).is_some_and(|pod| scope.shows(&name, &pod));
            if let Some(policy) = self.source.policy(&name).filter(|_| is_shown) {
                sets.extend(policy.sets.iter().map(|set| set.name));
            }
        }
        sets
    }
}

fn slice_object(slice: &AddressSlice, version: u64) -> Object {
    let mut served = served::AddressSlice::new(slice);
    served.metadata.resource_version = version.to_string();
    let meta = Meta { name: SliceName::to_string(&slice.name).into(), version, ..Meta::default() };
    Object { kind: Kind::AddressSlices, meta, protobuf: served.encode_to_vec().into() }
}

fn policy_object(mut served: served::PodPolicy, version: u64) -> Object {
    served.metadata.resource_version = version.to_string();
    let (namespace, name) = (&*served.metadata.namespace, &*served.metadata.name);
    let meta = Meta { namespace: namespace.into(), name: name.into(), version, ..Meta::default() };
    Object { kind: Kind::PodPolicies, meta, protobuf: served.encode_to_vec().into() }
}

#[cfg(test)]
mod tests;
