//! Servers as users run them, behind a load balancer's address.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    thread,
};

use cproxy_tests::{
    echo,
    process::{self, Daemon, Output},
    sandbox::Placement,
};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, bind, listen, socket_with};
use serde_json::json;

use super::{
    BALANCER, CLIENT, PORT, Pods, SYNC, TCP, WEB, agent, connect, eventually, kind, pods, receive, rows, service,
    write_objects,
};

/// Size of a file, and of an upload.
const LARGE_BYTES: u64 = 100 << 20;
/// Ports of the balancer, each with that of the pod.
const REDIS: [u16; 2] = [6379, 6380];
const HTTP2: [u16; 2] = [81, 8081];

/// Runs a program in a client's network namespace.
fn run_outside(pods: &Pods, program: &str, words: &[&str]) -> Output {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", pods.client.path().display())).arg(program).args(words);
    process::run(&pods.sandbox, Placement::Unhooked, command, "", SYNC)
}

fn host(address: IpAddr) -> String {
    if address.is_ipv6() { format!("[{address}]") } else { address.to_string() }
}

#[test]
fn nginx_serves_both_versions_of_http_and_large_files() {
    let pods = pods();
    write_objects(&pods, service().tcp("h2", HTTP2[0], HTTP2[1]), |slice| slice.tcp("h2", HTTP2[1]));
    let _agent = agent(&pods).start();
    let dir = pods.sandbox.dir();
    File::create(dir.join("large")).unwrap().set_len(LARGE_BYTES).unwrap();
    fs::write(dir.join("index.html"), "hello").unwrap();
    let conf = format!(
        "daemon off; pid {0}/nginx.pid; error_log stderr; events {{}}\n\
         http {{ access_log {0}/access.log; client_body_temp_path {0}/body; \
         server {{ listen {TCP} reuseport; listen [::]:{TCP} reuseport ipv6only=on; root {0}; }}\n\
         server {{ listen {1} http2; listen [::]:{1} http2; root {0}; }} }}\n",
        dir.display(),
        HTTP2[1]
    );
    fs::write(dir.join("nginx.conf"), conf).unwrap();
    let mut nginx = Command::new("nginx");
    nginx.arg("-c").arg(dir.join("nginx.conf")).arg("-e").arg("stderr");
    let _nginx = Daemon::spawn(&pods.sandbox, "nginx", Placement::Hooked, nginx);
    for balancer in BALANCER.addresses() {
        for (option, version, port) in [("--http1.1", "1.1", PORT), ("--http2-prior-knowledge", "2", HTTP2[0])] {
            eventually(SYNC, "nginx listens", || {
                pods.client.run(|| connect(balancer, port)).map(drop).map_err(|error| error.to_string())
            });
            let url = format!("http://{}:{port}/", host(balancer));
            let words = ["-sS", option, "-w", " %{http_version} %{remote_ip}:%{remote_port}", &url];
            let expected = format!("hello {version} {balancer}:{port}");
            assert_eq!(run_outside(&pods, "curl", &words).success().stdout, expected);
            let words = ["-sS", option, "-o", "/dev/null", "-w", "%{size_download}", &format!("{url}large")];
            assert_eq!(run_outside(&pods, "curl", &words).success().stdout, LARGE_BYTES.to_string());
        }
    }
    let log = fs::read_to_string(dir.join("access.log")).unwrap();
    let is_of_client = |line: &str| {
        [CLIENT.v4.to_string(), CLIENT.v6.to_string()].iter().any(|client| line.starts_with(&format!("{client} ")))
    };
    assert!(log.lines().count() >= 8 && log.lines().all(is_of_client), "{log}");
}

#[test]
fn uploads_redis_and_names_pass() {
    let pods = pods();
    let redis = service().tcp("redis", REDIS[0], REDIS[1]);
    write_objects(&pods, redis, |slice| slice.tcp("redis", REDIS[1]));
    let _agent = agent(&pods).start();
    let listener = TcpListener::bind(("::", TCP)).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let received = std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        stream.write_all(received.to_string().as_bytes()).unwrap();
    });
    eventually(SYNC, "the port is received", || {
        if rows(&pods).iter().any(|row| row["port"] == json!(REDIS[0])) { Ok(()) } else { Err("not yet") }
    });
    let mut stream = pods.client.run(|| connect(BALANCER.v4, PORT)).unwrap();
    std::io::copy(&mut std::io::repeat(7).take(LARGE_BYTES), &mut stream).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, LARGE_BYTES.to_string());
    server.join().unwrap();

    let mut server = Command::new("redis-check-rdb");
    server.arg0("redis-server").args(["--save", "", "--appendonly", "no", "--protected-mode", "no"]);
    server.args(["--port", &REDIS[1].to_string(), "--bind", "0.0.0.0", "::"]);
    server.arg("--dir").arg(pods.sandbox.dir());
    let mut redis = Daemon::spawn(&pods.sandbox, "redis-server", Placement::Hooked, server);
    redis.wait_log("Ready to accept connections", SYNC);
    let mut dnsmasq = Command::new("dnsmasq");
    dnsmasq.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file="]);
    dnsmasq.args(["--log-facility=-", "--local=/test/", "--host-record=web.test,192.0.2.1", "--bind-interfaces"]);
    dnsmasq.args(["--listen-address=0.0.0.0", &format!("--port={TCP}")]);
    let mut names = Daemon::spawn(&pods.sandbox, "dnsmasq", Placement::Hooked, dnsmasq);
    names.wait_log("started", SYNC);
    for balancer in BALANCER.addresses() {
        let at = ["-h", &balancer.to_string(), "-p", &REDIS[0].to_string()];
        assert_eq!(run_outside(&pods, "redis-cli", &[&at[..], &["PING"]].concat()).success().stdout, "PONG\n");
    }
    let at = [&format!("@{}", BALANCER.v4), "-p", &TCP.to_string(), "+short", "+tries=1", "web.test"];
    assert_eq!(run_outside(&pods, "dig", &at).success().stdout, "192.0.2.1\n");
}

/// As an init system does that listens for its services.
#[test]
fn a_listener_that_another_process_inherits_is_found() {
    let pods = pods();
    let _agent = receive(&pods);
    let listener = TcpListener::bind(("0.0.0.0", TCP)).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", "import socket; s = socket.socket(fileno=0); c, _ = s.accept(); c.sendall(b'inherited')"]);
    let mut child = python.stdin(Stdio::from(std::os::fd::OwnedFd::from(listener))).spawn().unwrap();
    let mut text = String::new();
    pods.client.run(|| connect(BALANCER.v4, PORT)).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "inherited");
    assert!(child.wait().unwrap().success());
}

/// New kernels keep MPTCP sockets out of socket maps. They are then served at equal ports alone, and shown so.
#[test]
fn an_mptcp_listener_is_served_or_said_not_to_be() {
    let pods = pods();
    write_objects(&pods, service().tcp("alt", TCP, TCP), |slice| slice.tcp("alt", TCP));
    let _agent = agent(&pods).start();
    let mptcp = Protocol::from_raw(262.try_into().unwrap());
    let listener = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, Some(mptcp)).unwrap();
    bind(&listener, &SocketAddr::from(([0, 0, 0, 0], TCP))).unwrap();
    listen(&listener, 16).unwrap();
    eventually(SYNC, "it is served at an equal port", || {
        pods.client.run(|| connect(BALANCER.v4, TCP)).map(drop).map_err(|error| error.to_string())
    });
    let row = rows(&pods).into_iter().find(|row| row["port"] == json!(PORT)).unwrap();
    let is_served = kind(pods.client.run(|| connect(BALANCER.v4, PORT))).is_ok();
    assert_eq!(row["listener"], json!(if is_served { "yes" } else { "too-old" }));
    println!("MPTCP at another port: {is_served}");
}

/// A socket that takes datagrams for several clients at once answers each from the address that it has called.
#[test]
fn datagrams_of_many_clients_are_answered_each_from_its_address() {
    let pods = pods();
    let _agent = receive(&pods);
    let server = UdpSocket::bind(("0.0.0.0", TCP)).unwrap();
    let clients: Vec<_> = (0..200u8)
        .map(|number| {
            let address: IpAddr = if number % 2 == 0 { BALANCER.v4.into() } else { WEB.v4.into() };
            let client = pods.client.run(|| echo::udp_client((address, TCP))).unwrap();
            client.send_to(&[number], (address, TCP)).unwrap();
            (number, address, client)
        })
        .collect();
    let mut buffer = [0; 8];
    for _ in &clients {
        let (length, peer) = server.recv_from(&mut buffer).unwrap();
        server.send_to(buffer.get(..length).unwrap(), peer).unwrap();
    }
    for (number, address, client) in clients {
        let answer = client.recv_from(&mut buffer).unwrap();
        assert_eq!((answer, buffer[0]), ((1, SocketAddr::new(address, TCP)), number));
    }
}
