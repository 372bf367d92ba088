//! Permitted differences. Most are stated as a change of the cluster: an engine must have exactly the verdicts that
//! cproxy has about the changed one.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::cluster::{Cluster, PROTOCOLS, VALUES};

/// A change of a cluster, and why an engine behaves as if it were made.
pub(crate) struct Difference {
    pub(crate) name: &'static str,
    pub(crate) change: fn(&mut Cluster),
}

/// kube-network-policies: a list of rules that is there and empty allows everything. The API server never sends one in
/// protobuf.
const EMPTY_LISTS: Difference = Difference { name: "empty lists of rules", change: fill_empty_lists };

/// kube-network-policies: init containers have no ports, also if they run on.
const INIT_CONTAINERS: Difference = Difference { name: "init containers", change: remove_init_containers };

/// kube-network-policies: each of several ports of a pod with one name and protocol counts, and not only the first.
const EQUAL_NAMES: Difference = Difference { name: "ports with equal names", change: tell_equal_names_apart };

/// cyclonus: `NotIn` does not match objects without the label.
const NOT_IN: Difference = Difference { name: "NotIn without the label", change: require_labels_of_not_in };

/// cyclonus: an empty value in `matchLabels` matches objects without the label.
const EMPTY_VALUES: Difference = Difference { name: "empty values of labels", change: loosen_empty_values };

/// The order counts: a later change sees the result of an earlier one.
pub(crate) const OF_KUBE_NETWORK_POLICIES: [&Difference; 3] = [&EMPTY_LISTS, &INIT_CONTAINERS, &EQUAL_NAMES];
pub(crate) const OF_CYCLONUS: [&Difference; 2] = [&NOT_IN, &EMPTY_VALUES];

fn fill_empty_lists(cluster: &mut Cluster) {
    for spec in cluster.policies.iter_mut().map(|policy| &mut policy["spec"]) {
        if spec["policyTypes"].is_null() {
            let has_egress = spec["egress"].as_array().is_some_and(|rules| !rules.is_empty());
            spec["policyTypes"] = if has_egress { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) };
        }
        for list in ["ingress", "egress"] {
            if spec[list] == json!([]) {
                spec[list] = json!([{}]);
            }
        }
    }
}

fn remove_init_containers(cluster: &mut Cluster) {
    cluster.pods.iter_mut().for_each(|pod| pod["spec"]["initContainers"] = json!([]));
}

/// Gives the second and third of equal names a number, and each rule about the name all of these.
fn tell_equal_names_apart(cluster: &mut Cluster) {
    for pod in &mut cluster.pods {
        let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
        for port in ports_of(pod) {
            let count = counts.entry((text(&port["name"]), protocol(port))).or_default();
            if *count > 0 {
                port["name"] = format!("{}-{count}", text(&port["name"])).into();
            }
            *count += 1;
        }
    }
    for ports in rules(cluster).filter_map(|(_, rule)| rule["ports"].as_array_mut()) {
        let named: Vec<_> = ports.iter().filter(|port| port["port"].is_string()).cloned().collect();
        ports.extend(named.iter().flat_map(|port| {
            (1..4).map(|number| {
                let mut other = port.clone();
                other["port"] = format!("{}-{number}", text(&port["port"])).into();
                other
            })
        }));
    }
}

/// Ports of the containers that stay, in the order in which names are looked up.
fn ports_of(pod: &mut Value) -> impl Iterator<Item = &mut Value> {
    let spec = pod["spec"].as_object_mut().unwrap();
    let mut init = None;
    let mut own = None;
    for (key, value) in spec.iter_mut() {
        match &**key {
            "initContainers" => init = value.as_array_mut(),
            "containers" => own = value.as_array_mut(),
            _ => {}
        }
    }
    let init = init.into_iter().flatten().filter(|container| container["restartPolicy"] == "Always");
    own.into_iter().flatten().chain(init).filter_map(|container| container["ports"].as_array_mut()).flatten()
}

fn require_labels_of_not_in(cluster: &mut Cluster) {
    for selector in selectors(cluster) {
        if let Some(expressions) = selector["matchExpressions"].as_array_mut() {
            let negative = expressions.iter().filter(|expression| expression["operator"] == "NotIn");
            let exist: Vec<_> =
                negative.map(|expression| json!({"key": expression["key"], "operator": "Exists"})).collect();
            expressions.extend(exist);
        }
    }
}

fn loosen_empty_values(cluster: &mut Cluster) {
    for selector in selectors(cluster) {
        let Some(labels) = selector.get_mut("matchLabels").and_then(Value::as_object_mut) else { continue };
        let empty: Vec<_> = labels.iter().filter(|(_, value)| *value == "").map(|(key, _)| key.clone()).collect();
        labels.retain(|_, value| value != "");
        for key in empty {
            let others: Vec<_> = VALUES.iter().filter(|value| !value.is_empty()).collect();
            let expression = json!({"key": key, "operator": "NotIn", "values": others});
            match selector["matchExpressions"].as_array_mut() {
                Some(expressions) => expressions.push(expression),
                None => selector["matchExpressions"] = json!([expression]),
            }
        }
    }
}

fn selectors(cluster: &mut Cluster) -> impl Iterator<Item = &mut Value> {
    cluster.policies.iter_mut().flat_map(|policy| {
        let spec = policy["spec"].as_object_mut().unwrap();
        let mut found = Vec::new();
        for (key, value) in spec.iter_mut() {
            match &**key {
                "podSelector" => found.push(value),
                "ingress" | "egress" => found.extend(value.as_array_mut().unwrap().iter_mut().flat_map(selectors_of)),
                _ => {}
            }
        }
        found
    })
}

/// Selectors of a rule's peers.
fn selectors_of(rule: &mut Value) -> Vec<&mut Value> {
    let lists = rule.as_object_mut().unwrap().iter_mut().filter(|(key, _)| *key != "ports");
    let peers = lists.flat_map(|(_, peers)| peers.as_array_mut().unwrap());
    let parts = peers.flat_map(|peer| peer.as_object_mut().unwrap().iter_mut());
    parts.filter(|(key, _)| *key != "ipBlock").map(|(_, selector)| selector).collect()
}

/// Rules with the name of their list.
fn rules(cluster: &mut Cluster) -> impl Iterator<Item = (&String, &mut Value)> {
    let specs = cluster.policies.iter_mut().flat_map(|policy| policy["spec"].as_object_mut().unwrap().iter_mut());
    let lists = specs.filter(|(key, _)| *key == "ingress" || *key == "egress");
    lists.flat_map(|(key, rules)| rules.as_array_mut().unwrap().iter_mut().map(move |rule| (key, rule)))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn protocol(port: &Value) -> String {
    port["protocol"].as_str().unwrap_or(PROTOCOLS[0]).to_owned()
}
