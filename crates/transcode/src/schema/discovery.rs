//! Fields of an EndpointSlice, from k8s.io/api/discovery/v1 and, for references, k8s.io/api/core/v1 (types.go,
//! generated.proto).

use super::{
    Kind::{Bool, Int32, Message, Text},
    Schema, always, list, list_or_null, map,
    meta::OBJECT_META,
    not_zero, pointer,
};

/// discoveryv1.EndpointSlice.
pub(crate) static ENDPOINT_SLICE: &Schema = &[
    always(1, "metadata", Message(OBJECT_META)),
    always(4, "addressType", Text),
    list_or_null(2, "endpoints", Message(ENDPOINT)),
    list_or_null(3, "ports", Message(ENDPOINT_PORT)),
];

/// discoveryv1.EndpointPort.
static ENDPOINT_PORT: &Schema = &[
    pointer(1, "name", Text),
    pointer(2, "protocol", Text),
    pointer(3, "port", Int32),
    pointer(4, "appProtocol", Text),
];

/// discoveryv1.Endpoint.
static ENDPOINT: &Schema = &[
    list_or_null(1, "addresses", Text),
    always(2, "conditions", Message(ENDPOINT_CONDITIONS)),
    pointer(3, "hostname", Text),
    pointer(4, "targetRef", Message(OBJECT_REFERENCE)),
    map(5, "deprecatedTopology", Text),
    pointer(6, "nodeName", Text),
    pointer(7, "zone", Text),
    pointer(8, "hints", Message(ENDPOINT_HINTS)),
];

/// discoveryv1.EndpointHints.
static ENDPOINT_HINTS: &Schema = &[list(1, "forZones", Message(FOR_ZONE)), list(2, "forNodes", Message(FOR_NODE))];

/// discoveryv1.ForNode.
static FOR_NODE: &Schema = &[always(1, "name", Text)];

/// discoveryv1.ForZone.
static FOR_ZONE: &Schema = &[always(1, "name", Text)];

/// discoveryv1.EndpointConditions.
static ENDPOINT_CONDITIONS: &Schema =
    &[pointer(1, "ready", Bool), pointer(2, "serving", Bool), pointer(3, "terminating", Bool)];

/// corev1.ObjectReference.
static OBJECT_REFERENCE: &Schema = &[
    not_zero(1, "kind", Text),
    not_zero(2, "namespace", Text),
    not_zero(3, "name", Text),
    not_zero(4, "uid", Text),
    not_zero(5, "apiVersion", Text),
    not_zero(6, "resourceVersion", Text),
    not_zero(7, "fieldPath", Text),
];
