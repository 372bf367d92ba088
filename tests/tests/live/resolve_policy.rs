//! `cproxy resolve --policy` with files as people have them: what network policies allow, and which rule says so.

use std::time::{Duration, Instant};

use cproxy_tests::{
    manifest::{self, http_service},
    process::{Agent, Output, cproxy, cproxy_with_input},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

/// Time for ten thousand policies, on a machine that others share.
const MANY_MAX: Duration = Duration::from_secs(60);

fn pod(namespace: &str, name: &str, addresses: &[&str]) -> Value {
    let ips: Vec<_> = addresses.iter().map(|address| json!({"ip": address})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "env": [{"name": "A", "value": "b"}],
                                 "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIPs": ips, "hostIPs": [{"ip": "192.168.0.1"}]},
    })
}

fn policy(namespace: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    })
}

/// Two pods with addresses of both families, of which only one may call the other at its named port.
fn shop() -> [Value; 4] {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}});
    let from_shop = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}});
    let rules =
        json!([{"from": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}, {"from": [from_shop], "ports": [{"port": "http"}]}]);
    [
        namespace,
        pod("shop", "web", &["10.1.0.1", "fd00::1"]),
        pod("db", "pg", &["10.1.0.2", "fd00::2"]),
        policy("db", "pg", json!({"podSelector": {"matchLabels": {"app": "pg"}}, "ingress": rules})),
    ]
}

/// The answer to a question about the sandbox's manifests.
fn ask(sandbox: &Sandbox, from: &str, to: &str, more: &[&str]) -> Output {
    let manifests = sandbox.manifest_dir().display().to_string();
    let command = ["resolve", "--policy", "--manifests", &manifests, "--from", from, "--to", to];
    cproxy(sandbox, &[&command, more].concat())
}

#[test]
fn the_answer_names_the_rule_in_text_and_json() {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "shop.json", shop());
    let allowed = ask(&sandbox, "shop/web", "db/pg:http", &[]);
    assert_eq!((allowed.code, &*allowed.stderr), (0, ""));
    assert_eq!(
        allowed.stdout,
        "allowed: shop/web to db/pg:8080/TCP\n\n\
         SIDE      POD        VERDICT   WHY\n\
         egress    shop/web   allowed   no NetworkPolicy isolates the pod for egress\n\
         ingress   db/pg      allowed   NetworkPolicy db/pg, ingress rule 1\n"
    );
    for (from, to, code) in [
        ("shop/web", "db/pg:8081", 1),
        ("shop/web", "db/pg:8080/UDP", 1),
        ("10.9.0.1", "db/pg:1", 0),
        ("10.8.0.1", "db/pg:8080", 1),
        ("192.168.0.1", "db/pg:1", 0),
        ("db/pg", "9.9.9.9:53/udp", 0),
        ("fd00::1", "[fd00::2]:8080", 0),
    ] {
        assert_eq!(ask(&sandbox, from, to, &[]).code, code, "{from} {to}");
    }
    let denied = ask(&sandbox, "10.8.0.1", "db/pg:http", &["-o", "json"]);
    assert_eq!(denied.code, 1);
    let answer: Value = serde_json::from_str(&denied.stdout).unwrap();
    let ingress = json!({"verdict": "denied", "code": "no-rule", "policy": null, "rule": null, "isolated_by": ["db/pg"],
                         "reason": "no rule of NetworkPolicy db/pg allows it"});
    let pair = json!({"from_address": "10.8.0.1", "to_address": "10.1.0.2", "verdict": "denied", "egress": null,
                      "ingress": ingress});
    assert_eq!(
        answer,
        json!({"verdict": "denied", "from": "10.8.0.1", "to": "db/pg", "protocol": "TCP", "port": 8080,
               "pairs": [pair], "notes": []})
    );
}

#[test]
fn an_answer_that_an_unused_policy_might_change_is_none() {
    let sandbox = Sandbox::for_test();
    let mut unread = policy("db", "typed", json!({"podSelector": {}}));
    unread["metadata"]["labels"] = json!({"release": 5});
    manifest::write(&sandbox.manifest_dir(), "shop.json", shop().into_iter().chain([unread]));
    let output = ask(&sandbox, "shop/web", "db/pg:http", &[]);
    assert_eq!(output.code, 4, "{output:?}");
    assert!(output.stdout.starts_with("allowed: "), "{output:?}");
    for line in [
        "NetworkPolicy db/typed: metadata.labels.release: expected a text: this object is not used (",
        "not used, as said above: NetworkPolicy db/typed; the answer is that of the other objects",
    ] {
        assert!(output.stderr.contains(line), "{output:?}");
    }
}

#[test]
fn mistakes_that_leave_open_whom_a_policy_isolates_leave_the_question_open() {
    let sandbox = Sandbox::for_test();
    let requirement = json!({"key": "app", "operator": "in", "values": ["pg"]});
    let only = |to: Value| json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [to]});
    for (spec, why) in [
        (
            json!({"podSelector": {"matchExpressions": [requirement]}}),
            "\"in\" is not In, NotIn, Exists or DoesNotExist",
        ),
        (
            json!({"podSelector": {}, "policyTypes": ["Ingres"]}),
            "spec.policyTypes[0]: \"Ingres\" is not Ingress or Egress",
        ),
        (only(json!({"to": []})), "spec.ingress[0].to: unknown field"),
        (json!({"podSelector": {"matchLabel": {"app": "pg"}}}), "spec.podSelector.matchLabel: unknown field"),
        (json!({"podSelector": {}, "ingres": []}), "spec.ingres: unknown field"),
    ] {
        manifest::write(&sandbox.manifest_dir(), "shop.json", shop().into_iter().chain([policy("db", "wrong", spec)]));
        let output = ask(&sandbox, "shop/web", "db/pg:http", &["-o", "json"]);
        assert!(output.code == 4 && output.stderr.contains(why), "{why}: {output:?}");
        let answer: Value = serde_json::from_str(&output.stdout).unwrap();
        assert_eq!(answer["notes"], json!(["NetworkPolicy db/wrong is not used, and might change the answer"]));
    }
}

#[test]
fn a_question_without_an_answer_is_told_from_a_refusal() {
    let sandbox = Sandbox::for_test();
    let no_address = [pod("db", "new", &[])];
    let objects = shop().into_iter().chain(no_address).chain(http_service("web", "10.96.0.10", ["10.1.0.2"]));
    manifest::write(&sandbox.manifest_dir(), "shop.json", objects);
    for (from, to, needle) in [
        ("shop/nobody", "db/pg:80", "--from shop/nobody: the manifests have no such Pod"),
        ("shop/web", "db/new:80", "--to db/new:80/TCP: the Pod has no address"),
        ("shop/web", "db/pg:pg", "--to db/pg:pg/TCP: the Pod has no port pg/TCP: it has http/TCP"),
        (
            "shop/web",
            "default/web:80",
            "--to default/web: this is Service default/web, and policies are about the pods",
        ),
        ("shop/web", "10.96.0.10:80", "--to 10.96.0.10: this is Service default/web"),
        ("9.9.9.9", "8.8.8.8:80", "neither is a pod of the manifests"),
    ] {
        let output = ask(&sandbox, from, to, &[]);
        assert_eq!((output.code, &*output.stdout), (4, ""), "{output:?}");
        assert!(output.stderr.starts_with("cproxy: ") && output.stderr.contains(needle), "{output:?}");
        assert_eq!(output.stderr.lines().count(), 1, "{output:?}");
    }
    let nowhere =
        cproxy(&sandbox, &["resolve", "--policy", "--manifests", "/nowhere", "--from", "shop/web", "--to", "db/pg:80"]);
    assert_eq!((nowhere.code, nowhere.stderr.contains("/nowhere")), (4, true), "{nowhere:?}");
    for (arguments, needle) in [
        (&["--policy", "--to", "db/pg:80"][..], "--from"),
        (&["--policy", "--from", "shop/web"], "--to"),
        (&["--from", "shop/web"], "--policy"),
        (&["--policy", "--from", "web", "--to", "db/pg:80"], "write NAMESPACE/web"),
        (&["--policy", "--from", "shop/web", "--to", "db/pg"], "write db/pg:PORT"),
        (&["--policy", "--from", "shop/web", "--to", "db/pg:0"], "1 to 65535"),
        (&["--policy", "--from", "shop/web", "--to", "fd00::1:80"], "[fd00::1]:80"),
        (&["--policy", "--from", "shop/web", "--to", "db/pg:80/icmp"], "TCP, UDP or SCTP"),
        (&["--policy", "--from", "shop/web", "--to", "db/pg:80", "--explain", "a/b"], "cannot be used with"),
    ] {
        let output = cproxy(&sandbox, &[&["resolve", "--manifests", "."], arguments].concat());
        assert_eq!((output.code, output.stderr.contains(needle)), (2, true), "{output:?}");
    }
}

#[test]
fn bad_objects_are_named_and_harm_only_themselves() {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "shop.json", shop());
    let odd = json!({"podSelector": {}, "ingress": [
        {"from": [{"ipBlock": {"cidr": "10.1.0.7/16", "except": ["10.2.0.0/24"]}}]},
        {"from": [{"ipBlock": {"cidr": "10.1.0.7/16"}}], "ports": [{"port": 65_536}, {"port": 443}]},
    ]});
    let bad = [
        policy("db", "odd", odd),
        policy("other", "typed", json!({"podSelector": {}, "ingress": "all"})),
        policy("db", "pg", json!({"podSelector": {}})),
    ];
    manifest::write(&sandbox.manifest_dir(), "bad.json", bad);
    let output = ask(&sandbox, "10.1.3.4", "db/pg:443", &[]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.stdout.contains("NetworkPolicy db/odd, ingress rule 1"), "{output:?}");
    for needles in [
        ["NetworkPolicy db/odd", "spec.ingress[0].from[0].ipBlock.except[0]", "no part of", "bad.json"],
        ["NetworkPolicy db/odd", "spec.ingress[1].ports[0].port", "65536", "bad.json"],
        ["NetworkPolicy db/odd", "spec.ingress[1].from[0].ipBlock.cidr", "is read as 10.1.0.0/16", "bad.json"],
        ["NetworkPolicy other/typed", "spec.ingress", "not used", "bad.json"],
        ["NetworkPolicy db/pg", "defined several times", "shop.json", "bad.json"],
    ] {
        let found = output.stderr.lines().any(|line| needles.iter().all(|needle| line.contains(needle)));
        assert!(found, "{needles:?} in no line of {}", output.stderr);
    }
    // The last definition of the policy counts: that of shop.json.
    assert_eq!(ask(&sandbox, "shop/web", "db/pg:http", &[]).code, 0);

    let broken = manifest::write_text(&sandbox.manifest_dir(), "broken.yaml", "kind: NetworkPolicy\nspec: [");
    let output = ask(&sandbox, "shop/web", "db/pg:http", &[]);
    assert_eq!(output.code, 4, "the file may have a policy that denies it");
    assert!(output.stdout.starts_with("allowed: ") && output.stderr.contains("broken.yaml"), "{output:?}");
    assert!(output.stderr.ends_with("some manifests could not be read; the answer is that of the others\n"));
    std::fs::remove_file(broken).unwrap();
}

#[test]
fn the_agent_passes_over_objects_of_policies() {
    let sandbox = Sandbox::for_test();
    let objects = shop().into_iter().chain(http_service("web", "10.96.0.10", ["10.1.0.2"]));
    manifest::write(&sandbox.manifest_dir(), "all.json", objects);
    let typed = policy("db", "typed", json!({"podSelector": 5}));
    manifest::write(&sandbox.manifest_dir(), "bad.json", [typed]);
    let _agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    assert_eq!(cproxy(&sandbox, &["get", "problems", "-o", "json"]).json(), json!([]));
    assert_eq!(cproxy(&sandbox, &["get", "services", "-o", "json"]).json().as_array().map(Vec::len), Some(1));
}

/// As `kubectl get -A -o json` prints them: one List, policies last.
#[test]
fn ten_thousand_policies_of_a_namespace_are_judged() {
    let sandbox = Sandbox::for_test();
    let pods = (0..200).map(|index| pod("shop", &format!("web-{index}"), &[&format!("10.1.1.{index}")]));
    let policies = (0..10_000).map(|index| {
        let range = format!("10.{}.{}.0/24", 128 + index / 250, index % 250);
        let pods = json!({"matchLabels": {"app": format!("web-{}", index % 200)}});
        let peers = json!([{"ipBlock": {"cidr": range}}, {"podSelector": pods}]);
        let rules = json!([{"from": peers, "ports": [{"port": 1 + index}]}]);
        policy("shop", &format!("p{index:05}"), json!({"podSelector": {}, "ingress": rules}))
    });
    let list =
        json!({"apiVersion": "v1", "kind": "List", "items": pods.chain(policies).collect::<Vec<_>>()}).to_string();
    let ask = |from: &str, to: &str| {
        let command = ["resolve", "--policy", "--manifests", "-", "--from", from, "--to", to];
        let start = Instant::now();
        let output = cproxy_with_input(&sandbox, &command, &list);
        assert!(start.elapsed() < MANY_MAX, "{:?}", start.elapsed());
        output
    };
    let allowed = ask("shop/web-7", "shop/web-0:8");
    assert_eq!(allowed.code, 0, "{allowed:?}");
    assert!(allowed.stdout.contains("NetworkPolicy shop/p00007, ingress rule 0"), "{}", allowed.stdout);
    let denied = ask("10.128.7.1", "shop/web-0:9");
    assert_eq!(denied.code, 1);
    assert!(denied.stdout.contains("shop/p00004 and 9995 more allows it"), "{}", denied.stdout);
}
