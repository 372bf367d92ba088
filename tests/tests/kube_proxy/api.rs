//! The objects on the API server.

use std::fmt;

use cproxy_tests::control_plane::{ControlPlane, NODE};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind, TypeMeta},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// All kinds that the proxies read.
const KINDS: [&str; 3] = ["Service", "EndpointSlice", "Node"];

pub(crate) struct Objects {
    runtime: Runtime,
    client: Client,
}

/// The API server's message about an object that it refuses.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Objects {
    pub(crate) fn new(control_plane: &ControlPlane<'_>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(control_plane.client());
        Self { runtime, client }
    }

    pub(crate) fn create(&self, object: &Value) -> Result<(), Refused> {
        let typed = serde_json::from_value(object.clone()).unwrap();
        let created = self.runtime.block_on(self.api(object).create(&PostParams::default(), &typed));
        created.map(drop).or_else(refuse(object))
    }

    pub(crate) fn replace(&self, object: &Value) -> Result<(), Refused> {
        let (typed, params) = (serde_json::from_value(object.clone()).unwrap(), PostParams::default());
        let replaced = self.runtime.block_on(self.api(object).replace(name(object), &params, &typed));
        replaced.map(drop).or_else(refuse(object))
    }

    pub(crate) fn delete(&self, object: &Value) {
        let deleted = self.runtime.block_on(self.api(object).delete(name(object), &DeleteParams::default()));
        deleted.unwrap_or_else(|error| panic!("cannot delete {object}: {error}"));
    }

    /// Replaces the ingresses of a Service's load balancer.
    pub(crate) fn set_ingresses(&self, service: &Value, ingresses: &Value) {
        let patch = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": ingresses}}}));
        let (api, params) = (self.api(service), PatchParams::default());
        let patched = self.runtime.block_on(api.patch_status(name(service), &params, &patch));
        patched.unwrap_or_else(|error| panic!("cannot give {service} {ingresses}: {error}"));
    }

    /// Moves the node to another zone, or to none.
    pub(crate) fn set_zone(&self, zone: Option<&str>) {
        let node = json!({"kind": "Node", "metadata": {"name": NODE}});
        let patch = Patch::Merge(json!({"metadata": {"labels": {"topology.kubernetes.io/zone": zone}}}));
        let patched = self.runtime.block_on(self.api(&node).patch(NODE, &PatchParams::default(), &patch));
        patched.unwrap_or_else(|error| panic!("cannot move the node to {zone:?}: {error}"));
    }

    /// All objects that the proxies read.
    pub(crate) fn list(&self) -> Vec<Value> {
        KINDS.iter().flat_map(|kind| self.list_kind(kind)).collect()
    }

    fn list_kind(&self, kind: &str) -> Vec<Value> {
        let api = Api::<DynamicObject>::all_with(self.client.clone(), &resource(kind));
        let list = self.runtime.block_on(api.list(&ListParams::default())).unwrap();
        // A list states the type of its items only once.
        let types = TypeMeta { api_version: resource(kind).api_version, kind: kind.to_owned() };
        let complete = |mut object: DynamicObject| {
            object.types = Some(types.clone());
            object.metadata.managed_fields = None;
            serde_json::to_value(object).unwrap()
        };
        list.items.into_iter().map(complete).collect()
    }

    fn api(&self, object: &Value) -> Api<DynamicObject> {
        let resource = resource(kind(object));
        match object["metadata"]["namespace"].as_str() {
            None => Api::all_with(self.client.clone(), &resource),
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
        }
    }
}

fn resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&match kind {
        "EndpointSlice" => GroupVersionKind::gvk("discovery.k8s.io", "v1", kind),
        _ => GroupVersionKind::gvk("", "v1", kind),
    })
}

/// Turns an error about the object into [`Refused`]; any other error ends the test.
fn refuse(object: &Value) -> impl FnOnce(kube::Error) -> Result<(), Refused> {
    move |error| match error {
        kube::Error::Api(status) if status.code == 422 => Err(Refused(status.message)),
        error => panic!("the API server does not take {object}: {error}"),
    }
}

pub(crate) fn kind(object: &Value) -> &str {
    object["kind"].as_str().unwrap()
}

pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

/// Name in the form namespace/name.
pub(crate) fn full_name(object: &Value) -> String {
    format!("{}/{}", object["metadata"]["namespace"].as_str().unwrap(), name(object))
}

/// Name, as namespace/name, of the Service in a slice's label.
pub(crate) fn service_of(slice: &Value) -> String {
    let service = slice["metadata"]["labels"]["kubernetes.io/service-name"].as_str().unwrap_or_default();
    format!("{}/{service}", slice["metadata"]["namespace"].as_str().unwrap())
}
