//! A cluster in a sandbox: pods with servers, Services with a ClusterIP of each family, an agent that follows
//! manifests, and programs that run in it.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr},
    process::Command,
    time::Duration,
};

pub(crate) use cproxy_tests::world::{pod_name, pod_number};
use cproxy_tests::{
    echo, http,
    manifest::{self, Endpoint, Service, Slice},
    nonce,
    process::{self, Daemon, Output, eventually},
    sandbox::{Placement, Sandbox},
    world::{self, OWN_ADDRESSES, World, cluster_ip, rows},
};
use serde_json::Value;

/// Limit on every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The pods of most tests.
pub(crate) const PODS: [u8; 3] = [1, 2, 3];

/// Service with all of [`PODS`].
pub(crate) const WEB: u8 = 10;
/// A Service without endpoints.
pub(crate) const DOWN: u8 = 20;
/// Services with two ClusterIPs but endpoints of one family only, IPv4 and IPv6; the other ClusterIP refuses.
pub(crate) const HALVES: [u8; 2] = [30, 31];
/// A nameserver: pods 1 and 2.
pub(crate) const DNS: u8 = 53;
/// Another nameserver: pod 3.
pub(crate) const OTHER_DNS: u8 = 54;

/// Ports of every Service. See [`Cluster::start`] for the servers of the first three; tests start the other servers.
pub(crate) const HTTP: u16 = 80;
pub(crate) const GREETING: u16 = 81;
pub(crate) const QUESTION: u16 = 82;
pub(crate) const NAMES: u16 = 53;
pub(crate) const REDIS: u16 = 6379;
pub(crate) const HTTP3: u16 = 443;

/// Difference between a pod's port and that of its Service.
pub(crate) const OFFSET: u16 = 8_000;

const PORTS: [(&str, &str, u16); 7] = [
    ("http", "TCP", HTTP),
    ("greeting", "TCP", GREETING),
    ("question", "UDP", QUESTION),
    ("dns", "UDP", NAMES),
    ("dns-tcp", "TCP", NAMES),
    ("redis", "TCP", REDIS),
    ("http3", "UDP", HTTP3),
];

/// Prints a line for users who watch the tests, also when they pass, for which the harness hides all other output.
pub(crate) fn print_report(what: &str) {
    io::stderr().write_all(format!("\n{what}\n").as_bytes()).unwrap();
}

/// The Service's address of each family.
pub(crate) fn vips(service: u8) -> [IpAddr; 2] {
    cluster_ip(service).addresses()
}

/// The Service's addresses in the three forms that applications use: IPv4, IPv6 and IPv4-mapped.
pub(crate) fn forms(service: u8, port: u16) -> [SocketAddr; 3] {
    cluster_ip(service).forms(port)
}

/// The pod's address of each family.
pub(crate) fn pod_addresses(pod: u8) -> [IpAddr; 2] {
    world::pod(pod).addresses()
}

/// A Service with all ports and two ClusterIPs.
pub(crate) fn service(service: u8) -> Value {
    let ports = PORTS.iter().fold(Service::new(&service_name(service)), |object, (name, protocol, port)| {
        object.port(name, protocol, *port, port + OFFSET)
    });
    ports.cluster_ips(vips(service)).into()
}

/// The Service's slice of a family: 0 is IPv4, 1 is IPv6. `endpoint` makes a pod's endpoint from its address.
pub(crate) fn slice(service: u8, family: usize, pods: &[u8], endpoint: impl Fn(u8, IpAddr) -> Endpoint) -> Value {
    let object = [Slice::v4, Slice::v6][family](&service_name(service));
    let object = PORTS.iter().fold(object, |object, (name, protocol, port)| object.port(name, protocol, port + OFFSET));
    pods.iter().fold(object, |object, &pod| object.endpoint(endpoint(pod, pod_addresses(pod)[family]))).into()
}

fn service_name(service: u8) -> String {
    format!("service-{service}")
}

/// A running cluster.
pub(crate) struct Cluster {
    pub(crate) world: World,
}

impl Cluster {
    /// Starts a cluster with [`PODS`] and the Services above.
    pub(crate) fn start() -> Self {
        Self::with(&PODS, Self::write)
    }

    /// The same in a VM whose addresses the agent has to detect.
    pub(crate) fn start_without_addresses() -> Self {
        Self::with_arguments(&PODS, Self::write, &[])
    }

    fn write(sandbox: &Sandbox) {
        for (service, pods) in [(WEB, PODS.as_slice()), (DOWN, &[]), (DNS, &[1, 2]), (OTHER_DNS, &[3])] {
            put(sandbox, service, pods, pods);
        }
        put(sandbox, HALVES[0], &PODS, &[]);
        put(sandbox, HALVES[1], &[], &PODS);
    }

    /// Starts a cluster with other pods and Services, which `manifests` writes. Each pod has an HTTP server, one that
    /// greets, and one that repeats questions, all in both families.
    pub(crate) fn with(pods: &[u8], manifests: impl FnOnce(&Sandbox)) -> Self {
        Self::with_arguments(pods, manifests, &OWN_ADDRESSES)
    }

    fn with_arguments(pods: &[u8], manifests: impl FnOnce(&Sandbox), arguments: &[&str]) -> Self {
        let serve = |sandbox: &Sandbox| {
            manifests(sandbox);
            sandbox.add_addresses(pods.iter().flat_map(|&pod| pod_addresses(pod)));
            let pods = pods.iter().flat_map(|&pod| pod_addresses(pod).map(|address| (pod_name(pod), address)));
            let servers = pods.map(|(name, address)| {
                let at = |port| SocketAddr::new(address, port + OFFSET);
                [
                    http::serve(sandbox, at(HTTP), &name),
                    echo::tcp(sandbox, at(GREETING), &name),
                    nonce::udp(sandbox, at(QUESTION), &name),
                ]
            });
            servers.flatten().collect::<Vec<_>>()
        };
        Self { world: World::builder().prepare(serve).args(arguments).start() }
    }

    /// Replaces the pods behind a Service, and waits until the kernel has them.
    pub(crate) fn set(&self, service: u8, pods: &[u8]) {
        put(&self.world.sandbox, service, pods, pods);
        self.wait_for(&[(service, pods.to_vec())]);
    }

    /// Waits until the kernel has these pods behind each of these Services, in both families.
    pub(crate) fn wait_for(&self, services: &[(u8, Vec<u8>)]) {
        let wanted: BTreeSet<_> = services
            .iter()
            .flat_map(|(service, pods)| (0..2).map(move |family| (vips(*service)[family], family, pods)))
            .flat_map(|(vip, family, pods)| pods.iter().map(move |pod| (vip, pod_addresses(*pod)[family])))
            .collect();
        let of_interest: BTreeSet<_> = services.iter().flat_map(|(service, _)| vips(*service)).collect();
        eventually(PATIENCE, "the table follows", || {
            let now: BTreeSet<_> =
                table(&self.world.sandbox, HTTP).into_iter().filter(|(vip, _)| of_interest.contains(vip)).collect();
            if now == wanted { Ok(()) } else { Err(format!("{now:?} instead of {wanted:?}")) }
        });
    }

    /// Runs a program in the agent's cgroup.
    pub(crate) fn run(&self, program: Command) -> Output {
        self.run_with_input(program, "")
    }

    /// Like [`Self::run`], with input on stdin.
    pub(crate) fn run_with_input(&self, program: Command, input: &str) -> Output {
        process::run(&self.world.sandbox, Placement::Hooked, program, input, PATIENCE)
    }

    /// The program, with a resolv.conf of its own.
    pub(crate) fn with_resolv_conf(&self, content: &str, program: &Command) -> Command {
        let directory = self.world.sandbox.dir().join("etc");
        fs::create_dir_all(&directory).unwrap();
        let files = [("resolv.conf", content), ("hosts", ""), ("nsswitch.conf", "hosts: files dns\n")];
        let mut mounts = String::new();
        for (name, content) in files {
            let file = manifest::write_text(&directory, name, content);
            mounts.push_str(&format!("mount --bind {} /etc/{name}; ", file.display()));
        }
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-euc", &format!("{mounts} exec \"$@\""), "sh"]);
        command.arg(program.get_program()).args(program.get_args());
        command
    }

    /// Starts a dnsmasq in each pod. Names are `web.test`, `half-v4.test` and `half-v6.test` for the Services with both
    /// ClusterIPs, and `who.test`, which is 192.0.2.N and the text "pod-N" where pod N answers.
    pub(crate) fn serve_names(&self) -> [Daemon; 3] {
        PODS.map(|pod| {
            let mut dnsmasq = Command::new("dnsmasq");
            dnsmasq.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file="]);
            dnsmasq.args(["--log-facility=-", "--bind-interfaces", "--local=/test/"]);
            dnsmasq.arg(format!("--port={}", NAMES + OFFSET));
            dnsmasq.args(pod_addresses(pod).map(|address| format!("--listen-address={address}")));
            for (name, service) in [("web", WEB), ("half-v4", HALVES[0]), ("half-v6", HALVES[1])] {
                let [v4, v6] = vips(service);
                dnsmasq.arg(format!("--host-record={name}.test,{v4},{v6}"));
            }
            dnsmasq.arg(format!("--host-record=who.test,192.0.2.{pod}"));
            dnsmasq.arg(format!("--txt-record=who.test,{}", pod_name(pod)));
            let mut daemon = Daemon::spawn(&self.world.sandbox, "dnsmasq", Placement::Unhooked, dnsmasq);
            daemon.wait_log("started", PATIENCE);
            daemon
        })
    }
}

/// Writes a Service's manifest, with ready endpoints.
fn put(sandbox: &Sandbox, number: u8, v4: &[u8], v6: &[u8]) {
    let slice = |family, pods| slice(number, family, pods, |_, address| Endpoint::ready(address));
    let name = format!("{}.json", service_name(number));
    manifest::write(&sandbox.manifest_dir(), &name, [service(number), slice(0, v4), slice(1, v6)]);
}

/// Frontends at `port` with their backends in the kernel.
fn table(sandbox: &Sandbox, port: u16) -> Vec<(IpAddr, IpAddr)> {
    let address = |value: &Value| value["address"].as_str().unwrap().parse().unwrap();
    let backends = |row: &Value| {
        let backends = row["backends"].as_array().unwrap().iter();
        backends.map(|backend| (address(row), address(backend))).collect::<Vec<_>>()
    };
    rows(sandbox, "services").iter().filter(|row| row["port"] == port).flat_map(backends).collect()
}
