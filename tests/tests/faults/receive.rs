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
        world.balance(&[BALANCER]);
        world
    }

    /// Writes a Service of the pod with these addresses.
    fn balance(&self, addresses: &[&str]) {
        let service = Service::new("received").cluster_ips(["10.96.0.77"]).tcp("http", 80, 8080);
        let service = addresses.iter().fold(service, Service::load_balancer_ip);
        let slice = Slice::v4("received").tcp("http", 8080).ready([pod(1).v4]);
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

#[test]
fn an_address_that_comes_with_a_fault_is_received_later() {
    let world = World::that_receives();
    let more = [BALANCER, "203.0.113.11"];
    world.with_faults(
        "another address",
        || world.balance(&[BALANCER]),
        || world.balance(&more),
        || world.has_routes(&more),
    );
}

#[test]
fn an_address_that_goes_with_a_fault_is_given_up_later() {
    let world = World::that_receives();
    world.with_faults(
        "an address less",
        || world.balance(&[BALANCER, "203.0.113.11"]),
        || world.balance(&[BALANCER]),
        || world.has_routes(&[BALANCER]),
    );
}
