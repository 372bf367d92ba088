//! ClusterIPs in the table: calls to ports of theirs that have no frontend are refused.

use std::collections::BTreeMap;

use crate::{Address, Problem, sorted_map, store::refill};

/// ClusterIPs that Services claim or the kernel has.
#[derive(Debug)]
pub(super) struct ClusterIps {
    known: BTreeMap<Address, ClusterIp>,
    written: usize,
    /// ClusterIPs without room, which are retried.
    pub(super) unplaced: BTreeMap<Address, Problem>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ClusterIp {
    /// Number of claims of Services: one for each frontend with this address, or one without any.
    claims: u32,
    is_written: bool,
}

/// Next write for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AddressChange {
    Put,
    Delete,
    /// The address is as it should be.
    Keep,
}

impl ClusterIps {
    /// The kernel has these; no Service claims them yet.
    pub(super) fn from_kernel(addresses: impl IntoIterator<Item = Address>) -> Self {
        let written = |address| (address, ClusterIp { claims: 0, is_written: true });
        let known = sorted_map(addresses.into_iter().map(written));
        Self { written: known.len(), known, unplaced: BTreeMap::new() }
    }

    /// Replaces so many claims of a Service on an address. Returns whether the address begins or ceases to be claimed.
    pub(super) fn replace_claims(&mut self, address: Address, before: u32, after: u32) -> bool {
        let cluster_ip = self.known.entry(address).or_default();
        let was_claimed = cluster_ip.claims != 0;
        cluster_ip.claims = cluster_ip.claims.saturating_sub(before) + after;
        was_claimed != (cluster_ip.claims != 0)
    }

    /// Whether a Service claims the address as its ClusterIP.
    pub(super) fn is_claimed(&self, address: Address) -> bool {
        self.known.get(&address).is_some_and(|cluster_ip| cluster_ip.claims != 0)
    }

    /// All that Services claim or the kernel has.
    pub(super) fn addresses(&self) -> impl Iterator<Item = Address> {
        self.known.keys().copied()
    }

    /// Number of addresses that the kernel has.
    pub(super) fn written(&self) -> usize {
        self.written
    }

    /// Whether the kernel has the address.
    pub(super) fn is_written(&self, address: Address) -> bool {
        self.known.get(&address).is_some_and(|cluster_ip| cluster_ip.is_written)
    }

    /// Addresses that the kernel has.
    pub(super) fn each_written(&self) -> impl Iterator<Item = Address> {
        self.known.iter().filter(|(_, cluster_ip)| cluster_ip.is_written).map(|(&address, _)| address)
    }

    /// Write that the claims on an address require, compared with the kernel.
    pub(super) fn change(&self, address: Address) -> AddressChange {
        match self.known.get(&address) {
            Some(ClusterIp { claims: 0, is_written: true }) => AddressChange::Delete,
            Some(ClusterIp { claims: 1.., is_written: false }) => AddressChange::Put,
            _ => AddressChange::Keep,
        }
    }

    pub(super) fn set_written(&mut self, address: Address) {
        let cluster_ip = self.known.entry(address).or_default();
        self.written += usize::from(!std::mem::replace(&mut cluster_ip.is_written, true));
    }

    /// The kernel loses the address.
    pub(super) fn unset_written(&mut self, address: Address) {
        if let Some(cluster_ip) = self.known.get_mut(&address) {
            self.written -= usize::from(std::mem::take(&mut cluster_ip.is_written));
        }
        self.remove_unused(address);
    }

    /// Drops an address that nothing claims and the kernel does not have.
    pub(super) fn remove_unused(&mut self, address: Address) {
        if self.known.get(&address).is_some_and(|cluster_ip| cluster_ip.claims == 0 && !cluster_ip.is_written) {
            self.known.remove(&address);
        }
    }

    pub(super) fn refill(&mut self) {
        refill(&mut self.known);
    }
}
