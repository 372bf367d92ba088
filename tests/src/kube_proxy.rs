//! The real kube-proxy in nftables mode, inside the sandbox.

use std::{path::Path, process::Command};

use serde_json::json;

use crate::{
    control_plane::{ControlPlane, NODE},
    manifest::write_text,
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

/// Starts kube-proxy with this kubeconfig. It has no effect beyond the sandbox: all sysctls stay as they are, and
/// sockets are in its network namespace.
pub fn spawn(sandbox: &Sandbox, control_plane: &ControlPlane<'_>, kubeconfig: &Path) -> Daemon {
    let configuration = json!({
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
    });
    let mut command = Command::new(control_plane.binary("kube-proxy"));
    command.arg("--config").arg(write_text(sandbox.dir(), "kube-proxy.config", &configuration.to_string()));
    Daemon::spawn(sandbox, "kube-proxy", Placement::Unhooked, command)
}
