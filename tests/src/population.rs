//! Many Services and their endpoints, as a cluster's controllers write them, for tests and benchmarks.

use std::{fmt, net::Ipv4Addr, ops::Range, str::FromStr};

use serde_json::{Value, json};

use crate::{
    control_plane::NODE,
    manifest::{Endpoint, Service, Slice},
};

/// Number of endpoints that the EndpointSlice controller puts into one slice.
const ENDPOINTS_PER_SLICE: u32 = 100;

/// ClusterIP of the first Service; the others follow.
const FIRST_VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 16, 0);

/// Address of the first pod; the others follow.
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 1);

/// Address of the first replacement pod.
const FIRST_REPLACEMENT: Ipv4Addr = Ipv4Addr::new(11, 0, 0, 0);

/// Zones of the pods, in turn.
const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];

/// Number of Services and of each Service's endpoints, as text `5000x10`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of Services.
    pub services: u32,
    /// Number of endpoints of each Service.
    pub endpoints: u32,
}

/// One slice of a population.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceId {
    service: u32,
    number: u32,
}

impl Shape {
    /// `services` Services with `endpoints` endpoints each.
    #[must_use]
    pub const fn new(services: u32, endpoints: u32) -> Self {
        Self { services, endpoints }
    }

    /// The total number of slices.
    #[must_use]
    pub fn slices(self) -> u32 {
        self.services * self.slices_of_each()
    }

    /// The objects of these Services: each Service, then its slices.
    pub fn objects(self, services: Range<u32>) -> impl Iterator<Item = Value> {
        services.flat_map(move |service| {
            let slices = (0..self.slices_of_each()).map(move |number| self.slice(SliceId { service, number }, 0));
            std::iter::once(self.service(service)).chain(slices)
        })
    }

    /// The slices in an endless cycle, one Service after the other.
    pub fn cycle(self) -> impl Iterator<Item = SliceId> {
        let of = move |service| (0..self.slices_of_each()).map(move |number| SliceId { service, number });
        (0..self.services).flat_map(of).collect::<Vec<_>>().into_iter().cycle()
    }

    /// A slice after `replacements` replacements of its first pod.
    #[must_use]
    pub fn slice(self, SliceId { service, number }: SliceId, replacements: u32) -> Value {
        let name = service_name(service);
        let first = number * ENDPOINTS_PER_SLICE;
        let slice = Slice::v4(&name).name(&format!("{name}-{number:05}")).tcp("http", 8080);
        let slice = (first..self.endpoints.min(first + ENDPOINTS_PER_SLICE)).fold(slice, |slice, endpoint| {
            let pod = service * self.endpoints + endpoint;
            let address = if endpoint == first && replacements > 0 {
                Ipv4Addr::from_bits(FIRST_REPLACEMENT.to_bits() + pod.wrapping_mul(64) + replacements % 64)
            } else {
                Ipv4Addr::from_bits(FIRST_POD.to_bits() + pod)
            };
            slice.endpoint(endpoint_of(&format!("{name}-{endpoint:05}"), pod, address))
        });
        slice.into()
    }

    fn service(self, service: u32) -> Value {
        let name = service_name(service);
        let address = Ipv4Addr::from_bits(FIRST_VIP.to_bits() + service);
        let object = Service::new(&name).cluster_ips([address]).tcp("http", 80, 8080);
        object.label("app", &name).spec("selector", json!({"app": name})).into()
    }

    fn slices_of_each(self) -> u32 {
        self.endpoints.div_ceil(ENDPOINTS_PER_SLICE)
    }
}

fn service_name(service: u32) -> String {
    format!("service-{service:05}")
}

/// The endpoint of a pod with all fields that the controller sets.
fn endpoint_of(name: &str, pod: u32, address: Ipv4Addr) -> Endpoint {
    let zone = ZONES.into_iter().cycle().nth(pod as usize % ZONES.len()).unwrap_or_default();
    let target = json!({
        "kind": "Pod", "namespace": "default", "name": name, "uid": format!("00000000-0000-4000-8000-{pod:012}"),
    });
    Endpoint::ready(address).node(NODE).field("zone", json!(zone)).field("targetRef", target)
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.services, self.endpoints)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|number| (1..=60_000).contains(number));
        let parts =
            text.split_once('x').and_then(|(services, endpoints)| Some((number(services)?, number(endpoints)?)));
        let (services, endpoints) = parts.ok_or("want SERVICESxENDPOINTS, such as 5000x10")?;
        // Pod addresses are numbered within one network of this size.
        let is_too_much = u64::from(services) * u64::from(endpoints) > 1 << 22;
        if is_too_much { Err("there are not so many addresses".to_owned()) } else { Ok(Self { services, endpoints }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_read_as_it_is_written() {
        for text in ["100x10", "1x20000"] {
            assert_eq!(text.parse::<Shape>().unwrap().to_string(), text);
        }
        for text in ["", "10", "x", "0x1", "1x0", "60000x60000", "-1x2"] {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
    }

    #[test]
    fn every_endpoint_is_in_one_slice() {
        let objects = Shape::new(2, 250).objects(0..2).collect::<Vec<_>>();
        assert_eq!(objects.len() as u32, 2 + Shape::new(2, 250).slices());
        let addresses = objects.iter().filter_map(|object| object["endpoints"].as_array()).flatten();
        let mut addresses = addresses.map(|endpoint| endpoint["addresses"][0].to_string()).collect::<Vec<_>>();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), 500);
    }

    #[test]
    fn a_replacement_changes_one_address() {
        let shape = Shape::new(1, 10);
        let id = shape.cycle().next().unwrap();
        let [before, after] = [0, 1].map(|replacements| shape.slice(id, replacements));
        assert_ne!(before["endpoints"][0], after["endpoints"][0]);
        assert_eq!(before["endpoints"][1], after["endpoints"][1]);
        assert_eq!(before["metadata"], after["metadata"]);
    }
}
