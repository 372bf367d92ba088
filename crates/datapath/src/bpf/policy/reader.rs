//! The policy's state in the kernel, also without an agent.

use std::{io, net::IpAddr, os::fd::AsFd as _, time::Duration};

use aya::maps::{HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, lpm_trie::Key};
use cproxy_core::{Address, sort_few_by};
use cproxy_ebpf::policy::{
    Denial, DenialKey, EGRESS, EXEMPT_CGROUPS_MAX, IntervalWord, NO_RULE, POLICY_DENIALS_MIN, PROTOCOL_SCTP,
    PolicyCounter, RunsWord, State, StateWord,
};
use cproxy_policy::{Direction, Directions, Protocol};
use rustix::time::{ClockId, clock_gettime};

use super::{
    directory::PolicyPins,
    error::PolicyError,
    maps::protocol_number,
    names::{COUNTERS, DENIALS, INTERVALS, PEERS, RANGES, STATE},
};
use crate::bpf::{
    error::{TableError, root_cause},
    linked::LinkedError,
    open::{Access, open_map},
    pins::PinDir,
    syscalls::{array_elements, inner_map_id},
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

/// State of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyInForce {
    /// Directions that are enforced or audited.
    pub directions: Directions,
    /// Whether they are only audited.
    pub is_audited: bool,
    /// Cookie of the pod's network namespace. Sockets in others are not the pod's.
    pub netns_cookie: u64,
    /// Ids of cgroups whose calls no policy concerns.
    pub exempt_cgroups: Vec<u64>,
    /// Maps in force.
    generation: u32,
}

/// Decision of the policy in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    /// Whether the traffic is allowed.
    pub is_allowed: bool,
    /// Rule that says so; `None`: none matches, or the peer is the VM itself or its node.
    pub rule: Option<u32>,
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

    /// State of a policy that isolates the pod, whether an agent follows it or not; `None` if there is none, or it
    /// cannot be read.
    #[must_use]
    pub fn isolating(pins: &PinDir) -> Option<PolicyInForce> {
        let state = Self::new(PolicyPins::new(pins))?.state().ok()?;
        (state.directions != Directions::default()).then_some(state)
    }

    /// State of the policy in force.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn state(&self) -> Result<PolicyInForce, PolicyError> {
        let map = self.open(STATE)?;
        let states = array_elements::<State>(map.fd().as_fd(), 0, 1);
        let states = states.map_err(|error| LinkedError::Io(self.pins.object(STATE), error))?;
        let state = states.first().ok_or_else(|| TableError::OutOfRange(STATE.to_owned()))?;
        let word = StateWord(state.word);
        let exempt: &[_; EXEMPT_CGROUPS_MAX] = &state.exempt_cgroups;
        Ok(PolicyInForce {
            directions: Directions { ingress: word.ingress(), egress: word.egress() },
            is_audited: word.audit(),
            netns_cookie: state.netns_cookie,
            exempt_cgroups: exempt.iter().map(|cgroup| cgroup.id).filter(|id| *id != 0).collect(),
            generation: word.generation(),
        })
    }

    /// The decision of a policy in force about traffic of a peer, as the programs make it. The port is the pod's own
    /// for ingress, and the peer's for egress. All is allowed in a direction that is not enforced.
    ///
    /// # Errors
    /// A map cannot be read, as when the policy changes meanwhile.
    pub fn decide(
        &self,
        state: &PolicyInForce,
        direction: Direction,
        peer: Address,
        protocol: Protocol,
        port: u16,
    ) -> Result<PolicyDecision, PolicyError> {
        if !state.directions.has(direction) {
            return Ok(PolicyDecision { is_allowed: true, rule: None });
        }
        let runs = RunsWord(self.runs(state.generation, peer)?);
        let (first, length) = runs.run(if direction == Direction::Egress { EGRESS } else { 0 });
        let map = self.open_inner(INTERVALS, state.generation)?;
        let intervals = array_elements::<u64>(map.fd().as_fd(), first, length);
        let intervals = intervals.map_err(|error| LinkedError::Io(self.pins.object(INTERVALS), error))?;
        let number = protocol_number(protocol);
        let found = intervals.into_iter().map(IntervalWord).find(|word| word.contains(number, port));
        Ok(found.map_or(PolicyDecision { is_allowed: false, rule: None }, |word| PolicyDecision {
            is_allowed: word.allows(),
            rule: Some(word.rule()).filter(|rule| *rule != NO_RULE),
        }))
    }

    /// Runs of an address; 0 without any.
    fn runs(&self, generation: u32, peer: Address) -> Result<u64, PolicyError> {
        let failed = |name: &'static str| move |error| TableError::Read(name, error);
        let peers = Map::HashMap(self.open_inner(PEERS, generation)?);
        let peers = HashMap::<_, [u32; 4], u64>::try_from(peers).map_err(failed(PEERS))?;
        match peers.get(&peer.words(), 0) {
            Ok(runs) => return Ok(runs),
            Err(MapError::KeyNotFound) => {}
            Err(error) => return Err(failed(PEERS)(error).into()),
        }
        let ranges = Map::LpmTrie(self.open_inner(RANGES, generation)?);
        let ranges = LpmTrie::<_, [u32; 4], u64>::try_from(ranges).map_err(failed(RANGES))?;
        match ranges.get(&Key::new(128, peer.words()), 0) {
            Ok(runs) => Ok(runs),
            Err(MapError::KeyNotFound) => Ok(0),
            Err(error) => Err(failed(RANGES)(error).into()),
        }
    }

    /// The map of a generation in an array of maps.
    fn open_inner(&self, name: &'static str, generation: u32) -> Result<MapData, PolicyError> {
        let outer = self.open(name)?;
        let id = inner_map_id(outer.fd().as_fd(), generation);
        let id = id.and_then(|id| id.ok_or_else(|| io::ErrorKind::NotFound.into()));
        let id = id.map_err(|error| LinkedError::Io(self.pins.object(name), error))?;
        MapData::from_id(id).map_err(|error| TableError::Read(name, error).into())
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
        sort_few_by(&mut entries, |(_, one), (_, other)| other.last_ns.cmp(&one.last_ns));
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
