//! Services with very many endpoints.

use cproxy_ebpf::SET_BACKENDS_MAX;
use cproxy_tests::manifest::{Service, Slice};
use serde_json::Value;

use crate::fixture::{Fixture, PATIENCE, POD_PORT, connect, is_refused, pods, serves, small};

const VIP: &str = "10.96.0.20";

/// One Service with its endpoints in slices of one size.
fn large(endpoints: usize, of_slice: usize) -> Vec<Value> {
    let service = Service::new("large").cluster_ips([VIP]).tcp("http", 80, POD_PORT);
    let slice = |first: usize| {
        let count = of_slice.min(endpoints - first);
        let slice = Slice::v4("large").name(&format!("large-{first}")).tcp("http", POD_PORT);
        Value::from(slice.ready(pods(first, count)))
    };
    std::iter::once(service.into()).chain((0..endpoints).step_by(of_slice).map(slice)).collect()
}

#[test]
fn twenty_thousand_endpoints_come_and_go() {
    let mut fixture = Fixture::start();
    for endpoints in [20_000, 0, 20_000] {
        fixture.put("large.json", large(endpoints, 100));
        fixture.wait("the endpoints are in the table", serves(VIP, 80, endpoints));
        if endpoints == 0 {
            assert!(is_refused(VIP, 80));
        } else {
            connect(VIP, 80).unwrap();
        }
        fixture.assert_web();
    }
    assert_eq!(fixture.problems(), 0);
}

#[test]
fn more_backends_than_a_set_can_have_leave_the_old_set_in_force() {
    let mut fixture = Fixture::start();
    fixture.put("large.json", large(3, 1_000));
    fixture.wait("three endpoints are in the table", serves(VIP, 80, 3));
    assert_eq!(fixture.problems(), 0);
    fixture.put("large.json", large(SET_BACKENDS_MAX + 1, 1_000).into_iter().chain(small("late", "10.96.0.30")));
    fixture.wait("another Service comes with it", serves("10.96.0.30", 80, 2));
    fixture.wait("the old set stays", serves(VIP, 80, 3));
    connect(VIP, 80).unwrap();
    connect("10.96.0.30", 80).unwrap();
    fixture.assert_web();
    assert_eq!(fixture.problems(), 1);
    fixture.world.agent.wait_log("Service default/large", PATIENCE);
    fixture.put("large.json", large(SET_BACKENDS_MAX, 1_000));
    fixture.wait("as many as fit", serves(VIP, 80, SET_BACKENDS_MAX));
    assert_eq!(fixture.problems(), 0);
    connect(VIP, 80).unwrap();
}
