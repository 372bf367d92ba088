//! Filter of denials. The policy's programs send all of them, which are few.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use cproxy_core::Protocol;

use super::{
    event::{TraceEvent, name_of},
    filter::{TraceDestination, TraceFilter},
};
use crate::bpf::cgroups::cgroups_below;

/// Sockets that are remembered by what they were connected to, at most.
const SOCKETS_MAX: usize = 4_096;

/// Decides which events a tracer wants.
pub(super) struct DenialFilter {
    filter: TraceFilter,
    /// Sockets whose last call went to a destination of the filter: a denial has the backend, not the destination.
    sockets: HashSet<u64>,
    /// Whether a cgroup is in or below that of the filter.
    cgroups: HashMap<u64, bool>,
}

impl DenialFilter {
    pub(super) fn new(filter: &TraceFilter) -> Self {
        Self { filter: filter.clone(), sockets: HashSet::new(), cgroups: HashMap::new() }
    }

    /// Whether an event is one that the tracer wants. The kernel's filter has let it pass.
    pub(super) fn passes(&mut self, event: &TraceEvent) -> bool {
        if event.denial.is_some() {
            return self.passes_denial(event);
        }
        if self.filter.denials && !self.filter.destinations.is_empty() {
            if self.sockets.len() >= SOCKETS_MAX {
                self.sockets.clear();
            }
            self.sockets.insert(event.socket_cookie);
        }
        // Some pass the kernel's filter for their sockets alone.
        self.filter.verdicts.iter().any(|verdict| name_of(*verdict) == Some(event.verdict))
    }

    fn passes_denial(&mut self, event: &TraceEvent) -> bool {
        let TraceFilter { pid, protocol, cgroup_dir, destinations, .. } = &self.filter;
        let is_destination = |destination: &TraceDestination| match destination {
            TraceDestination::Address(address) => *address == event.frontend.address,
            TraceDestination::Frontend(frontend) => *frontend == event.frontend,
        };
        (pid.is_none() || *pid == event.pid)
            && protocol.is_none_or(|protocol: Protocol| protocol == event.frontend.protocol)
            && (destinations.is_empty()
                || destinations.iter().any(is_destination)
                || self.sockets.contains(&event.socket_cookie))
            && cgroup_dir.as_ref().is_none_or(|dir| is_below(&mut self.cgroups, event.cgroup_id, dir))
    }
}

fn is_below(known: &mut HashMap<u64, bool>, cgroup: u64, dir: &Path) -> bool {
    *known.entry(cgroup).or_insert_with(|| cgroups_below(dir).is_ok_and(|ids| ids.contains(&cgroup)))
}
