//! Bound ServiceAccount tokens with the shortest lifetime that Kubernetes allows, renewed under load. This takes 25
//! minutes and is part of `cargo xtask test --soak`.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    control_plane::role_binding,
    echo,
    manifest::{Slice, write_text},
    process::Agent,
    sandbox::Sandbox,
};
use serde_json::json;

use crate::fixture::Cluster;

/// Shortest lifetime of a token.
const LIFETIME: Duration = Duration::from_secs(600);
/// Age at which the kubelet renews a token: 80% of its lifetime.
const RENEWAL: Duration = Duration::from_secs(480);
/// Time after which the first two tokens have expired for some time.
const SOAK: Duration = Duration::from_secs(25 * 60);

#[test]
fn tokens_of_ten_minutes_are_renewed_twice_under_load_without_a_refusal_or_a_list() {
    let sandbox = Sandbox::for_test();
    let (cluster, audit) = Cluster::start_audited(&sandbox);
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata":
                         {"name": "vm", "namespace": "default"}});
    cluster.control_plane.apply([account, role_binding("cproxy", "system:serviceaccount:default:vm")]);
    let renew = || write_text(sandbox.dir(), "token", &cluster.control_plane.request_token("vm", LIFETIME));
    renew();
    let text = fs::read_to_string(cluster.control_plane.agent_kubeconfig()).unwrap();
    let mut kubeconfig: serde_json::Value = serde_json::from_str(&text).unwrap();
    kubeconfig["users"][0]["user"] = json!({"tokenFile": "token"});
    let kubeconfig = write_text(sandbox.dir(), "kubeconfig", &kubeconfig.to_string());
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).start();
    cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
    cluster.apply_service("changes", "10.96.0.11", &["10.244.0.2"]);
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.2:8080"]);

    let (start, mut renewed) = (Instant::now(), 0);
    echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        for number in 0.. {
            if start.elapsed() >= SOAK {
                break;
            }
            if start.elapsed() >= RENEWAL * (renewed + 1) {
                renew();
                renewed += 1;
            }
            let pod = format!("10.244.0.{}", 2 + number % 2);
            cluster.apply(Slice::v4("changes").tcp("http", 8080).ready([&pod]));
            cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", &format!("TCP 10.96.0.11:80 {pod}:8080")]);
            thread::sleep(Duration::from_secs(1));
        }
    });
    assert!(renewed >= 2, "{renewed}");
    assert_eq!(agent.exit_status(), None);
    let requests = audit.requests();
    assert!(requests.iter().all(|request| request.code == 200), "{requests:#?}");
    // Watches end after 5 to 10 minutes, so each has been resumed with each token.
    for resource in ["services", "endpointslices"] {
        let all = requests.iter().filter(|request| request.uri.contains(&format!("/{resource}?"))).count();
        let lists = audit.lists(resource);
        assert!(lists.len() == 1 && all >= 3, "{requests:#?}");
    }
}
