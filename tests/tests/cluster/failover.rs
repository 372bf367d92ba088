//! Several API servers of one cluster, of which the agent uses one at a time over one connection.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::{ADDRESS, NODE, PORT, SECOND_PORT},
    echo, manifest,
    process::{Agent, Daemon, RunningAgent, cproxy, eventually},
    relay::{Relay, RelayChange},
    sandbox::Sandbox,
};

use crate::fixture::{Cluster, PATIENCE};

/// Limit on the time until another API server is used, on a busy machine.
const FAILOVER_MAX: Duration = Duration::from_secs(15);

/// Longest time until the preferred API server is used again: the hold, and the pauses between refused requests for the
/// Node, which give the occasion.
const RETURN_MAX: Duration = Duration::from_secs(200);

/// Two API servers behind relays. The second one offers HTTP/1.1 only.
struct Servers<'s> {
    // Ends before etcd does.
    second: Option<Daemon>,
    cluster: Cluster<'s>,
    audits: [AuditLog; 2],
    relays: [Relay; 2],
}

impl<'s> Servers<'s> {
    fn start(sandbox: &'s Sandbox) -> Self {
        let audits = ["first", "second"].map(|name| AuditLog::create(sandbox, name));
        let flags = audits[0].flags();
        let cluster = Cluster::start_with(sandbox, &[&flags[0], &flags[1]]);
        let relays = [PORT, SECOND_PORT].map(|port| Relay::start(sandbox, SocketAddr::new(ADDRESS, port)));
        let mut servers = Self { second: None, cluster, audits, relays };
        servers.start_second();
        servers
    }

    fn start_second(&mut self) {
        let mut flags = self.audits[1].flags().to_vec();
        flags.push("--disable-http2-serving".to_owned());
        self.second = Some(self.cluster.control_plane.start_second(&flags));
    }

    fn kill_second(&mut self) {
        if let Some(mut second) = self.second.take() {
            second.kill();
        }
    }

    fn use_second(&mut self) {
        self.cluster.use_server(&format!("https://{ADDRESS}:{SECOND_PORT}"));
    }

    fn start_agent(&self, node: &str) -> RunningAgent {
        let urls = self.relays.each_ref().map(|relay| format!("https://{}", relay.address())).join(",");
        let agent = Agent::new(self.cluster.sandbox).kubeconfig(self.cluster.control_plane.agent_kubeconfig());
        agent.args(["--apiserver", &urls, "--node-name", node, "--log-level", "debug"]).start()
    }

    /// Lists that the agent has got of Services and EndpointSlices.
    fn list_count(&self) -> usize {
        let of = |audit: &AuditLog| audit.lists("services").len() + audit.lists("endpointslices").len();
        self.audits.iter().map(of).sum()
    }
}

#[test]
fn another_api_server_goes_on_where_one_was_killed() {
    let sandbox = Sandbox::for_test();
    let mut servers = Servers::start(&sandbox);
    servers.cluster.apply(manifest::node(NODE, "a"));
    servers.cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
    let mut agent = servers.start_agent(NODE);
    let web = "TCP 10.96.0.10:80 10.244.0.1:8080";
    servers.cluster.expect(&[web]);

    let source = || {
        let rows = cproxy(&sandbox, &["check", "-o", "json"]).json();
        let row = rows.as_array().and_then(|rows| rows.iter().find(|row| row["name"] == "source")).cloned();
        row.map(|row| (row["state"].clone(), row["detail"].as_str().unwrap_or_default().to_owned())).unwrap_or_default()
    };
    let (state, detail) = source();
    let first = servers.relays[0].address();
    assert_eq!(state, "ok", "{detail}");
    assert!(detail.starts_with(&format!("follows https://{first}/ (its 1st choice), last confirmed ")), "{detail}");
    assert!(detail.ends_with(" s ago, view all"), "{detail}");

    // All watches share one connection, and the other server is left alone.
    let running = || servers.audits[0].requests().iter().filter(|request| !request.is_done).count();
    eventually(PATIENCE, "three watches are under way", || if running() == 3 { Ok(()) } else { Err(running()) });
    assert_eq!(servers.relays[0].history(), [RelayChange::Opened(0)]);
    assert_eq!(servers.relays[1].history(), []);

    let lists = servers.list_count();
    echo::while_a_client_connects("10.96.0.10:80", "10.244.0.1:8080", || {
        servers.cluster.control_plane.kill_api_server();
        let start = Instant::now();
        // Over HTTP/1.1 each watch has a connection of its own.
        servers.relays[1].wait_for_connections(3, FAILOVER_MAX);
        println!("the second API server is followed after {:?}", start.elapsed());
        let second = servers.relays[1].address();
        agent.wait_log(&format!("INFO connected to another API server, at https://{second}"), PATIENCE);
        let (state, detail) = source();
        assert_eq!(state, "degraded", "{detail}");
        assert!(detail.starts_with(&format!("follows https://{second}/ (its 2nd choice), ")), "{detail}");
        servers.use_second();
        servers.cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
        servers.cluster.expect(&[web, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
        assert_eq!(servers.list_count(), lists, "{:#?}", servers.audits[1].requests());

        // A server that has just failed is better than none.
        servers.cluster.start_api_server();
        servers.kill_second();
        servers.relays[0].wait_for_connections(1, FAILOVER_MAX);
        servers.cluster.delete("Service", "new");
        servers.cluster.expect(&[web]);

        servers.cluster.control_plane.kill_api_server();
        for relay in &servers.relays {
            agent.wait_log(&format!("https://{}/: ", relay.address()), PATIENCE);
        }
        servers.cluster.assert_table(&[web]);
        servers.start_second();
        servers.use_second();
        servers.cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
        servers.cluster.expect(&[web, "TCP 10.96.0.11:80 10.244.0.2:8080"]);
    });
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}

/// Checks that the agent goes back to the preferred API server some time after that has returned, and without a list.
pub(crate) fn assert_return() {
    let sandbox = Sandbox::for_test();
    let mut servers = Servers::start(&sandbox);
    servers.cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
    let web = "TCP 10.96.0.10:80 10.244.0.1:8080";
    let mut agent = servers.start_agent("elsewhere");
    servers.cluster.expect(&[web]);
    servers.cluster.control_plane.kill_api_server();
    let failed = Instant::now();
    servers.relays[1].wait_for_connections(2, FAILOVER_MAX);
    servers.cluster.start_api_server();
    servers.cluster.expect(&[web]);
    let lists = servers.list_count();

    servers.relays[0].wait_for_connections(1, RETURN_MAX);
    assert!(failed.elapsed() > Duration::from_secs(60), "too early: {:?}", failed.elapsed());
    servers.relays[1].wait_for_connections(0, PATIENCE);
    servers.kill_second();
    servers.cluster.delete("Service", "web");
    servers.cluster.expect(&[]);
    assert_eq!(servers.list_count(), lists, "{:#?}", servers.audits[0].requests());
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}
