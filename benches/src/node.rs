//! The node of all peers.

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    manifest,
    sandbox::Sandbox,
};

/// Its own address.
const NODE_IP: &str = "192.0.2.10";

/// Creates the Node. Without one kube-proxy waits for half a minute.
pub fn create(sandbox: &Sandbox, control_plane: &ControlPlane<'_>) {
    sandbox.add_addresses([NODE_IP]);
    control_plane.apply([manifest::node(NODE, "zone-a")]);
    let status = manifest::node_status([NODE_IP]).to_string();
    control_plane.kubectl(&["patch", "node", NODE, "--subresource=status", "--type=merge", "-p", &status], "");
}
