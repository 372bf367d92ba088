//! Frontends, with the claims on each and its set in the kernel.

use std::{collections::BTreeMap, sync::Arc};

use super::set_key::BackendSetKey;
use crate::{Address, Frontend, FrontendSource, Protocol, Scope, ServiceName, names::Text};

/// Claim of a Service on a frontend.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) service: Arc<ServiceName>,
    pub(super) port_name: Text,
    pub(super) source: FrontendSource,
    pub(super) scope: Scope,
}

impl Claim {
    /// Key of the set that the frontend gets.
    pub(super) fn key(&self, frontend: Frontend) -> BackendSetKey {
        BackendSetKey {
            service: self.service.clone(),
            port_name: self.port_name.clone(),
            protocol: frontend.protocol,
            family: frontend.address.family(),
            scope: self.scope,
        }
    }
}

/// Claims on one frontend: nearly always a single one, which needs no allocation.
#[derive(Debug, Default)]
enum FrontendClaims {
    #[default]
    None,
    One(Claim),
    Many(Box<[Claim]>),
}

impl FrontendClaims {
    fn as_slice(&self) -> &[Claim] {
        match self {
            Self::None => &[],
            Self::One(claim) => std::slice::from_ref(claim),
            Self::Many(claims) => claims,
        }
    }

    fn into_vec(self) -> Vec<Claim> {
        match self {
            Self::None => Vec::new(),
            Self::One(claim) => vec![claim],
            Self::Many(claims) => claims.into_vec(),
        }
    }
}

impl From<Vec<Claim>> for FrontendClaims {
    fn from(mut claims: Vec<Claim>) -> Self {
        match claims.len() {
            0 | 1 => claims.pop().map_or(Self::None, Self::One),
            _ => Self::Many(claims.into()),
        }
    }
}

/// Stands for a set while the kernel does not have the frontend. No map has room for such an id.
const UNWRITTEN: u32 = u32::MAX;

#[derive(Debug)]
struct FrontendEntry {
    claims: FrontendClaims,
    set: u32,
}

/// Frontends that a Service claims or that the kernel has.
#[derive(Debug, Default)]
pub(super) struct Frontends {
    known: BTreeMap<Frontend, FrontendEntry>,
    written: usize,
}

impl Frontends {
    /// Frontends of the kernel, without claims.
    pub(super) fn from_kernel(sets: BTreeMap<Frontend, u32>) -> Self {
        let written = sets.len();
        let known =
            sets.into_iter().map(|(frontend, set)| (frontend, FrontendEntry { claims: FrontendClaims::None, set }));
        Self { known: known.collect(), written }
    }

    /// Number of frontends that the kernel has.
    pub(super) fn written(&self) -> usize {
        self.written
    }

    /// All frontends.
    pub(super) fn each(&self) -> impl Iterator<Item = Frontend> {
        self.known.keys().copied()
    }

    /// Frontends that the kernel has, and their sets.
    pub(super) fn each_written(&self) -> impl Iterator<Item = (Frontend, u32)> {
        self.known.iter().filter(|(_, known)| known.set != UNWRITTEN).map(|(&frontend, known)| (frontend, known.set))
    }

    /// Set of a frontend in the kernel.
    pub(super) fn set(&self, frontend: Frontend) -> Option<u32> {
        self.known.get(&frontend).map(|known| known.set).filter(|&set| set != UNWRITTEN)
    }

    /// Records that the kernel has the frontend with this set.
    pub(super) fn set_to(&mut self, frontend: Frontend, set: u32) {
        let known =
            self.known.entry(frontend).or_insert(FrontendEntry { claims: FrontendClaims::None, set: UNWRITTEN });
        self.written += usize::from(known.set == UNWRITTEN);
        known.set = set;
    }

    /// Records that the kernel does not have the frontend any more.
    pub(super) fn unset(&mut self, frontend: Frontend) {
        let Some(known) = self.known.get_mut(&frontend) else { return };
        self.written -= usize::from(known.set != UNWRITTEN);
        known.set = UNWRITTEN;
        self.remove_unused(frontend);
    }

    /// Replaces the ids of sets.
    pub(super) fn renumber(&mut self, ids: &BTreeMap<u32, u32>) {
        for known in self.known.values_mut() {
            known.set = ids.get(&known.set).copied().unwrap_or(known.set);
        }
    }

    /// Claims on a frontend, the first in precedence first; see [`super::claims::Claims::of`].
    pub(super) fn claims(&self, frontend: Frontend) -> &[Claim] {
        self.known.get(&frontend).map(|known| known.claims.as_slice()).unwrap_or_default()
    }

    /// Set of a frontend in the kernel, and the claims on it.
    pub(super) fn get(&self, frontend: Frontend) -> (Option<u32>, &[Claim]) {
        let Some(known) = self.known.get(&frontend) else { return (None, &[]) };
        (Some(known.set).filter(|&set| set != UNWRITTEN), known.claims.as_slice())
    }

    /// Frontends that the kernel has, with the claims on each.
    pub(super) fn each_written_with_claims(&self) -> impl DoubleEndedIterator<Item = (Frontend, &[Claim])> {
        let written = self.known.iter().filter(|(_, known)| known.set != UNWRITTEN);
        written.map(|(&frontend, known)| (frontend, known.claims.as_slice()))
    }

    /// Adds a claim behind those that come `before` it.
    pub(super) fn claim(&mut self, frontend: Frontend, claim: Claim, before: impl Fn(&Claim) -> bool) {
        let known =
            self.known.entry(frontend).or_insert(FrontendEntry { claims: FrontendClaims::None, set: UNWRITTEN });
        known.claims = match std::mem::take(&mut known.claims) {
            FrontendClaims::None => FrontendClaims::One(claim),
            claims => {
                let mut claims = claims.into_vec();
                let index = claims.partition_point(before);
                claims.reserve_exact(1);
                claims.insert(index, claim);
                claims.into()
            }
        };
    }

    /// Removes a Service's claim on a frontend.
    pub(super) fn remove_claims(&mut self, frontend: Frontend, service: &ServiceName) {
        let Some(known) = self.known.get_mut(&frontend) else { return };
        let is_other = |claim: &Claim| *claim.service != *service;
        known.claims = match std::mem::take(&mut known.claims) {
            FrontendClaims::Many(claims) => claims.into_iter().filter(is_other).collect::<Vec<_>>().into(),
            FrontendClaims::One(claim) if is_other(&claim) => FrontendClaims::One(claim),
            FrontendClaims::One(_) | FrontendClaims::None => FrontendClaims::None,
        };
        self.remove_unused(frontend);
    }

    fn remove_unused(&mut self, frontend: Frontend) {
        let is_used = |known: &FrontendEntry| known.set != UNWRITTEN || !known.claims.as_slice().is_empty();
        if self.known.get(&frontend).is_some_and(|known| !is_used(known)) {
            self.known.remove(&frontend);
        }
    }

    /// Claimed frontends of one address.
    pub(super) fn of_address(&self, address: Address) -> impl Iterator<Item = (Frontend, &[Claim])> {
        let first = Frontend { address, port: 0, protocol: Protocol::Tcp };
        let known = self.known.range(first..).take_while(move |(frontend, _)| frontend.address == address);
        known.map(|(&frontend, known)| (frontend, known.claims.as_slice()))
    }

    /// Rebuilds the tree; see [`crate::store::refill`].
    pub(super) fn refill(&mut self) {
        self.known = std::mem::take(&mut self.known).into_iter().collect();
    }
}
