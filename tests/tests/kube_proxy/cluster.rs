//! A control plane with a node, and both proxies.

use std::time::Duration;

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    kube_proxy::KubeProxy,
    manifest,
    process::{Agent, RunningAgent, cproxy},
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    api::Objects,
    frontends::{Frontend, Outcome, Rows, rows},
    marker::Marker,
    ruleset::Ruleset,
    walk,
};

/// Addresses of the node of both proxies.
pub(crate) const NODE_IPS: [&str; 2] = ["192.0.2.10", "2001:db8::10"];

/// Address of the relay.
const RELAY: &str = "127.0.0.1:7443";

/// Possible zones of the node.
pub(crate) const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];

/// Addresses of the VM whose view is compared: a pod of that node.
pub(crate) const POD_IPS: [&str; 2] = ["10.244.255.250", "fd00:10:244::ff:250"];

/// Limit on every wait, longer than any takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Cluster<'s> {
    sandbox: &'s Sandbox,
    pub(crate) objects: Objects,
    marker: Marker,
    kube_proxy: KubeProxy<'s>,
    agent: RunningAgent,
    /// Between the API server and the agent.
    _relay: Option<RunningRelay>,
    // Dropped last, after the proxies that follow it.
    control_plane: ControlPlane<'s>,
}

/// Both proxies' results for the same objects.
pub(crate) struct View {
    pub(crate) kube_proxy: Ruleset,
    /// Rows in the kernel, written by cproxy's agent.
    pub(crate) in_kernel: Rows,
    /// Rows of `cproxy resolve`.
    pub(crate) resolved: Rows,
    pub(crate) objects: Vec<Value>,
}

impl<'s> Cluster<'s> {
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, |_| None)
    }

    /// Starts with a relay between the API server and the agent.
    pub(crate) fn start_behind_relay(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, |control_plane| {
            let relay = RelayServer::new(sandbox).kubeconfig(control_plane.admin_kubeconfig());
            Some(relay.listen(RELAY).without_authentication().start())
        })
    }

    fn start_with(sandbox: &'s Sandbox, start_relay: impl FnOnce(&ControlPlane<'_>) -> Option<RunningRelay>) -> Self {
        sandbox.add_addresses(NODE_IPS);
        let control_plane = ControlPlane::shared(sandbox);
        add_node(&control_plane);
        let marker = Marker::FIRST;
        control_plane.apply(marker.objects());
        let objects = Objects::new(&control_plane);
        let kube_proxy = KubeProxy::spawn(sandbox, &control_plane);
        let relay = start_relay(&control_plane);
        let server = if relay.is_some() { format!("http://{RELAY}") } else { control_plane.server_url() };
        let kubeconfig = control_plane.kubeconfig_at("cproxy", &server);
        let agent = Agent::new(sandbox).kubeconfig(kubeconfig).args(own_place()).start();
        let mut cluster = Self { sandbox, objects, marker, kube_proxy, agent, _relay: relay, control_plane };
        cluster.synchronise(None);
        cluster
    }

    /// Replaces the running kube-proxy by a new one. A new one may lose the first event of the node, since it listens
    /// before its handlers are registered (cmd/kube-proxy/app/server.go, `NewNodeTopologyConfig`), so the node gets its
    /// zone afterwards.
    pub(crate) fn restart_kube_proxy(&mut self, zone: Option<&str>) {
        self.objects.set_zone(None);
        self.kube_proxy.stop();
        // It takes over the rules and no other state.
        self.kube_proxy = KubeProxy::spawn(self.sandbox, &self.control_plane);
        self.synchronise(None);
        self.objects.set_zone(zone);
    }

    /// State of both proxies once they have seen everything so far, with the node in this zone.
    pub(crate) fn view(&mut self, zone: Option<&str>) -> View {
        let kube_proxy = self.synchronise(zone);
        // The agent answers between two writes only. It has answered while the marker was there, so everything before
        // the marker is also there.
        let in_kernel = in_kernel(self.sandbox);
        let objects = self.objects.list();
        let resolved = self.resolve(&objects);
        View { kube_proxy, in_kernel, resolved, objects }
    }

    /// Sends the marker through the watches of Services and of slices, each of which delivers in order, and waits for
    /// it in both proxies.
    fn synchronise(&mut self, zone: Option<&str>) -> Ruleset {
        self.marker = self.marker.next();
        self.marker.objects().iter().for_each(|object| self.objects.replace(object).unwrap());
        let expected = self.marker.expected(zone);
        let kube_proxy = Ruleset::wait(&mut self.kube_proxy, |ruleset| {
            let frontends = walk::frontends(ruleset);
            let has_arrived = |(frontend, outcome): &(Frontend, Outcome)| {
                frontends.contains(frontend) && walk::outcome(ruleset, frontend).as_ref() == Some(outcome)
            };
            expected.iter().all(has_arrived)
        });
        let sandbox = self.sandbox;
        self.agent.wait_until(PATIENCE, "cproxy's table has the marker", |_| {
            let rows = in_kernel(sandbox);
            let has_arrived = |(frontend, outcome): &(Frontend, Outcome)| {
                rows.get(frontend).is_some_and(|row| row.outcome == *outcome)
            };
            if expected.iter().all(has_arrived) { Ok(()) } else { Err("not there yet") }
        });
        kube_proxy
    }

    fn resolve(&self, objects: &[Value]) -> Rows {
        let file = manifest::write(&self.sandbox.manifest_dir(), "objects.json", objects.iter().cloned());
        let file = file.to_str().expect("the sandbox's directory is text");
        let command = ["resolve", "-o", "json", "--manifests", file].into_iter().chain(own_place());
        rows(&cproxy(self.sandbox, &command.collect::<Vec<_>>()).json())
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}

fn in_kernel(sandbox: &Sandbox) -> Rows {
    rows(&cproxy(sandbox, &["get", "services", "-o", "json"]).json())
}

/// Flags with cproxy's node and addresses.
fn own_place() -> [&'static str; 6] {
    ["--node-name", NODE, "--pod-ip", POD_IPS[0], "--pod-ip", POD_IPS[1]]
}

/// Creates the node, without a zone, and the namespace of half of the Services.
pub(crate) fn add_node(control_plane: &ControlPlane<'_>) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}});
    control_plane.apply([manifest::node(NODE, ""), namespace]);
    let status = manifest::node_status(NODE_IPS).to_string();
    control_plane.kubectl(&["patch", "node", NODE, "--subresource=status", "--type=merge", "-p", &status], "");
}
