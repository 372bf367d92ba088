//! Addresses that several Services claim, by real connects: who owns one, and on which ports.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::net::SocketAddr;

use cproxy_tests::{
    echo,
    manifest::{self, Service, Slice},
    process::{Agent, Signal, cproxy, eventually},
    sandbox::Sandbox,
    world::{Form, PORT, SYNC, TCP, UDP, WEB, World, has_pods, pod, rows, serve_pods, web_with},
};
use serde_json::{Value, json};

/// An address of no cluster.
const OUTSIDE: &str = "203.0.113.5";
/// Port of the other Service alone.
const OTHER_PORT: u16 = 81;
/// Number of connects after each change.
const CONNECTS: usize = 50;

/// `web` with pod 1.
fn web() -> [Value; 3] {
    web_with([1]).try_into().unwrap()
}

/// An older Service of another tenant with pod 2, whose external addresses are these.
fn claimant(external_ips: &[&str]) -> [Value; 3] {
    let service = Service::new("old").namespace("evil").cluster_ips(["10.96.0.66", "fd00:96::66"]).dual_stack();
    let service = service.tcp("http", PORT, TCP).tcp("other", OTHER_PORT, TCP).udp("dns", PORT, UDP);
    let service = service.spec("externalIPs", json!(external_ips)).created_at("2020-01-01T00:00:00Z");
    let ports = |slice: Slice| slice.namespace("evil").tcp("http", TCP).tcp("other", TCP).udp("dns", UDP);
    let [v4, v6] = [ports(Slice::v4("old")).ready([pod(2).v4]), ports(Slice::v6("old")).ready([pod(2).v6])];
    [service.into(), v4.into(), v6.into()]
}

fn web_and_claimant(external_ips: &[&str]) -> Vec<Value> {
    web().into_iter().chain(claimant(external_ips)).collect()
}

/// Checks that connects to the ClusterIPs of `web` all reach pod 1, and none a port that `web` does not have.
fn assert_of_web() {
    for form in Form::ALL {
        for _ in 0..CONNECTS {
            assert_eq!(echo::ask_name(form.web()).unwrap(), "pod-1");
        }
        assert_eq!(echo::ask_udp(form.web()).unwrap().0, "pod-1");
        assert!(echo::is_refused(echo::ask_tcp(SocketAddr::new(form.web().ip(), OTHER_PORT))), "{form:?}");
    }
}

fn rows_at<'r>(rows: &'r [Value], address: &str) -> Vec<&'r Value> {
    rows.iter().filter(|row| row["address"] == address).collect()
}

#[test]
fn a_cluster_ip_takes_no_external_claim_on_any_port() {
    let [v4, v6] = [WEB.v4.to_string(), WEB.v6.to_string()];
    let claims = [&*v4, &*v6];
    let world = World::builder().pods([1, 2]).objects(web_and_claimant(&claims)).start();
    assert_of_web();
    let resolved = world.sandbox.manifest_dir();
    let resolved = cproxy(&world.sandbox, &["resolve", "-o", "json", "--manifests", resolved.to_str().unwrap()]).json();
    let rows = resolved.as_array().unwrap();
    let at_v4 = rows_at(rows, &v4);
    assert!(at_v4.len() == 2 && at_v4.iter().all(|row| row["service"] == "default/web"), "{rows:#?}");

    let why = cproxy(&world.sandbox, &["explain", "evil/old"]).stdout;
    for words in [
        format!("{v4}:{PORT}/TCP belongs to Service default/web, whose ClusterIP takes no other claim"),
        format!("{v4}:{OTHER_PORT}/TCP belongs to Service default/web, whose ClusterIP takes no other claim"),
    ] {
        assert!(why.contains(&words), "{words:?}:\n{why}");
    }
    assert!(world.agent.log().contains("which comes first"), "{}", world.agent.tail());

    // Without its Service the address is as any other; with it, the claim is void again, in either order of arrival.
    world.set(claimant(&claims), |rows| rows_at(rows, &v4).len() == 3);
    assert_eq!(echo::ask_name(Form::V4.web()).unwrap(), "pod-2");
    world.set(web_and_claimant(&claims), |rows| rows_at(rows, &v4).iter().all(|row| row["service"] == "default/web"));
    assert_of_web();
}

#[test]
fn external_addresses_are_ignored_on_request_also_while_the_agent_runs() {
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, [1, 2]);
    manifest::write(&sandbox.manifest_dir(), "all.json", web_and_claimant(&[OUTSIDE]));
    let settings = manifest::write_text(sandbox.dir(), "cproxy.conf", "external-ips = ignore\n");
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("CPROXY_CONFIG", &settings).start();
    let outside = SocketAddr::new(OUTSIDE.parse().unwrap(), PORT);
    let served = rows(&sandbox, "services");
    assert!(rows_at(&served, OUTSIDE).is_empty(), "{served:#?}");
    assert!(!echo::is_refused(echo::ask_tcp(outside)), "the network decides");
    let why = cproxy(&sandbox, &["explain", "evil/old"]).stdout;
    assert!(why.contains("external addresses are not served (--external-ips ignore)"), "{why}");

    manifest::write_text(sandbox.dir(), "cproxy.conf", "external-ips = serve\n");
    agent.signal(Signal::HUP);
    agent.wait_log("--external-ips changed from ignore to serve", SYNC);
    let is_served = || match echo::ask_name(outside) {
        Ok(name) if name == "pod-2" => Ok(()),
        other => Err(format!("{other:?}")),
    };
    eventually(SYNC, "the external address is served", is_served);
    let served = rows(&sandbox, "services");
    let outside = rows_at(&served, OUTSIDE);
    assert!(outside.len() == 3 && outside.iter().all(|row| has_pods(row, &[2])), "{served:#?}");
}
