//! Tests that take minutes, for `cargo xtask test --long`.

use std::time::Duration;

use cproxy_tests::{process::eventually, sandbox::Sandbox};

use crate::{
    access::{create_account, expect_refusal, stranger, token},
    agent::{start_agent, wait_for_service},
    fixture::{Cluster, PATIENCE, RELAY, SERVICES, service},
};

/// An agent tries the relay again when a watch ends, after ten minutes at most.
const RETURN_TIME_MAX: Duration = Duration::from_secs(15 * 60);

/// Time for which the answer of a TokenReview counts, and a little more.
const REVIEW_TIME_MAX: Duration = Duration::from_secs(150);

#[test]
fn an_agent_comes_back_to_a_relay_that_is_there_again() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let mut relay = cluster.tls_relay().start();
    let servers = format!("https://{RELAY},{}", cluster.control_plane.server_url());
    let _agent = start_agent(&sandbox, &cluster, &servers);
    relay.kill();
    cluster.create(&service("team", "without-relay"));
    wait_for_service(&sandbox, "without-relay");
    let relay = cluster.tls_relay().start();
    eventually(RETURN_TIME_MAX, "the agent watches both kinds at the relay", || {
        let watches = ["services", "endpointslices"]
            .map(|kind| relay.metric(&format!("cproxy_relay_watches{{resource=\"{kind}\"}}")));
        if watches == [1.0, 1.0] { Ok(()) } else { Err(format!("{watches:?}")) }
    });
    cluster.create(&service("team", "through-relay"));
    wait_for_service(&sandbox, "through-relay");
}

#[test]
fn the_token_of_a_deleted_account_is_refused_after_two_minutes() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    create_account(&cluster);
    let _relay = cluster.tls_relay().start();
    let client = stranger(&cluster).token(&token(&cluster, &[]));
    assert_eq!(client.get(SERVICES).code, 200);
    let mut watching = client.watch(&format!("{SERVICES}?watch=true"));
    cluster.delete("/api/v1/namespaces/team/serviceaccounts/app");
    eventually(REVIEW_TIME_MAX, "the token is refused", || match client.get(SERVICES) {
        response if response.code == 200 => Err("not yet"),
        _ => Ok(()),
    });
    expect_refusal(&client.get(SERVICES), 401, "Unauthorized", "its account or pod is deleted");
    watching.wait(REVIEW_TIME_MAX);
    let other = stranger(&cluster).token(&cluster.control_plane.token("admin"));
    eventually(PATIENCE, "another token is not", || match other.get(SERVICES).code {
        200 => Ok(()),
        code => Err(code),
    });
}
