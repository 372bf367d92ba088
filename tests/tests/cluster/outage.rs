//! Outages of the API server under a running agent.

use cproxy_tests::{
    manifest::{Service, Slice},
    process::{cproxy, eventually},
    sandbox::Sandbox,
};

use crate::{
    client::while_a_client_connects,
    fixture::{Cluster, PATIENCE},
};

#[test]
fn an_outage_of_the_api_server_changes_nothing_and_is_survived() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start(&sandbox);
    let mut agent = cluster.start_agent();
    for (name, vip, pod) in [("stays", "10.96.0.10", "10.244.0.1"), ("web", "10.96.0.11", "10.244.0.2")] {
        cluster.apply(Service::new(name).cluster_ips([vip]).tcp("http", 80, 8080).udp("dns", 80, 5353));
        cluster.apply(Slice::v4(name).tcp("http", 8080).udp("dns", 5353).ready([pod]));
    }
    let rows = [
        "TCP 10.96.0.10:80 10.244.0.1:8080",
        "UDP 10.96.0.10:80 10.244.0.1:5353",
        "TCP 10.96.0.11:80 10.244.0.2:8080",
        "UDP 10.96.0.11:80 10.244.0.2:5353",
    ];
    cluster.expect(&rows);
    // There must be no gap from before the outage until after the new lists.
    while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        cluster.control_plane.kill_api_server();
        for resource in ["services", "endpointslices"] {
            agent.wait_log(&format!("{resource} at https://192.0.2.1:6443"), PATIENCE);
        }
        cluster.assert_table(&rows);
        let silence =
            || cproxy(&sandbox, &["get", "counters", "-o", "json"]).json()["api_server_silent_seconds"].as_u64();
        eventually(PATIENCE, "the silence is counted", || {
            silence().filter(|seconds| *seconds >= 2).ok_or_else(|| format!("{:?}", silence()))
        });
        assert!(agent.is_ready(), "what is in force is still complete");

        cluster.start_api_server();
        cluster.apply(Slice::v4("web").tcp("http", 8080).udp("dns", 5353).ready(["10.244.0.2", "10.244.0.3"]));
        cluster.apply(Service::new("new").cluster_ips(["10.96.0.12"]).tcp("http", 80, 8080));
        cluster.expect(&[
            rows[0],
            rows[1],
            "TCP 10.96.0.11:80 10.244.0.2:8080 10.244.0.3:8080",
            "UDP 10.96.0.11:80 10.244.0.2:5353 10.244.0.3:5353",
            "TCP 10.96.0.12:80 refuse",
        ]);
        assert!(silence().is_some_and(|seconds| seconds < PATIENCE.as_secs()), "it has answered again");
        cluster.delete("Service", "web");
        cluster.expect(&[rows[0], rows[1], "TCP 10.96.0.12:80 refuse"]);
    });
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}
