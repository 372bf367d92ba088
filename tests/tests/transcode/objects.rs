//! Objects in which every field has a value in one of them, and none of its own in another.

use serde_json::{Value, json};

/// Name of an object that is deleted, which its finalizer delays.
pub(crate) const DELETED: &str = "deleted";

/// Text with all characters that an encoder may treat in its own way.
const TEXT: &str =
    "<b>\"&'\\/</b>\u{0}\u{1}\u{8}\t\n\u{b}\u{c}\r\u{1f}\u{7f}\u{80} ä€\u{2028}\u{2029}\u{feff}\u{fffd}😀";

const TIME: &str = "2026-02-28T23:59:59Z";

/// Metadata in which all that a client may set is set.
fn rich(name: &str) -> Value {
    json!({
        "name": name,
        "labels": {"b": "", "a/b": "1", "B": "2", "kubernetes.io/service-name": "full"},
        "annotations": {"text": TEXT, "empty": "", "a.b/c": "{\"json\": [1, 2]}", "A": "x"},
        "finalizers": ["example.com/a", "example.com/b"],
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "node<1>", "uid": "a<b>&c \"d\"", "controller": true},
            {"apiVersion": "a/v1", "kind": "B", "name": "b", "uid": "2", "controller": false,
                "blockOwnerDeletion": true},
            {"apiVersion": "a/v1", "kind": "C", "name": "c", "uid": "3"},
        ],
    })
}

fn deleted() -> Value {
    json!({"name": DELETED, "finalizers": ["example.com/a"]})
}

pub(crate) fn services() -> Vec<Value> {
    let port = json!({"port": 80});
    vec![
        full_service(),
        balancer(),
        json!({"metadata": deleted(), "spec": {"ports": [port]}}),
        json!({"metadata": {"generateName": "generated-"}, "spec": {"ports": [port]}}),
        json!({"metadata": {"name": "external"}, "spec": {"type": "ExternalName", "externalName": "example.com"}}),
        json!({"metadata": {"name": "headless"}, "spec": {"clusterIP": "None", "selector": {}, "externalIPs": []}}),
        json!({"metadata": {"name": "node-port"}, "spec": {
            "type": "NodePort",
            "ports": [{"port": 443, "nodePort": 30443, "targetPort": "https"}],
            "externalTrafficPolicy": "Local",
            "ipFamilies": ["IPv6"],
        }}),
        json!({"metadata": {"name": "pending"}, "spec": {"type": "LoadBalancer", "ports": [port]}}),
    ]
}

fn full_service() -> Value {
    json!({"metadata": rich("full"), "spec": {
        "type": "ClusterIP",
        "clusterIP": "10.96.7.7",
        "clusterIPs": ["10.96.7.7", "fd00:10:96::77"],
        "ipFamilies": ["IPv4", "IPv6"],
        "ipFamilyPolicy": "RequireDualStack",
        "selector": {"app": "web", "a": ""},
        "ports": [
            {"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"},
            {"name": "dns", "port": 53, "targetPort": "dns", "protocol": "UDP"},
            {"name": "sctp", "port": 65535, "protocol": "SCTP"},
        ],
        "externalIPs": ["192.0.2.77", "2001:db8::77"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 77}},
        "publishNotReadyAddresses": true,
        "internalTrafficPolicy": "Local",
        "trafficDistribution": "PreferSameNode",
    }})
}

fn balancer() -> Value {
    let ports = json!([{"port": 80, "protocol": "TCP", "error": "example.com/E"}, {"port": 0, "protocol": "UDP"}]);
    json!({
        "metadata": {"name": "balancer"},
        "spec": {
            "type": "LoadBalancer",
            "ports": [{"port": 80}],
            "loadBalancerIP": "198.51.100.7",
            "loadBalancerSourceRanges": ["198.51.100.0/24", "203.0.113.0/24"],
            "loadBalancerClass": "example.com/class",
            "allocateLoadBalancerNodePorts": false,
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 30999,
        },
        "status": {
            "loadBalancer": {"ingress": [
                {"ip": "198.51.100.7", "ipMode": "Proxy", "ports": ports},
                {"hostname": "lb.example.com"},
            ]},
            "conditions": [
                {"type": "Ready", "status": "True", "observedGeneration": 7, "lastTransitionTime": TIME, "reason": "Ok",
                    "message": TEXT},
                {"type": "Other", "status": "Unknown", "lastTransitionTime": "1969-12-31T23:59:59+01:00",
                    "reason": "Why", "message": ""},
            ],
        },
    })
}

pub(crate) fn endpoint_slices() -> Vec<Value> {
    let empty = json!({"metadata": {"name": "empty"}, "addressType": "IPv4", "endpoints": [], "ports": []});
    vec![
        full_slice(),
        empty,
        json!({"metadata": deleted(), "addressType": "IPv4", "endpoints": null, "ports": null}),
        json!({"metadata": {"generateName": "generated-"}, "addressType": "IPv6",
            "endpoints": [{"addresses": ["2001:db8::1"]}, {"addresses": ["2001:db8::2"], "conditions": {}}],
            "ports": [{}]}),
        json!({"metadata": {"name": "names"}, "addressType": "FQDN",
            "endpoints": [{"addresses": ["a.example.com", "b.example.com"], "targetRef": {}, "hints": {}}],
            "ports": [{"name": "", "port": null}, {"name": "zero", "port": 1, "appProtocol": null}]}),
    ]
}

fn full_slice() -> Value {
    let pod = json!({"kind": "Pod", "namespace": "default", "name": "web-1", "uid": "u", "apiVersion": "v1",
        "resourceVersion": "12", "fieldPath": "spec.containers{<web>}"});
    json!({
        "metadata": rich("full"),
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["10.244.1.1"],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "hostname": "web-1",
                "targetRef": pod,
                "nodeName": "node-1",
                "zone": "zone-a",
                "hints": {"forZones": [{"name": "zone-a"}], "forNodes": [{"name": "node-1"}]},
                "deprecatedTopology": {"a": "b"},
            },
            {"addresses": ["10.244.1.2"], "conditions": {"ready": false, "terminating": true}, "zone": "zone-b"},
        ],
        "ports": [
            {"name": "http", "port": 8080, "protocol": "TCP", "appProtocol": "http"},
            {"name": "dns", "port": 53, "protocol": "UDP"},
        ],
    })
}

pub(crate) fn nodes() -> Vec<Value> {
    vec![
        json!({"metadata": rich("full"), "spec": node_spec(), "status": node_status()}),
        json!({"metadata": deleted()}),
        json!({"metadata": {"generateName": "generated-"}, "status": {
            "capacity": {},
            "conditions": [{"type": "Ready", "status": "Unknown"}],
            "images": [{"names": [], "sizeBytes": 0}, {"names": null}, {}],
            "nodeInfo": {"machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "",
                "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "", "operatingSystem": "",
                "architecture": "", "swap": {}},
            "features": {},
            "runtimeHandlers": [{"name": ""}, {"name": "runc", "features": {}}],
        }}),
    ]
}

fn node_spec() -> Value {
    let config_map = json!({"namespace": "default", "name": "c", "kubeletConfigKey": "k"});
    json!({
        "podCIDR": "10.244.1.0/24",
        "podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"],
        "providerID": "example://1",
        "unschedulable": true,
        "externalID": "old",
        "taints": [
            {"key": "a/b", "value": "c", "effect": "NoExecute", "timeAdded": TIME},
            {"key": "d", "effect": "NoSchedule"},
        ],
        "configSource": {"configMap": config_map},
    })
}

fn node_status() -> Value {
    let config_map = json!({"configMap": {"namespace": "default", "name": "c", "kubeletConfigKey": "k", "uid": "u",
        "resourceVersion": "7"}});
    json!({
        "capacity": {"cpu": "3.5", "memory": "16777216Ki", "pods": 110, "ephemeral-storage": "1e9",
            "hugepages-2Mi": "0", "example.com/gpu": "1000k", "attachable-volumes-x": "12345678901234567890"},
        "allocatable": {"cpu": "3500m", "memory": "15.5Gi"},
        "phase": "Running",
        "conditions": [
            {"type": "Ready", "status": "True", "lastHeartbeatTime": TIME, "lastTransitionTime": TIME, "reason": "R",
                "message": TEXT},
            {"type": "DiskPressure", "status": "False"},
        ],
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "node-1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": {
            "machineID": "m", "systemUUID": "s", "bootID": "b", "kernelVersion": "6.18", "osImage": "Debian",
            "containerRuntimeVersion": "containerd://2", "kubeletVersion": "v1.36.1", "kubeProxyVersion": "v1.36.1",
            "operatingSystem": "linux", "architecture": "amd64", "swap": {"capacity": 8_589_934_592_u64},
        },
        "images": [{"names": ["example.com/a@sha256:0", "example.com/a:1"], "sizeBytes": 9_999_999_999_u64}],
        "volumesInUse": ["a", "b"],
        "volumesAttached": [{"name": "a", "devicePath": "/dev/a"}, {"name": "b", "devicePath": ""}],
        "config": {"assigned": config_map, "active": config_map, "lastKnownGood": config_map, "error": "e"},
        "runtimeHandlers": [
            {"name": "crun", "features": {"recursiveReadOnlyMounts": true, "userNamespaces": false}},
        ],
        "features": {"supplementalGroupsPolicy": true},
        "declaredFeatures": ["A", "B"],
    })
}
