//! SIGHUP with other API servers.

use std::fs;

use cproxy_tests::{
    echo,
    process::{Daemon, Signal},
    sandbox::Sandbox,
};

use crate::fixture::{Cluster, PATIENCE};

#[test]
fn a_hangup_moves_the_watches_to_another_address_without_a_gap() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    let file = sandbox.dir().join("cproxy.conf");
    let set = |addresses: &str| fs::write(&file, format!("apiserver = {addresses}\n")).unwrap();
    // There is no such host.
    set("https://192.0.2.99:6443");
    let mut agent = cluster.agent().env("CPROXY_CONFIG", &file).spawn();
    agent.wait_log("services at https://192.0.2.99:6443", PATIENCE);
    set("https://192.0.2.1:6443");
    agent.signal(Signal::HUP);
    agent.wait_ready(PATIENCE);
    let failures = agent.log().matches("cannot watch").count();
    cluster.apply_service("stays", "10.96.0.10", &["10.244.0.1"]);
    let stays = "TCP 10.96.0.10:80 10.244.0.1:8080";
    cluster.expect(&[stays]);
    echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        for (addresses, used, pod) in [
            ("https://[2001:db8::1]:6443", "https://[2001:db8::1]:6443", "10.244.0.2"),
            ("https://192.0.2.99:6443,https://127.0.0.1:6443", "https://127.0.0.1:6443", "10.244.0.3"),
        ] {
            set(addresses);
            agent.signal(Signal::HUP);
            agent.wait_log(&format!("connected anew to the API server at {used}"), PATIENCE);
            cluster.apply_service("changes", "10.96.0.11", &[pod]);
            cluster.expect(&[stays, &format!("TCP 10.96.0.11:80 {pod}:8080")]);
        }
        set("https://127.0.0.1:1");
        agent.signal(Signal::HUP);
        agent.wait_log("the present connection to the API server stays for now", PATIENCE);
        cluster.apply_service("changes", "10.96.0.11", &["10.244.0.4"]);
        cluster.expect(&[stays, "TCP 10.96.0.11:80 10.244.0.4:8080"]);
    });
    // Without a change, too: this is how an operator makes the agent use new credentials.
    set("https://192.0.2.1:6443");
    let connections = |agent: &Daemon| agent.log().matches("connected anew").count();
    for _ in 0..2 {
        let before = connections(&agent);
        agent.signal(Signal::HUP);
        agent.wait_until(PATIENCE, "a new connection", |agent| {
            if connections(agent) > before { Ok(()) } else { Err("it is the old one") }
        });
    }
    let log = agent.log();
    assert_eq!(log.matches("cannot watch").count(), failures, "{log}");
    assert!(!log.contains("listing anew"), "{log}");
    assert_eq!(agent.exit_status(), None);
}
