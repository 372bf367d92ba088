//! Connects to ClusterIPs and what the hooks do without the agent: an agent on manifest files, real servers, real
//! sockets in a hooked cgroup. That each form of an address reaches every pod: [`frontends`](super::frontends).

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    collections::BTreeSet,
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        unix::thread::JoinHandleExt,
    },
    process::Command,
    thread,
    time::Duration,
};

use aya::maps::{Array, MapData};
use cproxy_datapath::bpf::{Features, PinDir, Program, ProgramSet, SocketMark, try_load};
use cproxy_tests::{
    echo,
    manifest::{self, Endpoint, Service, Slice},
    process::{self, Agent, Daemon, cproxy, eventually},
    sandbox::{Placement, Sandbox},
    world::{
        Form, OWN_ADDRESSES, PORT, SYNC, TCP, UDP, WEB, World, cluster_ip, pod, pod_name, rows, serve_pods,
        start_agent, start_agent_with, web, web_with,
    },
};
use nix::sys::{
    pthread::pthread_kill,
    signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use serde_json::Value;

const NODES: u8 = 3;

/// Three pods, each with a TCP and a UDP server in both families, and an agent on the manifests.
fn start() -> World {
    World::builder().pods(1..=NODES).objects(web_with(1..=NODES)).args(OWN_ADDRESSES).start()
}

/// The VIP in the three forms that applications use.
fn vips(port: u16) -> [(Form, SocketAddr); 3] {
    Form::ALL.map(|form| (form, form.address(WEB, port)))
}

/// Repeats `ask` until every pod has answered; each answer must be from a pod.
fn all_pods_answer(what: &str, mut ask: impl FnMut() -> io::Result<String>) {
    let expected: BTreeSet<_> = (1..=NODES).map(|pod| format!("pod-{pod}")).collect();
    let mut seen = BTreeSet::new();
    // 200 draws from three miss one of them with probability 3 * (2/3)^200, less than 1e-34.
    for _ in 0..200 {
        let name = ask().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(expected.contains(&name), "{what}: {name}");
        seen.insert(name);
    }
    assert_eq!(seen, expected, "{what}");
}

#[test]
fn a_frontend_without_backends_refuses_at_once() {
    let live = start();
    live.set_pods([]);
    for (form, vip) in vips(80) {
        assert!(echo::is_refused(TcpStream::connect(vip)), "TCP {form:?}");
        assert!(echo::is_refused(echo::ask_connected_udp(vip)), "UDP {form:?}");
    }
    live.set_pods([2]);
    for (form, vip) in vips(80) {
        assert_eq!(echo::ask_name(vip).unwrap(), "pod-2", "TCP {form:?}");
        assert_eq!(echo::ask_connected_udp(vip).unwrap(), "pod-2", "UDP {form:?}");
    }
}

#[test]
fn a_non_blocking_connect_is_translated_and_refused_like_any_other() {
    let live = start();
    let connect = |vip: SocketAddr| {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        (rustix::net::connect(&socket, &vip), socket)
    };
    for (form, vip) in vips(80) {
        let (result, socket) = connect(vip);
        assert!(matches!(result, Ok(()) | Err(rustix::io::Errno::INPROGRESS)), "{form:?}: {result:?}");
        eventually(SYNC, "the connection stands", || match sockopt::socket_error(&socket).unwrap() {
            Ok(()) => rustix::net::getpeername(&socket).map(drop).map_err(|error| error.to_string()),
            Err(error) => panic!("{form:?}: {error}"),
        });
    }
    live.set_pods([]);
    for (form, vip) in vips(80) {
        assert_eq!(connect(vip).0, Err(rustix::io::Errno::CONNREFUSED), "{form:?}");
    }
}

#[test]
fn an_address_of_no_service_is_left_alone() {
    let _live = start();
    for number in 1..=NODES {
        for address in pod(number).addresses() {
            assert_eq!(echo::ask_name((address, TCP)).unwrap(), pod_name(number));
        }
    }
}

/// This holds even if a server listens on the VIP itself.
#[test]
fn a_port_that_no_service_has_is_refused_on_a_cluster_ip() {
    let live = start();
    live.sandbox.add_addresses(WEB.addresses());
    let _servers = WEB.addresses().map(|address| echo::tcp(&live.sandbox, (address, 81), "the VIP itself"));
    for (form, vip) in vips(81) {
        assert!(echo::is_refused(echo::ask_name(vip)), "{form:?}");
        assert!(echo::is_refused(echo::ask_connected_udp(vip)), "{form:?}");
    }
}

#[test]
fn sockets_outside_the_cgroup_are_left_alone() {
    let live = start();
    live.sandbox.add_address(WEB.v4);
    let _server = echo::tcp(&live.sandbox, (WEB.v4, PORT), "the VIP itself");
    let ask = |placement| {
        let mut curl = Command::new("curl");
        // The server greets and then waits, so curl has to end.
        curl.args(["--http0.9", "--silent", "--max-time", "1", &format!("http://{}/", WEB.v4)]);
        process::run(&live.sandbox, placement, curl, "", SYNC).stdout
    };
    assert!(ask(Placement::Unhooked).starts_with("the VIP itself"));
    assert!(ask(Placement::Hooked).starts_with("pod-"));
}

#[test]
fn a_marked_socket_is_not_translated() {
    let live = start();
    live.sandbox.add_addresses(WEB.addresses());
    let _servers = WEB.addresses().map(|vip| echo::tcp(&live.sandbox, (vip, PORT), "the VIP itself"));
    let mark = SocketMark::new(&PinDir::new(&live.sandbox.pin_dir()));
    for (form, vip) in vips(80) {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
        mark.mark(&socket).unwrap();
        rustix::net::connect(&socket, &vip).unwrap();
        assert_eq!(first_line(socket), "the VIP itself", "{form:?}");
        assert!(echo::ask_name(vip).unwrap().starts_with("pod-"), "{form:?}: others are");
    }
    // A Service without backends is not refused either.
    live.set_pods([]);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    mark.mark(&socket).unwrap();
    rustix::net::connect(&socket, &vips(80)[0].1).unwrap();
}

fn first_line(socket: OwnedFd) -> String {
    let mut line = String::new();
    io::BufRead::read_line(&mut io::BufReader::new(TcpStream::from(socket)), &mut line).unwrap();
    line.trim_end().to_owned()
}

#[test]
fn mptcp_is_tcp() {
    let live = start();
    const MPTCP: rustix::net::Protocol =
        rustix::net::Protocol::from_raw(std::num::NonZeroU32::new(262).expect("not zero"));
    for (form, vip) in vips(80) {
        let family = if vip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket(family, SocketType::STREAM, Some(MPTCP)).unwrap();
        rustix::net::connect(&socket, &vip).unwrap();
        assert!(first_line(socket).starts_with("pod-"), "{form:?}");
    }
    live.set_pods([]);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(MPTCP)).unwrap();
    assert_eq!(rustix::net::connect(&socket, &vips(80)[0].1), Err(rustix::io::Errno::CONNREFUSED));
}

/// The kernel tells connections apart by the endpoint's address, not by the ClusterIP (docs/semantics.md).
#[test]
fn two_services_with_one_pod_share_the_source_ports() {
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, 1..=1);
    let vips = [10, 11].map(|number| SocketAddr::new(cluster_ip(number).v4.into(), PORT));
    let objects = ["one", "two"].into_iter().zip([10, 11]).flat_map(|(name, number)| {
        let service = Service::new(name).cluster_ips([cluster_ip(number).v4]).tcp("http", PORT, TCP);
        let slice = Slice::v4(name).tcp("http", TCP).udp("dns", UDP).ready([pod(1).v4]);
        [Value::from(service.udp("dns", PORT, UDP)), slice.into()]
    });
    manifest::write(&sandbox.manifest_dir(), "two.json", objects);
    let _agent = start_agent(&sandbox);
    let bound = |kind, from: SocketAddr| {
        let socket = rustix::net::socket(AddressFamily::INET, kind, None).unwrap();
        sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        sockopt::set_socket_reuseport(&socket, true).unwrap();
        rustix::net::bind(&socket, &from).unwrap();
        socket
    };
    let from: SocketAddr = "0.0.0.0:4711".parse().unwrap();
    let [first, second] = vips.map(|vip| {
        let socket = bound(SocketType::STREAM, from);
        (rustix::net::connect(&socket, &vip), socket)
    });
    assert_eq!((first.0, second.0), (Ok(()), Err(rustix::io::Errno::ADDRNOTAVAIL)));
    let [first, second] = vips.map(|vip| {
        let socket = UdpSocket::from(bound(SocketType::DGRAM, from));
        socket.connect(vip).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    });
    let received = [&first, &second].map(|asking| {
        asking.send(b"?").unwrap();
        [&first, &second].map(|socket| socket.recv(&mut [0; 64]).is_ok())
    });
    assert_eq!(received[0], received[1], "one of the two gets all answers");
}

#[test]
fn other_socket_types_are_left_alone() {
    let live = start();
    live.sandbox.add_address(WEB.v4);
    let icmp = rustix::net::socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)).unwrap();
    rustix::net::connect(&icmp, &vips(80)[0].1).unwrap();
    let peer: SocketAddr = rustix::net::getpeername(icmp.as_fd()).unwrap().unwrap().try_into().unwrap();
    assert_eq!(peer.ip(), WEB.v4);
}

#[test]
fn one_port_number_serves_two_protocols_and_names_match_by_name() {
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, 1..=NODES);
    let dns = Service::new("dns").cluster_ips([WEB.v4]).tcp("dns-tcp", 53, 0).udp("dns", 53, 0);
    let tcp_slice = Slice::v4("dns").name("dns-1").tcp("dns-tcp", 8080).ready([pod(1).v4]);
    // Port numbers do not matter, and one Service's slices may map a name to different ones.
    let udp_slice = Slice::v4("dns").name("dns-2").udp("dns", 8081).tcp("dns", 8080).ready([pod(2).v4]);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [dns.into(), tcp_slice.into(), udp_slice.into()]);
    let _agent = start_agent(&sandbox);
    for _ in 0..20 {
        assert_eq!(echo::ask_name(vips(53)[0].1).unwrap(), "pod-1");
        assert_eq!(echo::ask_connected_udp(vips(53)[0].1).unwrap(), "pod-2");
    }
}

#[test]
fn readiness_and_termination_decide_which_pods_get_connections() {
    let live = start();
    let put = |endpoints: [Endpoint; 3]| {
        let slice = endpoints.into_iter().fold(Slice::v4("web").tcp("http", TCP), Slice::endpoint);
        live.write([web().into(), slice.into()]);
    };
    let eligible_are = |pods: &[u8]| {
        let expected: Vec<_> = pods.iter().map(|&number| Value::from(pod(number).v4.to_string())).collect();
        live.wait(|rows| {
            let mut rows = rows.iter().filter(|row| row["protocol"] == "TCP" && row["address"] == WEB.v4.to_string());
            let backends = rows.next().unwrap()["backends"].as_array().unwrap();
            backends.iter().map(|backend| &backend["address"]).eq(&expected)
        });
    };
    put([Endpoint::ready(pod(1).v4), Endpoint::not_ready(pod(2).v4), Endpoint::terminating(pod(3).v4, true)]);
    eligible_are(&[1]);
    // No endpoint is ready, so terminating ones that still serve are used.
    put([
        Endpoint::not_ready(pod(1).v4),
        Endpoint::terminating(pod(2).v4, false),
        Endpoint::terminating(pod(3).v4, true),
    ]);
    eligible_are(&[3]);
    assert_eq!(echo::ask_name(vips(80)[0].1).unwrap(), "pod-3");
    put([Endpoint::not_ready(pod(1).v4), Endpoint::not_ready(pod(2).v4), Endpoint::terminating(pod(3).v4, false)]);
    eligible_are(&[]);
    assert!(echo::is_refused(TcpStream::connect(vips(80)[0].1)));
}

#[test]
fn the_hooks_outlive_the_agent_and_a_new_agent_takes_over() {
    let mut live = start();
    let established = echo::connect_tcp(vips(80)[0].1).unwrap().1;
    live.agent.kill();
    all_pods_answer("after SIGKILL", || echo::ask_name(vips(80)[0].1));
    assert_eq!(live.rows().len(), 4, "get works with the agent dead");
    // The change happened while no agent was running.
    live.write(web_with([2]));
    let mut agent = start_agent(&live.sandbox);
    live.wait_for_pods([2]);
    assert_eq!(echo::ask_name(vips(80)[1].1).unwrap(), "pod-2");
    assert!(agent.stop().success(), "SIGTERM is a clean end");
    assert!(!agent.is_ready(), "no agent follows any more");
    assert_eq!(echo::ask_name(vips(80)[2].1).unwrap(), "pod-2", "the hooks stay");
    echo::ping_tcp(&established, "still there").unwrap();
}

#[test]
fn cleanup_removes_our_links_and_pins_and_nothing_else() {
    let mut live = start();
    let foreign = PinDir::new(&live.sandbox.pin_dir()).object("somebody_elses");
    let mut map = Array::<MapData, u32>::create(1, 0).unwrap();
    map.set(0, 1, 0).unwrap();
    map.pin(&foreign).unwrap();
    let while_running = cproxy(&live.sandbox, &["cleanup"]);
    assert_eq!(while_running.code, 1);
    assert!(while_running.stderr.contains("in use by a running cproxy"), "{}", while_running.stderr);
    live.agent.stop();
    let cleanup = cproxy(&live.sandbox, &["cleanup"]).success();
    assert!(cleanup.stderr.contains("somebody_elses"), "{}", cleanup.stderr);
    assert!(foreign.exists());
    live.sandbox.add_address(WEB.v4);
    assert!(echo::is_refused(TcpStream::connect(vips(80)[0].1)), "no server listens on the VIP itself");
    std::fs::remove_file(&foreign).unwrap();
    cproxy(&live.sandbox, &["cleanup"]).success();
    assert!(!live.sandbox.pin_dir().exists());
    cproxy(&live.sandbox, &["cleanup"]).success();
}

/// The state after an installation that was interrupted between creating a link and putting it in its place.
#[test]
fn cleanup_removes_a_link_that_never_came_into_its_place() {
    let mut live = start();
    live.agent.stop();
    let pins = PinDir::new(&live.sandbox.pin_dir()).versioned();
    std::fs::rename(pins.join("connect4"), pins.join("connect4_new")).unwrap();
    let cleanup = cproxy(&live.sandbox, &["cleanup"]).success();
    assert_eq!(cleanup.stderr, "");
    assert!(!live.sandbox.pin_dir().exists());
    live.sandbox.add_address(WEB.v4);
    assert!(echo::is_refused(TcpStream::connect(vips(80)[0].1)), "no server listens on the VIP itself");
}

/// The state after an interrupted installation, or a manual removal.
#[test]
fn a_map_without_its_pin_is_made_anew() {
    let mut live = start();
    live.agent.kill();
    let pins = PinDir::new(&live.sandbox.pin_dir()).versioned();
    for name in ["FRONTENDS", "SETS", "BACKENDS"] {
        let lost = [0, 1].map(|number| std::fs::remove_file(pins.join(format!("{name}_{number}"))));
        assert!(lost.iter().any(Result::is_ok), "{name} has a pin");
    }
    let _agent = start_agent(&live.sandbox);
    all_pods_answer("after the pins were lost", || echo::ask_name(vips(80)[0].1));
    assert_eq!(live.rows().len(), 4);
}

#[test]
fn cleanup_of_a_directory_that_cannot_be_ours_touches_nothing() {
    let sandbox = Sandbox::for_test();
    let file = sandbox.dir().join("app/v1/report.csv");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "data").unwrap();
    let cleanup = cproxy(&sandbox, &["cleanup", "--pin-dir", &sandbox.dir().join("app").display().to_string()]);
    assert_eq!(cleanup.code, 1);
    assert!(cleanup.stderr.contains("not on a bpf filesystem"), "{}", cleanup.stderr);
    assert!(file.exists());
}

#[test]
fn bootstrap_is_served_until_the_first_complete_sync() {
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, 1..=NODES);
    let bootstrap = manifest::write(sandbox.dir(), "bootstrap.json", web_with([3]));
    // No API server listens at this address.
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://127.0.0.1:1");
    let mut agent = Agent::new(&sandbox).kubeconfig(&kubeconfig).arg("--bootstrap").arg(&bootstrap).spawn();
    agent.wait_log("cannot list services at https://127.0.0.1:1", SYNC);
    agent.wait_log("of --bootstrap until the first complete sync", SYNC);
    assert!(!agent.is_ready());
    assert_eq!(echo::ask_name(vips(80)[0].1).unwrap(), "pod-3");
    agent.stop();
    // The table from before is newer than the bootstrap.
    manifest::write(&sandbox.manifest_dir(), "web.json", web_with([1]));
    start_agent(&sandbox).stop();
    let mut agent = Agent::new(&sandbox).kubeconfig(&kubeconfig).arg("--bootstrap").arg(&bootstrap).spawn();
    agent.wait_log("cannot list services", SYNC);
    assert_eq!(echo::ask_name(vips(80)[0].1).unwrap(), "pod-1");
    agent.stop();
    // The first complete sync removes it.
    std::fs::remove_file(sandbox.manifest_dir().join("web.json")).unwrap();
    let _agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).arg("--bootstrap").arg(&bootstrap).start();
    assert!(rows(&sandbox, "services").is_empty());
}

/// The nameserver in resolv.conf is the ClusterIP of a Service without endpoints, and the same address on this host has
/// a real nameserver, so only untranslated sockets get an answer.
#[test]
fn the_agent_resolves_names_over_untranslated_sockets() {
    const NAMESERVER: &str = "10.96.0.53";
    let sandbox = Sandbox::for_test();
    sandbox.add_address(NAMESERVER);
    sandbox.add_addresses(pod(1).addresses());
    let mut dnsmasq = Command::new("dnsmasq");
    dnsmasq.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--bind-interfaces"]);
    dnsmasq.args(["--listen-address", NAMESERVER, "--address=/api.example.test/127.0.0.77", "--pid-file="]);
    // dnsmasq answers from the VIP, an address of this namespace, at a port that the Service does not have.
    let _dnsmasq = Daemon::spawn(&sandbox, "dnsmasq", Placement::Unhooked, dnsmasq);
    let dns = Service::new("dns").cluster_ips([NAMESERVER]).udp("dns", 53, 53).tcp("dns-tcp", 53, 53);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [dns.into()]);
    start_agent_with(&sandbox, OWN_ADDRESSES).stop();
    assert!(
        echo::is_refused(echo::ask_connected_udp(SocketAddr::new(NAMESERVER.parse().unwrap(), 53))),
        "its Service is down"
    );

    let resolv_conf =
        manifest::write_text(sandbox.dir(), "resolv.conf", "nameserver 10.96.0.53\nsearch example.test\n");
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://api:1");
    let mut script = Command::new("unshare");
    script.args(["--mount", "sh", "-euc"]);
    script.arg("mount --bind $resolv_conf /etc/resolv.conf; exec $cproxy run --kubeconfig $kubeconfig");
    script.env("resolv_conf", resolv_conf).env("kubeconfig", kubeconfig).env("cproxy", process::cproxy_binary());
    script.env("CPROXY_CGROUP", sandbox.cgroup()).env("CPROXY_PIN_DIR", sandbox.pin_dir());
    script.env("CPROXY_RUN_DIR", sandbox.run_dir());
    let mut agent = Daemon::spawn(&sandbox, "cproxy", Placement::Hooked, script);
    // The search list completes the name; the address has no listener.
    agent.wait_log("127.0.0.77:1: Connection refused", SYNC);
    let wait = cproxy(&sandbox, &["wait", "--timeout", "0"]);
    let parts = ["has received nothing from its source yet: ", "127.0.0.77:1: Connection refused"];
    assert!(wait.code == 1 && parts.iter().all(|part| wait.stderr.contains(part)), "{wait:?}");
}

#[test]
fn every_program_stays_within_its_instruction_budget() {
    const BUDGET: u32 = 2_300;
    let live = World::builder().args(["--log-level", "debug"]).start();
    let log = live.agent.log();
    let counts: Vec<u32> =
        log.split(" instructions verified").filter_map(|text| text.rsplit_once('(')?.1.parse().ok()).collect();
    assert_eq!(counts.len(), Program::ALL.len(), "one for each program: {log}");
    assert!(counts.iter().all(|&count| count > 0 && count <= BUDGET), "{counts:?}");
}

/// The kernel's verifier gives up when a signal is pending.
#[test]
fn signals_do_not_keep_programs_from_being_loaded() {
    extern "C" fn ignore(_: i32) {}
    let handler = SigAction::new(SigHandler::Handler(ignore), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGUSR1, &handler) }.unwrap();
    let loading = thread::spawn(|| {
        for set in [ProgramSet::Plain, ProgramSet::Tracing] {
            let loaded = try_load(Features::probe(), set).unwrap();
            assert!(loaded.iter().all(|(_, count)| count.is_ok()), "{loaded:?}");
        }
    });
    while !loading.is_finished() {
        pthread_kill(loading.as_pthread_t(), Signal::SIGUSR1).ok();
    }
    loading.join().unwrap();
}

#[test]
fn every_tracing_program_stays_within_its_instruction_budget() {
    const BUDGET: u32 = 3_000;
    let loaded = try_load(Features::probe(), ProgramSet::Tracing).unwrap();
    let counts: Vec<u32> = loaded.into_iter().map(|(_, count)| count.unwrap()).collect();
    println!("{counts:?}");
    assert!(counts.iter().all(|&count| count > 0 && count <= BUDGET), "{counts:?}");
}
