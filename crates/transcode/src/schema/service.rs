//! Fields of a Service, from k8s.io/api/core/v1 (types.go, generated.proto).

use super::{
    Kind::{Bool, Int32, IntOrString, Message, Text},
    Schema, always, list, map,
    meta::{CONDITION, OBJECT_META},
    not_zero, pointer,
};

/// corev1.Service.
pub(crate) static SERVICE: &Schema = &[
    always(1, "metadata", Message(OBJECT_META)),
    always(2, "spec", Message(SERVICE_SPEC)),
    always(3, "status", Message(SERVICE_STATUS)),
];

/// corev1.ServiceStatus.
static SERVICE_STATUS: &Schema =
    &[always(1, "loadBalancer", Message(LOAD_BALANCER_STATUS)), list(2, "conditions", Message(CONDITION))];

/// corev1.LoadBalancerStatus.
static LOAD_BALANCER_STATUS: &Schema = &[list(1, "ingress", Message(LOAD_BALANCER_INGRESS))];

/// corev1.LoadBalancerIngress.
static LOAD_BALANCER_INGRESS: &Schema = &[
    not_zero(1, "ip", Text),
    not_zero(2, "hostname", Text),
    pointer(3, "ipMode", Text),
    list(4, "ports", Message(PORT_STATUS)),
];

/// corev1.PortStatus.
static PORT_STATUS: &Schema = &[always(1, "port", Int32), always(2, "protocol", Text), pointer(3, "error", Text)];

/// corev1.ServiceSpec.
static SERVICE_SPEC: &Schema = &[
    list(1, "ports", Message(SERVICE_PORT)),
    map(2, "selector", Text),
    not_zero(3, "clusterIP", Text),
    list(18, "clusterIPs", Text),
    not_zero(4, "type", Text),
    list(5, "externalIPs", Text),
    not_zero(7, "sessionAffinity", Text),
    not_zero(8, "loadBalancerIP", Text),
    list(9, "loadBalancerSourceRanges", Text),
    not_zero(10, "externalName", Text),
    not_zero(11, "externalTrafficPolicy", Text),
    not_zero(12, "healthCheckNodePort", Int32),
    not_zero(13, "publishNotReadyAddresses", Bool),
    pointer(14, "sessionAffinityConfig", Message(SESSION_AFFINITY_CONFIG)),
    list(19, "ipFamilies", Text),
    pointer(17, "ipFamilyPolicy", Text),
    pointer(20, "allocateLoadBalancerNodePorts", Bool),
    pointer(21, "loadBalancerClass", Text),
    pointer(22, "internalTrafficPolicy", Text),
    pointer(23, "trafficDistribution", Text),
];

/// corev1.SessionAffinityConfig.
static SESSION_AFFINITY_CONFIG: &Schema = &[pointer(1, "clientIP", Message(CLIENT_IP_CONFIG))];

/// corev1.ClientIPConfig.
static CLIENT_IP_CONFIG: &Schema = &[pointer(1, "timeoutSeconds", Int32)];

/// corev1.ServicePort.
static SERVICE_PORT: &Schema = &[
    not_zero(1, "name", Text),
    not_zero(2, "protocol", Text),
    pointer(6, "appProtocol", Text),
    always(3, "port", Int32),
    always(4, "targetPort", IntOrString),
    not_zero(5, "nodePort", Int32),
];
