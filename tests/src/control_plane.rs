//! A real Kubernetes control plane: etcd and kube-apiserver, inside a sandbox's network namespace and outside its
//! cgroup, so that the programs under test never touch them.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};

pub use crate::credentials::{ClientIdentity, Validity};
use crate::{
    credentials::{self, Credentials, NOT_SHARED},
    manifest,
    process::{Daemon, Output, Signal, run},
    sandbox::{Placement, Sandbox},
    shared::Lease,
};

/// Address of the API server. It refuses to advertise a loopback address.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// Second address of the API server.
pub const ADDRESS_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// The API server's port.
pub const PORT: u16 = 6443;

/// The second API server's port.
pub const SECOND_PORT: u16 = 6444;

/// Name of the API server, for nameservers that serve it.
pub const NAME: &str = "api.test";

/// The ClusterIP of `default/kubernetes`.
pub const KUBERNETES_VIP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1));

/// Ranges of the ClusterIPs.
const SERVICE_RANGES: [&str; 2] = ["10.96.0.0/16", "fd00:10:96::/112"];

/// Flag of the API server that lets it reach nodes by their addresses.
const KUBELETS: &str = "--kubelet-preferred-address-types=InternalIP";

/// Names and addresses in the API server's certificate.
const NAMES: [&str; 11] = [
    NAME,
    "192.0.2.1",
    "2001:db8::1",
    "127.0.0.1",
    "::1",
    "10.96.0.1",
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

/// Variables with the directories of the binaries and of those of the oldest release.
const VARIABLE: &str = "CPROXY_CONTROL_PLANE";
const OLDEST_VARIABLE: &str = "CPROXY_CONTROL_PLANE_OLDEST";

/// Name of etcd's directory.
const ETCD_DATA: &str = "etcd";

/// URL of etcd for the API server, and its port.
const ETCD: &str = "http://127.0.0.1:2379";
pub(crate) const ETCD_PORT: u16 = 2379;

/// Limit on each step of the start, on a busy machine and with many clients that come back.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// Limit on a run of kubectl, which takes a minute for thousands of objects.
const KUBECTL_TIMEOUT: Duration = Duration::from_secs(300);

/// The node that the agent's user may read.
pub const NODE: &str = "node-1";

/// A running control plane. Users: `admin` (all rights), `cproxy` (exactly the agent's rights), `system:kube-proxy`
/// (the rights that Kubernetes grants kube-proxy), `nobody` (no rights).
#[derive(Debug)]
pub struct ControlPlane<'s> {
    sandbox: &'s Sandbox,
    binaries: PathBuf,
    /// Directory of kube-apiserver.
    api_server_binaries: PathBuf,
    credentials: Credentials,
    /// Additional flags of the API server.
    flags: Vec<String>,
    /// Whether pods get ServiceAccounts and their tokens.
    has_accounts: bool,
    // Ends before etcd does.
    api_server: Option<Daemon>,
    /// None if the control plane is shared.
    etcd: Option<Daemon>,
    _lease: Option<Lease>,
}

impl<'s> ControlPlane<'s> {
    /// Starts etcd and kube-apiserver and waits until they serve and `default/kubernetes` has its endpoint.
    ///
    /// # Panics
    /// When `CPROXY_CONTROL_PLANE` does not name the directory of the binaries, or they do not become ready: then the
    /// end of their logs is printed.
    pub fn start(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, &[])
    }

    /// A control plane without objects that other tests have used, for tests that need its API alone: its servers can
    /// be neither ended nor changed. Where there is none to share, one is started.
    ///
    /// # Panics
    /// As [`ControlPlane::start`].
    pub fn shared(sandbox: &'s Sandbox) -> Self {
        let Some(lease) = Lease::take(sandbox) else { return Self::start(sandbox) };
        let binaries = binaries(VARIABLE);
        Self {
            sandbox,
            api_server_binaries: binaries.clone(),
            binaries,
            credentials: Credentials::copy(&lease.credentials, sandbox.dir().join("control-plane")),
            flags: Vec::new(),
            has_accounts: false,
            api_server: None,
            etcd: None,
            _lease: Some(lease),
        }
    }

    /// Like [`ControlPlane::start`], with more flags for kube-apiserver.
    ///
    /// # Panics
    /// As [`ControlPlane::start`].
    pub fn start_with(sandbox: &'s Sandbox, flags: &[&str]) -> Self {
        Self::start_from(sandbox, binaries(VARIABLE), flags, false)
    }

    /// Like [`ControlPlane::start`], for pods that run: with ServiceAccounts, whose controller must run, too, and with
    /// a client certificate for nodes.
    ///
    /// # Panics
    /// As [`ControlPlane::start`].
    pub fn start_for_pods(sandbox: &'s Sandbox) -> Self {
        Self::start_from(sandbox, binaries(VARIABLE), &[KUBELETS], true)
    }

    /// Like [`ControlPlane::start_for_pods`], with IPv6 as the family of Services that ask for none.
    ///
    /// # Panics
    /// As [`ControlPlane::start`].
    pub fn start_for_pods_of_ipv6(sandbox: &'s Sandbox) -> Self {
        let [v4, v6] = SERVICE_RANGES;
        let ranges = format!("--service-cluster-ip-range={v6},{v4}");
        let address = format!("--advertise-address={ADDRESS_V6}");
        Self::start_from(sandbox, binaries(VARIABLE), &[KUBELETS, &ranges, &address], true)
    }

    /// Like [`ControlPlane::start`], with kube-apiserver of the oldest release that is supported.
    ///
    /// # Panics
    /// As [`ControlPlane::start`]; the variable is `CPROXY_CONTROL_PLANE_OLDEST`.
    pub fn start_oldest(sandbox: &'s Sandbox) -> Self {
        Self::start_from(sandbox, binaries(OLDEST_VARIABLE), &[], false)
    }

    fn start_from(sandbox: &'s Sandbox, api_server_binaries: PathBuf, flags: &[&str], has_accounts: bool) -> Self {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let binaries = binaries(VARIABLE);
        sandbox.add_addresses([ADDRESS, ADDRESS_V6]);
        let credentials = Credentials::create(sandbox.dir().join("control-plane"), &NAMES);
        let mut control_plane = Self {
            etcd: Some(start_etcd(sandbox, &binaries)),
            sandbox,
            binaries,
            api_server_binaries,
            credentials,
            flags,
            has_accounts,
            api_server: None,
            _lease: None,
        };
        control_plane.start_api_server();
        control_plane.apply(agent_rights());
        control_plane
    }

    /// Directory of the files of its credentials.
    pub(crate) fn credentials_directory(&self) -> &Path {
        self.credentials.directory()
    }

    /// Ends the servers at once: an orderly end takes a second and is rarely of use. A shared one goes on.
    pub fn discard(&mut self) {
        if let Some(mut api_server) = self.api_server.take() {
            api_server.kill();
        }
    }

    /// etcd, of a control plane that is not shared.
    fn etcd(&mut self) -> &mut Daemon {
        self.etcd.as_mut().expect(NOT_SHARED)
    }

    /// URL of the API server at its own address rather than a Service's.
    pub fn server_url(&self) -> String {
        format!("https://{ADDRESS}:{PORT}")
    }

    /// File of the authority that signed the API server's certificate.
    pub fn ca_file(&self) -> PathBuf {
        self.credentials.file("ca.crt")
    }

    /// Files of the API server's certificate and its key, which are also for `localhost`.
    pub fn serving_files(&self) -> [PathBuf; 2] {
        ["server.crt", "server.key"].map(|name| self.credentials.file(name))
    }

    /// File of the key that signs tokens of ServiceAccounts.
    pub fn account_key_file(&self) -> PathBuf {
        self.credentials.file("service-account.key")
    }

    /// File of the authority that signs client certificates.
    pub fn client_ca_file(&self) -> PathBuf {
        self.credentials.file("clients.crt")
    }

    /// The authority that signed the API server's certificate.
    pub fn ca_pem(&self) -> String {
        fs::read_to_string(self.ca_file()).expect("cannot read the authority's certificate")
    }

    /// The bearer token of `user`.
    pub fn token(&self, user: &str) -> String {
        credentials::token(user)
    }

    /// A certificate for a client of this name, perhaps in a group.
    pub fn client_identity(&self, user: &str, group: Option<&str>, validity: Validity) -> ClientIdentity {
        self.credentials.client(user, group, validity)
    }

    /// Replaces the authority of the API server and its certificate, which the running server uses from then on for
    /// new connections. Clients that exist trust the previous one.
    pub fn renew_authority(&self) {
        self.credentials.renew_authority();
    }

    /// A bound token of a ServiceAccount in the namespace `default`.
    pub fn request_token(&self, account: &str, lifetime: Duration) -> String {
        let lifetime = format!("--duration={}s", lifetime.as_secs());
        self.kubectl(&["create", "token", account, &lifetime], "").trim().to_owned()
    }

    /// A kubeconfig for a user with all rights.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.kubeconfig_for("admin")
    }

    /// A kubeconfig for the agent, which may list and watch Services, EndpointSlices and the Node [`NODE`] only.
    pub fn agent_kubeconfig(&self) -> PathBuf {
        self.kubeconfig_for("cproxy")
    }

    /// A kubeconfig for one of the control plane's users.
    pub fn kubeconfig_for(&self, user: &str) -> PathBuf {
        self.kubeconfig_at(user, &self.server_url())
    }

    /// A kubeconfig for another URL of the API server, such as a Service's or a proxy's.
    pub fn kubeconfig_at(&self, user: &str, server: &str) -> PathBuf {
        self.credentials.kubeconfig(user, server)
    }

    /// The agent's kubeconfig after a change, in a file of this name.
    pub fn agent_kubeconfig_with(&self, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
        let text = fs::read_to_string(self.agent_kubeconfig()).expect("cannot read a file just written");
        let mut config = serde_json::from_str(&text).expect("a kubeconfig of the harness is JSON");
        change(&mut config);
        manifest::write_text(self.sandbox.dir(), name, &config.to_string())
    }

    /// One of the binaries, such as `kube-proxy`.
    pub fn binary(&self, name: &str) -> PathBuf {
        binary(&self.binaries, name)
    }

    /// Runs kubectl as `admin` with `input` on stdin and returns its stdout.
    ///
    /// # Panics
    /// With kubectl's message, if it fails.
    pub fn kubectl(&self, args: &[&str], input: &str) -> String {
        let output = self.try_kubectl("admin", args, input);
        assert_eq!(output.code, 0, "kubectl {args:?} failed: {}{}", output.stderr, output.stdout);
        output.stdout
    }

    /// Creates or changes objects as `admin`.
    ///
    /// # Panics
    /// With kubectl's message, if it fails.
    pub fn apply(&self, objects: impl IntoIterator<Item = Value>) {
        self.kubectl(&["apply", "-f", "-"], &manifest::list(objects));
    }

    /// Runs kubectl as `user`; it may fail.
    pub fn try_kubectl(&self, user: &str, args: &[&str], input: &str) -> Output {
        self.kubectl_with(&self.kubeconfig_for(user), args, input)
    }

    fn kubectl_with(&self, kubeconfig: &Path, args: &[&str], input: &str) -> Output {
        run(self.sandbox, Placement::Unhooked, self.kubectl_command(kubeconfig, args), input, KUBECTL_TIMEOUT)
    }

    /// kubectl with a kubeconfig, to be run in the sandbox.
    pub fn kubectl_command(&self, kubeconfig: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(self.binary("kubectl"));
        command.env("KUBECONFIG", kubeconfig).env("HOME", self.sandbox.dir()).args(args);
        command
    }

    /// Starts `kubectl proxy` on a unix socket, with the agent's rights, and waits until it listens.
    pub fn start_kubectl_proxy(&self, socket: &str) -> Daemon {
        // A socket that another one has left is in the way.
        fs::remove_file(socket).ok();
        let command = self.kubectl_command(&self.agent_kubeconfig(), &["proxy", &format!("--unix-socket={socket}")]);
        let mut proxy = Daemon::spawn(self.sandbox, "kubectl-proxy", Placement::Unhooked, command);
        proxy.wait_log("Starting to serve", START_TIMEOUT);
        proxy
    }

    /// A client with all rights. Call it inside the tokio runtime that will use the client.
    pub async fn client(&self) -> kube::Client {
        self.client_for("admin").await
    }

    /// A client for one of the control plane's users.
    pub async fn client_for(&self, user: &str) -> kube::Client {
        self.client_at(user, &self.server_url()).await
    }

    /// Like [`ControlPlane::client_for`], for another URL of the API server.
    pub async fn client_at(&self, user: &str, server: &str) -> kube::Client {
        let file =
            Kubeconfig::read_from(self.kubeconfig_at(user, server)).expect("cannot read a kubeconfig just written");
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .expect("cannot use a kubeconfig just written");
        kube::Client::try_from(config).expect("cannot make a Kubernetes client; is this inside a tokio runtime?")
    }

    /// Stops the API server in an orderly way; etcd and all objects stay.
    pub fn stop_api_server(&mut self) {
        self.etcd();
        drop(self.api_server.take());
    }

    /// Kills the API server as in a crash.
    pub fn kill_api_server(&mut self) {
        self.etcd();
        self.discard();
    }

    /// Stops etcd's process, or lets it go on: the API server gets no answers meanwhile.
    pub fn freeze_etcd(&mut self, is_frozen: bool) {
        self.etcd().signal(if is_frozen { Signal::STOP } else { Signal::CONT });
    }

    /// Starts the API server, if it is not running, and waits until it is ready.
    pub fn start_api_server(&mut self) {
        self.etcd();
        if self.api_server.is_none() {
            let mut command = self.api_server_command(PORT);
            command.args(&self.flags);
            let mut daemon = Daemon::spawn(self.sandbox, "kube-apiserver", Placement::Unhooked, command);
            self.wait_ready(&mut daemon);
            self.api_server = Some(daemon);
        }
    }

    /// Kills the API server and etcd, keeps a copy of all objects, and starts both again.
    pub fn back_up(&mut self) {
        self.kill_both();
        copy(&self.data(), &self.backup());
        self.start_both();
    }

    /// Kills the API server and etcd, and starts both with the objects and versions of the backup.
    pub fn restore(&mut self) {
        self.kill_both();
        fs::remove_dir_all(self.data()).expect("cannot remove etcd's data");
        copy(&self.backup(), &self.data());
        self.start_both();
    }

    /// Starts another API server with the same etcd, at [`SECOND_PORT`], and waits until it is ready.
    pub fn start_second(&self, flags: &[String]) -> Daemon {
        assert!(self.etcd.is_some(), "{NOT_SHARED}");
        let mut command = self.api_server_command(SECOND_PORT);
        // The first one is the only endpoint of default/kubernetes.
        command.arg("--endpoint-reconciler-type=none").args(flags);
        let mut daemon = Daemon::spawn(self.sandbox, "second-kube-apiserver", Placement::Unhooked, command);
        let kubeconfig = self.kubeconfig_at("admin", &format!("https://{ADDRESS}:{SECOND_PORT}"));
        daemon.wait_until(START_TIMEOUT, "it was ready", |_| self.get_raw_with(&kubeconfig, "/readyz"));
        daemon
    }

    /// The API server's process id, while it runs.
    pub fn api_server_pid(&self) -> Option<u32> {
        self.api_server.as_ref().map(Daemon::pid)
    }

    /// The API server's log.
    pub fn api_server_log(&self) -> String {
        assert!(self.etcd.is_some(), "{NOT_SHARED}");
        self.api_server.as_ref().map(Daemon::log).unwrap_or_default()
    }
}

impl ControlPlane<'_> {
    fn data(&self) -> PathBuf {
        self.sandbox.dir().join(ETCD_DATA)
    }

    fn backup(&self) -> PathBuf {
        self.sandbox.dir().join("etcd-backup")
    }

    fn kill_both(&mut self) {
        self.kill_api_server();
        self.etcd().kill();
    }

    fn start_both(&mut self) {
        self.etcd = Some(start_etcd(self.sandbox, &self.binaries));
        self.start_api_server();
    }

    /// Waits until the API server listens, reports that it is ready, and has registered itself as the endpoint of
    /// `default/kubernetes`.
    fn wait_ready(&self, api_server: &mut Daemon) {
        let socket = SocketAddr::new(ADDRESS, PORT);
        // Polling this way costs less than running kubectl.
        api_server.wait_until(START_TIMEOUT, "it listened", |_| TcpStream::connect(socket).map(drop));
        api_server.wait_until(START_TIMEOUT, "it was ready", |_| self.get_raw("/readyz"));
        api_server.wait_until(START_TIMEOUT, "default/kubernetes had an endpoint", |_| {
            let slice = self.get_raw("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes")?;
            let is_there = [ADDRESS, ADDRESS_V6].iter().any(|address| slice.contains(&address.to_string()));
            if is_there { Ok(()) } else { Err(slice) }
        });
    }

    /// The API server's answer to a GET by `admin`.
    fn get_raw(&self, path: &str) -> Result<String, String> {
        self.get_raw_with(&self.admin_kubeconfig(), path)
    }

    fn get_raw_with(&self, kubeconfig: &Path, path: &str) -> Result<String, String> {
        let output = self.kubectl_with(kubeconfig, &["get", "--raw", path], "");
        if output.code == 0 { Ok(output.stdout) } else { Err(output.stderr) }
    }

    fn api_server_command(&self, port: u16) -> Command {
        let mut command = Command::new(binary(&self.api_server_binaries, "kube-apiserver"));
        command.arg(format!("--etcd-servers={ETCD}"));
        command.arg("--bind-address=::").arg(format!("--advertise-address={ADDRESS}"));
        command.arg(format!("--secure-port={port}"));
        command.arg(format!("--service-cluster-ip-range={}", SERVICE_RANGES.join(",")));
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        command.arg("--authorization-mode=Node,RBAC");
        if self.has_accounts {
            let [certificate, key] = self.credentials.client_files("kube-apiserver");
            command.arg("--kubelet-client-certificate").arg(certificate).arg("--kubelet-client-key").arg(key);
        } else {
            // Pods get no tokens here, since the controller that would create their accounts does not run.
            command.arg("--disable-admission-plugins=ServiceAccount");
        }
        for (flag, name) in [
            ("--tls-cert-file", "server.crt"),
            ("--tls-private-key-file", "server.key"),
            ("--client-ca-file", "clients.crt"),
            ("--token-auth-file", "tokens.csv"),
            ("--service-account-key-file", "service-account.pub"),
            ("--service-account-signing-key-file", "service-account.key"),
        ] {
            command.arg(flag).arg(self.credentials.file(name));
        }
        command
    }
}

/// Path of a binary; panics with instructions if it is missing.
fn binary(directory: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    assert!(path.is_file(), "{} is missing: run `cargo xtask control-plane`", path.display());
    path
}

fn binaries(variable: &str) -> PathBuf {
    std::env::var_os(variable).map(PathBuf::from).unwrap_or_else(|| {
        panic!("{variable} is not set: run `cargo xtask control-plane`, and set it to the directory that it names")
    })
}

fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("--archive").arg(from).arg(to).status();
    assert!(status.is_ok_and(|status| status.success()), "cannot copy {}", from.display());
}

fn start_etcd(sandbox: &Sandbox, binaries: &Path) -> Daemon {
    let mut command = Command::new(binary(binaries, "etcd"));
    command.arg("--data-dir").arg(sandbox.dir().join(ETCD_DATA)).arg("--unsafe-no-fsync").arg("--log-level=warn");
    command.arg(format!("--listen-client-urls={ETCD}")).arg(format!("--advertise-client-urls={ETCD}"));
    command.arg("--listen-peer-urls=http://127.0.0.1:2380");
    // 100,000 Pods with their first changes are beyond the default.
    command.arg("--quota-backend-bytes=8589934592");
    Daemon::spawn(sandbox, "etcd", Placement::Unhooked, command)
}

/// The rights that the agent needs, bound to the user `cproxy`.
fn agent_rights() -> [Value; 2] {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "cproxy"},
        "rules": [
            {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes"], "resourceNames": [NODE], "verbs": ["list", "watch"]},
        ],
    });
    [role, role_binding("cproxy", "cproxy")]
}

/// A binding of a ClusterRole to a user.
pub fn role_binding(role: &str, user: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": format!("{role}-{user}")},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    })
}
