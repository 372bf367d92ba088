//! The canary's Service and its EndpointSlices, which the planner writes beside those of the source.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use cproxy_core::{
    Address, Event, Family, LABEL_SERVICE_NAME, Protocol, ServiceName, Store,
    api::{EndpointPortSpec, EndpointSlice, EndpointSpec, Service, ServicePortSpec},
};
use cproxy_datapath::canary::{Route, free_port};

use crate::canary::{CanaryAddresses, PORT, service_name};

/// Names of the ports, as the protocols have them in Kubernetes.
const PORTS: [(&str, Protocol); 2] = [("TCP", Protocol::Tcp), ("UDP", Protocol::Udp)];

/// Canary with the addresses of its listeners.
#[derive(Clone, Debug)]
pub(super) struct Canary {
    name: ServiceName,
    /// Address of each family, and that of its listeners.
    addresses: Vec<(Address, SocketAddr)>,
    /// Addresses of families that the machine does not have.
    absent: Vec<Address>,
}

impl Canary {
    /// Canary of the given addresses, with free ports. A family that the machine does not have is left out.
    pub(super) fn new(addresses: &CanaryAddresses) -> Self {
        let (mut with_listener, mut absent) = (Vec::new(), Vec::new());
        for address in addresses.iter() {
            match listener(address) {
                Some(listener) => with_listener.push((address, listener)),
                None => absent.push(address),
            }
        }
        Self { name: service_name(), addresses: with_listener, absent }
    }

    /// Addresses of families that the machine does not have.
    pub(super) fn absent(&self) -> &[Address] {
        &self.absent
    }

    /// Chooses other ports, where the present ones are in use.
    pub(super) fn choose_ports(&mut self) {
        for (address, backend) in &mut self.addresses {
            *backend = listener(*address).unwrap_or(*backend);
        }
    }

    /// Routes to walk.
    pub(super) fn routes(&self) -> Vec<Route> {
        let routes = self.addresses.iter().flat_map(|(address, backend)| {
            let frontend = SocketAddr::new((*address).into(), PORT);
            PORTS.map(|(_, protocol)| Route { protocol, frontend, backend: *backend })
        });
        routes.collect()
    }

    /// Its Service and EndpointSlices, in a store of their own: to the source and to all that reads its store, they do
    /// not exist.
    pub(super) fn store(&self) -> Store {
        let mut store = Store::default();
        if !self.addresses.is_empty() {
            store.apply(Event::Service(Box::new(self.service())));
            let slices = self.addresses.iter().map(|(_, backend)| self.slice(*backend));
            slices.for_each(|slice| drop(store.apply(Event::EndpointSlice(Box::new(slice)))));
        }
        store
    }

    fn service(&self) -> Service {
        let mut service = Service::default();
        service.metadata.namespace = self.name.namespace.to_string();
        service.metadata.name = self.name.name.to_string();
        service.spec.type_ = "ClusterIP".to_owned();
        service.spec.cluster_ips = self.addresses.iter().map(|(address, _)| address.to_string()).collect();
        service.spec.cluster_ip = service.spec.cluster_ips.first().cloned().unwrap_or_default();
        service.spec.ip_families = self.addresses.iter().map(|(_, backend)| family(*backend).to_owned()).collect();
        service.spec.ports = PORTS.map(|(protocol, _)| port_of(protocol)).into();
        service
    }

    fn slice(&self, backend: SocketAddr) -> EndpointSlice {
        let mut slice = EndpointSlice::default();
        let family = family(backend);
        slice.metadata.namespace = self.name.namespace.to_string();
        slice.metadata.name = format!("{}-{family}", self.name.name);
        slice.metadata.labels.insert(LABEL_SERVICE_NAME.to_owned(), self.name.name.to_string());
        slice.address_type = family.to_owned();
        slice.endpoints = vec![EndpointSpec { addresses: vec![backend.ip().to_string()], ..EndpointSpec::default() }];
        let port = |(protocol, _): (&str, _)| EndpointPortSpec {
            name: Some(protocol.to_owned()),
            protocol: Some(protocol.to_owned()),
            port: Some(backend.port().into()),
        };
        slice.ports = PORTS.map(port).into();
        slice
    }
}

/// Family as Kubernetes names it.
fn family(address: SocketAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// Loopback address with a free port.
fn listener(address: Address) -> Option<SocketAddr> {
    let loopback = match address.family() {
        Family::V4 => IpAddr::from(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::from(Ipv6Addr::LOCALHOST),
    };
    Some(SocketAddr::new(loopback, free_port(loopback).ok()?))
}

fn port_of(protocol: &str) -> ServicePortSpec {
    ServicePortSpec {
        name: protocol.to_owned(),
        protocol: protocol.to_owned(),
        port: PORT.into(),
        ..ServicePortSpec::default()
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Limits, Store, TablePlanner};
    use cproxy_datapath::bpf::KernelMaps;

    use super::*;
    use crate::canary;

    #[test]
    fn each_route_is_a_frontend_with_one_backend() {
        let canary = Canary {
            name: service_name(),
            addresses: vec![
                ("198.19.255.254".parse::<IpAddr>().unwrap().into(), "127.0.0.1:4001".parse().unwrap()),
                ("2001:2::fffe".parse::<IpAddr>().unwrap().into(), "[::1]:4002".parse().unwrap()),
            ],
            absent: Vec::new(),
        };
        assert_eq!(canary.store().problems().count(), 0);
        let limits: Limits = KernelMaps::LIMITS;
        let mut planner = TablePlanner::new(limits, Default::default());
        planner.set_internal(canary.store());
        planner.sync(&Store::default());
        let rows = planner.rows();
        assert_eq!((rows.len(), canary.routes().len()), (4, 4));
        for route in canary.routes() {
            let is_route = |row: &&cproxy_core::Row| {
                let frontend = SocketAddr::new(row.frontend.address.into(), row.frontend.port);
                (frontend, row.frontend.protocol) == (route.frontend, route.protocol)
            };
            let row = rows.iter().find(is_route).unwrap();
            let [backend] = row.backends() else { panic!("{row:?}") };
            assert_eq!(SocketAddr::new(backend.address.into(), backend.port), route.backend);
            assert!(canary::is_canary(&row.frontend, Some(&row.service.to_string())));
        }
    }
}
