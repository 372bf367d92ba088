//! Objects that are created, changed and deleted while the agent runs.

use cproxy_tests::{
    manifest::{Endpoint, Service, Slice},
    process::cproxy,
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    fixture::{Cluster, assert_no_service},
    rows,
};

const VIP: &str = "10.96.0.10";
const VIP_V6: &str = "fd00:10:96::10";

/// Two TCP ports and a UDP port with the number of one of them, in both families.
fn dual_stack_service() -> Service {
    Service::new("web").cluster_ips([VIP, VIP_V6]).tcp("http", 80, 8080).tcp("admin", 8081, 9090).udp("dns", 80, 5353)
}

fn slice(slice: Slice) -> Slice {
    slice.tcp("http", 8080).tcp("admin", 9090).udp("dns", 5353)
}

#[test]
fn a_service_is_followed_from_creation_to_deletion() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    // The API server has no IPv6 address here.
    let _agent = cluster.agent().args(["--pod-ip", "10.244.0.9", "fd00:10:244::9"]).start();
    let rows = [
        "TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.2:8080",
        "UDP 10.96.0.10:80 10.244.0.1:5353 10.244.0.2:5353",
        "TCP 10.96.0.10:8081 10.244.0.1:9090 10.244.0.2:9090",
        "TCP [fd00:10:96::10]:80 [fd00:10:244::1]:8080",
        "UDP [fd00:10:96::10]:80 [fd00:10:244::1]:5353",
        "TCP [fd00:10:96::10]:8081 [fd00:10:244::1]:9090",
    ];
    cluster.expect(&[]);
    cluster.apply(dual_stack_service());
    cluster.expect(&rows.map(without_backends).each_ref().map(String::as_str));
    cluster.apply(slice(Slice::v4("web")).ready(["10.244.0.1", "10.244.0.2"]));
    cluster.apply(slice(Slice::v6("web")).ready(["fd00:10:244::1"]));
    cluster.expect(&rows);
    assert_names(&sandbox);

    change_a_port_number(&cluster, &rows);
    remove_and_restore_a_port(&cluster, &rows);

    cluster.delete("Service", "web");
    cluster.expect(&[]);
    for vip in ["10.96.0.10:80", "[fd00:10:96::10]:80"] {
        assert_no_service("TCP", vip);
        assert_no_service("UDP", vip);
    }
    // The Service's slices are still there.
    cluster.apply(dual_stack_service());
    cluster.expect(&rows);

    give_the_address_to_another_service(&cluster);
}

/// The row of the same frontend without backends.
fn without_backends(row: &str) -> String {
    row.split(' ').take(2).chain(["refuse"]).collect::<Vec<_>>().join(" ")
}

/// Checks that a running agent names the Services of the rows.
fn assert_names(sandbox: &Sandbox) {
    let services = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    let row = services.as_array().unwrap().iter().find(|row| row["protocol"] == "UDP" && row["address"] == VIP_V6);
    let expected = json!({
        "service": "default/web", "port_name": "dns", "protocol": "UDP", "address": VIP_V6, "port": 80,
        "source": "ClusterIP", "action": "forward", "session_affinity_seconds": null,
        "backends": [{"address": "fd00:10:244::1", "port": 5353}],
        "connections": null, "refused": null, "dropped": null,
    });
    assert_eq!(row, Some(&expected));
}

/// Changes the port's number in both families; its name and its backends stay.
fn change_a_port_number(cluster: &Cluster<'_>, rows: &[&str; 6]) {
    let service = Service::new("web").cluster_ips([VIP, VIP_V6]);
    cluster.apply(service.tcp("http", 79, 8080).tcp("admin", 8081, 9090).udp("dns", 80, 5353));
    let changed =
        ["TCP 10.96.0.10:79 10.244.0.1:8080 10.244.0.2:8080", "TCP [fd00:10:96::10]:79 [fd00:10:244::1]:8080"];
    cluster.expect(&[changed[0], rows[1], rows[2], changed[1], rows[4], rows[5]]);
    rows::ask("TCP", "10.96.0.10:80".parse().unwrap()).expect_err("the old port leads nowhere");
    cluster.apply(dual_stack_service());
    cluster.expect(rows);
}

/// Removes and restores one of the ports; the UDP port of the same number stays.
fn remove_and_restore_a_port(cluster: &Cluster<'_>, rows: &[&str; 6]) {
    let service = Service::new("web").cluster_ips([VIP, VIP_V6]);
    cluster.apply(service.tcp("admin", 8081, 9090).udp("dns", 80, 5353));
    cluster.expect(&[rows[1], rows[2], rows[4], rows[5]]);
    cluster.apply(dual_stack_service());
    cluster.expect(rows);
}

/// Deletes a Service and gives its address to another one at once.
fn give_the_address_to_another_service(cluster: &Cluster<'_>) {
    cluster.apply(Slice::v4("next").tcp("http", 8080).ready(["10.244.0.3"]));
    cluster.delete("Service", "web");
    cluster.apply(Service::new("next").cluster_ips([VIP]).tcp("http", 80, 8080));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.3:8080"]);
    cluster.delete("Service", "next");
    cluster.apply(dual_stack_service());
    cluster.delete("EndpointSlice", "web-ipv6");
    cluster.expect(&[
        "TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.2:8080",
        "UDP 10.96.0.10:80 10.244.0.1:5353 10.244.0.2:5353",
        "TCP 10.96.0.10:8081 10.244.0.1:9090 10.244.0.2:9090",
        "TCP [fd00:10:96::10]:80 refuse",
        "UDP [fd00:10:96::10]:80 refuse",
        "TCP [fd00:10:96::10]:8081 refuse",
    ]);
}

/// The slice `name` of the Service `web`, whose pods listen on `port`.
fn part(name: &str, port: u16) -> Slice {
    Slice::v4("web").name(name).tcp("http", port)
}

#[test]
fn backends_are_the_union_of_the_ready_endpoints_of_all_slices() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let _agent = cluster.start_agent();
    // The slice comes before its Service.
    cluster.apply(part("web-a", 8080).ready(["10.244.0.1"]));
    cluster.expect(&[]);
    cluster.apply(Service::new("web").cluster_ips([VIP]).tcp("http", 80, 8080));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080"]);
    // The port's name is the same, but each endpoint has its own slice's number. The address alone does not identify an
    // endpoint.
    cluster.apply(part("web-b", 9090).ready(["10.244.0.1", "10.244.0.2"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.1:9090 10.244.0.2:9090"]);

    // Endpoints are added, removed, and in two slices at once.
    cluster.apply(part("web-a", 8080).ready(["10.244.0.1", "10.244.0.3"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.1:9090 10.244.0.2:9090 10.244.0.3:8080"]);
    cluster.apply(part("web-b", 8080).ready(["10.244.0.3"]));
    cluster.apply(part("web-a", 8080).ready(["10.244.0.3"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.3:8080"]);
    cluster.apply(part("web-a", 8080).ready(["10.244.0.1"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.3:8080"]);

    change_readiness(&cluster);

    cluster.delete("EndpointSlice", "web-b");
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080"]);
    // The last slice goes and comes back.
    cluster.delete("EndpointSlice", "web-a");
    cluster.expect(&["TCP 10.96.0.10:80 refuse"]);
    cluster.apply(part("web-a", 8080).ready(["10.244.0.1"]));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080"]);

    move_slices(&cluster);
}

/// Endpoints that are not ready, terminating, and ready again.
fn change_readiness(cluster: &Cluster<'_>) {
    let both = "TCP 10.96.0.10:80 10.244.0.1:8080 10.244.0.3:8080";
    let set = |endpoint: Endpoint| cluster.apply(part("web-a", 8080).endpoint(endpoint));
    set(Endpoint::not_ready("10.244.0.1"));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.3:8080"]);
    set(Endpoint::ready("10.244.0.1"));
    cluster.expect(&[both]);
    set(Endpoint::terminating("10.244.0.1", true));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.3:8080"]);
    // No endpoint is ready, so the terminating one that still serves is used.
    cluster.apply(part("web-b", 8080).endpoint(Endpoint::not_ready("10.244.0.3")));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080"]);
    set(Endpoint::terminating("10.244.0.1", false));
    cluster.expect(&["TCP 10.96.0.10:80 refuse"]);
    set(Endpoint::ready("10.244.0.1"));
    cluster.apply(part("web-b", 8080).ready(["10.244.0.3"]));
    cluster.expect(&[both]);
}

/// Slices that change the label with their Service's name, which alone counts.
fn move_slices(cluster: &Cluster<'_>) {
    cluster.apply(Service::new("other").cluster_ips(["10.96.0.11"]).tcp("http", 80, 8080));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 refuse"]);
    let label = |service: Value| json!({"metadata": {"labels": {"kubernetes.io/service-name": service}}});
    cluster.patch("EndpointSlice", "web-a", label(json!("other")));
    cluster.expect(&["TCP 10.96.0.10:80 refuse", "TCP 10.96.0.11:80 10.244.0.1:8080"]);
    cluster.patch("EndpointSlice", "web-a", label(Value::Null));
    cluster.expect(&["TCP 10.96.0.10:80 refuse", "TCP 10.96.0.11:80 refuse"]);
    cluster.patch("EndpointSlice", "web-a", label(json!("web")));
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 refuse"]);
}

/// The fields that make a Service's type ExternalName; undone by [`cluster_ip`].
fn external_name() -> Value {
    json!({"spec": {"type": "ExternalName", "externalName": "example.com", "clusterIP": null, "clusterIPs": null,
        "ipFamilies": null, "ipFamilyPolicy": null}})
}

fn cluster_ip() -> Value {
    json!({"spec": {"type": "ClusterIP", "externalName": null, "clusterIP": VIP}})
}

#[test]
fn objects_that_are_not_ours_are_left_out_while_they_are_not() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let agent = cluster.start_agent();
    let rows = [
        "TCP 10.96.0.10:80 10.244.0.1:8080",
        "UDP 10.96.0.10:80 10.244.0.1:5353",
        "TCP 10.96.0.10:8081 10.244.0.1:9090",
    ];
    cluster.apply(dual_stack_service().cluster_ips([VIP]));
    cluster.apply(slice(Slice::v4("web")).ready(["10.244.0.1"]));
    cluster.expect(&rows);

    cluster.patch("Service", "web", external_name());
    cluster.expect(&[]);
    assert_no_service("TCP", "10.96.0.10:80");
    cluster.patch("Service", "web", cluster_ip());
    cluster.expect(&rows);

    // A headless Service has endpoints, but never a ClusterIP.
    cluster.apply(Service::new("headless").headless().tcp("http", 80, 8080));
    cluster.apply(Slice::v4("headless").tcp("http", 8080).ready(["10.244.0.2"]));
    cluster.expect(&rows);

    // The label counts with any value.
    for value in ["another-proxy", ""] {
        hide_service(&cluster, value, &rows);
        hide_slice(&cluster, value, &rows);
    }
    // None of this deserves a warning.
    assert!(!agent.log().contains("WARN") && !agent.log().contains("ERROR"), "{}", agent.log());
}

fn hide_service(cluster: &Cluster<'_>, value: &str, rows: &[&str]) {
    let label = |value: Value| json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": value}}});
    cluster.patch("Service", "web", label(json!(value)));
    cluster.expect(&[]);
    assert_no_service("TCP", "10.96.0.10:80");
    cluster.patch("Service", "web", label(Value::Null));
    cluster.expect(rows);
}

fn hide_slice(cluster: &Cluster<'_>, value: &str, rows: &[&str; 3]) {
    let label = |value: Value| json!({"metadata": {"labels": {"service.kubernetes.io/headless": value}}});
    cluster.patch("EndpointSlice", "web-ipv4", label(json!(value)));
    cluster.expect(&rows.map(without_backends).each_ref().map(String::as_str));
    cluster.patch("EndpointSlice", "web-ipv4", label(Value::Null));
    cluster.expect(rows);
}
