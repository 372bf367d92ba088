//! The VM's own address as the source of connections to the API server.

use cproxy_tests::{
    manifest::{Service, Slice},
    sandbox::Sandbox,
};
use serde_json::json;

use crate::fixture::{Cluster, PATIENCE};

#[test]
fn the_route_to_the_api_server_determines_the_own_address() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    let service = service.spec("type", json!("LoadBalancer")).spec("allocateLoadBalancerNodePorts", json!(false));
    cluster.apply(service.spec("loadBalancerSourceRanges", json!(["192.0.2.0/24"])));
    let balancer = json!({"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.20"}]}}});
    cluster.patch_status("Service", "web", balancer);
    cluster.apply(Slice::v4("web").tcp("http", 8080).ready(["10.244.0.1"]));
    let mut agent = cluster.start_agent();
    agent.wait_log("own addresses: 192.0.2.1 (route to the API server)", PATIENCE);
    let cluster_ip = "TCP 10.96.0.10:80 10.244.0.1:8080";
    let (open, closed) = ("TCP 203.0.113.20:80 10.244.0.1:8080", "TCP 203.0.113.20:80 drop");
    cluster.assert_table(&[cluster_ip, open]);

    // The API server is in this network namespace, so its route is a local one.
    let route_by = |source: &str| {
        sandbox.ip(&format!("route replace local 192.0.2.1 dev lo table local src {source}\n"));
    };
    route_by("10.244.0.2");
    cluster.expect_soon(&[cluster_ip, closed]);
    route_by("192.0.2.1");
    cluster.expect_soon(&[cluster_ip, open]);

    let ranges = |ranges| json!({"spec": {"loadBalancerSourceRanges": ranges}});
    cluster.patch("Service", "web", ranges(json!(["10.0.0.0/8", "2001:db8::/32"])));
    cluster.expect(&[cluster_ip, closed]);
    cluster.patch("Service", "web", ranges(json!(["2001:db8::/32"])));
    cluster.expect(&[cluster_ip, open]);
}
