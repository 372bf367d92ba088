//! Ends of the agent, by request or by force, and restarts.

use cproxy_tests::{
    echo,
    process::{RunningAgent, Signal},
    sandbox::Sandbox,
};

use crate::fixture::{Cluster, PATIENCE, assert_no_service};

fn end(agent: &mut RunningAgent, signal: Signal) {
    agent.signal(signal);
    let status = agent.wait(PATIENCE);
    let status = status.unwrap_or_else(|| panic!("the agent does not end: {}", agent.tail()));
    assert_eq!(status.success(), signal == Signal::TERM, "{status}: {}", agent.tail());
}

#[test]
fn a_restarted_agent_catches_up_without_a_failed_connect() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let mut agent = cluster.start_agent();
    cluster.apply_service("stays", "10.96.0.10", &["10.244.0.1"]);
    for signal in [Signal::TERM, Signal::KILL] {
        cluster.apply_service("changes", "10.96.0.11", &["10.244.0.2"]);
        cluster.apply_service("goes", "10.96.0.12", &["10.244.0.3"]);
        let before = [
            "TCP 10.96.0.10:80 10.244.0.1:8080",
            "TCP 10.96.0.11:80 10.244.0.2:8080",
            "TCP 10.96.0.12:80 10.244.0.3:8080",
        ];
        cluster.expect(&before);
        echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
            end(&mut agent, signal);
            cluster.apply_service("changes", "10.96.0.11", &["10.244.0.4"]);
            cluster.delete("Service", "goes");
            cluster.apply_service("comes", "10.96.0.13", &["10.244.0.5"]);
            cluster.assert_table(&before);
            assert_no_service("TCP", "10.96.0.13:80");
            agent = cluster.start_agent();
            // A marker is not necessary, since the agent is ready only once all of this is in the kernel.
            cluster.assert_table(&[
                "TCP 10.96.0.10:80 10.244.0.1:8080",
                "TCP 10.96.0.11:80 10.244.0.4:8080",
                "TCP 10.96.0.13:80 10.244.0.5:8080",
            ]);
            assert_no_service("TCP", "10.96.0.12:80");
        });
        cluster.delete("Service", "comes");
    }
    cluster.expect(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.4:8080"]);
}

#[test]
fn nothing_changes_before_the_first_complete_sync() {
    let sandbox = Sandbox::for_test();
    let mut cluster = Cluster::start(&sandbox);
    let mut agent = cluster.start_agent();
    cluster.apply_service("stays", "10.96.0.10", &["10.244.0.1"]);
    cluster.apply_service("changes", "10.96.0.11", &["10.244.0.2"]);
    let before = ["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.2:8080"];
    cluster.expect(&before);
    end(&mut agent, Signal::TERM);
    // The agent that starts during the outage does not know of this change.
    cluster.apply_service("changes", "10.96.0.11", &["10.244.0.3"]);
    cluster.control_plane.stop_api_server();
    echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        let mut agent = cluster.agent().spawn();
        for resource in ["services", "endpointslices"] {
            let line = agent.wait_log(&format!("{resource} at https://192.0.2.1:6443"), PATIENCE);
            assert!(line.contains("refused"), "{line}");
        }
        assert!(!agent.is_ready());
        cluster.assert_table(&before);
        cluster.start_api_server();
        agent.wait_ready(PATIENCE);
        cluster.assert_table(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.3:8080"]);
        cluster.apply_service("comes", "10.96.0.13", &["10.244.0.5"]);
        cluster.expect(&[
            "TCP 10.96.0.10:80 10.244.0.1:8080",
            "TCP 10.96.0.11:80 10.244.0.3:8080",
            "TCP 10.96.0.13:80 10.244.0.5:8080",
        ]);
    });
}
