//! Pods at an API server, and policies that select them.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
    core::Request,
};
use serde_json::{Value, json};

/// A namespace and a name in it.
pub type Name<'n> = (&'n str, &'n str);

/// Creates a namespace.
///
/// # Errors
/// The API server refuses.
pub async fn create_namespace(client: &Client, name: &str) -> Result<()> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    post(client, "/api/v1/namespaces", &namespace).await
}

/// Creates a NetworkPolicy.
///
/// # Errors
/// The API server refuses.
pub async fn create_policy(client: &Client, (namespace, name): Name<'_>, spec: &Value) -> Result<()> {
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name}, "spec": spec,
    });
    post(client, &format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"), &policy).await
}

/// Creates a Pod that runs on a node and has this address.
///
/// # Errors
/// The API server refuses.
pub async fn create(
    client: &Client,
    (namespace, name): Name<'_>,
    labels: &Value,
    node: &str,
    address: Ipv4Addr,
) -> Result<()> {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
    });
    post(client, &path(namespace), &pod).await?;
    let status = json!({"status": {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
        "hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}],
    }});
    let request = Request::new(path(namespace));
    let request = request.patch_subresource("status", name, &PatchParams::default(), &Patch::Merge(status))?;
    client.request::<Value>(request).await.with_context(|| format!("changing {name}")).map(drop)
}

/// Sets labels of a Pod; `null` removes one. Returns the Pod.
///
/// # Errors
/// The API server refuses.
pub async fn set_labels(client: &Client, (namespace, name): Name<'_>, labels: &Value) -> Result<Value> {
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    let request = Request::new(path(namespace)).patch(name, &PatchParams::default(), &patch)?;
    client.request(request).await.with_context(|| format!("changing {name}"))
}

fn path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods")
}

async fn post(client: &Client, path: &str, object: &Value) -> Result<()> {
    let request = Request::new(path).create(&PostParams::default(), object.to_string().into_bytes())?;
    client.request::<Value>(request).await.with_context(|| format!("creating an object at {path}")).map(drop)
}
