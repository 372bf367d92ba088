//! A control plane, and requests in a chosen encoding.

use cproxy_tests::{control_plane::ControlPlane, sandbox::Sandbox};
use cproxy_transcode::Kind;
use http::{
    Method, Request,
    header::{ACCEPT, CONTENT_TYPE},
};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const PROTOBUF_WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";

pub(crate) struct Cluster<'s> {
    // Dropped before the sandbox.
    control_plane: ControlPlane<'s>,
    runtime: Runtime,
    client: Client,
}

impl<'s> Cluster<'s> {
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        let control_plane = ControlPlane::shared(sandbox);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(control_plane.client());
        Self { control_plane, runtime, client }
    }

    /// Creates objects. A status is written after its object, as the API server wants it.
    pub(crate) fn create(&self, kind: Kind, objects: impl IntoIterator<Item = Value>) {
        for object in objects {
            let created = self.ask(Method::POST, path(kind), JSON, &object.to_string());
            if let Some(status) = object.get("status") {
                let status_path = format!("{}/status", path_of(kind, &serde_json::from_slice(&created).unwrap()));
                self.ask(Method::PATCH, &status_path, MERGE_PATCH, &json!({"status": status}).to_string());
            }
        }
    }

    pub(crate) fn delete(&self, kind: Kind, name: &str) {
        self.ask(Method::DELETE, &format!("{}/{name}", path(kind)), JSON, "");
    }

    /// Objects of a kind, in the API server's JSON.
    pub(crate) fn list(&self, kind: Kind) -> Vec<Value> {
        let mut list = serde_json::from_str::<Value>(&self.get_json(path(kind))).unwrap();
        let items = list.get_mut("items").and_then(Value::as_array_mut);
        items.map(std::mem::take).expect("a list has items")
    }

    pub(crate) fn get_json(&self, path: &str) -> String {
        String::from_utf8(self.ask(Method::GET, path, JSON, "")).unwrap()
    }

    pub(crate) fn get_protobuf(&self, path: &str) -> Vec<u8> {
        self.ask(Method::GET, path, PROTOBUF, "")
    }

    pub(crate) fn get_watch(&self, path: &str) -> Vec<u8> {
        self.ask(Method::GET, path, PROTOBUF_WATCH, "")
    }

    /// Sends a request. `encoding` is that of the body, or that of the answer to a GET.
    fn ask(&self, method: Method, path: &str, encoding: &str, body: &str) -> Vec<u8> {
        let accepted = if method == Method::GET { encoding } else { JSON };
        let request = Request::builder().method(&method).uri(path).header(ACCEPT, accepted);
        let request = request.header(CONTENT_TYPE, encoding).body(Body::from(body.as_bytes().to_vec())).unwrap();
        let (code, answer) = self.runtime.block_on(async {
            let answer = self.client.send(request).await.expect("the API server answers");
            (answer.status(), answer.into_body().collect_bytes().await.expect("the answer is whole"))
        });
        assert!(code.is_success(), "{method} {path} {body}: {code}: {}", String::from_utf8_lossy(&answer));
        answer.to_vec()
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}

/// Path of the objects of a kind, in the namespace `default`.
pub(crate) fn path(kind: Kind) -> &'static str {
    match kind {
        Kind::Service => "/api/v1/namespaces/default/services",
        Kind::EndpointSlice => "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
        Kind::Node => "/api/v1/nodes",
    }
}

pub(crate) fn path_of(kind: Kind, object: &Value) -> String {
    let name = object.pointer("/metadata/name").and_then(Value::as_str);
    format!("{}/{}", path(kind), name.expect("every object has a name"))
}
