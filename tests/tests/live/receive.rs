//! `cproxy run --receive`: what comes to the address of a load balancer reaches the pod's port and is answered from
//! there, by real system calls between network namespaces.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

mod balanced;
mod servers;

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    process::Command,
    time::Duration,
};

use cproxy_tests::{
    echo,
    manifest::{self, Service, Slice},
    process::{Agent, RunningAgent, cproxy, eventually},
    world::{Host, SYNC, TCP},
};
use rustix::net::{AddressFamily, SocketType, bind, listen, socket, sockopt};
use serde_json::{Value, json};

use crate::policy::{CLIENT, CLOSED, OTHER, Pods, REFUSED, WEB, assert_verified, kind, policy};

/// Address of the load balancer, and its port.
const BALANCER: Host = Host::new([203, 0, 113, 10], [0x2001, 0xdb8, 0x113, 0, 0, 0, 0, 10]);
const PORT: u16 = 80;
/// Budget of instructions that the kernel verifies, for each program: the one that looks sockets up is a policy's, too.
const VERIFIED: u32 = 4_400;
const RANGES: &str = "203.0.113.0/24,2001:db8:113::/64";

/// Two clients whose packets to the balancer's address arrive unchanged, as those of a balancer with direct return.
fn pods() -> Pods {
    let pods = Pods::new();
    for netns in [&pods.client, &pods.other] {
        pods.sandbox.ip_in(
            netns,
            &format!(
                "route add {} via {} dev eth0 onlink\nroute add {} via fe80::1 dev eth0\n",
                BALANCER.v4, WEB.v4, BALANCER.v6
            ),
        );
    }
    pods
}

/// A Service of this pod with a load balancer's address.
fn service() -> Service {
    let service = Service::new("web").cluster_ips(["10.96.0.10", "fd00:10:96::a"]);
    let service = service.tcp("http", PORT, TCP).udp("dns", TCP, TCP).udp("other", 53, TCP);
    BALANCER.addresses().into_iter().fold(service, Service::load_balancer_ip)
}

fn write(pods: &Pods, service: Service) {
    write_objects(pods, service, |slice| slice);
}

/// Writes a Service, and its slices with further ports.
fn write_objects(pods: &Pods, service: Service, more: impl Fn(Slice) -> Slice) {
    let ports = |slice: Slice| more(slice.tcp("http", TCP).udp("dns", TCP).udp("other", TCP));
    let slices = [ports(Slice::v4("web")).ready([WEB.v4]).into(), ports(Slice::v6("web")).ready([WEB.v6]).into()];
    manifest::write(&pods.sandbox.manifest_dir(), "web.json", [Value::from(service)].into_iter().chain(slices));
}

fn agent(pods: &Pods) -> Agent<'_> {
    let agent = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir());
    // The clients are of this process, and so in the cgroup of the hooks; their calls are not to be translated.
    agent.args(["--receive", RANGES, "--pod-ip", &format!("{},{}", WEB.v4, WEB.v6), "--exclude-netns", "others"])
}

/// An agent that receives.
fn receive(pods: &Pods) -> RunningAgent {
    write(pods, service());
    let running = agent(pods).start();
    eventually(SYNC, "all ports are received", || {
        let rows = rows(pods);
        if rows.len() == 4 { Ok(()) } else { Err(format!("{rows:?}")) }
    });
    running
}

fn rows(pods: &Pods) -> Vec<Value> {
    let run_dir = pods.sandbox.run_dir();
    let output = cproxy(&pods.sandbox, &["get", "receive", "-o", "json", "--run-dir", run_dir.to_str().unwrap()]);
    output.json().as_array().unwrap().clone()
}

fn connect(address: impl Into<IpAddr>, port: u16) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&SocketAddr::new(address.into(), port), Duration::from_secs(5))
}

/// Local routes of a protocol.
fn routes(protocol: u8) -> String {
    let show = |family: &str| {
        let words = [family, "route", "show", "table", "local", "proto", &protocol.to_string()];
        String::from_utf8(Command::new("ip").args(words).output().unwrap().stdout).unwrap()
    };
    show("-4") + &show("-6")
}

/// Checks that a connection to the balancer arrives with the addresses of both ends.
fn arrives(pods: &Pods, listener: &TcpListener, balancer: IpAddr, client: IpAddr) {
    let stream = pods.client.run(|| connect(balancer, PORT)).unwrap();
    let (accepted, peer) = listener.accept().unwrap();
    assert_eq!(accepted.local_addr().unwrap().ip().to_canonical(), balancer);
    assert_eq!(accepted.local_addr().unwrap().port(), PORT);
    assert_eq!(peer.ip().to_canonical(), client);
    assert_eq!(stream.peer_addr().unwrap(), SocketAddr::new(balancer, PORT));
}

#[test]
fn the_programs_are_verified_within_their_budget() {
    let pods = pods();
    let _agent = receive(&pods);
    let links = ["policy-v1/sk_lookup", "receive-v1/sock_ops", "receive-v1/sendmsg4", "receive-v1/sendmsg6"];
    assert_verified(links.map(|link| pods.sandbox.pin_dir().join(link)).into_iter(), VERIFIED);
}

#[test]
fn a_connection_to_the_balancers_address_reaches_the_pods_port() {
    let pods = pods();
    let _agent = receive(&pods);
    let (v4, v6) = (BALANCER.v4.into(), BALANCER.v6.into());
    let refused = |address| pods.client.run(|| kind(connect(address, PORT)));
    assert_eq!((refused(v4), refused(v6)), (REFUSED, REFUSED), "nobody listens");
    for (at, serves_v4, serves_v6) in [
        (SocketAddr::from(([0, 0, 0, 0], TCP)), true, false),
        ((WEB.v4, TCP).into(), true, false),
        ((WEB.v6, TCP).into(), false, true),
        // Dual-stack, as std makes it.
        (SocketAddr::from(([0u16; 8], TCP)), true, true),
    ] {
        let listener = TcpListener::bind(at).unwrap();
        for (address, client, serves) in [(v4, CLIENT.v4.into(), serves_v4), (v6, CLIENT.v6.into(), serves_v6)] {
            if serves {
                arrives(&pods, &listener, address, client);
            } else {
                assert_eq!(refused(address), REFUSED, "{at}");
            }
        }
    }
    let v6_only = socket(AddressFamily::INET6, SocketType::STREAM, None).unwrap();
    sockopt::set_ipv6_v6only(&v6_only, true).unwrap();
    bind(&v6_only, &SocketAddr::from(([0u16; 8], TCP))).unwrap();
    listen(&v6_only, 8).unwrap();
    arrives(&pods, &TcpListener::from(v6_only), v6, CLIENT.v6.into());
    assert_eq!(refused(v4), REFUSED, "an IPv6 socket takes no IPv4 connection");
}

#[test]
fn other_ports_and_loopback_listeners_stay_unreachable() {
    let pods = pods();
    let _agent = receive(&pods);
    let _ssh = TcpListener::bind(("0.0.0.0", CLOSED)).unwrap();
    let _loopback = ["127.0.0.1", "::1"].map(|address| TcpListener::bind((address, TCP)).unwrap());
    for address in BALANCER.addresses() {
        for port in [CLOSED, PORT, TCP] {
            assert_eq!(pods.client.run(|| kind(connect(address, port))), REFUSED, "{address} {port}");
        }
    }
    assert_eq!(kind(pods.client.run(|| connect(WEB.v4, CLOSED))), Ok(()), "the pod's own address is as before");
    let listeners: Vec<_> = rows(&pods).iter().map(|row| row["listener"].clone()).collect();
    assert_eq!(listeners.iter().filter(|listener| **listener == json!("loopback")).count(), 2, "{listeners:?}");
}

/// A listener of a reuseport group that does not wait for connections.
fn reuseport_member() -> TcpListener {
    let member: OwnedFd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_reuseport(&member, true).unwrap();
    bind(&member, &SocketAddr::from(([0, 0, 0, 0], TCP))).unwrap();
    listen(&member, 512).unwrap();
    let member = TcpListener::from(member);
    member.set_nonblocking(true).unwrap();
    member
}

#[test]
fn a_reuseport_group_shares_connections_and_survives_a_member() {
    let pods = pods();
    let _agent = receive(&pods);
    let mut members: Vec<_> = (0..3).map(|_| reuseport_member()).collect();
    let calls = |count: usize| {
        let streams: Vec<_> = (0..count).map(|_| pods.client.run(|| connect(BALANCER.v4, PORT))).collect();
        streams.into_iter().collect::<io::Result<Vec<_>>>().unwrap()
    };
    let accepted = |members: &[TcpListener]| -> Vec<usize> {
        members.iter().map(|member| std::iter::from_fn(|| member.accept().ok()).count()).collect()
    };
    let streams = calls(300);
    let shares = accepted(&members);
    assert_eq!(shares.iter().sum::<usize>(), streams.len());
    assert!(shares.iter().all(|share| (50..150).contains(share)), "{shares:?}");
    // The one that came first is the one that is found first.
    drop(members.remove(0));
    let streams = calls(100);
    assert_eq!(accepted(&members).iter().sum::<usize>(), streams.len());
    drop(members.remove(1));
    let streams = calls(10);
    assert_eq!(accepted(&members), [streams.len()]);
}

/// As when a server of many processes is restarted bit by bit.
#[test]
fn the_latest_members_of_a_large_reuseport_group_are_known() {
    let pods = pods();
    let _agent = receive(&pods);
    let old: Vec<_> = (0..20).map(|_| reuseport_member()).collect();
    let new: Vec<_> = (0..20).map(|_| reuseport_member()).collect();
    drop(old);
    for _ in 0..10 {
        pods.client.run(|| connect(BALANCER.v4, PORT)).unwrap();
    }
    assert_eq!(new.iter().map(|member| std::iter::from_fn(|| member.accept().ok()).count()).sum::<usize>(), 10);
}

/// A socket of one interface alone is not for what comes in by another.
#[test]
fn a_listener_of_another_interface_is_not_chosen() {
    let pods = pods();
    let _agent = receive(&pods);
    let bound: OwnedFd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind_to_device(&bound, "lo");
    bind(&bound, &SocketAddr::from(([0, 0, 0, 0], TCP))).unwrap();
    listen(&bound, 8).unwrap();
    assert_eq!(pods.client.run(|| kind(connect(BALANCER.v4, PORT))), REFUSED);
    drop(bound);
    let listener = TcpListener::bind((WEB.v4, TCP)).unwrap();
    arrives(&pods, &listener, BALANCER.v4.into(), CLIENT.v4.into());
}

fn bind_to_device(socket: &OwnedFd, device: &str) {
    let length = u32::try_from(device.len()).unwrap();
    // SAFETY: an open socket, and a name of this length.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_BINDTODEVICE, device.as_ptr().cast(), length)
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

#[test]
fn more_than_there_is_room_for_is_a_problem_and_opens_nothing() {
    let pods = pods();
    let many = (0..200_u8).fold(Service::new("many").cluster_ips(["10.96.0.11"]), |service, last| {
        service.load_balancer_ip(std::net::Ipv4Addr::new(203, 0, 113, last + 20))
    });
    let many = (0..20_u16).fold(many, |service, port| service.tcp(&format!("p{port}"), 2_000 + port, 2_000 + port));
    let slice = (0..20_u16).fold(Slice::v4("many"), |slice, port| slice.tcp(&format!("p{port}"), 2_000 + port));
    manifest::write(&pods.sandbox.manifest_dir(), "many.json", [many.into(), slice.ready([WEB.v4]).into()]);
    let _agent = receive(&pods);
    assert_eq!(routes(98).lines().count(), 2, "{}", routes(98));
    let words = ["get", "problems", "--run-dir", pods.sandbox.run_dir().to_str().unwrap()].map(str::to_owned);
    let text = cproxy(&pods.sandbox, &words).success().stdout;
    assert!(text.contains("not received: 2048 addresses and ports are, at most"), "{text}");
}

#[test]
fn an_address_of_a_device_is_not_received() {
    let pods = pods();
    let _open = TcpListener::bind(("0.0.0.0", CLOSED)).unwrap();
    pods.sandbox
        .ip(&format!("link add second type veth peer name further\naddress add {}/32 dev second\n", BALANCER.v4));
    write(&pods, service());
    let _agent = agent(&pods).start();
    let is_received = |address: Host, is: bool| {
        eventually(SYNC, "what is received follows the devices", || {
            let text = routes(98);
            if text.contains(&address.v4.to_string()) == is && text.contains("2001:db8:113::a") {
                Ok(())
            } else {
                Err(text)
            }
        });
    };
    is_received(BALANCER, false);
    assert_eq!(kind(pods.client.run(|| connect(BALANCER.v4, CLOSED))), Ok(()), "as before");
    pods.sandbox.ip(&format!("address del {}/32 dev second\n", BALANCER.v4));
    is_received(BALANCER, true);
    assert_eq!(kind(pods.client.run(|| connect(BALANCER.v4, CLOSED))), REFUSED);
}

/// A reply after the Service has left goes from the pod's own address, and does not fail.
#[test]
fn a_late_reply_is_sent() {
    let pods = pods();
    let _agent = receive(&pods);
    let server = UdpSocket::bind(("0.0.0.0", TCP)).unwrap();
    let client = pods.client.run(|| echo::udp_client((BALANCER.v4, TCP))).unwrap();
    client.send_to(b"?", (BALANCER.v4, TCP)).unwrap();
    let (_, peer) = server.recv_from(&mut [0; 8]).unwrap();
    fs::remove_file(pods.sandbox.manifest_dir().join("web.json")).unwrap();
    eventually(Duration::from_secs(30), "nothing is received", || {
        if routes(98).is_empty() { Ok(()) } else { Err(routes(98)) }
    });
    server.send_to(b"!", peer).unwrap();
}

#[test]
fn routes_go_also_where_the_pins_have_gone() {
    for cleans in [true, false] {
        let pods = pods();
        receive(&pods).kill();
        fs::remove_dir_all(pods.sandbox.pin_dir().join("receive-v1")).unwrap();
        assert!(!routes(98).is_empty());
        let _agent = if cleans {
            cproxy(&pods.sandbox, &["cleanup", "--pin-dir", pods.sandbox.pin_dir().to_str().unwrap()]).success();
            None
        } else {
            Some(Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir()).start())
        };
        assert_eq!(routes(98), "");
        assert!(!pods.sandbox.pin_dir().join("policy-v1").exists(), "the program that looks sockets up");
    }
}

#[test]
fn datagrams_are_answered_from_the_balancers_address() {
    let pods = pods();
    let _agent = receive(&pods);
    for (any, balancer, web) in [
        ("0.0.0.0", BALANCER.v4.into(), WEB.v4.into()),
        ("::", BALANCER.v6.into(), IpAddr::from(WEB.v6)),
        ("::", BALANCER.v4.into(), WEB.v4.into()),
    ] {
        let server = UdpSocket::bind((any, TCP)).unwrap();
        server.set_read_timeout(Some(SYNC)).unwrap();
        let client = pods.client.run(|| echo::udp_client((balancer, TCP))).unwrap();
        // One socket asks at the balancer's address and at the pod's, and each answer comes from where it has asked.
        for address in [balancer, web, balancer] {
            client.send_to(b"?", (address, TCP)).unwrap();
            let mut buffer = [0; 8];
            let (length, peer) = server.recv_from(&mut buffer).unwrap();
            server.send_to(buffer.get(..length).unwrap(), peer).unwrap();
            assert_eq!(client.recv_from(&mut buffer).unwrap(), (1, SocketAddr::new(address, TCP)), "{any} {address}");
        }
    }
    let problems = cproxy(&pods.sandbox, &["get", "problems", "--run-dir", pods.sandbox.run_dir().to_str().unwrap()]);
    let text = problems.success().stdout;
    assert!(text.contains("port 53/UDP of 203.0.113.10 is not received"), "{text}");
}

#[test]
fn connections_stay_over_the_agents_death_and_until_they_end() {
    let pods = pods();
    let mut agent = receive(&pods);
    let listener = TcpListener::bind(("0.0.0.0", TCP)).unwrap();
    let call = || pods.client.run(|| connect(BALANCER.v4, PORT));
    let (first, (_accepted, _)) = (call().unwrap(), listener.accept().unwrap());
    agent.kill();
    drop((call().unwrap(), listener.accept().unwrap()));
    agent = self::agent(&pods).start();
    drop((call().unwrap(), listener.accept().unwrap()));
    // The pod leaves the Service. It serves for as long as it has a connection.
    manifest::write(&pods.sandbox.manifest_dir(), "web.json", [Value::from(service())]);
    eventually(SYNC, "the port of the connection alone stays", || {
        let rows = rows(&pods);
        let is_left = |row: &Value| row["state"] == "leaving" && row["address"] == json!(BALANCER.v4.to_string());
        if rows.len() == 1 && rows.iter().all(is_left) { Ok(()) } else { Err(format!("{rows:?}")) }
    });
    drop((call().unwrap(), listener.accept().unwrap()));
    assert!(routes(98).contains("203.0.113.10") && !routes(98).contains("2001:db8"), "{}", routes(98));
    drop((first, _accepted));
    eventually(Duration::from_secs(30), "the address is given up", || {
        if routes(98).is_empty() && rows(&pods).is_empty() { Ok(()) } else { Err(routes(98)) }
    });
    drop(agent);
}

#[test]
fn policy_and_source_ranges_see_the_client() {
    let pods = pods();
    write(&pods, service().spec("loadBalancerSourceRanges", json!([format!("{}/32", CLIENT.v4)])));
    let listener = TcpListener::bind(("::", TCP)).unwrap();
    let running = agent(&pods).start();
    // It has listened before the programs were attached.
    drop(listener);
    let _listener = TcpListener::bind(("::", TCP)).unwrap();
    let [client, other] = [&pods.client, &pods.other];
    eventually(SYNC, "the client is let in", || {
        client.run(|| connect(BALANCER.v4, PORT)).map(drop).map_err(|error| error.to_string())
    });
    assert_eq!(kind(other.run(|| connect(BALANCER.v4, PORT))), REFUSED);
    assert_eq!(kind(other.run(|| connect(BALANCER.v6, PORT))), Ok(()), "no range is of IPv6");
    drop(running);

    // The policy names the pod's port, not the balancer's.
    write(&pods, service());
    let from_other = json!([{"ipBlock": {"cidr": format!("{}/32", OTHER.v4)}}]);
    let spec = json!({
        "podSelector": {}, "policyTypes": ["Ingress"],
        "ingress": [{"from": from_other, "ports": [{"port": TCP}]}],
    });
    pods.write(&[policy("others", spec)], "other");
    let _running = agent(&pods).args(["--policy", "enforce", "--policy-pod", "shop/web"]).start();
    eventually(SYNC, "the other one is let in", || {
        other.run(|| connect(BALANCER.v4, PORT)).map(drop).map_err(|error| error.to_string())
    });
    assert_eq!(kind(client.run(|| connect(BALANCER.v4, PORT))), REFUSED);
    assert_eq!(kind(client.run(|| connect(BALANCER.v6, PORT))), REFUSED);
}

#[test]
fn a_listener_from_before_is_served_at_equal_ports() {
    let pods = pods();
    let listener = TcpListener::bind(("0.0.0.0", TCP)).unwrap();
    write_objects(&pods, service().tcp("alt", TCP, TCP), |slice| slice.tcp("alt", TCP));
    let _agent = agent(&pods).start();
    eventually(SYNC, "it is received", || {
        pods.client.run(|| connect(BALANCER.v4, TCP)).map(drop).map_err(|error| error.to_string())
    });
    drop(listener.accept().unwrap());
    assert_eq!(kind(pods.client.run(|| connect(BALANCER.v4, PORT))), REFUSED);
    let of = |port: u16| rows(&pods).into_iter().find(|row| row["port"] == json!(port)).unwrap()["listener"].clone();
    assert_eq!((of(TCP), of(PORT)), (json!("yes"), json!("too-old")));
}

#[test]
fn nothing_is_left_by_cleanup_nor_by_an_agent_that_does_not_receive() {
    let pods = pods();
    // A route of somebody else, who also marks it.
    pods.sandbox.ip("route add local 203.0.113.99 dev lo proto 99 table local\n");
    let pins = pods.sandbox.pin_dir();
    let has_pins = |name: &str| pins.join(name).exists();
    let agent = receive(&pods);
    assert!(has_pins("receive-v1") && has_pins("policy-v1/sk_lookup") && !routes(98).is_empty());
    drop(agent);
    let plain = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir()).start();
    assert!(!has_pins("receive-v1") && !has_pins("policy-v1"), "{:?}", names(&pins));
    assert_eq!(routes(98), "");
    drop(plain);
    drop(receive(&pods));
    cproxy(&pods.sandbox, &["cleanup", "--pin-dir", pins.to_str().unwrap()]).success();
    assert!(!pins.exists() || names(&pins).is_empty(), "{:?}", names(&pins));
    assert_eq!(routes(98), "");
    assert!(routes(99).contains("203.0.113.99"));
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn operators_see_what_is_received_and_why_not() {
    let pods = pods();
    let _agent = receive(&pods);
    let (pins, run_dir) = (pods.sandbox.pin_dir(), pods.sandbox.run_dir());
    let places = ["--pin-dir", pins.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
    let explain = |words: &[&str], code: i32| {
        let output = cproxy(&pods.sandbox, &[&["explain"], words, &places].concat());
        assert_eq!(output.code, code, "{words:?}: {}{}", output.stdout, output.stderr);
        output.stdout
    };
    let at = |port: u16| format!("{}:{port}", BALANCER.v4);
    assert!(explain(&["--to", &at(PORT)], 1).contains("no socket listens on port 8080 of this pod"));
    let loopback = TcpListener::bind(("127.0.0.1", TCP)).unwrap();
    assert!(explain(&["--to", &at(PORT)], 1).contains("bound to a loopback address"));
    drop(loopback);
    let _listener = TcpListener::bind(("0.0.0.0", TCP)).unwrap();
    let expected = "received: a socket listens on port 8080 of this pod, for Service default/web\n";
    assert_eq!(explain(&["--to", &at(PORT)], 0), expected);
    assert_eq!(explain(&["--to", &at(PORT), "--from", "198.51.100.1"], 0), expected);
    let datagrams = format!("{}/udp", at(TCP));
    assert!(explain(&["--to", &datagrams], 0).contains("datagrams go to port 8080"));
    assert!(explain(&["--to", &at(CLOSED)], 1).contains("port 8082/TCP of 203.0.113.10 is not received"));
    assert!(explain(&["--to", "203.0.113.11:80"], 1).starts_with("not received: no Service of which this pod"));
    explain(&["--to", &at(PORT), "--from", "2001:db8::1"], 4);
    explain(&["--to", "default/web"], 4);
    let json: Value = serde_json::from_str(&explain(&["--to", &at(PORT), "-o", "json"], 0)).unwrap();
    assert_eq!((&json["code"], &json["received"]["pod_port"]), (&json!("listener"), &json!(TCP)));

    let mut words = vec!["check", "-o", "json", "--manifests"];
    let manifests = pods.sandbox.manifest_dir();
    words.push(manifests.to_str().unwrap());
    let lines = cproxy(&pods.sandbox, &[&words[..], &places].concat());
    let lines: Value = serde_json::from_str(&lines.stdout).unwrap();
    let state = |name: &str| {
        let line = lines.as_array().unwrap().iter().find(|line| line["name"] == json!(name));
        line.unwrap_or(&Value::Null)["state"].clone()
    };
    for name in ["receive_programs", "receive_routes", "receive_rp_filter", "other_programs"] {
        assert_eq!(state(name), json!("ok"), "{name}");
    }
    assert_eq!(state("receive_arp"), json!("degraded"), "Linux answers by default");
    assert_eq!((state("receive_listeners"), state("policy")), (json!("degraded"), Value::Null), "IPv6 has no listener");

    let of = |service: &str| {
        let words = ["get", "receive", "-o", "name", "--service", service, "--run-dir", run_dir.to_str().unwrap()];
        cproxy(&pods.sandbox, &words).success().stdout.lines().count()
    };
    assert_eq!((of("default/web"), of("other")), (4, 0));
    let count = |name: &str| cproxy_tests::world::counter(&pods.sandbox, name);
    let before = count("received_connections");
    pods.client.run(|| connect(BALANCER.v4, PORT)).unwrap();
    assert_eq!(kind(pods.client.run(|| connect(BALANCER.v4, CLOSED))), REFUSED);
    assert_eq!((count("received_connections"), count("received_other_ports")), (before + 1, 1));
    assert_eq!(count("received_ports"), 4);
}

#[test]
fn routes_and_pins_that_others_remove_are_put_back() {
    let pods = pods();
    let _agent = receive(&pods);
    let _listener = TcpListener::bind(("::", TCP)).unwrap();
    let is_served = |what: &str| {
        eventually(Duration::from_secs(30), what, || {
            pods.client.run(|| connect(BALANCER.v4, PORT)).map(drop).map_err(|error| error.to_string())
        });
    };
    is_served("at first");
    pods.sandbox.ip("route flush table local proto 98\n");
    is_served("the route is added again");
    let check = || {
        let (pins, run_dir) = (pods.sandbox.pin_dir(), pods.sandbox.run_dir());
        let words = ["check", "--pin-dir", pins.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()];
        cproxy(&pods.sandbox, &words)
    };
    fs::remove_dir_all(pods.sandbox.pin_dir().join("receive-v1")).unwrap();
    check();
    // The sockets that listen are not known to the new maps.
    let _listener = {
        drop(_listener);
        TcpListener::bind(("::", TCP)).unwrap()
    };
    is_served("the maps and programs are made anew");
}
