//! The agent ends, by request or by force, and comes back.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cproxy_tests::echo;
use cproxy_tests::manifest::{Service, Slice};
use cproxy_tests::process::{RunningAgent, Signal};
use cproxy_tests::sandbox::Sandbox;

use crate::fixture::{Cluster, PATIENCE, PREFIX, assert_no_service};

/// Between the connections of one client: a thousand a second are enough to meet any gap.
const PAUSE: Duration = Duration::from_millis(1);

/// Does `work` while a client connects to `vip` again and again, and keeps one connection all the time; none of it may
/// fail, and only `pod` may answer.
fn while_a_client_connects<R>(vip: &str, pod: &str, work: impl FnOnce() -> R) -> R {
    let vip: SocketAddr = vip.parse().unwrap();
    let (greeting, kept) = echo::connect_tcp(vip).unwrap();
    assert_eq!(greeting.name, pod);
    let (is_over, connected) = (AtomicBool::new(false), AtomicBool::new(false));
    let client = || {
        while !is_over.load(Ordering::Relaxed) || !connected.load(Ordering::Relaxed) {
            assert_eq!(echo::ask_tcp(vip).unwrap().name, pod);
            connected.store(true, Ordering::Relaxed);
            thread::sleep(PAUSE);
        }
    };
    let result = thread::scope(|scope| {
        let client = scope.spawn(client);
        // However the work ends, the client does too.
        let over = Over(&is_over);
        let result = work();
        drop(over);
        client.join().expect("every connection reaches the pod");
        result
    });
    echo::ping_tcp(&kept, "still there?").unwrap();
    result
}

/// Says that it is over, also while a panic unwinds.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A Service with one port and one pod.
fn apply(cluster: &Cluster<'_>, name: &str, vip: &str, pod: &str) {
    cluster.apply(Service::new(name).cluster_ips([vip]).tcp("http", 80, 8080));
    cluster.apply(Slice::v4(name).tcp("http", 8080).ready([pod]));
}

fn end(agent: &mut RunningAgent, signal: Signal) {
    agent.signal(signal);
    let status = agent.wait(Duration::from_secs(2)).expect("the agent ends within two seconds");
    assert_eq!(status.success(), signal == Signal::TERM, "{status}: {}", agent.tail());
}

#[test]
fn a_restarted_agent_catches_up_and_nobody_notices() {
    let sandbox = Sandbox::new(PREFIX);
    let cluster = Cluster::start(&sandbox);
    let mut agent = cluster.start_agent();
    apply(&cluster, "stays", "10.96.0.10", "10.244.0.1");
    for signal in [Signal::TERM, Signal::KILL] {
        apply(&cluster, "changes", "10.96.0.11", "10.244.0.2");
        apply(&cluster, "goes", "10.96.0.12", "10.244.0.3");
        let before = [
            "TCP 10.96.0.10:80 10.244.0.1:8080",
            "TCP 10.96.0.11:80 10.244.0.2:8080",
            "TCP 10.96.0.12:80 10.244.0.3:8080",
        ];
        cluster.expect(&before);
        while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
            end(&mut agent, signal);
            apply(&cluster, "changes", "10.96.0.11", "10.244.0.4");
            cluster.delete("Service", "goes");
            apply(&cluster, "comes", "10.96.0.13", "10.244.0.5");
            cluster.assert_table(&before);
            assert_no_service("TCP", "10.96.0.13:80");
            agent = cluster.start_agent();
            // No marker: ready means that all of this is in the kernel.
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
    let sandbox = Sandbox::new(PREFIX);
    let mut cluster = Cluster::start(&sandbox);
    let mut agent = cluster.start_agent();
    apply(&cluster, "stays", "10.96.0.10", "10.244.0.1");
    apply(&cluster, "changes", "10.96.0.11", "10.244.0.2");
    let before = ["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.2:8080"];
    cluster.expect(&before);
    end(&mut agent, Signal::TERM);
    // The agent that is still alone when it starts does not know of this.
    apply(&cluster, "changes", "10.96.0.11", "10.244.0.3");
    cluster.control_plane.kill_api_server();
    while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        let mut agent = cluster.agent().start();
        for resource in ["services", "endpointslices"] {
            let line = agent.wait_log(&format!("{resource} at https://192.0.2.1:6443"), PATIENCE);
            assert!(line.contains("refused"), "{line}");
        }
        assert!(!agent.is_ready());
        cluster.assert_table(&before);
        cluster.start_api_server();
        agent.wait_ready(PATIENCE);
        cluster.assert_table(&["TCP 10.96.0.10:80 10.244.0.1:8080", "TCP 10.96.0.11:80 10.244.0.3:8080"]);
        apply(&cluster, "comes", "10.96.0.13", "10.244.0.5");
        cluster.expect(&[
            "TCP 10.96.0.10:80 10.244.0.1:8080",
            "TCP 10.96.0.11:80 10.244.0.3:8080",
            "TCP 10.96.0.13:80 10.244.0.5:8080",
        ]);
    });
}
