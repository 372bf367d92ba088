//! The Helm chart: its objects are those of the kustomize overlays, a cluster gets them by `helm install`, and wrong
//! values are refused by name.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    control_plane::ControlPlane,
    manifest::write_text,
    process::{Output, run},
    sandbox::{Placement, Sandbox},
};
use serde_json::{Value, json};

use crate::fixture::PATIENCE;

/// Variable with the directory of Helm's binary.
const VARIABLE: &str = "CPROXY_HELM";

/// Version for which objects are rendered where there is no server.
const KUBERNETES: &str = "1.36.1";

/// Labels that the chart adds to each object.
const OWN_LABELS: [&str; 3] = ["app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "helm.sh/chart"];

/// Name of the views, which kustomize extends by a hash.
const VIEWS: &str = "cproxy-relay-views";

/// Values far from the defaults.
const OTHER_VALUES: &str = r#"
relay:
  image: {repository: "registry.example:5000/team/cproxy-relay", tag: v9, pullPolicy: Always}
  imagePullSecrets: [registry]
  replicas: 5
  tlsSecretName: other-tls
  views: {views: [{name: all, match: {groups: ["system:serviceaccounts"]}, namespaces: ["*"]}]}
  drainSeconds: 90
  extraArgs: [--log-format=json]
  priorityClassName: ""
  nodeSelector: {pool: relays}
  tolerations: [{key: relays, operator: Exists}]
  podAnnotations: {}
  service: {type: NodePort, annotations: {internal: "true"}, externalTrafficPolicy: Cluster, port: 443}
  disruptionBudget: {maxUnavailable: 2}
  networkPolicy: {clients: [10.0.0.0/8]}
  autoscaler: {enabled: true}
agents:
  nodes: []
  provider: {kind: User, name: "provider@example.com"}
  staticToken: true
alerts: {labels: {release: prometheus}}
"#;

fn images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../images")
}

fn chart() -> PathBuf {
    images().join("kubernetes/helm/cproxy")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Helm without a user's settings.
fn helm(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    let directory =
        std::env::var_os(VARIABLE).unwrap_or_else(|| panic!("{VARIABLE} is not set: run `cargo xtask test`"));
    let mut command = Command::new(Path::new(&directory).join("helm"));
    command.env_clear().env("HOME", sandbox.dir()).env("PATH", "/usr/bin:/bin").args(arguments);
    run(sandbox, Placement::Unhooked, command, "", PATIENCE)
}

/// The chart as objects, with these options of `helm template`.
fn rendered(sandbox: &Sandbox, options: &[&str]) -> BTreeMap<String, Value> {
    let chart = chart();
    let base =
        ["template", "cproxy", chart.to_str().unwrap(), "--namespace", "kube-system", "--kube-version", KUBERNETES];
    objects(&helm(sandbox, &[&base, options].concat()).success().stdout)
}

/// Objects by kind and name.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let documents = text.split("\n---\n").map(|document| document.trim_start_matches("---\n"));
    let parsed = documents.filter(|text| !text.trim().is_empty()).map(yaml).filter(|object| !object.is_null());
    parsed
        .map(|object| (format!("{}/{}", string(&object["kind"]), string(&object["metadata"]["name"])), object))
        .collect()
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Objects without what only one of the two tools adds.
fn comparable(objects: BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    let strip = |(name, mut object): (String, Value)| {
        if let Some(labels) = object.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
            OWN_LABELS.iter().for_each(|label| drop(labels.remove(*label)));
            if labels.is_empty() {
                object["metadata"].as_object_mut().unwrap().remove("labels");
            }
        }
        if let Some(annotations) = object.pointer_mut("/spec/template/metadata/annotations") {
            annotations.as_object_mut().unwrap().remove("checksum/views");
        }
        if let Some(volumes) = object.pointer_mut("/spec/template/spec/volumes") {
            let views = volumes.as_array_mut().unwrap().iter_mut().find(|volume| volume["name"] == "views").unwrap();
            views["configMap"]["name"] = without_hash(&views["configMap"]["name"]);
        }
        object["metadata"]["name"] = without_hash(&object["metadata"]["name"]);
        let kind = name.split('/').next().unwrap_or_default().to_owned();
        (format!("{kind}/{}", string(&object["metadata"]["name"])), object)
    };
    objects.into_iter().map(strip).collect()
}

fn without_hash(name: &Value) -> Value {
    if string(name).starts_with(VIEWS) { json!(VIEWS) } else { name.clone() }
}

/// The objects of an overlay.
fn overlay(sandbox: &Sandbox, name: &str) -> BTreeMap<String, Value> {
    let directory = std::env::var_os("CPROXY_CONTROL_PLANE").expect("CPROXY_CONTROL_PLANE is not set");
    let mut command = Command::new(Path::new(&directory).join("kubectl"));
    command.arg("kustomize").arg(images().join("kubernetes/overlays").join(name)).env("HOME", sandbox.dir());
    objects(&run(sandbox, Placement::Unhooked, command, "", PATIENCE).success().stdout)
}

#[test]
fn the_charts_default_objects_are_those_of_the_overlays_and_the_alerts() {
    let sandbox = Sandbox::for_test();
    let mut expected = overlay(&sandbox, "relay");
    expected.extend(overlay(&sandbox, "baked-in"));
    let expected = comparable(expected);
    let mut actual = comparable(rendered(&sandbox, &[]));
    let alerts = actual.remove("ConfigMap/cproxy-alerts").expect("no alerts");
    let rules = yaml(&read(&images().join("monitoring/rules.yaml")));
    assert_eq!(yaml(string(&alerts["data"]["cproxy.yaml"])), rules);
    assert_eq!(actual.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, object) in &expected {
        assert_eq!(&actual[name], object, "{name}");
    }

    let rule = rendered(&sandbox, &["--set", "alerts.prometheusRule=true"]);
    assert_eq!(rule["PrometheusRule/cproxy-alerts"]["spec"], rules);
    let scaled = comparable(rendered(&sandbox, &["--set", "relay.autoscaler.enabled=true"]));
    let autoscaler = yaml(&read(&images().join("kubernetes/overlays/relay/autoscaler.yaml")));
    assert_eq!(scaled["HorizontalPodAutoscaler/cproxy-relay"], autoscaler);
    assert_eq!(scaled["Deployment/cproxy-relay"]["spec"].get("replicas"), None, "the autoscaler decides");
    let policies = comparable(rendered(&sandbox, &["--set", "relay.policies=resolve"]));
    for (name, object) in &comparable(overlay(&sandbox, "relay-policies")) {
        assert_eq!(&policies[name], object, "{name}");
    }
    let token = comparable(rendered(&sandbox, &["--set", "agents.staticToken=true"]));
    assert_eq!(token["Secret/cproxy-token"], yaml(&read(&images().join("kubernetes/static-token.yaml"))));
}

#[test]
fn the_chart_has_the_version_of_cproxy_and_describes_each_value() {
    let sandbox = Sandbox::for_test();
    let metadata = yaml(&read(&chart().join("Chart.yaml")));
    for field in ["version", "appVersion"] {
        assert_eq!(metadata[field], env!("CARGO_PKG_VERSION"), "{field}");
    }
    let sidecar = read(&images().join("kubernetes/overlays/sidecar/pod.yaml"));
    assert!(sidecar.contains(concat!("image: cproxy:", env!("CARGO_PKG_VERSION"), "\n")), "{sidecar}");
    let schema: Value = serde_json::from_str(&read(&chart().join("values.schema.json"))).unwrap();
    let mut values = yaml(&read(&chart().join("values.yaml")));
    // Helm sets it for each chart.
    values["global"] = json!({});
    check_described("values", &values, &schema);
    let values = write_text(sandbox.dir(), "values", OTHER_VALUES);
    for options in [vec![], vec!["--values", values.to_str().unwrap()]] {
        let chart = chart();
        helm(&sandbox, &[&["lint", "--strict", chart.to_str().unwrap()], options.as_slice()].concat()).success();
    }
}

/// Each value has a description, and the schema has no others.
fn check_described(path: &str, values: &Value, schema: &Value) {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    if values.as_object().is_some_and(serde_json::Map::is_empty) {
        return;
    }
    let names = |of: &serde_json::Map<String, Value>| of.keys().cloned().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(names(values.as_object().unwrap()), names(properties), "{path}");
    assert_eq!(schema["additionalProperties"], false, "{path} accepts misspelt values");
    for (name, property) in properties {
        assert!(property["description"].as_str().is_some_and(|text| text.ends_with('.')), "{path}.{name}");
        check_described(&format!("{path}.{name}"), &values[name], property);
    }
}

#[test]
fn the_chart_follows_its_values() {
    let sandbox = Sandbox::for_test();
    let values = write_text(sandbox.dir(), "values", OTHER_VALUES);
    let objects = rendered(&sandbox, &["--values", values.to_str().unwrap()]);
    let relay = &objects["Deployment/cproxy-relay"]["spec"]["template"]["spec"];
    assert_eq!(relay["containers"][0]["image"], "registry.example:5000/team/cproxy-relay:v9");
    assert_eq!(relay["imagePullSecrets"], json!([{"name": "registry"}]));
    assert_eq!(relay["terminationGracePeriodSeconds"], 130);
    assert_eq!(relay.get("priorityClassName"), None);
    assert_eq!(
        (&relay["nodeSelector"], &relay["tolerations"][0]["key"]),
        (&json!({"pool": "relays"}), &json!("relays"))
    );
    let arguments = relay["containers"][0]["args"].as_array().unwrap();
    for argument in ["--drain-seconds=90", "--log-format=json"] {
        assert!(arguments.contains(&json!(argument)), "{arguments:?}");
    }
    assert!(string(&objects[&format!("ConfigMap/{VIEWS}")]["data"]["views.yaml"]).contains("name: all"));
    let service = &objects["Service/cproxy-relay"];
    assert_eq!((&service["spec"]["type"], &service["spec"]["ports"][0]["port"]), (&json!("NodePort"), &json!(443)));
    assert_eq!(service["metadata"]["annotations"]["internal"], "true");
    let clients = &objects["NetworkPolicy/cproxy-relay"]["spec"]["ingress"][0]["from"];
    assert_eq!(*clients, json!([{"ipBlock": {"cidr": "10.0.0.0/8"}}]));
    assert_eq!(objects["ClusterRole/cproxy-node"]["rules"][0].get("resourceNames"), None);
    let subject = &objects["RoleBinding/cproxy-provider"]["subjects"][0];
    let user = json!({"kind": "User", "name": "provider@example.com", "apiGroup": "rbac.authorization.k8s.io"});
    assert_eq!(*subject, user);
    assert_eq!(objects["ConfigMap/cproxy-alerts"]["metadata"]["labels"]["release"], "prometheus");

    let digest = format!("sha256:{}", "0".repeat(64));
    let pinned = rendered(
        &sandbox,
        &["--set", &format!("relay.image.digest={digest}"), "--set-string", "relay.tlsSecretName=123"],
    );
    let relay = &pinned["Deployment/cproxy-relay"]["spec"]["template"]["spec"];
    assert_eq!(relay["containers"][0]["image"], format!("cproxy-relay@{digest}"));
    assert_eq!(relay["volumes"][0]["secret"]["secretName"], "123");

    let nothing = ["relay.enabled=false", "agents.enabled=false", "alerts.enabled=false"];
    let options: Vec<&str> = nothing.iter().flat_map(|value| ["--set", value]).collect();
    assert_eq!(rendered(&sandbox, &options).len(), 0);
}

#[test]
fn wrong_values_are_refused_by_name() {
    let sandbox = Sandbox::for_test();
    let chart = chart();
    for (value, words) in [
        ("relay.replica=3", ["/relay", "replica"]),
        ("relay.replicas=0", ["/relay/replicas", "minimum"]),
        ("relay.replicas=many", ["/relay/replicas", "integer"]),
        ("relay.service.type=ClusterIP", ["/relay/service/type", "LoadBalancer"]),
        ("relay.image.repository=cproxy-relay:0.1.0", ["/relay/image/repository", "pattern"]),
        ("relay.policies=follow", ["/relay/policies", "resolve"]),
        ("relay.extraArgs={listen}", ["/relay/extraArgs/0", "pattern"]),
        ("relay.networkPolicy.clients={10.0.0.0}", ["/relay/networkPolicy/clients/0", "pattern"]),
        ("agents.provider.kind=Pod", ["/agents/provider/kind", "ServiceAccount"]),
        ("agents.nodes=node-1", ["/agents/nodes", "array"]),
        ("alerts.prometheusRule=perhaps", ["/alerts/prometheusRule", "boolean"]),
        ("relais.enabled=true", ["relais", "not allowed"]),
        ("relay.image=null", ["/relay", "image"]),
        ("relay.image.digest=v9", ["/relay/image/digest", "pattern"]),
    ] {
        let output = helm(&sandbox, &["template", "cproxy", chart.to_str().unwrap(), "--set", value]);
        assert_ne!(output.code, 0, "{value} is accepted");
        assert!(words.iter().all(|word| output.stderr.contains(word)), "{value}: {}", output.stderr);
    }
}

#[test]
fn helm_installs_upgrades_and_removes_the_chart_in_a_real_cluster() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::shared(&sandbox);
    // The harness has rights of the same name for its own user.
    control_plane.kubectl(&["delete", "clusterrole/cproxy", "clusterrolebinding/cproxy-cproxy"], "");
    let kubeconfig = control_plane.admin_kubeconfig();
    let (chart, values) = (chart(), write_text(sandbox.dir(), "values", OTHER_VALUES));
    let [chart, kubeconfig, values] = [&chart, &kubeconfig, &values].map(|path| path.to_str().unwrap());
    let release =
        |verb: &[&str]| helm(&sandbox, &[verb, &["--namespace", "kube-system", "--kubeconfig", kubeconfig]].concat());

    let output = release(&["install", "cproxy", chart, "--set", "alerts.prometheusRule=true"]);
    assert!(output.code != 0 && output.stderr.contains("PrometheusRule"), "the kind does not exist: {output:?}");
    let output = release(&["install", "cproxy", chart]).success();
    assert!(output.stdout.contains("cproxy.apiserver=https://ADDRESS:6443"), "{}", output.stdout);
    check_rights(&control_plane);
    for object in ["deployment/cproxy-relay", "pdb/cproxy-relay", "networkpolicy/cproxy-relay", "cm/cproxy-alerts"] {
        control_plane.kubectl(&["-n", "kube-system", "get", object], "");
    }

    release(&["upgrade", "cproxy", chart, "--values", values]).success();
    for object in ["hpa/cproxy-relay", "secret/cproxy-token"] {
        control_plane.kubectl(&["-n", "kube-system", "get", object], "");
    }
    let wrong = release(&["upgrade", "cproxy", chart, "--set", "relay.replicas=0"]);
    assert!(wrong.code != 0 && wrong.stderr.contains("/relay/replicas"), "{wrong:?}");
    control_plane.kubectl(&["create", "-f", "-"], &rules_kind().to_string());
    control_plane.kubectl(&["wait", "--for=condition=established", "crd/prometheusrules.monitoring.coreos.com"], "");
    release(&["upgrade", "cproxy", chart, "--set", "alerts.prometheusRule=true"]).success();
    let rules = control_plane.kubectl(&["-n", "kube-system", "get", "prometheusrule/cproxy-alerts", "-o", "json"], "");
    let rules: Value = serde_json::from_str(&rules).unwrap();
    assert_eq!(rules["spec"], yaml(&read(&images().join("monitoring/rules.yaml"))));

    release(&["uninstall", "cproxy"]).success();
    let kinds = "deploy,svc,cm,sa,pdb,hpa,networkpolicy,role,rolebinding,clusterrole,clusterrolebinding,secret";
    let left = control_plane.kubectl(&["-n", "kube-system", "get", kinds, "-o", "name"], "");
    let own: Vec<_> = left.lines().filter(|name| name.contains("cproxy")).collect();
    assert_eq!(own, [""; 0]);
}

/// The accounts of agents and relay have their rights and no others.
fn check_rights(control_plane: &ControlPlane<'_>) {
    let is_permitted = |account: &str, request: &[&str]| {
        let account = format!("system:serviceaccount:kube-system:{account}");
        let arguments = [&["auth", "can-i", "--as", &account], request].concat();
        control_plane.try_kubectl("admin", &arguments, "").stdout.trim() == "yes"
    };
    for kind in ["services", "endpointslices.discovery.k8s.io"] {
        for account in ["cproxy", "cproxy-relay"] {
            assert!(is_permitted(account, &["watch", kind, "--all-namespaces"]), "{account}: {kind}");
            assert!(!is_permitted(account, &["update", kind, "--all-namespaces"]), "{account}: {kind}");
        }
    }
    assert!(is_permitted("cproxy", &["watch", "nodes/virtual-kubelet"]));
    assert!(!is_permitted("cproxy", &["watch", "nodes/other"]));
    assert!(is_permitted("cproxy-relay", &["create", "tokenreviews.authentication.k8s.io"]));
    assert!(!is_permitted("cproxy-relay", &["list", "secrets", "--all-namespaces"]));
    let token = ["create", "serviceaccounts/cproxy", "--subresource=token", "-n", "kube-system"];
    assert!(is_permitted("virtual-kubelet", &token));
}

/// The kind that the Prometheus Operator brings, with any content.
fn rules_kind() -> Value {
    let version = json!({
        "name": "v1", "served": true, "storage": true,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "prometheusrules.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com", "scope": "Namespaced", "versions": [version],
            "names": {"kind": "PrometheusRule", "plural": "prometheusrules", "singular": "prometheusrule"},
        },
    })
}
