//! A sandbox with a control plane, its objects and a relay.

use std::{fs, path::PathBuf, time::Duration};

use cproxy_tests::{
    control_plane::{ControlPlane, role_binding},
    manifest::{self, Endpoint, Service, Slice},
    process::eventually,
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::client::Client;

/// Limit on every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// Address of the relay.
pub(crate) const RELAY: &str = "127.0.0.1:7443";

/// Paths of the collections.
pub(crate) const SERVICES: &str = "/api/v1/services";
pub(crate) const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
pub(crate) const NODES: &str = "/api/v1/nodes";

/// The relay's rights, as they are shipped.
const RIGHTS: &str = include_str!("../../../images/kubernetes/overlays/relay/rbac.yaml");

/// Control plane and relay.
pub(crate) struct World<'s> {
    pub(crate) relay: RunningRelay,
    pub(crate) cluster: Cluster<'s>,
}

/// Control plane with objects.
pub(crate) struct Cluster<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
}

impl<'s> World<'s> {
    /// A relay that needs no credentials of clients.
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        Self::of(Cluster::shared(sandbox))
    }

    pub(crate) fn of(cluster: Cluster<'s>) -> Self {
        let relay = cluster.open_relay().start();
        Self { relay, cluster }
    }

    pub(crate) fn client(&self) -> Client<'s> {
        self.cluster.relay_client()
    }

    /// Waits until the relay has the latest version of each collection.
    pub(crate) fn settle(&self) {
        let (api, relay) = (self.cluster.admin(), self.client());
        for path in [SERVICES, SLICES, NODES] {
            let version = newest_version(&api.json(&format!("{path}?{}", selectors(path))));
            eventually(PATIENCE, format!("{path} at the relay has version {version}"), || {
                let own = number(&relay.json(&format!("{path}?resourceVersion=0"))["metadata"]["resourceVersion"]);
                if own >= version { Ok(()) } else { Err(own) }
            });
        }
    }
}

/// Selectors with which the relay follows a collection.
pub(crate) fn selectors(path: &str) -> &'static str {
    match path {
        SERVICES => {
            "labelSelector=!service.kubernetes.io/service-proxy-name\
             &fieldSelector=spec.clusterIP!%3DNone,spec.type!%3DExternalName"
        }
        SLICES => "labelSelector=!service.kubernetes.io/headless",
        _ => "",
    }
}

/// A version as a number.
pub(crate) fn number(version: &Value) -> u64 {
    version.as_str().and_then(|version| version.parse().ok()).unwrap_or_else(|| panic!("{version} is no version"))
}

/// The newest version of the objects of a list.
fn newest_version(list: &Value) -> u64 {
    let items = list["items"].as_array().unwrap();
    items.iter().map(|item| number(&item["metadata"]["resourceVersion"])).max().unwrap_or_default()
}

impl<'s> Cluster<'s> {
    /// With a control plane that other tests may have used, whose servers go on.
    pub(crate) fn shared(sandbox: &'s Sandbox) -> Self {
        Self::with(sandbox, ControlPlane::shared(sandbox))
    }

    /// With a control plane of its own, and additional flags of its API server.
    pub(crate) fn start(sandbox: &'s Sandbox, flags: &[&str]) -> Self {
        Self::with(sandbox, ControlPlane::start_with(sandbox, flags))
    }

    fn with(sandbox: &'s Sandbox, control_plane: ControlPlane<'s>) -> Self {
        let cluster = Self { sandbox, control_plane };
        cluster.create_all(&objects());
        cluster.control_plane.kubectl(&["apply", "--namespace=kube-system", "-f", "-"], RIGHTS);
        cluster.create(&role_binding("cproxy-relay", "cproxy-relay"));
        cluster
    }

    /// A relay with exactly the rights that it needs, and without a listener.
    pub(crate) fn relay(&self) -> RelayServer<'s> {
        self.relay_at(&self.control_plane.server_url())
    }

    /// The same at another URL of the API server.
    pub(crate) fn relay_at(&self, server: &str) -> RelayServer<'s> {
        let kubeconfig = self.kubeconfig("cproxy-relay", "relay", server);
        // A flag of the test has precedence.
        RelayServer::new(self.sandbox).kubeconfig(kubeconfig).env("CPROXY_RELAY_DRAIN_SECONDS", "0")
    }

    /// A relay at [`RELAY`] that needs no credentials of clients.
    pub(crate) fn open_relay(&self) -> RelayServer<'s> {
        self.relay().listen(RELAY).without_authentication()
    }

    /// A relay at [`RELAY`] with TLS, which knows its clients by their tokens.
    pub(crate) fn tls_relay(&self) -> RelayServer<'s> {
        self.with_tls(self.relay()).listen(RELAY)
    }

    /// Adds a certificate that clients of the API server trust.
    pub(crate) fn with_tls(&self, relay: RelayServer<'s>) -> RelayServer<'s> {
        let [certificate, key] = self.control_plane.serving_files();
        relay.arg("--tls-cert-file").arg(certificate).arg("--tls-private-key-file").arg(key)
    }

    /// A client of the relay at [`RELAY`] over plain HTTP.
    pub(crate) fn relay_client(&self) -> Client<'s> {
        Client::new(self.sandbox, format!("http://{RELAY}"))
    }

    /// A kubeconfig of a user, in a file of its own.
    pub(crate) fn kubeconfig(&self, user: &str, name: &str, server: &str) -> PathBuf {
        let path = self.sandbox.dir().join(format!("{name}.config"));
        fs::copy(self.control_plane.kubeconfig_at(user, server), &path).expect("cannot write into the sandbox");
        path
    }

    /// A client with all rights.
    pub(crate) fn admin(&self) -> Client<'s> {
        self.user("admin")
    }

    pub(crate) fn user(&self, user: &str) -> Client<'s> {
        let client = Client::new(self.sandbox, self.control_plane.server_url());
        client.ca_file(&self.control_plane.ca_file()).token(&self.control_plane.token(user))
    }

    pub(crate) fn create(&self, object: &Value) -> Value {
        self.admin().write("POST", &collection(object), object)
    }

    /// Creates objects one after the other.
    pub(crate) fn create_all(&self, objects: &[Value]) {
        objects.iter().for_each(|object| drop(self.create(object)));
    }

    /// Changes some fields of an object.
    pub(crate) fn patch(&self, path: &str, fields: &Value) -> Value {
        self.admin().write("PATCH", path, fields)
    }

    pub(crate) fn delete(&self, path: &str) {
        self.admin().write("DELETE", path, &json!({}));
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}

/// Path of an object's collection.
fn collection(object: &Value) -> String {
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
    match object["kind"].as_str().unwrap() {
        "Service" => format!("/api/v1/namespaces/{namespace}/services"),
        "EndpointSlice" => format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"),
        "Pod" => format!("/api/v1/namespaces/{namespace}/pods"),
        "NetworkPolicy" => format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"),
        "Node" => "/api/v1/nodes".to_owned(),
        "Namespace" => "/api/v1/namespaces".to_owned(),
        "ServiceAccount" => format!("/api/v1/namespaces/{namespace}/serviceaccounts"),
        "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles".to_owned(),
        "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned(),
        other => panic!("no test creates a {other}"),
    }
}

/// A labelled Service of a namespace.
pub(crate) fn service(namespace: &str, name: &str) -> Value {
    Service::new(name).namespace(namespace).label("app", name).tcp("http", 80, 8080).into()
}

/// Objects of every kind, with fields that the relay leaves out, and some that it does not have at all.
fn objects() -> Vec<Value> {
    let mut full: Value = Service::new("full")
        .dual_stack()
        .label("app", "full")
        .label("tier", "5")
        .tcp("http", 80, 8080)
        .udp("dns", 53, 53)
        .client_ip_affinity(60)
        .spec("externalIPs", json!(["198.51.100.1"]))
        .spec("type", json!("LoadBalancer"))
        .into();
    full["metadata"]["annotations"] = json!({"note": "ä\u{1}\"<>&", "service.kubernetes.io/topology-mode": "Auto"});
    full["metadata"]["finalizers"] = json!(["tests.example/keep"]);
    let mut slice: Value = Slice::v4("full")
        .tcp("http", 8080)
        .udp("dns", 53)
        .endpoint(Endpoint::ready("10.244.0.1").node("node-1").for_zone("a"))
        .endpoint(Endpoint::terminating("10.244.0.2", true))
        .into();
    slice["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Service", "name": "full", "uid": "00000000-0000-0000-0000-000000000000"}]);
    let namespace = |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    vec![
        namespace("team"),
        namespace("team-a"),
        full,
        slice,
        service("default", "web"),
        Slice::v4("web").tcp("http", 8080).ready(["10.244.0.3"]).into(),
        service("team", "web"),
        Slice::v6("web").namespace("team").tcp("http", 8080).ready(["fd00:10:244::3"]).into(),
        service("team-a", "web"),
        service("kube-system", "kube-dns"),
        Service::new("headless").headless().tcp("http", 80, 80).into(),
        manifest::node("node-1", "a"),
        manifest::node("node-2", "b"),
    ]
}
