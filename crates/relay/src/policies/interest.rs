//! Address sets that a client gets: those that the policies of its pods name.

use std::{
    collections::BTreeSet,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use cproxy_policy::SetName;

use super::{Policies, PolicyScope};
use crate::{filter::Visibility, kind::Kind, object::Meta};

/// Names of address sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interest(BTreeSet<SetName>);

impl Extend<SetName> for Interest {
    fn extend<I: IntoIterator<Item = SetName>>(&mut self, names: I) {
        self.0.extend(names);
    }
}

impl Visibility for Interest {
    fn allows(&self, kind: Kind, meta: &Meta) -> bool {
        let set = meta.name.split_once('-').and_then(|(set, _)| SetName::parse(set));
        kind == Kind::AddressSlices && set.is_some_and(|set| self.0.contains(&set))
    }

    fn topics(&self) -> Option<Vec<Box<str>>> {
        Some(self.0.iter().map(|set| set.to_string().into()).collect())
    }
}

/// Future that completes when a client's policies name other sets than before: its watch of slices ends then.
pub struct InterestWatch {
    policies: Arc<Policies>,
    scope: PolicyScope,
    interest: Interest,
    slot: usize,
    has_compared: bool,
}

impl InterestWatch {
    /// Waits for sets other than these.
    #[must_use]
    pub fn new(policies: Arc<Policies>, scope: PolicyScope, interest: Interest) -> Self {
        let slot = policies.state().watchers.add(Some(vec![scope.topic()]));
        Self { policies, scope, interest, slot, has_compared: false }
    }

    #[cfg(test)]
    pub(super) fn interest(&self) -> &Interest {
        &self.interest
    }
}

impl Future for InterestWatch {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.policies.state();
        state.watchers.wait(this.slot, context.waker());
        let is_due = state.watchers.take_first_event(this.slot).is_some() || !this.has_compared;
        this.has_compared = true;
        let has_changed = is_due && state.interest(&this.scope) != this.interest;
        if has_changed { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for InterestWatch {
    fn drop(&mut self) {
        self.policies.state().watchers.remove(self.slot);
    }
}
