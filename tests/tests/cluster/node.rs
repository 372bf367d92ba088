//! This node: its zone decides which hints apply, and its addresses serve node ports. The agent can do without
//! it.

use cproxy_tests::{
    control_plane::{NODE, role_binding},
    manifest::{self, Endpoint, Service, Slice},
    process::{Agent, RunningAgent, Signal},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::fixture::{Cluster, PATIENCE, assert_no_service};

const NODE_IP: &str = "192.0.2.10";
const NODE_IP_V6: &str = "2001:db8::10";

/// A Service with a node port in both families, whose pods are meant for different zones.
fn apply_service(cluster: &Cluster<'_>) {
    let service = Service::new("web").cluster_ips(["10.96.0.10", "fd00:10:96::10"]);
    cluster.apply(service.tcp("http", 80, 8080).node_port(30080));
    let hinted = |pod: &str, zone| Endpoint::ready(pod).for_zone(zone);
    let slice = Slice::v4("web").tcp("http", 8080);
    cluster.apply(slice.endpoint(hinted("10.244.0.1", "a")).endpoint(hinted("10.244.0.2", "b")));
    cluster.apply(Slice::v6("web").tcp("http", 8080).endpoint(hinted("fd00:10:244::1", "a")));
}

fn apply_node(cluster: &Cluster<'_>, zone: &str, addresses: &[&str]) {
    cluster.apply(manifest::node(NODE, zone));
    cluster.patch_status("Node", NODE, manifest::node_status(addresses));
}

const CLUSTER_IPS: [&str; 2] =
    ["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.2:8080", "TCP [fd00:10:96::10]:80 [fd00:10:244::1]:8080"];
const IN_ZONE_A: [&str; 4] = [
    "TCP 10.96.0.10:80 10.244.0.1:8080",
    "TCP 192.0.2.10:30080 10.244.0.1:8080",
    "TCP [2001:db8::10]:30080 [fd00:10:244::1]:8080",
    "TCP [fd00:10:96::10]:80 [fd00:10:244::1]:8080",
];

fn start_agent(cluster: &Cluster<'_>) -> RunningAgent {
    cluster.agent().args(["--node-name", NODE]).start()
}

#[test]
fn zone_and_addresses_of_the_node_are_followed() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    apply_service(&cluster);
    apply_node(&cluster, "a", &[NODE_IP, NODE_IP_V6]);
    // Another Node must have no effect.
    cluster.apply(manifest::node("node-2", "b"));
    cluster.patch_status("Node", "node-2", manifest::node_status(["192.0.2.20"]));
    let agent = start_agent(&cluster);
    // A marker is not necessary, since the agent is ready only once it knows the Node.
    cluster.assert_table(&IN_ZONE_A);

    cluster.apply(manifest::node(NODE, "b"));
    let in_zone_b = [
        "TCP 10.96.0.10:80 10.244.0.2:8080",
        "TCP 192.0.2.10:30080 10.244.0.2:8080",
        // No endpoint has a hint for zone b in this family, so hints do not apply.
        IN_ZONE_A[2],
        IN_ZONE_A[3],
    ];
    cluster.expect_soon(&in_zone_b);
    cluster.patch("Node", NODE, json!({"metadata": {"labels": {"topology.kubernetes.io/zone": Value::Null}}}));
    cluster.expect_soon(&[
        CLUSTER_IPS[0],
        "TCP 192.0.2.10:30080 10.244.0.1:8080 10.244.0.2:8080",
        IN_ZONE_A[2],
        IN_ZONE_A[3],
    ]);
    apply_node(&cluster, "a", &["192.0.2.11", "192.0.2.12"]);
    cluster.expect_soon(&[
        IN_ZONE_A[0],
        "TCP 192.0.2.11:30080 10.244.0.1:8080",
        "TCP 192.0.2.12:30080 10.244.0.1:8080",
        IN_ZONE_A[3],
    ]);
    for gone in ["192.0.2.10:30080", "[2001:db8::10]:30080"] {
        assert_no_service("TCP", gone);
    }
    cluster.delete("Node", NODE);
    cluster.expect_soon(&CLUSTER_IPS);
    apply_node(&cluster, "a", &[NODE_IP, NODE_IP_V6]);
    cluster.expect_soon(&IN_ZONE_A);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
}

#[test]
fn an_agent_whose_node_does_not_exist_does_without_until_it_does() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    apply_service(&cluster);
    let mut agent = start_agent(&cluster);
    cluster.assert_table(&CLUSTER_IPS);
    agent.wait_log("there is no Node with metadata.name=node-1: until there is, zone hints", PATIENCE);
    apply_node(&cluster, "a", &[NODE_IP, NODE_IP_V6]);
    cluster.expect_soon(&IN_ZONE_A);
}

/// A role for the user `nobody`, who may read everything but Nodes, with its binding.
fn rights(rules: Value) -> [Value; 2] {
    let (version, metadata) = ("rbac.authorization.k8s.io/v1", json!({"name": "some"}));
    let role = json!({"apiVersion": version, "kind": "ClusterRole", "metadata": metadata, "rules": rules});
    [role, role_binding("some", "nobody")]
}

#[test]
fn an_agent_that_may_not_read_its_node_does_without_until_it_may() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start(&sandbox);
    apply_service(&cluster);
    apply_node(&cluster, "a", &[NODE_IP, NODE_IP_V6]);
    let mut rules = vec![
        json!({"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]}),
        json!({"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}),
    ];
    cluster.control_plane.apply(rights(json!(rules)));
    let kubeconfig = cluster.control_plane.kubeconfig_for("nobody");
    let agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--node-name", NODE, "--log-level", "debug"]);
    let mut agent = agent.start();
    cluster.assert_table(&CLUSTER_IPS);
    agent.wait_log("still not permitted to list nodes", PATIENCE);
    let log = agent.log();
    let said = log.lines().filter(|line| line.contains("WARN")).collect::<Vec<_>>();
    assert_eq!(said.len(), 1, "{log}");
    for words in
        ["not permitted to list nodes", "verbs list and watch on resource \"nodes\"", "zone hints", "--node-ip"]
    {
        assert!(said[0].contains(words), "{words:?}: {}", said[0]);
    }

    rules.push(json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}));
    cluster.control_plane.apply(rights(json!(rules)));
    cluster.expect_soon(&IN_ZONE_A);
    // After the right is withdrawn, the known Node stays. A running watch is not authorised again, so the agent is
    // restarted.
    rules.pop();
    cluster.control_plane.apply(rights(json!(rules)));
    cluster.control_plane.kill_api_server();
    cluster.start_api_server();
    let line = agent.wait_log("the last known state stays", PATIENCE);
    assert!(line.contains("WARN not permitted to watch nodes"), "{line}");
    cluster.expect(&IN_ZONE_A);
}

#[test]
fn an_outage_of_the_api_server_changes_nothing_about_the_node() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start(&sandbox);
    apply_service(&cluster);
    apply_node(&cluster, "a", &[NODE_IP, NODE_IP_V6]);
    let mut agent = start_agent(&cluster);
    cluster.assert_table(&IN_ZONE_A);
    cluster.control_plane.kill_api_server();
    agent.wait_log("nodes at https://192.0.2.1:6443", PATIENCE);
    cluster.assert_table(&IN_ZONE_A);

    // A new agent has to wait, since a server without an answer has not denied that the Node exists.
    agent.signal(Signal::TERM);
    agent.wait(PATIENCE);
    let mut agent = cluster.agent().args(["--node-name", NODE]).spawn();
    agent.wait_log("services at https://192.0.2.1:6443", PATIENCE);
    assert!(!agent.is_ready());
    cluster.assert_table(&IN_ZONE_A);
    cluster.start_api_server();
    agent.wait_ready(PATIENCE);
    cluster.assert_table(&IN_ZONE_A);

    // The agent from before the outage also follows later changes.
    cluster.control_plane.kill_api_server();
    agent.wait_log("nodes at https://192.0.2.1:6443", PATIENCE);
    cluster.start_api_server();
    apply_node(&cluster, "a", &["192.0.2.11"]);
    cluster.expect_soon(&[IN_ZONE_A[0], "TCP 192.0.2.11:30080 10.244.0.1:8080", IN_ZONE_A[3]]);
}
