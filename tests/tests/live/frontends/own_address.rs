//! The VM's own address, to which `loadBalancerSourceRanges` are compared: given by flag, or found and followed.

use std::{io, net::Ipv4Addr, thread, time::Instant};

use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Agent, eventually},
    sandbox::Sandbox,
    seccomp::forbid_netlink,
    world::{PORT, SYNC, ready, start_agent, start_agent_with},
};
use serde_json::{Value, json};

use super::world::{ASKS, BALANCER_IP, CLUSTER_IP, all_are, rows, service, start};

/// A network with a default route and an address of each family in 10.1.0.0/16 and fd01::/16.
const LINK: &str = "\
    link add own0 type veth peer name own1\n\
    link set own1 up\n\
    link set own0 up\n\
    address add 10.1.0.2/24 dev own0\n\
    address add fd01::2/64 dev own0 nodad\n\
    route add default via 10.1.0.1 dev own0\n\
    route add default via fd01::1 dev own0\n";

fn with_link(sandbox: &Sandbox) {
    sandbox.ip(LINK);
}

fn restricted_to(ranges: [&str; 2]) -> Vec<Value> {
    let service = service().spec("loadBalancerSourceRanges", json!(ranges));
    std::iter::once(service.into()).chain(ready([1])).collect()
}

const INSIDE: [&str; 2] = ["10.1.0.0/16", "fd01::/16"];

/// Checks that the ClusterIP works in any case, and the load balancer's addresses as given.
fn assert_balancer(is_open: [bool; 2]) {
    for (_, _, ask) in [ASKS[0], ASKS[2]] {
        for (to, is_open) in BALANCER_IP.forms(PORT).into_iter().zip([is_open[0], is_open[1], is_open[0]]) {
            match ask(to) {
                Ok(name) => assert!(is_open, "{to}: {name}"),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::HostUnreachable, "{to}: {error}");
                    assert!(!is_open, "{to}: {error}");
                }
            }
        }
        CLUSTER_IP.forms(PORT).into_iter().for_each(|to| assert_eq!(ask(to).unwrap(), "pod-1", "{to}"));
    }
}

fn actions(rows: &[Value]) -> [&Value; 2] {
    BALANCER_IP.addresses().map(|ip| {
        let row = rows.iter().find(|row| row["address"] == ip.to_string()).unwrap();
        &row["action"]
    })
}

#[test]
fn the_address_of_the_default_route_is_found_and_followed() {
    let mut world = start(1, restricted_to(INSIDE), &[], with_link);
    world.agent.wait_log("own addresses: 10.1.0.2 (default route), fd01::2 (default route)", SYNC);
    assert_balancer([true, true]);

    // A new address appears before the old one goes.
    world.sandbox.ip("address add 10.2.0.2/24 dev own0\nroute replace default via 10.2.0.1 dev own0\n");
    world.wait(|rows| actions(rows) == ["drop", "forward"]);
    assert_balancer([false, true]);
    world.sandbox.ip("route replace default via 10.1.0.1 dev own0\n");
    world.wait(|rows| actions(rows) == ["forward", "forward"]);
    assert_balancer([true, true]);

    // The other family's address changes; addresses without a route of their own also count.
    world.sandbox.ip("address add fd02::2/64 dev own0 nodad\naddress del fd01::2/64 dev own0\n");
    world.wait(|rows| actions(rows) == ["forward", "drop"]);
    assert_balancer([true, false]);
    world.sandbox.ip("address add fd01::2/64 dev own0 nodad\naddress del fd02::2/64 dev own0\n");
    world.wait(|rows| actions(rows) == ["forward", "forward"]);

    // The link goes down, and with it every route and the known addresses; then it comes back.
    world.sandbox.ip("link set own0 down\n");
    world.wait(|rows| actions(rows) == ["drop", "drop"]);
    world.agent.wait_log("no address of this VM found for loadBalancerSourceRanges", SYNC);
    assert_balancer([false, false]);
    world.agent.wait_log("the VM's IPv4 address is not known: calls to its load balancer's addresses fail", SYNC);
    world
        .sandbox
        .ip("link set own0 up\nroute add default via 10.1.0.1 dev own0\naddress replace fd01::2/64 dev own0 nodad\n\
         route replace default via fd01::1 dev own0\n");
    world.wait(|rows| actions(rows) == ["forward", "forward"]);
    assert_balancer([true, true]);
}

/// This holds even if IPv6 sends no event for it.
#[test]
fn own_addresses_are_lost_with_their_link() {
    let no_ipv6 = |sandbox: &Sandbox| {
        sandbox.ip("link add own0 type veth peer name own1\n");
        std::fs::write("/proc/sys/net/ipv6/conf/own0/disable_ipv6", "1").unwrap();
        std::fs::write("/proc/sys/net/ipv6/conf/own1/disable_ipv6", "1").unwrap();
        sandbox
            .ip("link set own1 up\nlink set own0 up\naddress add 10.1.0.2/24 dev own0\nroute add default dev own0\n");
    };
    let mut world = start(1, restricted_to(INSIDE), &[], no_ipv6);
    world.agent.wait_log("own addresses: 10.1.0.2 (default route)", SYNC);
    assert_balancer([true, false]);
    world.sandbox.ip("link set own0 down\n");
    world.wait(|rows| actions(rows) == ["drop", "drop"]);
}

#[test]
fn given_addresses_are_the_only_ones() {
    let mut world = start(1, restricted_to(INSIDE), &["--pod-ip", "10.9.0.2"], with_link);
    // No IPv6 address is compared with the ranges, since an address is given.
    world.wait(|rows| all_are(rows, BALANCER_IP, "drop"));
    assert_balancer([false, false]);
    assert!(world.agent.log().contains("pod-ip 10.9.0.2"), "{}", world.agent.log());
    world.agent.stop();
    let agent = start_agent_with(&world.sandbox, ["--pod-ip", "10.1.0.99", "fd01::99"]);
    assert_balancer([true, true]);
    // The routes have no effect.
    world.sandbox.ip("link set own0 down\n");
    let detected = "own addresses: 10.1.0.2 (route to the given address), fd01::2 (route to the given address)";
    assert!(agent.log().contains(detected), "{}", agent.log());
    assert_balancer([true, true]);
}

#[test]
fn without_netlink_the_addresses_found_at_the_start_stay() {
    let sandbox = Sandbox::for_test();
    sandbox.ip(LINK);
    manifest::write(&sandbox.manifest_dir(), "web.json", restricted_to(INSIDE));
    let without_netlink = || {
        forbid_netlink();
        let mut agent = start_agent(&sandbox);
        agent.wait_log("changes of the VM's addresses are not seen", SYNC);
        agent.wait_log("own addresses: 10.1.0.2 (default route), fd01::2 (default route)", SYNC);
        assert!(all_are(&rows(&sandbox), BALANCER_IP, "forward"));
    };
    thread::scope(|scope| scope.spawn(without_netlink).join()).unwrap();
}

#[test]
fn an_address_is_known_before_anything_is_served() {
    let sandbox = Sandbox::for_test();
    sandbox.ip(LINK);
    let bootstrap = manifest::write(sandbox.dir(), "bootstrap.json", restricted_to(INSIDE));
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://127.0.0.1:1");
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).arg("--bootstrap").arg(bootstrap).spawn();
    // A loopback address is never the VM's own, so the default route decides.
    agent.wait_log("own addresses: 10.1.0.2 (default route), fd01::2 (default route)", SYNC);
    eventually(SYNC, "the bootstrap is served", || {
        let rows = rows(&sandbox);
        if all_are(&rows, BALANCER_IP, "forward") { Ok(()) } else { Err(format!("{rows:#?}")) }
    });
}

/// Each of their frontends gets another set. If the agent replaced them one by one, each would wait for running
/// programs, and the agent would handle no event for 12 seconds.
#[test]
fn a_thousand_load_balancers_follow_the_address_together() {
    const SERVICES: u16 = 1_000;
    let sandbox = Sandbox::for_test();
    let balancer = |number: u16| {
        let [high, low] = number.to_be_bytes();
        let service = Service::new(&format!("web-{number}")).cluster_ips([Ipv4Addr::new(10, 97, high, low)]);
        let service = service.tcp("http", 80, 8080).load_balancer_ip(Ipv4Addr::new(203, 0, high, low));
        let slice = Slice::v4(&format!("web-{number}")).tcp("http", 8080).ready([Ipv4Addr::new(10, 244, 0, 1)]);
        [Value::from(service.spec("loadBalancerSourceRanges", json!(["10.1.0.0/16"]))), slice.into()]
    };
    manifest::write(&sandbox.manifest_dir(), "web.json", (0..SERVICES).flat_map(balancer));
    let mut agent = start_agent(&sandbox);
    let forwarded = |sandbox: &Sandbox| {
        let all = rows(sandbox);
        all.iter().filter(|row| row["source"] == "LoadBalancerIP" && row["action"] == "forward").count()
    };
    assert_eq!(forwarded(&sandbox), 0);
    sandbox.ip(LINK);
    let start = Instant::now();
    agent.wait_log("own addresses now: 10.1.0.2", SYNC);
    // The answer comes once the change is written.
    eventually(SYNC, "all are forwarded", || {
        let count = forwarded(&sandbox);
        if count == usize::from(SERVICES) { Ok(()) } else { Err(format!("{count} of {SERVICES}")) }
    });
    eprintln!("{SERVICES} load balancers follow the VM's address within {} ms", start.elapsed().as_millis());
}
