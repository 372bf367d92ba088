//! The relay's requests at the API server, and clients while the API server fails: they see nothing but the changes.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cproxy_tests::{
    api::{Api, Reply, is_watch, stored},
    audit::{AuditLog, AuditedRequest},
    control_plane::{ADDRESS, PORT, SECOND_PORT},
    manifest::http_service,
    process::{FullPipe, Signal, eventually},
    relay::Relay,
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
    usage::Memory,
};
use serde_json::{Value, json};

use crate::{
    client::{Client, Watching},
    fixture::{Cluster, NODES, PATIENCE, RELAY, SERVICES, SLICES, World, number, service},
};

/// Memory of a relay in a debug build whose API server sends 200 MiB of garbage.
const RESIDENT_MAX: u64 = 100 << 20;

/// Metric of the seconds since the API server has confirmed the Services.
const SILENT: &str = "cproxy_relay_upstream_silent_seconds{resource=\"services\"}";

/// Starts a watch of all later changes.
fn watch(client: &Client<'_>, path: &str) -> Watching {
    let version = number(&client.json(path)["metadata"]["resourceVersion"]);
    let watching = client.watch(&format!("{path}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"));
    eventually(PATIENCE, "the watch has begun", || watching.response().map(drop).ok_or("not yet"));
    watching
}

/// Waits until a watch has shown exactly these changes.
fn expect_changes(watching: &Watching, expected: &[&str]) {
    eventually(PATIENCE, format!("a client has seen {expected:?}"), || {
        let changes = watching.changes();
        if changes == expected { Ok(()) } else { Err(format!("{changes:?}")) }
    });
}

fn running(audit: &AuditLog) -> Vec<AuditedRequest> {
    audit.requests().into_iter().filter(|request| request.user == "cproxy-relay" && !request.is_done).collect()
}

#[test]
fn there_is_one_watch_of_each_kind_and_a_new_api_server_goes_on_with_it() {
    let sandbox = Sandbox::for_test();
    let audit = AuditLog::create(&sandbox, "api");
    let flags = audit.flags();
    let mut world = World::of(Cluster::start(&sandbox, &[&flags[0], &flags[1]]));
    let client = world.client();
    let watches: Vec<_> = (0..10).flat_map(|_| [SERVICES, SLICES, NODES]).map(|path| watch(&client, path)).collect();
    eventually(PATIENCE, "there are three watches", || match running(&audit) {
        running if running.len() == 3 => Ok(()),
        running => Err(format!("{running:#?}")),
    });
    assert_eq!(world.relay.metric("cproxy_relay_watches{resource=\"nodes\"}"), 10.0);

    // Something happens while the relay's own API server is away.
    world.cluster.control_plane.kill_api_server();
    let second = world.cluster.control_plane.start_second(&[]);
    let admin = Client::new(&sandbox, format!("https://{ADDRESS}:{SECOND_PORT}"));
    let admin =
        admin.ca_file(&world.cluster.control_plane.ca_file()).token(&world.cluster.control_plane.token("admin"));
    admin.write("POST", "/api/v1/namespaces/team/services", &service("team", "late"));
    admin.write("DELETE", "/api/v1/namespaces/default/services/web", &Value::Null);
    assert!(world.relay.metric(SILENT) > 1.0, "the API server has been away for some time");
    assert_eq!(client.json(SERVICES)["items"].as_array().unwrap().len(), 6, "the relay serves what it knows");
    assert_eq!(client.get("/readyz").code, 200);
    drop(second);
    world.cluster.control_plane.start_api_server();

    for watching in watches.iter().step_by(3) {
        eventually(PATIENCE, "a client has seen both changes", || {
            let mut changes = watching.changes();
            changes.sort();
            if changes == ["ADDED late", "DELETED web"] { Ok(()) } else { Err(format!("{changes:?}")) }
        });
    }
    world.cluster.delete("/api/v1/nodes/node-2");
    for watching in watches.iter().skip(2).step_by(3) {
        expect_changes(watching, &["DELETED node-2"]);
    }
    eventually(PATIENCE, "there are three watches again", || match running(&audit).len() {
        // Those of the API server that was killed never end in its log.
        6 => Ok(()),
        other => Err(other),
    });
    assert!(world.relay.metric(SILENT) < 60.0);
    assert_eq!(world.relay.metric("cproxy_relay_upstream_resets_total{resource=\"services\"}"), 0.0);
}

fn is_expired(watching: &Watching) -> bool {
    watching.events().last().is_some_and(|event| event["type"] == "ERROR" && event["object"]["code"] == 410)
}

/// Names of the Services that the relay has.
fn names(client: &Client<'_>) -> Vec<String> {
    let list = client.json(SERVICES);
    let items = list["items"].as_array().unwrap().iter();
    items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn clients_list_anew_when_etcd_is_restored_to_an_older_state() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start(&sandbox, &[]);
    cluster.control_plane.back_up();
    let mut world = World::of(cluster);
    let client = world.client();
    world.settle();
    // In the second round, versions of the new history pass those of the old one before the relay is back.
    for is_overtaken in [false, true] {
        let watching = watch(&client, SERVICES);
        world.cluster.create(&service("team", "lost"));
        expect_changes(&watching, &["ADDED lost"]);
        if is_overtaken {
            world.relay.signal(Signal::STOP);
        }
        world.cluster.control_plane.restore();
        if is_overtaken {
            (0..50).for_each(|number| drop(world.cluster.create(&service("team-a", &format!("new-{number}")))));
            world.relay.signal(Signal::CONT);
        }
        world.cluster.create(&service("team", "last"));
        eventually(PATIENCE, format!("the relay has what etcd has, overtaken: {is_overtaken}"), || {
            let names = names(&client);
            let is_restored = names.iter().any(|name| name == "last") && names.iter().all(|name| name != "lost");
            if is_restored { Ok(()) } else { Err(format!("{names:?}")) }
        });
        eventually(PATIENCE, "the client is told to list", || {
            if is_expired(&watching) { Ok(()) } else { Err(format!("{:?}", watching.changes())) }
        });
    }
    assert!(world.relay.metric("cproxy_relay_upstream_resets_total{resource=\"services\"}") >= 1.0);
}

#[test]
fn clients_do_not_notice_cut_connections_to_the_api_server() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let between = Relay::start(&sandbox, SocketAddr::new(ADDRESS, PORT));
    let relay = cluster.relay_at(&format!("https://{}", between.address())).listen(RELAY).without_authentication();
    let world = World { relay: relay.start(), cluster };
    let client = world.client();
    let (services, nodes) = (watch(&client, SERVICES), watch(&client, NODES));
    let mut expected = Vec::new();
    for round in 0..4 {
        between.cut();
        let name = format!("after-{round}");
        world.cluster.create(&service("team", &name));
        expected.push(format!("ADDED {name}"));
        expect_changes(&services, &expected.iter().map(String::as_str).collect::<Vec<_>>());
    }
    assert_eq!(nodes.changes(), [""; 0]);
    assert_eq!(world.relay.metric("cproxy_relay_upstream_resets_total{resource=\"services\"}"), 0.0);
}

/// A relay at a server whose answers a test defines.
fn relay_of(sandbox: &Sandbox, api: &Api) -> RunningRelay {
    RelayServer::new(sandbox).kubeconfig(api.kubeconfig(sandbox)).listen(RELAY).without_authentication().spawn()
}

#[test]
fn a_server_that_sends_garbage_keeps_the_relay_unready_and_small() {
    let sandbox = Sandbox::for_test();
    let garbage: [fn() -> Reply; 5] = [
        || Reply::text("{]"),
        || Reply::text("k8s\0\u{1}\u{2}\u{3}").content_type("application/vnd.kubernetes.protobuf"),
        || Reply::chunks((0..200).map(|_| vec![0xff; 1 << 20])).content_type("application/vnd.kubernetes.protobuf"),
        || Reply::text("").cut(),
        || Reply::error(500),
    ];
    let mut number = 0;
    let api = Api::serve(&sandbox, move |_| {
        number += 1;
        garbage[number % garbage.len()]()
    });
    let relay = relay_of(&sandbox, &api);
    eventually(PATIENCE, "the relay has asked for each kind several times", || match api.asked().len() {
        12.. => Ok(()),
        count => Err(count),
    });
    let client = Client::new(&sandbox, format!("http://{RELAY}"));
    let (ready, list) = (client.get("/readyz"), client.get(SERVICES));
    assert_eq!((ready.code, client.get("/healthz").code), (503, 200));
    assert!(ready.text().contains("services, endpointslices, nodes"), "{}", ready.text());
    assert_eq!((list.code, list.json()["reason"].as_str()), (503, Some("ServiceUnavailable")));
    assert!(!list.header("retry-after").is_empty());
    assert!(Memory::of(relay.pid()).peak < RESIDENT_MAX, "{:?}", Memory::of(relay.pid()));
    assert!(relay.log().contains("WARN"), "{}", relay.log());
}

/// Objects of a server that sends JSON, as a proxy that does not know protobuf, or a server that is not asked for it.
fn objects() -> [Value; 2] {
    let mut objects = stored(http_service("web", "10.96.0.10", ["10.244.0.1"]));
    for object in &mut objects {
        object["metadata"]["annotations"] = json!({"team": "a"});
    }
    objects
}

#[test]
fn a_server_that_sends_json_is_served_like_any_other() {
    let sandbox = Sandbox::for_test();
    let objects = objects();
    let served = objects.clone();
    let api = Api::serve(&sandbox, move |target| Reply::well(target, &served));
    let mut relay = relay_of(&sandbox, &api);
    relay.wait_log("listening on", PATIENCE);
    let client = Client::new(&sandbox, format!("http://{RELAY}"));
    eventually(PATIENCE, "the relay is ready", || match client.get("/readyz") {
        ready if ready.code == 200 => Ok(()),
        ready => Err(ready.text()),
    });
    for (path, object) in [SERVICES, SLICES].into_iter().zip(objects) {
        let list = client.json(path);
        let found = &list["items"][0];
        assert_eq!((&found["spec"]["ports"], &found["endpoints"][0]["addresses"]), {
            (&object["spec"]["ports"], &object["endpoints"][0]["addresses"])
        });
        assert_eq!(found["metadata"]["annotations"], Value::Null, "{found}");
    }
    assert_eq!(relay.metric("cproxy_relay_unreadable_objects_total{resource=\"services\"}"), 0.0);
}

#[test]
fn a_list_without_an_object_that_cannot_be_read_is_not_complete() {
    let sandbox = Sandbox::for_test();
    let [service, slice] = objects();
    let mut broken = service.clone();
    broken["metadata"]["name"] = "broken".into();
    broken["spec"]["ports"] = "many".into();
    let served = [service, broken, slice];
    let api = Api::serve(&sandbox, move |target| Reply::well(target, &served));
    let mut relay = relay_of(&sandbox, &api);
    relay.wait_log("listening on", PATIENCE);
    let client = Client::new(&sandbox, format!("http://{RELAY}"));
    eventually(PATIENCE, "the relay says what it lacks", || match client.get("/readyz").text() {
        text if text.contains("not ready: not listed yet: services (default/broken cannot be read)\n") => Ok(()),
        text => Err(text),
    });
    assert_eq!((client.get("/readyz").code, client.get(SERVICES).code, client.get(SLICES).code), (503, 503, 200));
    let log = relay.log();
    assert!(log.contains("Service default/broken: Service.spec.ports: a list was expected; its last state"), "{log}");
}

#[test]
fn a_log_that_nobody_reads_keeps_the_relay_from_nothing() {
    let sandbox = Sandbox::for_test();
    let objects = objects();
    let fails = Arc::new(AtomicBool::new(false));
    let failing = fails.clone();
    let api = Api::serve(&sandbox, move |target| match failing.load(Ordering::Relaxed) {
        true => Reply::error(500),
        false if is_watch(target) => Reply::error(410),
        false => Reply::well(target, &objects),
    });
    let pipe = FullPipe::new();
    let relay = RelayServer::new(&sandbox).kubeconfig(api.kubeconfig(&sandbox)).listen(RELAY);
    let mut relay = relay.without_authentication().stderr(pipe.writer()).start();
    fails.store(true, Ordering::Relaxed);
    let left_out = "cproxy_relay_log_lines_left_out_total";
    let before = relay.metric(left_out);
    eventually(PATIENCE, "the relay has lines to say", || match relay.metric(left_out) - before {
        3.0.. => Ok(()),
        more => Err(more),
    });
    fails.store(false, Ordering::Relaxed);
    let asked = api.asked().len();
    eventually(PATIENCE, "the relay goes on", || match api.asked().len() - asked {
        6.. => Ok(()),
        more => Err(more),
    });
    relay.signal(Signal::TERM);
    assert!(relay.wait(PATIENCE).is_some_and(|status| status.success()));
}
