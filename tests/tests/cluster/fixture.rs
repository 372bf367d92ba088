//! A sandbox with a control plane and pods, with ways to change objects and to wait until the agent has seen the
//! change.

use std::{
    cell::Cell,
    io,
    time::{Duration, Instant},
};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::ControlPlane,
    manifest::{Service, Slice, http_service},
    process::{Agent, RunningAgent, eventually},
    sandbox::Sandbox,
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::rows::{self, Pods, Row};

/// Limit on every wait, longer than any takes with the agent's pauses between attempts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// Row of `default/kubernetes`, which the API server creates itself.
pub(crate) const KUBERNETES: &str = "TCP 10.96.0.1:443 192.0.2.1:6443";

/// ClusterIP of the marker, and its pod, which has no server.
const MARKER: &str = "10.96.255.1";
const MARKER_POD: &str = "10.244.255.1";

/// A control plane with pods that answer.
pub(crate) struct Cluster<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    pods: Pods<'s>,
    runtime: Runtime,
    client: Client,
    marker_port: Cell<u16>,
}

impl<'s> Cluster<'s> {
    /// With a control plane that other tests may have used, whose servers go on.
    pub(crate) fn shared(sandbox: &'s Sandbox) -> Self {
        Self::with(sandbox, ControlPlane::shared(sandbox))
    }

    /// With a control plane of its own.
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, &[])
    }

    /// Starts with additional flags of kube-apiserver.
    pub(crate) fn start_with(sandbox: &'s Sandbox, flags: &[&str]) -> Self {
        Self::with(sandbox, ControlPlane::start_with(sandbox, flags))
    }

    /// Starts with an API server that records its requests.
    pub(crate) fn start_audited(sandbox: &'s Sandbox) -> (Self, AuditLog) {
        let audit = AuditLog::create(sandbox, "api");
        let [policy, log] = audit.flags();
        (Self::start_with(sandbox, &[&policy, &log]), audit)
    }

    /// Starts with the oldest supported API server.
    pub(crate) fn start_oldest(sandbox: &'s Sandbox) -> Self {
        Self::with(sandbox, ControlPlane::start_oldest(sandbox))
    }

    fn with(sandbox: &'s Sandbox, control_plane: ControlPlane<'s>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(control_plane.client());
        Self { sandbox, control_plane, pods: Pods::new(sandbox), runtime, client, marker_port: Cell::new(10_000) }
    }

    /// Starts the API server again, with all objects.
    pub(crate) fn start_api_server(&mut self) {
        self.control_plane.start_api_server();
        self.use_server(&self.control_plane.server_url());
    }

    /// Changes objects at this API server from now on.
    pub(crate) fn use_server(&mut self, url: &str) {
        self.client = self.runtime.block_on(self.control_plane.client_at("admin", url));
    }

    /// Creates or replaces the object.
    pub(crate) fn apply(&self, object: impl Into<Value>) {
        let object = object.into();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let params = PatchParams::apply("cluster-test").force();
        let applied = self.runtime.block_on(self.api(&object["kind"]).patch(&name, &params, &Patch::Apply(&object)));
        applied.unwrap_or_else(|error| panic!("cannot apply {object}: {error}"));
    }

    /// Creates or replaces a Service with one port, and its slice.
    pub(crate) fn apply_service(&self, name: &str, vip: &str, pods: &[&str]) {
        http_service(name, vip, pods).into_iter().for_each(|object| self.apply(object));
    }

    /// Changes some fields of an object; null removes one.
    pub(crate) fn patch(&self, kind: &str, name: &str, fields: Value) {
        let patch = Patch::Merge(&fields);
        let patched = self.runtime.block_on(self.api(&kind.into()).patch(name, &PatchParams::default(), &patch));
        patched.unwrap_or_else(|error| panic!("cannot patch {kind} {name} with {fields}: {error}"));
    }

    /// Changes some fields of an object's status, as the object's own controller would.
    pub(crate) fn patch_status(&self, kind: &str, name: &str, fields: Value) {
        let patch = Patch::Merge(&fields);
        let patched = self.runtime.block_on(self.api(&kind.into()).patch_status(name, &PatchParams::default(), &patch));
        patched.unwrap_or_else(|error| panic!("cannot patch the status of {kind} {name} with {fields}: {error}"));
    }

    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let deleted = self.runtime.block_on(self.api(&kind.into()).delete(name, &DeleteParams::default()));
        deleted.unwrap_or_else(|error| panic!("cannot delete {kind} {name}: {error}"));
    }

    /// An agent with the rights that are documented for it.
    pub(crate) fn agent(&self) -> Agent<'s> {
        Agent::new(self.sandbox).kubeconfig(self.control_plane.agent_kubeconfig())
    }

    /// Starts the agent and waits until it is ready.
    pub(crate) fn start_agent(&self) -> RunningAgent {
        self.agent().start()
    }

    /// Waits until the agent has seen everything so far. The table must then have exactly these rows beside that of
    /// `default/kubernetes`, and connections must confirm them.
    pub(crate) fn expect(&self, rows: &[&str]) {
        self.mark();
        self.assert_table(rows);
    }

    /// Like [`Cluster::expect`], without an agent or an API server that could change anything.
    pub(crate) fn assert_table(&self, rows: &[&str]) {
        let expected = [KUBERNETES].iter().chain(rows).map(|row| Row::parse(row).to_string()).collect::<Vec<_>>();
        let kernel = rows::in_kernel(self.sandbox);
        let kernel = kernel.iter().filter(|row| row.frontend.ip().to_string() != MARKER).map(Row::to_string);
        let kernel = kernel.collect::<Vec<_>>();
        assert_eq!(kernel, expected, "left is what the kernel holds, right is what it should");
        self.assert_reachable(rows);
    }

    /// Waits for these rows, for changes that no marker can follow. Returns the time until the kernel had them.
    pub(crate) fn expect_soon(&self, rows: &[&str]) -> Duration {
        let start = Instant::now();
        let expected = [KUBERNETES].iter().chain(rows).map(|row| Row::parse(row)).collect::<Vec<_>>();
        eventually(PATIENCE, format!("the table is {rows:#?}"), || {
            let kernel = rows::in_kernel(self.sandbox);
            if kernel == expected { Ok(()) } else { Err(format!("{kernel:#?}")) }
        });
        let elapsed = start.elapsed();
        self.assert_table(rows);
        elapsed
    }

    /// Checks that connections confirm the rows.
    pub(crate) fn assert_reachable(&self, rows: &[&str]) {
        rows.iter().for_each(|row| self.pods.check(&Row::parse(row)));
    }

    /// Changes a marker's Service and slice and waits for both in the kernel, since each watch delivers in order.
    fn mark(&self) {
        let port = self.marker_port.get() + 1;
        self.marker_port.set(port);
        self.apply(Service::new("marker").cluster_ips([MARKER]).tcp("", port, port));
        self.apply(Slice::v4("marker").tcp("", port).ready([MARKER_POD]));
        let marker = format!("TCP {MARKER}:{port} {MARKER_POD}:{port}");
        eventually(PATIENCE, "the marker is in the kernel", || {
            let rows = rows::in_kernel(self.sandbox).iter().map(Row::to_string).collect::<Vec<_>>();
            if rows.contains(&marker) { Ok(()) } else { Err(format!("{marker:?} is not in {rows:#?}")) }
        });
    }

    fn api(&self, kind: &Value) -> Api<DynamicObject> {
        let kind = match kind.as_str().unwrap() {
            "Service" => GroupVersionKind::gvk("", "v1", "Service"),
            "EndpointSlice" => GroupVersionKind::gvk("discovery.k8s.io", "v1", "EndpointSlice"),
            "Node" => {
                let node = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node"));
                return Api::all_with(self.client.clone(), &node);
            }
            other => panic!("no test changes a {other}"),
        };
        Api::namespaced_with(self.client.clone(), "default", &ApiResource::from_gvk(&kind))
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}

/// Checks that no translation of `address` exists, without which there is no route.
pub(crate) fn assert_no_service(protocol: &str, address: &str) {
    let error = rows::ask(protocol, address.parse().unwrap()).expect_err("there is no way to this address");
    assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable, "{address}: {error}");
}
