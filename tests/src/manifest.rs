//! Kubernetes objects in short form, for the manifest directory or for the API server.

#![expect(clippy::indexing_slicing, reason = "a JSON object makes the field that is assigned to; a read gives null")]

use std::{
    fmt::Display,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

/// A v1 Service.
#[derive(Clone, Debug)]
pub struct Service {
    object: Value,
}

impl Service {
    /// A ClusterIP Service in the namespace `default`, without addresses and ports.
    pub fn new(name: &str) -> Self {
        Self {
            object: json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"type": "ClusterIP", "ports": []},
            }),
        }
    }

    /// Sets another namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.object["metadata"]["namespace"] = json!(namespace);
        self
    }

    /// Sets fixed ClusterIPs, one or one of each family; the families follow from them.
    #[must_use]
    pub fn cluster_ips<A: Display>(self, addresses: impl IntoIterator<Item = A>) -> Self {
        let addresses = addresses.into_iter().map(|address| address.to_string()).collect::<Vec<_>>();
        let families = addresses.iter().map(|address| if address.contains(':') { "IPv6" } else { "IPv4" });
        let policy = if addresses.len() > 1 { "RequireDualStack" } else { "SingleStack" };
        self.spec("ipFamilies", json!(families.collect::<Vec<_>>()))
            .spec("ipFamilyPolicy", json!(policy))
            .spec("clusterIP", json!(addresses.first()))
            .spec("clusterIPs", json!(addresses))
    }

    /// Makes it headless, without a ClusterIP.
    #[must_use]
    pub fn headless(self) -> Self {
        self.spec("clusterIP", json!("None")).spec("clusterIPs", json!(["None"]))
    }

    /// Requests one ClusterIP of each family, which the API server chooses.
    #[must_use]
    pub fn dual_stack(self) -> Self {
        self.spec("ipFamilyPolicy", json!("RequireDualStack"))
    }

    /// Adds a TCP port. `target` is the port of the pods.
    #[must_use]
    pub fn tcp(self, name: &str, port: u16, target: u16) -> Self {
        self.port(name, "TCP", port, target)
    }

    /// Adds a UDP port. `target` is the port of the pods.
    #[must_use]
    pub fn udp(self, name: &str, port: u16, target: u16) -> Self {
        self.port(name, "UDP", port, target)
    }

    /// Adds a port of any protocol.
    #[must_use]
    pub fn port(mut self, name: &str, protocol: &str, port: u16, target: u16) -> Self {
        let port = json!({"name": name, "protocol": protocol, "port": port, "targetPort": target});
        push(&mut self.object["spec"]["ports"], port);
        self
    }

    /// Sets the node port of the last port.
    ///
    /// # Panics
    /// When there is no port yet.
    #[must_use]
    pub fn node_port(mut self, number: u16) -> Self {
        self.object["spec"]["type"] = json!("NodePort");
        let ports = self.object["spec"]["ports"].as_array_mut().expect("a Service has ports");
        ports.last_mut().expect("a port comes before its node port")["nodePort"] = json!(number);
        self
    }

    /// Sets session affinity by client address for `seconds`.
    #[must_use]
    pub fn client_ip_affinity(self, seconds: u32) -> Self {
        self.spec("sessionAffinity", json!("ClientIP"))
            .spec("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": seconds}}))
    }

    /// Sets any field of the spec.
    #[must_use]
    pub fn spec(mut self, field: &str, value: Value) -> Self {
        self.object["spec"][field] = value;
        self
    }

    /// Sets a label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.object["metadata"]["labels"][name] = json!(value);
        self
    }

    /// Sets the time at which it was created, such as `2020-01-01T00:00:00Z`.
    #[must_use]
    pub fn created_at(mut self, time: &str) -> Self {
        self.object["metadata"]["creationTimestamp"] = json!(time);
        self
    }

    /// Adds an address to the status, as a load balancer's controller would.
    #[must_use]
    pub fn load_balancer_ip(mut self, address: impl Display) -> Self {
        self.object["spec"]["type"] = json!("LoadBalancer");
        push(&mut self.object["status"]["loadBalancer"]["ingress"], json!({"ip": address.to_string()}));
        self
    }
}

/// A Service with TCP port 80 at one IPv4 address, and its slice with ready endpoints that listen on port 8080.
pub fn http_service<A: Display>(name: &str, vip: impl Display, pods: impl IntoIterator<Item = A>) -> [Value; 2] {
    let service = Service::new(name).cluster_ips([vip]).tcp("http", 80, 8080);
    [service.into(), Slice::v4(name).tcp("http", 8080).ready(pods).into()]
}

/// A v1 Node in a zone.
pub fn node(name: &str, zone: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
    })
}

/// The status of a Node with these addresses.
pub fn node_status<A: Display>(addresses: impl IntoIterator<Item = A>) -> Value {
    let address = |address: A| json!({"type": "InternalIP", "address": address.to_string()});
    json!({"status": {"addresses": addresses.into_iter().map(address).collect::<Vec<_>>()}})
}

/// A discovery.k8s.io/v1 EndpointSlice.
#[derive(Clone, Debug)]
pub struct Slice {
    object: Value,
}

impl Slice {
    /// An empty slice for IPv4 addresses that belongs to the Service `service` in the namespace `default`.
    pub fn v4(service: &str) -> Self {
        Self::new(&format!("{service}-ipv4"), service, "IPv4")
    }

    /// An empty slice for IPv6 addresses that belongs to the Service `service` in the namespace `default`.
    pub fn v6(service: &str) -> Self {
        Self::new(&format!("{service}-ipv6"), service, "IPv6")
    }

    /// An empty slice of any address type.
    pub fn new(name: &str, service: &str, address_type: &str) -> Self {
        Self {
            object: json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "labels": {"kubernetes.io/service-name": service},
                },
                "addressType": address_type,
                "ports": [],
                "endpoints": [],
            }),
        }
    }

    /// Sets another name, when a Service has several slices of one family.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.object["metadata"]["name"] = json!(name);
        self
    }

    /// Sets another namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.object["metadata"]["namespace"] = json!(namespace);
        self
    }

    /// Adds a TCP port of the pods. `name` is that of the Service's port.
    #[must_use]
    pub fn tcp(self, name: &str, port: u16) -> Self {
        self.port(name, "TCP", port)
    }

    /// Adds a UDP port of the pods. `name` is that of the Service's port.
    #[must_use]
    pub fn udp(self, name: &str, port: u16) -> Self {
        self.port(name, "UDP", port)
    }

    /// Adds a port of any protocol.
    #[must_use]
    pub fn port(mut self, name: &str, protocol: &str, port: u16) -> Self {
        push(&mut self.object["ports"], json!({"name": name, "protocol": protocol, "port": port}));
        self
    }

    /// Adds an endpoint.
    #[must_use]
    pub fn endpoint(mut self, endpoint: impl Into<Endpoint>) -> Self {
        push(&mut self.object["endpoints"], endpoint.into().object);
        self
    }

    /// Adds endpoints, all ready.
    #[must_use]
    pub fn ready<A: Display>(self, addresses: impl IntoIterator<Item = A>) -> Self {
        addresses.into_iter().fold(self, |slice, address| slice.endpoint(Endpoint::ready(address)))
    }
}

/// One endpoint of a [`Slice`].
#[derive(Clone, Debug)]
pub struct Endpoint {
    object: Value,
}

impl Endpoint {
    /// A ready and serving endpoint.
    pub fn ready(address: impl Display) -> Self {
        Self::with(address, true, true, false)
    }

    /// An endpoint that is neither ready nor serving.
    pub fn not_ready(address: impl Display) -> Self {
        Self::with(address, false, false, false)
    }

    /// A terminating endpoint; `serving` says whether it still answers.
    pub fn terminating(address: impl Display, serving: bool) -> Self {
        Self::with(address, false, serving, true)
    }

    /// An endpoint with any combination of conditions.
    pub fn with(address: impl Display, ready: bool, serving: bool, terminating: bool) -> Self {
        Self {
            object: json!({
                "addresses": [address.to_string()],
                "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
            }),
        }
    }

    /// Sets the node it runs on.
    #[must_use]
    pub fn node(self, name: &str) -> Self {
        self.field("nodeName", json!(name))
    }

    /// Sets a hint for clients in this zone.
    #[must_use]
    pub fn for_zone(self, name: &str) -> Self {
        self.field("hints", json!({"forZones": [{"name": name}]}))
    }

    /// Sets any field.
    #[must_use]
    pub fn field(mut self, name: &str, value: Value) -> Self {
        self.object[name] = value;
        self
    }
}

impl From<Service> for Value {
    fn from(service: Service) -> Self {
        service.object
    }
}

impl From<Slice> for Value {
    fn from(slice: Slice) -> Self {
        slice.object
    }
}

/// A List of `objects` as one JSON document, which is also YAML, for a file or for `kubectl apply -f -`.
pub fn list(objects: impl IntoIterator<Item = Value>) -> String {
    let items = objects.into_iter().collect::<Vec<_>>();
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

/// Writes `objects` to `directory/name` as [`list`] does.
pub fn write(directory: &Path, name: &str, objects: impl IntoIterator<Item = Value>) -> PathBuf {
    write_text(directory, name, &list(objects))
}

/// Replaces `directory/name` by `text` in one step: a reader sees the old content or the new one.
///
/// # Panics
/// When the directory cannot be written to.
pub fn write_text(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    let hidden = directory.join(format!(".{name}.new"));
    fs::write(&hidden, text)
        .and_then(|()| fs::rename(&hidden, &path))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    path
}

/// Writes a kubeconfig for the API server at `server`, with a token, to `directory/kubeconfig`.
pub fn write_kubeconfig(directory: &Path, server: &str) -> PathBuf {
    let config = kubeconfig(json!({"server": server}), json!({"token": "t"}));
    write_text(directory, "kubeconfig", &config.to_string())
}

/// A kubeconfig with these fields of its cluster and of its user.
pub fn kubeconfig(cluster: Value, user: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })
}

/// Appends to a JSON array, which is created if it is missing.
fn push(array: &mut Value, item: Value) {
    match array {
        Value::Array(items) => items.push(item),
        other => *other = Value::Array(vec![item]),
    }
}
