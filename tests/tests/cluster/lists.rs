//! Lists from the real API server: from its cache, never from etcd.

use std::iter;

use cproxy_tests::{manifest::Slice, process::eventually, sandbox::Sandbox};

use crate::fixture::{Cluster, PATIENCE};

/// Flag that makes the API server log each request once it is answered.
const LOG_REQUESTS: &str = "--v=3";

/// The agent's requests for `resource`, recognised by selectors that no other client uses.
fn asked(cluster: &Cluster<'_>, resource: &str) -> Vec<String> {
    let log = cluster.control_plane.api_server_log();
    let uris = log.lines().filter_map(|line| line.split("URI=\"").nth(1)?.split('"').next());
    let selectors = ["%21service.kubernetes.io%2Fservice-proxy-name", "%21service.kubernetes.io%2Fheadless"];
    let is_ours =
        |uri: &&str| selectors.iter().any(|selector| uri.contains(&format!("/{resource}?labelSelector={selector}&")));
    uris.filter(is_ours).map(str::to_owned).collect()
}

fn apply_some(cluster: &Cluster<'_>) -> Vec<String> {
    for index in 1..=9 {
        let name = format!("web-{index}");
        cluster.apply_service(&name, &format!("10.96.0.1{index}"), &[&format!("10.244.0.{index}")]);
    }
    (1..=9).map(|index| format!("TCP 10.96.0.1{index}:80 10.244.0.{index}:8080")).collect()
}

fn expect(cluster: &Cluster<'_>, rows: &[String]) {
    cluster.expect(&rows.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn a_list_comes_from_the_servers_cache_and_watches_go_on_from_it() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start_with(&sandbox, &[LOG_REQUESTS]);
    let mut rows = apply_some(&cluster);
    let mut agent = cluster.start_agent();
    expect(&cluster, &rows);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
    for resource in ["services", "endpointslices"] {
        // The API server logs a watch when it ends.
        let uris = asked(&cluster, resource);
        let [list] = uris.as_slice() else { panic!("not one list: {uris:#?}") };
        assert!(list.ends_with("&resourceVersion=0") && !list.contains("limit="), "{list} is not from the cache");
    }
    cluster.control_plane.kill_api_server();
    agent.wait_log("trying again", PATIENCE);
    cluster.start_api_server();
    cluster.delete("Service", "web-9");
    rows.pop();
    cluster.apply(Slice::v4("web-8").tcp("http", 8080).ready(["10.244.0.9"]));
    rows.pop();
    let changed = "TCP 10.96.0.18:80 10.244.0.9:8080".to_owned();
    let rows: Vec<_> = rows.into_iter().chain(iter::once(changed)).collect();
    expect(&cluster, &rows);
    assert_eq!(agent.exit_status(), None, "it is still the same agent");

    // Whether the watch went on or a list was due: the version that the agent had counts.
    assert!(agent.stop().success());
    for resource in ["services", "endpointslices"] {
        let uris = eventually(PATIENCE, "the watch is logged", || {
            let uris = asked(&cluster, resource);
            if uris.iter().any(|uri| is_watch(uri)) { Ok(uris) } else { Err(format!("{uris:#?}")) }
        });
        for uri in uris {
            let is_known = uri.contains("&resourceVersion=") && !uri.contains("&resourceVersion=0");
            assert!(is_known && (is_watch(&uri) || uri.ends_with("&resourceVersionMatch=NotOlderThan")), "{uri}");
        }
    }
}

/// Whether the request is a watch with bookmarks, for 5 to 10 minutes.
fn is_watch(uri: &str) -> bool {
    let seconds = uri.split("timeoutSeconds=").nth(1).and_then(|rest| rest.split('&').next()?.parse().ok());
    let has_time = seconds.is_some_and(|seconds: u32| (300..600).contains(&seconds));
    has_time && uri.contains("watch=true") && uri.contains("allowWatchBookmarks=true")
}
