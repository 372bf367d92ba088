//! Filter of events.

use std::path::PathBuf;

use cproxy_core::{Address, ExcludedCgroup, Frontend, Protocol};
use cproxy_ebpf::{
    FrontendKey,
    observation::{FILTER_ADDRESSES_MAX, Filter, Verdict},
};

use crate::bpf::encoding;

/// Events that a tracer wants. All parts must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceFilter {
    /// Destinations of which one must match, at most [`Self::ADDRESSES_MAX`]; none: any.
    pub destinations: Vec<TraceDestination>,
    /// Id of the process.
    pub pid: Option<u32>,
    /// Cgroup in or below which the process is.
    pub cgroup: Option<ExcludedCgroup>,
    /// Protocol.
    pub protocol: Option<Protocol>,
    /// Directory of that cgroup.
    pub cgroup_dir: Option<PathBuf>,
    /// Verdicts; none: no event is wanted.
    pub verdicts: Vec<Verdict>,
    /// Whether denials by network policy are wanted, also those that are only audited.
    pub denials: bool,
}

/// Destination of a filter, as the application names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TraceDestination {
    /// All ports of an address.
    Address(Address),
    /// One port.
    Frontend(Frontend),
}

impl TraceFilter {
    /// Largest number of destinations.
    pub const ADDRESSES_MAX: usize = FILTER_ADDRESSES_MAX as usize;

    pub(super) fn for_kernel(&self) -> Filter {
        Filter {
            cgroup_id: self.cgroup.map_or(0, |cgroup| cgroup.id),
            cgroup_level: self.cgroup.map_or(0, |cgroup| cgroup.level),
            verdicts: self.kernel_verdicts().fold(0, |bits, verdict| bits | 1 << verdict as u32),
            pid: self.pid.unwrap_or(0),
            protocol: self.protocol.map_or(0, |protocol| encoding::protocol_number(protocol).into()),
            has_addresses: (!self.destinations.is_empty()).into(),
            zero: 0,
        }
    }

    /// Verdicts that the kernel's filter lets pass: denials come after the call of the same socket to a destination.
    fn kernel_verdicts(&self) -> impl Iterator<Item = Verdict> {
        let of_sockets = (self.denials && !self.destinations.is_empty()).then_some(Verdict::Forwarded);
        self.verdicts.iter().copied().chain(of_sockets)
    }

    /// Keys of the destinations in the kernel's map.
    pub(super) fn keys(&self) -> impl Iterator<Item = FrontendKey> {
        self.destinations.iter().map(|destination| match *destination {
            TraceDestination::Address(address) => encoding::address_key(address),
            TraceDestination::Frontend(frontend) => encoding::key(frontend),
        })
    }
}
