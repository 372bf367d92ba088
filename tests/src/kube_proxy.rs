//! The real kube-proxy in nftables mode, inside the sandbox, and its rules.

use std::{path::Path, process::Command, time::Duration};

use serde_json::{Value, json};

use crate::{
    control_plane::{ControlPlane, NODE},
    manifest::write_text,
    process::{Daemon, Output, run},
    sandbox::{Placement, Sandbox},
};

/// Limit on a run of `nft`, which takes long with many rules.
const NFT_TIMEOUT: Duration = Duration::from_secs(120);

/// A running kube-proxy. It has no effect beyond the sandbox: all sysctls stay as they are, and sockets are in its
/// network namespace. It ends when this value is dropped, and its rules stay.
#[derive(Debug)]
pub struct KubeProxy<'s> {
    sandbox: &'s Sandbox,
    daemon: Daemon,
}

impl<'s> KubeProxy<'s> {
    /// Starts kube-proxy, and waits for nothing.
    pub fn spawn(sandbox: &'s Sandbox, control_plane: &ControlPlane<'_>) -> Self {
        Self::spawn_with(sandbox, control_plane, &control_plane.kubeconfig_for("system:kube-proxy"))
    }

    /// Like [`KubeProxy::spawn`], with this kubeconfig.
    pub fn spawn_with(sandbox: &'s Sandbox, control_plane: &ControlPlane<'_>, kubeconfig: &Path) -> Self {
        let mut command = Command::new(control_plane.binary("kube-proxy"));
        let configuration = configuration(kubeconfig).to_string();
        command.arg("--config").arg(write_text(sandbox.dir(), "kube-proxy.config", &configuration));
        Self { sandbox, daemon: Daemon::spawn(sandbox, "kube-proxy", Placement::Unhooked, command) }
    }

    /// Waits until `wanted` finds something in the rules, as `nft --json` lists them. Returns that.
    ///
    /// # Panics
    /// After `timeout`, or at once when kube-proxy has ended.
    pub fn wait_rules<T>(&mut self, timeout: Duration, mut wanted: impl FnMut(&Value) -> Option<T>) -> T {
        self.daemon.wait_until(timeout, "kube-proxy's rules are as wanted", |_| {
            let rules = nft(self.sandbox, &["--json", "--stateless", "list", "ruleset"], "").json();
            wanted(&rules).ok_or("not yet")
        })
    }

    /// Ends it.
    pub fn stop(&mut self) {
        self.daemon.stop();
    }
}

/// Runs `nft` in the sandbox.
pub fn nft(sandbox: &Sandbox, args: &[&str], input: &str) -> Output {
    let mut command = Command::new("nft");
    command.args(args);
    run(sandbox, Placement::Unhooked, command, input, NFT_TIMEOUT).success()
}

fn configuration(kubeconfig: &Path) -> Value {
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
