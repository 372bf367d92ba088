//! An agent with little memory and many objects.

use std::time::Duration;

use cproxy_tests::{
    control_plane::ControlPlane,
    memory::MemoryLimit,
    population::Shape,
    process::{Agent, cproxy, cproxy_binary},
    sandbox::Sandbox,
    writer::Writer,
};

use crate::fixture::PATIENCE;

const POPULATION: Shape = Shape::new(5_000, 10);
const LIMIT_BYTES: u64 = 24 << 20;

/// Time for which the agent is watched after it is ready.
const AFTERWARDS: Duration = Duration::from_secs(2);

#[test]
fn five_thousand_services_fit_into_little_memory() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    Writer::new(&control_plane).create(POPULATION.objects(0..POPULATION.services));
    let limit = MemoryLimit::new(&sandbox, LIMIT_BYTES, &cproxy_binary());
    let agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig());
    let (mut agent, took) = agent.binary(limit.launcher()).start_and_time(PATIENCE);
    std::thread::sleep(AFTERWARDS);
    assert_eq!(agent.exit_status(), None);
    assert_eq!(limit.killed(), 0);
    let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
    let rows = rows.as_array().unwrap();
    let (services, endpoints) = (POPULATION.services as usize, POPULATION.endpoints as usize);
    assert_eq!(rows.len(), services + 1, "default/kubernetes is one as well");
    let complete = rows.iter().filter(|row| row["backends"].as_array().is_some_and(|all| all.len() == endpoints));
    assert_eq!(complete.count(), services);
    eprintln!("ready after {took:.1?}; at most {} KiB of {}", limit.peak_bytes() >> 10, LIMIT_BYTES >> 10);
    agent.stop();
}
