//! The example of a virtual-kubelet provider with the real controllers: pods in microVMs of their own.

mod long {
    use std::{collections::BTreeSet, time::Instant};

    use cproxy_tests::{
        fleet::{Clients, Fleet, NAMESERVER, PATIENCE, Selector, WEB},
        process::eventually,
        sandbox::Sandbox,
    };
    use serde_json::json;

    #[test]
    fn pods_of_a_fleet_reach_each_other_by_name_and_leave_a_dead_one() {
        let sandbox = Sandbox::for_test();
        let fleet = Fleet::start(&sandbox);
        fleet.apply(NAMESERVER);
        fleet.apply(WEB);
        fleet.wait_ready(Selector::NAMESERVER, 1);
        let (pods, _) = fleet.wait_ready(Selector::WEB, 2);
        let clients = Clients::start(&fleet, 1);
        let wanted: BTreeSet<_> = pods.iter().map(|pod| pod.name.clone()).collect();
        eventually(PATIENCE, "both pods have answered", || {
            let answered = clients.answered();
            if answered == wanted { Ok(()) } else { Err(format!("{answered:?}")) }
        });

        let victim = pods.first().expect("two pods");
        let (failed, start) = (clients.failures(), Instant::now());
        fleet.kill_machine(victim);
        let dead = fleet.wait_pod(Selector::WEB, &victim.name, |pod| pod.phase == "Failed");
        assert_eq!(dead.reason, "VMDied");
        let (last, failed) = clients.last_failure_since(start, failed);
        println!("{failed} requests have failed; the last client had left after {last:?}");
        fleet.wait_ready(Selector::WEB, 2);
        clients.wait_for_each("answer ");

        let restored = "client-1";
        fleet.kubectl(&["annotate", "pod", restored, "vm.cproxy.dev/power=saved"]);
        fleet.wait_pod(Selector::CLIENTS, restored, |pod| !pod.is_ready);
        eventually(PATIENCE, "the VM is saved", || {
            let events = fleet.kubectl(&["get", "events", "--field-selector=reason=Saved"]);
            if events.contains(restored) { Ok(()) } else { Err(events) }
        });
        fleet.kubectl(&["annotate", "pod", restored, "vm.cproxy.dev/power-"]);
        fleet.wait_pod(Selector::CLIENTS, restored, |pod| pod.is_ready);
        clients.wait_for_each("answer ");
    }

    /// All is denied but names, and what friends ask the Service.
    const POLICIES: &str = r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: default-deny}
spec: {podSelector: {}, policyTypes: [Ingress, Egress]}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: names}
spec:
  podSelector: {}
  policyTypes: [Egress]
  egress:
  - to: [{namespaceSelector: {}, podSelector: {matchLabels: {k8s-app: kube-dns}}}]
    ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends-ask}
spec:
  podSelector: {matchLabels: {app: client}}
  policyTypes: [Egress]
  egress: [{to: [{podSelector: {matchLabels: {app: web}}}]}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends-may}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress: [{from: [{podSelector: {matchLabels: {friend: "yes"}}}], ports: [{port: 8080}]}]
"#;

    #[test]
    fn pods_of_a_fleet_obey_their_policies() {
        let sandbox = Sandbox::for_test();
        let fleet = Fleet::start_with_policies(&sandbox);
        fleet.apply(POLICIES);
        fleet.apply(NAMESERVER);
        fleet.apply(WEB);
        // Their probes come from the node.
        fleet.wait_ready(Selector::NAMESERVER, 1);
        fleet.wait_ready(Selector::WEB, 2);
        for name in ["friend", "stranger"] {
            fleet.apply(&Fleet::client(name, &json!({})));
        }
        fleet.kubectl(&["label", "pod", "friend", "friend=yes"]);
        fleet.wait_ready(Selector::CLIENTS, 2);
        let [friend, stranger] = ["friend", "stranger"].map(|name| fleet.follow_logs(name));
        eventually(PATIENCE, "the friend has an answer, and the stranger none", || {
            let [friend, stranger] = [friend.log(), stranger.log()];
            assert!(!stranger.contains("answer "), "{stranger}");
            let is_seen = friend.contains("answer ") && stranger.matches("failed").count() > 3;
            if is_seen { Ok(()) } else { Err(format!("{friend}\n---\n{stranger}")) }
        });
        assert!(stranger.log().contains("Connection refused"), "{}", stranger.log());
        fleet.kubectl(&["label", "pod", "stranger", "friend=yes"]);
        eventually(PATIENCE, "a label makes it a friend", || {
            let log = stranger.log();
            if log.contains("answer ") { Ok(()) } else { Err(log) }
        });
    }

    #[test]
    fn a_fleets_pods_without_an_image_and_without_cproxy_say_so() {
        let sandbox = Sandbox::for_test();
        let fleet = Fleet::start(&sandbox);
        let bad = Fleet::client("bad-image", &json!({})).replace("fleet.cproxy.dev/busybox", "nothing:1");
        fleet.apply(&bad);
        fleet.apply(&Fleet::client("without", &json!({"cproxy.dev/enabled": "false"})));
        let pod = fleet.wait_pod(Selector::CLIENTS, "bad-image", |pod| pod.reason.contains("Image"));
        assert!(pod.message.contains("\"nothing:1\" is not in the layout"), "{pod:?}");
        let described = fleet.kubectl(&["describe", "pod", "bad-image"]);
        assert!(described.contains("ErrImagePull"), "{described}");

        fleet.wait_pod(Selector::CLIENTS, "without", |pod| pod.is_ready);
        let log = fleet.provider_log();
        assert!(log.contains("cproxy is disabled on this machine"), "{log}");
        fleet.kubectl(&["delete", "pods", "--all"]);
        fleet.wait_gone(Selector::CLIENTS);
    }
}
