//! Lists from the real API server: streamed where it can, and else from its cache, never from etcd.

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
fn a_server_that_streams_lists_gets_no_other_list_requests() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start_with(&sandbox, &[LOG_REQUESTS]);
    let rows = apply_some(&cluster);
    let mut agent = cluster.start_agent();
    expect(&cluster, &rows);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
    // The API server logs a watch when it ends.
    assert!(agent.stop().success());
    for resource in ["services", "endpointslices"] {
        let uris = eventually(PATIENCE, "the watch is logged", || {
            let uris = asked(&cluster, resource);
            if uris.is_empty() { Err("not yet") } else { Ok(uris) }
        });
        let [uri] = uris.as_slice() else { panic!("not one request: {uris:#?}") };
        for needle in ["watch=true", "sendInitialEvents=true", "allowWatchBookmarks=true"] {
            assert!(uri.contains(needle), "{needle} is not in {uri}");
        }
        let seconds = uri.split("timeoutSeconds=").nth(1).and_then(|rest| rest.split('&').next()?.parse().ok());
        assert!(seconds.is_some_and(|seconds: u32| (300..600).contains(&seconds)), "{uri}");
    }
}

#[test]
fn a_server_that_streams_no_lists_sends_them_from_its_cache() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start_with(&sandbox, &[LOG_REQUESTS, "--feature-gates=WatchList=false"]);
    let mut rows = apply_some(&cluster);
    let mut agent = cluster.start_agent();
    for resource in ["services", "endpointslices"] {
        agent.wait_log(&format!("does not stream lists of {resource}: listing from its cache"), PATIENCE);
        let lists: Vec<_> = asked(&cluster, resource).into_iter().filter(|uri| !uri.contains("watch=true")).collect();
        let [list] = lists.as_slice() else { panic!("not one list: {lists:#?}") };
        assert!(list.ends_with("&limit=500&resourceVersion=0"), "{list} is not answered from the cache");
    }
    expect(&cluster, &rows);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
    // The watch goes on from where the list was, also after an outage.
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
}
