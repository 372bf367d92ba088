//! JSON from protobuf, compared with the JSON that the API server itself sends: as single objects, in lists and in
//! watches. Nearly every field of the API server's OpenAPI document has a value.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod cluster;
mod coverage;
mod envelope;
mod objects;

use cproxy_tests::sandbox::Sandbox;
use cproxy_transcode::{Kind, write_json};
use serde_json::Value;

use self::{cluster::Cluster, envelope::Event};

/// JSON as text: the API server's own and ours must be the same, byte for byte.
fn check(what: &str, ours: &str, theirs: &str) {
    let parse = |json: &str| serde_json::from_str::<Value>(json).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!(parse(ours), parse(theirs), "{what}");
    assert_eq!(ours, theirs, "{what}: the same, but written in another way");
}

fn transcoded(kind: Kind, protobuf: &[u8], with_type: bool) -> String {
    let mut out = Vec::new();
    write_json(kind, protobuf, with_type, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// Compares each object, then their list and their watch. Returns the objects.
fn check_kind(cluster: &Cluster<'_>, kind: Kind) -> Vec<Value> {
    let objects = cluster.list(kind);
    for object in &objects {
        let path = cluster::path_of(kind, object);
        let protobuf = envelope::object(&cluster.get_protobuf(&path));
        check(&path, &(transcoded(kind, &protobuf, true) + "\n"), &cluster.get_json(&path));
    }
    check_list(cluster, kind);
    check_watch(cluster, kind, objects.len());
    objects
}

fn check_list(cluster: &Cluster<'_>, kind: Kind) {
    let path = cluster::path(kind);
    let (version, items) = envelope::list(&cluster.get_protobuf(path));
    let items = items.iter().map(|item| transcoded(kind, item, false)).collect::<Vec<_>>().join(",");
    let (name, api_version) = (kind.name(), kind.api_version());
    let ours = format!(
        "{{\"kind\":\"{name}List\",\"apiVersion\":\"{api_version}\",\"metadata\":{{\"resourceVersion\":\"{version}\"}},\
        \"items\":[{items}]}}\n"
    );
    check(path, &ours, &cluster.get_json(path));
}

fn check_watch(cluster: &Cluster<'_>, kind: Kind, count: usize) {
    let path = format!("{}?watch=true&resourceVersion=0&timeoutSeconds=1", cluster::path(kind));
    let ours = envelope::events(&cluster.get_watch(&path)).into_iter().map(|Event { change, object }| {
        format!("{{\"type\":\"{change}\",\"object\":{}}}", transcoded(kind, &object, true))
    });
    let (mut ours, json) = (ours.collect::<Vec<_>>(), cluster.get_json(&path));
    let mut theirs = json.lines().collect::<Vec<_>>();
    assert_eq!((ours.len(), theirs.len()), (count, count), "{path}");
    // A watch begins with all objects, in no particular order.
    ours.sort_unstable();
    theirs.sort_unstable();
    for (ours, theirs) in ours.iter().zip(theirs) {
        check(&path, ours, theirs);
    }
}

#[test]
fn services_have_the_api_server_s_json() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    cluster.create(Kind::Service, objects::services());
    cluster.delete(Kind::Service, objects::DELETED);
    let found = check_kind(&cluster, Kind::Service);
    coverage::check(&cluster, Kind::Service, &found);
}

#[test]
fn endpoint_slices_have_the_api_server_s_json() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    cluster.create(Kind::EndpointSlice, objects::endpoint_slices());
    cluster.delete(Kind::EndpointSlice, objects::DELETED);
    let found = check_kind(&cluster, Kind::EndpointSlice);
    coverage::check(&cluster, Kind::EndpointSlice, &found);
}

#[test]
fn nodes_have_the_api_server_s_json() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    cluster.create(Kind::Node, objects::nodes());
    cluster.delete(Kind::Node, objects::DELETED);
    let found = check_kind(&cluster, Kind::Node);
    coverage::check(&cluster, Kind::Node, &found);
}
