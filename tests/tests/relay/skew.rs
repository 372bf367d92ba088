//! Agent and relay of different versions: of the last release and of the present one.

use std::path::Path;

use cproxy_tests::{
    manifest::Slice,
    older::{released_agent, released_relay},
    process::{Agent, cproxy_binary, eventually, other_cproxy},
    relay_server::relay_binary,
    sandbox::Sandbox,
};
use serde_json::json;

use crate::fixture::{Cluster, PATIENCE, RELAY, service};

/// Metric of the agents that follow Services.
const WATCHES: &str = "cproxy_relay_watches{resource=\"services\"}";

const SLICES_OF_TEAM: &str = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices";

/// Waits until the agent's table has exactly these backends of a Service; none: no such Service.
fn wait_for_backends(sandbox: &Sandbox, agent: &Path, name: &str, wanted: Option<&[&str]>) {
    eventually(PATIENCE, format!("{name} has the backends {wanted:?}"), || {
        let rows = other_cproxy(sandbox, agent, &["get", "services", "-o", "json"]).json();
        let row = rows.as_array().unwrap().iter().find(|row| row["service"] == format!("team/{name}"));
        let backends = row.map(|row| {
            let backends = row["backends"].as_array().unwrap().iter();
            backends.map(|backend| backend["address"].as_str().unwrap()).collect::<Vec<_>>()
        });
        if backends.as_deref() == wanted { Ok(()) } else { Err(rows.to_string()) }
    });
}

/// An agent behind a relay alone gets ready, and follows each change before and after the relay's restart.
fn assert_follows(agent: &Path, relay: &Path) {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox, &[]);
    let start_relay = || cluster.tls_relay().binary(relay).start();
    let mut running_relay = start_relay();
    let kubeconfig = cluster.kubeconfig("admin", "agent", &format!("https://{RELAY}"));
    let mut running = Agent::new(&sandbox).binary(agent).kubeconfig(kubeconfig).start();
    for round in ["before", "after"] {
        let backends = |name, wanted| wait_for_backends(&sandbox, agent, name, wanted);
        cluster.create(&service("team", round));
        backends(round, Some(&[]));
        let slice = Slice::v4(round).namespace("team").tcp("http", 8080);
        cluster.create(&slice.ready(["10.244.0.5"]).into());
        backends(round, Some(&["10.244.0.5"]));
        let endpoints = json!({"endpoints": [{"addresses": ["10.244.0.6"]}]});
        cluster.patch(&format!("{SLICES_OF_TEAM}/{round}-ipv4"), &endpoints);
        backends(round, Some(&["10.244.0.6"]));
        cluster.delete(&format!("/api/v1/namespaces/team/services/{round}"));
        backends(round, None);
        if round == "before" {
            assert!(running_relay.metric(WATCHES) >= 1.0, "the agent follows the relay");
            running_relay.kill();
            running_relay = start_relay();
        }
    }
    assert!(running.exit_status().is_none() && !running.log().contains("panicked"), "{}", running.log());
    assert!(!running_relay.log().contains("panicked"), "{}", running_relay.log());
}

#[test]
fn the_agent_of_the_last_release_follows_behind_this_relay_and_survives_its_restart() {
    assert_follows(&released_agent().binary, &relay_binary());
}

#[test]
fn this_agent_follows_behind_the_relay_of_the_last_release_and_survives_its_restart() {
    assert_follows(&cproxy_binary(), &released_relay());
}
