//! Agents that the API server refuses, or that do not trust the API server.

use std::{path::PathBuf, process::Command};

use cproxy_tests::{
    control_plane::{ADDRESS, ClientIdentity, NODE, PORT, Validity, role_binding},
    manifest::{self, write_text},
    process::{Agent, Daemon, RunningAgent, Signal, cproxy_binary},
    sandbox::{Placement, Sandbox},
};
use serde_json::json;

use crate::fixture::{Cluster, PATIENCE};

const RESOURCES: [(&str, &str); 2] = [("services", ""), ("endpointslices", "discovery.k8s.io")];

/// Waits until the agent has logged a line with all `words` about both resources, at least `times` times.
fn wait_for_warnings(agent: &mut RunningAgent, times: usize, words: &[&str]) {
    for (resource, _) in RESOURCES {
        agent.wait_until(PATIENCE, &format!("{times} lines about {resource} and {words:?}"), |agent| {
            let log = agent.log();
            let is_meant = |line: &&str| words.iter().chain([&resource]).all(|word| line.contains(word));
            if log.lines().filter(is_meant).count() < times { Err("not yet") } else { Ok(()) }
        });
    }
}

#[test]
fn missing_rights_are_named_and_used_once_they_are_granted() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let mut agent = Agent::new(&sandbox).kubeconfig(cluster.control_plane.kubeconfig_for("nobody")).spawn();
    wait_for_warnings(&mut agent, 1, &["not permitted", "list", "watch"]);
    for (resource, group) in RESOURCES {
        let line = agent.wait_log(&format!("not permitted to list {resource}"), PATIENCE);
        assert!(line.contains(&format!("{group:?}")), "the line names the group {group:?}: {line}");
    }
    assert!(!agent.is_ready());
    assert_eq!(agent.exit_status(), None);

    cluster.control_plane.apply([role_binding("cproxy", "nobody")]);
    agent.wait_ready(PATIENCE);
    cluster.expect(&[]);
}

/// Starts the agent as in a pod: with token and ca.crt in a ServiceAccount's place, in a mount namespace of its own,
/// and the rest in the environment.
fn start_in_pod(cluster: &Cluster<'_>, environment: &[(&str, &str)]) -> Daemon {
    let sandbox = cluster.sandbox;
    let mut pod = Command::new("unshare");
    pod.args(["--mount", "sh", "-euc"]).arg(
        "mount -t tmpfs none /var/run; account=/var/run/secrets/kubernetes.io/serviceaccount; mkdir -p $account
         cp $ca $account/ca.crt; echo $token >$account/token; echo default >$account/namespace; exec $cproxy run",
    );
    pod.env("ca", cluster.control_plane.ca_file()).env("token", cluster.control_plane.token("cproxy"));
    pod.env("cproxy", cproxy_binary()).env("CPROXY_CGROUP", sandbox.cgroup());
    pod.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
    pod.envs(environment.iter().copied());
    Daemon::spawn(sandbox, "cproxy", Placement::Hooked, pod)
}

#[test]
fn a_pods_service_account_is_enough() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let server = cluster.control_plane.server_url();
    let (host, port) = (ADDRESS.to_string(), PORT.to_string());
    // The address in a pod's environment is a ClusterIP, which the agent cannot use; a direct one takes precedence.
    for environment in [
        &[("CPROXY_APISERVER", server.as_str()), ("KUBERNETES_SERVICE_HOST", "10.96.0.1")][..],
        &[("CPROXY_APISERVER", server.as_str()), ("CPROXY_TLS_SERVER_NAME", "kubernetes.default.svc")],
        &[("KUBERNETES_SERVICE_HOST", host.as_str()), ("KUBERNETES_SERVICE_PORT", port.as_str())],
    ] {
        let mut agent = start_in_pod(&cluster, environment);
        agent.wait_log("ready after", PATIENCE);
        cluster.expect(&[]);
        agent.stop();
    }
    let mut agent = start_in_pod(&cluster, &[("CPROXY_APISERVER", &server), ("CPROXY_TLS_SERVER_NAME", "elsewhere")]);
    agent.wait_log("certificate", PATIENCE);
}

#[test]
fn credentials_may_come_from_a_file_or_a_command() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let token = cluster.control_plane.token("cproxy");
    let (version, kind) = ("client.authentication.k8s.io/v1", "ExecCredential");
    let answer = json!({"apiVersion": version, "kind": kind, "status": {"token": token}}).to_string();
    write_text(sandbox.dir(), "token", &token);
    for (name, user) in [
        ("file", json!({"tokenFile": "token"})),
        (
            "exec",
            json!({"exec": {"apiVersion": version, "interactiveMode": "Never", "command": "echo", "args": [answer]}}),
        ),
    ] {
        let file = cluster.control_plane.agent_kubeconfig_with(name, |config| config["users"][0]["user"] = user);
        let mut agent = Agent::new(&sandbox).kubeconfig(file).start();
        cluster.expect(&[]);
        agent.stop();
    }
}

/// Checks that the agent reports the error, tries again, and ends on request.
fn assert_keeps_trying(cluster: &Cluster<'_>, kubeconfig: PathBuf, words: &[&str]) {
    let mut agent = Agent::new(cluster.sandbox).kubeconfig(kubeconfig).spawn();
    wait_for_warnings(&mut agent, 2, words);
    assert!(!agent.is_ready());
    agent.signal(Signal::TERM);
    let status = agent.wait(PATIENCE).expect("the agent ends");
    assert!(status.success(), "{status}: {}", agent.tail());
}

#[test]
fn a_wrong_token_and_a_wrong_authority_are_named() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let server = cluster.control_plane.server_url();
    let token = cluster.control_plane.agent_kubeconfig_with("wrong-token", |config| {
        config["users"][0]["user"]["token"] = json!("nobody-has-this");
    });
    assert_keeps_trying(&cluster, token, &[&server, "401", "credentials"]);

    let other = rcgen::generate_simple_self_signed(["elsewhere".to_owned()]).unwrap();
    let other = write_text(sandbox.dir(), "other-ca.crt", &other.cert.pem());
    let authority = cluster.control_plane.agent_kubeconfig_with("wrong-authority", |config| {
        config["clusters"][0]["cluster"]["certificate-authority"] = json!(other);
    });
    assert_keeps_trying(&cluster, authority, &[&server, "is signed by no certificate of"]);
}

#[test]
fn an_identity_of_a_node_needs_the_role_node_proxier_for_endpoint_slices_only() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    cluster.apply(manifest::node(NODE, "a"));
    let start = |user: &str, group| {
        let ClientIdentity { certificate, key } = cluster.control_plane.client_identity(user, group, Validity::Long);
        // The kubelet has both in one file.
        let file = write_text(sandbox.dir(), "client.pem", &(certificate + &key));
        let kubeconfig = cluster.control_plane.agent_kubeconfig_with("node", |config| {
            config["users"][0]["user"] = json!({"client-certificate": file, "client-key": file});
        });
        Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--node-name", NODE]).spawn()
    };
    // The node authorizer, with what nodes may do by themselves.
    let mut agent = start(&format!("system:node:{NODE}"), Some("system:nodes"));
    let line = agent.wait_log("not permitted to list endpointslices", PATIENCE);
    assert!(line.contains("discovery.k8s.io"), "{line}");
    let binding = ["create", "clusterrolebinding", "cproxy-nodes"];
    let binding = [&binding[..], &["--clusterrole=system:node-proxier", "--group=system:nodes"]].concat();
    cluster.control_plane.kubectl(&binding, "");
    agent.wait_ready(PATIENCE);
    cluster.expect(&[]);
    let log = agent.log();
    assert!(!log.contains("watch services:") && !log.contains("nodes"), "{log}");
    agent.stop();

    // The role suffices for any other identity, too: the one that Kubernetes has for kube-proxy.
    let mut agent = start("system:kube-proxy", None);
    agent.wait_ready(PATIENCE);
    cluster.expect(&[]);
    assert!(!agent.log().contains("not permitted"), "{}", agent.log());
}
