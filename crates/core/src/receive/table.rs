//! The kernel's maps and routes of received addresses, and the steps to another content.
//!
//! An address comes last and goes first: while it is there, each of its ports leads to where it should, or is refused.

use std::collections::BTreeSet;

use super::ReceivedPorts;
use crate::{Address, AddressRange, Frontend};

/// Step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveOp {
    /// Adds clients to a group.
    AddSource(u16, AddressRange),
    /// Takes clients out of a group that nothing uses.
    RemoveSource(u16, AddressRange),
    /// Has a port lead to a port of the pod, for a group of clients.
    SetPort(ReceivedPort),
    /// Refuses a port.
    RemovePort(Frontend),
    /// Refuses all other ports of an address.
    AddAddress(Address),
    /// Forgets an address whose ports are refused.
    RemoveAddress(Address),
    /// Has the machine take packets to an address.
    AddRoute(Address),
    /// Has it take none.
    RemoveRoute(Address),
}

/// Port of an address, as the maps have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedPort {
    /// Address, port and protocol.
    pub frontend: Frontend,
    /// Port of the pod.
    pub port: u16,
    /// Group of clients that are let in; 0 stands for all.
    pub group: u16,
}

/// Content of maps and routes. The order of the lists does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiveTable {
    /// Ports of addresses, each once.
    pub ports: Vec<ReceivedPort>,
    /// Clients of each group, each once.
    pub sources: Vec<(u16, AddressRange)>,
    /// Addresses whose other ports are refused.
    pub addresses: BTreeSet<Address>,
    /// Addresses to which the machine takes packets.
    pub routes: BTreeSet<Address>,
}

impl ReceiveOp {
    /// Step without which this one is not safe: an address that takes packets refuses all other ports.
    #[must_use]
    pub fn needs(self) -> Option<Self> {
        match self {
            Self::AddRoute(address) => Some(Self::AddAddress(address)),
            Self::RemoveAddress(address) => Some(Self::RemoveRoute(address)),
            _ => None,
        }
    }
}

impl ReceiveTable {
    /// Steps from this content to one with all that is wanted, and with what is kept.
    pub fn plan(&self, wanted: &ReceivedPorts, keeps: impl Fn(&Frontend) -> bool) -> Vec<ReceiveOp> {
        let mut ops = Vec::new();
        let mut groups = self.groups();
        let mut ports = Vec::new();
        for received in wanted.iter() {
            // Without a free number nobody is let in, rather than everybody.
            let Some(group) = number_of(&received.sources, &mut groups, &mut ops) else { continue };
            ports.push(ReceivedPort { frontend: received.frontend, port: received.port, group });
        }
        let kept = |port: &&ReceivedPort| wanted.get(&port.frontend).is_none() && keeps(&port.frontend);
        ports.extend(self.ports.iter().filter(kept).copied());
        ops.extend(ports.iter().filter(|port| !self.ports.contains(port)).map(|port| ReceiveOp::SetPort(*port)));
        let mut addresses = BTreeSet::new();
        addresses.extend(ports.iter().map(|port| port.frontend.address));
        for &address in &addresses {
            ops.extend((!self.addresses.contains(&address)).then_some(ReceiveOp::AddAddress(address)));
        }
        for &address in &addresses {
            ops.extend((!self.routes.contains(&address)).then_some(ReceiveOp::AddRoute(address)));
        }
        let is_left = |address: &&Address| !addresses.contains(*address);
        ops.extend(self.routes.iter().filter(is_left).map(|address| ReceiveOp::RemoveRoute(*address)));
        ops.extend(self.addresses.iter().filter(is_left).map(|address| ReceiveOp::RemoveAddress(*address)));
        let stays = |frontend: &Frontend| ports.iter().any(|port| port.frontend == *frontend);
        let left = self.ports.iter().map(|port| port.frontend).filter(|frontend| !stays(frontend));
        ops.extend(left.map(ReceiveOp::RemovePort));
        let is_used = |group: u16| ports.iter().any(|port| port.group == group);
        let unused = self.sources.iter().filter(|(group, _)| !is_used(*group));
        ops.extend(unused.map(|&(group, range)| ReceiveOp::RemoveSource(group, range)));
        ops
    }

    /// Records a step that was taken.
    pub fn record(&mut self, op: ReceiveOp) {
        match op {
            ReceiveOp::AddSource(group, range) => self.sources.push((group, range)),
            ReceiveOp::RemoveSource(group, range) => self.sources.retain(|source| *source != (group, range)),
            ReceiveOp::SetPort(port) => {
                self.ports.retain(|known| known.frontend != port.frontend);
                self.ports.push(port);
            }
            ReceiveOp::RemovePort(frontend) => self.ports.retain(|known| known.frontend != frontend),
            ReceiveOp::AddAddress(address) => drop(self.addresses.insert(address)),
            ReceiveOp::RemoveAddress(address) => drop(self.addresses.remove(&address)),
            ReceiveOp::AddRoute(address) => drop(self.routes.insert(address)),
            ReceiveOp::RemoveRoute(address) => drop(self.routes.remove(&address)),
        }
    }

    /// Ranges of each group.
    fn groups(&self) -> Vec<(u16, Vec<AddressRange>)> {
        let mut groups: Vec<(u16, Vec<AddressRange>)> = Vec::new();
        for &(number, range) in &self.sources {
            match groups.iter_mut().find(|(known, _)| *known == number) {
                Some((_, ranges)) => ranges.push(range),
                None => groups.push((number, vec![range])),
            }
        }
        groups
    }
}

/// Number of the group with these ranges, which is made if there is none; `None` if all are in use.
fn number_of(
    ranges: &[AddressRange],
    groups: &mut Vec<(u16, Vec<AddressRange>)>,
    ops: &mut Vec<ReceiveOp>,
) -> Option<u16> {
    if ranges.is_empty() {
        return Some(0);
    }
    let mut once: Vec<AddressRange> = Vec::new();
    for range in ranges {
        if !once.contains(range) {
            once.push(*range);
        }
    }
    let is_same = |known: &[AddressRange]| known.len() == once.len() && known.iter().all(|range| once.contains(range));
    if let Some((number, _)) = groups.iter().find(|(_, known)| is_same(known)) {
        return Some(*number);
    }
    let number = (1..=u16::MAX).find(|number| groups.iter().all(|(known, _)| known != number))?;
    ops.extend(once.iter().map(|&range| ReceiveOp::AddSource(number, range)));
    groups.push((number, once));
    Some(number)
}
