//! Documents about the API, as the API server has them, with only what the relay serves.

use cproxy_core::ResourceKind;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    APIGroup, APIGroupList, APIResource, APIResourceList, APIVersions, GroupVersionForDiscovery,
};
use serde_json::{Value, to_value};

use crate::{
    object::{api_version, plural},
    query::KINDS,
};

/// Verbs that the relay serves for each kind.
const VERBS: [&str; 3] = ["get", "list", "watch"];

/// A document about the API at this path.
#[must_use]
pub fn discovery(path: &str) -> Option<Value> {
    let document = match path {
        "/api" => {
            let versions = APIVersions { versions: vec!["v1".to_owned()], ..APIVersions::default() };
            // The API server sends this kind without a version.
            without(&["apiVersion"], to_value(versions).ok()?)
        }
        "/apis" => {
            let mut groups = to_value(APIGroupList { groups: vec![discovery_group()] }).ok()?;
            // The items of a list have no kinds.
            let group = groups.pointer_mut("/groups/0")?;
            *group = without(&["apiVersion", "kind"], group.take());
            groups
        }
        "/api/v1" => to_value(resources("v1")).ok()?,
        "/apis/discovery.k8s.io" => to_value(discovery_group()).ok()?,
        "/apis/discovery.k8s.io/v1" => to_value(resources("discovery.k8s.io/v1")).ok()?,
        _ => return None,
    };
    Some(document)
}

/// Group of EndpointSlices.
fn discovery_group() -> APIGroup {
    let version =
        GroupVersionForDiscovery { group_version: "discovery.k8s.io/v1".to_owned(), version: "v1".to_owned() };
    APIGroup {
        name: "discovery.k8s.io".to_owned(),
        versions: vec![version.clone()],
        preferred_version: Some(version),
        ..APIGroup::default()
    }
}

/// Resources of a group's version.
fn resources(group_version: &str) -> APIResourceList {
    let of_version = KINDS.into_iter().filter(|kind| api_version(*kind) == group_version);
    APIResourceList { group_version: group_version.to_owned(), resources: of_version.map(resource).collect() }
}

fn resource(kind: ResourceKind) -> APIResource {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    APIResource {
        name: plural(kind).to_owned(),
        singular_name: kind.singular().to_lowercase(),
        namespaced: kind != ResourceKind::Nodes,
        kind: kind.singular().to_owned(),
        verbs: owned(&VERBS),
        short_names: Some(owned(short_names(kind))),
        ..APIResource::default()
    }
}

fn short_names(kind: ResourceKind) -> &'static [&'static str] {
    match kind {
        ResourceKind::Services => &["svc"],
        ResourceKind::EndpointSlices => &[],
        ResourceKind::Nodes => &["no"],
    }
}

/// The document without some of its fields.
fn without(fields: &[&str], mut document: Value) -> Value {
    if let Some(document) = document.as_object_mut() {
        document.retain(|name, _| !fields.contains(&name.as_str()));
    }
    document
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_about_the_api_name_what_is_served() {
        let version = json!({"groupVersion": "discovery.k8s.io/v1", "version": "v1"});
        let resource = |name: &str, kind: &str, namespaced: bool, short_names: &[&str]| {
            json!({
                "name": name, "singularName": kind.to_lowercase(), "namespaced": namespaced, "kind": kind,
                "verbs": ["get", "list", "watch"], "shortNames": short_names,
            })
        };
        for (path, expected) in [
            ("/api", json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
            (
                "/apis",
                json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [
                    {"name": "discovery.k8s.io", "versions": [version], "preferredVersion": version},
                ]}),
            ),
            (
                "/api/v1",
                json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [
                    resource("services", "Service", true, &["svc"]), resource("nodes", "Node", false, &["no"]),
                ]}),
            ),
            (
                "/apis/discovery.k8s.io",
                json!({"kind": "APIGroup", "apiVersion": "v1", "name": "discovery.k8s.io",
                       "versions": [version], "preferredVersion": version}),
            ),
            (
                "/apis/discovery.k8s.io/v1",
                json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "discovery.k8s.io/v1",
                       "resources": [resource("endpointslices", "EndpointSlice", true, &[])]}),
            ),
        ] {
            assert_eq!(discovery(path), Some(expected), "{path}");
        }
        assert_eq!(discovery("/openapi/v2"), None);
    }
}
