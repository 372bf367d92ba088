//! Watch of one client's policies, as bytes.

use std::{
    collections::BTreeMap,
    sync::Arc,
    task::{Poll, Waker},
};

use bytes::Bytes;
use cproxy_core::{ObjectName, api::Metadata};
use cproxy_policy::{PodIdentity, served};

use super::{Notice, Policies, PolicyScope, State, policy_object};
use crate::{
    event::encode,
    filter::Filter,
    kind::Kind,
    object::Meta,
    watch::expired,
    wire::{Change, Format, bookmark},
};

/// Start of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyStart {
    /// After the changes up to this version.
    After(u64),
    /// With an ADDED event for each policy, and a bookmark after them if `sends_end`.
    Initial {
        /// The client asked for a bookmark that ends the initial events.
        sends_end: bool,
    },
}

/// Watch of the policies of a client's pods.
pub struct PolicyWatch {
    policies: Arc<Policies>,
    scope: PolicyScope,
    filter: Filter,
    format: Format,
    wants_bookmarks: bool,
    slot: usize,
    /// Sequence number of the first notice that the client does not know; `None`: it is no longer there.
    position: Option<u64>,
    version: u64,
    confirmations: u64,
    /// The policies are to be sent first, with a bookmark after them or not.
    initial: Option<bool>,
    is_over: bool,
}

impl PolicyWatch {
    /// Starts a watch.
    #[must_use]
    pub fn new(
        policies: Arc<Policies>,
        scope: PolicyScope,
        filter: Filter,
        wants_bookmarks: bool,
        format: Format,
        start: PolicyStart,
    ) -> Self {
        let mut state = policies.state();
        let slot = state.watchers.add(Some(vec![scope.topic()]));
        let head = state.next_sequence();
        let (position, version, initial, confirmations) = match start {
            // As for other kinds: a client that resumes learns at once that its version is one that the relay knows.
            PolicyStart::After(version) => {
                (state.sequence_after(version), version, None, state.confirmations.wrapping_sub(1))
            }
            PolicyStart::Initial { sends_end } => (Some(head), 0, Some(sends_end), state.confirmations),
        };
        if let Some(position) = position.filter(|position| *position < head) {
            state.watchers.set_first_event(slot, position);
        }
        drop(state);
        Self {
            policies,
            scope,
            filter,
            format,
            wants_bookmarks,
            slot,
            position,
            version,
            confirmations,
            initial,
            is_over: false,
        }
    }

    /// The next bytes; `None` at the end. If there are none yet, [`Policies::wake_due`] calls the waker once there are.
    pub fn poll_next(&mut self, waker: &Waker) -> Poll<Option<Bytes>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let policies = self.policies.clone();
        let mut state = policies.state();
        if let Some(sends_end) = self.initial.take() {
            let bytes = self.initial_events(&state, sends_end);
            if !bytes.is_empty() {
                return Poll::Ready(Some(bytes));
            }
        }
        let head = state.next_sequence();
        let first = state.watchers.take_first_event(self.slot).unwrap_or(head);
        let position = self.position.map(|position| position.max(first)).filter(|at| *at >= state.first_sequence);
        let Some(position) = position else {
            self.is_over = true;
            return Poll::Ready(Some(expired(self.version).event(self.format)));
        };
        let bytes = self.events(&state, position);
        self.position = Some(head);
        if !bytes.is_empty() {
            self.version = state.versions.last();
            return Poll::Ready(Some(bytes));
        }
        state.watchers.wait(self.slot, waker);
        if self.wants_bookmarks && self.confirmations != state.confirmations {
            (self.confirmations, self.version) = (state.confirmations, state.versions.last());
            return Poll::Ready(Some(self.bookmark(false)));
        }
        Poll::Pending
    }

    /// Ends the watch in an orderly way. Returns a last bookmark, from which the client resumes.
    pub fn end(&mut self) -> Option<Bytes> {
        let is_open = !std::mem::replace(&mut self.is_over, true);
        let is_complete = self.initial.is_none() && self.position.is_some();
        (is_open && is_complete && self.wants_bookmarks).then(|| self.bookmark(false))
    }

    /// Ends the watch with an error after which the client lists anew.
    pub fn expire(&mut self) -> Option<Bytes> {
        let is_open = !std::mem::replace(&mut self.is_over, true);
        is_open.then(|| expired(self.version).event(self.format))
    }

    fn bookmark(&self, ends_initial_events: bool) -> Bytes {
        bookmark(self.format, Kind::PodPolicies, self.version, ends_initial_events)
    }

    fn initial_events(&mut self, state: &State, sends_end: bool) -> Bytes {
        (self.position, self.version) = (Some(state.next_sequence()), state.versions.last());
        let objects = state.objects(&self.scope).filter(|object| self.filter.has(object));
        let mut bytes: Vec<u8> = objects.flat_map(|object| encode(Change::Added, &object, self.format)).collect();
        if sends_end {
            bytes.extend_from_slice(&self.bookmark(true));
        }
        bytes.into()
    }

    /// Events of the pods that notices from a position on are about: each in its present state.
    fn events(&self, state: &State, position: u64) -> Bytes {
        let skipped = usize::try_from(position - state.first_sequence).unwrap_or(usize::MAX);
        let mut changed: BTreeMap<&ObjectName, Vec<&PodIdentity>> = BTreeMap::new();
        let is_concerned = |notice: &&Notice| match &self.scope {
            PolicyScope::Pod { name, .. } => notice.name == *name,
            PolicyScope::Node(_) => true,
        };
        for notice in state.notices.iter().skip(skipped).filter(is_concerned) {
            changed.entry(&notice.name).or_default().extend(&notice.gone);
        }
        let event = |(name, gone): (&ObjectName, Vec<&PodIdentity>)| {
            let meta = Meta { namespace: (*name.namespace).into(), name: (*name.name).into(), ..Meta::default() };
            if !self.filter.has_meta(Kind::PodPolicies, &meta) {
                return None;
            }
            if let Some(object) = state.object(&self.scope, name) {
                // Whether the client has it is not known; both types say the same to it.
                let change = if gone.is_empty() { Change::Modified } else { Change::Added };
                return Some(encode(change, &object, self.format));
            }
            let gone = gone.into_iter().find(|gone| self.scope.shows(name, gone))?;
            let mut policy = served::PodPolicy {
                metadata: Metadata {
                    name: (*name.name).to_owned(),
                    namespace: name.namespace.to_string(),
                    ..Metadata::default()
                },
                ..served::PodPolicy::default()
            };
            policy.spec.pod_uid = gone.uid.to_string();
            Some(encode(Change::Deleted, &policy_object(policy, state.versions.last()), self.format))
        };
        changed.into_iter().filter_map(event).flatten().collect::<Vec<u8>>().into()
    }
}

impl Drop for PolicyWatch {
    fn drop(&mut self) {
        self.policies.state().watchers.remove(self.slot);
    }
}
