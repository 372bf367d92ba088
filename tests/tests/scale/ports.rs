//! Services with very many ports.

use std::net::Ipv4Addr;

use cproxy_ebpf::FRONTENDS_MAX;
use cproxy_tests::manifest::{Service, Slice, http_service};
use serde_json::{Value, json};

use crate::fixture::{Fixture, PATIENCE, POD_PORT, Table, WEB, WEB_PODS, connect, pods, serves, small};

/// Number of all ports.
const ALL_PORTS: usize = 65_535;

/// Limit of the API server on the ports of one slice.
const SLICE_PORTS: usize = 100;
const SLICE_ENDPOINTS: usize = 1_000;

/// A Service with the TCP ports 1 to `ports` and its slices, each with some of the ports.
fn service(name: &str, vip: Ipv4Addr, ports: usize, endpoints: usize) -> (Service, Vec<Value>) {
    let named = |port: usize, number: usize| json!({"name": format!("p{port}"), "protocol": "TCP", "port": number});
    let list: Vec<_> = (1..=ports).map(|port| named(port, port)).collect();
    let slices = (1..=ports).step_by(SLICE_PORTS).map(|first| {
        let ports = (first..=ports).take(SLICE_PORTS);
        let slice = Slice::v4(name).name(&format!("{name}-{first}"));
        let slice = ports.fold(slice, |slice, port| slice.tcp(&format!("p{port}"), POD_PORT));
        Value::from(slice.ready(pods(0, endpoints)))
    });
    (Service::new(name).cluster_ips([vip]).spec("ports", json!(list)), slices.collect())
}

fn objects((service, slices): (Service, Vec<Value>)) -> impl Iterator<Item = Value> {
    std::iter::once(service.into()).chain(slices)
}

fn vip(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 97, 0, 0).to_bits() + u32::try_from(number).unwrap())
}

/// A condition that the table has this many frontends with this many backends each, beside the small Service.
fn has(frontends: usize, backends: usize) -> impl Fn(&Table) -> Result<(), String> {
    move |table| {
        let full = table.values().filter(|row| row.len() == backends).count();
        let is_there = table.len() == frontends + 1 && full >= frontends;
        if is_there { Ok(()) } else { Err(format!("{} frontends, {full} of them complete", table.len())) }
    }
}

#[test]
fn one_service_has_every_port() {
    let mut fixture = Fixture::start();
    fixture.put("ports.json", objects(service("ports", vip(0), ALL_PORTS, 1)));
    fixture.wait("every port is in the table", has(ALL_PORTS, 1));
    for port in [1, 32_768, u16::MAX] {
        connect(&vip(0).to_string(), port).unwrap();
    }
    assert_eq!(fixture.problems(), 0);
    fixture.remove("ports.json");
    fixture.wait("all are gone", has(0, 0));
    fixture.assert_web();
}

#[test]
fn many_services_have_as_many_ports() {
    const SERVICES: usize = ALL_PORTS / SLICE_PORTS;
    let mut fixture = Fixture::start();
    let all = (0..SERVICES).flat_map(|n| objects(service(&format!("ports-{n}"), vip(n), SLICE_PORTS, 1)));
    fixture.put("ports.json", all);
    fixture.wait("every Service is in the table", has(SERVICES * SLICE_PORTS, 1));
    for number in [0, SERVICES / 2, SERVICES - 1] {
        connect(&vip(number).to_string(), SLICE_PORTS as u16).unwrap();
    }
    assert_eq!(fixture.problems(), 0);
    fixture.assert_web();
}

#[test]
fn a_full_slice_is_served() {
    let mut fixture = Fixture::start();
    fixture.put("slice.json", objects(service("slice", vip(0), SLICE_PORTS, SLICE_ENDPOINTS)));
    fixture.wait("the slice is in the table", has(SLICE_PORTS, SLICE_ENDPOINTS));
    (1..=SLICE_PORTS as u16).for_each(|port| connect(&vip(0).to_string(), port).unwrap());
    assert_eq!(fixture.problems(), 0);
    fixture.assert_web();
}

/// External addresses multiply the frontends of a Service, but not its sets.
#[test]
fn more_frontends_than_the_table_holds_harm_no_other_service() {
    const LIMIT: usize = FRONTENDS_MAX as usize;
    const SERVICES: usize = 500;
    let addresses = LIMIT / (SERVICES * SLICE_PORTS) + 2;
    let mut fixture = Fixture::start();
    let excess = (0..SERVICES).flat_map(|number| {
        let own = number * addresses;
        let (excess, slices) = service(&format!("excess-{number}"), vip(own), SLICE_PORTS, 1);
        let externals: Vec<_> = (own + 1..own + addresses).map(|number| vip(number).to_string()).collect();
        objects((excess.spec("externalIPs", json!(externals)), slices))
    });
    fixture.put("excess.json", excess);
    // The table has all ClusterIPs, and half of it is left for other frontends.
    let is_full = |table: &Table| {
        let expected = SERVICES * SLICE_PORTS + LIMIT / 2 + 1;
        if table.len() == expected { Ok(()) } else { Err(format!("{} frontends of {expected}", table.len())) }
    };
    fixture.wait("what fits is served", is_full);
    fixture.assert_web();
    assert!(fixture.problems() > 0);
    fixture.world.agent.wait_log("Service default/excess-", PATIENCE);
    // A Service in the table follows its endpoints, whatever others lack.
    for count in [1, WEB_PODS] {
        fixture.put("web.json", http_service("web", WEB, pods(0, count)));
        fixture.wait("the small Service follows", serves(WEB, 80, count));
    }
    let log = fixture.world.agent.log().lines().count();
    fixture.put("excess.json", small("late", "10.96.0.30"));
    fixture.wait("the excess is gone", has(1, 2));
    connect("10.96.0.30", 80).unwrap();
    fixture.assert_web();
    assert_eq!(fixture.problems(), 0);
    eprintln!("{log} lines in the log while {} frontends wanted {LIMIT} places", SERVICES * SLICE_PORTS * addresses);
}
