//! `cproxy run --policy` with manifests: which calls and connections pass, by real system calls between network
//! namespaces.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
    time::Duration,
};

use aya::programs::loaded_programs;
use cproxy_datapath::bpf::{Program, policy_programs};
use cproxy_tests::{
    echo,
    manifest::{self, http_service},
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::{Netns, Sandbox},
    world::{Host, SYNC, TCP, pod},
};
use serde_json::{Value, json};

/// The pod that the agent is in.
pub(crate) const WEB: Host = pod(9);
/// A pod with the label that the policy allows, and one without it.
pub(crate) const CLIENT: Host = pod(1);
pub(crate) const OTHER: Host = pod(2);
/// Ports of TCP and UDP that the policy does not name.
pub(crate) const CLOSED: u16 = 8082;
/// Budget of instructions that the kernel verifies, for each program of a policy.
const VERIFIED: u32 = 2_400;

/// The guest in the middle, and a network namespace for each of the other pods.
pub(crate) struct Pods {
    pub(crate) client: Netns,
    pub(crate) other: Netns,
    pub(crate) sandbox: Sandbox,
}

impl Pods {
    pub(crate) fn new() -> Self {
        let sandbox = Sandbox::for_test();
        sandbox.ip(&format!("address add {}/32 dev lo\naddress add {}/128 dev lo nodad\n", WEB.v4, WEB.v6));
        let [client, other] = [(CLIENT, "client"), (OTHER, "other")].map(|(host, name)| link(&sandbox, host, name));
        Self { client, other, sandbox }
    }

    /// Writes the cluster with the NetworkPolicies; OTHER has this label.
    pub(crate) fn write(&self, policies: &[Value], label: &str) {
        let pods = [(WEB, "web", "web"), (CLIENT, "client", "client"), (OTHER, "other", label)];
        let pods = pods.map(|(host, name, app)| {
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": "shop", "labels": {"app": app}},
                "status": {"phase": "Running", "podIPs": host.addresses().map(|address| json!({"ip": address}))},
            })
        });
        let services = http_service("client", "10.96.0.11", [CLIENT.v4.to_string()]).into_iter().chain(http_service(
            "other",
            "10.96.0.12",
            [OTHER.v4.to_string()],
        ));
        let objects = pods.into_iter().chain(policies.iter().cloned()).chain(services);
        manifest::write(&self.sandbox.manifest_dir(), "cluster.json", objects);
    }

    pub(crate) fn agent(&self, mode: &str) -> Agent<'_> {
        let agent = Agent::new(&self.sandbox).manifests(self.sandbox.manifest_dir());
        agent.args(["--policy", mode, "--policy-pod", "shop/web"]).args(["--pod-ip", &format!("{},{}", WEB.v4, WEB.v6)])
    }

    pub(crate) fn enforce(&self) -> RunningAgent {
        self.agent("enforce").start()
    }

    fn has_links(&self) -> [bool; 2] {
        let links = self.sandbox.pin_dir().join("policy-v1");
        ["sk_lookup", "connect4"].map(|link| links.join(link).exists())
    }
}

fn link(sandbox: &Sandbox, Host { v4, v6 }: Host, name: &str) -> Netns {
    let netns = sandbox.empty_neighbour();
    sandbox.ip(&format!(
        "link add {name} type veth peer name eth0 netns {}\nlink set {name} addrgenmode none up\n\
         address add fe80::1/64 dev {name} nodad\n\
         route add {v4} dev {name} src {}\nroute add {v6} dev {name} src {}\n",
        netns.path().display(),
        WEB.v4,
        WEB.v6
    ));
    sandbox.ip_in(
        &netns,
        &format!(
            "link set lo up\naddress add {v4}/32 dev eth0\naddress add {v6}/128 dev eth0 nodad\nlink set eth0 up\n\
             route add {} dev eth0 src {v4}\nroute add {} via fe80::1 dev eth0 src {v6}\n",
            WEB.v4, WEB.v6
        ),
    );
    netns
}

pub(crate) fn policy(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "shop"}, "spec": spec,
    })
}

pub(crate) fn clients() -> Value {
    json!([{"podSelector": {"matchLabels": {"app": "client"}}}])
}

/// Clients may call TCP, and be called.
pub(crate) fn both() -> Value {
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": clients(), "ports": [{"port": TCP}, {"port": TCP, "protocol": "UDP"}]}],
        "egress": [{"to": clients()}],
    });
    policy("both", spec)
}

pub(crate) fn connects(address: impl Into<IpAddr>, port: u16) -> io::Result<String> {
    echo::ask_name((address.into(), port))
}

pub(crate) fn kind<T>(result: io::Result<T>) -> Result<(), io::ErrorKind> {
    result.map(drop).map_err(|error| error.kind())
}

pub(crate) const DENIED: Result<(), io::ErrorKind> = Err(io::ErrorKind::PermissionDenied);
pub(crate) const REFUSED: Result<(), io::ErrorKind> = Err(io::ErrorKind::ConnectionRefused);

#[test]
fn calls_that_no_rule_allows_are_refused_at_once_in_both_directions() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    assert_eq!(pods.has_links(), [true, true]);
    for (web, client, other) in [
        (IpAddr::from(WEB.v4), IpAddr::from(CLIENT.v4), IpAddr::from(OTHER.v4)),
        (WEB.v6.into(), CLIENT.v6.into(), OTHER.v6.into()),
    ] {
        let _servers = [TCP, CLOSED].map(|port| echo::tcp(&pods.sandbox, (web, port), "web"));
        let _client = echo::tcp_in(&pods.client, (client, TCP), "client");
        let _other = echo::tcp_in(&pods.other, (other, TCP), "other");
        // Ingress.
        assert_eq!(pods.client.run(|| connects(web, TCP)).unwrap(), "web");
        assert_eq!(pods.client.run(|| kind(connects(web, CLOSED))), REFUSED);
        assert_eq!(pods.other.run(|| kind(connects(web, TCP))), REFUSED);
        // Egress.
        assert_eq!(connects(client, TCP).unwrap(), "client");
        assert_eq!(kind(connects(other, TCP)), DENIED);
        // Itself.
        assert_eq!(connects(web, TCP).unwrap(), "web");
        assert_eq!(connects(web, CLOSED).unwrap(), "web");
    }
    // The verdict is about the backend.
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, 80), "client");
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, 80), "other");
    assert_eq!(kind(connects([10, 96, 0, 12], 80)), DENIED);
}

/// The node calls from the address of its bridge, which no object names.
#[test]
fn the_node_may_call_from_an_address_that_a_setting_names() {
    let pods = Pods::new();
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    pods.write(&[policy("deny", deny)], "other");
    let _agent = pods.agent("enforce").args(["--policy-node-ip", &format!("{},{}", OTHER.v4, OTHER.v6)]).start();
    for (web, other, client) in [
        (IpAddr::from(WEB.v4), IpAddr::from(OTHER.v4), IpAddr::from(CLIENT.v4)),
        (WEB.v6.into(), OTHER.v6.into(), CLIENT.v6.into()),
    ] {
        let _web = echo::tcp(&pods.sandbox, (web, TCP), "web");
        let _other = echo::tcp_in(&pods.other, (other, TCP), "other");
        assert_eq!(pods.other.run(|| connects(web, TCP)).unwrap(), "web");
        assert_eq!(connects(other, TCP).unwrap(), "other");
        assert_eq!(pods.client.run(|| kind(connects(web, TCP))), REFUSED);
        assert_eq!(kind(connects(client, TCP)), DENIED);
    }
}

#[test]
fn datagrams_are_refused_and_their_replies_pass() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    for (web, client, other) in [
        (IpAddr::from(WEB.v4), IpAddr::from(CLIENT.v4), IpAddr::from(OTHER.v4)),
        (WEB.v6.into(), CLIENT.v6.into(), OTHER.v6.into()),
    ] {
        let at = |address: IpAddr| SocketAddr::new(address, TCP);
        let [own, own_closed] = [TCP, CLOSED].map(|port| UdpSocket::bind((web, port)).unwrap());
        let of_client = pods.client.run(|| UdpSocket::bind(at(client))).unwrap();
        let of_other = pods.other.run(|| UdpSocket::bind(at(other))).unwrap();
        for socket in [&own, &own_closed, &of_client, &of_other] {
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        }
        let mut buffer = [0; 16];
        // A datagram to a port that no rule allows to come in: its reply passes, as long as it is one.
        own_closed.send_to(b"a", at(client)).unwrap();
        assert_eq!(of_client.recv(&mut buffer).unwrap(), 1);
        of_client.send_to(b"re", (web, CLOSED)).unwrap();
        assert_eq!(own_closed.recv(&mut buffer).unwrap(), 2);
        // One that is no reply is refused, and the sender is told.
        of_other.connect(at(web)).unwrap();
        of_other.send(b"x").unwrap();
        assert_eq!(kind(of_other.recv(&mut buffer)), REFUSED);
        // A denied datagram fails at once; connect() does not, but what follows.
        assert_eq!(kind(own.send_to(b"x", at(other))), DENIED);
        let connected = UdpSocket::bind((web, 0)).unwrap();
        connected.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        connected.connect(at(other)).unwrap();
        assert_eq!(connected.peer_addr().unwrap(), at(other));
        connected.send(b"x").ok();
        assert_eq!(kind(connected.recv(&mut buffer)), REFUSED);
        connected.connect(at(client)).unwrap();
        connected.send(b"ok").unwrap();
        assert_eq!(of_client.recv(&mut buffer).unwrap(), 2);
    }
}

/// A server whose pod may call nobody answers those that may call it: some, or everybody.
#[test]
fn a_server_of_datagrams_answers_without_egress() {
    let pods = Pods::new();
    let some = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": clients(), "ports": [{"port": TCP, "protocol": "UDP"}]}],
    });
    let everybody = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"]});
    pods.write(&[policy("server", some)], "other");
    let _agent = pods.enforce();
    let _server = echo::udp(&pods.sandbox, (WEB.v4, TCP), "web");
    let asks = || pods.client.run(|| echo::ask_udp((WEB.v4, TCP))).unwrap().0;
    let calls = || kind(UdpSocket::bind((WEB.v4, 0)).unwrap().send_to(b"x", (CLIENT.v4, TCP)));
    assert_eq!((asks().as_str(), calls()), ("web", DENIED));
    pods.write(&[policy("server", everybody)], "other");
    // It answers others as soon as they may ask.
    eventually(SYNC, "the other policy is in force", || {
        let answer = pods.other.run(|| echo::ask_udp((WEB.v4, TCP)));
        answer.map(drop).map_err(|error| error.to_string())
    });
    assert_eq!((asks().as_str(), calls()), ("web", DENIED));
}

#[test]
fn changes_take_effect_and_without_a_policy_nothing_is_attached() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    let in_and_out = || (pods.other.run(|| kind(connects(WEB.v4, TCP))), kind(connects(OTHER.v4, TCP)));
    let becomes = |what: &str, expected| {
        eventually(SYNC, what, || {
            let found = in_and_out();
            if found == expected { Ok(()) } else { Err(format!("{found:?}")) }
        });
    };
    assert_eq!(in_and_out(), (REFUSED, DENIED));
    pods.write(&[both()], "client");
    becomes("the label opens both directions", (Ok(()), Ok(())));
    pods.write(&[both()], "other");
    becomes("without the label they are closed again", (REFUSED, DENIED));
    let mut ingress_only = both();
    ingress_only["spec"]["policyTypes"] = json!(["Ingress"]);
    ingress_only["spec"].as_object_mut().unwrap().remove("egress");
    pods.write(&[ingress_only], "other");
    becomes("one direction is open", (REFUSED, Ok(())));
    eventually(SYNC, "no program for that direction", || {
        if pods.has_links() == [true, false] { Ok(()) } else { Err(format!("{:?}", pods.has_links())) }
    });
    pods.write(&[], "other");
    becomes("no policy", (Ok(()), Ok(())));
    eventually(SYNC, "no program at all", || {
        if pods.has_links() == [false, false] { Ok(()) } else { Err(format!("{:?}", pods.has_links())) }
    });
    pods.write(&[both()], "other");
    becomes("a policy again", (REFUSED, DENIED));
}

#[test]
fn the_last_policy_stays_without_the_agent_and_at_its_start() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut agent = pods.enforce();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
    let as_the_policy_says = || {
        assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), REFUSED);
        assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
        assert_eq!(pods.client.run(|| kind(connects(WEB.v4, TCP))), Ok(()));
        assert_eq!(kind(connects(CLIENT.v4, TCP)), Ok(()));
    };
    as_the_policy_says();
    agent.kill();
    as_the_policy_says();
    // A file that cannot be read: the agent does not get ready, and the last policy stays.
    manifest::write_text(&pods.sandbox.manifest_dir(), "broken.yaml", "{");
    let mut again = pods.agent("enforce").spawn();
    eventually(SYNC, "the agent says why it is not ready", || {
        let log = again.log();
        if log.contains("broken.yaml") { Ok(()) } else { Err(log) }
    });
    as_the_policy_says();
    fs::remove_file(pods.sandbox.manifest_dir().join("broken.yaml")).unwrap();
    again.wait_ready(SYNC);
    as_the_policy_says();
}

#[test]
fn before_its_policy_has_come_a_pod_is_closed() {
    let pods = Pods::new();
    manifest::write_text(&pods.sandbox.manifest_dir(), "cluster.json", "{}");
    let mut agent = pods.agent("enforce").spawn();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
    eventually(SYNC, "the pod is closed", || {
        let found = (pods.client.run(|| kind(connects(WEB.v4, TCP))), kind(connects(CLIENT.v4, TCP)));
        if found == (REFUSED, DENIED) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    assert!(echo::ask_name(("127.0.0.1", 1)).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused));
    let wait = cproxy(&pods.sandbox, &["wait", "--timeout", "500ms"]);
    assert_eq!(wait.code, 1);
    assert!(wait.stderr.contains("the source has no policy of pod shop/web"), "{wait:?}");
    pods.write(&[both()], "other");
    agent.wait_ready(SYNC);
    assert_eq!(pods.client.run(|| connects(WEB.v4, TCP)).unwrap(), "web");
    assert_eq!(connects(CLIENT.v4, TCP).unwrap(), "client");
}

#[test]
fn audit_denies_nothing() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let some = http_service("some", "10.96.0.13", [CLIENT.v4.to_string(), OTHER.v4.to_string()]);
    let none = http_service("none", "10.96.0.14", [OTHER.v4.to_string(), "10.244.0.99".to_owned()]);
    manifest::write(&pods.sandbox.manifest_dir(), "more.json", some.into_iter().chain(none));
    let _agent = pods.agent("audit").start();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), Ok(()));
    assert_eq!(kind(connects(OTHER.v4, TCP)), Ok(()));
    for (call, of) in [
        (&*format!("{}:{TCP}", OTHER.v4), ""),
        ("default/other", ""),
        ("default/some", "1 of 2 backends, such as "),
        ("default/none", "all 2 backends, such as "),
    ] {
        let json = cproxy(&pods.sandbox, &["explain", call, "-o", "json"]).success().json();
        let reason = json["calls"][0]["reason"].as_str().unwrap();
        let expected = format!("network policy would deny {of}{}:{TCP}/TCP (--policy audit)", OTHER.v4);
        assert!(reason.contains(&expected), "{reason}");
    }
}

/// A datagram that passes as a reply lets nothing more pass.
#[test]
fn a_flow_of_datagrams_ends_with_the_rule_that_has_allowed_it() {
    let pods = Pods::new();
    let to_other = json!([{"podSelector": {"matchLabels": {"app": "other"}}}]);
    let flows = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": to_other, "ports": [{"port": CLOSED, "protocol": "UDP"}]}], "egress": [{"to": to_other}],
    });
    pods.write(&[policy("both", flows)], "other");
    let _agent = pods.enforce();
    let [out, into] = [TCP, CLOSED].map(|port| UdpSocket::bind((WEB.v4, port)).unwrap());
    let of_other = pods.other.run(|| UdpSocket::bind((OTHER.v4, TCP))).unwrap();
    let sends = || kind(out.send_to(b"x", (OTHER.v4, TCP)));
    let arrives = |within: Duration| {
        of_other.send_to(b"x", (WEB.v4, CLOSED)).ok();
        into.set_read_timeout(Some(within)).unwrap();
        kind(into.recv(&mut [0; 8]))
    };
    assert_eq!((sends(), arrives(SYNC)), (Ok(()), Ok(())));
    pods.write(&[both()], "other");
    eventually(SYNC, "the change is in force", || {
        let fresh = kind(UdpSocket::bind((WEB.v4, 0)).unwrap().send_to(b"x", (OTHER.v4, TCP)));
        if fresh == DENIED { Ok(()) } else { Err(format!("{fresh:?}")) }
    });
    assert_eq!(sends(), DENIED);
    assert_eq!(arrives(Duration::from_millis(500)), Err(io::ErrorKind::WouldBlock));
}

#[test]
fn the_address_of_nobody_is_the_pod_itself() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let _server = TcpListener::bind(("::", CLOSED)).unwrap();
    for address in ["0.0.0.0", "::", "::ffff:0.0.0.0"] {
        let called = TcpStream::connect((address, CLOSED));
        assert_eq!(kind(called), Ok(()), "{address}");
    }
}

/// A routing header would send the packets of an allowed call to any other address.
#[test]
fn a_socket_gets_no_routing_header_while_egress_is_isolated() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    // By way of the other pod: struct ipv6_sr_hdr, and two segments.
    let mut header = vec![0, 4, 4, 1, 1, 0, 0, 0];
    header.extend([CLIENT.v6, OTHER.v6].iter().flat_map(|address| address.octets()));
    let sets = || {
        let socket = UdpSocket::bind(("::", 0)).unwrap();
        let (level, length) = (libc::IPPROTO_IPV6, header.len() as libc::socklen_t);
        // SAFETY: an open socket, and bytes of this length.
        let result =
            unsafe { libc::setsockopt(socket.as_raw_fd(), level, libc::IPV6_RTHDR, header.as_ptr().cast(), length) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().kind()) }
    };
    assert_eq!(sets(), Ok(()));
    let _agent = pods.enforce();
    assert_eq!(sets(), DENIED);
}

#[test]
fn a_policy_that_cannot_be_read_leaves_the_former_and_is_named() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let get = || {
        let run_dir = pods.sandbox.run_dir();
        cproxy(&pods.sandbox, &["get", "policy", "--run-dir", run_dir.to_str().unwrap()]).success().stdout
    };
    assert!(!get().contains("missing"), "{}", get());
    let mut unread = policy("later", json!({"podSelector": {}}));
    unread["metadata"]["labels"] = json!({"release": 5});
    pods.write(&[unread, both()], "other");
    eventually(SYNC, "it is named", || {
        let text = get();
        if text.contains("missing") && text.contains("shop/later") { Ok(()) } else { Err(text) }
    });
    assert_eq!((kind(connects(CLIENT.v4, CLOSED)), kind(connects(OTHER.v4, TCP))), (REFUSED, DENIED));
    pods.write(&[both()], "other");
    eventually(SYNC, "it is as before", || if get().contains("missing") { Err(get()) } else { Ok(()) });
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let pods = Pods::new();
    pods.write(&[], "other");
    let without_pod = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir()).args(["--policy", "enforce"]);
    let mut agent = without_pod.spawn();
    assert_eq!(agent.wait(SYNC).and_then(|status| status.code()), Some(2), "the agent ends");
    assert!(agent.log().contains("manifests need --policy-pod"), "{}", agent.log());
    let mut agent = pods.agent("enforce").args(["--policy-exempt-cgroup", "/nowhere"]).spawn();
    assert_eq!(agent.wait(SYNC).and_then(|status| status.code()), Some(2), "the agent ends");
    assert!(!agent.log().contains("attached"), "{}", agent.log());
    for (dir, reason) in [
        (Path::new("/etc/passwd"), "Not a directory".to_owned()),
        (pods.sandbox.cgroup(), format!("it holds {}", pods.sandbox.cgroup().display())),
        (pods.sandbox.cgroup().parent().unwrap(), format!("it holds {}", pods.sandbox.cgroup().display())),
    ] {
        let mut agent = pods.agent("enforce").args(["--policy-exempt-cgroup", dir.to_str().unwrap()]).spawn();
        assert_eq!(agent.wait(SYNC).and_then(|status| status.code()), Some(2), "the agent ends: {}", agent.log());
        let log = agent.log();
        let expected = format!("--policy-exempt-cgroup {}: {reason}", dir.display());
        assert!(log.contains(&expected) && !log.contains("attached to /"), "{expected}: {log}");
    }
    let exempt = ["--policy-exempt-cgroup", pods.sandbox.cgroup().to_str().unwrap()];
    let nine = exempt.into_iter().cycle().take(18);
    let mut agent = nine.fold(pods.agent("enforce"), |agent, word| agent.arg(word)).spawn();
    assert_eq!(agent.wait(SYNC).and_then(|status| status.code()), Some(2), "the agent ends");
    assert!(agent.log().contains("--policy-exempt-cgroup: 9 values; at most 8 are allowed"), "{}", agent.log());
}

#[test]
fn denied_peers_are_remembered_by_the_kernel() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut agent = pods.enforce();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    for _ in 0..3 {
        assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), REFUSED);
    }
    assert_eq!(kind(connects(OTHER.v6, 443)), DENIED);
    agent.kill();
    let rows = cproxy(&pods.sandbox, &["get", "denials", "-o", "json"]).success().json();
    let row = |direction: &str, peer: IpAddr, port: u16| {
        let rows = rows.as_array().unwrap();
        let is_it =
            |row: &&Value| row["direction"] == direction && row["peer"] == peer.to_string() && row["port"] == port;
        rows.iter().find(is_it).unwrap_or_else(|| panic!("{direction} {peer}: {rows:#?}")).clone()
    };
    let ingress = row("Ingress", OTHER.v4.into(), TCP);
    assert_eq!(
        (&ingress["count"], &ingress["verdict"], &ingress["protocol"]),
        (&json!(3), &json!("denied"), &json!("TCP"))
    );
    assert_eq!(row("Egress", OTHER.v6.into(), 443)["count"], 1);
    let counters = cproxy(&pods.sandbox, &["get", "counters", "-o", "json"]).success().json();
    assert_eq!((&counters["policy_denied_ingress"], &counters["policy_denied_egress"]), (&json!(3), &json!(1)));
}

#[test]
fn operators_see_the_rules_and_why_a_call_is_denied() {
    let pods = Pods::new();
    let deny = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
    pods.write(&[both(), policy("deny", deny)], "other");
    let mut agent = pods.enforce();
    let get = |args: &[&str]| cproxy(&pods.sandbox, args).success();
    let report = get(&["get", "policy", "-o", "json"]).json();
    assert_eq!(
        (&report["pod"], &report["mode"], &report["missing"]),
        (&json!("shop/web"), &json!("enforce"), &Value::Null)
    );
    assert_eq!((&report["isolated"], &report["addresses"]), (&json!(["Ingress", "Egress"]), &json!(2)));
    let status = get(&["status"]).stdout;
    assert!(status.contains("policy      shop/web: isolated for ingress and egress; 2 rules\n"), "{status}");
    let table = get(&["get", "policy", "-o", "wide"]).stdout;
    assert!(
        table.starts_with("pod shop/web (enforce): isolated for ingress and egress; 2 addresses of peers;"),
        "{table}"
    );
    let rows: Vec<Vec<&str>> = table.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
    let rows: Vec<_> = rows.iter().map(|row| row.join(" ")).collect();
    assert_eq!(
        rows,
        [
            "NetworkPolicy shop/deny Ingress Isolate - -",
            "NetworkPolicy shop/deny Egress Isolate - -",
            "NetworkPolicy shop/both rule 0 Ingress Accept 8080/TCP, 8080/UDP 2 addresses",
            "NetworkPolicy shop/both rule 0 Egress Accept all 2 addresses",
        ]
    );
    let explain = |args: &[&str]| cproxy(&pods.sandbox, &[&["explain"], args].concat());
    let denied = explain(&["default/other"]);
    let why = "no rule of NetworkPolicy shop/both, NetworkPolicy shop/deny allows it";
    assert_eq!(denied.code, 1, "{denied:?}");
    let of_backend = format!("denied with EPERM by network policy of backend {}:{TCP}/TCP: {why}", OTHER.v4);
    assert!(denied.stdout.replace("\n  ", " ").contains(&of_backend), "{denied:?}");
    let allowed = explain(&["default/client", "-o", "json"]).success().json();
    assert_eq!((&allowed["calls"][0]["outcome"], &allowed["calls"][0]["ok"]), (&json!("forwarded"), &json!(true)));
    let reason = allowed["calls"][0]["reason"].as_str().unwrap();
    assert!(reason.ends_with("; network policy allows it: NetworkPolicy shop/both rule 0"), "{reason}");
    let direct = explain(&[&format!("[{}]:443", OTHER.v6), "-o", "json"]).stdout;
    let direct: Value = serde_json::from_str(&direct).unwrap();
    assert_eq!((&direct["calls"][0]["outcome"], &direct["calls"][0]["code"]), (&json!("denied"), &json!("policy")));
    let from = |peer: Host, port: u16| explain(&["--from", &peer.v4.to_string(), &format!("{}:{port}", WEB.v4)]);
    let (passes, fails) = (from(CLIENT, TCP), from(CLIENT, CLOSED));
    let text = format!("allowed: {} to shop/web:{TCP}/TCP; NetworkPolicy shop/both rule 0\n", CLIENT.v4);
    assert_eq!((passes.code, passes.stdout), (0, text));
    assert_eq!((fails.code, fails.stdout), (1, format!("denied: {} to shop/web:{CLOSED}/TCP; {why}\n", CLIENT.v4)));
    let of_service = explain(&["--from", &CLIENT.v4.to_string(), "10.96.0.11:80"]);
    assert!(of_service.code == 4 && of_service.stdout.is_empty(), "{of_service:?}");
    assert!(of_service.stderr.contains("10.96.0.11 is no address of this pod"), "{of_service:?}");
    for (to, reason) in [
        ("127.0.0.1:8080".to_owned(), "127.0.0.1 is no address that a peer can call"),
        ("0.0.0.0:8080".to_owned(), "0.0.0.0 is no address that a peer can call"),
        (format!("[{}]:{TCP}", WEB.v6), "is of another family than the peer's"),
    ] {
        let impossible = explain(&["--from", &CLIENT.v4.to_string(), &to]);
        assert!(impossible.code == 4 && impossible.stderr.contains(reason), "{impossible:?}");
    }
    // Denials name the reason while an agent runs; verdicts come from the kernel also without one.
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
    assert_eq!(get(&["get", "denials", "-o", "json"]).json()[0]["reason"], why);
    agent.kill();
    let without = from(CLIENT, TCP);
    assert_eq!(without.code, 0, "{without:?}");
    assert!(without.stdout.contains("whose name only a running agent knows"), "{without:?}");
    assert_eq!(get(&["get", "denials", "-o", "json"]).json()[0]["reason"], "no rule allows it");
    let silent = cproxy(&pods.sandbox, &["get", "policy"]);
    assert!(silent.code == 1 && silent.stderr.contains("a policy is in force in the kernel"), "{silent:?}");
}

#[test]
fn a_pod_that_is_isolated_is_not_opened_by_mistake() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut agent = pods.enforce();
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    let refused = cproxy(&pods.sandbox, &["cleanup", "--policy-too"]);
    assert!(refused.code == 1 && refused.stderr.contains("in use by a running cproxy"), "{refused:?}");
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED, "nothing was removed");
    agent.stop();
    let last = agent.log().lines().rfind(|line| line.contains("stopping")).unwrap_or_default().to_owned();
    assert!(last.contains("network policy stay in force (`cproxy cleanup --policy-too` removes them)"), "{last}");
    let status = || cproxy(&pods.sandbox, &["status"]);
    let of_nobody = status();
    let line =
        "policy      one of an earlier agent is in force, and no agent follows it; `cproxy cleanup --policy-too`";
    assert!(of_nobody.code == 1 && of_nobody.stdout.replace("\n            ", " ").contains(line), "{of_nobody:?}");
    // An agent without the flag leaves the policy in force, and its own programs before it.
    let mut plain = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir()).start();
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
    let of_other = status();
    let line = "policy      one of an earlier agent is in force, and this agent does not follow it (--policy off);";
    assert!(of_other.code == 1 && of_other.stdout.replace("\n            ", " ").contains(line), "{of_other:?}");
    plain.stop();
    assert!(plain.log().contains("a network policy of an earlier agent is in force"), "{}", plain.log());
    assert!(plain.log().contains("network policy stay in force"), "{}", plain.log());
    let refused = cproxy(&pods.sandbox, &["cleanup"]);
    assert!(refused.code == 1 && refused.stderr.contains("--policy-too"), "{refused:?}");
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
    cproxy(&pods.sandbox, &["cleanup", "--policy-too"]).success();
    assert_eq!(connects(OTHER.v4, TCP).unwrap(), "other");
    let without = status().stdout;
    assert!(!without.contains("policy "), "{without}");
}

#[test]
fn a_pod_that_the_manifests_do_not_have_is_named_once() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let manifests = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir());
    let agent = manifests.args(["--policy", "enforce", "--policy-pod", "shop/wbe"]).spawn();
    let warning = "--policy-pod shop/wbe: the source has no such pod; until it appears, all is denied";
    eventually(SYNC, "the log names the pod", || {
        let log = agent.log();
        if log.contains(warning) { Ok(()) } else { Err(log) }
    });
    assert_eq!(kind(connects(CLIENT.v4, TCP)), DENIED);
    pods.write(&[both()], "client");
    manifest::write_text(&pods.sandbox.manifest_dir(), "later.json", &pod_named("wbe").to_string());
    eventually(SYNC, "it appears", || {
        let log = agent.log();
        if log.contains("the pod's policy is in force") { Ok(()) } else { Err(log) }
    });
    assert_eq!(agent.log().matches(warning).count(), 1, "{}", agent.log());
}

fn pod_named(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
        "status": {"phase": "Running", "podIPs": [{"ip": WEB.v4}]},
    })
}

/// More intervals of ports than most policies have: each is found.
#[test]
fn each_of_a_thousand_ports_has_its_verdict() {
    const PORTS: std::ops::Range<u16> = 10_000..12_000;
    let pods = Pods::new();
    let is_allowed = |port: u16| PORTS.contains(&port) && port.is_multiple_of(2);
    let ports: Vec<_> = PORTS.filter(|port| is_allowed(*port)).map(|port| json!({"port": port})).collect();
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Egress"],
        "egress": [{"to": clients(), "ports": ports}],
    });
    pods.write(&[policy("ports", spec)], "other");
    let _agent = pods.enforce();
    for port in PORTS.start - 10..PORTS.end + 10 {
        // A port without a listener.
        let expected = if is_allowed(port) { REFUSED } else { DENIED };
        assert_eq!(kind(connects(CLIENT.v4, port)), expected, "{port}");
    }
}

/// The policy's programs are within the budget of their own, and those that translate are the same ones, instruction by
/// instruction.
#[test]
fn programs_that_translate_are_the_same_with_a_policy_whose_own_stay_within_their_budget() {
    let translating = |pods: &Pods| {
        let dir = pods.sandbox.pin_dir().join(format!("v{}", cproxy_ebpf::LAYOUT_VERSION));
        Program::ALL.map(|program| program_of(&dir.join(program.link)))
    };
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut without = Agent::new(&pods.sandbox).manifests(pods.sandbox.manifest_dir()).start();
    let before = translating(&pods);
    without.stop();
    cproxy(&pods.sandbox, &["cleanup"]).success();
    let _agent = pods.enforce();
    assert_eq!(translating(&pods), before);
    let dir = pods.sandbox.pin_dir().join("policy-v1");
    assert_verified(policy_programs().map(|program| dir.join(program.link)), VERIFIED);
}

/// Checks how many instructions of the programs behind these links the kernel has verified.
pub(crate) fn assert_verified(links: impl Iterator<Item = PathBuf>, budget: u32) {
    let counts: Vec<_> = links.map(|link| (program_of(&link).verified, link)).collect();
    eprintln!("verified instructions: {counts:?}");
    assert!(!counts.is_empty() && counts.iter().all(|(count, _)| (1..=budget).contains(count)), "{counts:?}");
}

/// Program behind a link.
#[derive(Debug, PartialEq, Eq)]
struct AttachedProgram {
    /// Hash of its instructions.
    tag: String,
    verified: u32,
}

fn program_of(link: &Path) -> AttachedProgram {
    let link = cproxy_datapath::bpf::syscalls::obj_get(link, 0).unwrap();
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd())).unwrap();
    let field = |name| information.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let id: u32 = field("prog_id:").parse().unwrap();
    let program = loaded_programs().flatten().find(|program| program.id() == id).unwrap();
    AttachedProgram { tag: field("prog_tag:"), verified: program.verified_instruction_count().unwrap() }
}

/// Programs that others have detached come back, those of the policy behind those that translate.
#[test]
fn detached_programs_are_put_back_in_their_order() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
    let _of_service = echo::tcp_in(&pods.client, (CLIENT.v4, 80), "client");
    let pins = pods.sandbox.pin_dir();
    let check = || drop(cproxy(&pods.sandbox, &["check"]));
    // The policy's.
    for link in ["connect4", "sk_lookup"] {
        detach(&pins.join("policy-v1").join(link));
    }
    assert_eq!(pods.other.run(|| kind(connects(WEB.v4, 1))), REFUSED, "nobody listens");
    check();
    eventually(SYNC, "the policy is enforced again", || match kind(connects(OTHER.v4, TCP)) {
        DENIED => Ok(()),
        other => Err(format!("{other:?}")),
    });
    // Those that translate: a Service still leads to its allowed pod, and another one does not.
    detach(&pins.join(format!("v{}", cproxy_ebpf::LAYOUT_VERSION)).join("connect4"));
    check();
    eventually(SYNC, "calls are translated again", || match connects([10, 96, 0, 11], 80) {
        Ok(name) if name == "client" => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(kind(connects([10, 96, 0, 12], 80)), DENIED);
}

/// Pins that others have removed come back, with the policy in force.
#[test]
fn removed_pins_come_back() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut agent = pods.enforce();
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    let dir = pods.sandbox.pin_dir().join("policy-v1");
    let checks = |what: &str| {
        eventually(SYNC, format!("{what}: the policy is enforced again"), || {
            drop(cproxy(&pods.sandbox, &["check"]));
            let found = (kind(connects(CLIENT.v4, TCP)), kind(connects(OTHER.v4, TCP)));
            if found == (Ok(()), DENIED) && dir.join("sk_lookup").exists() { Ok(()) } else { Err(format!("{found:?}")) }
        });
    };
    for pin in ["POLICY_PEERS", "prog_connect4", "connect4"] {
        fs::remove_file(dir.join(pin)).unwrap();
        checks(pin);
    }
    for pin in fs::read_dir(&dir).unwrap() {
        fs::remove_file(pin.unwrap().path()).unwrap();
    }
    checks("all of the policy's");
    pods.write(&[both()], "client");
    eventually(SYNC, "changes take effect", || kind(connects(OTHER.v4, TCP)).map_err(|error| format!("{error:?}")));
    pods.write(&[both()], "other");
    checks("after changes");
    assert!(agent.exit_status().is_none());
}

/// Also those that were detached while no agent ran, or by one that was killed then.
#[test]
fn an_agent_that_starts_attaches_what_others_have_detached() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let mut agent = pods.enforce();
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    agent.kill();
    let directory = pods.sandbox.pin_dir().join("policy-v1");
    policy_programs().for_each(|program| detach(&directory.join(program.link)));
    assert_eq!(connects(OTHER.v4, TCP).unwrap(), "other", "nothing is enforced");
    let _agent = pods.enforce();
    assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), REFUSED);
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
}

fn detach(link: &Path) {
    let link = cproxy_datapath::bpf::syscalls::obj_get(link, 0).unwrap();
    cproxy_datapath::bpf::syscalls::link_detach(link.as_fd()).unwrap();
}
