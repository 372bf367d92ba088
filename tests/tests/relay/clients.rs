//! Real clients, unchanged: client-go, kubectl and kube-proxy.

use std::{collections::BTreeSet, net::SocketAddr, path::Path};

use cproxy_tests::{
    control_plane::{ADDRESS, NODE, PORT},
    kube_proxy::{KubeProxy, nft},
    manifest::Slice,
    process::{Daemon, Output, run},
    sandbox::{Placement, Sandbox},
};
use serde_json::{Value, json};

use crate::{
    fixture::{Cluster, PATIENCE, RELAY, World, service},
    go::{self, GoClient, Way, expect_equal},
};

/// Changes objects of each kind in every way.
fn change(cluster: &Cluster<'_>, round: u16) {
    let (web, name) = ("/api/v1/namespaces/default/services/web", format!("new-{round}"));
    cluster.patch(web, &json!({"metadata": {"labels": {"round": round.to_string()}}}));
    cluster.create(&service("team", &name));
    let slice: Value = Slice::v4(&name).namespace("team").tcp("http", round).ready(["10.244.1.1"]).into();
    cluster.create(&slice);
    cluster.patch("/api/v1/nodes/node-1", &json!({"metadata": {"labels": {"round": round.to_string()}}}));
    if round > 1 {
        let last = format!("new-{}", round - 1);
        cluster.delete(&format!("/api/v1/namespaces/team/services/{last}"));
        cluster.delete(&format!("/apis/discovery.k8s.io/v1/namespaces/team/endpointslices/{last}-ipv4"));
    }
}

#[test]
fn client_go_holds_what_the_api_server_holds_and_moves_without_a_list() {
    go::program();
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let tls_relay = || cluster.tls_relay().start();
    let mut relay = tls_relay();
    let at_api = cluster.kubeconfig("admin", "at-api", &cluster.control_plane.server_url());
    let at_relay = cluster.kubeconfig("admin", "at-relay", &format!("https://{RELAY}"));
    let mut clients = vec![GoClient::start(&sandbox, 0, &at_api, Way::ALL[0])];
    let numbered = (1..).zip(Way::ALL);
    clients.extend(numbered.map(|(number, way)| GoClient::start(&sandbox, number, &at_relay, way)));
    expect_equal(&clients);
    let lists = || clients.iter().map(GoClient::lists).collect::<Vec<_>>();
    let first = lists();
    assert_eq!(first, [3; 5], "one list of each kind");
    change(&cluster, 1);
    expect_equal(&clients);

    let (relay_address, api_address): (SocketAddr, _) = (RELAY.parse().unwrap(), SocketAddr::new(ADDRESS, PORT));
    for (round, server) in [(2, api_address), (3, relay_address), (4, api_address), (5, relay_address)] {
        clients.iter().skip(1).for_each(|client| client.move_to(server));
        change(&cluster, round);
        expect_equal(&clients);
        assert_eq!(lists(), first, "at {server} watches go on from their versions");
    }

    // A new process has no history from before its own lists, so that clients list once more. No change is lost or
    // comes twice.
    relay.kill();
    drop(relay);
    change(&cluster, 6);
    let relay = tls_relay();
    change(&cluster, 7);
    expect_equal(&clients);
    assert!(lists().iter().all(|count| *count <= 6), "{:?}", lists());
    for client in &clients {
        assert_eq!(client.events()["nodes changed"], 7, "{} sees each change once", client.name);
    }
    assert!(relay.metric("cproxy_relay_watches{resource=\"services\"}") >= 4.0);
}

/// Runs kubectl at a kubeconfig's server.
fn kubectl(cluster: &Cluster<'_>, kubeconfig: &Path, args: &[&str]) -> Output {
    let command = cluster.control_plane.kubectl_command(kubeconfig, args);
    run(cluster.sandbox, Placement::Unhooked, command, "", PATIENCE)
}

#[test]
fn kubectl_gets_and_watches() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let cluster = &world.cluster;
    let at_relay = cluster.kubeconfig("admin", "at-relay", &format!("http://{RELAY}"));
    let at_api = cluster.kubeconfig("admin", "at-api", &cluster.control_plane.server_url());
    world.settle();

    for args in [
        ["get", "endpointslices", "-A", "-o", "name"].as_slice(),
        &["get", "services", "-n", "team", "-o", "name"],
        &["get", "svc", "web", "-n", "team", "-o", "jsonpath={.spec}"],
        &["get", "nodes", "-l", "topology.kubernetes.io/zone=a", "-o", "name"],
        &["get", "svc", "-A", "--field-selector", "metadata.name=web", "-o", "name"],
        &["get", "svc", "-A", "--chunk-size=1", "-l", "app=web", "-o", "name"],
    ] {
        let [relayed, direct] = [&at_relay, &at_api].map(|kubeconfig| kubectl(cluster, kubeconfig, args));
        assert_eq!(relayed, direct, "{args:?}");
        assert!(!direct.stdout.is_empty(), "{args:?}");
    }
    let missing = [&at_relay, &at_api].map(|kubeconfig| kubectl(cluster, kubeconfig, &["get", "svc", "none"]));
    assert_eq!(missing[0], missing[1]);
    let pods = kubectl(cluster, &at_relay, &["get", "pods", "-A"]);
    assert!(pods.stderr.contains("doesn't have a resource type \"pods\""), "{pods:?}");
    let refused = kubectl(cluster, &at_relay, &["delete", "svc", "web", "-n", "team"]);
    assert!(refused.code == 1 && refused.stderr.contains("read-only"), "{refused:?}");

    let plain = kubectl(cluster, &at_relay, &["get", "svc", "-A"]).success().stdout;
    assert!(plain.starts_with("NAMESPACE ") && plain.contains("kube-dns"), "{plain}");
    let versions = [&at_relay, &at_api].map(|kubeconfig| kubectl(cluster, kubeconfig, &["version"]).success().stdout);
    assert_eq!(versions[0], versions[1]);
    let resources = kubectl(cluster, &at_relay, &["api-resources", "-o", "name"]).success().stdout;
    let resources: BTreeSet<_> = resources.lines().collect();
    assert_eq!(resources, BTreeSet::from(["services", "nodes", "endpointslices.discovery.k8s.io"]));

    let args = ["get", "services", "-n", "team", "-w", "-o", "name"];
    let watch = cluster.control_plane.kubectl_command(&at_relay, &args);
    let mut watching = Daemon::spawn(&sandbox, "kubectl", Placement::Unhooked, watch);
    watching.wait_log("service/web", PATIENCE);
    cluster.create(&service("team", "late"));
    watching.wait_log("service/late", PATIENCE);
}

/// kube-proxy's rules in a fixed order, without handles.
fn canonical(ruleset: &Value) -> BTreeSet<String> {
    let canonical = |object: &Value| {
        let mut object = object.clone();
        let parts = object.as_object_mut().unwrap().values_mut();
        for part in parts.filter_map(Value::as_object_mut) {
            part.remove("handle");
            if let Some(elements) = part.get_mut("elem").and_then(Value::as_array_mut) {
                elements.sort_by_key(Value::to_string);
            }
        }
        object.to_string()
    };
    ruleset["nftables"].as_array().unwrap().iter().map(canonical).collect()
}

#[test]
fn kube_proxy_writes_the_same_rules() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let cluster = &world.cluster;
    let status = cproxy_tests::manifest::node_status(["192.0.2.1"]);
    cluster.admin().write("PATCH", &format!("/api/v1/nodes/{NODE}/status"), &status);
    let [at_relay, at_api] = [
        cluster.kubeconfig("system:kube-proxy", "proxy-at-relay", &format!("http://{RELAY}")),
        cluster.kubeconfig("system:kube-proxy", "proxy-at-api", &cluster.control_plane.server_url()),
    ];
    let has = |rules: &BTreeSet<String>, text: &str| rules.iter().any(|line| line.contains(text));
    let [relayed, direct] = [at_relay, at_api].map(|kubeconfig| {
        let mut proxy = KubeProxy::spawn_with(&sandbox, &cluster.control_plane, &kubeconfig);
        let mut wait = |is_wanted: &dyn Fn(&BTreeSet<String>) -> bool| {
            proxy.wait_rules(PATIENCE, |ruleset| Some(canonical(ruleset)).filter(is_wanted))
        };
        wait(&|rules| has(rules, "10.244.0.3"));
        // It follows changes, and is then as with the first objects again.
        let slice = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/web-ipv4";
        cluster.patch(slice, &json!({"endpoints": [{"addresses": ["10.244.0.9"], "conditions": {"ready": true}}]}));
        wait(&|rules| has(rules, "10.244.0.9"));
        cluster.patch(slice, &json!({"endpoints": [{"addresses": ["10.244.0.3"], "conditions": {"ready": true}}]}));
        // It writes each family for itself.
        let rules = wait(&|rules| has(rules, "10.244.0.3") && has(rules, "fd00:10:96::") && !has(rules, "10.244.0.9"));
        proxy.stop();
        nft(&sandbox, &["flush", "ruleset"], "");
        rules
    });
    // The relay has no ServiceCIDRs, from which kube-proxy knows the ranges of these rules.
    let of_range = |rule: &&String| !rule.contains("Drop traffic to unallocated ClusterIPs");
    let differences: Vec<_> = relayed.symmetric_difference(&direct).filter(of_range).collect();
    assert!(differences.is_empty(), "{differences:#?}");
    assert!(relayed.len() > 50, "{relayed:#?}");
}
