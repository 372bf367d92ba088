//! Ways to the API server other than TCP: sockets of the machine, and HTTP proxies.

use std::path::PathBuf;

use cproxy_tests::{process::Agent, relay::Relay, sandbox::Sandbox};
use serde_json::{Value, json};

use crate::fixture::{Cluster, PATIENCE};

#[test]
fn a_unix_socket_leads_to_the_api_server_without_credentials_in_the_guest() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let socket = sandbox.dir().join("api.sock");
    let socket = socket.to_str().unwrap();
    let mut agent = Agent::new(&sandbox).args(["--apiserver", &format!("unix://{socket}")]).spawn();
    let line = agent.wait_log("services at unix://", PATIENCE);
    assert!(line.contains("there is no such socket"), "{line}");
    let mut proxy = cluster.control_plane.start_kubectl_proxy(socket);
    agent.wait_ready(PATIENCE);
    cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
    let web = "TCP 10.96.0.10:80 10.244.0.1:8080";
    cluster.expect(&[web]);

    proxy.kill();
    agent.wait_log("nothing listens on it", PATIENCE);
    cluster.assert_table(&[web]);
    let _proxy = cluster.control_plane.start_kubectl_proxy(socket);
    cluster.delete("Service", "web");
    cluster.expect(&[]);
}

/// The agent's kubeconfig with a proxy.
fn kubeconfig_with_proxy(cluster: &Cluster<'_>, proxy: &str) -> PathBuf {
    let change = |config: &mut Value| config["clusters"][0]["cluster"]["proxy-url"] = json!(proxy);
    cluster.control_plane.agent_kubeconfig_with("with-proxy", change)
}

#[test]
fn an_http_proxy_of_the_kubeconfig_is_used_with_its_password() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let open = Relay::start_proxy(&sandbox, None);
    // "user:secret" in base64.
    let closed = Relay::start_proxy(&sandbox, Some("Basic dXNlcjpzZWNyZXQ="));
    for (relay, user) in [(&open, ""), (&closed, "user:secret@")] {
        let url = format!("http://{user}{}", relay.address());
        let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig_with_proxy(&cluster, &url)).start();
        cluster.expect(&[]);
        assert_eq!(relay.open_count(), 1, "one connection through the proxy");
        assert!(agent.stop().success());
        relay.wait_for_connections(0, PATIENCE);
    }

    let url = format!("http://user:wrong-word@{}", closed.address());
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig_with_proxy(&cluster, &url)).spawn();
    let line = agent.wait_log("cannot list services", PATIENCE);
    let words = format!("proxy http://{}/: it refuses to connect to 192.0.2.1:6443: HTTP/1.1 407", closed.address());
    assert!(line.contains(&words), "{words}: {line}");
    assert!(!agent.log().contains("wrong-word"), "{}", agent.log());
    // A changed kubeconfig is read again.
    kubeconfig_with_proxy(&cluster, &format!("http://user:secret@{}", closed.address()));
    agent.wait_ready(PATIENCE);
}

#[test]
fn a_vsock_address_without_a_host_behind_it_is_named_with_the_reason_and_tried_again() {
    let sandbox = Sandbox::for_test();
    // No program has this port, should this machine be a VM with vsock.
    let address = "vsock://2:4294967294";
    let mut agent = Agent::new(&sandbox).args(["--apiserver", address]).spawn();
    let line = agent.wait_log("cannot list services", PATIENCE);
    let reasons = ["this kernel has no vsock", "this VM has no vsock device", "nothing listens on that port"];
    assert!(line.contains(address) && reasons.iter().any(|reason| line.contains(reason)), "{line}");
    agent.wait_until(PATIENCE, "it tries again", |agent| {
        if agent.log().matches("cannot list services").count() > 1 { Ok(()) } else { Err("not yet") }
    });
    assert!(!agent.is_ready());
}
