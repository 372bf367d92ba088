//! kube-proxy in nftables mode, inside the sandbox, and its rules.

use std::{fs, process::Command, time::Duration};

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    process::{Daemon, run},
    sandbox::{Placement, Sandbox},
};
use serde_json::{Value, json};

use crate::ruleset::Ruleset;

/// Limit on a run of `nft`.
const NFT_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct KubeProxy<'s> {
    sandbox: &'s Sandbox,
    daemon: Daemon,
}

impl<'s> KubeProxy<'s> {
    pub(crate) fn start(sandbox: &'s Sandbox, control_plane: &ControlPlane<'_>) -> Self {
        Self { sandbox, daemon: spawn(sandbox, control_plane) }
    }

    /// Starts another one, which takes over the rules and no other state.
    pub(crate) fn restart(&mut self, control_plane: &ControlPlane<'_>) {
        self.daemon.stop();
        self.daemon = spawn(self.sandbox, control_plane);
    }

    /// Waits until the rules satisfy `is_wanted` and returns them.
    pub(crate) fn wait_ruleset(&mut self, timeout: Duration, is_wanted: impl Fn(&Ruleset) -> bool) -> Ruleset {
        let sandbox = self.sandbox;
        self.daemon.wait_until(timeout, "kube-proxy's rules have the marker", |_| {
            let ruleset = list(sandbox);
            if is_wanted(&ruleset) { Ok(ruleset) } else { Err("not there yet") }
        })
    }
}

fn spawn(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> Daemon {
    let file = sandbox.dir().join("kube-proxy.config");
    let kubeconfig = control_plane.kubeconfig_for("system:kube-proxy");
    fs::write(&file, configuration(&json!(kubeconfig)).to_string()).expect("cannot write into the sandbox");
    let mut command = Command::new(control_plane.binary("kube-proxy"));
    command.arg("--config").arg(file);
    Daemon::spawn(sandbox, "kube-proxy", Placement::Unhooked, command)
}

/// A configuration without effect beyond the sandbox: all sysctls stay as they are, and sockets are in its network
/// namespace.
fn configuration(kubeconfig: &Value) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "hostnameOverride": NODE,
        "mode": "nftables",
        "nftables": {"minSyncPeriod": "10ms", "syncPeriod": "1s"},
        // Node ports are served on the node's own addresses, as in cproxy.
        "nodePortAddresses": ["primary"],
        // A source in this range is a pod of the cluster.
        "detectLocalMode": "ClusterCIDR",
        "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}

fn list(sandbox: &Sandbox) -> Ruleset {
    let mut command = Command::new("nft");
    command.args(["--json", "list", "ruleset"]);
    Ruleset::parse(&run(sandbox, Placement::Unhooked, command, "", NFT_TIMEOUT).json())
}
