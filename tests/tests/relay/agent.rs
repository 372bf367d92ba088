//! The agent behind the relay.

use cproxy_tests::{
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::Value;

use crate::fixture::{Cluster, PATIENCE, RELAY, service};

fn table(sandbox: &Sandbox) -> Value {
    let mut rows = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    rows.as_array_mut().unwrap().sort_by_key(Value::to_string);
    rows
}

pub(crate) fn start_agent(sandbox: &Sandbox, cluster: &Cluster<'_>, servers: &str) -> RunningAgent {
    let kubeconfig = cluster.kubeconfig("admin", "agent", &cluster.control_plane.server_url());
    let agent = Agent::new(sandbox).kubeconfig(kubeconfig);
    agent.args(["--apiserver", servers, "--node-name", "node-1", "--log-level", "debug"]).start()
}

/// Waits until the table has, or has not, rows of a Service.
pub(crate) fn wait_for_service(sandbox: &Sandbox, name: &str) {
    eventually(PATIENCE, format!("the table has {name}"), || {
        let table = table(sandbox);
        if table.to_string().contains(name) { Ok(()) } else { Err(table) }
    });
}

#[test]
fn the_table_is_that_of_an_agent_at_the_api_server_and_follows_when_the_relay_dies() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let direct = cluster.control_plane.server_url();
    let at_api = {
        let _agent = start_agent(&sandbox, &cluster, &direct);
        table(&sandbox)
    };
    let mut relay = cluster.tls_relay().start();
    let servers = format!("https://{RELAY},{direct}");
    let mut agent = start_agent(&sandbox, &cluster, &servers);
    assert_eq!(table(&sandbox), at_api, "the table of an agent behind the relay");
    eventually(PATIENCE, "the agent follows the relay", || {
        let watches = relay.metric("cproxy_relay_watches{resource=\"services\"}");
        if watches == 1.0 { Ok(()) } else { Err(watches) }
    });
    cluster.create(&service("team", "through-relay"));
    wait_for_service(&sandbox, "through-relay");

    // Behind a relay, too, a comparison ends.
    cproxy(&sandbox, &["reseed"]).success();
    agent.wait_ready(PATIENCE);

    relay.kill();
    cluster.create(&service("team", "without-relay"));
    wait_for_service(&sandbox, "without-relay");
    agent.wait_log("connected to another API server", PATIENCE);
}
