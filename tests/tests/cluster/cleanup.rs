//! `cproxy cleanup` leaves nothing behind.

use cproxy_tests::{
    echo,
    manifest::{Service, Slice},
    process::cproxy,
    sandbox::Sandbox,
};

use crate::{
    fixture::{Cluster, assert_no_service},
    rows,
};

#[test]
fn after_cleanup_nothing_is_translated_until_the_agent_is_back() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let mut agent = cluster.start_agent();
    cluster.apply(Service::new("web").cluster_ips(["10.96.0.10", "fd00:10:96::10"]).tcp("http", 80, 8080));
    cluster.apply(Slice::v4("web").tcp("http", 8080).ready(["10.244.0.1"]));
    cluster.apply(Slice::v6("web").tcp("http", 8080).ready(["fd00:10:244::1"]));
    let rows = ["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP [fd00:10:96::10]:80 [fd00:10:244::1]:8080"];
    cluster.expect(&rows);

    // A running agent prevents the cleanup.
    let refused = cproxy(&sandbox, &["cleanup"]);
    assert_eq!((refused.code, refused.stderr.lines().count()), (1, 1), "{}", refused.stderr);
    cluster.expect(&rows);

    assert!(agent.stop().success());
    let (_, kept) = echo::connect_tcp("10.96.0.10:80").unwrap();
    cproxy(&sandbox, &["cleanup"]).success();
    assert!(!sandbox.pin_dir().exists(), "{} is still there", sandbox.pin_dir().display());
    for vip in ["10.96.0.10:80", "[fd00:10:96::10]:80"] {
        assert_no_service("TCP", vip);
    }
    echo::ping_tcp(&kept, "still there?").unwrap();
    // Connections now reach any server at the address.
    sandbox.add_address("10.96.0.10");
    let _owner = echo::tcp(&sandbox, "10.96.0.10:80", "owner");
    assert_eq!(rows::ask("TCP", "10.96.0.10:80".parse().unwrap()).unwrap(), "owner");
    // A second cleanup also succeeds.
    cproxy(&sandbox, &["cleanup"]).success();

    let _agent = cluster.start_agent();
    cluster.expect(&rows);
}
