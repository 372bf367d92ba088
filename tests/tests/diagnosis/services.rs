//! Faults in Services and their endpoints.

use std::{io::ErrorKind, net::TcpStream};

use cproxy_tests::{
    manifest::{Endpoint, Service, Slice, node},
    process::{cproxy, eventually},
    world::{SYNC, World, pod, ready, service, slices, web, web_with},
};
use serde_json::{Value, json};

use super::Answer;

const CALL: &str = "10.96.0.10:80";

/// A world whose only Service is `web`, changed, with these slices.
fn world_with(service: Service, slices: impl IntoIterator<Item = Value>, arguments: &[&str]) -> World {
    let objects: Vec<_> = std::iter::once(service.into()).chain(slices).collect();
    World::builder().pods(1..=2).objects(objects).args(arguments).start()
}

fn explain(world: &World) -> Answer {
    Answer::to(&world.sandbox, &[CALL])
}

#[test]
fn a_healthy_service_is_found_by_each_name() {
    let world = World::start(1..=2);
    for destination in [
        &[CALL] as &[&str],
        &["10.96.0.10"],
        &["10.96.0.10", "80"],
        &["10.96.0.10:80/udp"],
        &["[fd00:10:96::a]:80"],
        &["fd00:10:96::a", "80/udp"],
        &["default/web"],
        &["default/web:80"],
        &["web.default"],
        &["web.default.svc.cluster.local", "80"],
    ] {
        Answer::to(&world.sandbox, destination)
            .forwarded()
            .has("ok", "programs", &["calls through each hook reach their target"])
            .has("ok", "process", &["its calls are translated"])
            .has("ok", "agent", &["ready for"])
            .has("ok", "source", &["manifests"])
            .has("ok", "table", &["the kernel has what the agent wants"]);
    }
    let answer = explain(&world).forwarded();
    assert!(
        answer.verdict().contains(
            "one of 2 backends (not called; --probe calls them) of Service default/web, port http (ClusterIP)"
        )
    );
    let json = Answer::to(&world.sandbox, &[CALL, "-o", "json"]).0.json();
    assert_eq!(json["ok"], true);
    assert_eq!(json["calls"][0]["outcome"], "forwarded");
    assert_eq!(json["calls"][0]["code"], "forwarded");
    assert!(json["calls"][0]["affinity"].is_null(), "{json}");
    assert_eq!(json["calls"][0]["backends"].as_array().unwrap().len(), 2);
    assert!(json["findings"].as_array().unwrap().iter().all(|finding| finding["state"] == "ok"), "{json}");
    assert_eq!(json["endpoints"].as_array().unwrap().len(), 8, "two pods, two ports, two families: {json}");
}

#[test]
fn the_last_change_is_named() {
    let world = World::start(1..=2);
    assert!(explain(&world).lines("changed").is_empty());
    world.set_pods([1]);
    explain(&world).has("ok", "changed", &["default/web", "ago: 2 -> 1 backends"]);
}

#[test]
fn a_service_without_endpoints() {
    let world = World::builder().objects([web().into()]).start();
    explain(&world).fails_because(&[
        "ECONNREFUSED",
        "no EndpointSlice in namespace default has the label kubernetes.io/service-name: web",
    ]);
    world.write(web_with([]));
    eventually(SYNC, "the agent has read the slices", || {
        let answer = explain(&world);
        if answer.verdict().contains("no EndpointSlice") { Err(answer.verdict().to_owned()) } else { Ok(()) }
    });
    explain(&world).fails_because(&["ECONNREFUSED", "its EndpointSlices have no endpoint"]);
}

#[test]
fn endpoints_that_are_not_ready() {
    let world = world_with(web(), slices(1..=2, |_, address| Endpoint::not_ready(address)), &[]);
    explain(&world).fails_because(&["ECONNREFUSED", "no endpoint can be used: not ready (2 endpoints)"]);
    let json: Value = serde_json::from_str(&Answer::to(&world.sandbox, &[CALL, "-o", "json"]).0.stdout).unwrap();
    assert_eq!((&json["ok"], &json["calls"][0]["code"]), (&json!(false), &json!("not-ready")), "{json}");
}

#[test]
fn a_wrong_port_name() {
    let slice = Slice::v4("web").tcp("web", 8080).ready([pod(1).v4]);
    let world = world_with(web(), [slice.into()], &[]);
    explain(&world).fails_because(&["the slice has no port \"http\" TCP (it has: \"web\" TCP)"]);
}

#[test]
fn a_selector_that_matches_nothing() {
    // Placeholder of the EndpointSlice controller.
    let mut slice = Value::from(Slice::v4("web"));
    slice["ports"] = Value::Null;
    slice["endpoints"] = Value::Null;
    let world = world_with(web(), [slice], &[]);
    explain(&world).fails_because(&["ECONNREFUSED", "its EndpointSlices have no endpoint"]);
    let manifests = world.sandbox.manifest_dir().display().to_string();
    let resolved = cproxy(&world.sandbox, &["resolve", "--manifests", &manifests, "--explain", "default/web"]);
    assert!(resolved.stdout.ends_with("\nIts EndpointSlices have no endpoint.\n"), "{resolved:?}");
}

#[test]
fn a_port_that_the_service_does_not_have() {
    let world = World::start([1]);
    Answer::to(&world.sandbox, &["10.96.0.10:81"])
        .fails_because(&["ECONNREFUSED", "Service default/web has no port 81/TCP; it has 80/TCP (http)"]);
    Answer::to(&world.sandbox, &["web.default.svc:81"])
        .fails_because(&["10.96.0.10:81/TCP: refused", "Service default/web has no port 81/TCP"]);
}

#[test]
fn a_local_policy_without_local_endpoints() {
    let local = || web().spec("internalTrafficPolicy", json!("Local"));
    let elsewhere = || slices(1..=2, |_, address| Endpoint::ready(address).node("there"));
    let world = world_with(local(), elsewhere().into_iter().chain([node("here", "z1")]), &["--node-name", "here"]);
    explain(&world).fails_because(&["EHOSTUNREACH", "internalTrafficPolicy Local", "not on this node, here"]);
    drop(world);
    let world = world_with(local(), elsewhere(), &[]);
    explain(&world).fails_because(&["this node's name is not known (--node-name)"]);
}

#[test]
fn hints_for_another_zone() {
    let hinted = |number: u8, address| Endpoint::ready(address).for_zone(if number == 1 { "z1" } else { "z2" });
    let objects = slices(1..=2, hinted).into_iter().chain([node("here", "z1")]);
    let world = world_with(web(), objects, &["--node-name", "here"]);
    let answer = explain(&world).forwarded();
    let endpoint = |number: u8| {
        let address = format!("{}:8080", pod(number).v4);
        answer.0.stdout.lines().rfind(|line| line.contains(&address)).unwrap_or_else(|| panic!("{}", answer.0.stdout))
    };
    assert!(endpoint(1).contains("meant for zone z1"), "{}", endpoint(1));
    assert!(endpoint(2).contains("meant for zone z2, not for zone z1"), "{}", endpoint(2));
}

#[test]
fn a_wrong_node_name() {
    let objects = slices([1], |_, address| Endpoint::ready(address)).into_iter().chain([node("here", "z1")]);
    let world = world_with(web(), objects, &["--node-name", "hre"]);
    explain(&world).forwarded().has("degraded", "node", &["no Node hre", "--node-name"]);
}

#[test]
fn services_that_cproxy_does_not_serve() {
    let service = |name: &str| Service::new(name).tcp("http", 80, 8080);
    let world = World::builder()
        .objects([
            web().label("service.kubernetes.io/service-proxy-name", "other").into(),
            service("headless").headless().into(),
            service("external").spec("type", json!("ExternalName")).spec("externalName", json!("example.com")).into(),
            Service::new("sctp").cluster_ips(["10.96.0.20"]).port("sctp", "SCTP", 80, 8080).into(),
        ])
        .start();
    for (name, code, reason) in [
        ("web", 1, "gives it to another proxy"),
        ("headless", 0, "headless (clusterIP None): its name in DNS gives the addresses of its pods"),
        ("external", 0, "ExternalName: its name in DNS leads to another name"),
        ("sctp", 1, "no address and port that cproxy could serve"),
        ("missing", 1, "not found: the source of the agent has no Service default/missing"),
    ] {
        Answer::to(&world.sandbox, &[&format!("default/{name}")]).says(code, &[reason]);
    }
    explain(&world).says(0, &["direct to the address itself: no Service has it"]);
    let sctp = Answer::to(&world.sandbox, &["10.96.0.20:80/sctp"]).0;
    assert!(sctp.code == 2 && sctp.stderr.contains("sctp") && sctp.stderr.contains("tcp and udp"), "{}", sctp.stderr);
}

#[test]
fn a_source_range_that_leaves_this_vm_out() {
    let service = web()
        .spec("type", json!("LoadBalancer"))
        .spec("loadBalancerSourceRanges", json!(["192.0.2.0/24"]))
        .load_balancer_ip("203.0.113.1");
    let world = world_with(service, slices([1], |_, address| Endpoint::ready(address)), &["--pod-ip", "10.244.0.7"]);
    Answer::to(&world.sandbox, &["203.0.113.1:80"])
        .fails_because(&["EHOSTUNREACH", "loadBalancerSourceRanges do not let this VM in (10.244.0.7)"]);
    explain(&world).forwarded();
}

#[test]
fn two_services_on_one_external_address() {
    let external = |name: &str, number: u8, created_at: &str| {
        let service = service(name, cproxy_tests::world::cluster_ip(number));
        service.spec("externalIPs", json!(["203.0.113.1"])).created_at(created_at).into()
    };
    let objects = [external("old", 20, "2020-01-01T00:00:00Z"), external("new", 21, "2021-01-01T00:00:00Z")];
    let slices = ["old", "new"]
        .into_iter()
        .flat_map(|name| cproxy_tests::world::slices_of(name, [1], |_, address| Endpoint::ready(address)));
    let world = World::builder().pods(1..=2).objects(objects.into_iter().chain(slices)).start();
    let answer = Answer::to(&world.sandbox, &["203.0.113.1:80"]).forwarded();
    assert!(answer.verdict().contains("Service default/old"), "{}", answer.verdict());
    answer.has("degraded", "problem", &["Service default/new", "203.0.113.1"]);
}

/// Its claim on a ClusterIP leads nowhere, and is no cause for its other addresses.
#[test]
fn an_external_address_that_is_anothers_cluster_ip() {
    let claims = json!(["10.96.0.10", "203.0.113.5"]);
    let service = Service::new("eip").cluster_ips(["10.96.0.71"]).tcp("x", 9999, 8080).spec("externalIPs", claims);
    let objects = web_with([1]).into_iter().chain([service.into()]);
    let world = World::builder().pods([1]).objects(objects).start();
    let answer = Answer::to(&world.sandbox, &["10.96.0.10:9999"]);
    let answer = answer.fails_because(&["refused with ECONNREFUSED", "Service default/web has no port 9999/TCP"]);
    assert!(answer.lines("table").iter().all(|line| line.starts_with("ok")), "{}", answer.0.stdout);
    Answer::to(&world.sandbox, &["203.0.113.5:9999"])
        .fails_because(&["no EndpointSlice in namespace default", ": eip"]);
}

#[test]
fn a_cluster_ip_of_another_service() {
    let late = Service::new("late").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    let services = [web().created_at("2020-01-01T00:00:00Z"), late.created_at("2021-01-01T00:00:00Z")];
    let objects = services.map(Value::from).into_iter().chain(ready([1]));
    let world = World::builder().pods([1]).objects(objects).start();
    let owner = "10.96.0.10:80/TCP belongs to Service default/web";
    Answer::to(&world.sandbox, &["default/late"])
        .fails_because(&["default/late: not found: others have its addresses and ports:", owner])
        .has("degraded", "problem", &["Service default/late", owner]);
    let manifests = world.sandbox.manifest_dir().display().to_string();
    let resolved = cproxy(&world.sandbox, &["resolve", "--manifests", &manifests, "--explain", "default/late"]);
    assert_eq!(resolved.code, 1, "{}", resolved.stdout);
    for words in [owner, "default/late: the Service is not served: none of its addresses"] {
        assert!(resolved.stderr.contains(words), "{}", resolved.stderr);
    }
}

#[test]
fn a_service_with_more_backends_than_one_may_have() {
    let many =
        (0..66_000_u32).map(|number| format!("10.{}.{}.{}", 100 + (number >> 16), number >> 8 & 255, number & 255));
    let endpoints: Vec<_> = many.collect();
    let slices = endpoints.chunks(1000).enumerate().map(|(index, addresses)| {
        Slice::v4("web").name(&format!("web-{index}")).tcp("http", 8080).ready(addresses).into()
    });
    let world = World::builder().objects(std::iter::once(web().into()).chain(slices)).start();
    // The address refuses all ports that are not in the table, and has the port of the datagrams.
    assert_eq!(TcpStream::connect(CALL).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let words = [
        "10.96.0.10:80/TCP: refused with ECONNREFUSED: Service default/web wants it, but it is not in the table",
        "66000 backends are more than",
    ];
    Answer::to(&world.sandbox, &["default/web"]).fails_because(&words).has("degraded", "problem", &words[1..]);
}

#[test]
fn an_address_of_a_pod_and_one_of_nobody() {
    let world = World::start([1]);
    Answer::to(&world.sandbox, &["10.244.0.1:8080"])
        .says(0, &["direct to the address itself", "it is an endpoint behind 10.96.0.10:80/TCP"]);
    Answer::to(&world.sandbox, &["192.0.2.9"]).says(0, &["no Service has it"]);
    Answer::to(&world.sandbox, &["fd00::99:80"]).says(0, &["with a port it is written [fd00::99]:80"]);
}
