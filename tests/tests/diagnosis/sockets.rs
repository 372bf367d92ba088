//! Faults that only sockets show: backends that are gone or hard to reach, and sockets that were not translated.

use std::{
    io::Write,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Command,
};

use cproxy_tests::{
    borrower::Borrower,
    echo,
    manifest::{Endpoint, Service, Slice},
    netns::Netns,
    process::eventually,
    sandbox::Sandbox,
    world::{Form, PORT, SYNC, TCP, World, pod, serve_pods, web, web_with},
};
use serde_json::Value;

use super::Answer;

const CALL: &str = "10.96.0.10:80";

#[test]
fn a_udp_backend_that_is_dead() {
    // The pod has its address and no server.
    let world = World::builder().objects(web_with([1])).start();
    world.sandbox.add_addresses(pod(1).addresses());
    let dead = ["forwarded to backend 10.244.0.1:", "which refuses", "nothing listens there"];
    Answer::to(&world.sandbox, &["10.96.0.10:80/udp", "--probe"]).fails_because(&dead).has(
        "degraded",
        "backend",
        &["10.244.0.1:8081", "refuses datagrams: nothing listens there"],
    );
    Answer::to(&world.sandbox, &[CALL, "--probe"]).fails_because(&dead).has(
        "degraded",
        "backend",
        &["10.244.0.1:8080", "refuses connections: nothing listens there"],
    );
    let _servers = serve_pods(&world.sandbox, [2]);
    world.set_pods([2]);
    Answer::to(&world.sandbox, &[CALL, "--probe"]).has("ok", "backend", &["10.244.0.2:8080 accepts connections"]);
    Answer::to(&world.sandbox, &["10.96.0.10:80/udp", "--probe"]).has("ok", "backend", &["did not refuse"]);
}

#[test]
fn a_backend_without_a_route() {
    let world = World::start([1]);
    world.set_pods([1, 9]);
    let no_route = "10.244.0.9:8080 cannot be reached: Network is unreachable";
    let answer = Answer::to(&world.sandbox, &[CALL]).forwarded().has("degraded", "backend", &[no_route]);
    assert!(answer.verdict().contains("one of 2 backends"), "{}", answer.verdict());
    assert!(answer.verdict().contains("of which 1 fails, such as 10.244.0.9:8080"), "{}", answer.verdict());
    world.set_pods([9]);
    Answer::to(&world.sandbox, &[CALL]).fails_because(&["10.244.0.9:8080", "which cannot be reached"]);
}

/// The ClusterIP is this process's own: sockets of all network namespaces are looked at.
#[test]
fn a_socket_from_before_the_attachment() {
    let own = Ipv4Addr::from_bits(Ipv4Addr::new(10, 97, 0, 0).to_bits() | std::process::id() & 0xFFFF);
    let (vip, call) = (SocketAddr::from((own, PORT)), format!("{own}:{PORT}"));
    let prepare = |sandbox: &Sandbox| {
        sandbox.add_address(own);
        [echo::tcp(sandbox, vip, "the VIP itself")]
    };
    let world = World::builder().prepare(prepare).pods([1]).objects([]).start();
    let early = TcpStream::connect(vip).unwrap();
    let service = Service::new("early").cluster_ips([own]).tcp("http", PORT, TCP);
    let slice = Slice::v4("early").tcp("http", TCP).ready([pod(1).v4]);
    world.set([service.into(), slice.into()], |rows| !rows.is_empty());
    let borrower = Borrower::start("cproxy-broker", early.try_clone().unwrap());
    let process = format!("{}/", std::process::id());
    Answer::to(&world.sandbox, &[&call]).forwarded().has(
        "degraded",
        "sockets",
        &["1 connected, or connecting, to the ClusterIP itself", &process, "connect anew"],
    );
    drop((early, borrower));
    let late = TcpStream::connect(vip).unwrap();
    Answer::to(&world.sandbox, &[&call]).forwarded().has("ok", "sockets", &["1 connected"]);
    drop(late);
}

#[test]
fn a_backend_whose_large_packets_are_lost() {
    let world = World::builder().objects([]).start();
    let neighbour = world.sandbox.neighbour([pod(1).v4]);
    // Its link takes no large packets, and its replies ask for them.
    let link = lines_of(&neighbour, &["route", "show", "dev", "far", "scope", "link"]);
    let words: Vec<_> = link.split_whitespace().collect();
    let (subnet, far) = (*words.first().unwrap(), *words.last().unwrap());
    lines_of(&neighbour, &["link", "set", "far", "mtu", "600"]);
    lines_of(&neighbour, &["route", "replace", subnet, "dev", "far", "src", far, "advmss", "1400"]);
    world.sandbox.ip(&format!("route add {} via {far}\n", pod(1).v4));
    let _server = echo::tcp_in(&neighbour, (pod(1).v4, TCP), "pod-1");
    let slice = Slice::v4("web").tcp("http", TCP).endpoint(Endpoint::ready(pod(1).v4));
    let has_backend = |row: &Value| row["backends"].as_array().is_some_and(|backends| !backends.is_empty());
    world.set([web().into(), slice.into()], |rows| rows.iter().any(has_backend));
    let (_, mut socket) = echo::connect_tcp(Form::V4.web()).unwrap();
    // One packet: those that the kernel cuts later pass the link uncut.
    socket.write_all(&[b'x'; 1_200]).unwrap();
    eventually(SYNC * 3, "the socket has sent again", || {
        let answer = Answer::to(&world.sandbox, &[CALL]);
        let lines = answer.lines("sockets").join("\n");
        let words = ["10.244.0.1:8080", "does not acknowledge", "MTU"];
        if words.iter().all(|word| lines.contains(word)) { Ok(()) } else { Err(answer.0.stdout) }
    });
}

/// Output of `ip` in a network namespace.
fn lines_of(netns: &Netns, arguments: &[&str]) -> String {
    let output = netns.run(|| Command::new("ip").args(arguments).output()).unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
