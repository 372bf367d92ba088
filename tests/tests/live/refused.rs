//! Datagram sockets that connect to a Service without a backend: `connect()` succeeds, as in a network, and what they
//! send is refused.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a failed call is a failed test")]

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsFd,
    time::Duration,
};

use cproxy_tests::{
    echo,
    manifest::{Endpoint, Service, Slice},
    process::eventually,
    sandbox::Sandbox,
    world::{
        Form, Host, OWN_ADDRESSES, PORT, SYNC, TCP, UDP, WEB, World, cluster_ip, has_pods, rows, slices_with,
        wait_for_counter, web, web_with,
    },
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

const TCP_ONLY: u8 = 14;
const ELSEWHERE: u8 = 13;

/// A socket that is connected to `to`.
fn connected(form: Form, to: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(form.wildcard()).unwrap();
    socket.set_read_timeout(Some(SYNC)).unwrap();
    socket.connect(to).unwrap_or_else(|error| panic!("{to}: {error}"));
    socket
}

/// Waits until the kernel has an error for the socket.
fn wait_for_error(socket: &impl AsFd, what: &str) {
    let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
    let number = poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&timeout)).unwrap();
    assert_eq!(number, 1, "{what}: no error");
}

/// Sends a datagram, which is refused.
fn assert_refused(socket: &UdpSocket, what: &str) {
    assert_eq!(socket.send(b"?").unwrap(), 1, "{what}");
    wait_for_error(socket, what);
    assert!(echo::is_refused(socket.recv(&mut [0; 8])), "{what}");
}

fn own(form: Form) -> IpAddr {
    form.pod(1, 0).ip()
}

fn objects(pods: &[u8]) -> Vec<Value> {
    let tcp_only = Service::new("tcp-only").cluster_ips(cluster_ip(TCP_ONLY).addresses()).tcp("http", PORT, TCP);
    let elsewhere = Service::new("elsewhere").cluster_ips(cluster_ip(ELSEWHERE).addresses()).udp("dns", PORT, UDP);
    let elsewhere = elsewhere.spec("internalTrafficPolicy", json!("Local"));
    let on_another_node = slices_with(
        "elsewhere",
        |slice| slice.udp("dns", UDP),
        [2],
        |_, address| Endpoint::ready(address).node("there"),
    );
    web_with(pods.to_vec()).into_iter().chain([tcp_only.into(), elsewhere.into()]).chain(on_another_node).collect()
}

/// The same, but `web` has the UDP port 81 as well.
fn objects_with_port(pods: &[u8]) -> Vec<Value> {
    let add_ports = |slice: Slice| slice.tcp("http", TCP).udp("dns", UDP).udp("more", UDP);
    let slices = slices_with("web", add_ports, pods.iter().copied(), |_, address| Endpoint::ready(address));
    let others = objects(&[]).into_iter().filter(|object| {
        object["metadata"]["name"] != "web" && object["metadata"]["labels"]["kubernetes.io/service-name"] != "web"
    });
    others.chain([web().udp("more", 81, UDP).into()]).chain(slices).collect()
}

fn start(pods: &[u8], arguments: &[&str]) -> World {
    let arguments = ["--node-name", "here"].iter().chain(&OWN_ADDRESSES).chain(arguments);
    World::builder().pods(1..=3).objects(objects(pods)).args(arguments).start()
}

/// Destinations that have no backend for a datagram of this VM.
fn refusing(form: Form) -> Vec<SocketAddr> {
    let at = |host: Host, port| form.address(host, port);
    let ports = [9, 81, 65_535].map(|port| at(WEB, port));
    [at(WEB, PORT), at(cluster_ip(TCP_ONLY), PORT), at(cluster_ip(ELSEWHERE), PORT)].into_iter().chain(ports).collect()
}

#[test]
fn a_datagram_socket_learns_its_address_and_is_refused_after_a_datagram() {
    let mut world = start(&[], &[]);
    let check = |when: &str| {
        for (form, to) in Form::ALL.into_iter().flat_map(|form| refusing(form).into_iter().map(move |to| (form, to))) {
            let what = format!("{when}: {to}");
            let socket = connected(form, to);
            assert_eq!(socket.local_addr().unwrap().ip(), own(form), "{what}: getsockname()");
            assert_eq!(socket.peer_addr().unwrap(), to, "{what}: getpeername()");
            assert_refused(&socket, &what);
            assert_refused(&socket, &format!("{what}, again"));
            assert_eq!(socket.peer_addr().unwrap(), to, "{what}: getpeername()");
            // An unconnected socket is refused at once.
            let refused = if to.ip() == form.address(cluster_ip(ELSEWHERE), 0).ip() {
                io::ErrorKind::HostUnreachable
            } else {
                io::ErrorKind::ConnectionRefused
            };
            assert_eq!(socket.send_to(b"?", to).unwrap_err().kind(), refused, "{what}: sendto()");
        }
    };
    check("with an agent");
    world.agent.kill();
    check("without an agent");
}

/// glibc, Go and others connect to port 0 to sort addresses (RFC 6724), and have no peer then.
#[test]
fn a_connect_to_port_0_shows_the_source_address() {
    let _world = start(&[1], &[]);
    for form in Form::ALL {
        let socket = connected(form, form.address(WEB, 0));
        assert_eq!(socket.local_addr().unwrap().ip(), own(form), "{form:?}");
        assert_eq!(socket.peer_addr().unwrap_err().kind(), io::ErrorKind::NotConnected, "{form:?}");
    }
}

/// Ray's rule and Dask's: the address of a worker is that of a datagram socket that is connected to the scheduler's
/// Service.
#[test]
fn ray_and_dask_workers_announce_the_pods_address() {
    let _world = start(&[1], &[]);
    for form in Form::ALL {
        for port in [PORT, 80, 6_379] {
            let socket = connected(form, form.address(cluster_ip(TCP_ONLY), port));
            assert_eq!(socket.local_addr().unwrap().ip(), own(form), "{form:?} {port}");
        }
    }
}

fn states(sandbox: &Sandbox) -> Vec<String> {
    let mut states: Vec<_> =
        rows(sandbox, "sockets").iter().map(|row| row["state"].as_str().unwrap().to_owned()).collect();
    states.sort();
    states
}

/// kube-proxy judges each packet; here an application has to connect anew.
#[test]
fn a_refused_socket_is_closed_once_the_service_has_a_backend() {
    let world = start(&[], &[]);
    let to_web = Form::ALL.map(|form| (form, connected(form, form.web())));
    let new_port = Form::ALL.map(|form| (form, connected(form, form.address(WEB, 81))));
    let other = Form::ALL.map(|form| (form, connected(form, form.address(cluster_ip(TCP_ONLY), PORT))));
    let to_nobody = UdpSocket::bind("127.0.0.1:0").unwrap();
    to_nobody.connect("127.0.0.1:1").unwrap();
    assert_eq!(states(&world.sandbox), vec!["refused"; 3 * Form::ALL.len()]);
    let assert_open = |sockets: &[(Form, UdpSocket)], to: fn(Form) -> SocketAddr| {
        for (form, socket) in sockets {
            assert_eq!(socket.peer_addr().unwrap(), to(*form));
            assert_refused(socket, "still refused");
        }
    };
    let assert_closed = |sockets: &[(Form, UdpSocket)]| {
        for (form, socket) in sockets {
            // An error of an earlier datagram could come first.
            eventually(SYNC, format_args!("{form:?}: the socket is closed"), || {
                socket.peer_addr().err().ok_or("it has a peer")
            });
            let error = socket.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{form:?}: {error}");
        }
    };
    world.set(objects(&[2]), |rows| rows.iter().filter(|row| has_pods(row, &[2])).count() >= 4);
    assert_closed(&to_web);
    assert_open(&new_port, |form| form.address(WEB, 81));
    assert_open(&other, |form| form.address(cluster_ip(TCP_ONLY), PORT));
    for (form, socket) in &to_web {
        socket.connect(form.web()).unwrap();
        assert_eq!(echo::ask_peer(socket).unwrap(), "pod-2", "{form:?}");
    }
    // The Service gets the port.
    let has_port = |rows: &[Value], pods: &[u8]| {
        rows.iter().filter(|row| row["port"] == 81 && row["protocol"] == "UDP" && has_pods(row, pods)).count() == 2
    };
    world.set(objects_with_port(&[]), |rows| has_port(rows, &[]));
    assert_open(&new_port, |form| form.address(WEB, 81));
    world.set(objects_with_port(&[2]), |rows| has_port(rows, &[2]));
    assert_closed(&new_port);
    assert_open(&other, |form| form.address(cluster_ip(TCP_ONLY), PORT));
    let without = objects_with_port(&[2]).into_iter().filter(|object| object["metadata"]["name"] != "tcp-only");
    world.set(without, |rows| !rows.iter().any(|row| row["service"] == "default/tcp-only"));
    assert_closed(&other);
    assert_eq!(to_nobody.peer_addr().unwrap(), "127.0.0.1:1".parse().unwrap(), "it is no socket of ours");
    // They are counted after the last of them is closed.
    wait_for_counter(&world.sandbox, "sockets_closed", 3 * Form::ALL.len() as u64);
    assert_eq!(states(&world.sandbox), vec!["serving"; Form::ALL.len()]);
}

#[test]
fn a_refused_socket_stays_where_no_sockets_are_closed() {
    let world = start(&[], &["--terminate-sockets", "none"]);
    let socket = connected(Form::V4, Form::V4.web());
    world.set(objects(&[2]), |rows| rows.iter().filter(|row| has_pods(row, &[2])).count() >= 4);
    assert_refused(&socket, "it does not connect anew");
    assert_eq!(states(&world.sandbox), ["stale"]);
    socket.connect(Form::V4.web()).unwrap();
    assert_eq!(echo::ask_peer(&socket).unwrap(), "pod-2");
}

/// The agent follows the VM's addresses, also in a copy of a VM.
#[test]
fn the_source_address_follows_the_network() {
    let with_link = |sandbox: &Sandbox| {
        sandbox.ip("link add own0 type veth peer name own1\nlink set own1 up\nlink set own0 up\n\
                    address add 10.1.0.2/24 dev own0\nroute add default via 10.1.0.1 dev own0\n");
        None
    };
    let mut world = World::builder().prepare(with_link).pods(1..=3).objects(objects(&[])).start();
    let local = || connected(Form::V4, Form::V4.web()).local_addr().unwrap().ip();
    assert_eq!(local(), IpAddr::from([10, 1, 0, 2]));
    world.sandbox.ip("address add 10.1.0.3/24 dev own0\naddress del 10.1.0.2/24 dev own0\n\
                      address add 10.1.0.3/24 dev own0\nroute replace default via 10.1.0.1 dev own0\n");
    world.agent.wait_log("own addresses now: 10.1.0.3 (default route)", SYNC);
    eventually(SYNC, "the address is the new one", || {
        let socket = connected(Form::V4, Form::V4.web());
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        socket.send(b"?").unwrap();
        let refused = socket.recv(&mut [0; 8]);
        if echo::is_refused(refused) { Ok(()) } else { Err("it is not the VM's") }
    });
    assert_eq!(local(), IpAddr::from([10, 1, 0, 3]));
}
