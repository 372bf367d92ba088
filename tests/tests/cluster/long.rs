//! The oldest supported API server, whose build takes minutes, and what takes minutes itself. This is part of
//! `cargo xtask test --long`.

use cproxy_tests::{
    manifest::{Service, Slice},
    sandbox::Sandbox,
};

use crate::{
    failover,
    fixture::{Cluster, PATIENCE},
    trouble,
};

#[test]
fn a_preferred_api_server_that_has_returned_is_used_again_after_a_while() {
    failover::assert_return();
}

#[test]
fn a_direct_connection_that_loses_responses_is_given_up_and_resumed_without_a_list() {
    trouble::assert_a_direct_connection_that_loses_responses_is_resumed();
}

#[test]
fn kubernetes_1_30_is_followed_through_changes_and_an_outage() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start_oldest(&sandbox);
    let version = cluster.control_plane.kubectl(&["get", "--raw", "/version"], "");
    assert!(version.contains("v1.30."), "{version}");
    for (name, vip, pod) in [("stays", "10.96.0.10", "10.244.0.1"), ("goes", "10.96.0.11", "10.244.0.2")] {
        cluster.apply_service(name, vip, &[pod]);
    }
    // This server cannot exclude the Service, which has no frontend.
    cluster.apply(Service::new("headless").cluster_ips(["None"]).tcp("http", 80, 8080));
    let mut agent = cluster.start_agent();
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.2:8080"]);
    let log = agent.log();
    assert!(log.contains("asking again without fieldSelector spec.clusterIP!=None") && !log.contains("WARN"), "{log}");

    cluster.control_plane.kill_api_server();
    agent.wait_log("trying again", PATIENCE);
    cluster.start_api_server();
    cluster.delete("Service", "goes");
    cluster.apply(Slice::v4("stays").tcp("http", 8080).ready(["10.244.0.1", "10.244.0.3"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.3:8080"]);
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}
