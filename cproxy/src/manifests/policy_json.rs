//! Objects of network policies from JSON, field by field. The decoders that are derived for these types, with the path
//! of an error, would make the agent 100 KB larger.
//!
//! A field of a NetworkPolicy that is not known is an error, as for kubectl: `to` in the place of `from` allows all.

use std::collections::BTreeMap;

use cproxy_core::api::Time;
use cproxy_policy::api::{
    Container, ContainerPort, EgressRule, IngressRule, IntOrString, Ip, IpBlock, LabelSelector,
    LabelSelectorRequirement, Metadata, Namespace, NetworkPolicy, NetworkPolicySpec, Peer, Pod, PodSpec, PodStatus,
    PolicyPort,
};
use serde::Deserialize as _;
use serde_json::Value;

/// Decoded value, or the path of a field with what is expected there.
type Decoded<T> = Result<T, String>;

/// Field of an object. One that is absent is null.
struct Field<'a> {
    value: &'a Value,
    path: String,
}

pub(super) fn namespace(object: &Value) -> Decoded<Namespace> {
    Ok(Namespace { metadata: metadata(&Field::root(object).object("metadata")?)? })
}

pub(super) fn pod(object: &Value) -> Decoded<Pod> {
    let root = Field::root(object);
    let (spec, status) = (root.object("spec")?, root.object("status")?);
    Ok(Pod {
        metadata: metadata(&root.object("metadata")?)?,
        spec: PodSpec {
            containers: spec.list("containers", container)?,
            node_name: spec.text("nodeName")?,
            host_network: spec.get("hostNetwork").flag()?,
            init_containers: spec.list("initContainers", container)?,
        },
        status: PodStatus {
            phase: status.text("phase")?,
            host_ip: status.text("hostIP")?,
            pod_ip: status.text("podIP")?,
            pod_ips: status.list("podIPs", ip)?,
            host_ips: status.list("hostIPs", ip)?,
        },
    })
}

pub(super) fn network_policy(object: &Value) -> Decoded<NetworkPolicy> {
    let root = Field::root(object);
    let spec = root.object("spec")?;
    spec.has_only(&["podSelector", "ingress", "egress", "policyTypes"])?;
    Ok(NetworkPolicy {
        metadata: metadata(&root.object("metadata")?)?,
        spec: NetworkPolicySpec {
            pod_selector: selector(&spec.object("podSelector")?)?,
            ingress: spec.list("ingress", |rule| {
                rule.has_only(&["ports", "from"])?;
                Ok(IngressRule { ports: rule.list("ports", port)?, from: rule.list("from", peer)? })
            })?,
            egress: spec.list("egress", |rule| {
                rule.has_only(&["ports", "to"])?;
                Ok(EgressRule { ports: rule.list("ports", port)?, to: rule.list("to", peer)? })
            })?,
            policy_types: spec.get("policyTypes").texts()?,
        },
    })
}

fn metadata(field: &Field<'_>) -> Decoded<Metadata> {
    Ok(Metadata {
        name: field.text("name")?,
        namespace: field.text("namespace")?,
        uid: field.text("uid")?,
        resource_version: field.text("resourceVersion")?,
        created: field.get("creationTimestamp").time()?.unwrap_or_default(),
        deleted: field.get("deletionTimestamp").time()?,
        labels: field.get("labels").map_of_texts()?,
    })
}

fn container(field: &Field<'_>) -> Decoded<Container> {
    let port = |port: &Field<'_>| {
        Ok(ContainerPort {
            name: port.text("name")?,
            container_port: port.get("containerPort").number()?.unwrap_or_default(),
            protocol: port.text("protocol")?,
        })
    };
    Ok(Container { ports: field.list("ports", port)?, restart_policy: field.get("restartPolicy").optional_text()? })
}

fn ip(field: &Field<'_>) -> Decoded<Ip> {
    Ok(Ip { ip: field.text("ip")? })
}

fn port(field: &Field<'_>) -> Decoded<PolicyPort> {
    field.has_only(&["protocol", "port", "endPort"])?;
    let port = field.get("port");
    let number_or_name = match port.value {
        Value::Null => None,
        Value::String(text) => Some(IntOrString { kind: 1, number: 0, text: text.clone() }),
        _ => port.number()?.map(|number| IntOrString { number, ..IntOrString::default() }),
    };
    Ok(PolicyPort {
        protocol: field.get("protocol").optional_text()?,
        port: number_or_name,
        end_port: field.get("endPort").number()?,
    })
}

fn peer(field: &Field<'_>) -> Decoded<Peer> {
    field.has_only(&["podSelector", "namespaceSelector", "ipBlock"])?;
    Ok(Peer {
        pod_selector: field.optional("podSelector", selector)?,
        namespace_selector: field.optional("namespaceSelector", selector)?,
        ip_block: field.optional("ipBlock", |block| {
            block.has_only(&["cidr", "except"])?;
            Ok(IpBlock { cidr: block.text("cidr")?, except: block.get("except").texts()? })
        })?,
    })
}

fn selector(field: &Field<'_>) -> Decoded<LabelSelector> {
    field.has_only(&["matchLabels", "matchExpressions"])?;
    let requirement = |field: &Field<'_>| {
        field.has_only(&["key", "operator", "values"])?;
        Ok(LabelSelectorRequirement {
            key: field.text("key")?,
            operator: field.text("operator")?,
            values: field.get("values").texts()?,
        })
    };
    Ok(LabelSelector {
        match_labels: field.get("matchLabels").map_of_texts()?,
        match_expressions: field.list("matchExpressions", requirement)?,
    })
}

impl<'a> Field<'a> {
    fn root(value: &'a Value) -> Self {
        Self { value, path: String::new() }
    }

    fn get(&self, name: &str) -> Field<'a> {
        let dot = if self.path.is_empty() { "" } else { "." };
        Field { value: self.value.get(name).unwrap_or(&Value::Null), path: format!("{}{dot}{name}", self.path) }
    }

    fn expected<T>(&self, what: &str) -> Decoded<T> {
        Err(format!("{}: expected {what}", self.path))
    }

    /// A field that is an object; null is an empty one.
    fn object(&self, name: &str) -> Decoded<Field<'a>> {
        self.get(name).checked()
    }

    /// Refuses fields of an object that are not among these.
    fn has_only(&self, known: &[&str]) -> Decoded<()> {
        let unknown = self.value.as_object().into_iter().flatten().find(|(name, _)| !known.contains(&&***name));
        unknown.map_or(Ok(()), |(name, _)| Err(format!("{}: unknown field", self.get(name).path)))
    }

    fn checked(self) -> Decoded<Self> {
        if self.value.is_object() || self.value.is_null() { Ok(self) } else { self.expected("an object") }
    }

    fn optional<T>(&self, name: &str, decode: fn(&Field<'_>) -> Decoded<T>) -> Decoded<Option<T>> {
        let field = self.object(name)?;
        if field.value.is_null() { Ok(None) } else { decode(&field).map(Some) }
    }

    /// Items of a list.
    fn items(self) -> Decoded<Vec<Field<'a>>> {
        match self.value {
            Value::Null => Ok(Vec::new()),
            Value::Array(values) => {
                let item = |(index, value)| Field { value, path: format!("{}[{index}]", self.path) };
                Ok(values.iter().enumerate().map(item).collect())
            }
            _ => self.expected("a list"),
        }
    }

    /// Objects of a list.
    fn list<T>(&self, name: &str, decode: fn(&Field<'_>) -> Decoded<T>) -> Decoded<Vec<T>> {
        let mut list = Vec::new();
        for item in self.get(name).items()? {
            if item.value.is_null() {
                return item.expected("an object");
            }
            list.push(decode(&item.checked()?)?);
        }
        Ok(list)
    }

    fn texts(self) -> Decoded<Vec<String>> {
        self.items()?.iter().map(Field::required_text).collect()
    }

    fn map_of_texts(self) -> Decoded<BTreeMap<String, String>> {
        let mut map = BTreeMap::new();
        for (key, value) in self.value.as_object().into_iter().flatten() {
            let field = Field { value, path: format!("{}.{key}", self.path) };
            map.insert(key.clone(), field.required_text()?);
        }
        self.checked().map(|_| map)
    }

    fn required_text(&self) -> Decoded<String> {
        self.value.as_str().map_or_else(|| self.expected("a text"), |text| Ok(text.to_owned()))
    }

    fn optional_text(&self) -> Decoded<Option<String>> {
        if self.value.is_null() { Ok(None) } else { self.required_text().map(Some) }
    }

    /// A field that is a text; null is an empty one.
    fn text(&self, name: &str) -> Decoded<String> {
        self.get(name).optional_text().map(Option::unwrap_or_default)
    }

    fn flag(&self) -> Decoded<bool> {
        match self.value {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            _ => self.expected("true or false"),
        }
    }

    fn number(&self) -> Decoded<Option<i32>> {
        if self.value.is_null() {
            return Ok(None);
        }
        let number = self.value.as_i64().and_then(|number| i32::try_from(number).ok());
        number.map_or_else(|| self.expected("a number of 32 bits"), |number| Ok(Some(number)))
    }

    fn time(&self) -> Decoded<Option<Time>> {
        if self.value.is_null() {
            return Ok(None);
        }
        Time::deserialize(self.value).map(Some).map_err(|error| format!("{}: {error}", self.path))
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;

    fn objects() -> [Value; 3] {
        let metadata = json!({
            "name": "n", "namespace": "s", "uid": "u", "resourceVersion": "1", "labels": {"a": "b"},
            "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-02T00:00:00Z",
        });
        let named = json!({"name": "http", "containerPort": 80, "protocol": "TCP"});
        let containers = json!([{"ports": [named], "restartPolicy": "Always"}]);
        let requirement = json!({"key": "k", "operator": "In", "values": ["v"]});
        let selector = json!({"matchLabels": {"a": "b"}, "matchExpressions": [requirement]});
        let block = json!({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]});
        let peers = json!([{"podSelector": selector, "namespaceSelector": selector}, {"ipBlock": block}]);
        let ports = json!([{"protocol": "UDP", "port": 1, "endPort": 2}, {"port": "http"}]);
        let status = json!({
            "phase": "Running", "hostIP": "1.1.1.1", "podIP": "1.1.1.2", "podIPs": [{"ip": "1.1.1.2"}],
            "hostIPs": [{"ip": "1.1.1.1"}],
        });
        let pod = json!({
            "containers": containers, "initContainers": containers, "nodeName": "n", "hostNetwork": true,
        });
        let policy = json!({
            "podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{"ports": ports, "from": peers}],
            "egress": [{"ports": ports, "to": peers}],
        });
        [
            json!({"metadata": metadata}),
            json!({"metadata": metadata, "spec": pod, "status": status}),
            json!({"metadata": metadata, "spec": policy}),
        ]
    }

    /// Values in a value, itself included.
    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(values) => values.iter().map(count).sum(),
            Value::Object(fields) => fields.values().map(count).sum::<usize>(),
            _ => 0,
        }
    }

    /// Replaces the value with this number.
    fn replace(value: &mut Value, number: &mut usize, new: &Value) {
        if *number == 0 {
            *value = new.clone();
        }
        *number = number.wrapping_sub(1);
        match value {
            Value::Array(values) => values.iter_mut().for_each(|value| replace(value, number, new)),
            Value::Object(fields) => fields.values_mut().for_each(|value| replace(value, number, new)),
            _ => {}
        }
    }

    fn check<T: DeserializeOwned + PartialEq + std::fmt::Debug>(object: &Value, decode: fn(&Value) -> Decoded<T>) {
        let decoded = decode(object);
        // The derived decoders take unknown fields.
        if !decoded.as_ref().is_err_and(|error| error.ends_with("unknown field")) {
            assert_eq!(decoded.ok(), T::deserialize(object).ok(), "{object}");
        }
    }

    #[test]
    fn objects_are_those_of_the_derived_decoders() {
        let [namespace_object, pod_object, policy_object] = objects();
        check(&namespace_object, namespace);
        check(&pod_object, pod);
        check(&policy_object, network_policy);
        assert!(network_policy(&policy_object).is_ok() && pod(&pod_object).is_ok());
    }

    #[test]
    fn a_wrong_value_anywhere_is_refused_as_by_the_derived_decoders() {
        let others = [json!(null), json!(5), json!("x"), json!(true), json!({}), json!({"a": "b"}), json!(-7)];
        for (kind, object) in objects().iter().enumerate() {
            for (number, new) in (1..count(object)).flat_map(|number| others.iter().map(move |new| (number, new))) {
                let mut object = object.clone();
                replace(&mut object, &mut number.clone(), new);
                match kind {
                    0 => check(&object, namespace),
                    1 => check(&object, pod),
                    _ => check(&object, network_policy),
                }
            }
        }
    }

    #[test]
    fn an_error_has_the_path_of_its_field() {
        let object = json!({"spec": {"ingress": [{}, {"ports": [{"port": true}]}]}});
        assert_eq!(network_policy(&object).unwrap_err(), "spec.ingress[1].ports[0].port: expected a number of 32 bits");
        for (rule, field) in [
            (json!({"to": []}), "to"),
            (json!({"from": [{"nameSpaceSelector": {}}]}), "from[0].nameSpaceSelector"),
            (json!({"from": [{"podSelector": {"matchLabel": {}}}]}), "from[0].podSelector.matchLabel"),
            (json!({"ports": [{"number": 80}]}), "ports[0].number"),
        ] {
            let object = json!({"spec": {"ingress": [rule]}});
            assert_eq!(network_policy(&object).unwrap_err(), format!("spec.ingress[0].{field}: unknown field"));
        }
        let object = json!({"metadata": {"labels": {"a/b": 1}}});
        assert_eq!(namespace(&object).unwrap_err(), "metadata.labels.a/b: expected a text");
    }
}
