//! Fields of k8s.io/apimachinery/pkg/apis/meta/v1 (types.go, generated.proto).

use super::{
    Kind::{Bool, Fields, Int64, Message, Text, Time},
    Schema, always, list, map, not_zero, pointer,
};

/// metav1.Condition.
pub(super) static CONDITION: &Schema = &[
    always(1, "type", Text),
    always(2, "status", Text),
    not_zero(3, "observedGeneration", Int64),
    always(4, "lastTransitionTime", Time),
    always(5, "reason", Text),
    always(6, "message", Text),
];

/// metav1.ObjectMeta.
pub(super) static OBJECT_META: &Schema = &[
    not_zero(1, "name", Text),
    not_zero(2, "generateName", Text),
    not_zero(3, "namespace", Text),
    not_zero(4, "selfLink", Text),
    not_zero(5, "uid", Text),
    not_zero(6, "resourceVersion", Text),
    not_zero(7, "generation", Int64),
    not_zero(8, "creationTimestamp", Time),
    pointer(9, "deletionTimestamp", Time),
    pointer(10, "deletionGracePeriodSeconds", Int64),
    map(11, "labels", Text),
    map(12, "annotations", Text),
    list(13, "ownerReferences", Message(OWNER_REFERENCE)),
    list(14, "finalizers", Text),
    list(17, "managedFields", Message(MANAGED_FIELDS_ENTRY)),
];

/// metav1.ManagedFieldsEntry.
static MANAGED_FIELDS_ENTRY: &Schema = &[
    not_zero(1, "manager", Text),
    not_zero(2, "operation", Text),
    not_zero(3, "apiVersion", Text),
    pointer(4, "time", Time),
    not_zero(6, "fieldsType", Text),
    pointer(7, "fieldsV1", Fields),
    not_zero(8, "subresource", Text),
];

/// metav1.OwnerReference.
static OWNER_REFERENCE: &Schema = &[
    always(5, "apiVersion", Text),
    always(1, "kind", Text),
    always(3, "name", Text),
    always(4, "uid", Text),
    pointer(6, "controller", Bool),
    pointer(7, "blockOwnerDeletion", Bool),
];
