//! Objects in, table out: each rule of kube-proxy 1.36 that is implemented, as a case with its source.

use super::{Backend, Own, Problem, Row, Store, resolve};
use crate::manifests::parse;

/// The table of some manifests, a line for each frontend.
fn table(manifests: &str) -> Vec<String> {
    let line = |row: &Row| format!("{} {} {}", row.frontend, row.service, list(&row.backends)).trim_end().to_owned();
    resolve(&store(None, manifests).0).iter().map(line).collect()
}

fn store(node: Option<&str>, manifests: &str) -> (Store, Vec<Problem>) {
    let mut store = Store::new(Own { node_name: node.map(str::to_owned), ..Own::default() });
    let events = parse("case", manifests).unwrap().events();
    let problems = events.into_iter().flat_map(|event| store.apply(event)).collect();
    (store, problems)
}

fn list(backends: &[Backend]) -> String {
    backends.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn service(name: &str, fields: &str) -> String {
    format!("---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{{fields}}}\n")
}

fn slice(name: &str, fields: &str) -> String {
    format!(
        "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}, labels: {{kubernetes.io/service-name: web}}}}\n{fields}\n"
    )
}

const WEB: &str = "clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]";
const ONE: &str = "addressType: IPv4\nports: [{name: http, port: 8080}]\nendpoints: [{addresses: [10.1.0.1]}]";

fn check(name: &str, manifests: &[String], expected: &[&str]) {
    assert_eq!(table(&manifests.concat()), expected, "{name}");
    let mut reversed = manifests.to_vec();
    reversed.reverse();
    assert_eq!(table(&reversed.concat()), expected, "{name}, in the other order");
}

/// pkg/proxy/util/utils.go `ShouldSkipService`, `GetClusterIPByFamily`; cmd/kube-proxy's selectors.
#[test]
fn services_and_their_addresses() {
    let labelled = service("web", WEB)
        .replace("{name: web}", "{name: web, labels: {service.kubernetes.io/service-proxy-name: ''}}");
    let dual = |fields: &str| service("web", &format!("ports: [{{name: http, port: 80}}], {fields}"));
    for (name, service, expected) in [
        ("a ClusterIP without endpoints refuses", service("web", WEB), vec!["10.0.0.1:80/TCP default/web"]),
        ("no clusterIP", dual("clusterIP: ''"), vec![]),
        ("headless", dual("clusterIP: None"), vec![]),
        ("ExternalName, even with a clusterIP", dual("clusterIP: 10.0.0.1, type: ExternalName"), vec![]),
        ("another proxy's, whatever the label's value", labelled, vec![]),
        (
            "both families, in the order of ipFamilies",
            dual("clusterIP: 'fd00::1', clusterIPs: ['fd00::1', 10.0.0.1], ipFamilies: [IPv6, IPv4]"),
            vec!["10.0.0.1:80/TCP default/web", "[fd00::1]:80/TCP default/web"],
        ),
        (
            "without ipFamilies only clusterIP counts",
            dual("clusterIP: 10.0.0.1, clusterIPs: [10.0.0.1, 'fd00::1']"),
            vec!["10.0.0.1:80/TCP default/web"],
        ),
        (
            "an address of the wrong family is dropped, the other lives",
            dual("clusterIP: 10.0.0.1, clusterIPs: [10.0.0.1, 10.0.0.2], ipFamilies: [IPv4, IPv6]"),
            vec!["10.0.0.1:80/TCP default/web"],
        ),
        ("leading zeros are decimal", dual("clusterIP: 010.000.0.01"), vec!["10.0.0.1:80/TCP default/web"]),
        (
            "NodePort and LoadBalancer have a ClusterIP too",
            dual("clusterIP: 10.0.0.1, type: LoadBalancer"),
            vec!["10.0.0.1:80/TCP default/web"],
        ),
        (
            "SCTP and impossible ports are skipped, the rest lives",
            service(
                "web",
                "clusterIP: 10.0.0.1, ports: [{name: a, port: 1, protocol: SCTP}, {name: b, port: 0}, {name: c, port: 65536}, {name: d, port: 4}]",
            ),
            vec!["10.0.0.1:4/TCP default/web"],
        ),
        (
            "TCP and UDP of one number are two frontends",
            service("web", "clusterIP: 10.0.0.1, ports: [{name: a, port: 53}, {name: b, port: 53, protocol: UDP}]"),
            vec!["10.0.0.1:53/TCP default/web", "10.0.0.1:53/UDP default/web"],
        ),
    ] {
        check(name, &[service], &expected);
    }
}

/// Two Services claim one address: the older wins, then the first by name.
#[test]
fn claims() {
    let at = |name: &str, created: &str| {
        service(name, WEB)
            .replace(&format!("{{name: {name}}}"), &format!("{{name: {name}, creationTimestamp: {created}}}"))
    };
    let (old, young) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    check("the older", &[at("a", young), at("b", old)], &["10.0.0.1:80/TCP default/b"]);
    check("the first by name", &[at("b", old), at("a", old)], &["10.0.0.1:80/TCP default/a"]);
    check("age unknown is youngest", &[service("a", WEB), at("b", young)], &["10.0.0.1:80/TCP default/b"]);
}

/// pkg/proxy/endpointslicecache.go.
#[test]
fn slices_and_their_ports() {
    let web = |slices: &[String]| [&[service("web", WEB)], slices].concat();
    let ports = |ports: &str| slice("a", &ONE.replace("[{name: http, port: 8080}]", ports));
    let labelled = slice("a", ONE).replace("labels: {", "labels: {service.kubernetes.io/headless: '', ");
    for (name, slices, expected) in [
        ("one endpoint", vec![slice("a", ONE)], "10.1.0.1:8080"),
        ("a slice of a headless Service, whatever the label's value", vec![labelled], ""),
        ("no Service's slice", vec![slice("a", ONE).replace("service-name: web", "service-name: ''")], ""),
        ("another namespace's", vec![slice("a", ONE).replace("{name: a,", "{name: a, namespace: other,")], ""),
        ("FQDN", vec![slice("a", &ONE.replace("IPv4", "FQDN"))], ""),
        ("the other family", vec![slice("a", &ONE.replace("IPv4", "IPv6").replace("10.1.0.1", "'fd00::1'"))], ""),
        ("ports match by name", vec![ports("[{name: other, port: 80}]")], ""),
        ("and by protocol", vec![ports("[{name: http, port: 8080, protocol: UDP}]")], ""),
        ("a port without a number", vec![ports("[{name: http}]")], ""),
        ("port 0", vec![ports("[{name: http, port: 0}]")], ""),
        (
            "one name, two numbers in two slices",
            vec![slice("a", ONE), slice("b", &ONE.replace("8080", "9090").replace("0.1]", "0.2]"))],
            "10.1.0.1:8080 10.1.0.2:9090",
        ),
        ("the same endpoint twice", vec![slice("a", ONE), slice("b", ONE)], "10.1.0.1:8080"),
        (
            "the same address with another port is another endpoint",
            vec![slice("a", ONE), slice("b", &ONE.replace("8080", "8081"))],
            "10.1.0.1:8080 10.1.0.1:8081",
        ),
        (
            "only the first address",
            vec![slice("a", &ONE.replace("[10.1.0.1]", "[10.1.0.1, 10.1.0.2]"))],
            "10.1.0.1:8080",
        ),
        (
            "a bad address harms only itself",
            vec![slice(
                "a",
                &ONE.replace("{addresses: [10.1.0.1]}", "{addresses: [x]}, {addresses: []}, {addresses: [10.1.0.1]}"),
            )],
            "10.1.0.1:8080",
        ),
    ] {
        check(name, &web(&slices), &[format!("10.0.0.1:80/TCP default/web {expected}").trim_end()]);
    }
    let unnamed = service("web", "clusterIP: 10.0.0.1, ports: [{port: 80}]");
    check("an unnamed port", &[unnamed, ports("[{port: 8080}]")], &["10.0.0.1:80/TCP default/web 10.1.0.1:8080"]);
}

/// pkg/proxy/topology.go `CategorizeEndpoints`.
#[test]
fn endpoints_by_condition() {
    for (name, conditions, expected) in [
        ("nothing said is ready", ["", ""], vec![1, 2]),
        ("only the ready", ["ready: true", "ready: false"], vec![1]),
        ("none is ready and none ends", ["ready: false", "ready: false"], vec![]),
        ("none is ready, one serves while it ends", ["ready: false, terminating: true", "ready: false"], vec![1]),
        (
            "one that ends and no longer serves",
            ["ready: false, serving: false, terminating: true", "ready: false"],
            vec![],
        ),
        ("one that is ready hides one that ends", ["ready: false, terminating: true", "ready: true"], vec![2]),
    ] {
        let [first, second] = conditions;
        let endpoints = format!(
            "endpoints: [{{addresses: [10.1.0.1], conditions: {{{first}}}}}, {{addresses: [10.1.0.2], conditions: {{{second}}}}}]"
        );
        let slice = slice("a", &ONE.replace("endpoints: [{addresses: [10.1.0.1]}]", &endpoints));
        let backends: Vec<_> = expected.iter().map(|host| format!("10.1.0.{host}:8080")).collect();
        let line = format!("10.0.0.1:80/TCP default/web {}", backends.join(" "));
        check(name, &[service("web", WEB), slice], &[line.trim_end()]);
    }
    let with = |name: &str, conditions: &str| {
        slice(
            name,
            &ONE.replace(
                "{addresses: [10.1.0.1]}",
                &format!("{{addresses: [10.1.0.1], conditions: {{{conditions}}}}}"),
            ),
        )
    };
    check(
        "of one endpoint in two slices, the one that does not end counts",
        &[service("web", WEB), with("a", "ready: false, serving: true, terminating: true"), with("b", "ready: true")],
        &["10.0.0.1:80/TCP default/web 10.1.0.1:8080"],
    );
}

/// pkg/apis/core/validation and pkg/proxy/serviceport.go: `sessionAffinity` and its timeout.
#[test]
fn session_affinity() {
    for (fields, seconds, troubled) in [
        ("", None, false),
        ("sessionAffinity: None", None, false),
        ("sessionAffinity: ClientIP", Some(10_800), false),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {}}", Some(10_800), false),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}}", Some(1), false),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}}", Some(86_400), false),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}", Some(1), true),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: -5}}", Some(1), true),
        ("sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}", Some(86_400), true),
        ("sessionAffinity: None, sessionAffinityConfig: {clientIP: {timeoutSeconds: 9}}", None, false),
    ] {
        let (store, problems) = store(None, &service("web", &format!("{WEB}, {fields}")));
        assert_eq!(resolve(&store)[0].session_affinity_seconds, seconds, "{fields}");
        assert_eq!(!problems.is_empty(), troubled, "{fields}: {problems:?}");
        assert!(problems.iter().all(|problem| problem.field.ends_with("timeoutSeconds")), "{problems:?}");
    }
}

/// One endpoint for each letter, its last octet the place of the letter: r is ready, e ends and still serves, d ends and
/// does not, n is not ready but serves, x is nothing at all. Capital letters are on the node "here".
fn endpoints(letters: &str) -> String {
    let endpoint = |(index, letter): (usize, char)| {
        let conditions = match letter.to_ascii_lowercase() {
            'r' => "ready: true, serving: true",
            'e' => "ready: false, serving: true, terminating: true",
            'd' => "ready: false, serving: false, terminating: true",
            'n' => "ready: false, serving: true",
            _ => "ready: false, serving: false",
        };
        let node = if letter.is_uppercase() { "here" } else { "there" };
        format!("{{addresses: [10.1.0.{}], conditions: {{{conditions}}}, nodeName: {node}}}", index + 1)
    };
    let endpoints: Vec<_> = letters.chars().enumerate().map(endpoint).collect();
    slice("a", &ONE.replace("[{addresses: [10.1.0.1]}]", &format!("[{}]", endpoints.join(", "))))
}

/// pkg/proxy/topology.go `CategorizeEndpoints` with `internalTrafficPolicy`; what is not eligible and serves is kept.
#[test]
fn internal_traffic_policy_and_what_still_serves() {
    for (policy, node, letters, expected) in [
        // Whatever the node, Cluster takes all that are ready.
        ("Cluster", None, "rRnedx", ("forward", "1 2", "3 4")),
        ("Cluster", Some("here"), "rRnedx", ("forward", "1 2", "3 4")),
        ("Cluster", Some("here"), "eEnx", ("forward", "1 2", "3")),
        ("Cluster", Some("here"), "ndx", ("refuse", "", "1")),
        ("Local", Some("here"), "rRnNeE", ("forward", "2", "1 3 4 5 6")),
        ("Local", Some("here"), "rEN", ("forward", "2", "1 3")),
        ("Local", Some("here"), "rN", ("drop", "", "1 2")),
        ("Local", Some("here"), "rX", ("drop", "", "1")),
        // Elsewhere somebody still serves while it ends: that is usable too.
        ("Local", Some("here"), "eX", ("drop", "", "1")),
        ("Local", Some("here"), "nDX", ("refuse", "", "1")),
        ("Local", Some("here"), "", ("refuse", "", "")),
        ("Local", Some("elsewhere"), "rR", ("drop", "", "1 2")),
        ("Local", None, "rR", ("drop", "", "1 2")),
        ("Local", None, "d", ("refuse", "", "")),
    ] {
        let service = service("web", &format!("{WEB}, internalTrafficPolicy: {policy}"));
        let (store, problems) = store(node, &[service, endpoints(letters)].concat());
        let row = &resolve(&store)[0];
        let hosts = |backends: &[Backend]| list(backends).replace("10.1.0.", "").replace(":8080", "");
        let (eligible, serving) = (hosts(&row.backends), hosts(&row.serving));
        let case = format!("{policy} at {node:?}: {letters:?}");
        assert_eq!((row.action.as_str(), eligible.as_str(), serving.as_str()), expected, "{case}");
        let is_unknown = node.is_none() && policy == "Local";
        assert_eq!(problems.len(), usize::from(is_unknown), "{case}: {problems:?}");
        assert!(problems.iter().all(|problem| problem.message.contains("--node-name")), "{problems:?}");
    }
}

/// The own node's name is known, and an endpoint without one is not local.
#[test]
fn an_endpoint_without_a_node_is_remote() {
    let service = service("web", &format!("{WEB}, internalTrafficPolicy: Local"));
    let (store, _) = store(Some("here"), &[service, slice("a", ONE)].concat());
    assert_eq!(resolve(&store)[0].action, super::Action::Drop);
}
