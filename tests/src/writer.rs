//! Fast creation of many objects on the API server: many requests under way, on lasting connections.

use std::thread;

use kube::{
    Client, Error,
    api::{DeleteParams, PostParams},
    core::Request,
};
use serde_json::Value;
use tokio::{runtime::Runtime, task::JoinSet};

use crate::control_plane::ControlPlane;

/// Number of requests under way at a time.
const AT_ONCE: usize = 64;

/// Maximum number of requests for one change.
const ATTEMPTS: usize = 10;

/// Message of the API server when etcd takes longer than seven seconds.
const TIMED_OUT: &str = "etcdserver: request timed out";

/// Codes of the answers that an object is there already, and that it has gone.
const CONFLICT: u16 = 409;
const NOT_FOUND: u16 = 404;

/// A client with all rights, for Services and EndpointSlices.
pub struct Writer {
    runtime: Runtime,
    client: Client,
}

/// A change of an object.
#[derive(Clone, Copy)]
enum Verb {
    Create,
    Replace,
    Delete,
}

impl Writer {
    /// A client of a running control plane.
    pub fn new(control_plane: &ControlPlane<'_>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("cannot start tokio");
        let client = runtime.block_on(control_plane.client());
        Self { runtime, client }
    }

    /// Creates the objects, in no particular order.
    pub fn create(&self, objects: impl IntoIterator<Item = Value>) {
        self.send(Verb::Create, objects);
    }

    /// Replaces existing objects, in no particular order.
    pub fn replace(&self, objects: impl IntoIterator<Item = Value>) {
        self.send(Verb::Replace, objects);
    }

    /// Deletes the objects, in no particular order.
    pub fn delete(&self, objects: impl IntoIterator<Item = Value>) {
        self.send(Verb::Delete, objects);
    }

    /// The API server's version.
    pub fn server_version(&self) -> String {
        let version = self.runtime.block_on(self.client.apiserver_version());
        version.expect("the API server does not tell its version").git_version
    }

    fn send(&self, verb: Verb, objects: impl IntoIterator<Item = Value>) {
        self.runtime.block_on(async {
            let mut sending = JoinSet::new();
            for object in objects {
                if sending.len() >= AT_ONCE {
                    check(sending.join_next().await);
                }
                sending.spawn(send_one(self.client.clone(), verb, object));
            }
            while let Some(sent) = sending.join_next().await {
                check(Some(sent));
            }
        });
    }
}

fn check(sent: Option<Result<(), tokio::task::JoinError>>) {
    if let Some(Err(error)) = sent
        && !thread::panicking()
    {
        panic!("a request to the API server failed: {error}");
    }
}

/// Sends one request, and again while etcd takes too long, as it does on a busy machine. Only the status of the answer
/// is read, since reading all of it would take longer than writing it.
async fn send_one(client: Client, verb: Verb, object: Value) {
    let text = |pointer| object.pointer(pointer).and_then(Value::as_str);
    let resource = match text("/kind") {
        Some("Service") => "/api/v1/namespaces/default/services",
        Some("EndpointSlice") => "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
        _ => panic!("only Services and EndpointSlices are written: {object}"),
    };
    let name = text("/metadata/name").unwrap_or_default();
    let (request, params, body) = (Request::new(resource), PostParams::default(), object.to_string().into_bytes());
    // Code of the answer to a repetition of a request that was carried out.
    let (request, done) = match verb {
        Verb::Create => (request.create(&params, body), Some(CONFLICT)),
        Verb::Replace => (request.replace(name, &params, body), None),
        Verb::Delete => (request.delete(name, &DeleteParams::default()), Some(NOT_FOUND)),
    };
    let request = request.expect("a request of plain parts");
    for attempt in 1.. {
        match client.request_text(request.clone()).await {
            Ok(_) => return,
            Err(Error::Api(status)) if attempt > 1 && Some(status.code) == done => return,
            Err(Error::Api(status)) if attempt < ATTEMPTS && status.message.contains(TIMED_OUT) => {}
            Err(error) => panic!("the API server does not take {name}: {error}"),
        }
    }
}
