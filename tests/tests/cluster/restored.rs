//! An agent in a VM that was restored from a snapshot: its connection to the API server is dead without knowing it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::{ADDRESS, PORT},
    echo,
    process::{RunningAgent, cproxy, eventually},
    relay::{Fault, Relay},
    sandbox::Sandbox,
    world::counter,
};

use crate::{
    fixture::{Cluster, PATIENCE},
    rows,
};

const STAYS: &str = "TCP 10.96.0.10:80 10.244.0.1:8080";

/// Time after which the kernel, the server or the watch itself notice that the connection is dead.
const UNNOTICED: Duration = Duration::from_secs(15);

/// A cluster whose agent reaches it through a relay.
struct Restored<'s> {
    cluster: Cluster<'s>,
    audit: AuditLog,
    relay: Relay,
    agent: RunningAgent,
}

impl<'s> Restored<'s> {
    fn start(sandbox: &'s Sandbox) -> Self {
        let (cluster, audit) = Cluster::start_audited(sandbox);
        let relay = Relay::start(sandbox, SocketAddr::new(ADDRESS, PORT));
        cluster.apply_service("stays", "10.96.0.10", &["10.244.0.1"]);
        cluster.apply_service("moves", "10.96.0.11", &["10.244.0.2"]);
        let server = format!("https://{}", relay.address());
        let agent = cluster.agent().args(["--apiserver", &server]).start();
        cluster.expect_soon(&[STAYS, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
        Self { cluster, audit, relay, agent }
    }

    /// Changes a Service while the agent is cut off, and waits until the change is lost, and with it the connection.
    /// Only that is certain to come after the change: an API server sends it when it can.
    fn change_unseen(&self) {
        let lost = self.relay.lost_bytes();
        self.relay.set_fault(Some(Fault::Forgets));
        self.cluster.apply_service("moves", "10.96.0.11", &["10.244.0.3"]);
        eventually(PATIENCE, "the change is lost", || match self.relay.lost_bytes() {
            now if now > lost => Ok(()),
            now => Err(now),
        });
    }

    /// Waits until the agent has looked at its programs after a change of the network, and so at its connection.
    fn expect_look(&self, looks: u64) {
        eventually(PATIENCE, "the agent looks", || match self.looks() {
            now if now > looks => Ok(()),
            now => Err(now),
        });
    }

    fn looks(&self) -> u64 {
        counter(self.cluster.sandbox, "hook_checks")
    }

    fn has_old_table(&self) -> bool {
        rows::in_kernel(self.cluster.sandbox).iter().any(|row| row.to_string() == "TCP 10.96.0.11:80 10.244.0.2:8080")
    }

    /// Waits for the change. Returns the time that this took.
    fn expect_change(&self) -> Duration {
        self.cluster.expect_soon(&[STAYS, "TCP 10.96.0.11:80 10.244.0.3:8080"])
    }

    /// Checks that the agent is the same one and has listed nothing anew.
    fn assert_resumed(&mut self) {
        for resource in ["services", "endpointslices"] {
            let lists = self.audit.lists(resource);
            assert_eq!(lists.len(), 1, "{lists:#?}");
        }
        assert_eq!(self.agent.exit_status(), None);
    }
}

#[test]
fn a_reseeded_agent_connects_anew_and_is_ready_once_its_table_is_compared() {
    let sandbox = Sandbox::for_test();
    let mut restored = Restored::start(&sandbox);
    echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        restored.change_unseen();
        assert!(restored.agent.is_ready());
        for _ in 0..2 {
            cproxy(&sandbox, &["reseed"]).success();
            assert!(!restored.agent.is_ready());
        }
        let wait = cproxy(&sandbox, &["wait", "--timeout", "0"]);
        assert!(wait.stderr.contains("has not compared its table since the VM was restored"), "{}", wait.stderr);
        assert!(restored.has_old_table(), "it stays in force");

        restored.relay.set_fault(None);
        let took = restored.expect_change();
        println!("the table was right after {took:?}");
        assert!(took < UNNOTICED, "{took:?}");
        let start = Instant::now();
        eventually(PATIENCE, "the agent is ready", || if restored.agent.is_ready() { Ok(()) } else { Err("not yet") });
        println!("the agent was ready {:?} later", start.elapsed());
        restored.agent.wait_log("ready again after", PATIENCE);
    });
    restored.assert_resumed();

    // The next one is like the first, with a connection that is alive.
    cproxy(&sandbox, &["reseed"]).success();
    eventually(PATIENCE, "the agent is ready", || if restored.agent.is_ready() { Ok(()) } else { Err("not yet") });
    restored.cluster.delete("Service", "moves");
    restored.cluster.expect(&[STAYS]);
    restored.assert_resumed();
    restored.relay.wait_for_connections(1, PATIENCE);
}

#[test]
fn a_dead_connection_is_noticed_when_the_network_changes() {
    let sandbox = Sandbox::for_test();
    let mut restored = Restored::start(&sandbox);
    restored.change_unseen();
    restored.relay.set_fault(None);
    assert!(restored.has_old_table());
    let looks = restored.looks();
    sandbox.add_address("10.244.9.9");
    let took = restored.expect_change();
    println!("the table was right after {took:?}");
    assert!(took < UNNOTICED, "{took:?}");
    restored.agent.wait_log("the network has changed, perhaps after a restore of the VM", PATIENCE);
    assert!(restored.agent.is_ready(), "it may have been no restore");
    restored.assert_resumed();

    // A connection that is alive stays. What the agent sees of the deletion comes after the answer to its PING.
    restored.relay.wait_for_connections(1, PATIENCE);
    restored.expect_look(looks);
    let (history, looks) = (restored.relay.history(), restored.looks());
    sandbox.add_address("10.244.9.10");
    restored.expect_look(looks);
    restored.cluster.delete("Service", "moves");
    restored.cluster.expect(&[STAYS]);
    assert_eq!(restored.relay.history(), history);
}
