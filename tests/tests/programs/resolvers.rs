//! Resolvers with ClusterIPs as nameservers. They differ in their sockets, connected or not, one for each nameserver or
//! one for all, and in their reaction to a nameserver that refuses.

use std::{collections::BTreeSet, net::IpAddr, process::Command};

use crate::{
    build,
    fixture::{Cluster, DNS, DOWN, NAMES, OTHER_DNS, WEB, pod_number, vips},
};

/// Pods behind [`DNS`], and then the one behind [`OTHER_DNS`].
const DNS_PODS: [u8; 2] = [1, 2];
const OTHER_DNS_POD: u8 = 3;

/// Repeats `ask` until all of `pods` have answered. No other pod may answer.
fn all_answer(what: &str, pods: &[u8], mut ask: impl FnMut() -> u8) {
    let wanted: BTreeSet<_> = pods.iter().copied().collect();
    let mut seen = BTreeSet::new();
    // An even choice leaves one of two out of 100 once in 2^99 runs.
    for _ in 0..100 {
        let pod = ask();
        assert!(wanted.contains(&pod), "{what}: pod {pod}");
        seen.insert(pod);
        if seen == wanted {
            return;
        }
    }
    panic!("{what}: only {seen:?} answer, of {wanted:?}");
}

/// The pod that answered with this address of `who.test`.
fn pod_of_answer(address: &str) -> u8 {
    let pod = address.strip_prefix("192.0.2.").and_then(|pod| pod.parse().ok());
    pod.unwrap_or_else(|| panic!("no pod answers with {address:?}"))
}

fn resolv_conf(nameservers: &[IpAddr], options: &str) -> String {
    nameservers.iter().map(|server| format!("nameserver {server}\n")).collect::<String>() + options
}

#[test]
fn dig_over_udp_and_tcp() {
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    for (vip, transport) in vips(DNS).into_iter().flat_map(|vip| [(vip, "+notcp"), (vip, "+tcp")]) {
        all_answer(&format!("{vip} {transport}"), &DNS_PODS, || {
            let mut dig = Command::new("dig");
            dig.args([&format!("@{vip}"), transport, "+time=10", "+tries=1", "TXT", "who.test"]);
            let output = cluster.run(dig).success();
            assert!(!output.stdout.contains("unexpected source") && output.stderr.is_empty(), "{output:?}");
            assert!(output.stdout.contains(&format!(";; SERVER: {vip}#{NAMES}({vip})")), "{output:?}");
            let (_, text) = output.stdout.split_once("TXT\t\"").unwrap_or_else(|| panic!("{output:?}"));
            pod_number(text.split('"').next().unwrap())
        });
    }
    let mut dig = Command::new("dig");
    dig.args([&format!("@{}", vips(DOWN)[0]), "+time=10", "+tries=1", "who.test"]);
    let output = cluster.run(dig);
    assert!(output.code != 0 && output.stdout.contains("connection refused"), "{output:?}");
}

#[test]
fn glibc() {
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    let [dns, dns_v6] = vips(DNS);
    // The first nameserver refuses: a timeout for it would take longer than the program may.
    let [down, down_v6] = vips(DOWN);
    let servers = [vec![dns], vec![dns_v6], vec![down, dns], vec![down_v6, dns_v6], vec![down, down_v6, dns_v6]];
    for (servers, options) in servers.iter().flat_map(|servers| [(servers, ""), (servers, " use-vc")]) {
        let conf = resolv_conf(servers, &format!("options timeout:60 attempts:1{options}\n"));
        all_answer(&conf, &DNS_PODS, || {
            let mut getent = Command::new("getent");
            getent.args(["ahosts", "who.test"]);
            let output = cluster.run(cluster.with_resolv_conf(&conf, &getent)).success();
            pod_of_answer(output.stdout.split_whitespace().next().unwrap())
        });
    }
}

/// musl sends each question from one unconnected socket to all nameservers at once, and drops answers from any other
/// address.
#[test]
fn musl() {
    let program = build::musl_resolver();
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    let [dns, dns_v6] = vips(DNS);
    let [other, other_v6] = vips(OTHER_DNS);
    let [down, _] = vips(DOWN);
    let everyone = [DNS_PODS[0], DNS_PODS[1], OTHER_DNS_POD];
    let ask = |servers: &[IpAddr], pods: &[u8]| {
        // If an answer is dropped, there is no time for another question.
        let conf = resolv_conf(servers, "options timeout:60 attempts:1\n");
        let mut resolve = Command::new(program.get_program());
        resolve.arg("who.test");
        let output = cluster.run(cluster.with_resolv_conf(&conf, &resolve)).success();
        let pod = pod_of_answer(output.stdout.trim());
        assert!(pods.contains(&pod), "{servers:?}: pod {pod}");
        pod
    };
    for server in [dns, dns_v6] {
        all_answer("one nameserver", &DNS_PODS, || ask(&[server], &DNS_PODS));
    }
    ask(&[other_v6], &[OTHER_DNS_POD]);
    // Any of these nameservers may answer first.
    for servers in [[dns, other].as_slice(), &[dns_v6, other_v6], &[dns, other_v6], &[dns, dns_v6, other]] {
        ask(servers, &everyone);
    }
    all_answer("one that refuses, and another", &DNS_PODS, || ask(&[down, dns], &DNS_PODS));
}

#[test]
fn busybox() {
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    let run = |arguments: &[&str]| {
        let mut busybox = Command::new("busybox");
        busybox.args(arguments);
        let conf = resolv_conf(&vips(DNS), "");
        cluster.run(cluster.with_resolv_conf(&conf, &busybox)).success().stdout
    };
    for vip in vips(DNS) {
        all_answer(&vip.to_string(), &DNS_PODS, || {
            let answer = run(&["nslookup", "-type=a", "who.test", &vip.to_string()]);
            pod_of_answer(answer.lines().rev().find_map(|line| line.strip_prefix("Address: ")).unwrap_or(&answer))
        });
    }
    let body = run(&["wget", "-q", "-O", "-", "http://web.test/"]);
    pod_number(body.trim());
}

/// Addresses of a name that have a route come first (RFC 6724). glibc finds out by connecting UDP sockets, to port 0
/// where the caller has named none, and a refusal would look like no route.
#[test]
fn addresses_without_a_route_come_last() {
    let cluster = Cluster::start_without_addresses();
    let _dns = cluster.serve_names();
    for (family, option) in ["-4", "-6"].into_iter().enumerate() {
        let route = |verb| {
            let mut ip = Command::new("ip");
            ip.args([option, "route", verb, "default", "dev", "lo"]);
            cluster.run(ip).success();
        };
        route("add");
        let mut getent = Command::new("getent");
        getent.args(["ahosts", "web.test"]);
        let output = cluster.run(cluster.with_resolv_conf(&resolv_conf(&vips(DNS), ""), &getent)).success();
        assert!(output.stdout.starts_with(&vips(WEB)[family].to_string()), "{option}: {output:?}");
        route("delete");
    }
}
