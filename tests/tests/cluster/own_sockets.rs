//! The agent's own connections, which depend on the API server and never on the agent's own table.

use cproxy_tests::{
    control_plane::{ADDRESS, KUBERNETES_VIP, PORT},
    echo,
    manifest::{Service, Slice, write},
    process::{Agent, cproxy, run},
    sandbox::{Placement, Sandbox},
};

use crate::fixture::{Cluster, PATIENCE};

#[test]
fn the_agents_own_connections_are_never_translated() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    // No API server would accept this Service: its ClusterIP is the API server's own address. The agent connects to
    // port 9 when it looks up the route to that address.
    let trap = [
        Service::new("trap").cluster_ips([ADDRESS]).tcp("tcp", PORT, 7000).udp("udp", 9, 7000).into(),
        Slice::v4("trap").tcp("tcp", 7000).udp("udp", 7000).ready(["10.244.0.9"]).into(),
    ];
    write(&sandbox.manifest_dir(), "trap.json", trap);
    let wrong = echo::tcp(&sandbox, "10.244.0.9:7000", "wrong");
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    assert!(agent.stop().success());
    assert_eq!(echo::ask_tcp((ADDRESS, PORT)).unwrap().name, "wrong");
    let trapped = wrong.served();

    // The agent runs where all other processes are translated.
    let mut agent = cluster.agent().placement(Placement::Hooked).start();
    assert_eq!(wrong.served(), trapped);
    agent.wait_log(&format!("own addresses: {ADDRESS} (route to the API server)"), PATIENCE);
    cluster.expect(&[]);
    assert!(agent.stop().success());
}

#[test]
fn default_kubernetes_is_translated_for_all_but_the_agent() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::start(&sandbox);
    let vip = format!("https://{KUBERNETES_VIP}");
    let mut agent = cluster.start_agent();
    kubectl_through(&cluster, &vip);

    // The table stays without the agent.
    assert!(agent.stop().success());
    kubectl_through(&cluster, &vip);

    // The agent does not use its own table, even though the table has the address...
    let kubeconfig = cluster.control_plane.kubeconfig_at("cproxy", &vip);
    let mut agent = Agent::new(&sandbox).kubeconfig(&kubeconfig).spawn();
    for resource in ["services", "endpointslices"] {
        let line = agent.wait_log(&format!("{resource} at {vip}"), PATIENCE);
        assert!(line.contains("unreachable"), "{line}");
    }
    assert!(!agent.is_ready());
    cluster.assert_table(&[]);
    assert!(agent.stop().success());

    // ...but the address that it is given.
    let direct = cluster.control_plane.server_url();
    let _agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--apiserver", &direct]).start();
    cluster.expect(&[]);
    assert_eq!(cproxy(&sandbox, &["cleanup"]).code, 1, "an agent is at work");
    kubectl_through(&cluster, &vip);
}

/// Runs kubectl through the API server's ClusterIP, as in a pod.
fn kubectl_through(cluster: &Cluster<'_>, server: &str) {
    let kubeconfig = cluster.control_plane.kubeconfig_at("admin", server);
    let kubectl = cluster.control_plane.kubectl_command(&kubeconfig, &["get", "service", "kubernetes", "-o", "name"]);
    let output = run(cluster.sandbox, Placement::Hooked, kubectl, "", PATIENCE).success();
    assert_eq!(output.stdout, "service/kubernetes\n");
}
