//! The example of a virtual-kubelet provider with the real controllers: pods in microVMs of their own.

mod long {
    use std::{
        collections::BTreeSet,
        fs,
        net::SocketAddr,
        time::{Duration, Instant},
    };

    use cproxy_tests::{
        control_plane,
        fleet::{Clients, Fleet, NAMESERVER, PATIENCE, Selector, WEB},
        http,
        kube_proxy::KubeProxy,
        manifest,
        process::eventually,
        sandbox::Sandbox,
    };
    use serde_json::{Value, json};

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

    /// Server with a page that names the client.
    const WHO: &str = concat!(
        r"mkdir -p /www/cgi-bin && printf '#!/bin/sh\\necho -e \\\\\\\\r\\necho $REMOTE_ADDR\\n'",
        " >/www/cgi-bin/who && chmod +x /www/cgi-bin/who"
    );

    /// Address of a load balancer, and of a client outside the cluster with its gateway.
    const BALANCER: &str = "203.0.113.10";
    const CLIENT: &str = "198.51.100.7";
    const GATEWAY: &str = "198.51.100.1";

    /// Without `--receive`: a kube-proxy on an ordinary node leads node ports and addresses of load
    /// balancers to pods in VMs, which see the node as their client.
    #[test]
    fn kube_proxy_on_an_ordinary_node_serves_pods_in_vms() {
        let sandbox = Sandbox::for_test();
        let fleet = Fleet::start(&sandbox);
        fleet.apply(NAMESERVER);
        fleet.apply(&WEB.replace("mkdir -p /www", WHO));
        fleet.wait_ready(Selector::NAMESERVER, 1);
        let (pods, _) = fleet.wait_ready(Selector::WEB, 2);
        // No kubelet runs there.
        let mut node = manifest::node(control_plane::NODE, "");
        node["spec"] = json!({"unschedulable": true});
        fleet.control_plane.apply([node]);
        let patch = |object: &[&str], patch: Value| {
            let words = [&["patch"], object, &["--subresource=status", "--type=merge", "-p", &patch.to_string()]];
            fleet.kubectl(&words.concat());
        };
        patch(&["node", control_plane::NODE], manifest::node_status([control_plane::ADDRESS]));
        fleet.kubectl(&["patch", "service", "web", "-p", r#"{"spec": {"type": "LoadBalancer"}}"#]);
        patch(&["service", "web"], json!({"status": {"loadBalancer": {"ingress": [{"ip": BALANCER}]}}}));
        let client = sandbox.empty_neighbour();
        sandbox.ip(&format!(
            "link add outside type veth peer name eth0 netns {}\naddress add {GATEWAY}/24 dev outside\n\
             link set outside up\n",
            client.path().display()
        ));
        let inside = format!("address add {CLIENT}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY}\n");
        sandbox.ip_in(&client, &inside);
        sandbox.netns().run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1")).expect("root may set it");
        let _kube_proxy = KubeProxy::spawn(&sandbox, &fleet.control_plane);

        let port = fleet.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}"]);
        let wanted: BTreeSet<_> = pods.iter().map(|pod| pod.name.clone()).collect();
        for at in [format!("{BALANCER}:80"), format!("{}:{port}", control_plane::ADDRESS)] {
            let at: SocketAddr = at.parse().expect("an address and a port");
            let get = |path: &str| client.run(|| http::get_within(at, path, Duration::from_secs(10)));
            let mut answered = BTreeSet::new();
            eventually(PATIENCE, format!("both pods have answered at {at}"), || {
                answered.insert(get("/").map_err(|error| error.to_string())?.trim().to_owned());
                if answered == wanted { Ok(()) } else { Err(format!("{answered:?}")) }
            });
            let seen = get("/cgi-bin/who").expect("it is served");
            assert!(seen.contains("10.244.1.1") && !seen.contains(CLIENT), "the pod sees the node: {seen}");
        }
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
