//! Addresses of the storm: the Services under test, their backends, and many others.
//!
//! One route for each family makes all backend addresses local at once, so that one server answers for all of them. A
//! ClusterIP has no route: a connect without translation fails with EACCES, which nothing else does.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Range,
};

use serde_json::Value;

use crate::{
    manifest::{Endpoint, Service, Slice},
    sandbox::Sandbox,
    world::{Host, PORT},
};

/// Number of Services under test.
pub const SERVICES: usize = 8;

/// Number of frontends of each Service: two protocols in two families.
pub const FRONTENDS: usize = 4;

/// The backends' ports. Successive sets may differ in them, so that an address with a former set's port is noticed.
pub const TCP_PORTS: [u16; 2] = [8080, 8081];
pub(crate) const UDP_PORTS: [u16; 2] = [8090, 8091];

/// Number of backends reserved for each Service; none belongs to two.
pub const BACKENDS_OF_SERVICE: u32 = 0x2000;

/// First backend that belongs to none of the Services under test.
const FIRST_OTHER: u32 = BACKENDS_OF_SERVICE * SERVICES as u32;

/// A backend that belongs to no Service.
pub const LONER: u32 = FIRST_OTHER + CROWD_LARGEST;

/// Backends of a Service with consecutive numbers: those that terminate, then those that are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// Number of backends that keep their flows and get no new ones.
    pub terminating: u32,
    /// First ready backend.
    pub first: u32,
    /// Number of ready backends.
    pub count: u32,
    /// Index of their port.
    pub port: usize,
}

impl Set {
    /// Whether new clients get this backend.
    pub(crate) fn has(&self, backend: Backend) -> bool {
        self.ready().contains(&backend.number) && self.port == backend.port
    }

    /// Whether clients keep this backend.
    pub fn serves(&self, backend: Backend) -> bool {
        self.serving().contains(&backend.number) && self.port == backend.port
    }

    /// Whether the clients of every backend of `before` keep it.
    pub(crate) fn serves_all_of(&self, before: Self) -> bool {
        let (kept, now) = (before.serving(), self.serving());
        now.start <= kept.start && kept.end <= now.end && self.port == before.port
    }

    /// Backends that new clients get.
    pub fn ready(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    fn serving(&self) -> Range<u32> {
        self.first - self.terminating..self.first + self.count
    }
}

/// The backend that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its number.
    pub number: u32,
    /// Index of its port.
    pub port: usize,
}

/// First addresses of the backends, and of the Services under test.
const BACKENDS: Host = Host::new([10, 244, 0, 0], [0xfd00, 0x10, 0x244, 0, 0, 0, 0, 0]);
const CLUSTER_IPS: Host = Host::new([10, 96, 0, 10], [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 10]);

/// A host with a number counted from a first one.
fn host(first: Host, number: u32) -> Host {
    Host {
        v4: Ipv4Addr::from_bits(first.v4.to_bits() + number),
        v6: Ipv6Addr::from_bits(first.v6.to_bits() + u128::from(number)),
    }
}

/// Addresses of a backend.
pub fn backend(number: u32) -> Host {
    host(BACKENDS, number)
}

/// The number of the backend with this address.
pub(crate) fn backend_number(address: IpAddr) -> Option<u32> {
    match address {
        IpAddr::V4(address) => address.to_bits().checked_sub(BACKENDS.v4.to_bits()).filter(|number| *number < 1 << 17),
        IpAddr::V6(address) => u32::try_from(address.to_bits().checked_sub(BACKENDS.v6.to_bits())?).ok(),
    }
}

/// ClusterIPs of a Service under test; those of other Services follow.
pub fn cluster_ip(service: usize) -> Host {
    host(CLUSTER_IPS, service as u32)
}

/// Adds the routes.
pub fn prepare(sandbox: &Sandbox) {
    sandbox.ip("route add local 10.244.0.0/15 dev lo\n\
                route add local fd00:10:244::/96 dev lo\n\
                route add prohibit 10.96.0.0/15\n\
                route add prohibit fd00:10:96::/48\n");
}

/// A Service under test with its backends. Either of its two names is the same to clients.
pub fn objects(service: usize, name: usize, set: Set) -> [Value; 3] {
    service_with(&format!("web-{service}-{name}"), cluster_ip(service), set)
}

fn service_with(name: &str, cluster_ip: Host, set: Set) -> [Value; 3] {
    let (tcp, udp) = (TCP_PORTS[set.port], UDP_PORTS[set.port]);
    let service = Service::new(name).cluster_ips(cluster_ip.addresses()).tcp("tcp", PORT, tcp).udp("udp", PORT, udp);
    let slice = |slice: Slice, family: usize| {
        let address = |number| backend(number).addresses()[family];
        let slice = slice.tcp("tcp", tcp).udp("udp", udp).ready(set.ready().map(address));
        let terminating = (set.first - set.terminating..set.first).map(address);
        terminating.fold(slice, |slice, address| slice.endpoint(Endpoint::terminating(address, true))).into()
    };
    [service.into(), slice(Slice::v4(name), 0), slice(Slice::v6(name), 1)]
}

/// Number of Services in a crowd, and of the backends of each.
const CROWD_SERVICES: usize = 50;
const CROWD_BACKENDS: u32 = 10;
/// Largest number of backends of one Service in a crowd.
pub const CROWD_LARGEST: u32 = 1_500;

/// Number of frontends of a crowd.
pub const CROWD_FRONTENDS: usize = CROWD_SERVICES * FRONTENDS;

/// Services without clients, which make the table large. One of them has at most this many backends.
pub fn crowd(number: usize, largest: u32) -> Vec<Value> {
    let services = (0..CROWD_SERVICES).flat_map(|index| {
        let place = number * CROWD_SERVICES + index;
        let count = if index == 0 { largest.min(CROWD_LARGEST) } else { CROWD_BACKENDS };
        let set = Set { terminating: 0, first: FIRST_OTHER, count, port: 0 };
        service_with(&format!("crowd-{place}"), cluster_ip(1_000 + place), set)
    });
    services.collect()
}
