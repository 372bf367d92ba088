//! The cluster outside guests: a control plane, pods, and a nameserver, which is a pod, too.

use std::{process::Command, time::Duration};

use serde_json::Value;

use crate::{
    Server,
    control_plane::{self, ControlPlane, NODE},
    guest::{GuestImage, Kernel},
    http,
    manifest::{Service, Slice},
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

/// Kernel parameter with the API server's name.
pub const API_SERVER: &str = "cproxy.apiserver=https://api.test:6443";

/// Default directory of the agent's token.
pub const SECRETS: &str = "var/run/secrets/kubernetes.io/serviceaccount";

/// resolv.conf of a pod; the guest's own one has a nameserver that knows the API server.
const RESOLV_CONF: &str = "nameserver 10.96.0.10
search default.svc.cluster.local svc.cluster.local cluster.local
options ndots:5
";

/// Limit on the start of the nameserver.
const START_TIMEOUT: Duration = Duration::from_secs(20);

const NAMESERVER_VIP: &str = "10.96.0.10";
const NAMESERVER: &str = "10.244.0.53";
const WEB_VIP: &str = "10.96.0.20";
const PODS: [(&str, &str); 2] = [("pod-1", "10.244.0.1"), ("pod-2", "10.244.0.2")];
const POD_PORT: u16 = 8080;

/// A cluster that serves until it is dropped.
pub struct Outside<'s> {
    sandbox: &'s Sandbox,
    /// The control plane.
    pub control_plane: ControlPlane<'s>,
    kernel: Kernel,
    _pods: Vec<Server>,
    _nameserver: Daemon,
}

impl<'s> Outside<'s> {
    /// Starts the cluster in the sandbox's network.
    ///
    /// # Panics
    /// As [`ControlPlane::start`], or when there is no dnsmasq.
    pub fn start(sandbox: &'s Sandbox) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        sandbox.add_addresses([NAMESERVER].into_iter().chain(PODS.map(|(_, address)| address)));
        let pods = PODS.map(|(name, address)| http::serve(sandbox, (address, POD_PORT), name));
        control_plane.apply(nameserver_objects().into_iter().chain(web_objects()));
        let nameserver = start_nameserver(sandbox);
        Self { sandbox, control_plane, kernel: Kernel::from_env(), _pods: pods.into(), _nameserver: nameserver }
    }

    /// A guest for an agent of this cluster, without the address of the API server.
    pub fn guest(&self) -> GuestImage<'s> {
        let resolv_conf = format!("nameserver {NAMESERVER}\n");
        GuestImage::new(self.sandbox, &self.kernel)
            .parameter(format!("cproxy.node-name={NODE}"))
            .file("etc/resolv.conf", resolv_conf)
            .file(&format!("{SECRETS}/token"), self.control_plane.token("cproxy"))
            .file(&format!("{SECRETS}/ca.crt"), self.control_plane.ca_pem())
    }
}

/// Runs a script as a pod, with a resolver of its own as in a container.
pub fn pod<'s>(image: GuestImage<'s>, script: &str) -> GuestImage<'s> {
    let runtime = "#!/bin/sh\nexec unshare -m /etc/cproxy/pod\n";
    let pod = format!("#!/bin/sh\nmount --bind /etc/cproxy/resolv.conf /etc/resolv.conf\n{script}");
    let image = image.file("etc/cproxy/resolv.conf", RESOLV_CONF).program("etc/cproxy/pod", pod);
    image.program("etc/cproxy/workload", runtime)
}

/// The nameserver as a manifest, for `--bootstrap`.
pub fn nameserver_objects() -> [Value; 2] {
    let service = Service::new("kube-dns").namespace("kube-system").cluster_ips([NAMESERVER_VIP]);
    let slice = Slice::v4("kube-dns").namespace("kube-system").ready([NAMESERVER]);
    [service.udp("dns", 53, 53).tcp("dns-tcp", 53, 53).into(), slice.udp("dns", 53).tcp("dns-tcp", 53).into()]
}

fn web_objects() -> [Value; 2] {
    let service = Service::new("web").cluster_ips([WEB_VIP]).tcp("http", 80, POD_PORT);
    let slice = Slice::v4("web").tcp("http", POD_PORT).ready(PODS.map(|(_, address)| address));
    [service.into(), slice.into()]
}

fn start_nameserver(sandbox: &Sandbox) -> Daemon {
    let mut dnsmasq = Command::new("dnsmasq");
    dnsmasq.args(["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--pid-file="]);
    dnsmasq.args(["--log-facility=-", "--bind-interfaces", "--local=/test/", "--local=/local/", "--local=/svc/"]);
    dnsmasq.arg(format!("--listen-address={NAMESERVER}"));
    dnsmasq.arg(format!("--host-record={},{}", control_plane::NAME, control_plane::ADDRESS));
    dnsmasq.arg(format!("--host-record=web.default.svc.cluster.local,{WEB_VIP}"));
    let mut daemon = Daemon::spawn(sandbox, "dnsmasq", Placement::Unhooked, dnsmasq);
    daemon.wait_log("started", START_TIMEOUT);
    daemon
}
