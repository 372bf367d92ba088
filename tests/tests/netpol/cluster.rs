//! A cluster of two nodes whose pods are network namespaces, with a relay that serves policies.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    process::Command,
    time::Duration,
};

use cproxy_tests::{
    control_plane::{ADDRESS, ControlPlane, role_binding},
    controllers,
    guest::path_from_env,
    process::{self, Daemon, cproxy_binary, eventually},
    relay_server::{RelayServer, RunningRelay},
    sandbox::{Placement, Sandbox},
};

use crate::{cases::Case, report::Report};

/// Variables with the directories of the provider, of the program with cyclonus' cases, and of `e2e.test` and agnhost.
const PROVIDER_VARIABLE: &str = "CPROXY_NETPOL_PROVIDER";
const CASES_VARIABLE: &str = "CPROXY_POLICY_ENGINES";
const SPECS_VARIABLE: &str = "CPROXY_E2E";
const VERB: &str = "cargo xtask test --long netpol";

/// The relay's rights, as they are shipped.
const RELAY_RIGHTS: [&str; 2] = [
    include_str!("../../../images/kubernetes/overlays/relay/rbac.yaml"),
    include_str!("../../../images/kubernetes/overlays/relay-policies/rbac.yaml"),
];
const RELAY_ROLES: [&str; 2] = ["cproxy-relay", "cproxy-relay-policies"];
const RELAY_PORT: u16 = 7443;

/// Limit on the start of each part.
const PATIENCE: Duration = Duration::from_secs(120);
/// Limit on all specs, or all cases.
const SPECS_TIMEOUT: Duration = Duration::from_secs(2 * 3600);

/// A node: name, address, bridge, and the bridge's addresses with the ranges of its pods.
struct Node {
    name: &'static str,
    address: IpAddr,
    bridge: &'static str,
    pods: [&'static str; 2],
}

/// The second one's address is also one of the sandbox.
const NODES: [Node; 2] = [
    Node { name: "node-1", address: ADDRESS, bridge: "pods1", pods: ["10.244.1.1/24", "fd00:10:244:1::1/64"] },
    Node {
        name: "node-2",
        address: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
        bridge: "pods2",
        pods: ["10.244.2.1/24", "fd00:10:244:2::1/64"],
    },
];

/// Family of Services that ask for none, and of the first address of a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// A cluster that runs until it is dropped; its pods end first.
pub(crate) struct Cluster<'s> {
    providers: Vec<Daemon>,
    _relay: RunningRelay,
    _controllers: [Daemon; 2],
    control_plane: ControlPlane<'s>,
    sandbox: &'s Sandbox,
}

impl<'s> Cluster<'s> {
    /// Starts everything and waits until the nodes are ready.
    pub(crate) fn start(sandbox: &'s Sandbox, family: Family) -> Self {
        let control_plane = match family {
            Family::V4 => ControlPlane::start_for_pods(sandbox),
            Family::V6 => ControlPlane::start_for_pods_of_ipv6(sandbox),
        };
        let controllers = controllers::start(sandbox, &control_plane);
        let relay = start_relay(sandbox, &control_plane);
        connect(sandbox);
        let providers = NODES.iter().map(|node| start_provider(sandbox, &control_plane, node, family)).collect();
        let cluster = Self { providers, _relay: relay, _controllers: controllers, control_plane, sandbox };
        cluster.wait_for_nodes();
        cluster
    }

    /// Waits until pods may be scheduled to the nodes: `e2e.test` would look again after half a minute.
    fn wait_for_nodes(&self) {
        let taints = ["get", "nodes", "-o", "jsonpath={range .items[*]}{.metadata.name}{.spec.taints}{end}"];
        eventually(PATIENCE, "the nodes are ready", || {
            let output = self.control_plane.try_kubectl("admin", &taints, "");
            let tails = || self.providers.iter().map(Daemon::tail).collect::<String>();
            let is_ready = output.stdout == NODES.map(|node| node.name).concat();
            if is_ready { Ok(()) } else { Err(format!("{}{}; {}", output.stdout, output.stderr, tails())) }
        });
    }

    /// Runs the specs that match one expression and not the other.
    pub(crate) fn run_specs(&self, focus: &str, skip: &str) -> Report {
        let file = self.sandbox.dir().join("specs.json");
        let mut command = Command::new(specs().join("e2e.test"));
        command.arg("--kubeconfig").arg(self.control_plane.admin_kubeconfig()).arg("--provider=local");
        command.arg(format!("--ginkgo.focus={focus}")).arg(format!("--ginkgo.skip={skip}"));
        command.args(["--ginkgo.no-color", "--ginkgo.v"]).arg(format!("--ginkgo.timeout={}s", SPECS_TIMEOUT.as_secs()));
        command.arg("--ginkgo.json-report").arg(&file);
        command.current_dir(self.sandbox.dir()).env("HOME", self.sandbox.dir());
        let mut specs = Daemon::spawn(self.sandbox, "e2e.test", Placement::Unhooked, command);
        let ended = specs.wait(SPECS_TIMEOUT);
        assert!(ended.is_some() && file.exists(), "e2e.test has no report: {}", specs.tail());
        let report = Report::read(&file);
        if !report.failed().is_empty() {
            println!("{}\n{}", specs.log(), self.providers.iter().map(Daemon::log).collect::<String>());
        }
        report
    }

    /// Runs all cases of cyclonus.
    pub(crate) fn run_cases(&self) -> Vec<Case> {
        let mut command = Command::new(path_from_env(CASES_VARIABLE, VERB).join("cases"));
        command.arg("--kubeconfig").arg(self.control_plane.admin_kubeconfig());
        command.arg("--cgroup").arg(self.sandbox.cgroup_beside());
        let output = process::run(self.sandbox, Placement::Unhooked, command, "", SPECS_TIMEOUT).success();
        output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn specs() -> PathBuf {
    path_from_env(SPECS_VARIABLE, VERB)
}

/// Bridges of the nodes, and routes between them.
fn connect(sandbox: &Sandbox) {
    sandbox.add_addresses(NODES.iter().map(|node| node.address).filter(|address| *address != ADDRESS));
    for (number, Node { bridge, pods: [v4, v6], .. }) in NODES.iter().enumerate() {
        // A bridge without a hardware address of its own has one of its links, and another one when that goes: the
        // pods would lose their gateway.
        sandbox.ip(&format!(
            "link add {bridge} address 02:00:00:00:00:0{number} type bridge\n\
             address add {v4} dev {bridge}\n\
             address add {v6} dev {bridge} nodad\n\
             link set {bridge} up\n"
        ));
    }
    // They are those of this thread's network namespace.
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
    }
}

fn start_relay(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> RunningRelay {
    for rights in RELAY_RIGHTS {
        control_plane.kubectl(&["apply", "--namespace=kube-system", "-f", "-"], rights);
    }
    control_plane.apply(RELAY_ROLES.map(|role| role_binding(role, "cproxy-relay")));
    let [certificate, key] = control_plane.serving_files();
    let relay = RelayServer::new(sandbox).kubeconfig(control_plane.kubeconfig_for("cproxy-relay"));
    let relay = relay.listen(format!("{ADDRESS}:{RELAY_PORT}")).arg("--policies");
    relay.arg("--tls-cert-file").arg(certificate).arg("--tls-private-key-file").arg(key).start()
}

fn start_provider(sandbox: &Sandbox, control_plane: &ControlPlane<'_>, node: &Node, family: Family) -> Daemon {
    let directory = sandbox.dir().join(node.name);
    fs::create_dir(&directory).unwrap();
    let [certificate, key] = control_plane.serving_files();
    let mut command = Command::new(path_from_env(PROVIDER_VARIABLE, VERB).join("netpol"));
    command.args(["--node-name", node.name, "--node-address", &node.address.to_string()]);
    let mut pods = node.pods;
    if family == Family::V6 {
        pods.reverse();
    }
    command.args(["--bridge", node.bridge, "--pod-networks", &pods.join(",")]);
    command.arg("--kubeconfig").arg(control_plane.admin_kubeconfig());
    command.arg("--tls-cert-file").arg(certificate).arg("--tls-private-key-file").arg(key);
    command.arg("--client-ca-file").arg(control_plane.client_ca_file());
    command.arg("--directory").arg(directory).arg("--pin-dir").arg(sandbox.dir().join("bpf"));
    command.arg("--cgroup").arg(sandbox.cgroup_beside());
    command.arg("--cproxy").arg(cproxy_binary()).arg("--agnhost").arg(specs().join("agnhost"));
    command.arg(format!("--relay=https://{ADDRESS}:{RELAY_PORT}"));
    command.arg("--relay-ca-file").arg(control_plane.ca_file());
    Daemon::spawn(sandbox, node.name, Placement::Unhooked, command)
}
