//! A Service that shows the objects a proxy has seen: its frontends and backends change with each round and with the
//! zone.

use std::net::{IpAddr, SocketAddr};

use cproxy_tests::manifest::{Endpoint, Service, Slice};
use serde_json::Value;

use crate::{
    cluster::ZONES,
    frontends::{Frontend, Outcome},
};

const CLUSTER_IPS: [&str; 2] = ["10.96.255.1", "fd00:10:96::ff01"];

/// Prefixes of its endpoints' addresses in each family; the last number is that of the zone.
const PODS: [&str; 2] = ["10.244.254.", "fd00:10:244::fe:"];

/// One state of the marker.
#[derive(Clone, Copy)]
pub(crate) struct Marker {
    /// Port of the Service and of its endpoints.
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

    /// Frontends and outcomes of a proxy that has seen the marker and knows this zone.
    pub(crate) fn expected(self, zone: Option<&str>) -> Vec<(Frontend, Outcome)> {
        let socket = |ip: &str| SocketAddr::new(ip.parse::<IpAddr>().unwrap(), self.port);
        let expected = |(vip, pods): (&str, Vec<String>)| {
            let frontend = Frontend { protocol: "TCP".to_owned(), address: socket(vip) };
            (frontend, Outcome::Forward { backends: pods.iter().map(|pod| socket(pod)).collect(), affinity: None })
        };
        CLUSTER_IPS.into_iter().zip(pods(zone)).map(expected).collect()
    }
}

/// Endpoints used in a zone, in each family: the zone's own, or all without a zone.
fn pods(zone: Option<&str>) -> [Vec<String>; 2] {
    PODS.map(|prefix| {
        let is_used = |name: &str| zone.is_none_or(|zone| zone.is_empty() || zone == name);
        (1..).zip(ZONES).filter(|(_, name)| is_used(name)).map(|(number, _)| format!("{prefix}{number}")).collect()
    })
}
