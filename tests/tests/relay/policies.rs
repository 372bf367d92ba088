//! Policies of pods through the relay: who gets whose, and what a change brings.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::role_binding,
    manifest,
    process::eventually,
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    access::{create_account, expect_refusal, names, stranger, token},
    client::{Client, Watching},
    fixture::{Cluster, PATIENCE, RELAY},
};

pub(crate) const POLICIES: &str = "/apis/policy.cproxy.dev/v1alpha1/podpolicies";
pub(crate) const ADDRESSES: &str = "/apis/policy.cproxy.dev/v1alpha1/addressslices";

/// Address of the metrics of a second relay.
const METRICS: &str = "127.0.0.1:9444";

/// Value in fields of a Pod that the relay has no use for.
const PLANTED: &str = "c2VjcmV0IG9mIGEgcG9k-planted";

/// Lets the relay read what policies are resolved from.
fn grant(cluster: &Cluster<'_>) {
    cluster.create(&json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "cproxy-relay-policies"},
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "watch"]},
        ],
    }));
    cluster.create(&role_binding("cproxy-relay-policies", "cproxy-relay"));
}

pub(crate) fn pod(namespace: &str, name: &str, app: &str, unused: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": namespace, "name": name, "labels": {"app": app}, "annotations": {"note": unused},
        },
        "spec": {
            "nodeName": "node-1", "serviceAccountName": "app",
            "containers": [{
                "name": "c", "image": "i", "env": [{"name": "UNUSED", "value": unused}],
                "ports": [{"name": "http", "containerPort": 8080}],
            }],
            "volumes": [{"name": "v", "hostPath": {"path": format!("/{unused}")}}],
        },
    })
}

/// Creates a pod that runs with an address.
pub(crate) fn run_pod(cluster: &Cluster<'_>, namespace: &str, name: &str, app: &str, address: &str) {
    cluster.create(&pod(namespace, name, app, if name == "web-0" { PLANTED } else { "note" }));
    let status = json!({
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
        "hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}],
    });
    cluster.patch(&format!("/api/v1/namespaces/{namespace}/pods/{name}/status"), &json!({"status": status}));
}

fn policy(namespace: &str, name: &str, app: &str, from: Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "ingress": [{"ports": [{"port": "http"}], "from": from}],
        },
    })
}

pub(crate) fn apps(app: &str) -> Value {
    json!([{"podSelector": {"matchLabels": {"app": app}}}])
}

/// A cluster with pods of two namespaces, and a policy for one of them.
pub(crate) fn cluster(sandbox: &Sandbox) -> Cluster<'_> {
    fill(Cluster::shared(sandbox))
}

fn fill(cluster: Cluster<'_>) -> Cluster<'_> {
    create_account(&cluster);
    grant(&cluster);
    run_pod(&cluster, "team", "web-0", "web", "10.244.1.1");
    run_pod(&cluster, "team", "client-0", "client", "10.244.1.2");
    run_pod(&cluster, "team-a", "other-0", "client", "10.244.1.3");
    cluster.create(&policy("team", "allow-clients", "web", apps("client")));
    cluster
}

pub(crate) fn of_pod(cluster: &Cluster<'_>, pod: &str) -> String {
    token(cluster, &["--bound-object-kind=Pod", &format!("--bound-object-name={pod}")])
}

/// All addresses of a list of slices.
fn addresses(client: &Client<'_>) -> BTreeSet<String> {
    let list = client.json(ADDRESSES);
    let slices = list["items"].as_array().unwrap().iter();
    let of_slice = |slice: &Value| slice["addresses"].as_array().unwrap().clone();
    slices.flat_map(of_slice).map(|address| address.as_str().unwrap().to_owned()).collect()
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

fn wait_for_addresses(client: &Client<'_>, expected: &[&str]) {
    eventually(PATIENCE, format!("the sets have {expected:?}"), || {
        let addresses = addresses(client);
        if addresses == set(expected) { Ok(()) } else { Err(format!("{addresses:?}")) }
    });
}

fn version(client: &Client<'_>, path: &str) -> String {
    client.json(path)["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

fn watch(client: &Client<'_>, path: &str) -> Watching {
    let version = version(client, path);
    client.watch(&format!("{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"))
}

fn expect_event(watching: &Watching, what: &str, has: impl Fn(&Value) -> bool) {
    eventually(PATIENCE, what, || {
        let events = watching.events();
        if events.iter().any(&has) { Ok(()) } else { Err(format!("{events:#?}")) }
    });
}

/// Texts that follow another one in the memory of a process.
fn found_after(relay: &RunningRelay, text: &str, bytes_after: usize) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", relay.pid())).unwrap();
    let memory = fs::File::open(format!("/proc/{}/mem", relay.pid())).unwrap();
    let (mut found, mut bytes) = (BTreeSet::new(), Vec::new());
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
        bytes.resize((end - start) as usize, 0);
        // Parts of a stack cannot be read.
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        for window in bytes.windows(text.len() + bytes_after).filter(|window| window.starts_with(text.as_bytes())) {
            found.insert(String::from_utf8_lossy(&window[text.len()..]).into_owned());
        }
    }
    found
}

#[test]
fn a_pod_gets_its_own_policy_and_the_sets_that_it_names() {
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let _relay = cluster.tls_relay().arg("--policies").start();
    let web = stranger(&cluster).token(&of_pod(&cluster, "web-0"));
    let client = stranger(&cluster).token(&of_pod(&cluster, "client-0"));

    wait_for_addresses(&web, &["10.244.1.2"]);
    let list = web.json(POLICIES);
    let [own] = &list["items"].as_array().unwrap()[..] else { panic!("{list:#}") };
    assert_eq!(own["metadata"]["name"], "web-0");
    let spec = &own["spec"];
    assert_eq!((&spec["isolated"], &spec["podAddresses"]), (&json!(["Ingress"]), &json!(["10.244.1.1"])));
    assert_eq!(spec["policies"], json!([{"name": "NetworkPolicy team/allow-clients", "isolates": ["Ingress"]}]));
    assert_eq!((&spec["nodeAddresses"], &spec["nodeName"]), (&json!(["192.0.2.1"]), &json!("node-1")));
    let rule = &spec["rules"][0];
    assert_eq!(rule["ports"], json!([{"protocol": "TCP", "first": 8080, "last": 8080}]));
    assert_eq!((&rule["action"], &rule["from"]), (&json!("Accept"), &json!("NetworkPolicy team/allow-clients rule 0")));
    assert_eq!(spec["sets"][0]["name"], rule["sets"][0]);
    // The answer for a pod that no policy selects.
    let free = client.json(POLICIES);
    assert_eq!(free["items"][0]["spec"]["isolated"], json!([]));
    assert!(addresses(&client).is_empty());

    // Nothing of others, whatever the client asks for.
    let group = "/apis/policy.cproxy.dev/v1alpha1";
    let slice = web.json(ADDRESSES)["items"][0]["metadata"]["name"].as_str().unwrap().to_owned();
    for path in [
        format!("{group}/namespaces/team/podpolicies/web-0"),
        format!("{group}/namespaces/team-a/podpolicies/other-0"),
        format!("{group}/addressslices/{slice}"),
        format!("{group}/namespaces/team/podpolicies/web-0/status"),
        format!("{group}/namespaces/team/podpolicies/..%2f..%2fteam%2fpodpolicies%2fweb-0"),
    ] {
        assert_eq!(client.get(&path).code, 404, "{path}");
    }
    for query in [
        "podpolicies?fieldSelector=metadata.name%3Dweb-0",
        "namespaces/team-a/podpolicies",
        "addressslices",
        "addressslices?labelSelector=policy.cproxy.dev%2Fset",
    ] {
        assert!(names(&client, &format!("{group}/{query}")).is_empty(), "{query}");
    }
    assert_eq!(names(&client, POLICIES), set(&["team/client-0"]));
    assert_eq!(client.get(&format!("{group}/pods")).code, 404);
    let unbound = stranger(&cluster).token(&token(&cluster, &[])).get(POLICIES);
    expect_refusal(&unbound, 403, "Forbidden", "use a token that is bound to the pod");

    // A pod that gets the label enters the set, and the policy stays as it is.
    let (policies, slices) = (watch(&web, POLICIES), watch(&web, ADDRESSES));
    let others = watch(&client, ADDRESSES);
    run_pod(&cluster, "team", "late-0", "client", "10.244.1.4");
    expect_event(&slices, "the new pod is in the slice", |event| {
        event["object"]["addresses"] == json!(["10.244.1.2", "10.244.1.4"])
    });
    assert!(policies.changes().is_empty() && others.changes().is_empty(), "{:?}", others.changes());
    // A policy that names another set: the watch of slices ends, and the client lists anew.
    cluster.create(&policy("team", "allow-other", "web", json!([{"namespaceSelector": {}}])));
    expect_event(&policies, "the policy has two rules", |event| {
        event["object"]["spec"]["rules"].as_array().is_some_and(|rules| rules.len() == 2)
    });
    expect_event(&slices, "the watch of slices ends", |event| event["object"]["code"] == 410);
    let before = web.get(ADDRESSES).header("cproxy-view").to_owned();
    assert!(!before.is_empty());
    wait_for_addresses(&web, &["10.244.1.1", "10.244.1.2", "10.244.1.3", "10.244.1.4"]);
    // The pod goes, and another one gets its name: the token of the first one gets nothing of it.
    let at_once = json!({"gracePeriodSeconds": 0});
    cluster.admin().write("DELETE", "/api/v1/namespaces/team/pods/web-0", &at_once);
    expect_event(&policies, "the policy is gone", |event| event["type"] == "DELETED");
    run_pod(&cluster, "team", "web-0", "web", "10.244.1.9");
    let again = stranger(&cluster).token(&of_pod(&cluster, "web-0"));
    eventually(PATIENCE, "the new pod has its policy", || {
        let names = names(&again, POLICIES);
        if names.len() == 1 { Ok(()) } else { Err(format!("{names:?}")) }
    });
    let later = policies.changes();
    assert!(!later.contains(&"ADDED web-0".to_owned()), "{later:?}");
}

#[test]
fn fields_of_a_pod_that_no_policy_needs_are_not_kept() {
    const PODS: usize = 100;
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let relay =
        cluster.open_relay().arg("--policies").arg("--views").arg(view_of(&cluster, "{pod: team/web-0}")).start();
    let web = cluster.relay_client();
    for number in 0..PODS {
        let unused = format!("{PLANTED}-{number:03}");
        cluster.create(&pod("team", &format!("filler-{number:03}"), "filler", &unused));
    }
    run_pod(&cluster, "team", "late-0", "client", "10.244.1.4");
    wait_for_addresses(&web, &["10.244.1.2", "10.244.1.4"]);
    assert!(found_after(&relay, "filler-", 3).len() >= PODS, "names are there");
    // What was read last is still in buffers and free memory.
    let kept = found_after(&relay, &format!("{PLANTED}-"), 3);
    assert!(kept.len() < PODS / 2, "{kept:?}");
}

/// File of views that give every client one policy.
fn view_of(cluster: &Cluster<'_>, policy: &str) -> String {
    let text = format!("views: [{{name: all, match: {{usernames: ['*']}}, namespaces: all, policy: {policy}}}]");
    let name = format!("views-{}.yaml", policy.len());
    manifest::write_text(cluster.sandbox.dir(), &name, &text).display().to_string()
}

#[test]
fn a_relay_on_a_host_gets_the_policies_of_its_nodes_pods() {
    const HOST: &str = "127.0.0.1:7444";
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let mut root = cluster.tls_relay().arg("--policies").arg("--views").arg(view_of(&cluster, "node")).start();
    let bound = token(&cluster, &["--bound-object-kind=Node", "--bound-object-name=node-1"]);
    let server =
        json!({"server": format!("https://{RELAY}"), "certificate-authority": cluster.control_plane.ca_file()});
    let kubeconfig = manifest::kubeconfig(server, json!({"token": bound}));
    let kubeconfig = manifest::write_text(sandbox.dir(), "root.config", &kubeconfig.to_string());
    let host = RelayServer::new(&sandbox)
        .metrics(METRICS.parse().unwrap())
        .kubeconfig(kubeconfig)
        .env("CPROXY_RELAY_DRAIN_SECONDS", "0");
    let host = host.listen(HOST).without_authentication().arg("--policies=follow").arg("--views");
    let mut host = host.arg(view_of(&cluster, "{pod: team/web-0}")).start();
    let web = Client::new(&sandbox, format!("http://{HOST}"));
    wait_for_addresses(&web, &["10.244.1.2"]);
    assert_eq!(names(&web, POLICIES), set(&["team/web-0"]));
    assert_eq!(names(&web, "/api/v1/services").len(), 6, "Services come through both");
    let slices = watch(&web, ADDRESSES);
    run_pod(&cluster, "team", "late-0", "client", "10.244.1.4");
    expect_event(&slices, "the change comes through both", |event| {
        event["object"]["addresses"] == json!(["10.244.1.2", "10.244.1.4"])
    });
    // The root relay is another process: the host's relay lists anew, and its clients notice nothing.
    root.kill();
    run_pod(&cluster, "team", "later-0", "client", "10.244.1.5");
    let _root = cluster.tls_relay().arg("--policies").arg("--views").arg(view_of(&cluster, "node")).start();
    expect_event(&slices, "the change of the time between comes", |event| {
        event["object"]["addresses"] == json!(["10.244.1.2", "10.244.1.4", "10.244.1.5"])
    });
    cluster.create(&policy("team", "allow-other", "web", json!([{"namespaceSelector": {}}])));
    wait_for_addresses(&web, &["10.244.1.1", "10.244.1.2", "10.244.1.3", "10.244.1.4", "10.244.1.5"]);
    host.kill();
}

/// Kinds of which nothing has changed: another replica knows them up to the same point, too.
#[test]
fn a_client_turns_to_another_replica_of_a_quiet_cluster() {
    const SECOND: &str = "127.0.0.1:7446";
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let views = view_of(&cluster, "{pod: team/web-0}");
    let _first = cluster.open_relay().arg("--policies").arg("--views").arg(&views).start();
    let second = cluster.relay().metrics(METRICS.parse().unwrap()).listen(SECOND).without_authentication();
    let _second = second.arg("--policies").arg("--views").arg(&views).start();
    let replicas = [cluster.relay_client(), Client::new(&sandbox, format!("http://{SECOND}"))];
    replicas.iter().for_each(|replica| wait_for_addresses(replica, &["10.244.1.2"]));
    let mut expected = vec!["10.244.1.2".to_owned()];
    for round in 0..4 {
        let address = format!("10.244.1.{}", 20 + round);
        run_pod(&cluster, "team", &format!("new-{round}"), "client", &address);
        expected.push(address);
        let [one, other] = [&replicas[round % 2], &replicas[1 - round % 2]];
        wait_for_addresses(one, &expected.iter().map(String::as_str).collect::<Vec<_>>());
        let version = version(one, ADDRESSES);
        let list = other.get(&format!("{ADDRESSES}?resourceVersion={version}&resourceVersionMatch=NotOlderThan"));
        assert_eq!(list.code, 200, "{}", list.text());
        assert_eq!(addresses(other), expected.iter().cloned().collect(), "not older than what was seen");
    }
}

/// Lists and watches of an upstream kind that the relay has begun. The API server itself lists Services, too.
fn upstream_requests(audit: &AuditLog, plural: &str) -> (u64, u64) {
    let mut requests = audit.requests();
    requests.retain(|request| {
        let path = request.uri.split('?').next().unwrap();
        request.user == "cproxy-relay" && path.ends_with(&format!("/{plural}"))
    });
    let watches = requests.iter().filter(|request| request.uri.contains("watch=true")).count();
    ((requests.len() - watches) as u64, watches as u64)
}

#[test]
fn versions_that_do_not_exist_cost_the_api_server_little() {
    const KINDS: [&str; 3] = ["pods", "networkpolicies", "services"];
    const SECONDS: u64 = 30;
    let sandbox = Sandbox::for_test();
    let audit = AuditLog::create(&sandbox, "api");
    let [policy, log] = audit.flags();
    let cluster = fill(Cluster::start(&sandbox, &[&policy, &log]));
    let _relay =
        cluster.open_relay().arg("--policies").arg("--views").arg(view_of(&cluster, "{pod: team/web-0}")).start();
    let web = cluster.relay_client();
    wait_for_addresses(&web, &["10.244.1.2"]);
    let requests = || KINDS.map(|kind| upstream_requests(&audit, kind));
    let before = requests();
    assert!(before.iter().all(|&(_, watches)| watches > 0), "{before:?}");
    let ends = Instant::now() + Duration::from_secs(SECONDS);
    std::thread::scope(|scope| {
        for path in [POLICIES, POLICIES, POLICIES, ADDRESSES, "/api/v1/services"] {
            let web = &web;
            scope.spawn(move || {
                while Instant::now() < ends {
                    let far = web.get(&format!("{path}?watch=true&resourceVersion={}", u64::MAX));
                    assert_eq!(far.code, 504, "{path}: {}", far.text());
                    assert!(far.text().contains(&format!("version: {}", u64::MAX)), "{path}: {}", far.text());
                }
            });
        }
    });
    // Of policies' kinds, each of these watches follows a list of one object. When it ends, an ordinary one begins.
    let most = SECONDS / 3 + 3;
    for ((kind, before), after) in KINDS.iter().zip(before).zip(requests()) {
        let (lists, watches) = if *kind == "services" { (0, 2 * most) } else { (most, 2 * most) };
        for (verb, most, count) in [("lists", lists, after.0 - before.0), ("watches", watches, after.1 - before.1)] {
            assert!(count <= most, "{kind}: {count} {verb} in {SECONDS} s");
        }
    }
}

#[test]
fn policies_that_are_off_are_not_there() {
    let sandbox = Sandbox::for_test();
    let world = crate::fixture::World::start(&sandbox);
    assert_eq!(world.client().get(POLICIES).code, 404);
    assert_eq!(world.client().get("/apis/policy.cproxy.dev").code, 404);
    // Without the rights, the relay does not get ready and says why.
    let relay = world
        .cluster
        .relay()
        .metrics(METRICS.parse().unwrap())
        .listen("127.0.0.1:7445")
        .without_authentication()
        .arg("--policies")
        .spawn();
    eventually(PATIENCE, "the relay names the right that it lacks", || {
        let log = relay.log();
        if log.contains("pods") && log.contains("forbidden") { Ok(()) } else { Err(log) }
    });
}
