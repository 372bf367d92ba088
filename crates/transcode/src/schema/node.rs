//! Fields of a Node, from k8s.io/api/core/v1 (types.go, generated.proto).

use super::{
    Kind::{Bool, Int32, Int64, Message, Quantity, Text, Time},
    Schema, always, list, list_or_null, map,
    meta::OBJECT_META,
    not_zero, pointer,
};

/// corev1.Node.
pub(crate) static NODE: &Schema = &[
    always(1, "metadata", Message(OBJECT_META)),
    always(2, "spec", Message(NODE_SPEC)),
    always(3, "status", Message(NODE_STATUS)),
];

/// corev1.NodeStatus.
static NODE_STATUS: &Schema = &[
    map(1, "capacity", Quantity),
    map(2, "allocatable", Quantity),
    not_zero(3, "phase", Text),
    list(4, "conditions", Message(NODE_CONDITION)),
    list(5, "addresses", Message(NODE_ADDRESS)),
    always(6, "daemonEndpoints", Message(NODE_DAEMON_ENDPOINTS)),
    always(7, "nodeInfo", Message(NODE_SYSTEM_INFO)),
    list(8, "images", Message(CONTAINER_IMAGE)),
    list(9, "volumesInUse", Text),
    list(10, "volumesAttached", Message(ATTACHED_VOLUME)),
    pointer(11, "config", Message(NODE_CONFIG_STATUS)),
    list(12, "runtimeHandlers", Message(NODE_RUNTIME_HANDLER)),
    pointer(13, "features", Message(NODE_FEATURES)),
    list(14, "declaredFeatures", Text),
];

/// corev1.NodeFeatures.
static NODE_FEATURES: &Schema = &[pointer(1, "supplementalGroupsPolicy", Bool)];

/// corev1.NodeRuntimeHandler.
static NODE_RUNTIME_HANDLER: &Schema =
    &[always(1, "name", Text), pointer(2, "features", Message(NODE_RUNTIME_HANDLER_FEATURES))];

/// corev1.NodeRuntimeHandlerFeatures.
static NODE_RUNTIME_HANDLER_FEATURES: &Schema =
    &[pointer(1, "recursiveReadOnlyMounts", Bool), pointer(2, "userNamespaces", Bool)];

/// corev1.NodeConfigStatus.
static NODE_CONFIG_STATUS: &Schema = &[
    pointer(1, "assigned", Message(NODE_CONFIG_SOURCE)),
    pointer(2, "active", Message(NODE_CONFIG_SOURCE)),
    pointer(3, "lastKnownGood", Message(NODE_CONFIG_SOURCE)),
    not_zero(4, "error", Text),
];

/// corev1.AttachedVolume.
static ATTACHED_VOLUME: &Schema = &[always(1, "name", Text), always(2, "devicePath", Text)];

/// corev1.ContainerImage.
static CONTAINER_IMAGE: &Schema = &[list_or_null(1, "names", Text), not_zero(2, "sizeBytes", Int64)];

/// corev1.NodeSystemInfo.
static NODE_SYSTEM_INFO: &Schema = &[
    always(1, "machineID", Text),
    always(2, "systemUUID", Text),
    always(3, "bootID", Text),
    always(4, "kernelVersion", Text),
    always(5, "osImage", Text),
    always(6, "containerRuntimeVersion", Text),
    always(7, "kubeletVersion", Text),
    always(8, "kubeProxyVersion", Text),
    always(9, "operatingSystem", Text),
    always(10, "architecture", Text),
    pointer(11, "swap", Message(NODE_SWAP_STATUS)),
];

/// corev1.NodeSwapStatus.
static NODE_SWAP_STATUS: &Schema = &[pointer(1, "capacity", Int64)];

/// corev1.NodeDaemonEndpoints.
static NODE_DAEMON_ENDPOINTS: &Schema = &[always(1, "kubeletEndpoint", Message(DAEMON_ENDPOINT))];

/// corev1.DaemonEndpoint.
static DAEMON_ENDPOINT: &Schema = &[always(1, "Port", Int32)];

/// corev1.NodeAddress.
static NODE_ADDRESS: &Schema = &[always(1, "type", Text), always(2, "address", Text)];

/// corev1.NodeCondition.
static NODE_CONDITION: &Schema = &[
    always(1, "type", Text),
    always(2, "status", Text),
    always(3, "lastHeartbeatTime", Time),
    always(4, "lastTransitionTime", Time),
    not_zero(5, "reason", Text),
    not_zero(6, "message", Text),
];

/// corev1.NodeSpec.
static NODE_SPEC: &Schema = &[
    not_zero(1, "podCIDR", Text),
    list(7, "podCIDRs", Text),
    not_zero(3, "providerID", Text),
    not_zero(4, "unschedulable", Bool),
    list(5, "taints", Message(TAINT)),
    pointer(6, "configSource", Message(NODE_CONFIG_SOURCE)),
    not_zero(2, "externalID", Text),
];

/// corev1.NodeConfigSource.
static NODE_CONFIG_SOURCE: &Schema = &[pointer(2, "configMap", Message(CONFIG_MAP_NODE_CONFIG_SOURCE))];

/// corev1.ConfigMapNodeConfigSource.
static CONFIG_MAP_NODE_CONFIG_SOURCE: &Schema = &[
    always(1, "namespace", Text),
    always(2, "name", Text),
    not_zero(3, "uid", Text),
    not_zero(4, "resourceVersion", Text),
    always(5, "kubeletConfigKey", Text),
];

/// corev1.Taint.
static TAINT: &Schema =
    &[always(1, "key", Text), not_zero(2, "value", Text), always(3, "effect", Text), pointer(4, "timeAdded", Time)];
