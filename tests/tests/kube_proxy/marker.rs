//! A Service of no use but to show what a proxy has seen: what it leads to changes with each round and with the zone.

use std::net::{IpAddr, SocketAddr};

use cproxy_tests::manifest::{Endpoint, Service, Slice};
use serde_json::Value;

use crate::{
    cluster::ZONES,
    frontends::{Frontend, Outcome},
};

const CLUSTER_IPS: [&str; 2] = ["10.96.255.1", "fd00:10:96::ff01"];

/// Its endpoints, one for each zone, but for the number at the end.
const PODS: [&str; 2] = ["10.244.254.", "fd00:10:244::fe:"];

/// One state of it.
#[derive(Clone, Copy)]
pub(crate) struct Marker {
    /// The port of the Service and of its endpoints.
    port: u16,
}

impl Marker {
    pub(crate) const FIRST: Self = Self { port: 10_000 };

    pub(crate) fn next(self) -> Self {
        Self { port: self.port + 1 }
    }

    pub(crate) fn objects(self) -> [Value; 3] {
        let service = Service::new("marker").cluster_ips(CLUSTER_IPS).tcp("", self.port, self.port);
        let [v4, v6] = pods(None);
        [service.into(), self.slice(Slice::v4("marker"), v4), self.slice(Slice::v6("marker"), v6)]
    }

    fn slice(self, slice: Slice, pods: Vec<String>) -> Value {
        let endpoints = ZONES.iter().zip(pods).map(|(zone, pod)| Endpoint::ready(pod).for_zone(zone));
        endpoints.fold(slice.tcp("", self.port), Slice::endpoint).into()
    }

    /// What a proxy has that has seen it, and that thinks it is in this zone.
    pub(crate) fn expected(self, zone: Option<&str>) -> Vec<(Frontend, Outcome)> {
        let socket = |ip: &str| SocketAddr::new(ip.parse::<IpAddr>().unwrap(), self.port);
        let expected = |(vip, pods): (&str, Vec<String>)| {
            let frontend = Frontend { protocol: "TCP".to_owned(), address: socket(vip) };
            (frontend, Outcome::Forward { backends: pods.iter().map(|pod| socket(pod)).collect(), affinity: None })
        };
        CLUSTER_IPS.into_iter().zip(pods(zone)).map(expected).collect()
    }
}

/// The endpoints that are used in a zone, in each family: its own, or all of them where there is no zone.
fn pods(zone: Option<&str>) -> [Vec<String>; 2] {
    PODS.map(|prefix| {
        let is_used = |name: &str| zone.is_none_or(|zone| zone.is_empty() || zone == name);
        (1..).zip(ZONES).filter(|(_, name)| is_used(name)).map(|(number, _)| format!("{prefix}{number}")).collect()
    })
}
