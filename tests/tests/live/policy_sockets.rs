//! Sockets of the pod when its network policy changes: those that it refused, and connections that stand.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs,
    io::{self, Read as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use cproxy_tests::{
    echo,
    manifest::{Service, Slice},
    process::{cproxy, eventually},
    world::{SYNC, TCP},
};
use serde_json::{Value, json};

use crate::{
    policy::{CLIENT, DENIED, OTHER, Pods, REFUSED, WEB, both, connects, kind, policy},
    trace,
};

/// Address that no policy allows.
const STRANGER: (&str, u16) = ("10.244.0.77", TCP);

/// A Service of datagrams, at the port of the pods.
fn datagrams(name: &str, vip: &str, backend: IpAddr) -> [Value; 2] {
    [
        Service::new(name).cluster_ips([vip]).udp("dns", 53, TCP).into(),
        Slice::v4(name).udp("dns", TCP).ready([backend]).into(),
    ]
}

#[test]
fn datagram_sockets_that_were_refused_are_closed_once_policy_allows_them() {
    let pods = Pods::new();
    let services = datagrams("names", "10.96.0.13", OTHER.v4.into());
    let objects = |label: &str| pods.write(&[&[both()], &services[..]].concat(), label);
    objects("other");
    let _agent = pods.enforce();
    let [v4, v6] = [IpAddr::from(OTHER.v4), OTHER.v6.into()].map(|address| SocketAddr::new(address, TCP));
    let _servers = [v4, v6].map(|address| echo::udp_in(&pods.other, address, "other"));
    let peers = [v4, v6, "10.96.0.13:53".parse().unwrap()];
    let sockets = peers.map(|peer| {
        let socket = echo::udp_client(peer).unwrap();
        socket.connect(peer).unwrap();
        assert_eq!(kind(echo::ask_peer(&socket)), REFUSED, "{peer}");
        assert_eq!(socket.peer_addr().unwrap(), peer);
        socket
    });
    // One that policy goes on to refuse stays: a third pod.
    let denied = echo::udp_client((OTHER.v4, TCP)).unwrap();
    denied.connect(STRANGER).unwrap();
    objects("client");
    for (socket, peer) in sockets.iter().zip(peers) {
        eventually(SYNC, format!("the socket to {peer} is closed"), || match echo::ask_peer(socket) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Ok(()),
            other => Err(format!("{other:?}")),
        });
        assert_eq!(echo::ask_connected_udp(peer).unwrap(), "other", "{peer}");
    }
    assert_eq!(kind(echo::ask_peer(&denied)), REFUSED);
}

/// Whether a connection still stands.
fn stands(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    matches!(stream.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

fn enter(cgroup: &Path) {
    fs::write(cgroup.join("cgroup.procs"), "0").unwrap();
}

#[test]
fn connections_that_a_change_no_longer_allows_are_closed_if_a_setting_says_so() {
    for closes in [true, false] {
        let pods = Pods::new();
        let exempt = pods.sandbox.cgroup().join("exempt");
        fs::create_dir(&exempt).unwrap();
        pods.write(&[both()], "client");
        let action = if closes { "close" } else { "keep" };
        let agent = pods
            .agent("enforce")
            .args(["--policy-existing", action])
            .args(["--policy-exempt-cgroup", exempt.to_str().unwrap()]);
        let _agent = agent.start();
        let _web = [WEB.v4.into(), IpAddr::from(WEB.v6)].map(|address| echo::tcp(&pods.sandbox, (address, TCP), "web"));
        let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
        let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
        let to = |address: IpAddr| echo::connect_tcp((address, TCP)).unwrap().1;
        let own = to(WEB.v4.into());
        let [allowed_out, denied_out] = [CLIENT.v4, OTHER.v4].map(|address| to(address.into()));
        enter(&exempt);
        let exempt_out = to(OTHER.v4.into());
        enter(pods.sandbox.cgroup());
        let [allowed_in, allowed_in6] =
            [WEB.v4.into(), IpAddr::from(WEB.v6)].map(|address| pods.client.run(|| to(address)));
        let [denied_in, denied_in6] =
            [WEB.v4.into(), IpAddr::from(WEB.v6)].map(|address| pods.other.run(|| to(address)));
        // OTHER loses its label, and a change after that shows that what was to be closed is.
        pods.write(&[both()], "other");
        eventually(SYNC, "the policy has changed", || {
            let counters = cproxy(&pods.sandbox, &["get", "counters", "-o", "json"]).success().json();
            let closed = &counters["policy_sockets_closed"];
            let is_denied = kind(connects(OTHER.v4, TCP)) == DENIED;
            if is_denied && (!closes || *closed == 3) { Ok(()) } else { Err(format!("{is_denied}, {closed}")) }
        });
        for (stream, may_stand, what) in [
            (&own, true, "of the pod with itself"),
            (&allowed_out, true, "to a peer that is allowed"),
            (&exempt_out, true, "of an exempt cgroup"),
            (&allowed_in, true, "from a peer that is allowed"),
            (&allowed_in6, true, "from a peer that is allowed, IPv6"),
            (&denied_out, !closes, "to a peer that is denied"),
            (&denied_in, !closes, "from a peer that is denied"),
            (&denied_in6, !closes, "from a peer that is denied, IPv6"),
        ] {
            assert_eq!(stands(stream), may_stand, "{what}, {action}");
        }
    }
}

#[test]
fn a_tracer_shows_denials_with_the_rule() {
    let pods = Pods::new();
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    pods.write(&[both(), policy("deny", deny)], "other");
    let _agent = pods.enforce();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    let mut all = trace::start(&pods.sandbox, &["-o", "json", "--verdict", "denied"]);
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
    assert_eq!(kind(echo::udp_client((OTHER.v6, 53)).unwrap().send_to(b"?", (OTHER.v6, 53))), DENIED);
    assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), REFUSED);
    let why = "no rule of NetworkPolicy shop/both, NetworkPolicy shop/deny allows it";
    let denied = |direction: &str, call: &str, address: IpAddr, port: u16| {
        [
            ("verdict", json!("denied")),
            ("direction", json!(direction)),
            ("call", json!(call)),
            ("address", json!(address)),
            ("port", json!(port)),
            ("reason", json!(why)),
        ]
    };
    let event = trace::wait_event(&mut all, &denied("Egress", "connect", OTHER.v4.into(), TCP));
    assert!(event["pid"].as_u64().is_some_and(|pid| pid > 1) && event["socket_cookie"] != 0, "{event}");
    trace::wait_event(&mut all, &denied("Egress", "send", OTHER.v6.into(), 53));
    let event = trace::wait_event(&mut all, &denied("Ingress", "receive", OTHER.v4.into(), TCP));
    for unknown in ["pid", "command", "uid", "cgroup", "netns_cookie", "socket_cookie"] {
        assert_eq!(event[unknown], Value::Null, "{event}");
    }
    assert!(all.stop().success());
    assert_eq!(trace::events(&all).len(), 3, "{}", all.log());

    // A filter by the Service's address finds the denial of its backend, and no other one.
    let mut of_service = trace::start(&pods.sandbox, &["-o", "json", "10.96.0.12"]);
    assert_eq!(kind(connects(CLIENT.v4, TCP)), REFUSED, "nobody listens, and nobody denies it");
    assert_eq!(kind(connects(OTHER.v6, TCP)), DENIED);
    assert_eq!(kind(connects([10, 96, 0, 12], 80)), DENIED);
    trace::wait_event(&mut of_service, &denied("Egress", "connect", OTHER.v4.into(), TCP));
    assert!(of_service.stop().success());
    let verdicts: Vec<_> = trace::events(&of_service).iter().map(|event| event["verdict"].clone()).collect();
    assert_eq!(verdicts[..2], ["forwarded", "denied"], "{}", of_service.log());
    assert!(verdicts[2..].iter().all(|verdict| verdict == "closed"), "{}", of_service.log());
}
