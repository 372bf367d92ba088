//! Maps of the policy.

use std::{
    io, iter,
    mem::offset_of,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use aya::maps::{Array, HashMap, LpmTrie, MapData, MapType, lpm_trie::Key};
use aya_obj::generated::{BPF_F_INNER_MAP, BPF_F_NO_PREALLOC};
use cproxy_core::ExcludedCgroup;
use cproxy_ebpf::policy::{EXEMPT_CGROUPS_MAX, IntervalWord, NO_RULE, POLICY_RANGES_MAX, RunsWord, State, StateWord};
use cproxy_policy::{Directions, Interval, Operation, Protocol, Reason, Runs, Verdict};

use super::{
    directory::PolicyPins,
    error::PolicyError,
    names::{INTERVALS, PEERS, RANGES, STATE},
};
use crate::bpf::{
    error::{TableError, root_cause},
    linked::LinkedError,
    map_spec::MapShape,
    mapping::Mapping,
    open::{Access, open_map},
    syscalls::{inner_map_id, map_create, set_inner_map},
    together::together,
};

/// Settings that do not change with the policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicySettings {
    /// Cookie of the pod's network namespace.
    pub netns_cookie: u64,
    /// Cgroups whose calls no policy concerns.
    pub exempt_cgroups: Vec<ExcludedCgroup>,
    /// Whether denials are only recorded.
    pub is_audited: bool,
}

/// Maps of the policy, open for writing. One process has them: it holds the lock of the pin directory.
pub struct PolicyMaps {
    state: Mapping,
    outer: [(PathBuf, MapData); 3],
    /// Maps that this process has made and filled last.
    last: Option<Generation>,
    /// Number of those maps, if they are not in force yet.
    number: u32,
    is_audited: bool,
}

/// Maps of a generation.
struct Generation {
    peers: HashMap<MapData, [u32; 4], u64>,
    ranges: LpmTrie<MapData, [u32; 4], u64>,
    intervals: Array<MapData, u64>,
}

impl PolicyMaps {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn open(pins: &PolicyPins) -> Result<Self, PolicyError> {
        let open = |name: &str| {
            let path = pins.object(name);
            match open_map(&path, Access::ReadWrite) {
                Ok(map) => Ok((path, map)),
                Err(error) => Err(TableError::Pin(path, io::Error::other(root_cause(&error)))),
            }
        };
        let state = open(STATE)?;
        let state = Mapping::new(&state.1, STATE, size_of::<State>())?;
        let mut maps = Self {
            state,
            outer: [open(PEERS)?, open(RANGES)?, open(INTERVALS)?],
            last: None,
            number: 0,
            is_audited: false,
        };
        maps.number = maps.word()?.generation();
        Ok(maps)
    }

    /// Directions that are enforced, by this process or one before.
    ///
    /// # Errors
    /// The map is too small.
    pub fn enforced(&self) -> Result<Directions, PolicyError> {
        let word = self.word()?;
        Ok(Directions { ingress: word.ingress(), egress: word.egress() })
    }

    /// Whether a policy has ever been written.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn has_policy(&self) -> Result<bool, PolicyError> {
        let number = self.word()?.generation();
        let [(path, peers), ..] = &self.outer;
        let id = inner_map_id(peers.fd().as_fd(), number).map_err(|error| LinkedError::Io(path.clone(), error))?;
        Ok(id.is_some())
    }

    /// Writes settings. They are in force at once.
    ///
    /// # Errors
    /// The map is too small.
    pub fn configure(&mut self, settings: &PolicySettings) -> Result<(), PolicyError> {
        self.set(offset_of!(State, netns_cookie), settings.netns_cookie)?;
        let exempt = settings.exempt_cgroups.iter().map(|cgroup| (cgroup.id, u64::from(cgroup.level)));
        for (index, (id, level)) in exempt.chain(iter::repeat((0, 0))).take(EXEMPT_CGROUPS_MAX).enumerate() {
            let offset_bytes = offset_of!(State, exempt_cgroups) + index * size_of::<cproxy_ebpf::ExcludedCgroup>();
            self.set(offset_bytes + size_of::<u64>(), level)?;
            self.set(offset_bytes, id)?;
        }
        self.is_audited = settings.is_audited;
        let enforced = self.enforced()?;
        let generation = self.word()?.generation();
        self.set_word(generation, enforced)
    }

    /// Carries out a change of the policy. The programs of a direction are attached before it is enforced.
    ///
    /// # Errors
    /// The kernel refuses, and the maps are as they were.
    pub fn apply(&mut self, operation: &Operation) -> Result<(), PolicyError> {
        match *operation {
            Operation::NewMaps { peers, intervals } => return self.make_maps(peers, intervals),
            Operation::Enforce(directions) => return self.set_word(self.number, directions),
            _ => {}
        }
        let maps = self.last.as_mut().ok_or_else(|| TableError::OutOfRange(PEERS.to_owned()))?;
        let written = match *operation {
            Operation::Interval(slot, interval) => maps.intervals.set(slot, encoded(interval).0, 0),
            Operation::SetPeer(address, runs) => maps.peers.insert(address.words(), runs_word(runs).0, 0),
            Operation::RemovePeer(address) => maps.peers.remove(&address.words()),
            Operation::SetRange(range, runs) => {
                maps.ranges.insert(&Key::new(range.fixed_bits().into(), range.first().words()), runs_word(runs).0, 0)
            }
            Operation::RemoveRange(range) => {
                maps.ranges.remove(&Key::new(range.fixed_bits().into(), range.first().words()))
            }
            Operation::NewMaps { .. } | Operation::Enforce(_) => Ok(()),
        };
        written.map_err(|error| TableError::Write(format!("{operation:?}"), error).into())
    }

    /// Makes the maps of the generation that is not in force.
    fn make_maps(&mut self, peers: u32, intervals: u32) -> Result<(), PolicyError> {
        let number = self.word()?.generation() ^ 1;
        let shape =
            |map_type, key_bytes, entries, flags| MapShape { map_type, key_bytes, value_bytes: 8, entries, flags };
        let shapes = [
            (PEERS, shape(MapType::Hash, 16, peers, BPF_F_NO_PREALLOC)),
            (RANGES, shape(MapType::LpmTrie, 20, POLICY_RANGES_MAX, BPF_F_NO_PREALLOC)),
            (INTERVALS, shape(MapType::Array, 4, intervals, BPF_F_INNER_MAP)),
        ];
        let made = shapes.map(|(name, shape)| make(name, shape));
        let made = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let places: Vec<_> =
            self.outer.iter().zip(&made).map(|((path, outer), fd)| (path, outer.fd().as_fd(), fd)).collect();
        let placed = together(&places, |(path, outer, fd)| {
            set_inner_map(outer, number, fd.as_fd()).map_err(|error| LinkedError::Io(path.clone(), error))
        });
        placed.into_iter().collect::<Result<(), _>>()?;
        let mut maps = made.into_iter().zip(shapes).map(|(fd, (name, _))| {
            MapData::from_fd(fd).map_err(|error| TableError::Open(Path::new(name).to_owned(), error))
        });
        let mut next = || maps.next().unwrap_or_else(|| Err(TableError::OutOfRange(PEERS.to_owned())));
        let (peers, ranges, intervals) = (next()?, next()?, next()?);
        let failed = |error| TableError::Write("the maps of a policy".to_owned(), error);
        self.last = Some(Generation {
            peers: HashMap::try_from(aya::maps::Map::HashMap(peers)).map_err(failed)?,
            ranges: LpmTrie::try_from(aya::maps::Map::LpmTrie(ranges)).map_err(failed)?,
            intervals: Array::try_from(aya::maps::Map::Array(intervals)).map_err(failed)?,
        });
        self.number = number;
        Ok(())
    }

    fn word(&self) -> Result<StateWord, PolicyError> {
        let word = self.state.word(0).ok_or_else(|| TableError::OutOfRange(STATE.to_owned()))?;
        Ok(StateWord(word.load(Ordering::Acquire)))
    }

    fn set_word(&self, generation: u32, Directions { ingress, egress }: Directions) -> Result<(), PolicyError> {
        self.set(offset_of!(State, word), StateWord::new(generation, ingress, egress, self.is_audited).0)
    }

    fn set(&self, offset_bytes: usize, value: u64) -> Result<(), PolicyError> {
        let word = self.state.word(offset_bytes).ok_or_else(|| TableError::OutOfRange(STATE.to_owned()))?;
        word.store(value, Ordering::Release);
        Ok(())
    }
}

fn make(name: &'static str, shape: MapShape) -> Result<OwnedFd, TableError> {
    map_create(shape, name).map_err(|error| TableError::NoMemory { map: name, entries: shape.entries, error })
}

fn runs_word(runs: Runs) -> RunsWord {
    RunsWord::new((runs.ingress.first, runs.ingress.length), (runs.egress.first, runs.egress.length))
}

fn encoded(interval: Interval) -> IntervalWord {
    let rule = match interval.decision.reason {
        Reason::Rule(rule) => rule,
        Reason::Always | Reason::NoRule => NO_RULE,
    };
    let allows = interval.decision.verdict == Verdict::Allow;
    IntervalWord::new(protocol_number(interval.protocol), interval.first, interval.last, allows, rule)
}

/// Number of a protocol.
pub(super) fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => cproxy_ebpf::PROTOCOL_TCP,
        Protocol::Udp => cproxy_ebpf::PROTOCOL_UDP,
        Protocol::Sctp => cproxy_ebpf::policy::PROTOCOL_SCTP,
    }
}
