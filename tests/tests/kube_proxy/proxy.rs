//! kube-proxy in nftables mode, inside the sandbox, and its rules.

use std::{process::Command, time::Duration};

use cproxy_tests::{
    control_plane::ControlPlane,
    kube_proxy,
    process::{Daemon, run},
    sandbox::{Placement, Sandbox},
};

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
    kube_proxy::spawn(sandbox, control_plane, &control_plane.kubeconfig_for("system:kube-proxy"))
}

fn list(sandbox: &Sandbox) -> Ruleset {
    let mut command = Command::new("nft");
    command.args(["--json", "list", "ruleset"]);
    Ruleset::parse(&run(sandbox, Placement::Unhooked, command, "", NFT_TIMEOUT).json())
}
