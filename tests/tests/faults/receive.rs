//! Faults of an agent that receives for load balancers: what was received stays, and in the end all that is wanted is.

use std::process::Command;

use cproxy_tests::{
    manifest::{self, Service, Slice},
    world::pod,
};
use serde_json::Value;

use crate::{World, first_starts, restarts};

/// Address of the load balancer, and flags of the agent. The pod is the first of those that answer.
const BALANCER: &str = "203.0.113.10";
const ARGUMENTS: [&str; 4] = ["--receive", "203.0.113.0/24", "--pod-ip", "10.244.0.1"];

/// Faults in an ordinary run of a test.
const SAMPLE: usize = 3;

impl World {
    fn that_receives() -> Self {
        let world = Self { sample: SAMPLE, arguments: &ARGUMENTS, ..Self::new() };
        assert_eq!(pod(1).v4.to_string(), ARGUMENTS[3]);
        world.balance(1);
        world
    }

    /// Writes a Service with the load balancer's address, and this pod as its endpoint. The table of Services keeps its
    /// size.
    fn balance(&self, endpoint: u8) {
        let service = Service::new("received").cluster_ips(["10.96.0.77"]).tcp("http", 80, 8080);
        let service = service.load_balancer_ip(BALANCER);
        let slice = Slice::v4("received").tcp("http", 8080).ready([pod(endpoint).v4]);
        manifest::write(&self.sandbox.manifest_dir(), "received.json", [Value::from(service), slice.into()]);
    }

    /// Whether exactly these addresses have a route.
    fn has_routes(&self, addresses: &[&str]) -> Result<(), String> {
        let words = ["-o", "route", "show", "table", "local", "proto", "98"];
        let routes = Command::new("ip").args(words).output().unwrap();
        let routes = String::from_utf8(routes.stdout).unwrap();
        let are_there = addresses.iter().all(|address| routes.contains(address));
        if are_there && routes.lines().count() == addresses.len() { Ok(()) } else { Err(routes) }
    }
}

#[test]
fn a_first_start_that_receives_with_a_fault_can_be_repeated() {
    first_starts(&World::that_receives());
}

#[test]
fn a_restart_with_a_fault_gives_up_no_address() {
    let world = World::that_receives();
    restarts(&world);
}

/// Makes the pod an endpoint, or another one.
fn changes(name: &str, from: u8, to: u8) {
    let world = World::that_receives();
    let wanted: &[&str] = if to == 1 { &[BALANCER] } else { &[] };
    world.with_faults(name, || world.balance(from), || world.balance(to), || world.has_routes(wanted));
}

#[test]
fn an_address_that_comes_with_a_fault_is_received_later() {
    changes("an address", 2, 1);
}

#[test]
fn an_address_that_goes_with_a_fault_is_given_up_later() {
    changes("an address less", 1, 2);
}
