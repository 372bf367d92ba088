//! The relay between a real API server and its clients.
//!
//! Run with `--test-threads=1`: a sandbox's addresses and cgroup are the whole process's.

#![expect(clippy::indexing_slicing, clippy::unwrap_used, reason = "a test that finds something else has failed")]

use cproxy_tests::{control_plane::ControlPlane, http, manifest::Service, relay_server::RelayServer, sandbox::Sandbox};
use serde_json::Value;

#[test]
fn a_list_has_the_services_of_the_api_server() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    control_plane.apply([Service::new("web").cluster_ips(["10.96.1.1".parse().unwrap()]).tcp("", 80, 8080).into()]);
    let relay = RelayServer::new(&sandbox).kubeconfig(control_plane.admin_kubeconfig()).listen("127.0.0.1:7443");
    let relay = relay.without_authentication().start();
    let list: Value =
        serde_json::from_str(&http::get("127.0.0.1:7443", "/api/v1/namespaces/default/services").unwrap()).unwrap();
    let names: Vec<_> = list["items"].as_array().unwrap().iter().map(|item| &item["metadata"]["name"]).collect();
    assert_eq!(names, ["kubernetes", "web"]);
    assert_eq!(relay.metric("cproxy_relay_objects{resource=\"services\"}") as usize, names.len());
}
