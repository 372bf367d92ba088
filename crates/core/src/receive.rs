//! Addresses of load balancers that the pod receives: which, by the objects, and how the kernel's maps get there.
//!
//! Only addresses from the status of Services count, not `externalIPs`, which each tenant writes. A Service is received
//! if the pod is among its endpoints, ready or not: the balancer decides to whom it sends.

mod table;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

pub use table::{ReceiveOp, ReceiveTable, ReceivedPort};

use super::{
    Address, AddressRange, Frontend, Problem, Protocol, ServiceName, ServiceRow, Store, sort_few_by, sort_unique,
    sorted_set,
};

/// Where what comes to an address and port goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Address, port and protocol.
    pub frontend: Frontend,
    /// Port of the pod.
    pub port: u16,
    /// Clients that are let in; empty for all.
    pub sources: Arc<[AddressRange]>,
    /// The Service.
    pub service: Arc<ServiceName>,
}

/// Ports of addresses that are received, sorted by address, port and protocol. (A tree for each such type would take
/// 10 KiB of code: docs/decisions/016.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedPorts(Vec<Received>);

impl ReceivedPorts {
    /// Leaves out addresses.
    pub fn remove_addresses(&mut self, addresses: &[Address]) {
        self.0.retain(|received| !addresses.contains(&received.frontend.address));
    }

    /// Destination of what comes to an address and port.
    #[must_use]
    pub fn get(&self, frontend: &Frontend) -> Option<&Received> {
        let index = self.0.binary_search_by_key(frontend, |received| received.frontend).ok()?;
        self.0.get(index)
    }

    /// All of it.
    pub fn iter(&self) -> impl Iterator<Item = &Received> {
        self.0.iter()
    }
}

/// Addresses and ports of Services that are received, at most: half of the kernel's map, which also has those that
/// leave.
const RECEIVED_MAX: usize = 2_048;

/// Plan of what the pod is to receive, as the objects have it.
#[derive(Debug)]
pub struct ReceivePlanner {
    /// Addresses that may be received.
    ranges: Vec<AddressRange>,
    /// Addresses of the VM with which the Services were looked at.
    pod_ips: Vec<Address>,
    /// Sorted by name.
    services: Vec<OfService>,
    /// Services for which there is no room behind older ones.
    without_room: Vec<Arc<ServiceName>>,
}

/// Ports that the pod receives for a Service.
#[derive(Debug, PartialEq, Eq)]
struct OfService {
    name: Arc<ServiceName>,
    created_s: Option<i64>,
    sources: Arc<[AddressRange]>,
    ports: Vec<(Frontend, u16)>,
    problems: Vec<Problem>,
}

impl ReceivePlanner {
    /// Planner for addresses in these ranges.
    #[must_use]
    pub fn new(ranges: Vec<AddressRange>) -> Self {
        Self { ranges, pod_ips: Vec::new(), services: Vec::new(), without_room: Vec::new() }
    }

    /// Takes Services that have changed as the store has them. Returns whether anything else is to be received.
    pub fn update(&mut self, store: &Store, names: &BTreeSet<Arc<ServiceName>>) -> bool {
        if self.pod_ips != store.pod_ips() {
            return self.sync(store);
        }
        self.take_all(store, names)
    }

    /// Takes all Services of the store. Returns whether anything else is to be received.
    pub fn sync(&mut self, store: &Store) -> bool {
        self.pod_ips = store.pod_ips().to_vec();
        let known = self.services.iter().map(|service| &service.name).chain(store.service_names());
        let known = sorted_set(known.cloned());
        self.take_all(store, &known)
    }

    fn take_all(&mut self, store: &Store, names: &BTreeSet<Arc<ServiceName>>) -> bool {
        let mut has_changed = false;
        for name in names {
            has_changed |= self.take(store, name);
        }
        has_changed
    }

    fn take(&mut self, store: &Store, name: &Arc<ServiceName>) -> bool {
        let wanted = self.of_service(store, name);
        let place = self.services.binary_search_by(|service| service.name.cmp(name));
        match (wanted, place) {
            (None, Err(_)) => false,
            (None, Ok(index)) => {
                self.services.remove(index);
                true
            }
            (Some(wanted), Err(index)) => {
                self.services.insert(index, wanted);
                true
            }
            (Some(wanted), Ok(index)) => match self.services.get_mut(index) {
                Some(known) if *known != wanted => {
                    *known = wanted;
                    true
                }
                _ => false,
            },
        }
    }

    /// All that is to be received, of the oldest Services first, as far as there is room. Of two Services that claim
    /// the same address, port and protocol the older one has it, as for addresses that pods call.
    #[must_use]
    pub fn received(&mut self) -> ReceivedPorts {
        self.without_room = self.those_without_room();
        let mut received: Vec<Received> = Vec::new();
        let mut owners: Vec<&OfService> = Vec::new();
        let rank = |service: &OfService| service.created_s.unwrap_or(i64::MAX);
        // Services are sorted by name, so that of two of the same age the first one is before the other.
        for service in self.services.iter().filter(|service| !self.without_room.contains(&service.name)) {
            for &(frontend, port) in &service.ports {
                let of_family = service.sources.iter().filter(|range| range.family() == frontend.address.family());
                let sources = of_family.copied().collect();
                let one = Received { frontend, port, sources, service: service.name.clone() };
                match received.binary_search_by(|known| known.frontend.cmp(&frontend)) {
                    Err(index) => {
                        received.insert(index, one);
                        owners.insert(index, service);
                    }
                    Ok(index) => {
                        if let (Some(known), Some(owner)) = (received.get_mut(index), owners.get_mut(index))
                            && rank(service) < rank(owner)
                        {
                            (*known, *owner) = (one, service);
                        }
                    }
                }
            }
        }
        ReceivedPorts(received)
    }

    /// Problems of the Services.
    pub fn problems(&self) -> impl Iterator<Item = Problem> {
        let without_room = self.without_room.iter().map(|name| {
            let message = format!("not received: {RECEIVED_MAX} addresses and ports are, at most");
            Problem::new(format_args!("Service {name}"), "", message)
        });
        self.services.iter().flat_map(|service| &service.problems).cloned().chain(without_room)
    }

    fn those_without_room(&self) -> Vec<Arc<ServiceName>> {
        let mut services: Vec<_> = self.services.iter().collect();
        let age = |service: &OfService| service.created_s.unwrap_or(i64::MAX);
        sort_few_by(&mut services, |a, b| (age(a), &a.name).cmp(&(age(b), &b.name)));
        let mut used = 0;
        let mut without_room = Vec::new();
        for service in services {
            // An address has an entry of its own beside those of its ports.
            let mut addresses: Vec<_> = service.ports.iter().map(|(frontend, _)| frontend.address).collect();
            sort_unique(&mut addresses);
            let needed = service.ports.len() + addresses.len();
            if used + needed > RECEIVED_MAX {
                without_room.push(service.name.clone());
            } else {
                used += needed;
            }
        }
        without_room
    }

    /// Ports that the pod receives for a Service; `None` if it is no endpoint.
    fn of_service(&self, store: &Store, name: &Arc<ServiceName>) -> Option<OfService> {
        let service = store.service_row(name)?;
        // At an address that the machine or its node has anyway, all other ports would be refused.
        let is_taken = |address: &Address| {
            address.is_special() || self.pod_ips.contains(address) || store.node_ips().contains(address)
        };
        let is_in_range =
            |address: &Address| !is_taken(address) && self.ranges.iter().any(|range| range.contains(*address));
        let addresses: Vec<_> = service.load_balancer_ips.iter().copied().filter(is_in_range).collect();
        if addresses.is_empty() {
            return None;
        }
        let mut of_service = OfService {
            name: name.clone(),
            created_s: service.created_s,
            sources: service.source_ranges.iter().copied().collect(),
            ports: Vec::new(),
            problems: Vec::new(),
        };
        let mut is_backed = false;
        for (_, slice) in store.slices(name) {
            if !slice.endpoints.iter().any(|endpoint| self.pod_ips.contains(&endpoint.address)) {
                continue;
            }
            is_backed = true;
            let ports = matching_ports(&service, &slice.ports);
            for &address in addresses.iter().filter(|address| address.family() == slice.family) {
                for &((port, protocol), target) in &ports {
                    of_service.receive(Frontend { address, port, protocol }, target, name);
                }
            }
        }
        is_backed.then_some(of_service)
    }
}

/// Port and protocol of each port of the Service, with the pod's.
fn matching_ports(service: &ServiceRow, ports: &[super::SlicePort]) -> Vec<((u16, Protocol), u16)> {
    let target = |name: &str, protocol| {
        ports.iter().find(|port| *port.name == *name && port.protocol == protocol).map(|port| port.port)
    };
    let matching = service
        .ports
        .iter()
        .filter_map(|port| target(&port.name, port.protocol).map(|target| ((port.port, port.protocol), target)));
    matching.collect()
}

impl OfService {
    /// Receives at an address and port. If slices disagree about the pod's port, the lowest counts.
    fn receive(&mut self, frontend: Frontend, target: u16, name: &ServiceName) {
        if frontend.protocol == Protocol::Udp && frontend.port != target {
            let problem = Problem::new(
                format_args!("Service {name}"),
                "",
                format!(
                    "port {}/UDP of {} is not received: it is port {target} of this pod, and datagrams are received at \
                     equal ports alone",
                    frontend.port, frontend.address
                ),
            );
            if !self.problems.contains(&problem) {
                self.problems.push(problem);
            }
            return;
        }
        match self.ports.iter_mut().find(|(known, _)| *known == frontend) {
            Some((_, port)) => *port = target.min(*port),
            None => self.ports.push((frontend, target)),
        }
    }
}
