//! The controllers and the scheduler of Kubernetes, for control planes whose pods run.

use std::process::Command;

use crate::{
    control_plane::ControlPlane,
    guest::path_from_env,
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

/// Variable with the directory of the programs.
const VARIABLE: &str = "CPROXY_CONTROLLERS";

/// Starts them. They run until they are dropped.
///
/// # Panics
/// When the variable is not set.
pub fn start(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) -> [Daemon; 2] {
    ["kube-controller-manager", "kube-scheduler"].map(|name| {
        let mut command = Command::new(path_from_env(VARIABLE, "cargo xtask test --long fleet").join(name));
        command.arg("--kubeconfig").arg(control_plane.kubeconfig_for(&format!("system:{name}")));
        command.args(["--leader-elect=false", "--bind-address=127.0.0.1"]);
        if name == "kube-controller-manager" {
            // Each controller with its own account, which Kubernetes grants its rights.
            command.arg("--use-service-account-credentials");
            command.arg("--service-account-private-key-file").arg(control_plane.account_key_file());
            command.arg("--root-ca-file").arg(control_plane.ca_file());
        }
        Daemon::spawn(sandbox, name, Placement::Unhooked, command)
    })
}
