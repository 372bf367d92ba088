//! One unconnected UDP socket and a server with state for its flow, as in QUIC. Whatever happens to other endpoints,
//! the flow stays with its pod; when its pod goes, another one answers.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use cproxy_tests::{
    manifest::{self, Endpoint},
    nonce,
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

use crate::{
    build,
    fixture::{
        Cluster, HTTP3, OFFSET, PATIENCE, PODS, QUESTION, WEB, forms, pod_addresses, pod_name, pod_number, service,
        slice, vips,
    },
};

const REQUESTS: u32 = 500;

/// All sets with `pod` and some of the others.
fn sets_with(pod: u8) -> [Vec<u8>; 4] {
    let others = all_but(pod);
    [vec![pod], vec![pod, others[0]], vec![pod, others[1]], PODS.to_vec()]
}

fn all_but(pod: u8) -> Vec<u8> {
    PODS.into_iter().filter(|other| *other != pod).collect()
}

/// Adds and removes endpoints until `is_over`, but keeps `pod`.
fn churn_around(cluster: &Cluster, pod: u8, mut is_over: impl FnMut() -> bool) {
    for set in sets_with(pod).iter().cycle() {
        cluster.set(WEB, set);
        if is_over() {
            break;
        }
    }
    cluster.set(WEB, &PODS);
}

/// Asks once, and checks that the answer is for this question and from this VIP.
fn ask(socket: &UdpSocket, vip: SocketAddr, number: u32) -> u8 {
    let question = number.to_string();
    nonce::ask(socket, &question, vip).unwrap_or_else(|error| panic!("{vip}: {error}"));
    let (name, repeated, from) = nonce::receive(socket).unwrap_or_else(|error| panic!("{vip}: {error}"));
    assert_eq!((repeated, from), (question, vip), "{name}");
    pod_number(&name)
}

#[test]
fn one_socket_stays_with_its_pod() {
    let cluster = Cluster::start();
    for vip in forms(WEB, QUESTION) {
        let socket = UdpSocket::bind(if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let pod = ask(&socket, vip, 0);
        let (asked, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(ask(&socket, vip, number), pod, "{vip}, request {number}");
                }
            });
            churn_around(&cluster, pod, || client.is_finished() || asked.load(Ordering::Relaxed) >= REQUESTS);
            is_over.store(true, Ordering::Relaxed);
        });
        cluster.set(WEB, &all_but(pod));
        let next = ask(&socket, vip, 1);
        assert_ne!(next, pod, "{vip}: it has left");
        cluster.set(WEB, &PODS);
        assert!((0..20).all(|number| ask(&socket, vip, number) == next), "{vip}: it stays with the next one too");
    }
}

/// Twelve flows of one socket, more than its own state holds. Each leaves the first pod for the second; when the second
/// one goes too, the first one returns, but only for flows that it still serves, and there are none.
#[test]
fn a_pod_that_returns_as_terminating_gets_no_flow() {
    let services = 1..=6;
    let pod = |service, number: u8| service * 10 + number;
    let pods: Vec<_> = services.clone().flat_map(|service| [1, 2, 3].map(|number| pod(service, number))).collect();
    let write = |sandbox: &Sandbox, ready: u8, terminating: Option<u8>| {
        let slice_of = |service, family| {
            let members: Vec<_> = terminating.into_iter().chain([ready]).map(|number| pod(service, number)).collect();
            slice(service, family, &members, |member, address| {
                if member == pod(service, ready) {
                    Endpoint::ready(address)
                } else {
                    Endpoint::terminating(address, true)
                }
            })
        };
        let objects = services.clone().flat_map(|number| [service(number), slice_of(number, 0), slice_of(number, 1)]);
        manifest::write(&sandbox.manifest_dir(), "services.json", objects);
    };
    let cluster = Cluster::with(&pods, |sandbox| write(sandbox, 1, None));
    let socket = UdpSocket::bind("[::]:0").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    for (ready, terminating) in [(1, None), (2, None), (3, Some(1))] {
        write(&cluster.world.sandbox, ready, terminating);
        cluster.wait_for(&services.clone().map(|service| (service, vec![pod(service, ready)])).collect::<Vec<_>>());
        for service in services.clone() {
            let [_, v6, mapped] = forms(service, QUESTION);
            assert_eq!([v6, mapped].map(|vip| ask(&socket, vip, 0)), [pod(service, ready); 2], "Service {service}");
        }
    }
}

/// quic-go's HTTP/3 uses batches, segmentation offload and control messages. The server sees one connection from one
/// client address at one pod, and so no migration. The next pod does not know the connection and says so, which the
/// client accepts only from its peer's address.
#[test]
fn http3_stays_on_one_connection() {
    build::go();
    let cluster = Cluster::start();
    let _servers = PODS.map(|pod| pod_addresses(pod).map(|address| serve_http3(&cluster, pod, address)));
    for vip in vips(WEB) {
        let mut client = build::go();
        client.args(["http3-client", &format!("https://{}/", SocketAddr::new(vip, HTTP3)), &REQUESTS.to_string()]);
        let mut client = Daemon::spawn(&cluster.world.sandbox, "http3-client", Placement::Hooked, client);
        let first = client.wait_log("first ", PATIENCE).replace("first ", "");
        let pod = pod_number(first.split(' ').next().unwrap());
        churn_around(&cluster, pod, || {
            assert!(client.exit_status().is_none(), "{}", client.log());
            client.log().contains("all ")
        });
        assert_eq!(client.wait_log("all ", PATIENCE), format!("all map[{first}:{REQUESTS}]"));
        cluster.set(WEB, &all_but(pod));
        let again = client.wait_log("again ", PATIENCE);
        let next = pod_number(again.split(' ').nth(1).unwrap());
        assert!(PODS.contains(&next) && next != pod, "{}", client.log());
        assert!(client.log().contains("received a stateless reset"), "{}", client.log());
        assert!(client.wait(PATIENCE).is_some_and(|status| status.success()), "{}", client.log());
        cluster.set(WEB, &PODS);
    }
}

fn serve_http3(cluster: &Cluster, pod: u8, address: std::net::IpAddr) -> Daemon {
    let mut server = build::go();
    server.args(["http3-server", &SocketAddr::new(address, HTTP3 + OFFSET).to_string(), &pod_name(pod)]);
    let mut daemon = Daemon::spawn(&cluster.world.sandbox, "http3-server", Placement::Unhooked, server);
    daemon.wait_log("listening", PATIENCE);
    daemon
}
