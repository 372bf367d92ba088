//! kube-proxy as it is deployed, with its defaults.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};
use cproxy_tests::control_plane::{ControlPlane, NODE};
use cproxy_tests::process::Daemon;
use cproxy_tests::sandbox::{Netns, Placement, Sandbox};
use serde_json::{Value, json};

/// Starts it in a network namespace of its own.
pub(crate) fn spawn(sandbox: &Sandbox, control_plane: &ControlPlane<'_>, netns: &Netns, mode: &str) -> Result<Daemon> {
    let file = sandbox.dir().join("kube-proxy.config");
    let kubeconfig = control_plane.kubeconfig_for("system:kube-proxy");
    std::fs::write(&file, configuration(&json!(kubeconfig), mode).to_string()).context("writing into the sandbox")?;
    // Becomes kube-proxy, with the same process id.
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", netns.path().display())).arg(control_plane.binary("kube-proxy"));
    command.arg("--config").arg(file);
    if mode == "iptables" {
        let path = legacy_iptables(sandbox)?.into_os_string().into_string().ok().context("a path that is no text")?;
        command.env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap_or_default()));
    }
    Ok(Daemon::spawn(sandbox, "kube-proxy", Placement::Unhooked, command))
}

/// A directory with the commands of the iptables that writes iptables' rules, not nftables': with that one of Debian 12,
/// kube-proxy does not get 5,000 Services into the kernel within minutes.
fn legacy_iptables(sandbox: &Sandbox) -> Result<PathBuf> {
    const PROGRAM: &str = "/usr/sbin/xtables-legacy-multi";
    let dir = sandbox.dir().join("legacy");
    std::fs::create_dir_all(&dir).context("writing into the sandbox")?;
    for name in ["iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"] {
        let link = dir.join(name);
        if !link.exists() {
            symlink(PROGRAM, &link).context("writing into the sandbox")?;
        }
    }
    Ok(dir)
}

/// Nothing of it reaches beyond its network namespace: sysctls of the whole machine stay as they are.
fn configuration(kubeconfig: &Value, mode: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "hostnameOverride": NODE,
        "mode": mode,
        "clusterCIDR": "10.128.0.0/9",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}
