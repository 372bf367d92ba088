//! A router that spreads connections over two guests by equal-cost paths: each guest has an agent and a server of its
//! own, and answers from the balancer's address.

#![expect(clippy::indexing_slicing, reason = "the arrays are of these tests")]

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    process::Command,
};

use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Daemon, cproxy_binary, eventually},
    sandbox::{Netns, Placement, Sandbox},
    world::{Host, SYNC, pod},
};
use serde_json::Value;

use super::{BALANCER, PORT, RANGES, TCP, connect};

const CLIENT: Host = pod(1);
const GUESTS: [Host; 2] = [pod(11), pod(12)];
/// The router's address on each link.
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Server that greets with its name and the client's address.
const SERVER: &str = "import socket, sys
s = socket.create_server(('', int(sys.argv[2])))
print('listening', flush=True)
while True:
    c, peer = s.accept()
    c.sendall(f'{sys.argv[1]} {peer[0]} {c.getsockname()[0]}:{c.getsockname()[1]}'.encode())
    c.close()";

/// A guest: its network namespace, agent and server. Its cgroup goes with the sandbox's.
struct Guest {
    _netns: Netns,
    agent: Daemon,
    _server: Daemon,
    directory: PathBuf,
}

impl Guest {
    fn start(sandbox: &Sandbox, number: usize) -> Self {
        let (Host { v4, .. }, name) = (GUESTS[number], format!("guest{number}"));
        let netns = link(sandbox, GUESTS[number], &name);
        let directory = sandbox.dir().join(&name);
        let cgroup = sandbox.cgroup_beside().join(&name);
        for made in [&directory, &cgroup] {
            fs::create_dir(made).unwrap();
        }
        let inside = |name: &str, words: &[&str]| {
            let mut command = Command::new("nsenter");
            command.arg(format!("--net={}", netns.path().display())).args(["sh", "-c"]);
            command.arg("echo 0 >\"$0/cgroup.procs\"; exec \"$@\"").arg(&cgroup).args(words);
            Daemon::spawn(sandbox, name, Placement::Unhooked, command)
        };
        let [run, manifests] = [directory.join("run"), sandbox.manifest_dir()];
        let pins = sandbox.pin_dir().with_file_name(&name);
        let words = [
            cproxy_binary().to_str().unwrap(),
            "run",
            "--manifests",
            manifests.to_str().unwrap(),
            "--receive",
            RANGES,
            "--pod-ip",
            &v4.to_string(),
            "--cgroup",
            cgroup.to_str().unwrap(),
            "--pin-dir",
            pins.to_str().unwrap(),
            "--run-dir",
            run.to_str().unwrap(),
        ]
        .map(str::to_owned);
        let mut agent = inside(&name, &words.each_ref().map(String::as_str));
        agent.wait_log("ready after", SYNC);
        let mut server = inside("server", &["python3", "-c", SERVER, &name, &TCP.to_string()]);
        server.wait_log("listening", SYNC);
        Self { _netns: netns, agent, _server: server, directory }
    }
}

/// A network namespace with a link to the router.
fn link(sandbox: &Sandbox, Host { v4, .. }: Host, name: &str) -> Netns {
    let netns = sandbox.empty_neighbour();
    let path = netns.path();
    sandbox.ip(&format!(
        "link add {name} type veth peer name eth0 netns {}\nlink set {name} up\n\
         address add {ROUTER}/32 dev {name}\nroute add {v4} dev {name}\n",
        path.display()
    ));
    let inside = format!(
        "link set lo up\naddress add {v4}/32 dev eth0\nlink set eth0 up\nroute add {ROUTER} dev eth0\n\
         route add default via {ROUTER}\n"
    );
    sandbox.ip_in(&netns, &inside);
    netns
}

/// Spreads connections over these guests.
fn balance(sandbox: &Sandbox, guests: &[usize]) {
    let hops = guests.iter().map(|&guest| format!(" nexthop via {} dev guest{guest} onlink", GUESTS[guest].v4));
    sandbox.ip(&format!("route replace {}{}\n", BALANCER.v4, hops.collect::<String>()));
}

/// Makes connections, and returns how many each guest has answered.
fn calls(client: &Netns, count: usize) -> BTreeMap<String, usize> {
    let mut answers = BTreeMap::new();
    for _ in 0..count {
        let mut answer = String::new();
        client.run(|| connect(BALANCER.v4, PORT)).unwrap().read_to_string(&mut answer).unwrap();
        let [guest, peer, own] = answer.split(' ').collect::<Vec<_>>().try_into().unwrap();
        assert_eq!((peer, own), (&*CLIENT.v4.to_string(), &*format!("{}:{PORT}", BALANCER.v4)));
        *answers.entry(guest.to_owned()).or_default() += 1;
    }
    answers
}

#[test]
fn guests_behind_a_router_share_connections_and_come_and_go() {
    let sandbox = Sandbox::for_test();
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    // By addresses and ports.
    fs::write("/proc/sys/net/ipv4/fib_multipath_hash_policy", "1").unwrap();
    let client = link(&sandbox, CLIENT, "client");
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", PORT, TCP).load_balancer_ip(BALANCER.v4);
    let slice = Slice::v4("web").tcp("http", TCP).ready(GUESTS.map(|guest| IpAddr::from(guest.v4)));
    manifest::write(&sandbox.manifest_dir(), "web.json", [Value::from(service), slice.into()]);
    let mut guests = [0, 1].map(|number| Guest::start(&sandbox, number));
    for guest in 0..2 {
        balance(&sandbox, &[guest]);
        eventually(SYNC, "the guest receives", || {
            client.run(|| connect(BALANCER.v4, PORT)).map(drop).map_err(|error| error.to_string())
        });
    }
    balance(&sandbox, &[0, 1]);
    let answers = calls(&client, 200);
    assert!(answers.len() == 2 && answers.values().all(|share| *share > 50), "{answers:?}");
    // A balancer takes a backend away and back; an agent is killed and starts again. No call fails.
    balance(&sandbox, &[1]);
    assert_eq!(calls(&client, 50), BTreeMap::from([("guest1".to_owned(), 50)]));
    guests[1].agent.kill();
    assert_eq!(calls(&client, 50).len(), 1);
    balance(&sandbox, &[0, 1]);
    assert_eq!(calls(&client, 100).len(), 2);
    assert!(guests.iter().all(|guest| guest.directory.exists()));
}
