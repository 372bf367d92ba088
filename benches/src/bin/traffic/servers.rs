//! The benchmarks' servers and their Services.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{
    arena::{Arena, Subject},
    report::Report,
};
use cproxy_tests::{
    echo::{self, Server},
    process::{Daemon, cproxy_binary},
    sandbox::{Placement, Sandbox},
};
use serde_json::json;

/// Queue length, more than the connections that a client makes in one go; the kernel's default limit
/// (`net.core.somaxconn`).
const SINK_BACKLOG: i32 = 4096;

/// Queue length of a listener that keeps connections.
const KEPT_MAX: i32 = 1 << 17;

/// How long a server may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

const fn address(a: u8, b: u8, c: u8, d: u8, port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(a, b, c, d)), port)
}

/// A server that accepts connections and closes them.
pub(crate) const SINK: Subject = Subject {
    name: "sink",
    vip: address(10, 96, 2, 1, 80),
    backends: &[address(10, 244, 1, 1, 8080)],
    is_udp_too: false,
};

/// A server in whose queue connections stay. With several addresses no client runs out of ports.
pub(crate) const KEPT: Subject = Subject {
    name: "kept",
    vip: address(10, 96, 2, 13, 80),
    backends: &[
        address(10, 244, 9, 1, 8080),
        address(10, 244, 9, 2, 8080),
        address(10, 244, 9, 3, 8080),
        address(10, 244, 9, 4, 8080),
        address(10, 244, 9, 5, 8080),
    ],
    is_udp_too: false,
};

/// nginx.
pub(crate) const WEB: Subject = Subject {
    name: "web",
    vip: address(10, 96, 2, 2, 80),
    backends: &[address(10, 244, 2, 1, 8080)],
    is_udp_too: false,
};

/// redis.
pub(crate) const REDIS: Subject = Subject {
    name: "redis",
    vip: address(10, 96, 2, 3, 6379),
    backends: &[address(10, 244, 3, 1, 6379)],
    is_udp_too: false,
};

/// Shards of a redis cluster.
pub(crate) const SHARDS: [Subject; 3] = [
    shard("shard-1", address(10, 96, 2, 9, 6379), &[address(10, 244, 7, 1, 6379)]),
    shard("shard-2", address(10, 96, 2, 10, 6379), &[address(10, 244, 7, 2, 6379)]),
    shard("shard-3", address(10, 96, 2, 11, 6379), &[address(10, 244, 7, 3, 6379)]),
];

/// A nameserver.
pub(crate) const DNS: Subject =
    Subject { name: "dns", vip: address(10, 96, 2, 4, 53), backends: &[address(10, 244, 4, 1, 53)], is_udp_too: true };

/// iperf3.
pub(crate) const BULK: Subject = Subject {
    name: "bulk",
    vip: address(10, 96, 2, 5, 5201),
    backends: &[address(10, 244, 5, 1, 5201)],
    is_udp_too: true,
};

/// Servers that greet with their names.
pub(crate) const TWO: Subject =
    Subject { name: "two", vip: address(10, 96, 2, 6, 80), backends: &NAMED_2, is_udp_too: false };
/// As [`TWO`].
pub(crate) const THREE: Subject =
    Subject { name: "three", vip: address(10, 96, 2, 7, 80), backends: &NAMED_3, is_udp_too: false };
/// As [`TWO`].
pub(crate) const TEN: Subject =
    Subject { name: "ten", vip: address(10, 96, 2, 8, 80), backends: &NAMED_10, is_udp_too: false };

/// Pods that are replaced.
pub(crate) const ROLLED: Subject =
    Subject { name: "rolled", vip: address(10, 96, 2, 12, 80), backends: &ROLLED_3, is_udp_too: false };

const ROLLED_3: [SocketAddr; 3] =
    [address(10, 244, 8, 1, 8080), address(10, 244, 8, 2, 8080), address(10, 244, 8, 3, 8080)];

const NAMED_2: [SocketAddr; 2] = [named(1), named(2)];
const NAMED_3: [SocketAddr; 3] = [named(1), named(2), named(3)];
const NAMED_10: [SocketAddr; 10] =
    [named(1), named(2), named(3), named(4), named(5), named(6), named(7), named(8), named(9), named(10)];

const fn shard(name: &'static str, vip: SocketAddr, backends: &'static [SocketAddr]) -> Subject {
    Subject { name, vip, backends, is_udp_too: false }
}

const fn named(host: u8) -> SocketAddr {
    address(10, 244, 6, host, 8080)
}

/// A report with the versions of the measured cproxy and kube-proxy.
pub(crate) fn report(benchmark: &'static str, arena: &Arena<'_>) -> Report {
    let mut report = Report::new(benchmark);
    report.samples = json!({});
    report.add_version("cproxy", cproxy_binary(), &["version"]);
    if let Some(kube_proxy) = arena.kube_proxy() {
        report.add_version("kube-proxy", kube_proxy.binary, &["--version"]);
    }
    report
}

/// Starts servers that greet with their names at a Service's endpoints.
pub(crate) fn named_servers(sandbox: &Sandbox, subject: &Subject) -> Vec<Server> {
    sandbox.add_addresses(subject.backends.iter().map(SocketAddr::ip));
    subject.backends.iter().map(|backend| echo::tcp(sandbox, backend, &backend.ip().to_string())).collect()
}

/// Accepts connections and closes them until this process ends.
pub(crate) fn sink(sandbox: &Sandbox, subject: &Subject) -> Result<()> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    sandbox.add_address(backend.ip());
    let listener = sandbox.netns().run(|| TcpListener::bind(backend)).context("listening")?;
    // A connect(2) that meets a full queue repeats its SYN after a second, which would only measure the scheduler.
    rustix::net::listen(&listener, SINK_BACKLOG).context("listening with a longer queue")?;
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            drop(stream);
        }
    });
    Ok(())
}

/// Listeners at all backends of a Service, in whose queues connections stay: they need no descriptors there.
pub(crate) fn keeper(sandbox: &Sandbox, subject: &Subject) -> Result<Vec<TcpListener>> {
    sandbox.add_addresses(subject.backends.iter().map(SocketAddr::ip));
    let listen = |backend| {
        sandbox.netns().run(|| {
            fs::write("/proc/sys/net/core/somaxconn", KEPT_MAX.to_string()).context("net.core.somaxconn")?;
            let listener = TcpListener::bind(backend).context("listening")?;
            rustix::net::listen(&listener, KEPT_MAX).context("listening with a longer queue")?;
            Ok(listener)
        })
    };
    subject.backends.iter().map(listen).collect()
}

/// nginx as it would be deployed, without a log.
pub(crate) fn nginx(sandbox: &Sandbox, subject: &Subject) -> Result<Daemon> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    let dir = sandbox.dir().join("nginx");
    fs::create_dir_all(&dir).context("writing into the sandbox")?;
    let configuration = format!(
        "daemon off; worker_processes auto; pid {0}/pid; error_log stderr crit; worker_rlimit_nofile 16384;\n\
         events {{ worker_connections 8192; }}\n\
         http {{ access_log off; keepalive_requests 1000000; client_body_temp_path {0}/body; proxy_temp_path \
         {0}/proxy;\n\
         fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;\n\
         server {{ listen {backend} backlog=8192 reuseport; location / {{ return 200 \"hello\\n\"; }} }} }}\n",
        dir.display()
    );
    let file = dir.join("nginx.conf");
    fs::write(&file, configuration).context("writing into the sandbox")?;
    sandbox.netns().run(|| fs::write("/proc/sys/net/core/somaxconn", "8192")).context("net.core.somaxconn")?;
    let mut command = Command::new("nginx");
    command.arg("-c").arg(&file).arg("-p").arg(&dir).args(["-e", "stderr"]);
    start(sandbox, "nginx", command, *backend)
}

/// redis without persistence.
pub(crate) fn redis(sandbox: &Sandbox, subject: &Subject) -> Result<Daemon> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    let mut command = redis_at(*backend);
    command.args(["--bind", &backend.ip().to_string()]).arg("--dir").arg(sandbox.dir());
    start(sandbox, "redis", command, *backend)
}

/// A shard of a redis cluster that announces its ClusterIP, at which the other shards reach it without a proxy.
pub(crate) fn redis_shard(sandbox: &Sandbox, subject: &Subject) -> Result<Daemon> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    let vip = subject.vip.ip();
    sandbox.add_address(vip);
    let dir = sandbox.dir().join(subject.name);
    fs::create_dir_all(&dir).context("writing into the sandbox")?;
    let mut command = redis_at(*backend);
    command.args(["--bind", &backend.ip().to_string(), &vip.to_string()]).arg("--dir").arg(dir);
    command.args(["--cluster-enabled", "yes", "--cluster-announce-ip", &vip.to_string()]);
    start(sandbox, subject.name, command, *backend)
}

fn redis_at(backend: SocketAddr) -> Command {
    let mut command = Command::new("redis-server");
    command.args(["--port", &backend.port().to_string(), "--save", "", "--appendonly", "no"]);
    command.args(["--protected-mode", "no", "--maxclients", "4000"]);
    command
}

/// A nameserver that knows one name.
pub(crate) fn dnsmasq(sandbox: &Sandbox, subject: &Subject, name: &str) -> Result<Daemon> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    let mut command = Command::new("dnsmasq");
    command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file="]);
    command.args(["--log-facility=-", "--bind-interfaces", "--dns-forward-max=10000"]);
    command.arg(format!("--listen-address={}", backend.ip())).arg(format!("--host-record={name},192.0.2.7"));
    start(sandbox, "dnsmasq", command, *backend)
}

/// iperf3, which serves one client after the other.
pub(crate) fn iperf(sandbox: &Sandbox, subject: &Subject) -> Result<Daemon> {
    let [backend, ..] = subject.backends else { anyhow::bail!("{} has no backend", subject.name) };
    let mut command = Command::new("iperf3");
    command.args(["--server", "--bind", &backend.ip().to_string(), "--port", &backend.port().to_string()]);
    start(sandbox, "iperf3", command, *backend)
}

/// Starts a server and waits until it listens.
fn start(sandbox: &Sandbox, name: &str, command: Command, listens: SocketAddr) -> Result<Daemon> {
    sandbox.add_address(listens.ip());
    let mut daemon = Daemon::spawn(sandbox, name, Placement::Unhooked, command);
    let deadline = Instant::now() + START_TIMEOUT;
    while sandbox.netns().run(|| TcpStream::connect(listens)).is_err() {
        ensure!(daemon.exit_status().is_none(), "{name} has ended: {}", daemon.tail());
        ensure!(Instant::now() < deadline, "{name} does not listen within {START_TIMEOUT:?}: {}", daemon.tail());
        thread::sleep(Duration::from_millis(20));
    }
    Ok(daemon)
}
