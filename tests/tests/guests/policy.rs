//! Network policy by the guest's own kernel: programs that load, a verdict in each direction.

use cproxy_tests::{
    manifest::{self, Service, Slice},
    outside::{Outside, pod},
    sandbox::Sandbox,
};
use serde_json::json;

use crate::common::{PATIENCE, report, values_of};

const WORKLOAD: &str = r#"
[ ! -e /run/cproxy/ready ] || echo "workload: the policy is in force"
echo "allowed: $(wget -qO- http://10.244.0.1:8080/)"
echo "denied: $(wget -qO- http://10.244.0.2:8080/ 2>&1)"
echo "service: $(wget -qO- http://10.96.0.30/ 2>&1)"
own=$(ip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1)
(echo hello | nc -l -p 8099 > /dev/null) &
sleep 1
echo "own: $(nc -w 10 $own 8099 < /dev/null)"
echo "links: $(ls /sys/fs/bpf/cproxy/policy-v1 | grep -c '^sk_lookup$\|^connect4$\|^sendmsg6$')"
echo "denials: $(cproxy get denials -o json | tr -d '\n ')"
"#;

#[test]
fn a_guest_is_closed_but_for_what_its_policy_allows() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let of_pod = |name: &str, address: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
            "status": {"phase": "Running", "podIPs": [{"ip": address}]},
        })
    };
    let allowed = json!({"podSelector": {"matchLabels": {"app": "one"}}});
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "guest", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "guest"}}, "policyTypes": ["Ingress", "Egress"],
            "egress": [{"to": [allowed], "ports": [{"port": 8080}]}],
        },
    });
    let service = Service::new("two").cluster_ips(["10.96.0.30"]).tcp("http", 80, 8080);
    let slice = Slice::v4("two").tcp("http", 8080).ready(["10.244.0.2"]);
    let objects = [of_pod("guest", "10.244.9.9"), of_pod("one", "10.244.0.1"), of_pod("two", "10.244.0.2"), policy];
    let objects = objects.into_iter().chain([service.into(), slice.into()]);
    let image = outside
        .guest()
        .parameter("cproxy.manifests=/etc/cproxy/manifests")
        .parameter("cproxy.policy=enforce")
        .parameter("cproxy.policy-pod=default/guest")
        .file("etc/cproxy/manifests/cluster.json", manifest::list(objects));
    let console = pod(image, WORKLOAD).start().wait_end(PATIENCE);
    assert_eq!(values_of(&console, "workload: "), ["the policy is in force"], "{console}");
    assert_eq!(values_of(&console, "allowed: "), ["pod-1"], "{console}");
    for label in ["denied: ", "service: "] {
        assert!(values_of(&console, label)[0].contains("Operation not permitted"), "{label}{console}");
    }
    assert_eq!(values_of(&console, "own: "), ["hello"], "{console}");
    assert_eq!(values_of(&console, "links: "), ["3"], "{console}");
    assert!(values_of(&console, "denials: ")[0].contains(r#""peer":"10.244.0.2","port":8080"#), "{console}");
    report("9 network policy", "egress denied by EPERM, own traffic passes, ingress attached");
}
