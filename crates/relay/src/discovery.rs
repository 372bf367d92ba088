//! Documents about the API, as the API server has them, with only what the relay serves.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    APIGroup, APIGroupList, APIResource, APIResourceList, APIVersions, GroupVersionForDiscovery,
};
use serde_json::{Value, to_value};

use crate::kind::{Kind, served_kinds};

/// Verbs that the relay serves for each kind.
const VERBS: [&str; 3] = ["get", "list", "watch"];

/// A document about the API at this path. `has_policies`: the kinds of policies are served, too.
#[must_use]
pub fn discovery(path: &str, has_policies: bool) -> Option<Value> {
    let group = |name: &str| groups(has_policies).into_iter().find(|group| group.name == name);
    match path {
        "/api" => {
            let versions = APIVersions { versions: vec!["v1".to_owned()], ..APIVersions::default() };
            // The API server sends this kind without a version.
            Some(without(&["apiVersion"], to_value(versions).ok()?))
        }
        "/apis" => {
            let mut list = to_value(APIGroupList { groups: groups(has_policies) }).ok()?;
            // The items of a list have no kinds.
            for group in list.get_mut("groups")?.as_array_mut()? {
                *group = without(&["apiVersion", "kind"], group.take());
            }
            Some(list)
        }
        "/api/v1" => to_value(resources("v1", has_policies)?).ok(),
        _ => match path.strip_prefix("/apis/")? {
            name if name.contains('/') => to_value(resources(name, has_policies)?).ok(),
            name => to_value(group(name)?).ok(),
        },
    }
}

/// Groups with a name.
fn groups(has_policies: bool) -> Vec<APIGroup> {
    let mut groups: Vec<APIGroup> = Vec::new();
    for kind in served_kinds(has_policies).filter(|kind| !kind.group().is_empty()) {
        if groups.last().is_some_and(|group| group.name == kind.group()) {
            continue;
        }
        let version = GroupVersionForDiscovery {
            group_version: kind.api_version().to_owned(),
            version: kind.version().to_owned(),
        };
        groups.push(APIGroup {
            name: kind.group().to_owned(),
            versions: vec![version.clone()],
            preferred_version: Some(version),
            ..APIGroup::default()
        });
    }
    groups
}

/// Resources of a group's version, if there are any.
fn resources(group_version: &str, has_policies: bool) -> Option<APIResourceList> {
    let of_version = served_kinds(has_policies).filter(|kind| kind.api_version() == group_version);
    let resources: Vec<_> = of_version.map(resource).collect();
    (!resources.is_empty()).then(|| APIResourceList { group_version: group_version.to_owned(), resources })
}

fn resource(kind: Kind) -> APIResource {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    APIResource {
        name: kind.plural().to_owned(),
        singular_name: kind.singular().to_lowercase(),
        namespaced: kind.is_namespaced(),
        kind: kind.singular().to_owned(),
        verbs: owned(&VERBS),
        short_names: Some(owned(short_names(kind))),
        ..APIResource::default()
    }
}

fn short_names(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Services => &["svc"],
        Kind::EndpointSlices | Kind::PodPolicies | Kind::AddressSlices => &[],
        Kind::Nodes => &["no"],
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
            assert_eq!(discovery(path, false), Some(expected), "{path}");
        }
        for path in ["/openapi/v2", "/apis/policy.cproxy.dev", "/apis/policy.cproxy.dev/v1alpha1", "/apis/a/b"] {
            assert_eq!(discovery(path, false), None, "{path}");
        }
        let version = json!({"groupVersion": "policy.cproxy.dev/v1alpha1", "version": "v1alpha1"});
        let group = discovery("/apis", true).unwrap();
        let expected = json!({"name": "policy.cproxy.dev", "versions": [version], "preferredVersion": version});
        assert_eq!(group.pointer("/groups/1"), Some(&expected));
        let resources = discovery("/apis/policy.cproxy.dev/v1alpha1", true).unwrap();
        let names = |at: &str| resources.pointer(at).cloned();
        assert_eq!(names("/resources/0/name"), Some("podpolicies".into()));
        assert_eq!(names("/resources/1/name"), Some("addressslices".into()));
        assert_eq!(names("/resources/1/namespaced"), Some(false.into()));
    }
}
