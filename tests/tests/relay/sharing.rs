//! Places of connections and credentials that end: no client costs another its service.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::Duration,
};

use cproxy_tests::{control_plane::Validity, process::eventually, sandbox::Sandbox};

use crate::{
    access::{certified, create_account, expect_refusal, stranger, token},
    client::{Client, Watching},
    fixture::{Cluster, PATIENCE, RELAY, SERVICES},
};

/// Bound of the relay's connections.
const CONNECTIONS_MAX: &str = "40";

/// Connections of clients that are not known, of that bound.
const UNKNOWN_MAX: usize = 16;

/// Time that each of them has to show something while others wait.
const SHOW_TIME: Duration = Duration::from_secs(3);

fn watch(client: &Client<'_>) -> Watching {
    let watching = client.watch(&format!("{SERVICES}?watch=true"));
    eventually(PATIENCE, "the watch has begun", || watching.response().map(drop).ok_or("not yet"));
    watching
}

#[test]
fn connections_that_show_nothing_lock_nobody_out() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    create_account(&cluster);
    let relay = cluster.tls_relay().args(["--max-connections", CONNECTIONS_MAX]).start();
    let client = stranger(&cluster).token(&token(&cluster, &[]));
    let watching = watch(&client);
    let mut silent: Vec<_> = (0..100).map(|_| TcpStream::connect(RELAY).unwrap()).collect();
    // Clients of another address are served at once, and those of this one when the silent ones have had their time.
    assert_eq!(client.clone().args(["--interface", "127.0.0.9"]).get(SERVICES).code, 200);
    thread::sleep(SHOW_TIME);
    assert_eq!(client.get(SERVICES).code, 200);
    // The oldest went first.
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(silent[0].read(&mut [0]).map_err(|error| error.kind()).unwrap_or(0), 0);
    let displaced = relay.metric("cproxy_relay_connections_displaced_total");
    assert!(displaced >= (100 - UNKNOWN_MAX) as f64, "{displaced}");
    assert!(relay.metric("cproxy_relay_connections") <= (UNKNOWN_MAX + 2) as f64);
    cluster.create(&crate::fixture::service("team", "late"));
    eventually(PATIENCE, "the watch goes on", || {
        if watching.changes().contains(&"ADDED late".to_owned()) { Ok(()) } else { Err(format!("{watching:?}")) }
    });
}

#[test]
fn of_clients_that_come_at_once_the_first_are_served_also_if_they_are_slow() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let _relay = cluster.open_relay().args(["--max-connections", CONNECTIONS_MAX]).start();
    let mut clients: Vec<_> = (0..100).map(|_| TcpStream::connect(RELAY).unwrap()).collect();
    for (number, client) in clients[..UNKNOWN_MAX].iter_mut().enumerate() {
        client.write_all(b"GET /api HTTP/1.1\r\nhost: relay\r\n\r\n").unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = [0; 12];
        client.read_exact(&mut head).unwrap_or_else(|error| panic!("client {number}: {error}"));
        assert_eq!(&head, b"HTTP/1.1 200", "client {number}");
    }
}

#[test]
fn an_identity_has_a_share_of_the_connections_and_others_have_theirs() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    create_account(&cluster);
    let relay = cluster.tls_relay().args(["--max-connections", CONNECTIONS_MAX]).start();
    let of_node = |node: &str| {
        let name = format!("--bound-object-name={node}");
        stranger(&cluster).token(&token(&cluster, &["--bound-object-kind=Node", &name]))
    };
    let first = of_node("node-1");
    let _watches: Vec<_> = (0..20).map(|_| watch(&first)).collect();
    expect_refusal(&first.get(SERVICES), 429, "TooManyRequests", "20 connections, as many as one may have");
    // Another token of the same node is the same client, and one of another node is not.
    assert_eq!(of_node("node-1").get(SERVICES).code, 429);
    let second = of_node("node-2");
    let _others: Vec<_> = (0..20).map(|_| watch(&second)).collect();
    // The house is full. One of the two gives way.
    let third = stranger(&cluster).token(&token(&cluster, &[]));
    let watching = watch(&third);
    assert_eq!(third.get(SERVICES).code, 200);
    assert!(relay.metric("cproxy_relay_connections_max_exceeded_total") >= 2.0);
    assert!(relay.metric("cproxy_relay_connections_displaced_total") >= 1.0);
    drop(watching);
}

#[test]
fn a_relay_with_an_audience_takes_tokens_for_it_alone() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    create_account(&cluster);
    let _relay = cluster.tls_relay().args(["--token-audiences", "fleet,cproxy-relay"]).start();
    let client = |more: &[&str]| stranger(&cluster).token(&token(&cluster, more));
    assert_eq!(client(&["--audience=cproxy-relay"]).get(SERVICES).code, 200);
    let refused = client(&[]).get(SERVICES);
    expect_refusal(&refused, 401, "Unauthorized", "refuses the token");
}

#[test]
fn a_watch_ends_when_its_certificate_has_expired() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let relay = cluster.tls_relay().arg("--client-ca-file").arg(cluster.control_plane.client_ca_file()).start();
    let client = certified(&cluster, "system:node:node-2", Some("system:nodes"), Validity::For(Duration::from_secs(6)));
    let mut watching = watch(&client);
    watching.wait(PATIENCE);
    assert!(client.is_refused(SERVICES));
    assert!(relay.metric("cproxy_relay_connections_cut_total") >= 1.0);
}
