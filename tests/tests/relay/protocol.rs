//! The relay's answers are the API server's own, request by request.

use std::{
    collections::BTreeMap,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{process::eventually, sandbox::Sandbox};
use serde_json::json;

use crate::{
    client::{Client, Response, Version},
    fixture::{NODES, PATIENCE, SERVICES, SLICES, World, number, selectors, service},
    wire::canonical,
};

/// Requests at once.
const THREADS: usize = 32;

/// Attempts at a request whose answers differ.
const ATTEMPTS: usize = 4;

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// A client of each server.
struct Pair<'s> {
    api: Client<'s>,
    relay: Client<'s>,
}

impl<'s> Pair<'s> {
    fn of(world: &World<'s>) -> Self {
        Self { api: world.cluster.admin(), relay: world.client() }
    }

    fn map(&self, change: impl Fn(Client<'s>) -> Client<'s>) -> Self {
        Self { api: change(self.api.clone()), relay: change(self.relay.clone()) }
    }

    /// Differences between the answers to one request. On a busy machine the API server may end a watch before its
    /// first event, so that only a difference that stays counts.
    fn difference(&self, target: &str) -> Option<String> {
        (0..ATTEMPTS).map_while(|_| self.difference_once(target)).nth(ATTEMPTS - 1)
    }

    fn difference_once(&self, target: &str) -> Option<String> {
        let [api, relay] = [&self.api, &self.relay].map(|client| client.get(target));
        let difference = canonical(&api).difference(&canonical(&relay))?;
        let show = |response: &Response| if response.code >= 400 { response.text() } else { String::new() };
        Some(format!("{target}: {difference}{}{}", show(&api), show(&relay)))
    }
}

/// Compares the answers to all requests in all forms.
fn compare(pairs: &BTreeMap<&str, Pair<'_>>, targets: &[String]) {
    let work = pairs.iter().flat_map(|pair| targets.iter().map(move |target| (pair, target)));
    let (work, differences) = (Mutex::new(work), Mutex::new(Vec::new()));
    let next = || work.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(((form, pair), target)) = next() {
                    let difference = pair.difference(target).map(|difference| format!("{form}: {difference}"));
                    differences.lock().unwrap().extend(difference);
                }
            });
        }
    });
    let differences = differences.into_inner().unwrap();
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// Both servers in each format and each version of HTTP.
fn forms<'s>(world: &World<'s>) -> BTreeMap<&'static str, Pair<'s>> {
    let pair = Pair::of(world);
    let form = |version, accept: &str| pair.map(|client| client.version(version).accept(accept));
    BTreeMap::from([
        ("JSON, HTTP/1.1", form(Version::Http1, "application/json")),
        ("protobuf, HTTP/2", form(Version::Http2, &format!("{PROTOBUF},application/json"))),
    ])
}

/// A target with the selectors that the relay always has.
fn target(path: &str, query: &str) -> String {
    format!("{path}?{}&{query}", selectors(path))
}

#[test]
fn lists_watches_and_errors_are_those_of_the_api_server() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    world.settle();
    let mut targets = Vec::new();
    for path in [SERVICES, SLICES, NODES] {
        for query in [
            "",
            "resourceVersion=",
            "resourceVersion=0",
            "resourceVersion=1",
            "resourceVersion=0&resourceVersionMatch=NotOlderThan",
            "resourceVersion=1&resourceVersionMatch=NotOlderThan",
            "resourceVersion=0&limit=500",
            "watch=false",
            "watch=x&timeoutSeconds=1",
            "watch=1&resourceVersion=0&timeoutSeconds=1",
            "watch=true&timeoutSeconds=1",
            "watch=true&timeoutSeconds=1&allowWatchBookmarks=true",
            "watch=true&timeoutSeconds=1&allowWatchBookmarks=true&resourceVersion=0",
            "watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
             &allowWatchBookmarks=true",
            "watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
             &allowWatchBookmarks=true&resourceVersion=0",
            "watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
             &allowWatchBookmarks=true&resourceVersion=1",
            "watch=true&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
        ] {
            targets.push(target(path, query));
        }
        // A watch that resumes has nothing more.
        let version = number(&world.client().json(path)["metadata"]["resourceVersion"]);
        targets.push(target(path, &format!("watch=true&timeoutSeconds=1&resourceVersion={version}")));
    }
    targets.extend(selected_targets());
    targets.extend(wrong_targets());
    compare(&forms(&world), &targets);
}

/// Requests for a part of the objects.
fn selected_targets() -> Vec<String> {
    let (web, namespaced) = ("/api/v1/namespaces/default/services/web", "/api/v1/namespaces/team/services");
    let mut targets: Vec<String> = [
        web,
        "/api/v1/namespaces/default/services/full",
        "/api/v1/namespaces/default/services/none",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/full-ipv4",
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/none",
        "/api/v1/nodes/node-1",
        "/api/v1/nodes/none",
        namespaced,
        "/api/v1/namespaces/none/services",
        "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices",
        "/api/v1/namespaces/team/services?watch=true&timeoutSeconds=1",
        "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-1",
        "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-1&watch=true&timeoutSeconds=1",
        "/api/v1/nodes?fieldSelector=metadata.name!%3Dnode-1",
        "/apis/discovery.k8s.io/v1/endpointslices?labelSelector=kubernetes.io/service-name%3Dweb",
    ]
    .map(str::to_owned)
    .into();
    for (labels, fields) in [
        ("app=web", ""),
        ("app==web", ""),
        ("app in (web, full)", ""),
        ("app notin (web)", ""),
        ("app!=web", ""),
        ("app", ""),
        ("tier>4", ""),
        ("tier<5", ""),
        ("app=web,tier", ""),
        ("app in ()", ""),
        ("app=", ""),
        ("", "metadata.name=web"),
        ("", "metadata.name=web,metadata.namespace=team"),
        ("", "metadata.namespace!=default"),
        ("", "spec.type=LoadBalancer"),
        ("", "spec.clusterIP=10.96.0.1"),
    ] {
        let encode = |text: &str| text.replace('=', "%3D").replace(' ', "+").replace('<', "%3C").replace('>', "%3E");
        let known = "spec.clusterIP!%3DNone";
        let fields = if fields.is_empty() { known.to_owned() } else { format!("{known},{}", encode(fields)) };
        let query = format!("labelSelector={}&fieldSelector={fields}", encode(labels));
        targets.push(format!("{SERVICES}?{query}"));
        targets.push(format!("{SERVICES}?{query}&watch=true&timeoutSeconds=1"));
    }
    targets
}

/// Requests that are refused.
fn wrong_targets() -> Vec<String> {
    let mut targets: Vec<String> = [
        "/api/v1/services/web",
        "/api/v1/namespaces/default/nodes",
        "/apis/discovery.k8s.io/v1/services",
        "/apis/discovery.k8s.io/v2/endpointslices",
    ]
    .map(str::to_owned)
    .into();
    for query in [
        "resourceVersion=x",
        "resourceVersion=-1",
        "resourceVersion=1.5",
        "resourceVersion=99999999999999999999",
        "resourceVersionMatch=NotOlderThan",
        "resourceVersionMatch=Exact&resourceVersion=0",
        "resourceVersionMatch=Newest&resourceVersion=1",
        "sendInitialEvents=true",
        "watch=true&sendInitialEvents=true",
        "watch=true&resourceVersionMatch=NotOlderThan",
        "watch=true&sendInitialEvents=true&resourceVersionMatch=Exact&resourceVersion=1",
        "watch=true&timeoutSeconds=x",
        "timeoutSeconds=x",
        "limit=x",
        "labelSelector=a%3Db%3Dc",
        "labelSelector=!!a",
        "labelSelector=a+in+b",
        "labelSelector=a+in+(b",
        "labelSelector=-a",
        "labelSelector=a%3D-b-",
        "labelSelector=a/b/c",
        "labelSelector=a%3Eb",
        "fieldSelector=spec.ports%3D80",
        "fieldSelector=metadata.name",
        "resourceVersion=9999999",
    ] {
        targets.push(format!("{SERVICES}?{query}"));
    }
    targets
}

/// Version of a list.
fn version(client: &Client<'_>, path: &str) -> u64 {
    number(&client.json(path)["metadata"]["resourceVersion"])
}

#[test]
fn versions_mean_the_same_at_both_servers() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    let Pair { api, relay } = Pair::of(&world);
    world.settle();

    // Each client has listed at one server and watches at the other one.
    let watch = |client: &Client<'_>, version| {
        client.get(&format!("{SERVICES}?watch=true&timeoutSeconds=3&resourceVersion={version}&labelSelector=app"))
    };
    let [of_api, of_relay] = [&api, &relay].map(|client| version(client, SERVICES));
    world.cluster.create(&service("team", "late"));
    world.cluster.patch("/api/v1/namespaces/team/services/web", &json!({"metadata": {"labels": {"app": "other"}}}));
    world.cluster.delete("/api/v1/namespaces/team-a/services/web");
    let expected = canonical(&watch(&api, of_api));
    for (client, version) in [(&relay, of_api), (&api, of_relay), (&relay, of_relay)] {
        eventually(PATIENCE, "a watch has the later changes", || {
            match expected.difference(&canonical(&watch(client, version))) {
                None => Ok(()),
                Some(difference) => Err(difference),
            }
        });
    }

    // Changes of other kinds are in the versions of the API server's lists. The relay asks for them on demand.
    for round in 0..2 {
        world.cluster.create(&service("team", &format!("other-{round}")));
        let newer = version(&api, NODES);
        let start = Instant::now();
        eventually(PATIENCE, "the relay catches up with a kind without changes", || {
            match relay.get(&format!("{NODES}?resourceVersion={newer}")) {
                response if response.code == 200 => Ok(()),
                response => Err(response.text()),
            }
        });
        println!("round {round}: the relay had the version of an idle kind after {:?}", start.elapsed());
    }

    let start = Instant::now();
    let future = relay.get(&format!("{SERVICES}?resourceVersion=9999999"));
    assert!(start.elapsed() > Duration::from_secs(2), "it waits before it gives up");
    let status = future.json();
    assert_eq!((future.code, &status["reason"]), (504, &json!("Timeout")));
    assert_eq!(status["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    let past = relay.get(&format!("{SERVICES}?watch=true&timeoutSeconds=1&resourceVersion=1")).json();
    assert_eq!((&past["type"], &past["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!(past["object"]["reason"], "Expired");
    assert_eq!(relay.get(&format!("{SERVICES}?continue=x")).code, 410);
}

#[test]
fn compression_and_content_types_are_negotiated() {
    let sandbox = Sandbox::for_test();
    let world = World::start(&sandbox);
    world.settle();
    let relay = world.client();
    for accept in ["application/json", PROTOBUF] {
        let plain = relay.clone().accept(accept).get(SERVICES);
        for coding in ["gzip", "zstd"] {
            let header = format!("Accept-Encoding: {coding}");
            let packed = relay.clone().accept(accept).args(["--compressed", "--header", &header]).get(SERVICES);
            assert_eq!(packed.header("content-encoding"), coding);
            assert_eq!(canonical(&packed), canonical(&plain), "{accept} {coding}");
        }
    }
    let pair = Pair::of(&world);
    for (accept, code) in [
        ("text/html", 406),
        ("application/cbor;q=1", 406),
        ("*/*", 200),
        ("application/*", 200),
        ("text/html, application/json", 200),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", 200),
    ] {
        assert_eq!(relay.clone().accept(accept).get("/api/v1/namespaces/team/services").code, code, "{accept}");
    }
    let refused = pair.map(|client| client.accept("text/html"));
    assert_eq!(refused.difference("/api/v1/namespaces/team/services"), None);
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        let response = relay.send(&["--request", method, "--data", "{}"], "/api/v1/namespaces/team/services/web");
        assert_eq!((response.code, &response.json()["reason"]), (405, &json!("MethodNotAllowed")), "{method}");
    }
}
