//! One Service as large as the API server accepts, beside ordinary ones.

use std::net::{Ipv4Addr, TcpStream};

use cproxy_tests::{
    control_plane::KUBERNETES_VIP,
    manifest::{Service, Slice, list},
    process::eventually,
    sandbox::Sandbox,
    world::counter,
};
use serde_json::json;

use crate::{
    fixture::{Cluster, PATIENCE},
    rows,
};

/// More external addresses than one object has room for.
const ADDRESSES_TOO_MANY: u32 = 1 << 18;
/// With that many addresses, this is many times what the table holds.
const PORTS: u16 = 1_000;

const WEB: &str = "10.96.0.10";
const LATE: &str = "10.96.0.11";

/// Creates a Service with as many external addresses as the API server accepts. Returns their number.
fn create_greedy(cluster: &Cluster<'_>) -> u32 {
    let first = Ipv4Addr::new(1, 0, 0, 1).to_bits();
    let mut count = ADDRESSES_TOO_MANY;
    loop {
        let addresses: Vec<_> = (first..first + count).map(|bits| Ipv4Addr::from_bits(bits).to_string()).collect();
        // Its ClusterIP comes before those of the others.
        let service = Service::new("greedy").cluster_ips(["10.96.0.2"]).spec("externalIPs", json!(addresses));
        let service = (1..=PORTS).fold(service, |service, port| service.tcp(&format!("p{port}"), port, 8080));
        let create = ["create", "--validate=false", "-f", "-"];
        let created = cluster.control_plane.try_kubectl("admin", &create, &list([service.into()]));
        if created.code == 0 {
            return count;
        }
        assert!(created.stderr.contains("large"), "{}", created.stderr);
        count -= count / 8;
    }
}

#[test]
fn a_service_as_large_as_the_api_server_accepts_harms_no_other() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    cluster.apply_service("web", WEB, &["10.244.0.1", "10.244.0.2", "10.244.0.3"]);
    let addresses = create_greedy(&cluster);
    assert!(addresses < ADDRESSES_TOO_MANY, "the API server has a limit");
    cluster.apply(Slice::v4("greedy").tcp("p1", 8080).ready(["10.244.0.9"]));

    let mut agent = cluster.start_agent();
    let assert_served = |rows: &[&str]| {
        cluster.assert_reachable(rows);
        TcpStream::connect((KUBERNETES_VIP, 443)).expect("default/kubernetes is served");
    };
    assert_served(&["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.2:8080 10.244.0.3:8080"]);
    cluster.assert_reachable(&["TCP 10.96.0.2:1 10.244.0.9:8080"]);
    agent.wait_log("Service default/greedy", PATIENCE);
    assert_eq!(counter(&sandbox, "object_problems"), 1, "{addresses} addresses: {}", agent.log());

    // Changes of the others are followed, too.
    cluster.apply_service("web", WEB, &["10.244.0.2"]);
    cluster.apply_service("late", LATE, &["10.244.0.3"]);
    eventually(PATIENCE, "the new Service is served", || rows::ask("TCP", format!("{LATE}:80").parse().unwrap()));
    let rows = ["TCP 10.96.0.10:80 10.244.0.2:8080", "TCP 10.96.0.11:80 10.244.0.3:8080"];
    assert_served(&rows);

    cluster.delete("Service", "greedy");
    cluster.expect(&rows);
    assert_eq!(counter(&sandbox, "object_problems"), 0);
}
