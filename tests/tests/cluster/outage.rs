//! The API server goes away under a running agent, and comes back.

use cproxy_tests::manifest::{Service, Slice};
use cproxy_tests::sandbox::Sandbox;

use crate::fixture::{Cluster, PATIENCE, PREFIX};

#[test]
fn an_outage_of_the_api_server_changes_nothing_and_is_survived() {
    let sandbox = Sandbox::new(PREFIX);
    let mut cluster = Cluster::start(&sandbox);
    let mut agent = cluster.start_agent();
    let pid = agent.pid();
    cluster.apply(Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080).udp("dns", 80, 5353));
    let mut pods = vec!["10.244.0.1"];
    for (outage, pod) in [("crash", "10.244.0.2"), ("shutdown", "10.244.0.3")] {
        cluster.apply(Slice::v4("web").tcp("http", 8080).udp("dns", 5353).ready(&pods));
        let rows = rows(&pods);
        let rows = rows.each_ref().map(String::as_str);
        cluster.expect(&rows);

        let heard = agent.log().len();
        match outage {
            "crash" => cluster.control_plane.kill_api_server(),
            _ => cluster.control_plane.stop_api_server(),
        }
        for resource in ["services", "endpointslices"] {
            let what = format!("the agent says that it cannot reach the API server for {resource}");
            agent.wait_until(PATIENCE, &what, |agent| {
                let log = agent.log();
                let says_so = |line: &str| line.contains(&format!("{resource} at https://192.0.2.1:6443"));
                if log[heard..].lines().any(says_so) { Ok(()) } else { Err("it does not") }
            });
        }
        cluster.assert_table(&rows);
        assert!(agent.is_ready(), "what is in force is still complete");

        cluster.start_api_server();
        pods.push(pod);
    }
    cluster.apply(Slice::v4("web").tcp("http", 8080).udp("dns", 5353).ready(&pods));
    cluster.apply(Service::new("new").cluster_ips(["10.96.0.11"]).tcp("http", 80, 8080));
    let rows = rows(&pods);
    cluster.expect(&[&rows[0], &rows[1], "TCP 10.96.0.11:80 refuse"]);
    assert_eq!((agent.pid(), agent.exit_status()), (pid, None));
}

/// The table when these pods are ready.
fn rows(pods: &[&str]) -> [String; 2] {
    [("TCP", 8080), ("UDP", 5353)].map(|(protocol, port)| {
        let backends = pods.iter().map(|pod| format!(" {pod}:{port}")).collect::<String>();
        format!("{protocol} 10.96.0.10:80{backends}")
    })
}
