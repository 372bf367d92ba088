//! Checks that no field of the API server's OpenAPI document is forgotten in the objects.

use std::collections::BTreeSet;

use cproxy_transcode::Kind;
use serde_json::Value;

use crate::cluster::Cluster;

/// Fields without a value: the API server drops it, or never has one for this kind.
const WITHOUT_VALUE: [&str; 10] = [
    "EndpointSlice.endpoints.deprecatedTopology",
    "EndpointSlice.metadata.managedFields.subresource",
    "EndpointSlice.metadata.selfLink",
    "Node.metadata.generation",
    "Node.metadata.namespace",
    "Node.metadata.selfLink",
    "Node.spec.configSource",
    "Node.status.config",
    "Service.metadata.generation",
    "Service.metadata.selfLink",
];

/// Start of a reference to a schema.
const REFERENCE: &str = "#/components/schemas/";

/// Fails unless each field has a value in one of the objects, except those that cannot have one.
pub(crate) fn check(cluster: &Cluster<'_>, kind: Kind, objects: &[Value]) {
    let (document, schema) = match kind {
        Kind::Service => ("/openapi/v3/api/v1", "io.k8s.api.core.v1.Service"),
        Kind::EndpointSlice => ("/openapi/v3/apis/discovery.k8s.io/v1", "io.k8s.api.discovery.v1.EndpointSlice"),
        Kind::Node => ("/openapi/v3/api/v1", "io.k8s.api.core.v1.Node"),
    };
    let document = serde_json::from_str(&cluster.get_json(document)).unwrap();
    let mut search = Search { document, missing: BTreeSet::new() };
    search.visit(schema, &objects.iter().collect::<Vec<_>>(), kind.name());
    let expected = WITHOUT_VALUE.into_iter().filter(|path| path.starts_with(kind.name())).map(str::to_owned);
    assert_eq!(search.missing, expected.collect(), "fields without a value");
}

struct Search {
    document: Value,
    /// Paths of the fields without a value.
    missing: BTreeSet<String>,
}

impl Search {
    /// Visits the fields of a schema, with all values of the schema's type that are there.
    fn visit(&mut self, schema: &str, values: &[&Value], path: &str) {
        let schema = self.document.pointer("/components/schemas").and_then(|schemas| schemas.get(schema));
        let Some(properties) = schema.and_then(|schema| schema.get("properties")).cloned() else { return };
        for (name, property) in properties.as_object().unwrap() {
            let path = format!("{path}.{name}");
            // Items of a list have neither.
            if ["kind", "apiVersion"].contains(&&**name) && path.matches('.').count() == 1 {
                continue;
            }
            let found = values.iter().filter_map(|value| value.get(name)).flat_map(items).collect::<Vec<_>>();
            if found.is_empty() {
                self.missing.insert(path);
            } else if let Some(schema) = reference(property) {
                self.visit(schema, &found, &path);
            }
        }
    }
}

/// Items of a list, or the value itself.
fn items(value: &Value) -> Vec<&Value> {
    match value {
        Value::Null => Vec::new(),
        Value::Array(items) => items.iter().collect(),
        other => vec![other],
    }
}

/// Name of the schema that a property or its items have.
fn reference(property: &Value) -> Option<&str> {
    let direct = property.get("$ref").or_else(|| property.pointer("/allOf/0/$ref"));
    let name = direct.and_then(Value::as_str).and_then(|reference| reference.strip_prefix(REFERENCE));
    name.or_else(|| property.get("items").and_then(reference))
}
