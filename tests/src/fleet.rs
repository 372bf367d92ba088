//! A cluster whose only node is the example of a virtual-kubelet provider (`images/virtual-kubelet`): each pod is a
//! microVM with cproxy in it.

mod clients;
mod pods;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};

pub use self::{
    clients::Clients,
    pods::{Pod, Selector},
};
use crate::{
    control_plane::{ADDRESS, ControlPlane, role_binding},
    controllers,
    guest::{INITRAMFS_VARIABLE, KERNEL_VARIABLE, path_from_env},
    manifest,
    population::Shape,
    process::{Daemon, Signal, eventually},
    relay_server::{RelayServer, RunningRelay},
    sandbox::{Placement, Sandbox},
    usage,
    writer::Writer,
};

/// Variables with the example's program, and the layout with the pods' images.
const PROVIDER_VARIABLE: &str = "CPROXY_FLEET_PROVIDER";
const IMAGES_VARIABLE: &str = "CPROXY_FLEET_IMAGES";
const VERB: &str = "cargo xtask fleet demo";

/// Objects of the example.
const PROVIDER_RIGHTS: &str = include_str!("../../images/virtual-kubelet/rbac.yaml");
const RELAY_RIGHTS: &str = include_str!("../../images/kubernetes/overlays/relay/rbac.yaml");
const RELAY_POLICY_RIGHTS: &str = include_str!("../../images/kubernetes/overlays/relay-policies/rbac.yaml");
/// The tokens of the VMs are bound to the Node.
const VIEWS: &str = "views:\n- name: vms\n  match: {usernames: [\"system:serviceaccount:kube-system:cproxy\"]}\n  \
                     namespaces: all\n  policy: node\n";
/// The cluster's nameserver.
pub const NAMESERVER: &str = include_str!("../../images/virtual-kubelet/demo/coredns.yaml");
/// A Deployment with a Service.
pub const WEB: &str = include_str!("../../images/virtual-kubelet/demo/web.yaml");
/// A pod that asks the Service.
const CLIENT: &str = include_str!("../../images/virtual-kubelet/demo/client.yaml");
/// cproxy's account, and the provider's right to its tokens.
const BAKED_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../images/kubernetes/overlays/baked-in");

/// Name of the Node.
pub const NODE: &str = "virtual-kubelet";
/// The bridge with the VMs' network cards, and its address with the range of the pods.
const BRIDGE: &str = "pods";
const POD_NETWORK: &str = "10.244.1.1/24";
/// Port of the relay.
const RELAY_PORT: u16 = 7443;

/// Limit on every wait, longer than any takes: the processors are emulated.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A cluster that runs until it is dropped; its VMs end first.
pub struct Fleet<'s> {
    provider: Daemon,
    relay: Option<RunningRelay>,
    _controllers: [Daemon; 2],
    /// The control plane.
    pub control_plane: ControlPlane<'s>,
    sandbox: &'s Sandbox,
}

impl<'s> Fleet<'s> {
    /// Starts the control plane and the provider, and waits until the Node is ready.
    ///
    /// # Panics
    /// As [`ControlPlane::start`], or when the provider does not start.
    pub fn start(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, &[])
    }

    /// The same, with a relay that resolves network policies, which the VMs enforce.
    ///
    /// # Panics
    /// As [`Fleet::start`].
    pub fn start_with_policies(sandbox: &'s Sandbox) -> Self {
        let mut fleet = Self::start_with(sandbox, &["--policy", "enforce", "--apiserver", &Self::relay_url()]);
        fleet.control_plane.kubectl(&["apply", "-f", "-"], RELAY_POLICY_RIGHTS);
        fleet.control_plane.apply([role_binding("cproxy-relay-policies", "cproxy-relay")]);
        let views = manifest::write_text(sandbox.dir(), "views.yaml", VIEWS);
        fleet.start_relay_with(&["--policies", "--views", &views.display().to_string()]);
        fleet
    }

    fn start_with(sandbox: &'s Sandbox, flags: &[&str]) -> Self {
        let control_plane = ControlPlane::start_for_pods(sandbox);
        let controllers = controllers::start(sandbox, &control_plane);
        // Without a hardware address of its own, a bridge has one of its links, and another one when that goes.
        sandbox.ip(&format!(
            "link add {BRIDGE} address 02:00:00:00:00:01 type bridge\n\
             address add {POD_NETWORK} dev {BRIDGE}\n\
             link set {BRIDGE} up\n"
        ));
        control_plane.kubectl(&["apply", "-f", "-"], PROVIDER_RIGHTS);
        control_plane.kubectl(&["apply", "-k", BAKED_IN], "");
        let provider = start_provider(sandbox, &control_plane, flags);
        let fleet = Self { provider, relay: None, _controllers: controllers, control_plane, sandbox };
        fleet.wait_for_node();
        fleet
    }

    fn wait_for_node(&self) {
        eventually(PATIENCE, "the node is ready and the default ServiceAccount exists", || {
            let wait = ["wait", "--for=condition=Ready", "--timeout=1s", "node", NODE];
            let account = ["get", "serviceaccount", "default"];
            for command in [&wait[..], &account[..]] {
                let output = self.control_plane.try_kubectl("admin", command, "");
                if output.code != 0 {
                    return Err(format!("{}; {}", output.stderr, self.provider.tail()));
                }
            }
            Ok(())
        });
    }

    /// Creates or changes objects.
    pub fn apply(&self, manifest: &str) {
        self.control_plane.kubectl(&["apply", "-f", "-"], manifest);
    }

    /// Creates further Services, whose endpoints are no pods: no controller changes them.
    pub fn populate(&self, shape: Shape) {
        let objects = shape.objects(0..shape.services).map(|mut object| {
            if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
                spec.remove("selector");
            }
            object
        });
        Writer::new(&self.control_plane).create(objects);
    }

    /// Runs kubectl with all rights.
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.control_plane.kubectl(args, "")
    }

    /// Starts the relay, which VMs reach at [`Fleet::relay_url`], or an earlier one stays.
    ///
    /// # Panics
    /// When the relay does not become ready.
    pub fn start_relay(&mut self) {
        self.start_relay_with(&[]);
    }

    fn start_relay_with(&mut self, flags: &[&str]) {
        self.control_plane.kubectl(&["apply", "--namespace=kube-system", "-f", "-"], RELAY_RIGHTS);
        self.control_plane.apply([role_binding("cproxy-relay", "cproxy-relay")]);
        let [certificate, key] = self.control_plane.serving_files();
        let relay = RelayServer::new(self.sandbox)
            .kubeconfig(self.control_plane.kubeconfig_for("cproxy-relay"))
            .listen(format!("{ADDRESS}:{RELAY_PORT}"))
            .arg("--tls-cert-file")
            .arg(certificate)
            .arg("--tls-private-key-file")
            .arg(key);
        self.relay = Some(flags.iter().fold(relay, |relay, flag| relay.arg(flag)).start());
    }

    /// Address of the relay.
    pub fn relay_url() -> String {
        format!("https://{ADDRESS}:{RELAY_PORT}")
    }

    /// Number of watches that the relay serves.
    ///
    /// # Panics
    /// Without a relay.
    pub fn relay_watches(&self) -> f64 {
        let relay = self.relay.as_ref().expect("no relay was started");
        relay.metric(r#"cproxy_relay_watches{resource="services"}"#)
    }

    /// CPU time of the API server so far.
    ///
    /// # Panics
    /// When it does not run.
    pub fn api_server_cpu(&self) -> Duration {
        usage::cpu_time(self.control_plane.api_server_pid().expect("the API server runs"))
    }

    /// The manifest of a client with this name, and perhaps annotations.
    pub fn client(name: &str, annotations: &Value) -> String {
        let named = format!("metadata: {{name: {name}, labels: {{app: client}}, annotations: {annotations}}}");
        CLIENT.replace("metadata: {name: client, labels: {app: client}}", &named)
    }

    /// Directory of a pod's VM.
    fn machine_directory(&self, pod: &Pod) -> PathBuf {
        machines(self.sandbox).join(&pod.uid)
    }

    /// Kills the VM of a pod, as when its host fails.
    ///
    /// # Panics
    /// When it has none.
    pub fn kill_machine(&self, pod: &Pod) {
        let directory = self.machine_directory(pod).display().to_string();
        let process = qemus().find(|(_, command)| command.contains(&directory));
        let (process, _) = process.unwrap_or_else(|| panic!("{} has no VM", pod.name));
        rustix::process::kill_process(process, Signal::KILL).expect("cannot kill a VM");
    }

    /// The provider's log, with the VMs' consoles in it.
    pub fn provider_log(&self) -> String {
        self.provider.log()
    }
}

/// Processes of QEMU with their command lines.
fn qemus() -> impl Iterator<Item = (rustix::process::Pid, String)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| {
        let number = process.file_name().to_str()?.parse().ok()?;
        let command = fs::read_to_string(process.path().join("cmdline")).ok()?;
        command.starts_with("qemu-system").then_some((rustix::process::Pid::from_raw(number)?, command))
    })
}

fn machines(sandbox: &Sandbox) -> PathBuf {
    sandbox.dir().join("vms")
}

fn start_provider(sandbox: &Sandbox, control_plane: &ControlPlane<'_>, flags: &[&str]) -> Daemon {
    let kernel = path_from_env(KERNEL_VARIABLE, VERB);
    let [certificate, key] = control_plane.serving_files();
    let mut command = Command::new(path_from_env(PROVIDER_VARIABLE, VERB));
    command.args(["--node-name", NODE, "--node-address", &ADDRESS.to_string()]);
    command.arg("--kubeconfig").arg(provider_kubeconfig(sandbox, control_plane));
    command.arg("--tls-cert-file").arg(certificate).arg("--tls-private-key-file").arg(key);
    command.arg("--client-ca-file").arg(control_plane.client_ca_file());
    command.arg("--images").arg(path_from_env(IMAGES_VARIABLE, VERB));
    command.arg("--directory").arg(machines(sandbox)).args(["--bridge", BRIDGE, "--pod-network", POD_NETWORK]);
    command.arg("--apiserver").arg(control_plane.server_url());
    command.arg("--initramfs").arg(path_from_env(INITRAMFS_VARIABLE, VERB));
    command.arg("--kernel").arg(kernel.join("kernel")).args(machine_of(&kernel)).args(flags);
    Daemon::spawn(sandbox, "virtual-kubelet", Placement::Unhooked, command)
}

/// Flags for a kernel: one with modules has the drivers of a machine with PCI.
fn machine_of(kernel: &Path) -> Vec<String> {
    let modules = kernel.join("modules");
    if !modules.is_dir() {
        return vec!["--machine=microvm".to_owned()];
    }
    vec!["--machine=q35".to_owned(), format!("--modules={}", modules.display())]
}

/// The provider's own identity.
fn provider_kubeconfig(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> PathBuf {
    let token = ["create", "token", "virtual-kubelet", "--namespace=kube-system", "--duration=24h"];
    let token = control_plane.kubectl(&token, "");
    let cluster = json!({"server": control_plane.server_url(), "certificate-authority": control_plane.ca_file()});
    let config = manifest::kubeconfig(cluster, json!({"token": token.trim()}));
    manifest::write_text(sandbox.dir(), "provider.kubeconfig", &config.to_string())
}
