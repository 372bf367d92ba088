//! Clients by their tokens, certificates and places, and what each of them sees.

use std::{collections::BTreeSet, path::Path};

use cproxy_tests::{
    control_plane::Validity,
    manifest,
    process::eventually,
    relay_server::{RelayServer, cproxy_relay},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    client::{Client, Response},
    fixture::{Cluster, NODES, PATIENCE, RELAY, SERVICES, SLICES, service},
};

const VIEWS: &str = r#"
views:
- name: own-namespace
  match: {groups: ["system:serviceaccounts"]}
  namespaces: [own]
- name: kubelets
  match: {groups: ["system:nodes"]}
  namespaces: all
- name: guests
  match: {unixPaths: ["*/team-a.sock"]}
  namespaces: [team-a]
"#;

/// A relay with views, for all ways in.
fn relay_with_views<'s>(cluster: &Cluster<'s>, socket: &Path) -> RelayServer<'s> {
    let views = manifest::write_text(cluster.sandbox.dir(), "views.yaml", VIEWS);
    let listen = format!("{RELAY},unix://{}", socket.display());
    let relay = cluster.with_tls(cluster.relay()).listen(listen).arg("--views").arg(views);
    relay.arg("--client-ca-file").arg(cluster.control_plane.client_ca_file())
}

/// A client without credentials.
pub(crate) fn stranger<'s>(cluster: &Cluster<'s>) -> Client<'s> {
    Client::new(cluster.sandbox, format!("https://{RELAY}")).ca_file(&cluster.control_plane.ca_file())
}

/// The same with a certificate.
pub(crate) fn certified<'s>(cluster: &Cluster<'s>, name: &str, group: Option<&str>, validity: Validity) -> Client<'s> {
    let identity = cluster.control_plane.client_identity(name, group, validity);
    let text = format!("{}{}", identity.certificate, identity.key);
    let file = manifest::write_text(cluster.sandbox.dir(), "client.pem", &text);
    stranger(cluster).args(["--cert".to_owned(), file.display().to_string()])
}

/// A token of the ServiceAccount `team/app`.
pub(crate) fn token(cluster: &Cluster<'_>, more: &[&str]) -> String {
    let args = [&["create", "token", "app", "--namespace=team"], more].concat();
    cluster.control_plane.kubectl(&args, "").trim().to_owned()
}

pub(crate) fn create_account(cluster: &Cluster<'_>) {
    let metadata = json!({"name": "app", "namespace": "team"});
    cluster.create(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}));
}

/// Namespaces and names of a list.
pub(crate) fn names(client: &Client<'_>, path: &str) -> BTreeSet<String> {
    let list = client.json(path);
    let name = |item: &Value| {
        let text = |field| item["metadata"][field].as_str().unwrap_or_default().to_owned();
        format!("{}/{}", text("namespace"), text("name"))
    };
    list["items"].as_array().unwrap().iter().map(name).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Checks a refusal and that it explains itself.
pub(crate) fn expect_refusal(response: &Response, code: u16, reason: &str, text: &str) {
    let status = response.json();
    assert_eq!((response.code, status["reason"].as_str()), (code, Some(reason)), "{status}");
    assert_eq!((&status["kind"], &status["code"]), (&json!("Status"), &json!(code)));
    assert!(status["message"].as_str().unwrap().contains(text), "{status}");
}

#[test]
fn clients_see_what_their_views_show() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    create_account(&cluster);
    let socket = sandbox.dir().join("team-a.sock");
    let mut relay = relay_with_views(&cluster, &socket).start();

    let app = stranger(&cluster).token(&token(&cluster, &[]));
    let own = set(&["default/kubernetes", "kube-system/kube-dns", "team/web"]);
    eventually(PATIENCE, "the relay has the last Service", || {
        let names = names(&app, SERVICES);
        if names == own { Ok(()) } else { Err(format!("{names:?}")) }
    });
    assert_eq!(names(&app, SLICES), set(&["default/kubernetes", "team/web-ipv6"]));
    assert_eq!(names(&app, NODES), set(&[]));
    assert_eq!(names(&app, "/api/v1/namespaces/default/services"), set(&["default/kubernetes"]));
    assert_eq!(app.get("/api/v1/namespaces/team/services/web").code, 200);
    let hidden = app.get("/api/v1/namespaces/default/services/web");
    assert_eq!((hidden.code, hidden.json()["reason"].as_str()), (404, Some("NotFound")));
    assert!(!app.get(SERVICES).header("cproxy-view").is_empty());

    let bound = token(&cluster, &["--bound-object-kind=Node", "--bound-object-name=node-1"]);
    assert_eq!(names(&stranger(&cluster).token(&bound), NODES), set(&["/node-1"]));

    let watching = app.watch(&format!("{SERVICES}?watch=true&resourceVersion=0"));
    cluster.create(&service("team-a", "hidden"));
    cluster.create(&service("team", "late"));
    eventually(PATIENCE, "the watch has the client's own Service", || {
        let changes = watching.changes();
        if changes.contains(&"ADDED late".to_owned()) { Ok(()) } else { Err(format!("{changes:?}")) }
    });
    assert!(!watching.changes().contains(&"ADDED hidden".to_owned()), "{:?}", watching.changes());

    let unix = Client::new(&sandbox, "http://localhost").args(["--unix-socket", &socket.display().to_string()]);
    let guests = set(&["default/kubernetes", "kube-system/kube-dns", "team-a/hidden", "team-a/web"]);
    assert_eq!(names(&unix, SERVICES), guests);

    let certified = |name: &str, group, validity| certified(&cluster, name, group, validity);
    let kubelet = certified("system:node:node-2", Some("system:nodes"), Validity::Long);
    assert_eq!(names(&kubelet, NODES), set(&["/node-2"]));
    assert_eq!(names(&kubelet, SERVICES).len(), 8);
    let user = certified("somebody", None, Validity::Long).get(SERVICES);
    expect_refusal(&user, 403, "Forbidden", "no view of the relay matches");
    assert!(certified("system:node:node-2", Some("system:nodes"), Validity::Past).is_refused(SERVICES));
    assert_eq!(relay.metric("cproxy_relay_tls_handshakes_failed_total"), 1.0);

    expect_refusal(&stranger(&cluster).get(SERVICES), 401, "Unauthorized", "shows no credentials");
    expect_refusal(&stranger(&cluster).token("wrong").get(SERVICES), 401, "Unauthorized", "refuses the token");
    let basic = stranger(&cluster).header("Authorization: Basic dTpw").get(SERVICES);
    expect_refusal(&basic, 401, "Unauthorized", "no bearer token");
    let nobody = stranger(&cluster).token(&cluster.control_plane.token("nobody")).get(SERVICES);
    expect_refusal(&nobody, 403, "Forbidden", "no view of the relay matches");
    let unseen = token(&cluster, &[]);
    cluster.delete("/api/v1/namespaces/team/serviceaccounts/app");
    expect_refusal(
        &stranger(&cluster).token(&unseen).get(SERVICES),
        401,
        "Unauthorized",
        "its account or pod is deleted",
    );
    assert_eq!(stranger(&cluster).get("/readyz").code, 200, "health needs no credentials");

    let log = relay.log();
    assert!(!log.contains(&unseen) && !log.contains(&bound), "no token is in the log");
    relay.kill();
}

#[test]
fn wrong_settings_end_the_relay_with_one_line() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://192.0.2.1:6443");
    let kubeconfig = kubeconfig.to_str().unwrap();
    let views = manifest::write_text(sandbox.dir(), "views.yaml", "views: [{name: a, match: {}, namespaces: all}]");
    let missing = sandbox.dir().join("none.pem");
    let (views, missing) = (views.to_str().unwrap(), missing.to_str().unwrap());
    let tls = ["--tls-cert-file", missing, "--tls-private-key-file", missing];
    for (args, code, text) in [
        (&["--listen", "0.0.0.0:7443"][..], 2, "plain HTTP is for loopback"),
        (&[&["--listen", "0.0.0.0:7443", "--authentication", "none"], &tls[..]].concat(), 2, "--authentication none"),
        (&["--listen", "127.0.0.1:7443", "--tls-cert-file", missing], 2, "belong together"),
        (&["--listen", "127.0.0.1:7443", "--client-ca-file", missing], 2, "--client-ca-file needs"),
        (&[], 2, "no --listen"),
        (&["--listen", "127.0.0.1:7443", "--views", views], 1, "it has no pattern"),
        (&["--listen", "127.0.0.1:7443", "--views", missing], 1, missing),
        (&[&["--listen", "127.0.0.1:7443"], &tls[..]].concat(), 1, missing),
        (&["--listen", "192.0.2.200:7443", "--authentication", "none"], 2, "plain HTTP is for loopback"),
        (&["--listen", "127.0.0.1"], 2, "--listen"),
        (&["--listen", ","], 2, "an address is empty"),
        (&["--listen", "127.0.0.1:7443", "--authentication", "maybe"], 2, "possible values: token-review, none"),
        (&["--listen", "127.0.0.1:7443", "--history-bytes", "x"], 2, "expected a number of bytes"),
        (&["--listen", "127.0.0.1:7443", "--max-connections", "0"], 2, "expected a number from 1 to 1000000"),
        (&["--listen", "127.0.0.1:7443", "--log-level", "trace"], 2, "possible values: error, warn, info, debug"),
        (
            &["--listen", "127.0.0.1:7443", "--authentication", "none", "--token-audiences", "a"],
            2,
            "--token-audiences is for",
        ),
        (&["--listen", "127.0.0.1:7443", "--token-audiences", "a,"], 2, "an empty audience"),
        (&["--nothing"], 2, "(see cproxy-relay run --help)"),
    ] {
        let output = cproxy_relay(&sandbox, [&["run", "--kubeconfig", kubeconfig], args].concat());
        assert_eq!(output.code, code, "{args:?}: {output:?}");
        assert!(output.stderr.contains(text), "{args:?}: {output:?}");
        assert!(output.stderr.starts_with("cproxy-relay: "), "{args:?}: {output:?}");
        assert_eq!(output.stderr.trim().lines().count(), 1, "{args:?}: {output:?}");
    }
}

#[test]
fn check_names_missing_rights() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let url = cluster.control_plane.server_url();
    let [good, poor] = ["cproxy-relay", "cproxy"].map(|user| cluster.kubeconfig(user, user, &url));
    let check = |kubeconfig: &Path| {
        let listen = format!("--listen=unix://{}", sandbox.dir().join("relay.sock").display());
        let flags = ["check".as_ref(), listen.as_ref(), "--kubeconfig".as_ref(), kubeconfig.as_os_str()];
        cproxy_relay(&sandbox, flags)
    };
    let without = cproxy_relay(&sandbox, ["check".as_ref(), "--kubeconfig".as_ref(), good.as_os_str()]);
    assert!(without.code == 1 && without.stdout.contains("pass --listen"), "{}", without.stdout);
    let output = check(&good).success();
    assert!(!output.stdout.contains("missing") && output.stdout.contains("Kubernetes v1.36.1"), "{}", output.stdout);
    let output = check(&poor);
    assert_eq!(output.code, 1);
    let missing: Vec<_> = output.stdout.lines().filter_map(|line| line.strip_prefix("missing")).collect();
    let names: Vec<_> = missing.iter().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["list_nodes", "watch_nodes", "create_tokenreviews"]);
    assert!(missing[2].contains("grant the verb create"), "{missing:?}");
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.stderr);
    for (source, expected) in [
        (
            "--policies",
            &[
                "list_pods",
                "watch_pods",
                "list_namespaces",
                "watch_namespaces",
                "list_networkpolicies",
                "watch_networkpolicies",
            ][..],
        ),
        ("--policies=follow", &["followed_relay"]),
    ] {
        let listen = format!("--listen=unix://{}", sandbox.dir().join("relay.sock").display());
        let flags = ["check".as_ref(), source.as_ref(), listen.as_ref(), "--kubeconfig".as_ref(), good.as_os_str()];
        let output = cproxy_relay(&sandbox, flags);
        let missing = output.stdout.lines().filter_map(|line| line.strip_prefix("missing")?.split_whitespace().next());
        assert_eq!((output.code, missing.collect::<Vec<_>>()), (1, expected.to_vec()), "{}", output.stdout);
    }
}
