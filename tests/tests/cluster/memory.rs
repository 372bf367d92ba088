//! An agent with little memory and many objects.

use std::{net::Ipv4Addr, time::Duration};

use cproxy_tests::{
    control_plane::ControlPlane,
    manifest::{Service, Slice},
    memory::MemoryLimit,
    process::{Agent, cproxy, cproxy_binary},
    sandbox::Sandbox,
};
use kube::{
    Api,
    api::{DynamicObject, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::fixture::PATIENCE;

const SERVICES: usize = 5_000;
const ENDPOINTS: usize = 10;
const LIMIT_BYTES: u64 = 24 << 20;

/// Number of requests under way at a time.
const REQUESTS: usize = 16;

/// Time for which the agent is watched after it is ready.
const AFTERWARDS: Duration = Duration::from_secs(2);

#[test]
fn five_thousand_services_fit_into_little_memory() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    create(&control_plane, (0..SERVICES).flat_map(objects).collect());
    let limit = MemoryLimit::new(&sandbox, LIMIT_BYTES, &cproxy_binary());
    let agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig());
    let mut agent = agent.binary(limit.launcher()).start();
    let took = agent.wait_ready(PATIENCE);
    std::thread::sleep(AFTERWARDS);
    assert_eq!(agent.exit_status(), None);
    assert_eq!(limit.killed(), 0);
    let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), SERVICES + 1, "default/kubernetes is one as well");
    let complete = rows.iter().filter(|row| row["backends"].as_array().is_some_and(|all| all.len() == ENDPOINTS));
    assert_eq!(complete.count(), SERVICES);
    eprintln!("ready after {took:.1?}; at most {} KiB of {}", limit.peak_bytes() >> 10, LIMIT_BYTES >> 10);
    agent.stop();
}

fn objects(number: usize) -> [Value; 2] {
    let name = format!("service-{number}");
    let first = Ipv4Addr::new(10, 245, 0, 0).to_bits() + u32::try_from(number * ENDPOINTS).unwrap();
    let pods = (first..).take(ENDPOINTS).map(Ipv4Addr::from_bits);
    let slice = Slice::v4(&name).tcp("http", 8080).ready(pods);
    [Service::new(&name).tcp("http", 80, 8080).into(), slice.into()]
}

fn create(control_plane: &ControlPlane<'_>, objects: Vec<Value>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = control_plane.client().await;
        let mut requests = JoinSet::new();
        for object in objects {
            if requests.len() == REQUESTS {
                requests.join_next().await.unwrap().unwrap();
            }
            let kind = match object["kind"].as_str() {
                Some("Service") => GroupVersionKind::gvk("", "v1", "Service"),
                _ => GroupVersionKind::gvk("discovery.k8s.io", "v1", "EndpointSlice"),
            };
            let api: Api<DynamicObject> =
                Api::namespaced_with(client.clone(), "default", &ApiResource::from_gvk(&kind));
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            requests.spawn(async move { drop(api.create(&PostParams::default(), &object).await.unwrap()) });
        }
        requests.join_all().await;
    });
}
