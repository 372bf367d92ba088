//! Pods of a large cluster, of 9 KB each in protobuf.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::{Value, json};

/// Number of workloads that the Pods are of.
const WORKLOADS: usize = 2_000;
/// Number of nodes that they are on.
const NODES: usize = 1_000;
/// Number of variables of each container.
const VARIABLES: usize = 15;

/// Name of a Pod.
pub(crate) fn name(pod: usize) -> String {
    format!("{}-7d9c5b6f4c-{pod:06}", workload(pod))
}

/// A Pod as its controller and the scheduler make it.
pub(crate) fn pod(pod: usize) -> Value {
    let workload = workload(pod);
    let (team, hash) = (format!("team-{:03}", pod % WORKLOADS / 20), digest(&workload));
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name(pod),
            "namespace": "default",
            "labels": {
                "app.kubernetes.io/name": workload, "app.kubernetes.io/instance": format!("{workload}-production"),
                "app.kubernetes.io/managed-by": "Helm", "pod-template-hash": "7d9c5b6f4c", "team": team,
            },
            "annotations": {
                "checksum/config": hash, "prometheus.io/scrape": "true", "prometheus.io/port": "9090",
                "kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z",
            },
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{workload}-7d9c5b6f4c"),
                "uid": "0d5c2f4e-8a39-4bd1-9f0e-6a7b8c9d0e1f", "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "nodeName": format!("node-{:04}", pod % NODES),
            "containers": [container(&workload, "server", 8080), container(&workload, "sidecar", 9090)],
            "volumes": [
                {"name": "config", "configMap": {"name": format!("{workload}-config")}},
                {"name": "secret", "secret": {"secretName": format!("{workload}-secret")}},
                {"name": "cache", "emptyDir": {}},
            ],
        },
    })
}

/// The `status` of a Pod after a number of changes, as a part of the Pod.
pub(crate) fn status(pod: usize, changes: usize) -> Value {
    let (node, changed) = (pod % NODES, format!("2026-01-01T{:02}:{:02}:00Z", changes / 60 % 24, changes % 60));
    let address = format!("10.{}.{}.{}", pod >> 16 & 255, pod >> 8 & 255, pod & 255);
    let host = format!("172.16.{}.{}", node >> 8, node & 255);
    let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": changed});
    let kinds = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"];
    let container = |name: &str| {
        json!({
            "name": name, "ready": true, "started": true, "restartCount": changes,
            "image": format!("registry.test/{}/{name}:1.2.3", workload(pod)),
            "imageID": format!("registry.test/{0}/{name}@sha256:{1}", workload(pod), digest(&workload(pod))),
            "containerID": format!("containerd://{}", digest(&format!("{pod} {name}"))),
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        })
    };
    json!({"status": {
        "phase": "Running", "startTime": "2026-01-01T00:00:00Z", "podIP": address, "podIPs": [{"ip": address}],
        "hostIP": host, "hostIPs": [{"ip": host}], "conditions": kinds.map(condition),
        "containerStatuses": [container("server"), container("sidecar")],
    }})
}

/// 64 hexadecimal digits that do not compress.
fn digest(of: &str) -> String {
    let number = |part: u8| {
        let mut hasher = DefaultHasher::new();
        (part, of).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    (0..4).map(number).collect()
}

fn workload(pod: usize) -> String {
    format!("workload-{:04}", pod % WORKLOADS)
}

fn container(workload: &str, name: &str, port: u16) -> Value {
    let value = |number| digest(&format!("{workload} {name} {number}")).split_off(40);
    let variable = |number| json!({"name": format!("SETTING_{number}"), "value": value(number)});
    let probe = json!({"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10});
    json!({
        "name": name,
        "image": format!("registry.test/{workload}/{name}:1.2.3"),
        "ports": [{"name": if port == 8080 { "http" } else { "metrics" }, "containerPort": port}],
        "env": (0..VARIABLES).map(variable).collect::<Vec<_>>(),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/config"}, {"name": "secret", "mountPath": "/etc/secret"},
            {"name": "cache", "mountPath": "/var/cache"},
        ],
        "livenessProbe": probe, "readinessProbe": probe,
    })
}
