//! kube-proxy as it is deployed, with its defaults.

use std::{os::unix::fs::symlink, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};
use cproxy_tests::{
    control_plane::NODE,
    process::Daemon,
    sandbox::{NEIGHBOURS_CIDR, Netns, Placement, Sandbox},
};
use serde_json::{Value, json};

/// The multi-call binary of legacy iptables.
pub const LEGACY_IPTABLES: &str = "/usr/sbin/xtables-legacy-multi";

/// Program and kubeconfig of a kube-proxy.
#[derive(Clone, Debug)]
pub struct KubeProxy {
    /// The program.
    pub binary: PathBuf,
    /// The kubeconfig with the API server and kube-proxy's user.
    pub kubeconfig: PathBuf,
}

impl KubeProxy {
    /// Starts kube-proxy in one of its modes in a network namespace of its own.
    ///
    /// # Errors
    /// Its configuration cannot be written.
    pub fn spawn(&self, sandbox: &Sandbox, netns: &Netns, mode: &str) -> Result<Daemon> {
        let file = sandbox.dir().join(format!("kube-proxy-{mode}.config"));
        // kube-proxy ends when its configuration changes, and another kube-proxy may use this file.
        if !file.exists() {
            std::fs::write(&file, configuration(&json!(self.kubeconfig), mode).to_string())
                .context("writing into the sandbox")?;
        }
        // nsenter executes kube-proxy under the same process ID.
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", netns.path().display())).arg(&self.binary).arg("--config").arg(file);
        if mode != "nftables" {
            let path =
                legacy_iptables(sandbox)?.into_os_string().into_string().ok().context("a path that is no text")?;
            command.env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap_or_default()));
        }
        Ok(Daemon::spawn(sandbox, &format!("kube-proxy-{mode}"), Placement::Unhooked, command))
    }
}

/// A directory with the commands of legacy iptables. With Debian 12's iptables for nftables, kube-proxy does not get
/// 5,000 Services into the kernel within minutes.
fn legacy_iptables(sandbox: &Sandbox) -> Result<PathBuf> {
    let dir = sandbox.dir().join("legacy");
    std::fs::create_dir_all(&dir).context("writing into the sandbox")?;
    for name in ["iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"] {
        let link = dir.join(name);
        if !link.exists() {
            symlink(LEGACY_IPTABLES, &link).context("writing into the sandbox")?;
        }
    }
    Ok(dir)
}

/// Time for which IPVS remembers an idle connection; default: 15 minutes.
const IPVS_TCP_TIMEOUT: &str = "3s";

/// A configuration without effect beyond the network namespace: sysctls of the whole machine stay as they are.
fn configuration(kubeconfig: &Value, mode: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "hostnameOverride": NODE,
        "mode": mode,
        // Clients count as pods, whose connections to ClusterIPs are not masqueraded.
        "clusterCIDR": NEIGHBOURS_CIDR,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
        "ipvs": {"tcpTimeout": IPVS_TCP_TIMEOUT},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}
