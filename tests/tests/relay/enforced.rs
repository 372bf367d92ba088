//! An agent that enforces the policy of its pod, as the relay has it.

use std::{
    io::{self, Write as _},
    net::TcpStream,
    time::Duration,
};

use cproxy_tests::{
    manifest,
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    fixture::{Cluster, PATIENCE, RELAY},
    policies::{cluster, of_pod, run_pod},
};

/// Peers of the pod, which are nowhere: a call that is not denied finds no route.
const CLIENT: &str = "10.244.1.2:80";
/// No other pod has this address: of two pods of one second, chance decides whose it is.
const OTHER: &str = "10.244.1.9:80";
const METRICS: &str = "127.0.0.1:10349";

/// An agent in the pod `web-0`.
fn agent<'s>(sandbox: &'s Sandbox, cluster: &Cluster<'_>, server: &str) -> Agent<'s> {
    let token = of_pod(cluster, "web-0");
    let kubeconfig = manifest::kubeconfig(
        json!({"server": server, "certificate-authority": cluster.control_plane.ca_file()}),
        json!({"token": token}),
    );
    let kubeconfig = manifest::write_text(sandbox.dir(), "pod.config", &kubeconfig.to_string());
    Agent::new(sandbox).kubeconfig(kubeconfig).args(["--policy", "enforce"])
}

/// A policy of the pod for egress alone.
fn egress(name: &str, to: Option<Value>) -> Value {
    let mut spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"]});
    if let Some(to) = to {
        spec["egress"] = json!([{"to": to}]);
    }
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "team", "name": name}, "spec": spec,
    })
}

fn is_denied(address: &str) -> bool {
    let address = address.parse().unwrap();
    let result = TcpStream::connect_timeout(&address, Duration::from_millis(200));
    result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

fn metrics() -> String {
    let mut stream = TcpStream::connect(METRICS).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    io::read_to_string(stream).unwrap()
}

fn expect(what: &str, denied: [bool; 2]) {
    eventually(PATIENCE, what, || {
        let found = [CLIENT, OTHER].map(is_denied);
        if found == denied { Ok(()) } else { Err(format!("{found:?}")) }
    });
}

fn start(agent: Agent<'_>) -> RunningAgent {
    let mut agent = agent.spawn();
    agent.wait_ready(PATIENCE);
    agent
}

#[test]
fn a_guest_enforces_what_the_relay_has_resolved() {
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    // The pod of this test shares its network namespace with the control plane, which it must not isolate.
    cluster.delete("/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/allow-clients");
    cluster.create(&egress("deny", None));
    let _relay = cluster.tls_relay().arg("--policies").start();
    let agent = agent(&sandbox, &cluster, &format!("https://{RELAY}"));
    let mut agent = start(agent.args(["--metrics-bind-address", METRICS]));
    assert_eq!([CLIENT, OTHER].map(is_denied), [true, true], "ready with the policy in force");
    let shown = metrics();
    for line in [
        "cproxy_policy_in_force 1",
        "cproxy_policy_rules 0",
        "cproxy_policy_addresses 0",
        "cproxy_policy_changes_total 1",
        "cproxy_policy_silent_seconds 0",
        "cproxy_policy_denied_total{direction=\"ingress\"} 0",
        "cproxy_policy_denied_total{direction=\"egress\"} 2",
        "cproxy_policy_audited_total{direction=\"egress\"} 0",
        "cproxy_policy_denied_sockets_total 0",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    let report = cproxy(&sandbox, &["get", "policy", "-o", "json"]).success().json();
    assert_eq!((&report["pod"], &report["isolated"]), (&json!("team/web-0"), &json!(["Egress"])));
    assert_eq!(report["rules"][0]["rule"], "NetworkPolicy team/deny");
    let clients = json!([{"podSelector": {"matchLabels": {"app": "client"}}}]);
    cluster.create(&egress("allow", Some(clients)));
    expect("a policy that comes", [false, true]);
    run_pod(&cluster, "team", "late-0", "client", "10.244.1.9");
    expect("a pod that comes", [false, false]);
    cluster.delete("/api/v1/namespaces/team/pods/late-0");
    // It is terminating: its address stays until it is gone.
    let at_once = json!({"gracePeriodSeconds": 0});
    cluster.admin().write("DELETE", "/api/v1/namespaces/team/pods/late-0", &at_once);
    expect("a pod that goes", [false, true]);
    // A clone is closed until its own policy has come.
    cproxy(&sandbox, &["reseed"]).success();
    agent.wait_ready(PATIENCE);
    expect("after a restore", [false, true]);
    // Before a snapshot it is closed, and stays so whatever the relay says.
    cproxy(&sandbox, &["reseed", "--before-snapshot"]).success();
    assert_eq!([CLIENT, OTHER].map(is_denied), [true, true]);
    let wait = cproxy(&sandbox, &["wait", "--timeout", "2s"]);
    assert!(wait.code == 1 && wait.stderr.contains("it is closed for a snapshot"), "{wait:?}");
    assert_eq!([CLIENT, OTHER].map(is_denied), [true, true]);
    cproxy(&sandbox, &["reseed"]).success();
    agent.wait_ready(PATIENCE);
    expect("the clone has its policy", [false, true]);
    for name in ["deny", "allow"] {
        cluster.delete(&format!("/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/{name}"));
    }
    expect("no policy", [false, false]);
    agent.kill();
}

#[test]
fn policy_is_refused_at_the_start_where_the_source_is_an_api_server() {
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let kubeconfig = cluster.kubeconfig("admin", "agent", &cluster.control_plane.server_url());
    let agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--policy", "enforce", "--pod-ip", "192.0.2.1"]);
    let mut agent = agent.spawn();
    assert_eq!(agent.wait(PATIENCE).and_then(|status| status.code()), Some(2), "{}", agent.log());
    let log = agent.log();
    assert!(
        log.contains("an API server has no policies of pods, a cproxy-relay has; what was in force stays"),
        "{log}"
    );
    assert_eq!([CLIENT, OTHER].map(is_denied), [true, true], "the pod is closed");
    cproxy(&sandbox, &["cleanup", "--policy-too"]).success();
    assert_eq!([CLIENT, OTHER].map(is_denied), [false, false]);
}

#[test]
fn a_relay_without_policies_leaves_the_pod_closed_and_wait_says_why() {
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let _relay = cluster.tls_relay().start();
    let mut agent = agent(&sandbox, &cluster, &format!("https://{RELAY}")).spawn();
    eventually(PATIENCE, "wait names the remedy", || {
        let wait = cproxy(&sandbox, &["wait", "--timeout", "200ms"]);
        if wait.code == 1 && wait.stderr.contains("this relay has no policies of pods: it runs without --policies") {
            Ok(())
        } else {
            Err(wait.stderr)
        }
    });
    assert_eq!([CLIENT, OTHER].map(is_denied), [true, true]);
    agent.kill();
}
