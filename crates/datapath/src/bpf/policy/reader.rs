//! The policy's state in the kernel, also without an agent.

use std::{io, net::IpAddr, os::fd::AsFd as _, time::Duration};

use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray};
use cproxy_core::Address;
use cproxy_ebpf::policy::{
    Denial, DenialKey, EGRESS, NO_RULE, POLICY_DENIALS_MIN, PROTOCOL_SCTP, PolicyCounter, StateWord,
};
use cproxy_policy::{Direction, Directions, Protocol};
use rustix::time::{ClockId, clock_gettime};

use super::{
    directory::PolicyPins,
    error::PolicyError,
    names::{COUNTERS, DENIALS, STATE},
};
use crate::bpf::{
    error::{TableError, root_cause},
    open::{Access, open_map},
    syscalls::array_elements,
};

/// Counters by their names in the JSON contract.
const NAMES: [(PolicyCounter, &str); 4] = [
    (PolicyCounter::DeniedIngress, "policy_denied_ingress"),
    (PolicyCounter::DeniedEgress, "policy_denied_egress"),
    (PolicyCounter::AuditedIngress, "policy_audited_ingress"),
    (PolicyCounter::AuditedEgress, "policy_audited_egress"),
];

/// Peer that was denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedPeer {
    /// Direction of the traffic.
    pub direction: Direction,
    /// The other side.
    pub peer: IpAddr,
    /// Port that was called.
    pub port: u16,
    /// Protocol of the port.
    pub protocol: Protocol,
    /// Number of calls, datagrams or connections.
    pub count: u64,
    /// Time since the last one.
    pub age: Duration,
    /// Rule that has denied it; `None`: no rule has allowed it.
    pub rule: Option<u32>,
    /// It was only recorded.
    pub is_audited: bool,
}

/// Policy of a pod in the kernel.
#[derive(Debug)]
pub struct PolicyReader {
    pins: PolicyPins,
}

impl PolicyReader {
    /// Reader of the policy beside a table; `None` if none was ever enforced there.
    #[must_use]
    pub fn new(pins: PolicyPins) -> Option<Self> {
        pins.exist().then_some(Self { pins })
    }

    /// Directions that are enforced or audited, and whether they are only audited.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn state(&self) -> Result<(Directions, bool), PolicyError> {
        let map = self.open(STATE)?;
        let states = array_elements::<cproxy_ebpf::policy::State>(map.fd().as_fd(), 0, 1);
        let states = states.map_err(|error| PolicyError::Io(self.pins.object(STATE), error))?;
        let word = StateWord(states.first().map_or(0, |state| state.word));
        Ok((Directions { ingress: word.ingress(), egress: word.egress() }, word.audit()))
    }

    /// Counters by name, those of all protocols together.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn counters(&self) -> Result<Vec<(&'static str, u64)>, PolicyError> {
        let failed = |error| TableError::Read(COUNTERS, error);
        let map = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(self.open(COUNTERS)?)).map_err(failed)?;
        let sum =
            |index: u32| Ok::<u64, MapError>(map.get(&index, 0)?.iter().fold(0, |sum, &one| sum.wrapping_add(one)));
        let mut counters = Vec::new();
        for (counter, name) in NAMES {
            let of_protocols = [counter as u32, counter as u32 + 1].map(|index| sum(index).map_err(failed));
            counters.push((name, of_protocols.into_iter().sum::<Result<u64, _>>()?));
        }
        counters.push(("policy_denied_sockets", sum(PolicyCounter::DeniedSockets as u32).map_err(failed)?));
        Ok(counters)
    }

    /// The last denied peers, the latest first.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn denials(&self) -> Result<Vec<DeniedPeer>, PolicyError> {
        let failed = |error| TableError::Read(DENIALS, error);
        let map = HashMap::<_, DenialKey, Denial>::try_from(Map::LruHashMap(self.open(DENIALS)?)).map_err(failed)?;
        let now = clock_gettime(ClockId::Monotonic);
        let now_ns = (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64);
        // An entry that is evicted meanwhile is left out.
        let mut entries: Vec<_> = map.iter().filter_map(Result::ok).collect();
        entries.sort_unstable_by_key(|(_, denial)| std::cmp::Reverse(denial.last_ns));
        entries.truncate(POLICY_DENIALS_MIN as usize);
        Ok(entries.into_iter().map(|(key, denial)| denied_peer(key, denial, now_ns)).collect())
    }

    fn open(&self, name: &str) -> Result<MapData, PolicyError> {
        let path = self.pins.object(name);
        open_map(&path, Access::ReadOnly)
            .map_err(|error| TableError::Pin(path, io::Error::other(root_cause(&error))).into())
    }
}

fn denied_peer(key: DenialKey, denial: Denial, now_ns: u64) -> DeniedPeer {
    DeniedPeer {
        direction: if key.direction == EGRESS { Direction::Egress } else { Direction::Ingress },
        peer: Address::from_words(key.peer).into(),
        port: key.port,
        protocol: match key.protocol {
            cproxy_ebpf::PROTOCOL_UDP => Protocol::Udp,
            PROTOCOL_SCTP => Protocol::Sctp,
            _ => Protocol::Tcp,
        },
        count: denial.count,
        age: Duration::from_nanos(now_ns.saturating_sub(denial.last_ns)),
        rule: Some(denial.rule).filter(|rule| *rule != NO_RULE),
        is_audited: denial.is_audited != 0,
    }
}
